"""The camera node and its sources: a folder, a video, a bag, a moving view."""

import time
from pathlib import Path

import cv2
import numpy as np
import pytest

pytest.importorskip('rclpy')

from robot import Process, Robot, new_domain
from sensor_msgs.msg import CameraInfo, CompressedImage, Image

from kp2d_core.errors import FileError
from kp2d_core.image_messages import decode
from kp2d_ros.calibration import read_calibration
from kp2d_ros.moving_view import MovingView, default_photograph, drawn_photograph
from kp2d_ros.sources import Damage, open_source

SIZE = (160, 120)


@pytest.fixture(scope='module')
def pictures(photographs) -> list[np.ndarray]:
    return [photographs['coffee'][:120, 40 * n : 40 * n + 160].copy() for n in range(5)]


@pytest.fixture
def folder(tmp_path, pictures) -> Path:
    path = tmp_path / 'folder'
    path.mkdir()
    for number, picture in enumerate(pictures):
        cv2.imwrite(str(path / f'{number}.png'), picture[..., ::-1])
    return path


@pytest.fixture
def bag(tmp_path, pictures) -> Path:
    rosbags = pytest.importorskip('rosbags.rosbag2')
    from rosbags.typesys import Stores, get_typestore

    store = get_typestore(Stores.ROS2_JAZZY)
    types = store.types
    path = tmp_path / 'bag'
    with rosbags.Writer(path, version=9) as writer:
        kind, info_kind = 'sensor_msgs/msg/Image', 'sensor_msgs/msg/CameraInfo'
        images = writer.add_connection('/front/image_raw', kind, typestore=store)
        infos = writer.add_connection('/front/camera_info', info_kind, typestore=store)
        for number, picture in enumerate(pictures):
            stamp = types['builtin_interfaces/msg/Time'](sec=number, nanosec=0)
            header = types['std_msgs/msg/Header'](stamp=stamp, frame_id='front')
            roi = types['sensor_msgs/msg/RegionOfInterest'](0, 0, 0, 0, False)
            k = np.array([150.0, 0, 80, 0, 150, 60, 0, 0, 1])
            info = types[info_kind](
                header, 120, 160, 'plumb_bob', np.zeros(5), k, np.eye(3).ravel(), np.zeros(12),
                0, 0, roi,
            )  # fmt: skip
            writer.write(infos, number * 10**8, store.serialize_cdr(info, info_kind))
            data = np.ascontiguousarray(picture[..., ::-1]).ravel()
            if number == 3:
                data = data[:100]
            image = types[kind](header, 120, 160, 'bgr8', 0, 480, data)
            writer.write(images, number * 10**8, store.serialize_cdr(image, kind))
    return path


def test_folder(folder, pictures):
    (folder / '2.png').write_bytes(b'not an image')
    source = open_source(str(folder))
    for _ in range(2):
        found = list(source.pictures())
        assert [isinstance(p, Damage) for p in found] == [False, False, True, False, False]
        np.testing.assert_array_equal(found[4].image, pictures[4])
    assert '2.png is not an image' in found[2]


def test_video(tmp_path, pictures):
    path = tmp_path / 'film.avi'
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*'MJPG'), 12.0, SIZE)
    for picture in pictures:
        writer.write(picture[..., ::-1])
    writer.release()
    source = open_source(str(path))
    assert source.rate == pytest.approx(12)
    found = [picture.image for picture in source.pictures()]
    assert len(found) == 5
    for image, picture in zip(found, pictures, strict=True):
        assert np.abs(image.astype(int) - picture).mean() < 8


def test_bag(bag, pictures):
    source = open_source(str(bag))
    assert source.rate == pytest.approx(10, rel=0.01)
    found = list(source.pictures())
    assert isinstance(found[3], Damage) and 'has 100 bytes' in found[3]
    np.testing.assert_array_equal(found[4].image, pictures[4])
    assert list(found[4].info.k)[:3] == [150, 0, 80]
    assert open_source(str(bag), topic='/front/image_raw').topic == '/front/image_raw'
    with pytest.raises(FileError, match='no images on /rear, but on: /front/image_raw'):
        open_source(str(bag), topic='/rear')


def test_what_is_not_there_is_named(tmp_path):
    (tmp_path / 'text.txt').write_text('hello')
    (tmp_path / 'broken.mcap').write_bytes(b'nothing')
    for text, sentence in [
        ('/nowhere', "there is no '/nowhere'"),
        (str(tmp_path / 'text.txt'), 'is not a video'),
        (str(tmp_path / 'broken.mcap'), 'is not a readable bag'),
        ('99', 'is not a webcam'),
    ]:
        with pytest.raises(FileError, match=sentence):
            open_source(text)
    empty = tmp_path / 'empty'
    empty.mkdir()
    with pytest.raises(FileError, match='there is no image in'):
        open_source(str(empty))


