"""Geometric verification of matches, with OpenCV's USAC estimators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import cv2
import numpy as np
from numpy.typing import NDArray

from kp2d_core.features import Float

Method = Literal['none', 'homography', 'fundamental', 'essential']
METHODS: tuple[str, ...] = get_args(Method)
# Share of pairs that did not move from which on the camera counts as at rest. Not less: a slow
# camera moves only what is near, and those are the points that odometry needs.
AT_REST = 0.8
ENOUGH = 300  # pairs to estimate from, evenly taken: more take longer and change little
MINIMUM_POINTS = {'homography': 4, 'fundamental': 8, 'essential': 6}

_ESTIMATOR = cv2.USAC_MAGSAC  # MAGSAC++: the least sensitive to the threshold
# From 7 points it can take half a minute where the geometry is degenerate: a camera that hardly
# moves, or looks at a wall. From 8 it takes milliseconds, with the same inliers elsewhere.
_FUNDAMENTAL_ESTIMATOR = cv2.USAC_FM_8PTS
_CONFIDENCE = 0.999
_ITERATIONS = 5000


def verify(
    first: Float,
    second: Float,
    method: str,
    *,
    threshold: float = 3.0,
    intrinsics: NDArray[np.float64] | None = None,
    undistort: Callable[[Float], Float] | None = None,
) -> tuple[NDArray[np.bool_], NDArray[np.float64] | None]:
    """Which of the pairs of points (M, 2) agree with one geometry, and its 3x3 matrix.

    With too few points, or no geometry found, no pair is an inlier and the matrix is None.
    A camera at rest has no epipolar geometry either, but its points stay: where most pairs did
    not move, those are the inliers, and the matrix is None.

    `undistort` takes pixels to those of a camera without distortion, NaN where it has none.
    """
    if method not in METHODS:
        raise ValueError(f"verification must be one of {', '.join(METHODS)}, got '{method}'")
    if method == 'essential' and (intrinsics is None or np.shape(intrinsics) != (3, 3)):
        raise ValueError('essential verification needs intrinsics, a 3x3 camera matrix')
    if method == 'none':
        return np.ones(len(first), bool), None
    if not threshold > 0:
        raise ValueError(f'threshold must be above 0 px, got {threshold}')
    if method != 'homography' and len(first):
        still = ((second - first) ** 2).sum(axis=1) <= threshold**2
        if still.mean() > AT_REST:
            return still, None
    if undistort is not None:
        first, second = undistort(first), undistort(second)
    # A lens of more than 180 degrees sees what has no place in a plane.
    placed = np.isfinite(np.hstack([first, second])).all(axis=1)
    agreeing = np.zeros(len(first), bool)
    agreeing[placed], model = _agreeing(
        first[placed], second[placed], method, threshold, intrinsics
    )
    return agreeing, model


def _agreeing(
    first: Float,
    second: Float,
    method: str,
    threshold: float,
    intrinsics: NDArray[np.float64] | None,
) -> tuple[NDArray[np.bool_], NDArray[np.float64] | None]:
    if len(first) < MINIMUM_POINTS[method]:
        return np.zeros(len(first), bool), None
    sample = slice(None, None, -(-len(first) // ENOUGH))
    model, inliers = _estimate(first[sample], second[sample], method, threshold, intrinsics)
    if model is None or inliers is None or np.shape(model) != (3, 3):
        return np.zeros(len(first), bool), None
    model = np.asarray(model, np.float64)
    if len(first) <= ENOUGH and method != 'essential':
        return inliers.ravel().astype(bool), model
    return distances_to(model, method, first, second, intrinsics) <= threshold, model


def distances_to(
    model: NDArray[np.float64],
    method: str,
    first: Float,
    second: Float,
    intrinsics: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """How far pairs of points (M, 2) are from agreeing with a geometry, in pixels.

    For the essential matrix it is the angle between rays, in pixels of the image's middle: towards
    the rim of a wide lens undistorted pixels are stretched, 8 times at 70 degrees.
    """
    a, b = (np.column_stack([points, np.ones(len(points))]) for points in (first, second))
    if method == 'homography':
        there = a @ model.T
        with np.errstate(divide='ignore', invalid='ignore'):
            return np.asarray(np.linalg.norm(there[:, :2] / there[:, 2:] - second, axis=1))
    scale, axes = 1.0, 2  # lines in the image
    if method == 'essential':
        camera = np.asarray(intrinsics, np.float64)
        scale, axes = float(np.sqrt(camera[0, 0] * camera[1, 1])), 3  # planes through the camera
        inverse = np.linalg.inv(camera)
        rays = a @ inverse.T, b @ inverse.T
        a, b = (ray / np.linalg.norm(ray, axis=1)[:, None] for ray in rays)
    across, across_back = a @ model.T, b @ model
    # Sampson's: to the nearest pair of points that agrees.
    slopes = (across[:, :axes] ** 2).sum(axis=1) + (across_back[:, :axes] ** 2).sum(axis=1)
    off = np.abs((b * across).sum(axis=1)) / np.sqrt(np.maximum(slopes, 1e-12))
    return np.asarray(scale * off)


def _estimate(
    first: Float,
    second: Float,
    method: str,
    threshold: float,
    intrinsics: NDArray[np.float64] | None,
) -> tuple[NDArray[np.float64] | None, NDArray[np.uint8] | None]:
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    try:
        if method == 'homography':
            return cv2.findHomography(
                a, b, _ESTIMATOR, threshold, maxIters=_ITERATIONS, confidence=_CONFIDENCE
            )
        if method == 'fundamental':
            return cv2.findFundamentalMat(
                a, b, _FUNDAMENTAL_ESTIMATOR, threshold, _CONFIDENCE, _ITERATIONS
            )
        camera = np.asarray(intrinsics, np.float64)
        return cv2.findEssentialMat(
            a, b, camera, method=_ESTIMATOR, prob=_CONFIDENCE, threshold=threshold
        )
    except cv2.error:  # degenerate points
        return None, None
