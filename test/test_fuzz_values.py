"""Random arguments, arrays, messages and requests give a consistent result or one sentence."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

pytest.importorskip('hypothesis')

from hypothesis import given
from hypothesis import strategies as st
from models import write_random_model
from wild import arrays, damaged, examples, numbers, values

from kp2d_core import Features, KeypointDetector, Tracker, match
from kp2d_core.camera import Camera
from kp2d_core.cli import main
from kp2d_core.errors import FileError
from kp2d_core.features import select, suppress_neighbours
from kp2d_core.odometry import Odometry
from kp2d_core.verification import VERIFICATIONS

pytestmark = pytest.mark.filterwarnings('error::RuntimeWarning')


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp('models'))


@pytest.fixture(scope='module')
def detector(model):
    return KeypointDetector.load(model, runtime='onnxruntime', threads=1)


@pytest.fixture(scope='module')
def here(tmp_path_factory, photographs):
    folder = tmp_path_factory.mktemp('here')
    cv2.imwrite(str(folder / 'a.png'), photographs['coffee'][:48, :64])
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


@st.composite
def features(draw, length: int = 8) -> Features:
    count = draw(st.integers(0, 40))
    return Features(
        draw(arrays((count, 2))),
        draw(arrays((count,))),
        draw(arrays((count, draw(st.sampled_from([length, length, length, 3]))))),
        draw(st.sampled_from([(0, 0), (100, 80)])),
    )


@examples(50)
@given(
    features(), features(), st.booleans(), st.one_of(st.none(), numbers),
    st.one_of(st.none(), numbers), st.one_of(st.none(), numbers),
    st.one_of(st.sampled_from(VERIFICATIONS), st.text(max_size=4)), numbers, st.data(),
)  # fmt: skip
def test_matching(first, second, mutual, ratio, distance, radius, verification, threshold, data):
    predicted = data.draw(st.one_of(st.none(), arrays((len(first), 2)), arrays((2, 2))))
    intrinsics = data.draw(st.one_of(st.none(), arrays((3, 3)), st.just(np.diag([50, 50, 1.0]))))
    try:
        with np.errstate(all='ignore'):
            found = match(
                first, second, mutual=mutual, max_ratio=ratio, max_distance=distance,
                radius=radius, predicted=predicted, verification=verification,
                threshold=threshold, intrinsics=intrinsics,
            )  # fmt: skip
    except ValueError as error:
        assert len(str(error)) < 400
        return
    assert found.indices.shape == (len(found), 2) and found.inliers.shape == (len(found),)
    if len(found):
        assert found.indices.min() >= 0
        assert found.indices[:, 0].max() < len(first) and found.indices[:, 1].max() < len(second)
    if mutual:
        assert len(set(found.indices[:, 1].tolist())) == len(found)


@examples(60)
@given(features(), st.floats(), st.integers(1, 50), st.floats(0, 256))
def test_selection(found, threshold, most, radius):
    kept = select(found, max_keypoints=most, score_threshold=threshold, nms_radius=radius)
    assert len(kept) <= min(most, len(found))
    points = np.nan_to_num(found.keypoints.astype(np.float32))
    stays = suppress_neighbours(points, radius) if radius else np.ones(len(points), bool)
    assert len(points) == 0 or stays[0]


@examples(30)
@given(st.lists(features(), max_size=5))
def test_tracks(frames):
    tracker = Tracker()
    seen: set[int] = set()
    for frame in frames:
        try:
            with np.errstate(all='ignore'):
                tracks = tracker.update(frame)
        except ValueError:
            tracker.reset()
            continue
        assert len(tracks) == len(frame) == len(set(tracks.ids.tolist()))
        assert all(age > 0 for number, age in zip(tracks.ids, tracks.ages, strict=True)
                   if number in seen)  # fmt: skip
        seen |= set(tracks.ids.tolist())


@examples(60)
@given(
    st.dictionaries(
        st.sampled_from(['working_size', 'scales', 'max_keypoints', 'score_threshold',
                         'nms_radius', 'mask']),
        st.one_of(values, st.integers(20, 80), st.tuples(st.integers(20, 80), st.integers(20, 80)),
                  arrays((48, 64)), st.lists(st.floats(0.1, 2), min_size=1, max_size=3)),
        max_size=3,
    )
)  # fmt: skip
def test_options_of_detect(detector, photographs, options):
    image = photographs['coffee'][:48, :64]
    try:
        found = detector.detect(image, **options)
    except ValueError as error:
        assert len(str(error)) < 400
        return
    assert found.keypoints.shape == (len(found), 2) and len(found.descriptors) == len(found)
    assert np.isfinite(found.keypoints).all() and found.image_size == (64, 48)


@examples(60)
@given(
    st.one_of(
        values,
        st.tuples(st.integers(0, 40), st.integers(0, 40)).flatmap(arrays),
        st.tuples(st.integers(20, 40), st.integers(20, 40), st.integers(0, 5)).flatmap(arrays),
    )
)
def test_images_for_detect(detector, image):
    try:
        found = detector.detect(image)
    except (ValueError, FileError) as error:
        assert len(str(error)) < 400
        return
    for each in found if isinstance(found, list) else [found]:
        assert np.isfinite(each.keypoints).all()


WORDS = st.one_of(
    numbers.map(str),
    st.text(max_size=12),
    st.sampled_from(['a.png', 'nowhere', '0x0', '64x48', '9x9', '-1', '1e400', 'none', '.', '/',
                     'x' * 5000, '99999999999999999999', '1,0.5', '\x00', 'auto', 'int8', '--']),
)  # fmt: skip
OPTIONS = {
    'extract': ['--size', '--scales', '--max-keypoints', '--score-threshold', '--nms-radius',
                '--threads', '--precision', '--runtime', '--model', '-o'],
    'match': ['--max-ratio', '--max-distance', '--verification', '--threshold', '--size', '-o'],
    'info': [],
    'import-checkpoint': ['-o', '--variant'],
    'export': ['--size', '--top-k', '--batch', '--precision', '--calibrate', '-o', '--engines'],
    'evaluate': ['--data', '--shift', '--robustness', '--motion', '--size', '--top-k', '--seeds',
                 '--gaps', '--model', '--baselines', '--json', '--html', '--nms-radius'],
    'make-sequences': ['--size', '--seed', '-o'],
    'train-words': ['--data', '--words', '--seed', '--model', '-o'],
    'train': ['--minutes', '--seed', '--steps', '--every', '--config', '--val', '--init'],
}  # fmt: skip


@examples(25)
@given(st.data())
def test_command_lines(here, model, capfd, data):
    command = data.draw(st.sampled_from(sorted(OPTIONS)))
    arguments = [command]
    if command in ('extract', 'match'):
        arguments += ['a.png', '--model', str(model), '--runtime', 'onnxruntime', '-o', 'out.png']
    if command == 'train':
        arguments += ['--data', 'nowhere']
    for option in data.draw(st.lists(st.sampled_from(OPTIONS[command] or ['']), max_size=3)):
        arguments += [option, data.draw(WORDS)] if option else []
    places = WORDS.filter(lambda word: not word.startswith('-'))
    arguments += data.draw(st.lists(places, max_size=2))
    if '/' in arguments or '.' in arguments:
        return  # searched for images, which takes long
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    told = capfd.readouterr().err
    assert code in (0, 1, 2), told
    assert 'Traceback' not in told and 'fault of kp2d' not in told, told


def test_requests_to_the_live_page():
    pytest.importorskip('rclpy')
    from kp2d_ros.demo.live_page import LivePage

    page = LivePage()
    port = int(page.address.split(':')[2].strip('/'))
    usual = b'GET /figures.json HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n'

    def answer(request: bytes) -> bytes:
        with socket.create_connection(('127.0.0.1', port), 5) as connection:
            connection.settimeout(5)
            try:
                connection.sendall(request + b'\r\n\r\n')
                connection.shutdown(socket.SHUT_WR)
                return connection.recv(4096)
            except ConnectionError:
                return b''

    @examples(40)
    @given(st.one_of(damaged(usual), st.binary(max_size=300)))
    def ask(request):
        answer(request)

    try:
        ask()
        assert b'200 OK' in answer(usual)
    finally:
        page.close()


def test_clouds():
    pytest.importorskip('rclpy')
    from sensor_msgs.msg import PointCloud2, PointField

    from kp2d_ros.clouds import read_points
    from kp2d_ros.messages import keypoints_from_cloud, matches_from_cloud

    names = ['x', 'y', 'z', 'u', 'v', 'score', 'scale', 'sigma', 'track_id', 'track_age',
             'descriptor']  # fmt: skip
    small = st.one_of(st.integers(0, 40), st.integers(0, 2**32 - 1))
    field = st.builds(
        PointField, name=st.one_of(st.sampled_from(names), st.text(max_size=5)),
        offset=small, datatype=st.integers(0, 255), count=small,
    )  # fmt: skip

    @examples(60)
    @given(
        st.lists(field, max_size=4), small, small, small, small, st.binary(max_size=400),
        st.booleans(),
    )  # fmt: skip
    def read(fields, width, height, point_step, row_step, data, big):
        cloud = PointCloud2(
            fields=fields, width=width, height=height, point_step=point_step, row_step=row_step,
            is_bigendian=big,
        )  # fmt: skip
        cloud.data = data
        for reader in (read_points, keypoints_from_cloud, matches_from_cloud):
            try:
                reader(cloud)
            except ValueError as error:
                assert len(str(error)) < 400

    read()


@examples(40)
@given(
    k=st.lists(numbers, min_size=9, max_size=9),
    d=st.lists(numbers, max_size=14),
    model=st.one_of(st.sampled_from(['plumb_bob', 'equidistant', 'rational_polynomial', '']),
                    st.text(max_size=5)),
    points=arrays((5, 2)),
)  # fmt: skip
def test_cameras(k, d, model, points):
    try:
        camera = Camera.create((64, 48), k, d, model)
    except ValueError:
        return
    with np.errstate(all='ignore'):
        camera.rays(points.astype(np.float64))
        camera.undistort(points.astype(np.float32))


SCENE = np.random.default_rng(0).uniform([-3, -3, 3], [3, 3, 9], (300, 3))
SIGNS = np.random.default_rng(1).normal(size=(300, 16)).astype(np.float32)
SIGNS /= np.linalg.norm(SIGNS, axis=1, keepdims=True)
WILD = {
    'usual': lambda f: f,
    'nothing': lambda f: f[:0],
    'few': lambda f: f[:6],
    'one place': lambda f: replace(f, keypoints=np.zeros_like(f.keypoints)),
    'no place': lambda f: replace(f, keypoints=np.full_like(f.keypoints, np.nan)),
    'far': lambda f: replace(f, keypoints=f.keypoints * np.float32(1e6)),
    'mirrored': lambda f: replace(f, keypoints=f.keypoints[::-1].copy()),
    'one sign': lambda f: replace(f, descriptors=np.repeat(f.descriptors[:1], len(f), axis=0)),
    'no sign': lambda f: replace(f, descriptors=np.full_like(f.descriptors, np.nan)),
    'short': lambda f: replace(f, descriptors=f.descriptors[:, :8]),
    'bytes': lambda f: replace(f, descriptors=np.rint(f.descriptors * 127).astype(np.int8)),
    'sure': lambda f: replace(f, sigma=np.zeros(len(f), np.float32)),
    'unsure': lambda f: replace(f, sigma=np.full(len(f), np.nan, np.float32)),
}


def seen_at(time: float) -> Features:
    """The features of a camera that passes a scene."""
    points = SCENE - [0.15 * time, 0, 0.05 * time]
    pixels = points[:, :2] / points[:, 2:] * 500 + [320, 240]
    inside = (np.abs(pixels - [320, 240]) < [320, 240]).all(axis=1)
    count = int(inside.sum())
    return Features(
        pixels[inside].astype(np.float32), np.ones(count, np.float32), SIGNS[inside], (640, 480)
    )


@examples(3)
@given(
    st.lists(st.sampled_from(['usual'] * 12 + sorted(WILD)), min_size=12, max_size=25),
    st.lists(numbers, max_size=2),
)
def test_odometry(kinds, stamps):
    odometry = Odometry(Camera.create((640, 480), [500, 0, 320, 0, 500, 240, 0, 0, 1]))
    for time, kind in enumerate(kinds):
        try:
            with np.errstate(all='ignore'):
                estimate = odometry.update(WILD[kind](seen_at(time)), 0.1 * time)
        except ValueError as error:
            assert 'descriptors' in str(error)
            continue
        assert estimate.pose is None or np.isfinite(estimate.pose).all()
    for stamp in stamps:
        try:
            odometry.update(seen_at(0), stamp)
        except ValueError as error:
            assert 'stamp' in str(error)
    odometry.finish()
    times, poses = odometry.trajectory()
    assert np.isfinite(times).all() and np.isfinite(poses).all()


def test_the_usual_works(detector, here, model, photographs):
    """Otherwise the tests above would pass if everything were refused."""
    assert main(['match', 'a.png', 'a.png', '--model', str(model), '-o', 'm.png']) == 0
    found = detector.detect(photographs['coffee'][:48, :64])
    assert len(match(found, found, verification='homography')) == len(found) > 0
