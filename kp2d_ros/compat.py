"""Replacements for what rclpy of Humble (3.3) lacks. Jazzy and newer have all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rcl_interfaces.msg import SetParametersResult
from rclpy.subscription import Subscription

try:
    from rclpy.clock_type import ClockType
except ImportError:
    from rclpy.clock import ClockType
try:
    from rclpy.event_handler import SubscriptionEventCallbacks
except ImportError:
    from rclpy.qos_event import SubscriptionEventCallbacks

__all__ = [
    'ClockType',
    'SubscriptionEventCallbacks',
    'on_parameters',
    'publisher_counter',
    'with_message_info',
]


def with_message_info(callback: Callable[[Any, dict[str, int]], None]) -> Callable[..., None]:
    """Make a callback that also takes the information of the middleware about a message.

    On Humble it is empty.
    """
    if hasattr(Subscription, 'CallbackType'):
        return callback
    return lambda message: callback(message, {})


def publisher_counter(node: Any, subscription: Any) -> Callable[[], int]:
    """Counts publishers that a subscription is matched with; with Humble, all of its topic."""
    counter: Callable[[], int] | None = getattr(subscription, 'get_publisher_count', None)
    return counter or partial(node.count_publishers, subscription.topic_name)


def on_parameters(
    node: Any,
    check: Callable[[Sequence[Any]], SetParametersResult],
    changed: Callable[[Sequence[Any]], None],
) -> None:
    """Register callbacks: `check` may refuse a change of parameters, `changed` gets the others."""
    if hasattr(node, 'add_post_set_parameters_callback'):
        node.add_on_set_parameters_callback(check)
        node.add_post_set_parameters_callback(changed)
        return

    def check_and_tell(changes: Sequence[Any]) -> SetParametersResult:
        result = check(changes)
        if result.successful:  # rclpy has checked type, range and read-only before
            changed(changes)
        return result

    node.add_on_set_parameters_callback(check_and_tell)
