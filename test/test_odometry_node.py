"""The odometry node in a process of its own, over DDS: keypoints of a rendered corridor in."""

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip('nav_msgs')

from diagnostic_msgs.msg import DiagnosticStatus
from nav_msgs.msg import Odometry as OdometryMessage
from nav_msgs.msg import Path as PathMessage
from robot import Process, Robot, new_domain
from sensor_msgs.msg import CameraInfo, PointCloud2
from std_msgs.msg import Header, String
from std_srvs.srv import Trigger

from kp2d_core import KeypointDetector
from kp2d_core.camera import pinhole_info
from kp2d_core.checkpoint import find_checkpoint, load_checkpoint
from kp2d_core.odometry.trajectory import errors
from kp2d_core.views import worlds
from kp2d_ros.clouds import read_points
from kp2d_ros.messages import LATCHED, keypoints_to_cloud
from kp2d_ros.odometry.outputs import time_of
from kp2d_ros.odometry.poses import mounting
from kp2d_ros.odometry.report import ARBITRARY
from kp2d_ros.startup import NODES

NAME = 'kp2d/odometry_node: odometry'
SIZE, STEP, RATE = (320, 240), 0.1, 15.0
MOUNT = mounting((0.0,) * 6)


@pytest.fixture(scope='module')
def corridor():
    """Features of 42 frames along a corridor, and the true poses of the camera."""
    scene, poses = worlds.ring(worlds.photographs()), worlds.ring_path(STEP, 41 * STEP)
    camera, detector = worlds.view_camera(SIZE), KeypointDetector.load('small')
    found = [
        detector.detect(scene.view(camera, pose), nms_radius=3, max_keypoints=500)
        for pose in poses
    ]
    return found, poses


class Feed:
    """Publishes keypoints and waits for what comes of each."""

    def __init__(self, robot: Robot) -> None:
        self.robot = robot
        self.camera = worlds.view_camera(SIZE)
        self.keypoints = robot.publisher(PointCloud2, '/kp2d/keypoints', 10)
        info = pinhole_info(SIZE, self.camera.matrix)
        self.info = CameraInfo(
            width=SIZE[0], height=SIZE[1], distortion_model=info.distortion_model,
            k=list(info.k), d=list(info.d), r=list(info.r), p=list(info.p),
        )  # fmt: skip
        self.infos = robot.publisher(CameraInfo, '/kp2d/camera_info', LATCHED)
        self.infos.publish(self.info)
        self.stamp = 10**9
        self.described = robot.publisher(String, '/kp2d/info', LATCHED)
        digest = load_checkpoint(find_checkpoint('small')).digest()
        self.described.publish(String(data=json.dumps({'model': 'small', 'weights': digest})))

    def ready(self) -> None:
        self.robot.wait(lambda: figures(self.robot)['camera_info'] == 'known', 'camera_info')

    def send(self, features) -> int:
        """The stamp of the frame."""
        self.stamp += round(1e9 / RATE)
        header = Header(stamp=time_of(self.stamp), frame_id='camera_optical_frame')
        rays = self.camera.rays(features.keypoints)
        cloud = keypoints_to_cloud(header, features, rays, descriptor_format='int8')
        self.keypoints.publish(cloud)
        return self.stamp

    def send_pair(self, features, others) -> None:
        """The right camera is 2 ms late, which is no reason not to pair them."""
        self.send(features)
        header = Header(stamp=time_of(self.stamp + 2 * 10**6), frame_id='right_optical_frame')
        rays = self.camera.rays(others.keypoints)
        self.right.publish(keypoints_to_cloud(header, others, rays, descriptor_format='int8'))

    def add_right(self, baseline: float) -> None:
        self.right = self.robot.publisher(PointCloud2, '/kp2d/right/keypoints', 10)
        infos = self.robot.publisher(CameraInfo, '/kp2d/right/camera_info', LATCHED)
        projection = list(self.info.p)
        projection[3] = -projection[0] * baseline
        infos.publish(
            CameraInfo(
                width=SIZE[0], height=SIZE[1], distortion_model=self.info.distortion_model,
                k=self.info.k, d=self.info.d, r=self.info.r, p=projection,
            )
        )  # fmt: skip
        self.ready()


