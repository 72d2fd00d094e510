"""How the keypoint node hears publishers of every kind, and what a user can override."""

import json

import pytest

pytest.importorskip('rclpy')

from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from robot import image_message, keypoint_node
from sensor_msgs.msg import CameraInfo, Image, PointCloud2
from std_msgs.msg import String

from kp2d_ros.messages import LATCHED

RELIABLE, BEST_EFFORT = ReliabilityPolicy.RELIABLE, ReliabilityPolicy.BEST_EFFORT


def reliability_of(infos) -> list[ReliabilityPolicy]:
    return [info.qos_profile.reliability for info in infos]


def heard_as(robot, kind: ReliabilityPolicy) -> None:
    """Wait until the node subscribes in one way only."""

    def kinds() -> list[ReliabilityPolicy]:
        return reliability_of(robot.node.get_subscriptions_info_by_topic('/kp2d/image'))

    robot.wait(lambda: kinds() == [kind], f'a subscription that is {kind.name}')


def test_the_subscription_follows_the_publishers(robot, domain, model, tmp_path, picture):
    with keypoint_node(tmp_path / 'log', domain, model) as node:
        node.wait_for('waiting for images')
        heard = robot.listen(PointCloud2, '/kp2d/keypoints')
        stamp = 1.0
        for kind in (RELIABLE, BEST_EFFORT, RELIABLE):
            images = robot.publisher(Image, '/kp2d/image', QoSProfile(depth=1, reliability=kind))
            # While the subscription may be changing. Sent again if lost: a publisher finds its
            # subscriber before the subscriber finds it, and best effort loses what comes between.
            robot.exchange(images, image_message(picture, stamp), heard)
            heard_as(robot, kind)
            stamp += 1
            robot.exchange(images, image_message(picture, stamp), heard)
            robot.node.destroy_publisher(images)
            robot.wait(lambda: not robot.node.count_publishers('/kp2d/image'), 'its end')
            stamp += 1

        def all_are_processed() -> bool:
            # Keypoints are heard before their frame is counted, so the first report may lack it.
            figures = robot.figures()
            received, processed = (int(figures[f'frames {k}']) for k in ('received', 'processed'))
            return received == processed >= stamp - 1

        robot.wait(all_are_processed, 'as many frames processed as received')
        both = [
            robot.publisher(Image, '/kp2d/image', QoSProfile(depth=1, reliability=kind))
            for kind in (RELIABLE, BEST_EFFORT)
        ]
        heard_as(robot, BEST_EFFORT)  # it hears both
        for images in both:
            robot.exchange(images, image_message(picture, stamp), heard)
            stamp += 1


@pytest.mark.parametrize(
    'durability', [DurabilityPolicy.VOLATILE, DurabilityPolicy.TRANSIENT_LOCAL]
)
def test_camera_info_is_heard_from_all(robot, domain, model, tmp_path, picture, durability):
    """A latched one is published once, before there is a node; any other again and again."""
    latched = durability == DurabilityPolicy.TRANSIENT_LOCAL
    info = CameraInfo(width=160, height=120, distortion_model='plumb_bob', d=[0.0] * 5)
    info.k = [200.0, 0.0, 80.0, 0.0, 210.0, 60.0, 0.0, 0.0, 1.0]
    infos = robot.node.create_publisher(
        CameraInfo, '/kp2d/camera_info', QoSProfile(depth=1, durability=durability)
    )
    infos.publish(info)
    with keypoint_node(tmp_path / 'log', domain, model) as node:
        node.wait_for('waiting for images')
        heard = robot.listen(PointCloud2, '/kp2d/keypoints')
        told = robot.listen(String, '/kp2d/info', LATCHED)
        images = robot.publisher(Image, '/kp2d/image')
        stamps = iter(range(1, 1000))

        def is_calibrated() -> bool:
            if not latched:
                infos.publish(info)
            robot.exchange(images, image_message(picture, next(stamps)), heard)
            return bool(told) and json.loads(told[-1].data)['calibrated']

        robot.wait(is_calibrated, 'the calibration')
        assert 'incompatible' not in node.output


def test_overrides_are_taken_and_those_of_no_topic_named(robot, domain, model, tmp_path, picture):
    image, output = '/front/image_raw', '/kp2d/keypoints'
    overrides = {
        f'qos_overrides.{image}.subscription.reliability': 'best_effort',
        f'qos_overrides.{image}.subscription.depth': 1,
        f'qos_overrides.{output}.publisher.reliability': 'best_effort',
        'qos_overrides./nowhere.subscription.depth': 1,
    }
    remap = ('-r', f'image:={image}')
    with keypoint_node(tmp_path / 'log', domain, model, *remap, **overrides) as node:
        node.wait_for('waiting for images')
        images = robot.publisher(Image, image)  # reliable: auto would follow
        qos = QoSProfile(depth=1, reliability=BEST_EFFORT)
        heard = robot.listen(PointCloud2, output, qos)
        robot.exchange(images, image_message(picture, 1.0), heard)
        robot.spin(1.0)
        listeners = robot.node.get_subscriptions_info_by_topic(image)
        assert reliability_of(listeners) == [BEST_EFFORT]
        publishers = robot.node.get_publishers_info_by_topic(output)
        assert reliability_of(publishers) == [BEST_EFFORT]
        assert "QoS override 'qos_overrides./nowhere.subscription.depth'" in node.output
        assert node.output.count('QoS override') == 1
