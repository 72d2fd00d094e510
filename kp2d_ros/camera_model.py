"""A calibrated camera: from sensor_msgs/CameraInfo to undistorted pixels and bearings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from kp2d_core.features import Float
from kp2d_core.images import Size

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
    rotation: tuple[float, ...] = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0)  # rectification R

    @property
    def matrix(self) -> NDArray[np.float64]:
        return np.array(self.intrinsics, np.float64).reshape(3, 3)

    def bearings(self, points: Float) -> Float:
        """(N, 2) pixels -> (N, 2) rectified (x / z, y / z): the ray of a point is (x, y, 1).

        NaN where a wide lens sees what is beside the camera or behind it.
        """
        return self._undistort(points, rotation=np.array(self.rotation).reshape(3, 3))

    def undistorted(self, points: Float) -> Float:
        """(N, 2) pixels -> the pixels of a camera with the same K and no distortion; NaN as above.

        An equidistant lens is no such camera even if all its coefficients are 0.
        """
        if not self.fisheye and not any(self.distortion):
            return points
        return self._undistort(points, projection=self.matrix)

    def _undistort(
        self,
        points: Float,
        rotation: NDArray[np.float64] | None = None,
        projection: NDArray[np.float64] | None = None,
    ) -> Float:
        if not len(points):
            return np.empty((0, 2), np.float32)
        function = cv2.fisheye.undistortPoints if self.fisheye else cv2.undistortPoints
        coefficients = np.array(self.distortion or (0.0,) * 4, np.float64)
        result = function(
            np.asarray(points, np.float64)[:, None], self.matrix, coefficients,
            R=rotation, P=projection,
        )  # fmt: skip
        undistorted = np.asarray(result, np.float32).reshape(-1, 2)
        if self.fisheye:
            undistorted[self._sideways(points)] = np.nan
        return undistorted

    def _sideways(self, points: Float) -> NDArray[np.bool_]:
        """Which rays are (nearly) at 90 degrees to the axis or beyond: no pixel is theirs."""
        fx, _, cx, _, fy, cy, *_ = self.intrinsics
        angle = np.hypot((points[:, 0] - cx) / fx, (points[:, 1] - cy) / fy)  # distorted
        theta = np.linspace(0, WIDEST, 512)
        k1, k2, k3, k4 = self.distortion or (0.0,) * 4
        distorted = theta * (
            1 + k1 * theta**2 + k2 * theta**4 + k3 * theta**6 + k4 * theta**8
        )
        # OpenCV takes none beyond 90 degrees, nor where the polynomial has turned back.
        return np.asarray(angle >= min(distorted.max(), np.pi / 2))


def camera_model(info: Any) -> CameraModel | None:
    """The model of a CameraInfo; None if it says that the camera is not calibrated.

    ValueError in a sentence if it is damaged.
    """
    intrinsics = tuple(float(value) for value in info.k)
    if intrinsics[0] == 0.0:  # how an uncalibrated camera says so
        return None
    distortion = tuple(float(value) for value in info.d)
    rotation = tuple(float(value) for value in info.r)
    if not np.isfinite([*intrinsics, *distortion, *rotation]).all():
        raise ValueError('camera_info holds NaN or infinity')
    if intrinsics[0] < 0 or intrinsics[4] <= 0 or intrinsics[8] != 1.0:
        raise ValueError(f'the K of camera_info is no camera matrix: {list(intrinsics)}')
    model = info.distortion_model
    if model not in _MODELS:
        raise ValueError(f"the distortion model '{model}' is not one of {', '.join(_MODELS)[2:]}")
    if len(distortion) not in _MODELS[model]:
        raise ValueError(f"camera_info has {len(distortion)} coefficients for '{model}'")
    if not any(rotation):
        rotation = CameraModel.rotation
    return CameraModel(
        (info.width, info.height), intrinsics, distortion, model == 'equidistant', rotation
    )
