"""The settings as parameters of a ROS node: declared, checked, documented."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rcl_interfaces.msg import (
    FloatingPointRange,
    IntegerRange,
    ParameterDescriptor,
    SetParametersResult,
)
from rclpy.qos import QoSPolicyKind
from rclpy.qos_overriding_options import QoSOverridingOptions

from kp2d_ros.settings import CONFIGURE, START, TABLE, Entry, Settings, changed

POLICIES = {kind.name: kind for kind in QoSPolicyKind.__members__.values()}


def declare(node: Any) -> Settings:
    """Declare all parameters; return their values; raise ValueError for a bad one."""
    return changed(Settings(), declare_table(node, TABLE))


def declare_table(node: Any, entries: Mapping[str, Entry]) -> dict[str, Any]:
    """Declare the parameters of a table, the only one of the node."""
    for entry in entries.values():
        node.declare_parameter(entry.name, ros_value(entry.default), descriptor(entry))
    values = {name: node.get_parameter(name).value for name in entries}
    for name in unknown(node):
        node.get_logger().warning(f"there is no parameter '{name}': it has no effect")
    for name, value in values.items():
        problem = entries[name].limits.check(name, value)
        if problem is not None:
            raise ValueError(problem)
    return values


def ros_value(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def descriptor(entry: Entry) -> ParameterDescriptor:
    """What `ros2 param describe` shows, and rclpy enforces: type, range, read-only."""
    limits = entry.limits
    result = ParameterDescriptor(
        name=entry.name,
        description=limits.description,
        read_only=limits.when == START,
        additional_constraints=f'one of {", ".join(limits.choices)}'
        if limits.choices
        else limits.values,
    )
    if limits.range is not None and isinstance(entry.default, float):
        low, high = limits.range
        result.floating_point_range = [FloatingPointRange(from_value=low, to_value=high)]
    elif limits.range is not None:
        low, high = (int(bound) for bound in limits.range)
        result.integer_range = [IntegerRange(from_value=low, to_value=high, step=1)]
    return result


def unknown(node: Any) -> list[str]:
    """List the parameters given to the node that are not declared."""
    given: dict[str, Any] = node._parameter_overrides
    return [n for n in given if not node.has_parameter(n) and not n.startswith('qos_overrides.')]


def qos_overrides(node: Any, topic: str, entity: str) -> QoSOverridingOptions:
    """The policies of a topic that the user has set: qos_overrides./topic.subscription.depth."""
    start = f'qos_overrides.{node.resolve_topic_name(topic)}.{entity}.'
    given = {name.removeprefix(start).upper() for name in node._parameter_overrides}
    return QoSOverridingOptions([kind for name, kind in POLICIES.items() if name in given])


def unknown_qos_overrides(node: Any) -> list[str]:
    """List those that no topic uses, after all publishers and subscriptions are created."""
    given: dict[str, Any] = node._parameter_overrides
    return [n for n in given if n.startswith('qos_overrides.') and not node.has_parameter(n)]


def check(changes: Iterable[Any], configured: bool) -> SetParametersResult:
    """Refuse bad values with a reason; read-only, type and range are refused by rclpy itself."""
    for change in changes:
        entry = TABLE.get(change.name)
        problem = entry.limits.check(change.name, change.value) if entry is not None else None
        if entry is not None and entry.limits.when == CONFIGURE and configured:
            problem = (
                f'{change.name} cannot change while the node is configured: clean it up first'
            )
        if problem is not None:
            return SetParametersResult(successful=False, reason=problem)
    return SetParametersResult(successful=True)


def table(entries: Mapping[str, Entry] = TABLE) -> str:
    """The parameters as a Markdown table, as docs/node.md shows it."""
    lines = [
        '| parameter | default | values | may change | what it does |',
        '|---|---|---|---|---|',
    ]
    for entry in entries.values():
        limits, value = entry.limits, ros_value(entry.default)
        values = limits.values or type(value).__name__
        if limits.choices:
            values = ', '.join(limits.choices)
        elif limits.range is not None:
            values = f'{limits.range[0]} to {limits.range[1]}'
        default = f'`{str(value).lower() if isinstance(value, bool) else value}`'
        default = default if value != '' else 'none'
        lines.append(
            f'| `{entry.name}` | {default} | {values} | {limits.when} | {limits.description} |'
        )
    return '\n'.join(lines) + '\n'


if __name__ == '__main__':
    print(table(), end='')
