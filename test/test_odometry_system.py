"""Camera, keypoint and odometry nodes as three processes: images in, the robot's way out."""

import itertools
from importlib.util import find_spec

import numpy as np
import pytest

pytest.importorskip('nav_msgs')
pytest.importorskip('skimage')

from diagnostic_msgs.msg import DiagnosticStatus
from nav_msgs.msg import Odometry as OdometryMessage
from nav_msgs.msg import Path as PathMessage
from robot import Process, image_message, keypoint_node
from sensor_msgs.msg import CameraInfo, Image, PointCloud2
from std_srvs.srv import Trigger
from test_odometry_node import NAME, camera_poses, figures

from kp2d_core.camera import pinhole_info
from kp2d_core.odometry.trajectory import errors
from kp2d_core.views import worlds
from kp2d_core.views.worlds import room_path
from kp2d_ros.camera.moving_view import MovingCamera
from kp2d_ros.clouds import read_points
from kp2d_ros.odometry.report import SLOW
from kp2d_ros.startup import NODES

INFO = 'camera_info:=/camera/camera_info'
PLACED = 20  # poses that are compared with the truth


def node(log, name: str, domain: int, *arguments: str, **values) -> Process:
    options = (part for key, value in values.items() for part in ('-p', f'{key}:={value}'))
    return Process(log, '-m', NODES[name], '--ros-args', *arguments, *options, domain=domain)


def moment(message) -> tuple[int, int]:
    return message.header.stamp.sec, message.header.stamp.nanosec


def test_from_images_to_path_and_map(tmp_path, robot, domain):
    images = '-r', 'image:=/camera/image_raw', '-r', INFO
    with (
        keypoint_node(
            tmp_path / 'keypoints', domain, 'small', *images, runtime='auto', max_keypoints=500
        ),
        node(
            tmp_path / 'odometry', 'odometry_node', domain, '-r', INFO, queue_size=20,
            diagnostics_period=0.1, map_period=0.1, tf='all', save_folder=tmp_path / 'maps',
        ) as odometry_node,
    ):  # fmt: skip
        odometry_node.wait_for('waiting for keypoints on /kp2d/keypoints')
        heard = {
            topic: robot.listen(kind, topic, 100)
            for topic, kind in {
                '/kp2d/odometry': OdometryMessage, '/kp2d/path': PathMessage,
                '/kp2d/map_points': PointCloud2, '/kp2d/keypoints': PointCloud2,
            }.items()
        }  # fmt: skip
        infos: list[CameraInfo] = []
        robot.node.create_subscription(CameraInfo, '/camera/camera_info', infos.append, 100)
        with node(
            tmp_path / 'camera', 'camera_node', domain, source='scene', rate=12.0, width=320,
            height=240,
        ):  # fmt: skip
            odometry, path = heard['/kp2d/odometry'], heard['/kp2d/path']
            robot.wait(lambda: len(odometry) >= PLACED, 'poses')
            last = moment(odometry[-1])
            robot.wait(lambda: path and moment(path[-1]) >= last, 'the path')
            check_frames(odometry, path, heard['/kp2d/map_points'])
            check_truth(odometry, infos)
            check_transforms(robot, odometry_node)
            check_services(robot, path)
        check_overflow(robot, odometry_node, heard['/kp2d/keypoints'])


def check_frames(odometry, path, points) -> None:
    """REP 105: poses of base_link in odom; path and map in odom."""
    assert {m.header.frame_id for m in odometry} == {'odom'}
    assert {m.child_frame_id for m in odometry} == {'base_link'}
    assert {m.header.frame_id for m in [*path, *points]} == {'odom'}
    assert {pose.header.frame_id for pose in path[-1].poses} == {'odom'}
    rows = read_points(points[-1])
    assert len(rows) > 100
    assert all(np.isfinite(rows[name]).all() for name in 'xyz')


def check_truth(odometry, infos) -> None:
    """Pictures are known by their order; how many came before the first one heard is not."""
    order = {moment(info): number for number, info in enumerate(infos)}
    known = [m for m in odometry if moment(m) in order]
    numbers = np.array([order[moment(m)] for m in known])
    assert len(known) > PLACED - 8
    poses = camera_poses(known)
    truth = room_path(MovingCamera.PERIOD + 1)
    off = [errors(poses, truth[numbers + missed]) for missed in range(40)]
    best = min(off, key=lambda each: each.ate)
    way = np.linalg.norm(np.diff(truth[numbers][:, :3, 3], axis=0), axis=1).sum()
    assert best.ate < 0.03 * way
    assert best.rpe_degrees < 0.5


