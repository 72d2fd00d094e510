"""The parameters of the keypoint node in one table: it declares, validates and documents them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

from rcl_interfaces.msg import (
    FloatingPointRange,
    IntegerRange,
    ParameterDescriptor,
    SetParametersResult,
)

from kp2d_core.detector import MOST_SCALES, SCALE_RANGE, check_scales
from kp2d_core.images import MINIMUM_SIDE
from kp2d_core.verification import METHODS
from kp2d_ros.messages import DESCRIPTOR_FORMATS
from kp2d_ros.pipeline import Settings

Value = Any  # bool, int, float, str or a list of floats


@dataclass(frozen=True)
class Parameter:
    name: str
    default: Value
    description: str
    range: tuple[float, float] | None = None
    choices: tuple[str, ...] = ()
    read_only: bool = False  # fixed when the node starts
    smallest: int = 0  # of the values above 0, which stands for 'off'
    values: str = ''  # in words, where neither range nor choices tell
    verify: Callable[[Any], object] | None = None  # raises a ValueError that says what is wrong

    def descriptor(self) -> ParameterDescriptor:
        """What `ros2 param describe` shows, and rclpy enforces: type, range, read-only."""
        result = ParameterDescriptor(
            name=self.name,
            description=self.description,
            read_only=self.read_only,
            additional_constraints=f'one of {", ".join(self.choices)}'
            if self.choices
            else self.values,
        )
        if self.range is not None and isinstance(self.default, float):
            low, high = self.range
            result.floating_point_range = [FloatingPointRange(from_value=low, to_value=high)]
        elif self.range is not None:
            low, high = (int(bound) for bound in self.range)
            result.integer_range = [IntegerRange(from_value=low, to_value=high, step=1)]
        return result

    def check(self, value: Any) -> str | None:
        """What is wrong with a value, beyond what rclpy finds by itself; None if nothing is."""
        if self.choices and value not in self.choices:
            return f"{self.name} must be one of {', '.join(self.choices)}, got '{value}'"
        if isinstance(value, int) and 0 < value < self.smallest:
            return f'{self.name} must be 0 or at least {self.smallest}, got {value}'
        if isinstance(value, float) and not math.isfinite(value):
            return f'{self.name} must be a finite number, got {value}'
        if self.verify is not None:
            try:
                self.verify(value)
            except ValueError as error:
                return str(error)
        return None


def fixed(name: str, default: Value, description: str, **constraints: Any) -> Parameter:
    return Parameter(name, default, description, read_only=True, **constraints)


_S = Settings()
SCALES = f'1 to {MOST_SCALES} different numbers, {SCALE_RANGE[0]} to {SCALE_RANGE[1]}'

PARAMETERS: tuple[Parameter, ...] = (
    # The model.
    fixed('model', 'auto', 'A shipped model, a .safetensors file or an exported model; auto: v4 '
          'where TensorRT runs on a GPU, else small.'),
    fixed('runtime', 'auto', 'What runs the model; `kp2d info` lists what this machine has.'),
    fixed('precision', 'auto', 'Of the computation, where the runtime can; auto: fp32, or what an '
          'exported model has.', choices=('auto', 'fp32', 'fp16', 'int8')),
    fixed('threads', 0, 'CPU threads of the runtime; 0: it decides.', range=(0, 256)),
    # The input.
    fixed('image_transport', 'raw', 'Subscribe to image (raw) or image/compressed.',
          choices=('raw', 'compressed')),
    fixed('image_geometry', 'auto', 'Whether the images are raw, as the K and D of camera_info '
          'say, or rectified, as its P says; auto: rectified if the topic is called image_rect or '
          'the like.',
          choices=('auto', 'raw', 'rectified')),
    fixed('reliability', 'auto', 'QoS of the image subscription; auto: best effort, which meets '
          'both kinds of publishers.', choices=('auto', 'best_effort', 'reliable')),
    fixed('mask', '', 'An image file of the size of the frames; keypoints are kept where it '
          'is not 0.'),
    fixed('managed', False, 'Wait for lifecycle transitions instead of starting by itself.'),
    fixed('diagnostics_period', 1.0, 'Seconds between two messages on /diagnostics.',
          range=(0.1, 60.0)),
    # Detection.
    Parameter('max_keypoints', _S.max_keypoints, 'Keep the best so many.', range=(1, 100_000)),
    Parameter('score_threshold', _S.score_threshold, 'Keep scores above it.', range=(0.0, 1.0)),
    Parameter('nms_radius', _S.nms_radius,
              'Keep only the best keypoint within so many pixels; 0: off.', range=(0.0, 200.0)),
    Parameter('working_size', _S.working_size, 'Run the network on the image resized to so many '
              'pixels along its longer side; 0: as it is.', range=(0, 8192),
              smallest=MINIMUM_SIDE),
    Parameter('scales', [*_S.scales], 'Run it at so many times that size, each of them, and keep '
              'the best keypoints of all: [1.0, 0.5] for changes of distance, [2.0, 1.0] for '
              'exactness (all with a decimal point). One is the fastest, and enough from frame to '
              'frame.', verify=check_scales,
              values=SCALES),
    Parameter('descriptor_format', 'float32', 'Of the descriptors in the keypoints message.',
              choices=DESCRIPTOR_FORMATS),
    Parameter('bearings', _S.bearings, 'Add bearing_x, bearing_y to the keypoints: rectified '
              'coordinates, from camera_info; NaN without it.'),
    # Matching and tracking.
    Parameter('track', _S.track, 'Match each frame with the one before and keep tracks.'),
    Parameter('match_ratio', _S.match_ratio, 'Keep a match if its distance is below this times '
              'that of the second nearest; 0: off.', range=(0.0, 1.0)),
    Parameter('match_distance', _S.match_distance, 'Keep a match up to this descriptor distance; '
              '0: off.', range=(0.0, 2.0)),
    Parameter('search_radius', _S.search_radius, 'Look for a match within so many pixels of where '
              'the keypoint was; 0: everywhere.', range=(0.0, 10_000.0)),
    Parameter('verification', _S.verification, 'Geometry that matches must agree with; auto: '
              'essential with a calibrated camera_info, else fundamental.',
              choices=('auto', *METHODS)),
    Parameter('verification_threshold', _S.verification_threshold,
              'Pixels that a match may be off that geometry; with a calibrated camera those of '
              "the image's middle.", range=(0.01, 100.0)),
    Parameter('max_missed', _S.max_missed, 'A track ends when it is missed in more than so many '
              'frames in a row; one that was seen only once, at once.', range=(0, 100)),
    Parameter('max_gap', _S.max_gap, 'Seconds between two frames after which tracks begin anew.',
              range=(0.001, 3600.0)),
    # The overlay.
    Parameter('overlay_tail', 10, 'Frames of the past that a track is drawn through.',
              range=(0, 100)),
    Parameter('jpeg_quality', 80, 'Of debug_image/compressed.', range=(1, 100)),
)  # fmt: skip

BY_NAME = {parameter.name: parameter for parameter in PARAMETERS}


def declare(node: Any) -> dict[str, Value]:
    """Declare all of them on a node; their values, with overrides. ValueError if one is bad."""
    for parameter in PARAMETERS:
        node.declare_parameter(parameter.name, parameter.default, parameter.descriptor())
    values = {p.name: node.get_parameter(p.name).value for p in PARAMETERS}
    for name in unknown(node):
        node.get_logger().warning(f"there is no parameter '{name}': it has no effect")
    for parameter in PARAMETERS:
        problem = parameter.check(values[parameter.name])
        if problem is not None:
            raise ValueError(problem)
    return values


def unknown(node: Any) -> list[str]:
    """Parameters that were given to the node and that nothing has declared."""
    given: dict[str, Any] = node._parameter_overrides
    return [n for n in given if not node.has_parameter(n) and not n.startswith('qos_overrides.')]


def check(changes: Iterable[Any]) -> SetParametersResult:
    """Refuse bad values with a reason; read-only, type and range are refused by rclpy itself."""
    for change in changes:
        parameter = BY_NAME.get(change.name)
        problem = parameter.check(change.value) if parameter is not None else None
        if problem is not None:
            return SetParametersResult(successful=False, reason=problem)
    return SetParametersResult(successful=True)


def settings(values: dict[str, Value]) -> Settings:
    """The pipeline's part of the values."""
    names = {field.name for field in fields(Settings)}
    chosen: dict[str, Any] = {name: value for name, value in values.items() if name in names}
    return Settings(**chosen | {'scales': tuple(chosen['scales'])})


def table() -> str:
    """The parameters as a Markdown table, as docs/node.md shows it."""
    lines = ['| parameter | default | values | live | what it does |', '|---|---|---|---|---|']
    for p in PARAMETERS:
        values = p.values or type(p.default).__name__
        if p.choices:
            values = ', '.join(p.choices)
        elif p.range is not None:
            values = f'{p.range[0]} to {p.range[1]}'
        live = 'no' if p.read_only else 'yes'
        default = f'`{str(p.default).lower() if isinstance(p.default, bool) else p.default}`'
        default = default if p.default != '' else 'none'
        lines.append(f'| `{p.name}` | {default} | {values} | {live} | {p.description} |')
    return '\n'.join(lines) + '\n'


if __name__ == '__main__':
    print(table(), end='')
