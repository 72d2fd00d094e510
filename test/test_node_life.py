"""The keypoint node's life: its lifecycle, how it rests and ends, restarts, neighbours."""

import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from models import write_random_model

pytest.importorskip('rclpy')

from lifecycle_msgs.msg import State, Transition
from lifecycle_msgs.srv import ChangeState, GetState
from rclpy.context import Context
from rclpy.executors import MultiThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile, ReliabilityPolicy
from robot import Process, Robot, image_message, keypoint_node
from sensor_msgs.msg import Image, PointCloud2
from std_srvs.srv import Trigger

from kp2d_ros.clouds import read_points
from kp2d_ros.keypoint_node import KeypointNode
from kp2d_ros.messages import keypoints_from_cloud
from kp2d_ros.pipeline import THREAD_NAME

NODE = '/kp2d/keypoint_node'
SHUTDOWN = 2.0  # seconds, on a machine that is not too busy; the tests allow for a busy one
SLACK = 3.0


def change(robot: Robot, transition: int) -> bool:
    request = ChangeState.Request(transition=Transition(id=transition))
    return robot.call(ChangeState, f'{NODE}/change_state', request).success


def state(robot: Robot) -> int:
    return robot.call(GetState, f'{NODE}/get_state', GetState.Request()).current_state.id


def threads_of(pid: int) -> int:
    return len(list(Path(f'/proc/{pid}/task').iterdir()))


def test_managed_through_its_services(robot, domain, model, tmp_path, picture):
    with keypoint_node(tmp_path / 'log', domain, model, managed='true') as node:
        assert state(robot) == State.PRIMARY_STATE_UNCONFIGURED
        assert not robot.call(Trigger, '/kp2d/reset_tracks', Trigger.Request()).success
        assert not change(robot, Transition.TRANSITION_ACTIVATE)
        assert change(robot, Transition.TRANSITION_CONFIGURE)
        assert state(robot) == State.PRIMARY_STATE_INACTIVE
        assert 'loaded' in node.output and 'waiting' not in node.output
        assert robot.figures()['runtime'].startswith('torch')
        assert robot.figures()['model'] == str(model)
        threads, ids = None, set[int]()
        for _ in range(2):  # the second life is like the first
            assert change(robot, Transition.TRANSITION_ACTIVATE)
            images = robot.publisher(Image, '/kp2d/image')
            heard = robot.listen(PointCloud2, '/kp2d/keypoints')
            robot.exchange(images, image_message(picture, time.time()), heard)
            given = set(read_points(heard[-1])['track_id'].tolist())
            assert given and not given & ids  # none is given twice
            ids |= given
            assert change(robot, Transition.TRANSITION_DEACTIVATE)
            assert state(robot) == State.PRIMARY_STATE_INACTIVE
            robot.wait(lambda p=images: not p.get_subscription_count(), 'the end of subscribing')
            received = robot.count('received')
            images.publish(image_message(picture, time.time()))
            robot.spin(0.3)
            assert robot.count('received') == received
            robot.node.destroy_publisher(images)
            robot.node.destroy_subscription(robot._last_subscription)
            if threads is None:
                threads = threads_of(node.process.pid)
        assert threads_of(node.process.pid) <= threads
        assert change(robot, Transition.TRANSITION_CLEANUP)
        assert robot.figures()['runtime'] == 'not loaded'
        assert not robot.node.get_publishers_info_by_topic('/kp2d/keypoints')
        assert change(robot, Transition.TRANSITION_CONFIGURE)
        assert change(robot, Transition.TRANSITION_INACTIVE_SHUTDOWN)
        assert state(robot) == State.PRIMARY_STATE_FINALIZED
        code, seconds = node.stop()
        assert code == 0 and seconds < SHUTDOWN + SLACK


def test_cleanup_frees_the_compiled_network(robot, domain, tmp_path, picture):
    """Each has threads of its own, which tell."""
    pytest.importorskip('openvino')
    cycle = [
        Transition.TRANSITION_CONFIGURE, Transition.TRANSITION_ACTIVATE,
        Transition.TRANSITION_DEACTIVATE, Transition.TRANSITION_CLEANUP,
    ]  # fmt: skip
    with keypoint_node(
        tmp_path / 'log', domain, 'small', managed='true', runtime='openvino', threads=2
    ) as node:
        counts = []
        for _ in range(3):
            for transition in cycle:
                assert change(robot, transition)
                if transition == Transition.TRANSITION_ACTIVATE:
                    images = robot.publisher(Image, '/kp2d/image')
                    heard = robot.listen(PointCloud2, '/kp2d/keypoints')
                    robot.exchange(images, image_message(picture, time.time()), heard)
                    robot.node.destroy_publisher(images)
                    robot.node.destroy_subscription(robot._last_subscription)
            robot.spin(0.5)
            counts.append(threads_of(node.process.pid))
        assert counts[2] <= counts[0], counts


