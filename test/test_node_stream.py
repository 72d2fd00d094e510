"""The keypoint node as its neighbours see it: a process of its own, images in, messages out."""

import json
import time

import cv2
import numpy as np
import pytest

pytest.importorskip('rclpy')

from diagnostic_msgs.msg import DiagnosticStatus
from rcl_interfaces.msg import Parameter, ParameterType, ParameterValue
from rcl_interfaces.srv import DescribeParameters, GetParameters, ListParameters, SetParameters
from rclpy.qos import QoSProfile, ReliabilityPolicy
from robot import Robot, image_message, keypoint_node, new_domain
from sensor_msgs.msg import CameraInfo, CompressedImage, Image, PointCloud2
from std_msgs.msg import String
from std_srvs.srv import SetBool, Trigger

from kp2d_core import KeypointDetector
from kp2d_core.checkpoint import load_checkpoint
from kp2d_core.tracking import Tracker
from kp2d_ros.clouds import read_points
from kp2d_ros.messages import LATCHED, keypoints_from_cloud
from kp2d_ros.outputs import KEYPOINT_FIELDS, LAYOUT
from kp2d_ros.parameters import ros_value
from kp2d_ros.settings import FRAME, START, TABLE

DOMAIN = new_domain()
NODE = '/kp2d/keypoint_node'


@pytest.fixture(scope='module')
def detector(model):
    return KeypointDetector.load(model, runtime='torch', threads=1)


@pytest.fixture(scope='module')
def node(model, tmp_path_factory):
    log = tmp_path_factory.mktemp('node') / 'log'
    with keypoint_node(log, DOMAIN, model, max_keypoints=150) as process:
        process.wait_for('waiting for images on /kp2d/image')
        yield process


@pytest.fixture(scope='module')
def robot(node):
    robot = Robot(DOMAIN)
    yield robot
    robot.close()


@pytest.fixture(scope='module')
def images(robot):
    """A publisher, reliable as most drivers are."""
    return robot.publisher(Image, '/kp2d/image')


@pytest.fixture(scope='module')
def keypoints(robot, node):
    return robot.listen(PointCloud2, '/kp2d/keypoints')


@pytest.fixture(scope='module')
def matches(robot, node):
    return robot.listen(PointCloud2, '/kp2d/matches')


@pytest.fixture
def clock(robot, node):
    """Stamps that go on, and parameters that are reset after the test."""
    robot.call(Trigger, '/kp2d/reset_tracks', Trigger.Request())
    yield iter(np.arange(time.time(), time.time() + 1e4, 0.1))
    changed = [p for p in TABLE.values() if p.limits.when == FRAME and p.name != 'max_keypoints']
    answer = set_parameters(
        robot, **{p.name: ros_value(p.default) for p in changed}, max_keypoints=150
    )
    assert all(result.successful for result in answer)


@pytest.fixture(scope='module')
def photograph(photographs):
    return photographs['motorcycle_left']


def view(photograph, step: int = 0) -> np.ndarray:
    return np.ascontiguousarray(photograph[100:220, 8 * step : 8 * step + 160])


def set_parameters(robot: Robot, **values):
    kinds = {
        bool: ('bool_value', ParameterType.PARAMETER_BOOL),
        int: ('integer_value', ParameterType.PARAMETER_INTEGER),
        float: ('double_value', ParameterType.PARAMETER_DOUBLE),
        str: ('string_value', ParameterType.PARAMETER_STRING),
        list: ('double_array_value', ParameterType.PARAMETER_DOUBLE_ARRAY),
    }
    request = SetParameters.Request()
    for name, value in values.items():
        field, kind = kinds[type(value)]
        request.parameters.append(
            Parameter(name=name, value=ParameterValue(type=kind, **{field: value}))
        )
    return robot.call(SetParameters, f'{NODE}/set_parameters', request).results


def refused(robot: Robot, **values) -> str:
    (result,) = set_parameters(robot, **values)
    assert not result.successful
    return result.reason


