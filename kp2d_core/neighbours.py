"""The most similar descriptors of two sets: everywhere, or within a radius in the image."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kp2d_core.features import Float

Ints = NDArray[np.intp]

BAND = 128  # points that are compared at once if there is a radius
LOWEST = -1.1  # below every similarity
STEEP = 1e6  # how fast similarities fall beyond the radius, by squared pixel


@dataclass(frozen=True)
class Neighbours:
    """For each descriptor of the first set, its nearest of the second. N and M descriptors."""

    nearest: Ints  # (N,) index in the second set
    best: Float  # (N,) similarity to it; -inf if none is within the radius
    runner_up: Float  # (N,) similarity to the next one; only where it was asked for
    best_of_second: Float  # (M,) the highest similarity of each of the second set


@dataclass(frozen=True)
class Gate:
    """Compare only points of the second set within `radius` of `centres`, in pixels."""

    centres: Float  # (N, 2) where the first set's points are expected
    points: Float  # (M, 2)
    radius: float


def find_neighbours(
    first: Float, second: Float, gate: Gate | None = None, *, runner_up: bool = False
) -> Neighbours:
    """Of unit descriptors (N, D) and (M, D), both at least one."""
    if gate is None:
        found = nothing_yet(len(first), len(second))
        _compare(first @ second.T, found, slice(None), slice(None), runner_up)
        return found

    # From the top of the image to its bottom, a band of the first set after the other, each with
    # as many lines of the second as it can reach: a third of all products, or less.
    rows, columns = np.argsort(gate.centres[:, 1]), np.argsort(gate.points[:, 1])
    heights, lines = gate.centres[rows, 1], gate.points[columns, 1]
    left, right = distance_factors(gate.centres[rows], gate.points[columns])
    first, second = first[rows], second[columns]
    found = nothing_yet(len(first), len(second))
    for begin in range(0, len(first), BAND):
        band = slice(begin, min(begin + BAND, len(first)))
        low = np.searchsorted(lines, heights[band.start] - gate.radius, 'left')
        high = np.searchsorted(lines, heights[band.stop - 1] + gate.radius, 'right')
        if low == high:
            continue
        window = slice(int(low), int(high))
        similarity = first[band] @ second[window].T
        # What is too far falls below all others: a minimum takes a tenth of the time of a mask.
        room = gate.radius**2 - left[band] @ right[window].T
        np.minimum(similarity, STEEP * room + 1, out=similarity)
        _compare(similarity, found, band, window, runner_up)
    return _reordered(found, rows, columns)


def nothing_yet(first: int, second: int) -> Neighbours:
    return Neighbours(
        nearest=np.zeros(first, np.intp),
        best=np.full(first, -np.inf, np.float32),
        runner_up=np.full(first, -np.inf, np.float32),
        best_of_second=np.full(second, -np.inf, np.float32),
    )


def _compare(
    similarity: Float, found: Neighbours, rows: slice, columns: slice, runner_up: bool
) -> None:
    """Enter into `found` what the similarities of these rows and columns say."""
    place = similarity.argmax(axis=1)
    along = np.arange(len(place))
    found.nearest[rows] = place + (columns.start or 0)
    found.best[rows] = similarity[along, place]
    # Not argmax(axis=0): a maximum along columns is vectorised, an argmax is not.
    highest = similarity.max(axis=0)
    np.maximum(found.best_of_second[columns], highest, out=found.best_of_second[columns])
    if runner_up:
        similarity[along, place] = -np.inf
        found.runner_up[rows] = similarity.max(axis=1)


def _reordered(found: Neighbours, rows: Ints, columns: Ints) -> Neighbours:
    """Of sets that were taken in this order, in their own."""
    result = nothing_yet(len(rows), len(columns))
    result.nearest[rows] = columns[found.nearest]
    result.best[rows] = np.where(found.best < LOWEST, -np.inf, found.best)
    result.runner_up[rows] = np.where(found.runner_up < LOWEST, -np.inf, found.runner_up)
    result.best_of_second[columns] = found.best_of_second
    return result


def distance_factors(first: Float, second: Float) -> tuple[Float, Float]:
    """(N, 4) and (M, 4) whose product is the squared distances of points (N, 2) and (M, 2).

    |a - b|^2 = a.a - 2 a.b + b.b takes a tenth of the time of differences. Taking the middle off
    first keeps float32 exact to a hundredth of a pixel.
    """
    middle = second.mean(axis=0)
    a, b = first - middle, second - middle
    left = np.column_stack([-2 * a, (a * a).sum(axis=1), np.ones(len(a), np.float32)])
    right = np.column_stack([b, np.ones(len(b), np.float32), (b * b).sum(axis=1)])
    return left, right
