"""Lenses: from the pixels that a camera took to the rays that they saw."""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

FAITHFUL = 0.1  # pixels that an undistorted point may be off when it is distorted again
_STOP = (cv2.TERM_CRITERIA_EPS | cv2.TERM_CRITERIA_COUNT, 100, 1e-4)  # 5 steps are pixels off


def undistort(
    points: NDArray[np.float64], intrinsics: NDArray[np.float64], coefficients: NDArray[np.float64]
) -> NDArray[np.float64]:
    """(N, 2) pixels -> (N, 2) coordinates x / z, y / z; NaN where there are none.

    coefficients  OpenCV's k1 k2 p1 p2 ..., 4 to 14 of them; none: no distortion
    """
    if not len(points) or not coefficients.any():
        return (points - intrinsics[:2, 2]) / intrinsics[[0, 1], [0, 1]]
    given = np.ascontiguousarray(points, np.float64)[:, None]
    if hasattr(cv2, 'undistortPointsIter'):  # OpenCV 4
        flat = cv2.undistortPointsIter(given, intrinsics, coefficients, None, None, _STOP)
    else:
        flat = cv2.undistortPoints(given, intrinsics, coefficients, criteria=_STOP)
    flat = np.asarray(flat, np.float64).reshape(-1, 2)
    rays = np.column_stack([flat, np.ones(len(flat))])
    again, _ = cv2.projectPoints(rays, np.zeros(3), np.zeros(3), intrinsics, coefficients)
    off = np.linalg.norm(again.reshape(-1, 2) - points, axis=1)
    flat[~(off < FAITHFUL)] = np.nan  # the polynomial has turned back before it comes so far
    return flat