def test_messages_hold_what_the_core_finds(
    robot, images, keypoints, matches, detector, photograph, clock
):
    set_parameters(robot, descriptor_format='float32')
    tracker = Tracker(max_missed=2, verification='fundamental', threshold=2.0)
    previous = None
    for step in range(3):
        image = view(photograph, step)
        message = image_message(image, next(clock), 'bgr8')
        message.data = image_message(image[..., ::-1], 0).data
        answer = robot.exchange(images, message, keypoints)
        assert answer.header == message.header
        expected = detector.detect(image, scales=(1,), max_keypoints=150)
        tracks = tracker.update(expected)
        found = keypoints_from_cloud(answer)
        np.testing.assert_array_equal(found.features.keypoints, expected.keypoints)
        np.testing.assert_array_equal(found.features.scores, expected.scores)
        np.testing.assert_allclose(found.features.descriptors, expected.descriptors, atol=1e-6)
        np.testing.assert_array_equal(found.track_ages, tracks.ages)
        if previous is not None:
            stamp = message.header.stamp
            cloud = robot.wait(
                lambda s=stamp: next((m for m in matches if m.header.stamp == s), None), 'matches'
            )
            points = read_points(cloud)
            np.testing.assert_array_equal(points['index'], tracks.matches.indices[:, 1])
            np.testing.assert_array_equal(points['previous_index'], tracks.matches.indices[:, 0])
            np.testing.assert_array_equal(points['inlier'], tracks.matches.inliers)
            np.testing.assert_array_equal(
                points['track_id'], found.track_ids[tracks.matches.indices[:, 1]]
            )
            assert points['previous_sec'][0] == previous.header.stamp.sec
            assert points['previous_nanosec'][0] == previous.header.stamp.nanosec
        previous = message
    assert (found.track_ages >= 2).sum() > 20


@pytest.mark.parametrize(
    'encoding', ['rgb8', 'bgra8', 'mono8', '8UC1', 'mono16', 'bayer_rggb8', 'yuyv']
)
def test_encodings_over_the_wire(robot, images, keypoints, detector, photograph, clock, encoding):
    """All of them are in test_image_decoding; these show that the way through the node is open."""
    from test_image_decoding import encode, message_of

    from kp2d_core.images import decode

    message = message_of(encode(view(photograph), encoding), encoding, 3)
    message.header = image_message(view(photograph), next(clock)).header
    found = keypoints_from_cloud(robot.exchange(images, message, keypoints)).features
    expected = detector.detect(decode(message), scales=(1,), max_keypoints=150)
    np.testing.assert_array_equal(found.keypoints, expected.keypoints)


def test_garbage_is_survived_counted_and_reported(robot, images, keypoints, photograph, clock):
    before = robot.count('damaged')
    good = image_message(view(photograph), next(clock))
    robot.exchange(images, good, keypoints)
    garbage = [
        Image(),
        image_message(view(photograph), next(clock), 'klingon'),
        image_message(view(photograph), next(clock), '32FC1'),
        image_message(view(photograph)[:8, :8], next(clock)),
        image_message(np.full((120, 160), np.nan, np.float32), next(clock), '32FC1'),
    ]
    too_short = image_message(view(photograph), next(clock))
    too_short.data = too_short.data[:1000]
    for number, message in enumerate([*garbage, too_short], start=1):
        images.publish(message)
        robot.wait(lambda n=number: robot.count('damaged') == before + n, 'a count')
    status = robot.status()
    values = {value.key: value.value for value in status.values}
    assert 'has 1000 bytes of data' in values['last problem']
    # Let the tracks show that nothing was lost.
    answer = robot.exchange(images, image_message(view(photograph), next(clock)), keypoints)
    assert (keypoints_from_cloud(answer).track_ages == 1).mean() > 0.9
    images.publish(Image())
    robot.wait(lambda: robot.status().level == DiagnosticStatus.WARN, 'a warning')
    robot.wait(lambda: robot.status().level == DiagnosticStatus.OK, 'its end')


def test_streams_that_change(robot, images, keypoints, photograph, clock):
    """Another size, encoding, gap or a restarted bag: tracks continue or restart."""

    def ages(image, stamp, encoding='rgb8'):
        message = image_message(image, stamp, encoding)
        return keypoints_from_cloud(robot.exchange(images, message, keypoints)).track_ages

    start = next(clock)
    image = view(photograph)
    assert ages(image, start).max() == 0
    assert ages(image, start + 0.1).max() == 1
    assert ages(image[..., 1], start + 0.2, 'mono8').max() == 2
    assert ages(image[:96], start + 0.3).max() == 0  # the size changed
    assert ages(image, start + 0.4).max() == 0
    assert ages(image, start + 0.5).max() == 1
    assert ages(image, start + 10).max() == 0  # a gap
    assert ages(image, start + 10.1).max() == 1
    assert ages(image, start - 100).max() == 0  # time went backwards
    assert ages(image, start - 99.9).max() == 1
    figures = robot.figures()
    assert int(figures['reset: image size changed']) >= 2
    assert int(figures['reset: gap between frames']) >= 1
    assert int(figures['reset: time went backwards']) >= 1
    robot.call(Trigger, '/kp2d/reset_tracks', Trigger.Request())
    assert ages(image, start - 99.8).max() == 0


