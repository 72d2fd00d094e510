"""The camera node and its sources: a folder, a video, a bag, a moving view."""

import time
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

pytest.importorskip('rclpy')

from robot import Process, Robot, new_domain
from sensor_msgs.msg import CameraInfo, CompressedImage, Image

from kp2d_core.camera import Info, Region, read_calibration, read_out
from kp2d_core.errors import FileError
from kp2d_core.images import decode
from kp2d_core.views.worlds import room_path
from kp2d_ros.camera.moving_view import (
    MovingCamera,
    MovingView,
    default_photograph,
    drawn_photograph,
)
from kp2d_ros.camera.sources import Bag, Damage, open_source

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


def write_bag(
    path: Path,
    pictures: list[np.ndarray],
    damaged: int = -1,
    topic: str = '/front/image_raw',
) -> Path:
    """Ten a second, from RGB or gray, with a calibration; one may be cut short."""
    rosbags = pytest.importorskip('rosbags.rosbag2')
    from rosbags.typesys import Stores, get_typestore

    store = get_typestore(Stores.ROS2_JAZZY)
    types = store.types
    with rosbags.Writer(path, version=9) as writer:
        kind, info_kind = 'sensor_msgs/msg/Image', 'sensor_msgs/msg/CameraInfo'
        images = writer.add_connection(topic, kind, typestore=store)
        infos = writer.add_connection('/front/camera_info', info_kind, typestore=store)
        for number, picture in enumerate(pictures):
            stamp = types['builtin_interfaces/msg/Time'](sec=number, nanosec=0)
            header = types['std_msgs/msg/Header'](stamp=stamp, frame_id='front')
            roi = types['sensor_msgs/msg/RegionOfInterest'](0, 0, 0, 0, False)
            k = np.array([150.0, 0, 80, 0, 150, 60, 0, 0, 1])
            p = np.array([140.0, 0, 79.5, -14, 0, 140, 59.5, 0, 0, 0, 1, 0])
            info = types[info_kind](
                header, 120, 160, 'plumb_bob', np.zeros(5), k, np.eye(3).ravel(), p, 0, 0, roi,
            )  # fmt: skip
            writer.write(infos, number * 10**8, store.serialize_cdr(info, info_kind))
            encoding = 'mono8' if picture.ndim == 2 else 'bgr8'
            data = np.ascontiguousarray(picture if picture.ndim == 2 else picture[..., ::-1])
            data = data.ravel()[: 100 if number == damaged else None]
            image = types[kind](
                header, 120, 160, encoding, 0, 160 if picture.ndim == 2 else 480, data
            )
            writer.write(images, number * 10**8, store.serialize_cdr(image, kind))
    return path


@pytest.fixture
def bag(tmp_path, pictures) -> Path:
    return write_bag(tmp_path / 'bag', pictures, damaged=3)


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
    with pytest.raises(FileError, match='no images on /rear, only on /front/image_raw'):
        open_source(str(bag), topic='/rear')


def write_times(path: Path, **times: list[float]) -> str:
    """A ROS 1 bag of empty messages at these seconds: of two cameras on a topic, and others."""
    rosbag1 = pytest.importorskip('rosbags.rosbag1')
    from rosbags.typesys import Stores, get_typestore

    store = get_typestore(Stores.ROS1_NOETIC)
    with rosbag1.Writer(path) as writer:
        kinds = {
            'first': ('/image', 'sensor_msgs/msg/Image'),
            'second': ('/image', 'sensor_msgs/msg/Image'),
            'other': ('/tf', 'std_msgs/msg/String'),
        }
        for name, values in times.items():
            topic, kind = kinds[name]
            connection = writer.add_connection(topic, kind, typestore=store, callerid=f'/{name}')
            for value in values:
                writer.write(connection, round(value * 1e9), b'')
    return str(path)


def test_rate_of_a_bag_is_that_of_its_images(tmp_path):
    for number, (times, rate) in enumerate([
        ({'first': [5.0, 5.1, 5.2, 5.3], 'other': [1.0, 20.0]}, 10.0),
        ({'first': [5.0, 5.2, 5.4], 'second': [5.1, 5.3]}, 10.0),
        ({'first': [*np.arange(1, 21, 0.05), 500.0]}, 20.0),  # then a pause
        ({'first': [5.0], 'other': [1.0, 20.0]}, 0.0),
        ({'first': [5.0, 5.0, 5.0]}, 0.0),
        ({'first': [5.0, 5.0 + 1e-6]}, 240.0),
    ]):  # fmt: skip
        source = open_source(write_times(tmp_path / f'{number}.bag', **times))
        assert source.rate == pytest.approx(rate), times


