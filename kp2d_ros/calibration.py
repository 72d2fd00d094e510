"""Pictures and their calibrations, without ROS: what the camera node turns into messages."""

from __future__ import annotations

from dataclasses import dataclass
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
class Info:
    """The fields of a CameraInfo, without ROS."""

    width: int
    height: int
    k: tuple[float, ...]
    d: tuple[float, ...] = ()
    r: tuple[float, ...] = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
    p: tuple[float, ...] = (0.0,) * 12
    distortion_model: str = 'plumb_bob'


def pinhole_info(size: Size, intrinsics: NDArray[np.float64]) -> Info:
    projection = np.column_stack([intrinsics, np.zeros(3)])
    return Info(
        *size, tuple(intrinsics.ravel().tolist()), (0.0,) * 5, p=tuple(projection.ravel().tolist())
    )


def uncalibrated_info(size: Size) -> Info:
    """K of zeros, as the message's definition asks of a camera without a calibration."""
    return Info(*size, (0.0,) * 9, r=(0.0,) * 9, distortion_model='')


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