def test_parameters_change_what_comes_out(robot, images, keypoints, photograph, clock):
    def answer():
        message = image_message(view(photograph), next(clock))
        return robot.exchange(images, message, keypoints)

    assert all(
        result.successful
        for result in set_parameters(robot, max_keypoints=40, descriptor_format='int8')
    )
    cloud = answer()
    assert cloud.width == 40 and cloud.point_step == 40 + 128
    plain = read_points(cloud)
    set_parameters(robot, scales=[1.0, 0.5])
    scaled = read_points(answer())
    assert scaled['score'].min() > plain['score'].min()  # the best of more
    set_parameters(robot, scales=[1.0], descriptor_format='none', track=False)
    cloud = answer()
    names = [field.name for field in cloud.fields]
    assert names == [name for name, *_ in KEYPOINT_FIELDS]
    assert cloud.is_dense and (read_points(cloud)['track_id'] == 2**32 - 1).all()
    set_parameters(robot, score_threshold=1.0)
    assert answer().width == 0


def test_bad_parameters_are_refused_with_a_reason(robot, images, keypoints, photograph, clock):
    assert 'out of range' in refused(robot, max_keypoints=0)
    assert 'out of range' in refused(robot, score_threshold=1.5)
    assert 'one of auto, none, homography' in refused(robot, verification='magic')
    assert 'float32, float16, int8, none' in refused(robot, descriptor_format='float64')
    assert 'out of range' in refused(robot, nms_radius=float('nan'))
    assert '0 or at least 24' in refused(robot, working_size=10)
    assert '1 to 4 different numbers' in refused(robot, scales=[1.0, 9.0])
    assert 'read-only' in refused(robot, managed=True).lower()
    assert 'clean it up first' in refused(robot, model='other')
    assert 'type' in refused(robot, max_keypoints='many').lower()
    answer = robot.exchange(images, image_message(view(photograph), next(clock)), keypoints)
    assert answer.width == 150


def test_parameters_are_described(robot, node):
    listed = robot.call(ListParameters, f'{NODE}/list_parameters', ListParameters.Request())
    names = [p.name for p in TABLE.values()]
    assert set(names) <= set(listed.result.names)
    described = robot.call(
        DescribeParameters, f'{NODE}/describe_parameters', DescribeParameters.Request(names=names)
    )
    for parameter, descriptor in zip(TABLE.values(), described.descriptors, strict=True):
        assert descriptor.description == parameter.limits.description
        assert descriptor.read_only == (parameter.limits.when == START)
        has_range = bool(descriptor.integer_range or descriptor.floating_point_range)
        assert has_range == (parameter.limits.range is not None)
    values = robot.call(
        GetParameters, f'{NODE}/get_parameters', GetParameters.Request(names=['max_keypoints'])
    )
    assert values.values[0].integer_value == 150


def test_camera_info_gives_rays(robot, images, keypoints, photograph, clock):
    info = robot.publisher(CameraInfo, '/kp2d/camera_info')
    calibrated = CameraInfo(width=160, height=120, distortion_model='plumb_bob', d=[0.0] * 5)
    calibrated.k = [200.0, 0.0, 80.0, 0.0, 210.0, 60.0, 0.0, 0.0, 1.0]
    told = robot.listen(String, '/kp2d/info', LATCHED)
    subscription = robot._last_subscription

    def answer():
        message = image_message(view(photograph), next(clock))
        return keypoints_from_cloud(robot.exchange(images, message, keypoints))

    def is_calibrated(wanted: bool):
        found = answer()
        return found if told and json.loads(told[-1].data)['calibrated'] == wanted else None

    found = robot.wait(lambda: is_calibrated(False), 'what it says of its messages')
    nominal = (found.features.keypoints - [79.5, 59.5]) / 160
    np.testing.assert_allclose(found.rays, nominal, atol=1e-5)
    info.publish(calibrated)
    found = robot.wait(lambda: is_calibrated(True), 'a calibration')
    expected = (found.features.keypoints - [80, 60]) / [200, 210]
    np.testing.assert_allclose(found.rays, expected, atol=1e-5)
    facts = json.loads(told[-1].data)
    assert facts['layout'] == LAYOUT and facts['model'].endswith('.safetensors')
    assert facts['weights'] == load_checkpoint(facts['model']).digest()[:16]
    assert (facts['image_width'], facts['image_height']) == (160, 120)
    assert facts['descriptor_size'] == found.features.descriptors.shape[1]
    count = len(told)
    answer()
    robot.spin(0.2)
    assert len(told) == count  # once, not with every frame
    damaged = robot.count('damaged')
    singular = [100.0, 100.0, 0.0, 100.0, 100.0, 0.0, 0.0, 0.0, 1.0]
    for k, reason in (([float('nan')] * 9, 'holds NaN'), (singular, 'not a camera matrix')):
        info.publish(CameraInfo(width=160, height=120, k=k))
        robot.wait(lambda said=reason: said in robot.status().message, 'a warning')
        assert 'calibrate the camera, or remap camera_info' in robot.status().message
        robot.wait(lambda: is_calibrated(False), 'no calibration')
    assert robot.count('damaged') == damaged  # the frames are as good as before
    robot.node.destroy_publisher(info)
    late = robot.listen(String, '/kp2d/info', LATCHED)  # after all frames
    robot.wait(lambda: late, 'what was latched')
    assert late[-1] == told[-1]
    robot.node.destroy_subscription(subscription)
    robot.node.destroy_subscription(robot._last_subscription)


