"""Error of the motion of a calibrated camera, estimated from matches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from kp2d_core.camera import Camera
from kp2d_core.evaluation.camera_paths import CameraPath
from kp2d_core.evaluation.metrics import area_under_curve
from kp2d_core.evaluation.protocol import Extract, View
from kp2d_core.features import Float, in_order_of_score
from kp2d_core.geometry import Matrix
from kp2d_core.images import read_image, size_of
from kp2d_core.matching import match
from kp2d_core.refinement import refined_points
from kp2d_core.verification import MINIMUM_POINTS, verify

GAPS = (1, 2, 5, 10, 20)  # frames between the two of a pair
PAIRS = 100  # at most, for each gap, spread over the path
SHORTEST = 0.05  # m of translation; below it the ground truth gives no reliable direction
FAILED = 180.0  # degrees, the error of a pair whose motion could not be estimated
WITHIN = 5  # degrees, limit of the area under the curve
_THRESHOLD = 1.0  # px from the epipolar line
_ANY_DISTANCE = 1e9  # times the way that the camera went; OpenCV drops points beyond 50 of them


@dataclass(frozen=True)
class MotionResult:
    """Results of all pairs of frames that are `gap` frames apart."""

    gap: int
    pairs: int
    rotation: float  # degrees, the median error
    direction: float  # degrees, the median error of the direction of translation
    auc5: float  # area under the curve of pairs with both errors below a limit, up to 5 degrees
    matches: float  # mean number of mutual matches
    inliers: float  # mean number of those that agree with the estimated motion


def choose_pairs(path: CameraPath, gaps: Iterable[int] = GAPS) -> dict[int, list[int]]:
    """Return the first frames of the pairs for each gap; raise ValueError if there are none."""
    wanted = sorted(set(gaps))
    if not wanted or wanted[0] < 1:
        raise ValueError('gaps must be 1 or more frames')
    starts: dict[int, list[int]] = {}
    places = path.poses[:, :3, 3]
    for gap in wanted:
        ways = np.linalg.norm(places[gap:] - places[:-gap], axis=1)
        there = np.flatnonzero(ways >= SHORTEST)
        if len(there):
            step = max(len(there) / PAIRS, 1)
            starts[gap] = [int(there[int(i * step)]) for i in range(min(PAIRS, len(there)))]
    if not starts:
        raise ValueError(
            f'{path.name} has no frames {" or ".join(map(str, wanted))} apart with a translation '
            f'of {SHORTEST:g} m or more'
        )
    return starts


def motion_test(
    extract: Extract,
    path: CameraPath,
    gaps: Iterable[int] = GAPS,
    *,
    top_k: int = 1000,
    seeds: int = 1,
    refine: bool = False,
    progress: bool = False,
) -> list[MotionResult]:
    """Estimate rotation and direction between frames from mutual matches, verified by `verify`.

    Frames keep their size. The calibration of the path removes the lens distortion. Each pair is
    estimated `seeds` times with the matches in different order, because the search is random.
    With `refine`, the matches are those that align, at refined positions (`refine_matches`).
    """
    pairs = choose_pairs(path, gaps)
    found: dict[int, list[tuple[float, ...]]] = {gap: [] for gap in pairs}
    kept: dict[int, View] = {}

    def view(frame: int) -> View:
        if frame not in kept:
            image = read_image(path.images[frame])
            kept[frame] = View(image, in_order_of_score(extract(image))[:top_k], size_of(image))
        return kept[frame]

    total, disable = sum(map(len, pairs.values())), None if progress else True
    with tqdm(total=total, desc=f'motion, {path.name}', unit='pair', disable=disable) as bar:
        for start in sorted({start for starts in pairs.values() for start in starts}):
            for passed in [frame for frame in kept if frame < start]:
                del kept[passed]
            for gap in (gap for gap, starts in pairs.items() if start in starts):
                points = _matched(view(start), view(start + gap), refine)
                truth = path.motion(start, start + gap)
                found[gap] += _compare(*points, path, truth, seeds)
                bar.update()
    return [_summary(gap, len(pairs[gap]), rows) for gap, rows in found.items()]


def _matched(first: View, second: View, refine: bool) -> tuple[Float, Float, Float]:
    """Return the points of the mutual matches, and the distances of their descriptors."""
    matches = match(first.features, second.features)
    here, there = matches.indices.T
    if not refine:
        points = first.features.keypoints[here], second.features.keypoints[there]
        return *points, matches.distances
    images = first.image, second.image
    a, b, rows = refined_points(*images, first.features, second.features, matches)
    return a, b, matches.distances[rows]


def _compare(
    first: Float, second: Float, distances: Float, path: CameraPath, truth: Matrix, seeds: int
) -> list[tuple[float, float, float, float]]:
    """Return errors of rotation and direction in degrees, matches and inliers, for each seed."""
    rows = []
    for seed in range(seeds):
        order = np.random.default_rng(seed).permutation(len(first))
        found = _estimate(first[order], second[order], distances[order], path.camera)
        if found is None:
            rows.append((FAILED, FAILED, float(len(first)), 0.0))
            continue
        rotation, direction, inliers = found
        errors = motion_errors(rotation, direction, truth)
        rows.append((*errors, float(len(first)), float(inliers)))
    return rows


def motion_errors(rotation: Matrix, direction: Matrix, truth: Matrix) -> tuple[float, float]:
    """Errors of a rotation and of a unit direction of translation, in degrees."""
    # Not from the trace, whose cosine is inaccurate at small angles.
    turned = 2 * np.arcsin(min(np.linalg.norm(rotation - truth[:3, :3]) / np.sqrt(8), 1))
    along = np.clip(direction @ truth[:3, 3] / np.linalg.norm(truth[:3, 3]), -1, 1)
    return float(np.degrees(turned)), float(np.degrees(np.arccos(along)))


def _estimate(
    first: Float, second: Float, distances: Float, camera: Camera
) -> tuple[Matrix, Matrix, int] | None:
    """Estimate rotation, unit direction and number of inliers from pixels."""
    inliers, essential = verify(
        first, second, 'essential', threshold=_THRESHOLD, intrinsics=camera.matrix,
        undistort=camera.undistort, distances=distances,
    )  # fmt: skip
    if essential is None or inliers.sum() < MINIMUM_POINTS['essential']:
        return None
    a, b = camera.rays(first[inliers]), camera.rays(second[inliers])
    count, rotation, direction, *_ = cv2.recoverPose(
        essential, a, b, np.eye(3), distanceThresh=_ANY_DISTANCE
    )
    return np.asarray(rotation), np.asarray(direction).ravel(), int(count)


def _summary(gap: int, pairs: int, rows: list[tuple[float, ...]]) -> MotionResult:
    table: NDArray[np.float64] = np.array(rows)
    rotation, direction = np.median(table[:, :2], axis=0)
    matches, inliers = table[:, 2:].mean(axis=0)
    return MotionResult(
        gap,
        pairs,
        float(rotation),
        float(direction),
        area_under_curve(table[:, :2].max(axis=1), WITHIN),
        float(matches),
        float(inliers),
    )