@pytest.mark.parametrize(
    ('when', 'how'),
    [
        ('unconfigured', signal.SIGTERM),
        ('loading', signal.SIGINT),
        ('active', signal.SIGTERM),
        ('busy', signal.SIGINT),
    ],
)
def test_it_ends_soon_in_every_state(robot, domain, tmp_path, picture, when, how):
    # A frame of this model takes seconds here: longer than the end may take.
    model = write_random_model(tmp_path, 'v4' if when == 'busy' else 'half')
    managed = 'true' if when == 'unconfigured' else 'false'
    with keypoint_node(tmp_path / 'log', domain, model, managed=managed) as node:
        if when == 'unconfigured':
            assert state(robot) == State.PRIMARY_STATE_UNCONFIGURED
        elif when == 'loading':
            robot.wait(lambda: 'keypoint_node' in robot.node.get_node_names(), 'the node')
        else:
            node.wait_for('waiting for images')
        if when == 'busy':
            images = robot.publisher(Image, '/kp2d/image')
            robot.listen(PointCloud2, '/kp2d/keypoints')
            robot.spin(0.5)
            images.publish(image_message(np.tile(picture, (10, 10, 1)), time.time()))
            robot.wait(lambda: robot.count('received') == 1, 'its arrival')
        code, seconds = node.stop(how)
        assert code == 0, node.output
        assert seconds < SHUTDOWN + SLACK
        assert 'Traceback' not in node.output


def test_killed_and_restarted_while_the_camera_runs(robot, domain, model, tmp_path):
    with Process(
        tmp_path / 'camera', '-m', 'kp2d_ros.camera.camera_node', '--ros-args', '-p', 'rate:=20.0',
        '-p', 'width:=160', '-p', 'height:=120', domain=domain,
    ) as camera:  # fmt: skip
        camera.wait_for('on /camera/image_raw')
        remap = ('-r', 'image:=/camera/image_raw', '-r', 'camera_info:=/camera/camera_info')
        with keypoint_node(tmp_path / 'first', domain, model, *remap) as node:
            heard = robot.listen(PointCloud2, '/kp2d/keypoints')
            robot.wait(lambda: len(heard) >= 3, 'keypoints')
            node.process.kill()
            node.process.wait(10)
        robot.spin(0.5)
        count = len(heard)
        with keypoint_node(tmp_path / 'second', domain, model, *remap):
            robot.wait(lambda: len(heard) >= count + 3, 'keypoints of the second')
        code, seconds = camera.stop()
        assert code == 0 and seconds < SHUTDOWN + SLACK


def test_two_cameras_by_namespace(robot, domain, model, tmp_path, picture):
    with (
        keypoint_node(tmp_path / 'l', domain, model, '-r', '__ns:=/left/kp2d') as left,
        keypoint_node(
            tmp_path / 'r', domain, model, '-r', '__ns:=/right/kp2d', '-r', 'image:=/right/raw'
        ) as right,
    ):
        left.wait_for('waiting for images on /left/kp2d/image')
        right.wait_for('waiting for images on /right/raw')
        cameras = {
            '/left/kp2d': robot.publisher(Image, '/left/kp2d/image'),
            '/right/kp2d': robot.publisher(Image, '/right/raw'),
        }
        for number, (namespace, images) in enumerate(cameras.items()):
            heard = robot.listen(PointCloud2, f'{namespace}/keypoints')
            message = image_message(picture, 100.0 + number, frame_id=namespace)
            cloud = robot.exchange(images, message, heard)
            assert cloud.header.frame_id == namespace
        assert robot.status('left/kp2d/keypoint_node').hardware_id == '/left/kp2d/image'
        assert robot.status('right/kp2d/keypoint_node').hardware_id == '/right/raw'