def check_transforms(robot, odometry_node) -> None:
    """/tf where tf2_msgs is installed; no wheel has it, and then the node says so."""
    if find_spec('tf2_msgs') is None:
        assert figures(robot)['tf'] == 'not published: tf2_msgs is not installed'
        assert 'tf2_msgs is not installed: nothing is published on /tf' in odometry_node.output
        return
    from tf2_msgs.msg import TFMessage

    heard = robot.listen(TFMessage, '/tf', 100)
    robot.wait(lambda: heard, 'transforms')
    links = {(t.header.frame_id, t.child_frame_id) for t in heard[-1].transforms}
    assert links == {('odom', 'base_link'), ('base_link', 'camera_optical_frame')}


def check_services(robot, path) -> None:
    answer = robot.call(Trigger, '/kp2d/odometry_node/save_map', Trigger.Request())
    assert answer.success, answer.message
    (trajectory,) = (part for part in answer.message.split() if part.endswith('.tum'))
    assert len(np.loadtxt(trajectory)) >= PLACED
    length = len(path[-1].poses)
    assert robot.call(Trigger, '/kp2d/odometry_node/reset', Trigger.Request()).success
    robot.wait(lambda: len(path[-1].poses) < length, 'a path that restarts')
    assert figures(robot)['reset: asked for'] == '1'


def check_overflow(robot, odometry_node, clouds) -> None:
    """Frames faster than any odometry is: a warning, on the console not for each of them."""
    assert SLOW not in odometry_node.output
    publisher = robot.publisher(PointCloud2, '/kp2d/keypoints', 10)
    frames = itertools.cycle(clouds[-10:])
    second = clouds[-1].header.stamp.sec

    def warned():
        nonlocal second
        for cloud in itertools.islice(frames, 10):
            second += 1
            cloud.header.stamp.sec = second
            publisher.publish(cloud)
        status = robot.status(NAME, fresh=False)
        return status if SLOW in status.message else None

    assert robot.wait(warned, 'the warning').level == DiagnosticStatus.WARN
    dropped = int(figures(robot)['frames dropped'])
    assert 0 < odometry_node.output.count(SLOW) < dropped


def test_from_the_images_of_a_stereo_pair_to_metres(tmp_path, robot, domain):
    """As odometry.launch.py connects them: the left camera's keypoints are the odometry's."""
    baseline, size = 0.3, (320, 240)
    scene, camera = worlds.ring(worlds.photographs()), worlds.view_camera(size)
    poses = worlds.ring_path(0.1, 0.3)
    beside = np.eye(4)
    beside[0, 3] = baseline
    sides = {'left': np.eye(4), 'right': beside}
    with (
        keypoint_node(
            tmp_path / 'keypoints', domain, 'small', runtime='onnxruntime', max_keypoints=500,
            cameras='[left, right]',
        ),
        node(
            tmp_path / 'odometry', 'odometry_node', domain, '-r', 'keypoints:=left/keypoints',
            '-r', 'camera_info:=left/camera_info', stereo='true', diagnostics_period=0.1,
        ) as odometry_node,
    ):  # fmt: skip
        odometry_node.wait_for('waiting for keypoints on /kp2d/left/keypoints')
        odometry = robot.listen(OdometryMessage, '/kp2d/odometry', 100)
        images, infos, messages = {}, {}, {}
        for side, mount in sides.items():
            images[side] = robot.publisher(Image, f'/kp2d/{side}/image', 5)
            infos[side] = robot.publisher(CameraInfo, f'/kp2d/{side}/camera_info', 5)
            info = pinhole_info(size, camera.matrix)
            projection = list(info.p)
            projection[3] = -camera.matrix[0, 0] * mount[0, 3]
            messages[side] = CameraInfo(
                width=size[0], height=size[1], distortion_model=info.distortion_model,
                k=list(info.k), d=list(info.d), r=list(info.r), p=projection,
            )  # fmt: skip
        known = itertools.count(1)

        def calibrated() -> bool:
            for side in sides:
                messages[side].header.stamp.sec = next(known)
                infos[side].publish(messages[side])
            return figures(robot)['camera_info'] == 'known'

        robot.wait(calibrated, 'camera_info')
        for number, pose in enumerate(poses):
            stamp = 100 + number / 10
            for side, mount in sides.items():
                image = image_message(scene.view(camera, pose @ mount), stamp)
                messages[side].header = image.header
                infos[side].publish(messages[side])
                images[side].publish(image)
            robot.wait(lambda number=number: len(odometry) > number, f'a pose of pair {number}')
        off = errors(camera_poses(odometry), poses)
        assert off.scale == pytest.approx(1.0, abs=0.05)
        assert figures(robot)['scale'] == 'metres, by the stereo baseline'
