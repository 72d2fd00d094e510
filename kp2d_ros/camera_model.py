"""A calibrated camera: from sensor_msgs/CameraInfo to undistorted pixels and bearings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from kp2d_core.features import Float
from kp2d_core.images import Size
from kp2d_core.lenses import undistort
from kp2d_ros.calibration import Info, read_out, rectified

# distortion_model -> how many coefficients it may have
_MODELS = {
    '': (0, 4, 5, 8, 12, 14),
    'none': (0,),
    'plumb_bob': (0, 4, 5),
    'rational_polynomial': (8, 12, 14),
    'equidistant': (4,),
}
WIDEST = np.deg2rad(89)  # from the axis; beyond, x / z says nothing


@dataclass(frozen=True)
class CameraModel:
    """Intrinsics of images of one size. Equal if all values are."""

    size: Size
    intrinsics: tuple[float, ...]  # row-major 3x3 K
    distortion: tuple[float, ...] = ()
    fisheye: bool = False  # the equidistant model
    rotation: tuple[float, ...] = Info.r  # rectification R
    literal: CameraModel | None = None  # the same, if its binning or region is not to be applied

    @property
    def matrix(self) -> NDArray[np.float64]:
        return np.array(self.intrinsics, np.float64).reshape(3, 3)

    def of(self, size: Size) -> CameraModel | None:
        """The model of images of this size, if it has one."""
        return next((m for m in (self, self.literal) if m is not None and m.size == size), None)

    def bearings(self, points: Float) -> Float:
        """(N, 2) pixels -> (N, 2) rectified (x / z, y / z): the ray of a point is (x, y, 1).

        NaN where a wide lens sees what is beside the camera or behind it, and where the
        distortion cannot be undone.
        """
        return self._from_rays(points, np.array(self.rotation).reshape(3, 3))

    def undistorted(self, points: Float) -> Float:
        """(N, 2) pixels -> the pixels of a camera with the same K and no distortion; NaN as above.

        An equidistant lens is no such camera even if all its coefficients are 0.
        """
        if not self.fisheye and not any(self.distortion):
            return points
        return self._from_rays(points, self.matrix)

    def _from_rays(self, points: Float, matrix: NDArray[np.float64]) -> Float:
        """What a matrix makes of the points' rays, as (x / z, y / z)."""
        if not len(points):
            return np.empty((0, 2), np.float32)
        distorted = np.asarray(points, np.float64)
        if self.fisheye:
            coefficients = np.array(self.distortion or (0.0,) * 4, np.float64)
            flat = cv2.fisheye.undistortPoints(distorted[:, None], self.matrix, coefficients)
            flat = flat.reshape(-1, 2)
            flat[self._sideways(points)] = np.nan
        else:
            flat = undistort(distorted, self.matrix, np.array(self.distortion, np.float64))
        rays = np.column_stack([flat, np.ones(len(flat))]) @ matrix.T
        return np.asarray(rays[:, :2] / rays[:, 2:], np.float32)

    def _sideways(self, points: Float) -> NDArray[np.bool_]:
        """Which rays are (nearly) at 90 degrees to the axis or beyond: no pixel is theirs."""
        fx, _, cx, _, fy, cy, *_ = self.intrinsics
        angle = np.hypot((points[:, 0] - cx) / fx, (points[:, 1] - cy) / fy)  # distorted
        theta = np.linspace(0, WIDEST, 512)
        k1, k2, k3, k4 = self.distortion or (0.0,) * 4
        distorted = theta * (1 + k1 * theta**2 + k2 * theta**4 + k3 * theta**6 + k4 * theta**8)
        # OpenCV takes none beyond 90 degrees, nor where the polynomial has turned back.
        return np.asarray(angle >= min(distorted.max(), np.pi / 2))


def camera_model(info: Any, is_rectified: bool = False) -> CameraModel | None:
    """The model of a CameraInfo; None if it says that the camera is not calibrated.

    Its P describes rectified images, its K, D and R those that the camera took. ValueError in a
    sentence if it is damaged.
    """
    if info.k[0] == 0.0:  # how an uncalibrated camera says so
        return None
    change = rectified if is_rectified else read_out
    model = _model(change(info))
    if info.binning_x > 1 or info.binning_y > 1 or info.roi.width:
        # Some drivers put them beside what was calibrated with them.
        whole = Info(
            info.width, info.height, info.k, info.d, info.r, info.p, info.distortion_model
        )
        return replace(model, literal=_model(change(whole)))
    return model


def _model(info: Info) -> CameraModel:
    numbers = [*info.k, *info.d, *info.r]
    if not np.isfinite(numbers).all():
        raise ValueError('camera_info holds NaN or infinity')
    if info.k[0] < 0 or info.k[4] <= 0 or info.k[8] != 1.0:
        raise ValueError(f'the K of camera_info is no camera matrix: {list(info.k)}')
    model = info.distortion_model
    if model not in _MODELS:
        raise ValueError(f"the distortion model '{model}' is not one of {', '.join(_MODELS)[2:]}")
    if len(info.d) not in _MODELS[model]:
        raise ValueError(f"camera_info has {len(info.d)} coefficients for '{model}'")
    k, d, r = (tuple(float(value) for value in values) for values in (info.k, info.d, info.r))
    rotation = r if any(r) else CameraModel.rotation
    return CameraModel((info.width, info.height), k, d, model == 'equidistant', rotation)
