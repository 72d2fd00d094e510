"""The parts of the odometry node: axes, anchors, the ground, reports."""

import numpy as np
import pytest

pytest.importorskip('nav_msgs')

from kp2d_core.camera import Camera, pinhole_info
from kp2d_core.features import Features
from kp2d_core.odometry import Estimate, State
from kp2d_core.odometry.geometry import exp_rotation, invert, rigid
from kp2d_ros.messages import Keypoints
from kp2d_ros.odometry.follower import fitting_camera, stereo_baseline, write_ply
from kp2d_ros.odometry.ground import GroundScale, ground_height
from kp2d_ros.odometry.outputs import odometry_message, points_cloud
from kp2d_ros.odometry.poses import (
    Anchor,
    Twist,
    anchored,
    mounting,
    pose_covariance,
    scaled,
    twist,
)
from kp2d_ros.odometry.report import ERROR, OK, WARN, OdometryHealth, assess


@pytest.fixture
def random():
    return np.random.default_rng(0)


def test_a_camera_looks_along_x_of_its_body():
    mount = mounting((0, 0, 0, 0, 0, 0))
    right, down, forward = mount[:3, :3].T
    assert np.allclose(forward, [1, 0, 0])
    assert np.allclose(right, [0, -1, 0])
    assert np.allclose(down, [0, 0, -1])
    # REP 103: a positive pitch is nose down.
    tilted = mounting((0.1, 0.2, 0.3, 0, np.pi / 6, 0))
    assert np.allclose(tilted[:3, 2], [np.cos(np.pi / 6), 0, -0.5])
    assert np.allclose(tilted[:3, 3], [0.1, 0.2, 0.3])
    turned = mounting((0, 0, 0, 0, 0, np.pi / 2))
    assert np.allclose(turned[:3, 2], [0, 1, 0])  # to the left


def test_the_base_starts_where_it_is_told_and_moves_in_its_own_axes():
    mount = mounting((0.5, 0, 1.2, 0, 0.2, 0))
    first = rigid(exp_rotation(np.array([0.1, 0.2, 0.3])), np.array([3.0, 2, 1]))
    start = rigid(exp_rotation(np.array([0.0, 0, 1.0])), np.array([5.0, 6, 0]))
    anchor = anchored(first, start, mount, 2.0)
    assert np.allclose(anchor.base(first, mount), start)
    # The base goes 1 m forward: half a unit of the map, along what is x of the base.
    ahead = start @ rigid(np.eye(3), np.array([1.0, 0, 0]))
    camera = scaled(invert(anchor.world) @ ahead @ mount, 0.5)
    assert np.linalg.norm(camera[:3, 3] - first[:3, 3]) == pytest.approx(0.5)
    assert np.allclose(anchor.base(camera, mount), ahead)
    # A point of the map lies where the camera sees it.
    seen = np.array([0.3, -0.2, 4.0])
    point = first[:3, :3] @ seen + first[:3, 3]
    expected = start @ mount @ np.append(2 * seen, 1)
    assert np.allclose(anchor.points(point[None])[0], expected[:3])


def test_twist_is_in_the_axes_of_the_base():
    before = rigid(exp_rotation(np.array([0, 0, np.pi / 2])), np.array([1.0, 1, 0]))
    now = rigid(exp_rotation(np.array([0, 0, np.pi / 2 + 0.1])), np.array([1.0, 1.2, 0]))
    found = twist(before, now, 0.1)
    assert np.allclose(found.linear, [2, 0, 0])
    assert np.allclose(found.angular, [0, 0, 1])
    assert not twist(before, now, 0.0).linear.any()


def test_an_arbitrary_scale_is_told_to_filters():
    base = rigid(np.eye(3), np.array([3.0, 0, 0]))
    known, unknown = (pose_covariance(base, 3.0, scale_known) for scale_known in (True, False))
    assert np.sqrt(known[0, 0]) < 0.1
    assert np.sqrt(unknown[0, 0]) > 3
    for matrix in (known, unknown):
        assert (np.linalg.eigvalsh(matrix) > 0).all()


