"""A substitute for the rclpy of Humble: this rclpy without the newer features that we use.

No registry has Humble's own rclpy. According to its sources (3.3.15) it lacks the modules
clock_type and event_handler (it has qos_event, without `matched`), callbacks after parameters are
set, callbacks with a MessageInfo, and Subscription.get_publisher_count.
Run as `python -m humble kp2d_ros.keypoint_node --ros-args ...`.
"""

import runpy
import sys
import types

from rclpy import event_handler
from rclpy.executors import Executor, await_or_execute
from rclpy.node import Node
from rclpy.subscription import Subscription


class SubscriptionEventCallbacks(event_handler.SubscriptionEventCallbacks):
    def __init__(
        self, *, deadline=None, incompatible_qos=None, liveliness=None, message_lost=None,
        use_default_callbacks=True,
    ):  # fmt: skip
        super().__init__(
            deadline=deadline, incompatible_qos=incompatible_qos, liveliness=liveliness,
            message_lost=message_lost, use_default_callbacks=use_default_callbacks,
        )  # fmt: skip


def take_subscription(self, subscription):
    with subscription.handle:
        taken = subscription.handle.take_message(subscription.msg_type, subscription.raw)
    if taken is None:
        return None

    async def execute():
        await await_or_execute(subscription.callback, taken[0])

    return execute


def pretend() -> None:
    qos_event = types.ModuleType('rclpy.qos_event')
    qos_event.SubscriptionEventCallbacks = SubscriptionEventCallbacks
    sys.modules['rclpy.qos_event'] = qos_event
    for name in ('rclpy.clock_type', 'rclpy.event_handler'):
        sys.modules[name] = None  # an import of it fails
    del Node.add_post_set_parameters_callback
    del Subscription.get_publisher_count
    del Subscription.CallbackType
    Subscription.callback = property(
        lambda self: self._callback, lambda self, value: setattr(self, '_callback', value)
    )
    Executor._take_subscription = take_subscription


if __name__ == '__main__':
    pretend()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)
