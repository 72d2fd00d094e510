"""Estimate the scale of a map from the height of the camera above the ground."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kp2d_core.geometry import Matrix

TILT = np.deg2rad(15)  # largest tilt of the ground in the frame of the base
HYPOTHESES = 300
OFF = 0.04  # largest distance of an inlier from the plane, as a fraction of the height
FEWEST = 15  # a plane needs at least this many inliers
SHARE = 0.1  # at least this fraction of the points below the camera must be inliers
BENEATH = 0.1  # at most this fraction of the points below the camera may lie below the plane
AGREEING = 9  # the scale needs at least this many estimates
# Largest interquartile range of the estimates, relative to their median. The camera may bob.
SPREAD = 0.1


def ground_height(points: Matrix, random: np.random.Generator) -> float | None:
    """Fit the ground plane and return its distance below the origin; None if it finds no plane.

    points  (N, 3) relative to the camera, z up, in any unit
    """
    points = points[np.isfinite(points).all(axis=1)]
    below = points[points[:, 2] < 0]
    if len(below) < FEWEST:
        return None
    # Far points are inaccurate, and may lie on another ground.
    distance = np.linalg.norm(below, axis=1)
    below = below[distance < 3 * np.median(distance)]
    if len(below) < FEWEST:
        return None
    normals, heights = _planes(below, random)
    if not len(heights):
        return None
    off = np.abs(below @ normals.T + heights) < OFF * heights  # (N, H)
    deeper = below @ normals.T + heights < -2 * OFF * heights
    support = off.sum(axis=0)
    support[deeper.mean(axis=0) > BENEATH] = 0
    best = int(np.argmax(support))
    if support[best] < max(FEWEST, SHARE * len(below)):
        return None
    return _refined(below[off[:, best]])


def _planes(points: Matrix, random: np.random.Generator) -> tuple[Matrix, Matrix]:
    """Sample planes: upward normals (H, 3), and heights (H,) of the origin above the planes."""
    three = points[random.integers(len(points), size=(HYPOTHESES, 3))]
    normals = np.cross(three[:, 1] - three[:, 0], three[:, 2] - three[:, 0])
    lengths = np.linalg.norm(normals, axis=1)
    sound = lengths > 1e-12
    normals, three = normals[sound] / lengths[sound, None], three[sound]
    normals *= np.sign(normals[:, 2:])
    heights = -(normals * three[:, 0]).sum(axis=1)
    level = (normals[:, 2] > np.cos(TILT)) & (heights > 0)
    return normals[level], heights[level]


def _refined(points: Matrix) -> float | None:
    """Fit z = a x + b y + c by least squares."""
    columns = np.column_stack([points[:, :2], np.ones(len(points))])
    (a, b, c), *_ = np.linalg.lstsq(columns, points[:, 2], rcond=None)
    height = -c / np.sqrt(a * a + b * b + 1)
    return float(height) if height > 0 else None


class GroundScale:
    """Collects estimates of the ground height until enough of them agree."""

    def __init__(self, camera_height: float) -> None:
        self.camera_height = camera_height
        self._heights: list[float] = []
        self._random = np.random.default_rng(0)

    def add(self, points: Matrix) -> None:
        """Add a keyframe: map points relative to the camera, z up, in units of the map."""
        height = ground_height(points, self._random)
        if height is not None:
            self._heights = [*self._heights[-(3 * AGREEING) :], height]

    @property
    def estimates(self) -> int:
        return len(self._heights)

    @property
    def scale(self) -> float | None:
        """Metres per unit of the map; None: still unknown."""
        if len(self._heights) < AGREEING:
            return None
        heights: NDArray[np.float64] = np.array(self._heights)
        low, middle, high = np.percentile(heights, (25, 50, 75))
        if high - low > SPREAD * middle:
            return None
        return float(self.camera_height / middle)
