"""Pictures and their calibrations, without ROS: what the camera node turns into messages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from kp2d_core.errors import FileError
from kp2d_core.images import Image, Size


@dataclass(frozen=True)
class Picture:
    image: Image  # RGB or gray
    info: Any = None  # what has the fields of a CameraInfo, where the source knows it


@dataclass(frozen=True)
class Region:
    """What is read out of a sensor; of no size: all."""

    x_offset: int = 0
    y_offset: int = 0
    width: int = 0
    height: int = 0


@dataclass(frozen=True)
class Info:
    """The fields of a CameraInfo, without ROS."""

    width: int
    height: int
    k: tuple[float, ...]
    d: tuple[float, ...] = ()
    r: tuple[float, ...] = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
    p: tuple[float, ...] = (0.0,) * 12
    distortion_model: str = 'plumb_bob'
    binning_x: int = 0
    binning_y: int = 0
    roi: Region = Region()


def pinhole_info(size: Size, intrinsics: NDArray[np.float64]) -> Info:
    projection = np.column_stack([intrinsics, np.zeros(3)])
    return Info(
        *size, tuple(intrinsics.ravel().tolist()), (0.0,) * 5, p=tuple(projection.ravel().tolist())
    )


def uncalibrated_info(size: Size) -> Info:
    """K of zeros, as the message's definition asks of a camera without a calibration."""
    return Info(*size, (0.0,) * 9, r=(0.0,) * 9, distortion_model='')


def scaled(info: Any, size: Size) -> Info:
    """The calibration of the same pictures, resized: centres of pixels are at whole numbers."""
    x, y = size[0] / info.width, size[1] / info.height
    return _moved(info, size, np.array([[x, 0, (x - 1) / 2], [0, y, (y - 1) / 2], [0, 0, 1]]))


def read_out(info: Any) -> Info:
    """Of a whole sensor's calibration, that of the region that is read out, in binned pixels."""
    x, y = 1 / max(1, info.binning_x), 1 / max(1, info.binning_y)
    left, top = info.roi.x_offset, info.roi.y_offset
    width, height = info.roi.width or info.width, info.roi.height or info.height
    return _moved(
        info,
        (int(width * x), int(height * y)),
        np.array([[x, 0, (x - 1) / 2 - left * x], [0, y, (y - 1) / 2 - top * y], [0, 0, 1]]),
    )


def rectified(info: Any) -> Info:
    """Of rectified pictures, which P describes; as it is where P is not given."""
    if not info.p[0]:
        return read_out(info)
    straight = replace(read_out(info), d=(), r=Info.r, distortion_model='none')
    return replace(straight, k=tuple(np.reshape(straight.p, (3, 4))[:, :3].ravel().tolist()))


def names_rectified(topic: str) -> bool:
    """image_proc calls them image_rect, image_rect_color; compressed ones too."""
    return 'rect' in topic.removesuffix('/compressed').rpartition('/')[2].split('_')


def _moved(info: Any, size: Size, pixels: NDArray[np.float64]) -> Info:
    """The calibration of pictures whose pixels are moved by a 3x3 matrix."""
    k, p = (pixels @ np.reshape(matrix, (3, -1)) for matrix in (info.k, info.p))
    return Info(
        *size, tuple(k.ravel().tolist()), tuple(info.d), tuple(info.r), tuple(p.ravel().tolist()),
        info.distortion_model,
    )  # fmt: skip


def read_calibration(path: str | Path) -> Info:
    """A file as ROS's camera_calibration writes it; FileError if it is not one."""
    try:
        values = yaml.safe_load(Path(path).expanduser().read_text(encoding='utf-8'))

        def numbers(name: str, count: int | None = None) -> tuple[float, ...]:
            found = tuple(float(value) for value in values[name]['data'])
            if count is not None and len(found) != count:
                raise ValueError(f'{name} has {len(found)} values, not {count}')
            return found

        return Info(
            int(values['image_width']),
            int(values['image_height']),
            numbers('camera_matrix', 9),
            numbers('distortion_coefficients'),
            numbers('rectification_matrix', 9),
            numbers('projection_matrix', 12),
            str(values['distortion_model']),
        )
    except OSError as error:
        raise FileError(f'cannot read {path}: {error.strerror}') from None
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise FileError(f'{path} is not a camera calibration: {error!r}') from None
