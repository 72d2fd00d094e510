"""Matching two sets of features: nearest neighbours, then tests on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kp2d_core.features import Features, Float
from kp2d_core.neighbours import Gate, find_neighbours
from kp2d_core.verification import Method, verify


@dataclass(frozen=True)
class Matches:
    """Pairs of indices into two sets of features."""

    indices: NDArray[np.intp]  # (M, 2): index in the first set, index in the second
    distances: Float  # (M,) Euclidean distance of the two unit descriptors, 0 to 2
    inliers: NDArray[np.bool_]  # (M,) agrees with the estimated geometry; all if none was asked
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
    verification: Method = 'none',
    threshold: float = 3.0,
    intrinsics: NDArray[np.float64] | None = None,
    undistort: Callable[[Float], Float] | None = None,
) -> Matches:
    """Nearest neighbours of the first set's descriptors in the second.

    mutual        keep a pair only if each is the other's nearest
    max_ratio     keep a pair only if distance < max_ratio * distance to the second nearest
    max_distance  keep a pair only up to this descriptor distance (0 to 2)
    radius        look only within so many pixels of the predicted position
    predicted     (N, 2) where the first set's points are expected in the second image;
                  without it, where they were
    verification  'none', 'homography', 'fundamental' or 'essential' (needs `intrinsics`)
    threshold     of the verification, in pixels (for 'essential' those of the image's middle)
    intrinsics    3x3 camera matrix of both images
    undistort     takes pixels (M, 2) to those of a camera without distortion, for the verification
    """
    _check_options(first, second, max_ratio, max_distance, radius, predicted)
    if not len(first) or not len(second):
        return _no_matches()
    gate = None
    if radius is not None:
        centres = first.keypoints if predicted is None else np.asarray(predicted, np.float32)
        gate = Gate(centres, second.keypoints, radius)
    found = find_neighbours(
        first.descriptors, second.descriptors, gate, runner_up=max_ratio is not None
    )

    keep = found.best > -np.inf
    if mutual:
        keep &= found.best >= found.best_of_second[found.nearest]
    if max_distance is not None:
        keep &= _distance(found.best) <= max_distance
    if max_ratio is not None:
        keep &= _distance(found.best) < max_ratio * _distance(found.runner_up)

    rows = np.flatnonzero(keep)
    if mutual:
        rows = _one_each(rows, found.nearest)
    indices = np.stack([rows, found.nearest[rows]], axis=1)
    inliers, model = verify(
        first.keypoints[indices[:, 0]],
        second.keypoints[indices[:, 1]],
        verification,
        threshold=threshold,
        intrinsics=intrinsics,
        undistort=undistort,
    )
    return Matches(indices, _distance(found.best[rows]), inliers, model)


def _one_each(rows: NDArray[np.intp], nearest: NDArray[np.intp]) -> NDArray[np.intp]:
    """Of rows that are equally near to the same one, as copies are, the first."""
    if not len(rows) or np.bincount(nearest[rows]).max() < 2:
        return rows
    return rows[np.sort(np.unique(nearest[rows], return_index=True)[1])]


def _distance(similarity: Float) -> Float:
    """Of unit vectors with this dot product; infinite where nothing was comparable."""
    return np.sqrt(np.maximum(2 - 2 * similarity, 0), dtype=np.float32)


def _no_matches() -> Matches:
    return Matches(np.empty((0, 2), np.intp), np.empty(0, np.float32), np.empty(0, bool))


def _check_options(
    first: Features,
    second: Features,
    max_ratio: float | None,
    max_distance: float | None,
    radius: float | None,
    predicted: Float | None,
) -> None:
    for name, value in (
        ('max_ratio', max_ratio),
        ('max_distance', max_distance),
        ('radius', radius),
    ):
        if value is not None and not value > 0:
            raise ValueError(f'{name} must be above 0, got {value}')
    if predicted is not None and radius is None:
        raise ValueError('predicted positions need a radius')
    if predicted is not None and np.shape(predicted) != (len(first), 2):
        raise ValueError(f'predicted must be ({len(first)}, 2), got {np.shape(predicted)}')
    if first.descriptors.shape[1:] != second.descriptors.shape[1:] and len(first) and len(second):
        raise ValueError(
            f'descriptors differ in length: {first.descriptors.shape[1]} and '
            f'{second.descriptors.shape[1]}'
        )
