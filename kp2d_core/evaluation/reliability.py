"""How well scores and sigmas predict repetition and errors, on pairs with known ground truth."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kp2d_core.evaluation.metrics import Array, inverse, seen_by_other
from kp2d_core.features import Features
from kp2d_core.geometry import warp_points
from kp2d_core.images import Size

FOUND = 1.5  # px, within which a point counts as found again
BINS = 10  # of scores, from 0 to 1
# The median length of a 2-D Gaussian vector, in sigmas of one axis.
EXPECTED_MEDIAN = float(np.sqrt(2 * np.log(2)))


@dataclass(frozen=True)
class Reliability:
    """How many points were found again, by score. All fields are sums, so pairs can be added."""

    counts: tuple[int, ...]  # points, for each bin of scores
    scores: tuple[float, ...]  # sum of their scores
    found: tuple[int, ...]  # those found again
    squares: float  # sum of (score - found)^2

    def mean_scores(self) -> list[float | None]:
        return _shares(self.scores, self.counts)

    def found_shares(self) -> list[float | None]:
        return _shares(self.found, self.counts)

    def brier(self) -> float:
        """Mean of (score - found)^2: 0 is perfect, a constant score of 0.5 gives 0.25."""
        return self.squares / max(sum(self.counts), 1)

    def calibration_error(self) -> float:
        """Mean difference between scores and observed shares, weighted by points; 0 is perfect."""
        astray = np.abs(np.subtract(self.scores, self.found))
        return float(astray.sum() / max(sum(self.counts), 1))


def reliability(
    first: Features,
    second: Features,
    first_to_second: Array,
    size: Size,
    distance: float = FOUND,
) -> Reliability | None:
    """Count how often points visible in both images are found again; None if not probabilities."""
    return count(*found_again(first, second, first_to_second, size, distance))


def found_again(
    first: Features,
    second: Features,
    first_to_second: Array,
    size: Size,
    distance: float = FOUND,
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return the scores of points visible in both images, and whether each is found again.

    A point is found again if the other image has a point within `distance` px.
    """
    scores, found = [], []
    to_first = inverse(first_to_second)
    sides = (
        seen_by_other(first, first_to_second, size),
        seen_by_other(second, to_first, size),
    )
    for (own, other), back in zip((sides, sides[::-1]), (to_first, first_to_second), strict=True):
        scores.append(own.scores)
        # Distances are measured in the image of the point itself.
        returned = warp_points(other.keypoints, back)
        found.append(_has_neighbour(own.keypoints, returned, distance))
    return np.concatenate(scores), np.concatenate(found)


def count(scores: NDArray[Any], found: NDArray[np.bool_]) -> Reliability | None:
    """Count scores (N,), and those of points found again, in bins; None if not in 0..1."""
    scores = np.asarray(scores, np.float64)
    if len(scores) and not (scores.min() >= 0 and scores.max() <= 1):
        return None
    place = np.minimum((scores * BINS).astype(int), BINS - 1)

    def total(weights: NDArray[Any]) -> tuple[float, ...]:
        return tuple(map(float, np.bincount(place, weights, BINS)))

    counts, again = (tuple(map(int, total(w))) for w in (np.ones(len(scores)), found))
    squares = float(((scores - found) ** 2).sum())
    return Reliability(counts, total(scores), again, squares)


def add(parts: Iterable[Reliability | None]) -> Reliability | None:
    """Add up several pairs; None if there are none, or if one of them has no counts."""
    known = list(parts)
    if not known or any(part is None for part in known):
        return None
    given = [part for part in known if part is not None]
    return Reliability(
        tuple(map(sum, zip(*(part.counts for part in given), strict=True))),
        tuple(map(sum, zip(*(part.scores for part in given), strict=True))),
        tuple(map(sum, zip(*(part.found for part in given), strict=True))),
        sum(part.squares for part in given),
    )


def in_sigmas(
    errors: NDArray[Any], first: Features, second: Features, first_to_second: Array
) -> NDArray[np.float64]:
    """Divide the errors (M,) of matches by the combined sigma; empty if there are no sigmas.

    Sigmas of the first image are scaled as the homography scales the surroundings of the point.
    """
    if (first.sigma == 1).all() and (second.sigma == 1).all():  # the model has none
        return np.empty(0)
    scaled = first.sigma * local_scale(first.keypoints, first_to_second)
    return np.asarray(errors / np.sqrt(np.maximum(scaled**2 + second.sigma**2, 1e-12)))


def local_scale(points: NDArray[Any], homography: Array) -> NDArray[np.float64]:
    """Return the factor by which the homography enlarges lengths around each point (N, 2)."""
    depth = np.column_stack([points, np.ones(len(points))]) @ homography[2]
    return np.sqrt(np.abs(np.linalg.det(homography)) / np.abs(depth) ** 3)


def _has_neighbour(
    points: NDArray[Any], others: NDArray[Any], distance: float
) -> NDArray[np.bool_]:
    if not len(points) or not len(others):
        return np.zeros(len(points), bool)
    x, y = (np.subtract.outer(points[:, axis], others[:, axis]) for axis in (0, 1))
    return np.asarray((x * x + y * y).min(axis=1) <= distance**2)


def _shares(values: tuple[float, ...], counts: tuple[int, ...]) -> list[float | None]:
    return [value / n if n else None for value, n in zip(values, counts, strict=True)]
