"""What rclpy of Humble (3.3) lacks, made up for in one place. Jazzy and newer have it all."""

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
    """A callback for a subscription that takes the middleware's facts about a message, too.

    Humble does not tell them: there they are empty.
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
    """`check` may refuse a change of parameters; `changed` hears of those that are made."""
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