def test_disabled_it_rests(robot, images, keypoints, photograph, clock):
    skipped = robot.count('skipped')
    assert robot.call(SetBool, '/kp2d/enable', SetBool.Request(data=False)).success
    images.publish(image_message(view(photograph), next(clock)))
    robot.wait(lambda: robot.count('skipped') == skipped + 1, 'a skipped frame')
    assert robot.call(SetBool, '/kp2d/enable', SetBool.Request(data=True)).success
    robot.exchange(images, image_message(view(photograph), next(clock)), keypoints)


def test_debug_images(robot, images, keypoints, photograph, clock):
    debug = robot.listen(Image, '/kp2d/debug_image')
    plain_subscription = robot._last_subscription
    compressed = robot.listen(CompressedImage, '/kp2d/debug_image/compressed')
    message = image_message(view(photograph), next(clock))
    image = robot.exchange(images, message, debug)
    assert (image.encoding, image.width, image.height) == (
        'rgb8',
        320,
        240,
    )  # small ones are doubled
    assert image.header == message.header
    canvas = np.frombuffer(image.data, np.uint8).reshape(240, 320, 3)
    assert canvas.std() > 10
    jpeg = robot.wait(lambda: compressed and compressed[-1], 'a compressed overlay')
    decoded = cv2.imdecode(np.frombuffer(jpeg.data, np.uint8), cv2.IMREAD_COLOR)
    assert np.abs(decoded[..., ::-1].astype(int) - canvas).mean() < 12
    robot.node.destroy_subscription(plain_subscription)
    robot.node.destroy_subscription(robot._last_subscription)


def test_best_effort_publishers_and_subscribers_are_met(robot, keypoints, photograph, clock):
    qos = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
    heard = robot.listen(PointCloud2, '/kp2d/keypoints', qos)
    subscription = robot._last_subscription
    images = robot.publisher(Image, '/kp2d/image', qos)
    robot.exchange(images, image_message(view(photograph), next(clock)), heard)
    robot.node.destroy_publisher(images)
    robot.node.destroy_subscription(subscription)


def test_a_flood_drops_frames_but_counts_each(robot, images, keypoints, photograph, clock):
    """30 Hz of large frames into a model that is slower: no queue, and the sums agree."""
    large = cv2.resize(photograph, (640, 480))
    before = {name: robot.count(name) for name in ('received', 'processed', 'dropped', 'lost')}
    sent, worst = 60, 0.0
    del keypoints[:]
    answers = []
    for _ in range(sent):
        message = image_message(large, time.time())
        images.publish(message)
        robot.spin(0.03)
        for cloud in keypoints[len(answers) :]:
            age = time.time() - cloud.header.stamp.sec - cloud.header.stamp.nanosec * 1e-9
            worst = max(worst, age)
            answers.append(age)

    def settled():
        counts = {name: robot.count(name) - before[name] for name in before}
        whole = counts['processed'] + counts['dropped'] == counts['received']
        return counts if whole and counts['received'] + counts['lost'] >= sent else None

    counts = robot.wait(settled, 'all frames to be accounted for', 30)
    assert counts['received'] + counts['lost'] == sent
    assert counts['dropped'] > 0 and counts['processed'] >= 2
    inference = float(robot.figures()['inference p50 (ms)']) / 1e3
    assert worst < 8 * max(inference, 0.1)  # a queue of 60 would be 60 inferences long
