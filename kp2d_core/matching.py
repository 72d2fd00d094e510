"""Match two sets of features: nearest neighbours, then tests."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kp2d_core.checks import number
from kp2d_core.features import Features, Float, unit_descriptors
from kp2d_core.threads import Blas, find_blas
from kp2d_core.verification import Likely, Verification, agreeing, check_verification

Ints = NDArray[np.intp]

BLOCK = 1 << 23  # similarities that each of two threads computes at once: 32 MB
ALONE = 1 << 18  # similarities that take less time than waking the second thread
BAND = 128  # points compared at once if there is a radius
FAR = 1e6  # pixels; no point is there
LOWEST = -1.1  # below every similarity
STEEP = 1e6  # slope at which similarities fall beyond the radius, per squared pixel

_helper_ids: list[int] = []
_helper = ThreadPoolExecutor(
    1, 'matching', initializer=lambda: _helper_ids.append(threading.get_native_id())
)
_entering = threading.Lock()
_can_place = hasattr(os, 'sched_setaffinity')  # on Linux
_current_core = getattr(ctypes.CDLL(None), 'sched_getcpu', None) if _can_place else None


@dataclass(frozen=True)
class Matches:
    """Pairs of indices into two sets of features."""

    indices: NDArray[np.intp]  # (M, 2): index in the first set, index in the second
    distances: Float  # (M,) Euclidean distance of the two unit descriptors, 0 to 2
    inliers: NDArray[np.bool_]  # (M,) agrees with the geometry; all True without verification
    model: NDArray[np.float64] | None = None  # 3x3 homography, fundamental or essential matrix

    def __len__(self) -> int:
        return len(self.indices)


def match(
    first: Features,
    second: Features,
    *,
    mutual: bool = True,
    max_ratio: float | None = None,
    max_distance: float | None = None,
    radius: float | None = None,
    predicted: Float | None = None,
    verification: Verification = 'none',
    threshold: float = 3.0,
    intrinsics: NDArray[np.float64] | None = None,
    undistort: Callable[[Float], Float] | None = None,
) -> Matches:
    """Match each descriptor of the first set with its nearest neighbour in the second.

    int8 descriptors are scaled and uint8 descriptors are read as bits.

    mutual        keep a match only if each point is the nearest neighbour of the other
    max_ratio     keep a match only if distance < max_ratio * distance to the second nearest
    max_distance  keep a match only up to this descriptor distance (0 to 2)
    radius        search only within this many pixels of the predicted position
    predicted     (N, 2) predicted positions of the first points in the second image;
                  None: their positions in the first image
    verification  'none', 'homography', 'fundamental' or 'essential' (needs `intrinsics`)
    threshold     largest error of an inlier in pixels (for 'essential' at the image centre)
    intrinsics    3x3 camera matrix of both images
    undistort     maps pixels (M, 2) to those of a camera without distortion, before verification
    """
    options = MatchOptions(
        mutual, max_ratio, max_distance, radius, verification, threshold, intrinsics, undistort
    )
    if predicted is not None and radius is None:
        raise ValueError('predicted positions need a radius')
    if predicted is not None and np.shape(predicted) != (len(first), 2):
        raise ValueError(f'predicted must be ({len(first)}, 2), got {np.shape(predicted)}')
    return match_with(options, first, second, predicted=predicted)


@dataclass(frozen=True, eq=False)
class MatchOptions:
    """The options of `match`, checked once for many matches."""

    mutual: bool = True
    max_ratio: float | None = None
    max_distance: float | None = None
    radius: float | None = None
    verification: Verification = 'none'
    threshold: float = 3.0
    intrinsics: NDArray[np.float64] | None = None
    undistort: Callable[[Float], Float] | None = None

    def __post_init__(self) -> None:
        for name in ('max_ratio', 'max_distance', 'radius'):
            if getattr(self, name) is not None:
                number(getattr(self, name), name, above=0, most=FAR)
        check_verification(self.verification, self.threshold, self.intrinsics)


def match_with(
    options: MatchOptions,
    first: Features,
    second: Features,
    *,
    predicted: Float | None = None,
    undistorted: tuple[Float, Float] | None = None,
    likely: Likely | None = None,
) -> Matches:
    """`match`; `undistorted` are all points without distortion, if they are known already.

    Verification tries `likely` first.
    """
    a, b = as_float32(first), as_float32(second)
    if a.shape[1] != b.shape[1] and len(a) and len(b):
        raise ValueError(f'descriptors differ in length: {a.shape[1]} and {b.shape[1]}')
    if not len(a) or not len(b):
        return no_matches()
    gate = None
    if options.radius is not None:
        centres = first.keypoints if predicted is None else np.asarray(predicted, np.float32)
        centres = np.where(np.isfinite(centres), centres, np.float32(FAR))
        gate = Gate(centres, second.keypoints, options.radius)
    found = find_neighbours(a, b, gate, runner_up=options.max_ratio is not None)
    if np.isnan(found.best).any():
        raise ValueError('descriptors hold NaN')

    keep = found.best > -np.inf
    if options.mutual:
        keep &= found.best >= found.best_of_second[found.nearest]
    if options.max_distance is not None:
        keep &= _distance(found.best) <= options.max_distance
    if options.max_ratio is not None:
        keep &= _distance(found.best) < options.max_ratio * _distance(found.runner_up)

    rows = np.flatnonzero(keep)
    if options.mutual:
        rows = _one_each(rows, found.nearest)
    indices = np.stack([rows, found.nearest[rows]], axis=1)
    distances = _distance(found.best[rows])
    inliers, model = np.ones(len(rows), bool), None
    if options.verification != 'none':
        left, right = indices.T
        flat = undistorted and (undistorted[0][left], undistorted[1][right])
        inliers, model = agreeing(
            first.keypoints[left],
            second.keypoints[right],
            options.verification,
            options.threshold,
            options.intrinsics,
            options.undistort,
            flat,
            likely,
            distances,
        )
    return Matches(indices, distances, inliers, model)


def match_in_turn(
    groups: Sequence[tuple[MatchOptions, Features, Float | None]],
    second: Features,
    undistorted: Float | None = None,
    likely: Likely | None = None,
) -> list[Matches]:
    """Match groups of features in turn, each with the features that the earlier ones left.

    A group is (options, features, their points without distortion). An inlier takes its feature of
    `second`. Verification tries `likely` first.
    """
    free, result = np.arange(len(second)), []
    for options, first, flat in groups:
        known = flat is not None and undistorted is not None
        both = (flat, undistorted[free]) if known else None  # type: ignore[index]
        rest = second if len(free) == len(second) else second[free]
        found = match_with(
            options,
            first,
            rest,
            undistorted=both,  # type: ignore[arg-type]
            likely=likely,
        )
        indices = np.stack([found.indices[:, 0], free[found.indices[:, 1]]], axis=1)
        result.append(replace(found, indices=indices))
        free = np.setdiff1d(free, indices[found.inliers, 1], assume_unique=True)
    return result


def _one_each(rows: NDArray[np.intp], nearest: NDArray[np.intp]) -> NDArray[np.intp]:
    """Keep the first of several rows that are equally near to the same point (copies)."""
    if not len(rows) or np.bincount(nearest[rows]).max() < 2:
        return rows
    return rows[np.sort(np.unique(nearest[rows], return_index=True)[1])]


def _distance(similarity: Float) -> Float:
    """Distance of unit vectors from their dot product; infinite if nothing was comparable."""
    return np.sqrt(np.maximum(2 - 2 * similarity, 0), dtype=np.float32)


def no_matches() -> Matches:
    return Matches(np.empty((0, 2), np.intp), np.empty(0, np.float32), np.empty(0, bool))


def as_float32(features: Features) -> Float:
    """Return float32 descriptors: products of the bytes in messages would overflow."""
    descriptors = features.descriptors
    if descriptors.ndim != 2 or len(descriptors) != len(features):
        raise ValueError(
            f'{len(features)} keypoints need as many rows of descriptors, got shape '
            f'{descriptors.shape}'
        )
    return descriptors if descriptors.dtype == np.float32 else unit_descriptors(descriptors)


@dataclass(frozen=True)
class Neighbours:
    """The nearest neighbours of N descriptors among M others."""

    nearest: Ints  # (N,) index in the second set
    best: Float  # (N,) similarity to it; -inf if none is within the radius
    runner_up: Float  # (N,) similarity to the second nearest, if requested
    best_of_second: Float  # (M,) highest similarity of each descriptor of the second set


@dataclass(frozen=True)
class Gate:
    """Compare only points of the second set within `radius` of `centres`, in pixels."""

    centres: Float  # (N, 2) expected positions of the first points
    points: Float  # (M, 2)
    radius: float


def find_neighbours(
    first: Float, second: Float, gate: Gate | None = None, *, runner_up: bool = False
) -> Neighbours:
    """Find the neighbours of unit descriptors (N, D) among (M, D); neither set is empty."""
    if gate is None:
        found = nothing_yet(len(first), len(second))
        helped = len(first) * len(second) > ALONE and blas_has_one_thread()
        share = -(-len(first) // 2) if helped else len(first)
        rows_at_once = max(1, min(BLOCK // len(second), share))
        parts = [slice(b, b + rows_at_once) for b in range(0, len(first), rows_at_once)]

        def compare(part: slice) -> None:
            _compare(first[part] @ second.T, found, part, slice(None), runner_up)

        if helped:
            with_help(compare, parts)
        else:
            for part in parts:
                compare(part)
        return found

    # From top to bottom, each band of the first set is compared with the rows of the second set
    # within reach: a third of all products or less.
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
        # Points too far away fall below all others: a minimum takes a tenth of the time of a mask.
        room = gate.radius**2 - left[band] @ right[window].T
        np.minimum(similarity, STEEP * room + 1, out=similarity)
        _compare(similarity, found, band, window, runner_up)
    return _reordered(found, rows, columns)


def with_help(work: Callable[[slice], None], parts: Sequence[slice]) -> None:
    """Do all parts, some of them in a second thread if a core is free.

    Unlike the threads of a BLAS, neither waits for the other in a busy loop: whoever is free takes
    the next part, and a helper that has not begun is not waited for.
    """
    left = iter(parts)

    def work_on() -> None:
        for part in left:
            work(part)

    for helper in _helper_ids:
        keep_off_this_core(helper)
    helping = _helper.submit(work_on)
    work_on()
    if not helping.cancel():
        helping.result()


def blas_has_one_thread() -> bool:
    """Whether NumPy multiplies matrices in one thread, as in the nodes.

    If it has threads of its own, they do all the work. Two of ours that call them at once wait for
    each other: 1000 with 1000 points then take 13 ms instead of 1.6.
    """
    known = _blas_of_numpy()
    return bool(known) and all(blas.threads() == 1 for blas in known)


@cache
def _blas_of_numpy() -> list[Blas]:
    known = find_blas()
    return [blas for blas in known if 'numpy' in blas.path] or known


def keep_off_this_core(thread: int) -> None:
    """Let another thread of this process, by its native id, run on all cores but the caller's.

    Linux often wakes a thread on the core of the thread that wakes it. There it waits for
    milliseconds while another core is idle.
    """
    others = os.sched_getaffinity(0) - {_current_core()} if _current_core is not None else set()
    if others:
        with suppress(OSError):  # the thread has ended, or the cores have changed meanwhile
            os.sched_setaffinity(thread, others)


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
    """Update `found` with the similarities of these rows and columns."""
    place = similarity.argmax(axis=1)
    along = np.arange(len(place))
    found.nearest[rows] = place + (columns.start or 0)
    found.best[rows] = similarity[along, place]
    # Not argmax(axis=0): a maximum along columns is vectorised, an argmax is not.
    highest = similarity.max(axis=0)
    with _entering:
        np.maximum(found.best_of_second[columns], highest, out=found.best_of_second[columns])
    if runner_up:
        similarity[along, place] = -np.inf
        found.runner_up[rows] = similarity.max(axis=1)


def _reordered(found: Neighbours, rows: Ints, columns: Ints) -> Neighbours:
    """Convert the result of sorted sets to their original order."""
    result = nothing_yet(len(rows), len(columns))
    result.nearest[rows] = columns[found.nearest]
    result.best[rows] = np.where(found.best < LOWEST, -np.inf, found.best)
    result.runner_up[rows] = np.where(found.runner_up < LOWEST, -np.inf, found.runner_up)
    result.best_of_second[columns] = found.best_of_second
    return result


def distance_factors(first: Float, second: Float) -> tuple[Float, Float]:
    """Return (N, 4) and (M, 4) whose product gives the squared distances of the points.

    |a - b|^2 = a.a - 2 a.b + b.b takes a tenth of the time of differences. Subtracting the centre
    first keeps float32 accurate to a hundredth of a pixel.
    """
    middle = second.mean(axis=0)
    a, b = first - middle, second - middle
    left = np.column_stack([-2 * a, (a * a).sum(axis=1), np.ones(len(a), np.float32)])
    right = np.column_stack([b, np.ones(len(b), np.float32), (b * b).sum(axis=1)])
    return left, right