def scene_with_ground(random, height: float, tilt: float = 0.0) -> np.ndarray:
    """A floor with noise, boxes on it, walls about it; the camera is the origin, z up."""
    floor = np.column_stack([random.uniform([1, -3], [8, 3], (150, 2)), np.full(150, -height)])
    floor[:, 2] += tilt * floor[:, 0] + random.normal(0, 0.005 * height, 150)
    foot = -height + 8 * tilt
    walls = np.column_stack(
        [np.full(300, 8.0), random.uniform(-3, 3, 300), random.uniform(foot, height, 300)]
    )
    tops = np.column_stack([random.uniform([2, -2], [4, 2], (60, 2)), np.full(60, -0.5 * height)])
    return np.concatenate([floor, walls, tops])


@pytest.mark.parametrize(('height', 'tilt'), [(1.3, 0.0), (0.2, 0.0), (1.3, 0.1)])
def test_height_above_the_ground(random, height, tilt):
    found = ground_height(scene_with_ground(random, height, tilt), random)
    assert found == pytest.approx(height / np.sqrt(1 + tilt**2), rel=0.03)


def test_no_ground_no_height(random):
    assert ground_height(random.normal(size=(400, 3)), random) is None  # no plane
    assert ground_height(np.abs(random.normal(size=(400, 3))), random) is None  # nothing below
    assert ground_height(np.empty((0, 3)), random) is None


def test_a_scale_needs_views_that_agree(random):
    scale = GroundScale(2.6)
    for _ in range(8):
        scale.add(scene_with_ground(random, 1.3))
    assert scale.scale is None
    scale.add(scene_with_ground(random, 1.3))
    assert scale.scale == pytest.approx(2.0, rel=0.03)
    unsure = GroundScale(2.6)
    for height in np.linspace(0.8, 1.6, 12):
        unsure.add(scene_with_ground(random, height))
    assert unsure.estimates > 9
    assert unsure.scale is None


# Calibrations


def keypoints_of(camera: Camera) -> Keypoints:
    pixels = np.random.default_rng(1).uniform((0, 0), camera.size, (100, 2)).astype(np.float32)
    features = Features(pixels, np.ones(100, np.float32), np.ones((100, 4), np.float32))
    nothing = np.zeros(100, np.uint32)
    return Keypoints(features, camera.rays(pixels).astype(np.float32), nothing, nothing)


def test_the_calibration_is_that_of_the_keypoints():
    from dataclasses import replace

    from kp2d_core.camera import camera_from_info

    matrix = np.array([[400.0, 0, 320], [0, 400, 240], [0, 0, 1]])
    info = pinhole_info((640, 480), matrix)
    rectified = np.column_stack([matrix * [[0.8], [0.8], [1]], np.zeros(3)])
    info = replace(info, d=(-0.3, 0.1, 0, 0, 0), p=tuple(rectified.ravel().tolist()))
    for is_rectified in (False, True):
        camera = camera_from_info(info, is_rectified)
        assert fitting_camera(keypoints_of(camera), info) == camera
    with pytest.raises(ValueError, match='not those of camera_info'):
        fitting_camera(keypoints_of(Camera.create((640, 480), matrix * [[2], [2], [1]])), info)
    with pytest.raises(ValueError, match='not calibrated'):
        fitting_camera(
            keypoints_of(Camera.create((640, 480), matrix)), replace(info, k=(0.0,) * 9)
        )


def test_baseline_of_a_pair():
    right = pinhole_info((640, 480), np.array([[400.0, 0, 320], [0, 400, 240], [0, 0, 1]]))
    assert stereo_baseline(right, 0.3) == 0.3
    with pytest.raises(ValueError, match='stereo_baseline'):
        stereo_baseline(right, 0.0)
    shifted = (*right.p[:3], -48.0, *right.p[4:])
    assert stereo_baseline(type(right)(*right.__dict__.values()), 0.1) == 0.1
    from dataclasses import replace

    assert stereo_baseline(replace(right, p=shifted), 0.0) == pytest.approx(0.12)


# Messages


