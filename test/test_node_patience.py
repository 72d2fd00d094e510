"""What takes long or never ends: the executor answers meanwhile, and the node says what it is."""

import threading
import time

import pytest

pytest.importorskip('rclpy')

from diagnostic_msgs.msg import DiagnosticStatus
from lifecycle_msgs.msg import State, Transition
from lifecycle_msgs.srv import ChangeState, GetState
from rcl_interfaces.srv import GetParameters
from rclpy.context import Context
from rclpy.event_handler import EventHandler
from rclpy.executors import SingleThreadedExecutor
from rclpy.parameter import Parameter
from robot import image_message
from sensor_msgs.msg import Image, PointCloud2
from test_node_parts import Moody

from kp2d_core import KeypointDetector
from kp2d_ros.keypoint_node import KeypointNode
from kp2d_ros.pipeline import THREAD_NAME

NODE = '/kp2d/keypoint_node'


@pytest.fixture
def node(domain, model):
    """In this process, so that the runtime can be held up; it is spun in a thread."""
    context = Context()
    context.init(args=[], domain_id=domain)
    values = {'model': str(model), 'runtime': 'torch', 'managed': True, 'diagnostics_period': 0.2}
    node = KeypointNode(
        context=context,
        parameter_overrides=[Parameter(name, value=value) for name, value in values.items()],
    )
    executor = SingleThreadedExecutor(context=context)
    executor.add_node(node)
    spinning = threading.Thread(target=executor.spin, daemon=True)
    spinning.start()
    yield node
    executor.shutdown(timeout_sec=10)
    spinning.join(10)
    node.destroy_node()
    context.try_shutdown()


def change(robot, number: int):
    request = ChangeState.Request(transition=Transition(id=number))
    return robot.ask(ChangeState, f'{NODE}/change_state', request)


def done(robot, future, what: str) -> bool:
    robot.wait(future.done, what)
    return future.result().success


def state(robot) -> int:
    return robot.call(GetState, f'{NODE}/get_state', GetState.Request()).current_state.id


def test_while_the_model_is_loaded_the_node_answers(robot, node, monkeypatch):
    goes_on, load = threading.Event(), KeypointDetector.load

    def slow_load(*arguments, **options):
        assert goes_on.wait(60)
        return load(*arguments, **options)

    monkeypatch.setattr(KeypointDetector, 'load', slow_load)
    configured = change(robot, Transition.TRANSITION_CONFIGURE)
    robot.wait(lambda: 'loading the model' in robot.status().message, 'what takes so long')
    assert state(robot) == State.TRANSITION_STATE_CONFIGURING
    asked = GetParameters.Request(names=['max_keypoints'])
    assert robot.call(GetParameters, f'{NODE}/get_parameters', asked).values[0].integer_value
    (refused,) = node.set_parameters([Parameter('runtime', value='openvino')])
    assert not refused.successful and 'clean it up first' in refused.reason
    # Another one meanwhile is refused at once.
    assert not done(robot, change(robot, Transition.TRANSITION_CONFIGURE), 'a refusal')
    assert not configured.done()
    goes_on.set()
    assert done(robot, configured, 'a configured node')
    assert state(robot) == State.PRIMARY_STATE_INACTIVE


def test_what_is_read_on_configuring_can_change_after_a_cleanup(robot, node, tmp_path, model):
    assert done(robot, change(robot, Transition.TRANSITION_CONFIGURE), 'a configured node')
    other = tmp_path / 'other.safetensors'
    other.write_bytes(model.read_bytes())
    (refused,) = node.set_parameters([Parameter('model', value=str(other))])
    assert 'cannot change while the node is configured' in refused.reason
    assert done(robot, change(robot, Transition.TRANSITION_CLEANUP), 'a clean node')
    assert robot.figures()['model'] == 'not loaded'
    (changed,) = node.set_parameters([Parameter('model', value=str(other))])
    assert changed.successful
    assert done(robot, change(robot, Transition.TRANSITION_CONFIGURE), 'a configured node')
    robot.wait(lambda: robot.figures()['model'] == str(other), 'the other model')


def test_a_model_that_hangs_is_reported_and_never_doubled(robot, node, picture, monkeypatch):
    monkeypatch.setattr('kp2d_ros.diagnostics.HANG', 0.5)
    monkeypatch.setattr('kp2d_ros.keypoint_node.PATIENCE', 0.5)
    for number in (Transition.TRANSITION_CONFIGURE, Transition.TRANSITION_ACTIVATE):
        assert done(robot, change(robot, number), 'a transition')
    images = robot.publisher(Image, '/kp2d/image')
    heard = robot.listen(PointCloud2, '/kp2d/keypoints')
    robot.exchange(images, image_message(picture, 1.0), heard)
    moody = node._pipeline.detector.runtime = Moody(node._pipeline.detector.runtime)
    moody.goes_on.clear()
    images.publish(image_message(picture, 1.1))
    robot.wait(lambda: robot.status().level == DiagnosticStatus.ERROR, 'an error')
    message = robot.status(fresh=False).message
    assert 'on one frame for' in message and 'restart the node' in message
    workers = [t for t in threading.enumerate() if t.name == THREAD_NAME]
    assert not done(robot, change(robot, Transition.TRANSITION_DEACTIVATE), 'a refusal')
    assert state(robot) == State.PRIMARY_STATE_ACTIVE
    assert [t for t in threading.enumerate() if t.name == THREAD_NAME] == workers
    moody.goes_on.set()
    robot.exchange(images, image_message(picture, 1.2), heard)  # it goes on as before
    assert done(robot, change(robot, Transition.TRANSITION_DEACTIVATE), 'an inactive node')
    assert not any(t.name == THREAD_NAME for t in threading.enumerate())


def test_a_model_that_always_throws_is_an_error(robot, node, picture, capfd):
    for number in (Transition.TRANSITION_CONFIGURE, Transition.TRANSITION_ACTIVATE):
        succeeded = done(robot, change(robot, number), 'a transition')
        assert succeeded, capfd.readouterr().err
    moody = node._pipeline.detector.runtime = Moody(node._pipeline.detector.runtime)
    moody.throws = ValueError('a bug of ours')
    images = robot.publisher(Image, '/kp2d/image')
    robot.listen(PointCloud2, '/kp2d/keypoints')
    stamps = iter(range(1, 1000))

    def fails() -> bool:
        images.publish(image_message(picture, next(stamps)))
        status = robot.status()
        return status.level == DiagnosticStatus.ERROR and 'every frame fails' in status.message

    robot.wait(fails, 'an error')
    figures = robot.figures()
    assert int(figures['frames failed']) > 0 and figures['frames damaged'] == '0'
    assert figures['last problem'] == 'ValueError: a bug of ours'
    time.sleep(0.2)
    printed = capfd.readouterr().err
    assert 'Traceback' in printed and 'every frame fails: ValueError: a bug of ours' in printed


def test_what_a_transition_destroys_the_executor_does_not_trip_over(robot, node, monkeypatch):
    """It looks at what it waits for several times; here, slowly."""
    add = EventHandler.add_to_wait_set

    def slowly(handler, wait_set):
        time.sleep(0.002)
        add(handler, wait_set)

    monkeypatch.setattr(EventHandler, 'add_to_wait_set', slowly)
    again = (Transition.TRANSITION_ACTIVATE, Transition.TRANSITION_DEACTIVATE) * 3
    for number in (Transition.TRANSITION_CONFIGURE, *again, Transition.TRANSITION_CLEANUP):
        assert done(robot, change(robot, number), 'a transition')
