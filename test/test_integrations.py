"""Adapters for other SLAM systems, by contract: the bytes and layouts that those read."""

import importlib.util
import struct
import zlib
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from conftest import ROOT

pytest.importorskip('rclpy')

from robot import Process
from sensor_msgs.msg import CameraInfo, Image, PointCloud, PointCloud2
from std_msgs.msg import Header

from kp2d_core import KeypointDetector
from kp2d_core.features import Features
from kp2d_core.tracking import Tracks
from kp2d_ros.clouds import bytes_of
from kp2d_ros.integrations import rtabmap, rtabmap_node, vins_node
from kp2d_ros.messages import keypoints_from_cloud, keypoints_to_cloud
from kp2d_ros.odometry.outputs import time_of
from kp2d_ros.outputs import NO_TRACK
from kp2d_ros.startup import NODES


@pytest.fixture
def random():
    return np.random.default_rng(0)


def features_of(random, count: int = 50, size: int = 8) -> Features:
    pixels = random.uniform(0, 100, (count, 2)).astype(np.float32)
    scores = np.sort(random.uniform(0, 1, count).astype(np.float32))[::-1]
    descriptors = random.normal(size=(count, size)).astype(np.float32)
    descriptors /= np.linalg.norm(descriptors, axis=1, keepdims=True)
    return Features(pixels, scores, descriptors, (100, 100))


def tracks_of(ids, ages) -> Tracks:
    return SimpleNamespace(ids=np.array(ids, np.int64), ages=np.array(ages, np.int64))


# RTAB-Map's Python detector