def figures(robot: Robot) -> dict[str, str]:
    return {value.key: value.value for value in robot.status(NAME).values}


def handled(figures: dict[str, str]) -> int:
    kinds = ('placed', 'starting', 'lost', 'dropped', 'damaged', 'failed', 'repeated')
    return sum(int(figures[f'frames {kind}']) for kind in kinds)


def start(tmp_path, domain: int, **values) -> Process:
    given = {'diagnostics_period': 0.1, 'queue_size': 100, 'map_period': 0.05, **values}
    options = (part for name, value in given.items() for part in ('-p', f'{name}:={value}'))
    return Process(
        tmp_path / 'odometry', '-m', NODES['odometry_node'], '--ros-args', *options, domain=domain
    )


def camera_poses(messages) -> np.ndarray:
    """Of the camera's optical frame, from those of the base that are published."""
    poses = []
    for message in messages:
        given = getattr(message.pose, 'pose', message.pose)  # of an odometry, or of a path
        place, turn = given.position, given.orientation
        x, y, z, w = turn.x, turn.y, turn.z, turn.w
        pose = np.eye(4)
        pose[:3, :3] = [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
        pose[:3, 3] = place.x, place.y, place.z
        poses.append(pose @ MOUNT)
    return np.array(poses)


def truth_of(messages, poses, first: int) -> np.ndarray:
    """The true poses of messages, by their stamps; `first` is the stamp of the first pose."""
    stamps = [m.header.stamp.sec * 10**9 + m.header.stamp.nanosec for m in messages]
    return poses[[round((stamp - first) * 1e-9 * RATE) for stamp in stamps]]


@pytest.fixture(scope='module')
def run(tmp_path_factory, corridor):
    """A node that has gone along the corridor with its defaults, and what it published."""
    directory, domain = tmp_path_factory.mktemp('odometry'), new_domain()
    robot = Robot(domain)
    features, _ = corridor
    with start(directory, domain, save_folder=directory / 'maps') as node:
        node.wait_for('waiting for keypoints on /kp2d/keypoints')
        odometry = robot.listen(OdometryMessage, '/kp2d/odometry', 100)
        path = robot.listen(PathMessage, '/kp2d/path')
        points = robot.listen(PointCloud2, '/kp2d/map_points')
        feed = Feed(robot)
        feed.ready()
        first = feed.stamp + round(1e9 / RATE)
        warned = set()

        def all_handled() -> bool:
            warned.add(robot.status(NAME, fresh=False).message)
            return handled(figures(robot)) == len(features)

        for each in features:
            feed.send(each)
            robot.spin(0.02)
        robot.wait(all_handled, 'the last frame')
        yield robot, node, feed, odometry, path, points, first, warned
    robot.close()


def test_the_path_is_the_true_one(run, corridor):
    robot, _, _, odometry, path, points, first, _ = run
    _, poses = corridor
    found = figures(robot)
    assert int(found['frames placed']) == len(odometry)
    assert len(odometry) >= len(poses) - 12, found  # it starts once the camera has moved
    assert int(found['frames lost']) == int(found['frames failed']) == 0
    assert found['state'] == 'tracking'
    assert found['visual words'] == 'of the model'
    truth = truth_of(odometry, poses, first)
    off = errors(camera_poses(odometry), truth)
    length = np.linalg.norm(np.diff(truth[:, :3, 3], axis=0), axis=1).sum()
    assert off.ate < 0.01 * length
    assert off.rpe_degrees < 0.5
    # REP 105 and 103: forward is x, and the camera went mostly forward.
    assert {m.header.frame_id for m in odometry} == {'odom'}
    assert {m.child_frame_id for m in odometry} == {'base_link'}
    last = odometry[-1]
    place = last.pose.pose.position
    assert place.x > 5 * abs(place.y) and place.x > 5 * abs(place.z)
    speed = last.twist.twist.linear.x * off.scale
    assert speed == pytest.approx(STEP * RATE, rel=0.15)
    robot.wait(lambda: path and len(path[-1].poses) > len(odometry) - 5, 'the path')
    ends = path[-1].poses[-1].pose.position
    same = next(m for m in odometry if m.header.stamp == path[-1].poses[-1].header.stamp)
    assert ends == same.pose.pose.position
    # The floor lies 1.3 m below the camera, the walls 1.5 m beside it.
    rows = read_points(points[-1])
    cloud = np.stack([rows[name] for name in 'xyz'], axis=1) * off.scale
    assert len(cloud) > 300
    assert np.percentile(cloud[:, 2], 2) == pytest.approx(-1.3, abs=0.3)
    assert np.percentile(np.abs(cloud[:, 1]), 80) < 2.0


def test_it_says_that_the_scale_is_arbitrary(run):
    robot, node, _, odometry, _, _, _, warned = run
    assert node.output.count(ARBITRARY) == 1
    assert ARBITRARY in warned
    assert figures(robot)['scale'] == 'arbitrary'
    assert odometry[-1].pose.covariance[0] > 1  # m2: a filter must not trust it


def test_a_map_is_saved(run, tmp_path):
    robot, _, _, odometry, *_ = run
    answer = robot.call(Trigger, '/kp2d/odometry_node/save_map', Trigger.Request())
    assert answer.success, answer.message
    assert 'scale is arbitrary' in answer.message
    ply, tum = (part for part in answer.message.split() if part.endswith(('.ply', '.tum')))
    rows = np.loadtxt(tum)
    assert rows.shape[1] == 8
    assert len(rows) >= len(odometry)  # those before the start too
    assert np.allclose(rows[0, 1:], [0, 0, 0, 0, 0, 0, 1], atol=1e-6)  # it began at the origin
    with open(ply, 'rb') as file:  # noqa: PTH123
        assert file.readline() == b'ply\n'


def test_lost_is_said_and_nothing_wrong_published(run, corridor):
    """Keypoints of noise: no pose. Then the way back: it finds its place."""
    robot, node, feed, odometry, *_ = run
    features, _ = corridor
    before = len(odometry)
    random = np.random.default_rng(0)
    one = features[-1]
    for _ in range(4):
        noise = random.normal(size=one.descriptors.shape).astype(np.float32)
        noise /= np.linalg.norm(noise, axis=1, keepdims=True)
        places = random.uniform((0, 0), SIZE, one.keypoints.shape).astype(np.float32)
        feed.send(replace(one, descriptors=noise, keypoints=places))
    robot.wait(lambda: figures(robot)['frames lost'] == '4', 'the loss')
    status = robot.status(NAME)
    assert status.level in (DiagnosticStatus.WARN, DiagnosticStatus.ERROR)
    assert 'lost for' in status.message
    assert len(odometry) == before
    node.wait_for('no pose is published until it is found again')
    place = odometry[-1].pose.pose.position
    feed.send(features[-1])
    robot.wait(lambda: len(odometry) > before, 'its place')
    node.wait_for('relocalised')
    again = odometry[-1].pose.pose.position
    assert np.allclose([again.x, again.y, again.z], [place.x, place.y, place.z], atol=0.02)


def test_reset_begins_anew(run, corridor):
    robot, _, feed, odometry, path, *_ = run
    features, poses = corridor
    answer = robot.call(Trigger, '/kp2d/odometry_node/reset', Trigger.Request())
    assert answer.success
    before, total = len(odometry), handled(figures(robot)) + 24
    first = feed.stamp + round(1e9 / RATE)
    for each in features[:24]:
        feed.send(each)
    robot.wait(lambda: handled(figures(robot)) == total and len(odometry) > before + 5, 'frames')
    found = figures(robot)
    assert found['reset: asked for'] == '1'
    assert found['map'] == '0'
    new = odometry[before:]
    off = errors(camera_poses(new), truth_of(new, poses, first))
    assert off.ate < 0.03
    robot.wait(lambda: len(path[-1].poses) <= 24, 'a path of its own')


def test_damaged_input_is_refused_with_advice(run, corridor):
    robot, node, feed, *_ = run
    features, _ = corridor
    rays = feed.camera.rays(features[0].keypoints)
    header = Header(stamp=time_of(feed.stamp + 1), frame_id='camera_optical_frame')
    damaged = int(figures(robot)['frames damaged'])
    bad = keypoints_to_cloud(header, features[0], rays, descriptor_format='none')
    feed.keypoints.publish(bad)
    robot.wait(lambda: int(figures(robot)['frames damaged']) == damaged + 1, 'its refusal')
    assert 'descriptor_format' in figures(robot)['last problem']
    feed.keypoints.publish(keypoints_to_cloud(header, features[0], 2 * rays))
    robot.wait(lambda: int(figures(robot)['frames damaged']) == damaged + 2, 'its refusal')
    assert 'same camera_info' in figures(robot)['last problem']
    assert node.process.poll() is None


def test_other_weights_begin_anew_and_their_words_are_not_taken_for_others(run, corridor):
    robot, node, feed, *_ = run
    features, _ = corridor
    feed.described.publish(String(data=json.dumps({'model': 'small', 'weights': '1' * 16})))
    robot.wait(lambda: 'learned' in figures(robot)['visual words'], 'the other model')
    node.wait_for('visual words are learned from the frames: ')
    assert 'words of other weights' in node.output
    total = handled(figures(robot)) + 1
    feed.send(features[0])
    robot.wait(lambda: handled(figures(robot)) == total, 'the frame')
    assert figures(robot)['reset: descriptors of another model'] == '1'


def test_the_height_of_the_camera_gives_metres(tmp_path, robot, domain, corridor):
    features, poses = corridor
    with start(tmp_path, domain, camera_height=1.3) as node:
        node.wait_for('waiting for keypoints')
        odometry = robot.listen(OdometryMessage, '/kp2d/odometry', 100)
        path = robot.listen(PathMessage, '/kp2d/path')
        feed = Feed(robot)
        feed.ready()
        first = feed.stamp + round(1e9 / RATE)
        for each in features:
            feed.send(each)
        robot.wait(lambda: handled(figures(robot)) == len(features), 'the last frame')
        node.wait_for('the scale is known: metres, by the camera height')
        assert ARBITRARY not in node.output
        assert odometry[-1].pose.covariance[0] < 1 < odometry[0].pose.covariance[0]
        # What was before is scaled, too. The camera bobs by 4 % of its height.
        stamp = odometry[-1].header.stamp
        robot.wait(lambda: path and path[-1].poses[-1].header.stamp == stamp, 'the path')
        whole = camera_poses(path[-1].poses)
        off = errors(whole, truth_of(path[-1].poses, poses, first))
        assert off.scale == pytest.approx(1.0, abs=0.1)
        code, _ = node.stop()
        assert code == 0, node.output
        assert 'Traceback' not in node.output


def test_a_stereo_pair_gives_metres_from_the_first_frame(tmp_path, robot, domain, corridor):
    features, poses = corridor
    features, poses = features[:14], poses[:14]
    scene, camera = worlds.ring(worlds.photographs()), worlds.view_camera(SIZE)
    detector = KeypointDetector.load('small')
    beside = np.eye(4)
    beside[0, 3] = 0.3
    others = [
        detector.detect(scene.view(camera, pose @ beside), nms_radius=3, max_keypoints=500)
        for pose in poses
    ]
    with start(tmp_path, domain, stereo='true') as node:
        node.wait_for('waiting for keypoints')
        odometry = robot.listen(OdometryMessage, '/kp2d/odometry', 100)
        feed = Feed(robot)
        feed.add_right(0.3)
        first = feed.stamp + round(1e9 / RATE)
        for pair in zip(features, others, strict=True):
            feed.send_pair(*pair)
        robot.wait(lambda: handled(figures(robot)) == len(features), 'the last pair')
        robot.wait(lambda: len(odometry) == len(features), 'a pose for every pair')
        assert figures(robot)['scale'] == 'metres, by the stereo baseline'
        assert ARBITRARY not in node.output
        truth = truth_of(odometry, poses, first)
        assert errors(camera_poses(odometry), truth, with_scale=False).ate < 0.03
        scale = errors(camera_poses(odometry), truth).scale
        assert scale == pytest.approx(1.0, abs=0.03)