def test_odometry_message(random):
    from kp2d_ros.odometry.follower import Step

    base = rigid(exp_rotation(np.array([0, 0, 0.2])), np.array([1.0, 2, 3]))
    velocity = Twist(np.array([0.5, 0, 0]), np.array([0, 0, 0.1]))
    estimate = Estimate(1.5, State.TRACKING, np.eye(4), 0)
    message = odometry_message(
        Step(1_500_000_000, estimate, base, velocity, 2.0, True), 'odom', 'base_link'
    )
    assert (message.header.frame_id, message.child_frame_id) == ('odom', 'base_link')
    assert (message.header.stamp.sec, message.header.stamp.nanosec) == (1, 500_000_000)
    place, turn = message.pose.pose.position, message.pose.pose.orientation
    assert (place.x, place.y, place.z) == (1, 2, 3)
    assert (turn.z, turn.w) == pytest.approx((np.sin(0.1), np.cos(0.1)))
    assert message.twist.twist.linear.x == 0.5
    assert np.reshape(message.pose.covariance, (6, 6)).trace() > 0
    still = odometry_message(Step(0, estimate, base, None, 2.0, True), 'odom', 'base_link')
    assert still.twist.covariance[0] == 1e6  # not known, which is not the same as standing


def test_map_files(tmp_path, random):
    from std_msgs.msg import Header

    from kp2d_ros.clouds import read_points

    points = random.normal(size=(20, 3))
    cloud = points_cloud(Header(frame_id='odom'), points)
    assert np.allclose(read_points(cloud)['y'], points[:, 1])
    write_ply(tmp_path / 'map.ply', points)
    header, _, body = (tmp_path / 'map.ply').read_bytes().partition(b'end_header\n')
    assert b'element vertex 20\n' in header
    assert np.allclose(np.frombuffer(body, '<f4').reshape(-1, 3), points, atol=1e-6)


def test_anchor_of_a_path_is_vectorised():
    anchor = Anchor(np.eye(4), 3.0)
    poses = np.tile(np.eye(4), (5, 1, 1))
    poses[:, 2, 3] = np.arange(5)
    assert np.allclose(anchor.base(poses, np.eye(4))[:, :3, 3], 3.0 * poses[:, :3, 3])


# Reports


def health(state: State | None = None, map_number: int = 0, **values) -> OdometryHealth:
    last = None if state is None else Estimate(0.0, state, None, map_number)
    given = {
        'active': True, 'active_for': 60.0, 'since_keypoints': 0.1, 'publishers': 1,
        'has_camera_info': True, 'tracked_for': 60.0,
    }  # fmt: skip
    return OdometryHealth(topic='/kp2d/keypoints', last=last, **{**given, **values})


@pytest.mark.parametrize(
    ('found', 'level', 'sentence'),
    [
        (health(active=False), OK, 'not active'),
        (health(since_keypoints=None, publishers=0), WARN, 'nobody publishes /kp2d/keypoints'),
        (health(since_keypoints=9.0), WARN, 'does the keypoint node receive images'),
        (health(has_camera_info=False), ERROR, 'needs a calibrated camera'),
        (health(problem='it is broken'), WARN, 'it is broken'),
        (health(problem='it threw', failed=True), ERROR, 'it threw'),
        (health(State.STARTING), OK, 'move the camera sideways'),
        (health(State.STARTING, in_state_for=20.0), WARN, 'rotation alone does not help'),
        (health(State.LOST, in_state_for=1.0), WARN, 'lost for 1 s'),
        (health(State.LOST, in_state_for=9.0), ERROR, 'call reset'),
        (health(State.TRACKING, 1, map_age=3.0), WARN, 'a new map began after a loss'),
        (health(State.TRACKING, tracked_for=1.0), WARN, 'ARBITRARY'),
        (health(State.TRACKING), OK, 'scale arbitrary'),
        (health(State.TRACKING, scale='metres, as given'), OK, 'tracking, 0.0 Hz'),
        (health(State.TRACKING, overflow=3), WARN, 'drops frames'),
        (health(State.TRACKING, overflow=3), WARN, '(3 since the last report); tracking'),
        (health(State.LOST, in_state_for=9.0, overflow=3), ERROR, 'call reset'),
    ],
)  # fmt: skip
def test_reports_say_what_to_do(found, level, sentence):
    said, message = assess(found)
    assert sentence in message
    assert said == level