def test_rtabmap_detector_script(photographs, monkeypatch):
    """As PyDetector calls it: a gray image in; a tuple of two float32 arrays, read by pointer."""
    monkeypatch.setenv('KP2D_MODEL', 'small')
    monkeypatch.setenv('KP2D_MAX_KEYPOINTS', '300')
    path = ROOT / 'integrations' / 'rtabmap_detector.py'
    spec = importlib.util.spec_from_file_location('rtabmap_detector', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert '.' not in path.stem  # RTAB-Map imports what stands before the first dot
    module.init(0)
    gray = cv2.cvtColor(photographs['astronaut'][:240, :320], cv2.COLOR_RGB2GRAY)
    result = module.detect(gray)
    assert type(result) is tuple and len(result) == 2
    points, descriptors = result
    count = len(points)
    assert 280 <= count <= 300
    assert points.shape == (count, 3)
    assert descriptors.shape == (count, 128)
    for array in result:
        assert array.dtype == np.float32
        assert array.flags.c_contiguous
    detector = KeypointDetector.load('small', runtime='onnxruntime')
    expected = detector.detect(
        cv2.cvtColor(gray, cv2.COLOR_GRAY2RGB), max_keypoints=300, nms_radius=3
    )
    assert np.allclose(points[:, :2], expected.keypoints, atol=1e-3)
    assert np.allclose(points[:, 2], expected.scores, atol=1e-5)
    assert np.allclose(descriptors, expected.descriptors, atol=1e-4)


# RTAB-Map's messages


def test_rtabmap_matrix_bytes(random):
    """zlib of the rows, then rows, columns and OpenCV's CV_32F as little-endian int32."""
    rows = random.normal(size=(7, 5)).astype(np.float32)
    data = rtabmap.pack_matrix(rows)
    assert struct.unpack('<iii', data[-12:]) == (7, 5, 5)
    assert zlib.decompress(data[:-12]) == rows.tobytes()
    assert np.array_equal(rtabmap.unpack_matrix(data), rows)
    assert np.array_equal(rtabmap.unpack_matrix(rtabmap.pack_matrix(rows[:, ::2])), rows[:, ::2])
    assert rtabmap.pack_matrix(rows[:0]) == b''


@pytest.mark.parametrize(
    'data',
    [b'short', b'x' * 30, zlib.compress(b'1234') + struct.pack('<iii', 2, 1, 5),
     zlib.compress(b'1234') + struct.pack('<iii', 1, 1, 0),
     zlib.compress(b'1234') + struct.pack('<iii', -1, 1, 5)],
)  # fmt: skip
def test_a_damaged_matrix_is_refused(data):
    with pytest.raises(ValueError, match='matrix'):
        rtabmap.unpack_matrix(data)


def test_points_in_depth():
    pixels = np.array([[1, 1], [2.4, 0.6], [0, 0], [-3, 5], [3, 1]], np.float32)
    rays = np.array([[0.1, 0.2], [0.3, 0.4], [0, 0], [0, 0], [1, 1]], np.float32)
    depth = np.array([[0, 0, 0, 0], [0, 2, 4, 50]], np.float32)
    found = rtabmap.points_in_depth(pixels, rays, depth, farthest=10.0)
    assert np.allclose(found[:2], [[0.2, 0.4, 2], [1.2, 1.6, 4]])
    assert np.isnan(found[2:]).all()
    millimetres = rtabmap.points_in_depth(pixels, rays, (depth * 1000).astype(np.uint16))
    assert np.allclose(millimetres[:2], found[:2])


class Kinds:
    """The fields of rtabmap_msgs, which no wheel has: that none is misspelt, nor one invented."""

    class KeyPoint:
        __slots__ = ('angle', 'class_id', 'octave', 'pt', 'response', 'size')

        def __init__(self):
            self.pt = Kinds.Point2f()

    class Point2f:
        __slots__ = ('x', 'y')

    class Point3f:
        __slots__ = ('x', 'y', 'z')

    class RGBDImage:
        __slots__ = (
            'depth', 'depth_camera_info', 'depth_compressed', 'descriptors', 'global_descriptor',
            'header', 'key_points', 'points', 'rgb', 'rgb_camera_info', 'rgb_compressed',
        )  # fmt: skip

        def __init__(self):
            self.key_points, self.points = [], []


def test_rgbd_image(random):
    features = features_of(random)
    header = Header(stamp=time_of(5), frame_id='camera_optical_frame')
    rays = (features.keypoints - 50) / 80
    cloud = keypoints_to_cloud(header, features, rays, descriptor_format='float32')
    rgb = Image(header=header, width=100, height=100, encoding='rgb8', step=300)
    metres = np.full((100, 103), 1.5, np.float32)  # padded rows
    depth = Image(header=header, width=100, height=100, encoding='32FC1', step=4 * 103)
    depth.data = bytes_of(metres.tobytes())
    info = CameraInfo()
    message = rtabmap_node.rgbd_image(Kinds, cloud, rgb, depth, info, 0.0)
    assert message.rgb is rgb and message.depth is depth and message.header == header
    assert len(message.key_points) == len(message.points) == len(features)
    assert [k.pt.x for k in message.key_points] == pytest.approx(features.keypoints[:, 0].tolist())
    assert [k.response for k in message.key_points] == pytest.approx(features.scores.tolist())
    inside = np.rint(features.keypoints).max(axis=1) < 100
    assert [p.z for p, on in zip(message.points, inside, strict=True) if on] == [1.5] * sum(inside)
    packed = rtabmap.unpack_matrix(bytes(message.descriptors))
    assert np.array_equal(packed, features.descriptors)
    small = Image(header=header, width=50, height=50, encoding='32FC1', step=200)
    small.data = bytes_of(np.ones((50, 50), np.float32).tobytes())
    with pytest.raises(ValueError, match='registered'):
        rtabmap_node.rgbd_image(Kinds, cloud, rgb, small, info, 0.0)
    small.encoding = '8UC1'
    with pytest.raises(ValueError, match='32FC1 or 16UC1'):
        rtabmap_node.depth_image(small)


def test_moments_are_complete_or_forgotten():
    moments = rtabmap_node.Moments()

    def message(stamp):
        return SimpleNamespace(header=Header(stamp=time_of(stamp)))

    assert moments.add('rgb', message(1)) is None
    assert moments.add('depth', message(1)) is None
    for stamp in range(2, 12):
        assert moments.add('rgb', message(stamp)) is None
    assert moments.add('keypoints', message(1)) is None  # it had to go
    assert moments.add('depth', message(11)) is None
    assert set(moments.add('keypoints', message(11))) == {'rgb', 'depth', 'keypoints'}


def test_without_rtabmap_msgs_the_node_says_so(tmp_path, domain):
    if importlib.util.find_spec('rtabmap_msgs') is not None:
        pytest.skip('rtabmap_msgs is installed')
    with Process(tmp_path / 'log', '-m', NODES['rtabmap_node'], domain=domain) as node:
        assert node.process.wait(60) == 2
        assert 'rtabmap_node needs rtabmap_msgs' in node.output
        assert 'Traceback' not in node.output


# VINS-Fusion


def test_vins_rows(random):
    velocities = vins_node.Velocities()
    features = features_of(random, 4)
    rays = np.array([[0.1, 0.2], [0.3, 0.4], [np.nan, np.nan], [0.5, 0.6]], np.float32)
    large = 2**24 + 7

    def cloud(rays, ids, ages):
        return keypoints_from_cloud(
            keypoints_to_cloud(Header(), features, rays, tracks_of(ids, ages))
        )

    first = cloud(rays, [large, 3, 4, 5], [1, 0, 3, 2])
    points, channels = vins_node.feature_rows(first, velocities, 1.0, min_age=1)
    assert channels.shape == (9, 2)  # 3 is too young, 4 has no ray
    assert channels[0].tolist() == [7, 5]  # what a float32 cannot tell apart is not sent
    assert (channels[1] == 0).all() and not channels[4:].any()
    assert np.array_equal(channels[2:4], features.keypoints[[0, 3]].T)
    assert np.allclose(points, [[0.1, 0.2, 1], [0.5, 0.6, 1]])
    assert (points[:, 2] == 1).all()  # VINS-Fusion asserts it exactly
    second = cloud(rays + np.float32([0.01, -0.02]), [large, 3, 4, 6], [2, 1, 4, 0])
    points, channels = vins_node.feature_rows(second, velocities, 1.1, min_age=1)
    assert channels[0].tolist() == [7, 3]
    assert np.allclose(channels[4:6].T, [[0.1, -0.2]] * 2, atol=1e-4)
    assert not channels[6:].any()
    points, channels = vins_node.feature_rows(second, velocities, 9.0, min_age=1)
    assert not channels[4:].any()  # after a gap
    untracked = keypoints_from_cloud(keypoints_to_cloud(Header(), features, rays))
    assert (untracked.track_ids == NO_TRACK).all()
    assert vins_node.feature_rows(untracked, velocities, 9.1, 0)[1].shape == (9, 0)


def test_vins_node_over_dds(tmp_path, robot, domain, random):
    features = features_of(random, 30)
    rays = ((features.keypoints - 50) / 80).astype(np.float32)
    with Process(tmp_path / 'log', '-m', NODES['vins_node'], domain=domain) as node:
        node.wait_for('to /feature_tracker/feature')
        heard = robot.listen(PointCloud, '/feature_tracker/feature')
        keypoints = robot.publisher(PointCloud2, '/kp2d/keypoints', 10)
        for frame in range(3):
            header = Header(stamp=time_of(10**9 + frame * 10**8), frame_id='camera')
            tracks = tracks_of(np.arange(30), [frame] * 30)
            cloud = keypoints_to_cloud(header, features, rays + np.float32(0.01 * frame), tracks)
            robot.exchange(keypoints, cloud, heard)
        first, _, last = heard[0], heard[1], heard[-1]
        assert len(first.points) == 0
        assert last.header.frame_id == 'camera'
        assert [channel.name for channel in last.channels] == list(vins_node.CHANNELS)
        assert {len(channel.values) for channel in last.channels} == {30}
        assert list(last.channels[0].values) == list(range(30))
        assert np.allclose(last.channels[4].values, 0.1, atol=1e-4)
        assert {point.z for point in last.points} == {1.0}
        assert node.stop()[0] == 0
