"""The settings of the keypoint node: defaults, limits and descriptions.

This module does not need ROS. parameters.py turns the settings into ROS parameters. The pipeline
uses them directly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

from kp2d_core.detector import MOST_SCALES, SCALE_RANGE, check_scales
from kp2d_core.images import MINIMUM_SIDE, Size
from kp2d_core.verification import VERIFICATIONS

# When a setting may change. FRAME: at any time; it takes effect between two frames. CONFIGURE:
# before the node is configured, and again after a cleanup. START: only when the node starts.
FRAME, CONFIGURE, START = 'any time', 'configure', 'start'
DESCRIPTOR_FORMATS = ('float32', 'float16', 'int8', 'none')


def check_transport(name: str) -> None:
    if not name.replace('_', '').isalnum():
        raise ValueError(f"image_transport must be the name of a transport, got '{name}'")


def check_cameras(names: Sequence[str]) -> None:
    """Raise ValueError unless the names differ and are valid in topics."""
    single = [*names] == ['']
    valid = all(name.replace('_', '').isalnum() and name[0].isalpha() for name in names if name)
    if not (single or (1 <= len(names) <= 8 and all(names) and valid)) or len({*names}) < len(
        names
    ):
        raise ValueError(f'cameras must be up to 8 different names of topics, got {[*names]}')


def parse_size(text: str) -> Size | None:
    """Parse '640x480' to (640, 480) and '' to None; raise ValueError for anything else."""
    if not text:
        return None
    width, _, height = text.partition('x')
    if not (width.isdecimal() and height.isdecimal()) or not min(int(width), int(height)):
        raise ValueError(f"image_size must be like 640x480, got '{text}'")
    return int(width), int(height)


@dataclass(frozen=True)
class Limits:
    """The description of a setting for `ros2 param describe`, and its allowed values."""

    description: str
    range: tuple[float, float] | None = None
    choices: tuple[str, ...] = ()
    when: str = FRAME  # when it may change
    smallest: int = 0  # smallest allowed value apart from 0, which means 'off'
    values: str = ''  # allowed values in words, if neither range nor choices describe them
    verify: Callable[[Any], object] | None = None  # raises a ValueError that names the problem

    def check(self, name: str, value: Any) -> str | None:
        """Describe what is wrong with a value of the right type; None if it is valid."""
        if self.choices and value not in self.choices:
            return f"{name} must be one of {', '.join(self.choices)}, got '{value}'"
        if isinstance(value, int) and 0 < value < self.smallest:
            return f'{name} must be 0 or at least {self.smallest}, got {value}'
        if isinstance(value, float) and not math.isfinite(value):
            return f'{name} must be a finite number, got {value}'
        if self.verify is not None:
            try:
                self.verify(value)
            except ValueError as error:
                return str(error)
        return None


def setting(default: Any, description: str, **limits: Any) -> Any:
    return field(default=default, metadata={'limits': Limits(description, **limits)})


def configured(default: Any, description: str, **limits: Any) -> Any:
    return setting(default, description, when=CONFIGURE, **limits)


def fixed(default: Any, description: str, **limits: Any) -> Any:
    return setting(default, description, when=START, **limits)


@dataclass(frozen=True)
class Settings:
    """All settings. Each frame is processed with a single Settings object."""

    # The model.
    model: str = configured(
        'auto',
        'Model to run: the name of a shipped model, a .safetensors file or an exported model; '
        'auto: the model small, on every machine.',
    )
    runtime: str = configured(
        'auto', 'Inference runtime; `kp2d info` lists those of this machine. auto: the best one.'
    )
    precision: str = configured(
        'auto', 'Precision of the model; auto: int8 with OpenVINO on a CPU with VNNI or AMX, '
        'fp16 with TensorRT, else fp32. An exported model keeps its own precision.',
        choices=('auto', 'fp32', 'fp16', 'int8'),
    )  # fmt: skip
    threads: int = configured(0, 'CPU threads; 0: the runtime decides.', range=(0, 256))
    # The input.
    cameras: tuple[str, ...] = configured(
        ('',), 'Names of the cameras, such as [left, right]: each has its topics (left/image, '
        'left/keypoints). Images of the same time are processed together. Keypoints are matched '
        'between cameras. One empty name: a single camera, with the topics image, keypoints.',
        values='1 to 8 names', verify=check_cameras,
    )  # fmt: skip
    sync_tolerance: float = setting(
        0.005, 'Process images of several cameras together if their stamps differ by at most this '
        'many seconds.', range=(0.0, 1.0),
    )  # fmt: skip
    image_size: str = configured(
        '', 'Compile the model for this image size, such as 640x480, when the node is '
        'configured. Empty: take the size from camera_info, or from the first image.',
        values='WxH, or none', verify=parse_size,
    )  # fmt: skip
    image_transport: str = configured(
        'raw', 'raw: subscribe to image; compressed: subscribe to image/compressed; other names: '
        'use the image_transport plugin of this name, if image_transport_py is installed.',
        values='raw, compressed, or the name of a plugin', verify=check_transport,
    )  # fmt: skip
    image_geometry: str = configured(
        'auto', 'Whether images are raw (use K and D of camera_info) or rectified (use P); auto: '
        'rectified if the topic has a name such as image_rect.',
        choices=('auto', 'raw', 'rectified'),
    )  # fmt: skip
    reliability: str = configured(
        'auto', 'QoS reliability of the image subscription; auto: reliable if all publishers are '
        'reliable, else best effort.', choices=('auto', 'best_effort', 'reliable'),
    )  # fmt: skip
    mask: str = configured(
        '', 'Image file of the same size as the frames; keypoints where it is 0 are dropped.'
    )
    managed: bool = fixed(
        False, 'Wait for lifecycle transitions instead of starting automatically.'
    )
    diagnostics_period: float = fixed(
        1.0, 'Seconds between two messages on /diagnostics.', range=(0.1, 60.0)
    )
    # Detection.
    max_keypoints: int = setting(
        1000, 'Keep at most this many keypoints, those with the highest scores.',
        range=(1, 100_000),
    )  # fmt: skip
    score_threshold: float = setting(
        0.45, 'Keep keypoints with a score above this.', range=(0.0, 1.0)
    )
    nms_radius: float = setting(
        3.0, 'Non-maximum suppression: drop a keypoint that lies closer than this many pixels to '
        'a better one; 0: keep all.',
        range=(0.0, 200.0),
    )  # fmt: skip
    working_size: int = setting(
        0, 'Resize images to this many pixels along the longer side before detection; 0: do not '
        'resize.', range=(0, 8192), smallest=MINIMUM_SIDE,
    )  # fmt: skip
    scales: tuple[float, ...] = setting(
        (1.0,), 'Detect at each of these multiples of the working size and keep the best '
        'keypoints of all. One scale is fastest and suffices for successive frames; [1.0, 0.5] '
        'is robust to changes of distance; [2.0, 1.0] is more precise. Write numbers with '
        'decimal points.',
        verify=check_scales,
        values=f'1 to {MOST_SCALES} different numbers, {SCALE_RANGE[0]} to {SCALE_RANGE[1]}',
    )  # fmt: skip
    descriptor_format: str = setting(
        'int8',
        'Type of the descriptors in the keypoints message; int8 takes a quarter of the bytes of '
        'float32 with almost no loss.',
        choices=DESCRIPTOR_FORMATS,
    )
    # Matching and tracking.
    track: bool = setting(True, 'Match each frame with the previous one and maintain tracks.')
    match_ratio: float = setting(
        0.0, 'Ratio test: keep a match if its distance is below this fraction of the distance to '
        'the second nearest; 0: off.',
        range=(0.0, 1.0),
    )  # fmt: skip
    match_distance: float = setting(
        0.0, 'Keep matches up to this descriptor distance; 0: off.', range=(0.0, 2.0)
    )
    search_radius: float = setting(
        0.0, 'Search for a match within this many pixels of the previous position; 0: everywhere.',
        range=(0.0, 10_000.0),
    )  # fmt: skip
    verification: str = setting(
        'auto', 'Geometric model that separates inliers from outliers; auto: essential with a '
        'calibrated camera_info, else fundamental.', choices=('auto', *VERIFICATIONS),
    )  # fmt: skip
    verification_threshold: float = setting(
        2.0, 'Largest error of an inlier, in pixels; with a calibrated camera, in pixels at the '
        'image centre.', range=(0.01, 100.0),
    )  # fmt: skip
    refine_matches: bool = setting(
        False, 'Refine matched keypoints to a tenth of a pixel or two: align the image patches '
        'around them with those of the previous frame. Matches that do not align are outliers. '
        'This costs about 10 ms for 500 matches.',
    )  # fmt: skip
    max_missed: int = setting(
        2, 'End a track if it is missed in more than this many successive frames. A track seen '
        'in only one frame ends the first time it is missed.', range=(0, 100),
    )  # fmt: skip
    max_gap: float = setting(
        2.0, 'Restart all tracks after a gap of this many seconds between two frames.',
        range=(0.001, 3600.0),
    )  # fmt: skip
    # The overlay.
    overlay_tail: int = setting(
        10,
        'Draw the trail of each track over this many past frames, but not longer than an eighth '
        'of the image.',
        range=(0, 100),
    )
    jpeg_quality: int = setting(80, 'JPEG quality of debug_image/compressed.', range=(1, 100))


@dataclass(frozen=True)
class Entry:
    """One row of the table of settings."""

    name: str
    default: Any
    limits: Limits


def entries() -> Iterator[Entry]:
    for each in fields(Settings):
        assert each.default is not MISSING
        yield Entry(each.name, each.default, each.metadata['limits'])


TABLE = {entry.name: entry for entry in entries()}


def changed(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """Return the settings with these values; ignore unknown names."""
    known = {name: value for name, value in values.items() if name in TABLE}
    for name in known:
        if isinstance(TABLE[name].default, tuple):
            known[name] = tuple(known[name])
    return replace(settings, **known)
