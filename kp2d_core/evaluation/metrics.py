"""Metrics of one pair of images, on features and the true homography between them.

The figures depend on what is filtered before the best `top_k` points are taken, and on which
limits are inclusive. Repeatability and homography use the points visible in both images, the
matching score uses all points. Features must be in descending order of score.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from kp2d_core.features import Features
from kp2d_core.geometry import warp_points
from kp2d_core.images import Size

Array = NDArray[np.float64]

CORRECT = 3.0  # px, largest error of a point or match that counts
COPY = 2.0  # px; a point closer than this to a better one is a copy
CORNER_THRESHOLDS = (1, 3, 5)  # px, largest mean corner error of a homography that counts
RANSAC_THRESHOLD = 3.0
RANSAC_ITERATIONS = 5000
RANSAC_CONFIDENCE = 0.9995
MINIMUM_MATCHES = 4  # for a homography


class Detection(NamedTuple):
    repeatability: float
    localization: float  # px; CORRECT, the worst possible value, if no point was found again
    failed: bool  # no point was found again


class Fit(NamedTuple):
    """One homography per RANSAC run; the corner error is infinite where RANSAC finds none."""

    corner_errors: Array  # (runs,) px
    inlier_ratios: Array  # (runs,)


def inverse(homography: Array) -> Array:
    return np.asarray(np.linalg.inv(homography), np.float64)


def in_view(points: Array, size: Size) -> NDArray[np.bool_]:
    """Mark the points in [0, width) x [0, height)."""
    return np.all((points >= 0) & (points < np.asarray(size)), axis=1)


def detection(
    first: Features, second: Features, first_to_second: Array, size: Size, top_k: int
) -> Detection:
    """Compute repeatability and localization of the points visible in both images."""
    warped = warp_points(first.keypoints, first_to_second)
    expected = warped[in_view(warped, size)][:top_k]
    found = seen_by_other(second, inverse(first_to_second), size)[:top_k].keypoints
    if not len(expected) or not len(found):
        return Detection(0.0, CORRECT, True)
    distances = np.linalg.norm(expected[:, None] - found[None], axis=2)
    nearest = np.concatenate([distances.min(axis=1), distances.min(axis=0)])
    hits = nearest[nearest <= CORRECT]
    if not len(hits):
        return Detection(0.0, CORRECT, True)
    return Detection(len(hits) / len(nearest), float(hits.mean()), False)


def share_of_copies(features: Features, top_k: int) -> float:
    """Return the share of the best `top_k` points that lie within 2 px of a better one."""
    best = features.keypoints[:top_k]
    if len(best) < 2:
        return 0.0
    near = np.linalg.norm(best[:, None] - best[None], axis=2) < COPY
    return float(np.tril(near, -1).any(axis=1).mean())


def matching_score(
    first: Features, second: Features, first_to_second: Array, size: Size, top_k: int
) -> float:
    """Return the share of correct nearest-descriptor matches, averaged over both directions."""
    first, second = first[:top_k], second[:top_k]
    if not len(first) or not len(second):
        return 0.0
    distances = descriptor_distances(first, second)
    forward = _directed_score(
        first.keypoints,
        second.keypoints[distances.argmin(axis=1)],
        inverse(first_to_second),
        size,
    )
    backward = _directed_score(
        second.keypoints, first.keypoints[distances.argmin(axis=0)], first_to_second, size
    )
    return (forward + backward) / 2


def _directed_score(
    queries: NDArray[Any], matched: NDArray[Any], back: Array, size: Size
) -> float:
    """Return the share of correct matches among those whose point lies in the query image."""
    returned = warp_points(matched, back)
    visible = np.all((returned >= 0) & (returned <= np.asarray(size) - 1), axis=1)
    correct = np.linalg.norm(returned - queries, axis=1) < CORRECT
    return float((correct & visible).sum() / max(visible.sum(), 1))


def mutual_matches(
    first: Features, second: Features, first_to_second: Array, size: Size, top_k: int
) -> tuple[Features, Features]:
    """Match the points visible in both images by mutual nearest descriptors."""
    return mutually_nearest(
        seen_by_other(first, first_to_second, size)[:top_k],
        seen_by_other(second, inverse(first_to_second), size)[:top_k],
    )


def mutually_nearest(first: Features, second: Features) -> tuple[Features, Features]:
    """Match by mutual nearest descriptors; return the matched features row by row."""
    if not len(first) or not len(second):
        return first[:0], second[:0]
    distances = descriptor_distances(first, second)
    nearest = distances.argmin(axis=1)
    mutual = distances.argmin(axis=0)[nearest] == np.arange(len(first))
    return first[mutual], second[nearest[mutual]]


def match_errors(
    first: NDArray[Any], second: NDArray[Any], first_to_second: Array
) -> NDArray[np.float64]:
    """Return the errors of matches (M, 2) in pixels of the second image."""
    return np.asarray(np.linalg.norm(warp_points(first, first_to_second) - second, axis=1))


def correct_matches(
    first: NDArray[Any], second: NDArray[Any], first_to_second: Array
) -> NDArray[np.bool_]:
    """Mark the matches within 3 px of the truth, in the second image."""
    return match_errors(first, second, first_to_second) < CORRECT


def fit_homographies(
    first: NDArray[Any], second: NDArray[Any], first_to_second: Array, size: Size, runs: int = 1
) -> Fit:
    """Estimate the homography of the matches by RANSAC `runs` times; measure its corner error.

    OpenCV's RANSAC cannot be seeded. Instead, each run gets the matches in another order, drawn
    from a seeded generator. The runs differ and can be repeated.
    """
    errors, inlier_ratios = np.full(runs, np.inf), np.zeros(runs)
    if len(first) < MINIMUM_MATCHES:
        return Fit(errors, inlier_ratios)
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    width, height = size
    corners = np.array(
        [[0, 0], [0, height - 1], [width - 1, 0], [width - 1, height - 1]], np.float64
    )
    true_corners = warp_points(corners, first_to_second)
    for run in range(runs):
        order = np.random.default_rng(run).permutation(len(first))
        estimate, inliers = cv2.findHomography(
            first[order],
            second[order],
            cv2.RANSAC,
            RANSAC_THRESHOLD,
            maxIters=RANSAC_ITERATIONS,
            confidence=RANSAC_CONFIDENCE,
        )
        if estimate is None or not np.isfinite(estimate).all():
            continue
        astray = warp_points(corners, np.asarray(estimate, np.float64)) - true_corners
        errors[run] = np.linalg.norm(astray, axis=1).mean()
        inlier_ratios[run] = np.count_nonzero(inliers) / len(first)
    return Fit(np.where(np.isfinite(errors), errors, np.inf), inlier_ratios)


def area_under_curve(corner_errors: Array, threshold: float) -> float:
    """Average the share of errors below t over all t from 0 to the threshold."""
    return float(np.clip(1 - corner_errors / threshold, 0, None).mean())


def descriptor_distances(first: Features, second: Features) -> NDArray[np.float32]:
    """Squared Euclidean distances (N, M) of the descriptors."""
    a, b = first.descriptors, second.descriptors
    return (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1) - 2 * (a @ b.T)


def seen_by_other(features: Features, to_other: Array, size: Size) -> Features:
    return features[in_view(warp_points(features.keypoints, to_other), size)]
