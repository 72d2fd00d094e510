"""Geometric verification of matches, with OpenCV's USAC estimators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import cv2
import numpy as np
from numpy.typing import NDArray

from kp2d_core.checks import number
from kp2d_core.features import Float
from kp2d_core.geometry import in_front, warp_points

Verification = Literal['none', 'homography', 'fundamental', 'essential']
VERIFICATIONS: tuple[str, ...] = get_args(Verification)
# Share of pairs that did not move from which on the camera counts as at rest. Not less: a slow
# camera moves only what is near, and those are the points that odometry needs.
AT_REST = 0.8
ENOUGH = 300  # pairs to estimate from, evenly taken: more take longer and change little
FITS = 8  # rounds of least squares over the inliers, at most
GAUSS_NEWTON_STEPS = 3
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
    if method not in VERIFICATIONS:
        raise ValueError(f"verification must be one of {', '.join(VERIFICATIONS)}, got '{method}'")
    if method == 'essential' and not _is_camera(intrinsics):
        raise ValueError('essential verification needs intrinsics, a 3x3 camera matrix')
    if method == 'none':
        return np.ones(len(first), bool), None
    threshold = number(threshold, 'threshold', above=0, most=1e6)
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


def _is_camera(intrinsics: NDArray[np.float64] | None) -> bool:
    if intrinsics is None or np.shape(intrinsics) != (3, 3):
        return False
    matrix = np.asarray(intrinsics, np.float64)
    return bool(np.isfinite(matrix).all() and matrix[0, 0] > 0 and matrix[1, 1] > 0)


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
    model = fit_all(np.asarray(model, np.float64), method, first, second, threshold, intrinsics)
    return distances_to(model, method, first, second, intrinsics) <= threshold, model


def fit_all(
    model: NDArray[np.float64],
    method: str,
    first: Float,
    second: Float,
    threshold: float,
    intrinsics: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """The least-squares geometry of all pairs that agree with `model`.

    RANSAC's own model comes from a handful of pairs. A fit is kept only if it lowers the truncated
    squared error over all pairs, so the result is never worse than what was given.
    """
    best, cost = model, np.inf
    for _ in range(FITS + 1):
        apart = distances_to(model, method, first, second, intrinsics)
        error = float(np.minimum(apart**2, threshold**2).sum())
        if not error < cost * (1 - 1e-6):
            break
        best, cost = model, error
        agreeing = apart <= threshold
        if agreeing.sum() <= MINIMUM_POINTS[method]:
            break
        a, b = (points[agreeing].astype(np.float64) for points in (first, second))
        try:
            fitted = _least_squares(model, method, a, b, intrinsics)
        except (cv2.error, np.linalg.LinAlgError):  # degenerate points
            break
        if fitted is None or np.shape(fitted) != (3, 3) or not np.isfinite(fitted).all():
            break
        model = fitted
    return best


def _least_squares(
    model: NDArray[np.float64],
    method: str,
    first: NDArray[np.float64],
    second: NDArray[np.float64],
    intrinsics: NDArray[np.float64] | None,
) -> NDArray[np.float64] | None:
    if method == 'homography':
        fitted = cv2.findHomography(first, second, 0)[0]
        return None if fitted is None else np.asarray(fitted, np.float64)
    a, b = (np.column_stack([points, np.ones(len(points))]) for points in (first, second))
    if method == 'essential':
        inverse = np.linalg.inv(np.asarray(intrinsics, np.float64))
        rays = a @ inverse.T, b @ inverse.T
        return _fit_essential(model, *(r / np.linalg.norm(r, axis=1)[:, None] for r in rays))
    return _fit_fundamental(model, a, b)


def _fit_fundamental(
    model: NDArray[np.float64], a: NDArray[np.float64], b: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The eight-point method on all pairs, each divided by the slope of its Sampson distance."""
    middle, spread = a[:, :2].mean(axis=0), a[:, :2].std() + 1e-9
    shrink = np.array([[1, 0, -middle[0]], [0, 1, -middle[1]], [0, 0, spread]]) / spread
    slopes = ((a @ model.T)[:, :2] ** 2).sum(axis=1) + ((b @ model)[:, :2] ** 2).sum(axis=1)
    a, b = a @ shrink.T, b @ shrink.T
    rows = (b[:, :, None] * a[:, None, :]).reshape(-1, 9)
    rows /= np.sqrt(np.maximum(slopes, 1e-12))[:, None]
    smallest = np.linalg.eigh(rows.T @ rows)[1][:, 0].reshape(3, 3)
    u, singular, v = np.linalg.svd(smallest)
    fitted = shrink.T @ (u * [*singular[:2], 0.0]) @ v @ shrink
    return np.asarray(fitted / np.linalg.norm(fitted), np.float64)


def _fit_essential(
    model: NDArray[np.float64], a: NDArray[np.float64], b: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Gauss-Newton in rotation and direction on the Sampson distances of unit rays."""
    u, _, v = np.linalg.svd(model)
    direction = u[:, 2]
    rotation = u @ np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]]) @ v
    rotation *= np.sign(np.linalg.det(rotation))  # either of the two rotations gives this matrix
    for _ in range(GAUSS_NEWTON_STEPS):
        essential = _cross(direction) @ rotation
        across, turned = a @ essential.T, a @ rotation.T
        slopes = (across**2).sum(axis=1) + ((b @ essential) ** 2).sum(axis=1)
        weights = 1 / np.sqrt(np.maximum(slopes, 1e-12))
        residuals = weights * (b * across).sum(axis=1)
        tangent = np.linalg.svd(direction[None])[2][1:]  # the two ways a direction can change
        by_rotation = np.cross(turned, np.cross(b, direction))
        by_direction = np.cross(turned, b) @ tangent.T
        jacobian = weights[:, None] * np.hstack([by_rotation, by_direction])
        normal = jacobian.T @ jacobian
        step = np.linalg.solve(normal + 1e-12 * np.eye(5), -jacobian.T @ residuals)
        direction = direction + step[3:] @ tangent
        direction /= np.linalg.norm(direction)
        rotation = cv2.Rodrigues(step[:3])[0] @ rotation
    return np.asarray(_cross(direction) @ rotation, np.float64)


def _cross(vector: NDArray[np.float64]) -> NDArray[np.float64]:
    """The matrix that takes a vector to its cross product with this one."""
    x, y, z = vector
    return np.array([[0, -z, y], [z, 0, -x], [-y, x, 0.0]])


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
        there = warp_points(first, in_front(model, first))
        return np.asarray(np.linalg.norm(there - second, axis=1))
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