def test_bag_that_is_damaged_in_the_middle(tmp_path, pictures):
    """What a robot that lost its power leaves: pages of zeros, of ones, of anything."""
    file = write_bag(tmp_path / 'bag', pictures * 4) / 'bag.db3'
    data = bytearray(file.read_bytes())
    for page in range(len(data) // 2 & -4096, len(data) * 6 // 10, 4096):
        if data[page] == 0:  # of a message that fills several pages, not of the index
            data[page : page + 4] = b'\xff' * 4
    file.write_bytes(data)
    for path in (file, file.parent):
        source = open_source(str(path))
        assert source.rate == pytest.approx(10)
        for _ in range(2):
            *found, last = source.pictures()
            assert 8 <= len(found) <= 11
            np.testing.assert_array_equal(found[7].image, pictures[2])
            assert isinstance(last, Damage) and 'is damaged, only its first part is used: ' in last


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


def test_the_camera_in_the_room_sees_depth_as_its_calibration_says():
    source = open_source('', size=SIZE)
    assert isinstance(source, MovingCamera) and isinstance(open_source('scene'), MovingCamera)
    pictures = [picture for _, picture in zip(range(9), source.pictures(), strict=False)]
    k = np.array(pictures[0].info.k).reshape(3, 3)
    first, depth = source.scene.view_with_depth(source.camera, source.poses[0])
    np.testing.assert_array_equal(first, pictures[0].image)
    y, x = np.mgrid[10:110:3, 10:150:3].reshape(2, -1)
    points = np.linalg.inv(k) @ np.stack([x, y, np.ones_like(x)]) * depth[y, x]
    to_last = np.linalg.inv(source.poses[8]) @ source.poses[0]
    seen = k @ (to_last[:3, :3] @ points + to_last[:3, 3:])
    u, v = np.rint(seen[:2] / seen[2]).astype(int)
    inside = (u >= 0) & (v >= 0) & (u < SIZE[0]) & (v < SIZE[1])
    assert inside.mean() > 0.8
    error = np.abs(pictures[8].image[v[inside], u[inside]].astype(int) - first[y, x][inside])
    assert np.median(error) < 6
    assert depth.max() > 2 * depth.min()  # no plane
    np.testing.assert_allclose(source.poses[0], room_path(source.PERIOD + 1)[-1], atol=1e-9)


def test_there_is_always_a_photograph():
    assert default_photograph().ndim == 3
    np.testing.assert_array_equal(drawn_photograph(), drawn_photograph())


def write_calibration(file: Path) -> Path:
    file.write_text(
        'image_width: 160\nimage_height: 120\ncamera_name: c\n'
        'camera_matrix: {rows: 3, cols: 3, data: [150, 0, 80, 0, 151, 60, 0, 0, 1]}\n'
        'distortion_model: plumb_bob\n'
        'distortion_coefficients: {rows: 1, cols: 5, data: [-0.1, 0.01, 0, 0, 0]}\n'
        'rectification_matrix: {rows: 3, cols: 3, data: [1, 0, 0, 0, 1, 0, 0, 0, 1]}\n'
        'projection_matrix: {rows: 3, cols: 4, data: [150, 0, 80, 0, 0, 151, 60, 0, 0, 0, 1, 0]}\n'
    )
    return file


def test_calibration_files(tmp_path):
    file = write_calibration(tmp_path / 'camera.yaml')
    info = read_calibration(file)
    assert (info.width, info.height, info.k[4], info.d[0]) == (160, 120, 151.0, -0.1)
    file.write_text(file.read_text().replace('[150, 0, 80, 0, 151', '[150, 0, 80, 151'))
    with pytest.raises(FileError, match='camera_matrix has 8 values, not 9'):
        read_calibration(file)
    with pytest.raises(FileError, match='cannot read'):
        read_calibration(tmp_path / 'absent.yaml')


def camera(log: Path, domain: int, **values: object) -> Process:
    given = [part for name, value in values.items() for part in ('-p', f'{name}:={value}')]
    return Process(log, '-m', 'kp2d_ros.camera.camera_node', '--ros-args', *given, domain=domain)


def test_node_publishes_a_folder_in_order(tmp_path, folder, pictures):
    domain = new_domain()
    robot = Robot(domain)
    try:
        with camera(
            tmp_path / 'log', domain, source=folder, rate=10.0, frame_id='front', encoding='bgr8'
        ) as node:
            images = robot.listen(Image, '/camera/image_raw')
            infos = robot.listen(CameraInfo, '/camera/camera_info')
            compressed = robot.listen(CompressedImage, '/camera/image_raw/compressed')
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


def test_node_resizes_gray_pictures_with_their_calibration(tmp_path, pictures):
    source = write_bag(tmp_path / 'bag', [picture[..., 1] for picture in pictures])
    values = {'source': source, 'encoding': 'mono8', 'width': 80, 'height': 30}
    domain = new_domain()
    robot = Robot(domain)
    try:
        with camera(tmp_path / 'log', domain, **values):
            infos = robot.listen(CameraInfo, '/camera/camera_info')
            compressed = robot.listen(CompressedImage, '/camera/image_raw/compressed')
            robot.wait(lambda: infos and compressed, 'pictures')
            info = infos[0]
            assert (info.width, info.height, info.distortion_model) == (80, 30, 'plumb_bob')
            assert list(info.k) == [75, 0, 80.5 / 2 - 0.5, 0, 37.5, 60.5 / 4 - 0.5, 0, 0, 1]
            assert list(info.p) == [70, 0, 39.5, -7, 0, 35, 14.5, 0, 0, 0, 1, 0]
            assert compressed[0].format == 'mono8; jpeg compressed mono8'
            jpeg = np.frombuffer(compressed[0].data, np.uint8)
            assert cv2.imdecode(jpeg, cv2.IMREAD_UNCHANGED).shape == (30, 80)
    finally:
        robot.close()


def test_a_calibration_follows_the_region_that_is_read_out(pictures):
    """A quarter of the sensor, from its middle, in pixels as they are; and binned."""
    k, p = (900.0, 0, 640, 0, 900, 480, 0, 0, 1), (800.0, 0, 600, 0, 0, 800, 400, 0, 0, 0, 1, 0)
    whole = Info(1280, 960, k, p=p, roi=Region(320, 240, 640, 480))
    assert read_out(whole) == Info(
        640, 480, (900.0, 0, 320, 0, 900, 240, 0, 0, 1),
        p=(800.0, 0, 280, 0, 0, 800, 160, 0, 0, 0, 1, 0),
    )  # fmt: skip
    binned = read_out(replace(whole, binning_x=2, binning_y=2))
    assert (binned.width, binned.height) == (320, 240)
    assert binned.k[:3] == (450, 0, 320.5 / 2 - 0.5)


def test_rectified_pictures_of_a_bag_are_published_as_such(tmp_path, pictures):
    path = write_bag(tmp_path / 'bag', pictures, topic='/front/image_rect_color')
    picture = next(Bag(path).pictures())
    assert picture.info.k == (140.0, 0, 79.5, 0, 140, 59.5, 0, 0, 1)
    assert picture.info.d == () and picture.info.distortion_model == 'none'


def test_node_ends_where_there_is_no_usable_picture(tmp_path, pictures):
    source = write_bag(tmp_path / 'bag', pictures[:1], damaged=0)
    with camera(tmp_path / 'log', new_domain(), source=source, rate=50.0) as node:
        assert node.process.wait(30) == 1
        assert 'has no usable picture' in node.output


def test_node_scales_a_calibration_or_says_why_not(tmp_path, folder, pictures):
    calibration = write_calibration(tmp_path / 'camera.yaml')  # 160x120
    half, wide = tmp_path / 'half', tmp_path / 'wide'
    for path, size in ((half, (80, 60)), (wide, (160, 90))):
        path.mkdir()
        cv2.imwrite(str(path / '0.png'), cv2.resize(pictures[0], size))
    domain = new_domain()
    robot = Robot(domain)
    try:
        for number, (source, size, k, word) in enumerate([
            (folder, {'width': 80, 'height': 60}, [75, 0, 39.75, 0, 75.5, 29.75, 0, 0, 1], ''),
            (half, {}, [75, 0, 39.75, 0, 75.5, 29.75, 0, 0, 1], 'have 80x60: it is scaled'),
            (wide, {}, [0] * 9, 'is for 160x120 pixels, the pictures have 160x90'),
        ]):  # fmt: skip
            values = {'source': source, 'calibration': calibration, 'frame_id': f'f{number}'}
            with camera(tmp_path / f'log{number}', domain, **values, **size) as node:
                infos = robot.listen(CameraInfo, '/camera/camera_info')
                mine = robot.wait(
                    lambda heard=infos, name=values['frame_id']: [
                        info for info in heard if info.header.frame_id == name
                    ][3:],
                    'several pictures',
                )
                assert list(mine[0].k) == k
                assert mine[0].height == (90 if source == wide else 60)
                node.stop()
                assert node.output.count('the calibration is for') == bool(word)
                assert word in node.output
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