def test_moving_view_is_what_its_intrinsics_say():
    """Two views differ as those of a camera with this K over a plane do."""
    view = MovingView(drawn_photograph(480, 360), SIZE)
    first, second = view.photograph_to_view(0), view.photograph_to_view(25)
    pictures = list(view.pictures())
    assert len(pictures) == view.PERIOD
    relative = second @ np.linalg.inv(first)
    moved = cv2.warpPerspective(pictures[0].image, relative, SIZE)
    inside = cv2.warpPerspective(np.ones((120, 160), np.uint8), relative, SIZE) > 0
    error = np.abs(moved.astype(int) - pictures[25].image)[inside]
    assert np.median(error) < 6
    # K^-1 H is [r1 r2 t] of a rigid pose only if K is right: r1 and r2 are orthonormal.
    k = np.array(pictures[0].info.k).reshape(3, 3)
    turn = (np.linalg.inv(k) @ second)[:, :2]
    np.testing.assert_allclose(turn.T @ turn, np.eye(2), atol=1e-9)
    loop = np.abs(view.photograph_to_view(view.PERIOD) - first).max()
    assert loop < 1e-9  # it ends where it began


def test_there_is_always_a_photograph():
    assert default_photograph().ndim == 3
    np.testing.assert_array_equal(drawn_photograph(), drawn_photograph())


def test_calibration_files(tmp_path):
    file = tmp_path / 'camera.yaml'
    file.write_text(
        'image_width: 160\nimage_height: 120\ncamera_name: c\n'
        'camera_matrix: {rows: 3, cols: 3, data: [150, 0, 80, 0, 151, 60, 0, 0, 1]}\n'
        'distortion_model: plumb_bob\n'
        'distortion_coefficients: {rows: 1, cols: 5, data: [-0.1, 0.01, 0, 0, 0]}\n'
        'rectification_matrix: {rows: 3, cols: 3, data: [1, 0, 0, 0, 1, 0, 0, 0, 1]}\n'
        'projection_matrix: {rows: 3, cols: 4, data: [150, 0, 80, 0, 0, 151, 60, 0, 0, 0, 1, 0]}\n'
    )
    info = read_calibration(file)
    assert (info.width, info.height, info.k[4], info.d[0]) == (160, 120, 151.0, -0.1)
    file.write_text(file.read_text().replace('[150, 0, 80, 0, 151', '[150, 0, 80, 151'))
    with pytest.raises(FileError, match='camera_matrix has 8 values, not 9'):
        read_calibration(file)
    with pytest.raises(FileError, match='cannot read'):
        read_calibration(tmp_path / 'absent.yaml')


def camera(log: Path, domain: int, **values: object) -> Process:
    given = [part for name, value in values.items() for part in ('-p', f'{name}:={value}')]
    return Process(log, '-m', 'kp2d_ros.camera_node', '--ros-args', *given, domain=domain)


def test_node_publishes_a_folder_in_order(tmp_path, folder, pictures):
    domain = new_domain()
    robot = Robot(domain)
    try:
        with camera(
            tmp_path / 'log', domain, source=folder, rate=10.0, frame_id='front', encoding='bgr8'
        ) as node:
            images = robot.listen(Image, '/camera/image')
            infos = robot.listen(CameraInfo, '/camera/camera_info')
            compressed = robot.listen(CompressedImage, '/camera/image/compressed')
            robot.wait(lambda: len(images) >= 12 and len(infos) >= 3 and compressed, 'images')
            assert {image.encoding for image in images} == {'bgr8'}
            numbers = [
                next(n for n, p in enumerate(pictures) if np.array_equal(decode(image), p))
                for image in images
            ]
            steps = np.diff(numbers) % 5
            assert (steps == 1).mean() > 0.7  # in order, round and round
            stamps = [m.header.stamp.sec + m.header.stamp.nanosec * 1e-9 for m in images]
            assert abs(stamps[-1] - time.time()) < 30 and (np.diff(stamps) > 0).all()
            assert infos[0].k[0] == 0 and infos[0].width == 160  # not calibrated, and says so
            assert images[0].header.frame_id == infos[0].header.frame_id == 'front'
            code, seconds = node.stop()
            assert code == 0 and seconds < 5
    finally:
        robot.close()


def test_node_ends_after_the_last_picture(tmp_path, folder):
    values = {'source': folder, 'rate': 50.0, 'loop': 'false'}
    with camera(tmp_path / 'log', new_domain(), **values) as node:
        assert node.process.wait(60) == 0


def test_node_names_what_is_wrong(tmp_path, folder):
    for number, (values, sentence) in enumerate([
        ({'source': '/nowhere'}, "there is no '/nowhere'"),
        ({'source': folder, 'encoding': 'cmyk'}, 'encoding must be one of'),
        ({'width': 160}, 'both width and height'),
        ({'rate': -1.0}, 'rate'),
    ]):  # fmt: skip
        with camera(tmp_path / f'log{number}', new_domain(), **values) as node:
            assert node.process.wait(60) == 2
            assert sentence in node.output and 'Traceback' not in node.output