def test_beside_other_nodes_under_many_threads_in_sim_time(domain, model, picture, robot):
    """In this process, with a neighbour that is busy; the clock stands still."""
    context = Context()
    context.init(
        args=['--ros-args', '-p', f'model:={model}', '-p', 'runtime:=torch'], domain_id=domain
    )
    node = KeypointNode(
        context=context, parameter_overrides=[Parameter('use_sim_time', value=True)]
    )
    neighbour = Node('neighbour', context=context)
    ticks: list[float] = []
    neighbour.create_timer(0.02, lambda: ticks.append(time.monotonic()))
    executor = MultiThreadedExecutor(num_threads=3, context=context)
    executor.add_node(node)
    executor.add_node(neighbour)
    spinning = threading.Thread(target=executor.spin, daemon=True)
    spinning.start()
    try:
        images = robot.publisher(Image, '/kp2d/image')
        heard = robot.listen(PointCloud2, '/kp2d/keypoints')
        for number in range(5):
            cloud = robot.exchange(images, image_message(picture, 1 + number / 10), heard)
            assert keypoints_from_cloud(cloud).track_ages.max() == number
        assert len(ticks) > 10
        assert any(thread.name == THREAD_NAME for thread in threading.enumerate())
    finally:
        executor.shutdown(timeout_sec=10)
        spinning.join(10)
        node.destroy_node()
        neighbour.destroy_node()
        context.try_shutdown()
    assert not any(thread.name == THREAD_NAME for thread in threading.enumerate())


def test_a_publisher_that_cannot_be_heard_is_named(robot, domain, model, tmp_path, picture):
    qos = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
    remap = ('-r', 'image:=/front/image_raw')
    with keypoint_node(tmp_path / 'log', domain, model, *remap, reliability='reliable') as node:
        node.wait_for('waiting for images')
        robot.wait(lambda: 'nobody publishes /front/image' in robot.status().message, 'a warning')
        images = robot.node.create_publisher(Image, '/front/image_raw', qos)
        robot.wait(lambda: 'another RELIABILITY' in robot.status().message, 'advice')
        robot.node.destroy_publisher(images)
        heard = robot.listen(PointCloud2, '/kp2d/keypoints')
        reliable = robot.publisher(Image, '/front/image_raw')
        robot.exchange(reliable, image_message(picture, 1.0), heard)
        robot.wait(lambda: 'another' not in robot.status().message, 'its end')


def test_nobody_listens_nothing_is_computed_and_it_wakes_at_once(
    robot, domain, model, tmp_path, picture
):
    with keypoint_node(tmp_path / 'log', domain, model, max_keypoints=50) as node:
        node.wait_for('waiting for images')
        images = robot.publisher(Image, '/kp2d/image')
        stop = threading.Event()

        def stream():  # at its own pace, as a camera does
            while not stop.wait(0.1):
                images.publish(image_message(picture, time.time()))

        camera = threading.Thread(target=stream, daemon=True)
        camera.start()
        try:
            robot.wait(lambda: robot.count('skipped') >= 5, 'skipped frames')
            assert robot.figures()['frames processed'] == '0'
            assert 'idle' in robot.status().message
            heard = robot.listen(PointCloud2, '/kp2d/keypoints')
            skipped = robot.count('skipped')
            robot.wait(lambda: heard, 'keypoints')
            # Discovery takes its time; once matched, the next frame is computed.
            assert robot.count('skipped') - skipped <= 10
            robot.node.destroy_subscription(robot._last_subscription)
            robot.wait(lambda: 'idle' in robot.status().message, 'rest')
        finally:
            stop.set()
            camera.join(5)


def test_a_failed_activation_leaves_nothing_behind(robot, domain, model, tmp_path):
    remap = ('-r', 'camera_info:=image')
    with keypoint_node(tmp_path / 'log', domain, model, *remap, managed='true') as node:
        assert change(robot, Transition.TRANSITION_CONFIGURE)
        for _ in range(2):
            assert not change(robot, Transition.TRANSITION_ACTIVATE)
        node.wait_for('cannot subscribe: ')
        assert state(robot) == State.PRIMARY_STATE_INACTIVE

        def listeners() -> list[str]:
            infos = robot.node.get_subscriptions_info_by_topic('/kp2d/image')
            return [info.topic_type for info in infos]

        # What hears camera_info is there as long as the node is configured.
        robot.wait(lambda: set(listeners()) == {'sensor_msgs/msg/CameraInfo'}, 'no listener')


def test_without_its_model_it_stays_unconfigured(robot, domain, tmp_path):
    with keypoint_node(tmp_path / 'log', domain, tmp_path / 'absent.safetensors', managed='true'):
        assert not change(robot, Transition.TRANSITION_CONFIGURE)
        assert state(robot) == State.PRIMARY_STATE_UNCONFIGURED
