"""Geometric verification of matches, with OpenCV's USAC estimators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import cv2
import numpy as np
from numpy.typing import NDArray

from kp2d_core.checks import number
from kp2d_core.features import Float
from kp2d_core.geometry import in_front, warp_points

Doubles = NDArray[np.float64]
Verification = Literal['none', 'homography', 'fundamental', 'essential']
VERIFICATIONS: tuple[str, ...] = get_args(Verification)
# The camera counts as at rest if at least this share of the pairs did not move. Not less: with a
# slow camera only near points move, and odometry needs those.
AT_REST = 0.8
FEWER = 0.02  # share of pairs that a likely geometry may lose and yet be taken
ENOUGH = 300  # evenly chosen pairs for the estimate: more take longer and change little
NEAREST = 100  # pairs with the most similar descriptors, tried first: far fewer of them are wrong
CLEAR = 0.7  # share of all pairs that must agree with these, or others are tried, too
FITS = 8  # at most, rounds of least squares over the inliers
ENOUGH_GAIN = 1e-3  # relative gain below which the rounds end
GAUSS_NEWTON_STEPS = 3
MINIMUM_POINTS = {'homography': 4, 'fundamental': 8, 'essential': 6}

_ESTIMATOR = cv2.USAC_MAGSAC  # MAGSAC++: least sensitive to the threshold
# With 7 points it can take half a minute if the geometry is degenerate: the camera hardly moves,
# or it looks at a wall. With 8 it takes milliseconds and otherwise finds the same inliers.
_FUNDAMENTAL_ESTIMATOR = cv2.USAC_FM_8PTS
_CONFIDENCE = 0.999
_ITERATIONS = 5000


def verify(
    first: Float,
    second: Float,
    method: str,
    *,
    threshold: float = 3.0,
    intrinsics: Doubles | None = None,
    undistort: Callable[[Float], Float] | None = None,
    distances: Float | None = None,
) -> tuple[NDArray[np.bool_], Doubles | None]:
    """Mark the pairs of points (M, 2) that agree with one geometry; return its 3x3 matrix.

    With too few points or without a geometry, no pair is an inlier and the matrix is None. A
    camera at rest has no epipolar geometry: if most pairs did not move, these are the inliers, and
    the matrix is None.

    `undistort` maps pixels to those of a camera without distortion, or to NaN. `distances` are
    those of the descriptors (M,). With them, the geometry is found where most pairs are wrong.
    """
    check_verification(method, threshold, intrinsics)
    if distances is not None and np.shape(distances) != (len(first),):
        raise ValueError(f'distances must be ({len(first)},), got {np.shape(distances)}')
    if method == 'none':
        return np.ones(len(first), bool), None
    return agreeing(first, second, method, threshold, intrinsics, undistort, distances=distances)


def check_verification(method: str, threshold: float, intrinsics: Doubles | None) -> None:
    if method not in VERIFICATIONS:
        raise ValueError(f"verification must be one of {', '.join(VERIFICATIONS)}, got '{method}'")
    if method == 'essential' and not _is_camera(intrinsics):
        raise ValueError('essential verification needs intrinsics, a 3x3 camera matrix')
    if method != 'none':
        number(threshold, 'threshold', above=0, most=1e6)


def agreeing(
    first: Float,
    second: Float,
    method: str,
    threshold: float,
    intrinsics: Doubles | None = None,
    undistort: Callable[[Float], Float] | None = None,
    undistorted: tuple[Float, Float] | None = None,
    likely: Likely | None = None,
    distances: Float | None = None,
) -> tuple[NDArray[np.bool_], Doubles | None]:
    """`verify` with arguments that are checked; `undistorted` are the points if they are known.

    `likely` is tried first. If about as many pairs agree with it as did before, it is fitted to
    them without a search. If not, as when only near points show that the camera turned elsewhere,
    the search decides.
    """
    if method != 'homography' and len(first):
        still = ((second - first) ** 2).sum(axis=1) <= threshold**2
        if still.mean() > AT_REST:
            return still, None
    if undistorted is not None:
        first, second = undistorted
    elif undistort is not None:
        first, second = undistort(first), undistort(second)
    # A lens of more than 180 degrees sees points that have no position in a plane.
    placed = np.isfinite(np.hstack([first, second])).all(axis=1)
    inliers = np.zeros(len(first), bool)
    inliers[placed], model = _agreeing(
        first[placed], second[placed], method, threshold, intrinsics, likely,
        None if distances is None else distances[placed],
    )  # fmt: skip
    return inliers, model


def _is_camera(intrinsics: Doubles | None) -> bool:
    if intrinsics is None or np.shape(intrinsics) != (3, 3):
        return False
    matrix = np.asarray(intrinsics, np.float64)
    return bool(np.isfinite(matrix).all() and matrix[0, 0] > 0 and matrix[1, 1] > 0)


def _agreeing(
    first: Float,
    second: Float,
    method: str,
    threshold: float,
    intrinsics: Doubles | None,
    likely: Likely | None,
    distances: Float | None,
) -> tuple[NDArray[np.bool_], Doubles | None]:
    if len(first) < MINIMUM_POINTS[method]:
        return np.zeros(len(first), bool), None
    pairs = Pairs(method, first, second, intrinsics)
    if likely is not None and likely.holds(pairs, threshold):
        model: Doubles | None = likely.model
    else:
        model = _search(pairs, threshold, intrinsics, distances)
    if model is None:
        return np.zeros(len(first), bool), None
    model, apart = fit_all(model, pairs, threshold)
    return apart <= threshold, model


def _search(
    pairs: Pairs, threshold: float, intrinsics: Doubles | None, distances: Float | None
) -> Doubles | None:
    """Find the geometry that fits all pairs best, of those that a few pairs suggest."""
    count = len(pairs.first)
    samples: list[Any] = [slice(None, None, -(-count // ENOUGH))]
    if distances is not None and count > NEAREST:
        samples.insert(0, np.argsort(distances, kind='stable')[:NEAREST])
    best, lowest = None, np.inf
    for sample in samples:
        found = _estimate(
            pairs.first[sample], pairs.second[sample], pairs.method, threshold, intrinsics
        )
        if found is None or np.shape(found) != (3, 3):
            continue
        model = np.asarray(found, np.float64)
        apart = pairs.apart(model)
        error = float(np.minimum(apart**2, threshold**2).sum())
        if error < lowest:
            best, lowest = model, error
        if (apart <= threshold).mean() >= CLEAR:
            break
    return best


@dataclass(frozen=True)
class Likely:
    """The geometry of the frame before: a camera moves on much as it did."""

    model: Doubles  # 3x3
    share: float  # of the pairs that agreed with it

    def holds(self, pairs: Pairs, threshold: float) -> bool:
        agree = float((pairs.apart(self.model) <= threshold).mean())
        return agree >= max(self.share - FEWER, 0.5)


def fit_all(model: Doubles, pairs: Pairs, threshold: float) -> tuple[Doubles, Doubles]:
    """Fit all pairs that agree with `model` by least squares; also return the errors of all.

    The model of RANSAC comes from a few pairs. A fit is kept only if it lowers the truncated
    squared error over all pairs, so the result is never worse than the given model.
    """
    apart = pairs.apart(model)
    cost = float(np.minimum(apart**2, threshold**2).sum())
    for _ in range(FITS):
        agreeing = apart <= threshold
        if agreeing.sum() <= MINIMUM_POINTS[pairs.method]:
            break
        try:
            fitted = pairs.fit(model, agreeing)
        except (cv2.error, np.linalg.LinAlgError):  # degenerate points
            break
        if fitted is None or np.shape(fitted) != (3, 3) or not np.isfinite(fitted).all():
            break
        off = pairs.apart(fitted)
        error = float(np.minimum(off**2, threshold**2).sum())
        if error < cost:
            model, apart = fitted, off
        if error > cost * (1 - ENOUGH_GAIN):
            break
        cost = error
    return model, apart


def distances_to(
    model: Doubles, method: str, first: Float, second: Float, intrinsics: Doubles | None = None
) -> Doubles:
    """The errors of pairs of points (M, 2) with respect to a geometry, in pixels.

    For the essential matrix the error is the angle between rays, in pixels at the image centre:
    towards the rim of a wide lens undistorted pixels are stretched, 8 times at 70 degrees.
    """
    return Pairs(method, first, second, intrinsics).apart(model)


class Pairs:
    """Pairs of points as columns, with everything that each round needs, computed once."""

    def __init__(
        self, method: str, first: Float, second: Float, intrinsics: Doubles | None = None
    ) -> None:
        self.method = method
        self.first, self.second = first, second
        self.scale, self.axes = 1.0, 2  # lines in the image
        self.a, self.b = (np.vstack([p.T, np.ones(len(p))]) for p in (first, second))
        if method == 'essential':
            camera = np.asarray(intrinsics, np.float64)
            self.scale = float(np.sqrt(camera[0, 0] * camera[1, 1]))
            self.axes = 3  # planes through the camera
            inverse = np.linalg.inv(camera)
            self.a, self.b = (
                r / np.sqrt((r * r).sum(axis=0)) for r in (inverse @ self.a, inverse @ self.b)
            )

    def apart(self, model: Doubles) -> Doubles:
        """See `distances_to`; for epipolar geometries the Sampson distance."""
        if self.method == 'homography':
            there = warp_points(self.first, in_front(model, self.first))
            return np.asarray(np.linalg.norm(there - self.second, axis=1))
        across, slopes = self._slopes(model)
        off = np.abs((self.b * across).sum(axis=0)) / np.sqrt(slopes)
        return np.asarray(self.scale * off)

    def fit(self, model: Doubles, agreeing: NDArray[np.bool_]) -> Doubles | None:
        """Fit some pairs by least squares, starting from a model that is close."""
        if self.method == 'homography':
            a, b = (points[agreeing].astype(np.float64) for points in (self.first, self.second))
            fitted = cv2.findHomography(a, b, 0)[0]
            return None if fitted is None else np.asarray(fitted, np.float64)
        if self.method == 'essential':
            return _fit_essential(model, self.a[:, agreeing], self.b[:, agreeing])
        return self._fit_fundamental(model, agreeing)

    def _slopes(self, model: Doubles) -> tuple[Doubles, Doubles]:
        """Return the lines of the first points, and the slope of the Sampson distance."""
        across, back = model @ self.a, model.T @ self.b
        slopes = (across[: self.axes] ** 2).sum(axis=0) + (back[: self.axes] ** 2).sum(axis=0)
        return across, np.maximum(slopes, 1e-12)

    @cached_property
    def _products(self) -> tuple[Doubles, Doubles]:
        """Return the matrix that scales the points to about 1, and their (9, M) equations."""
        middle, spread = self.a[:2].mean(axis=1), self.a[:2].std() + 1e-9
        shrink = np.array([[1, 0, -middle[0]], [0, 1, -middle[1]], [0, 0, spread]]) / spread
        a, b = shrink @ self.a, shrink @ self.b
        return shrink, (b[:, None] * a[None]).reshape(9, -1)

    def _fit_fundamental(self, model: Doubles, agreeing: NDArray[np.bool_]) -> Doubles:
        """The eight-point method, with each pair divided by the slope of its Sampson distance."""
        shrink, products = self._products
        normal = (products * (agreeing / self._slopes(model)[1])) @ products.T
        smallest = np.linalg.eigh(normal)[1][:, 0].reshape(3, 3)
        u, singular, v = np.linalg.svd(smallest)
        fitted = shrink.T @ (u * [*singular[:2], 0.0]) @ v @ shrink
        return np.asarray(fitted / np.linalg.norm(fitted), np.float64)


def _fit_essential(model: Doubles, a: Doubles, b: Doubles) -> Doubles:
    """Gauss-Newton in rotation and direction on the Sampson distances of unit rays (3, M)."""
    u, _, v = np.linalg.svd(model)
    direction = u[:, 2]
    rotation = u @ np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]]) @ v
    rotation *= np.sign(np.linalg.det(rotation))  # both rotations give this matrix
    for _ in range(GAUSS_NEWTON_STEPS):
        essential = _cross(direction) @ rotation
        across, turned = essential @ a, rotation @ a
        slopes = (across**2).sum(axis=0) + ((essential.T @ b) ** 2).sum(axis=0)
        weights = 1 / np.sqrt(np.maximum(slopes, 1e-12))
        residuals = weights * (b * across).sum(axis=0)
        tangent = np.linalg.svd(direction[None])[2][1:]  # the two directions of change
        by_rotation = _crossed(turned, -_cross(direction) @ b)
        by_direction = tangent @ _crossed(turned, b)
        jacobian = weights * np.vstack([by_rotation, by_direction])
        normal = jacobian @ jacobian.T
        step = np.linalg.solve(normal + 1e-12 * np.eye(5), -jacobian @ residuals)
        direction = direction + step[3:] @ tangent
        direction /= np.linalg.norm(direction)
        rotation = cv2.Rodrigues(step[:3])[0] @ rotation
    return np.asarray(_cross(direction) @ rotation, np.float64)


def _cross(vector: Doubles) -> Doubles:
    """The matrix of the cross product with this vector."""
    x, y, z = vector
    return np.array([[0, -z, y], [z, 0, -x], [-y, x, 0.0]])


def _crossed(first: Doubles, second: Doubles) -> Doubles:
    """Cross products of columns; np.cross takes several times as long."""
    (a, b, c), (x, y, z) = first, second
    return np.stack([b * z - c * y, c * x - a * z, a * y - b * x])


def _estimate(
    first: Float,
    second: Float,
    method: str,
    threshold: float,
    intrinsics: Doubles | None,
) -> Doubles | None:
    """By random samples; None where the points are degenerate. OpenCV may give several."""
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    try:
        if method == 'homography':
            found, _ = cv2.findHomography(
                a, b, _ESTIMATOR, threshold, maxIters=_ITERATIONS, confidence=_CONFIDENCE
            )
        elif method == 'fundamental':
            found, _ = cv2.findFundamentalMat(
                a, b, _FUNDAMENTAL_ESTIMATOR, threshold, _CONFIDENCE, _ITERATIONS
            )
        else:
            camera = np.asarray(intrinsics, np.float64)
            found, _ = cv2.findEssentialMat(
                a, b, camera, method=_ESTIMATOR, prob=_CONFIDENCE, threshold=threshold
            )
    except cv2.error:
        return None
    return found
