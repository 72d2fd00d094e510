"""How well matches tell the motion of a calibrated camera, as odometry asks of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from kp2d_core.evaluation.camera_paths import CameraPath, Matrix
from kp2d_core.evaluation.metrics import area_under_curve
from kp2d_core.evaluation.protocol import Extract
from kp2d_core.features import Features, in_order_of_score
from kp2d_core.images import read_image
from kp2d_core.lenses import undistort
from kp2d_core.matching import match

GAPS = (1, 2, 5, 10)  # frames between the two of a pair
POINTS = 1000  # the best of each frame, as in the node
PAIRS = 100  # of each gap, spread over the path
FAILED = 180.0  # degrees, of a pair whose motion could not be estimated
WITHIN = 5  # degrees, of the area under the curve
_THRESHOLD = 1.0  # px off the epipolar geometry
_CONFIDENCE = 0.9999
_ITERATIONS = 5000


@dataclass(frozen=True)
class MotionResult:
    """Of all pairs of frames that are `gap` apart."""

    gap: int
    pairs: int
    rotation: float  # degrees, the median error
    direction: float  # degrees, the median error of where the camera went; how far is not told
    auc5: float  # area under the curve of pairs with both errors within so much, up to 5 degrees
    matches: float  # mutual ones, the mean
    inliers: float  # of them that agree with the motion found, the mean


def motion_test(
    extract: Extract,
    path: CameraPath,
    gaps: Iterable[int] = GAPS,
    *,
    points: int = POINTS,
    pairs: int = PAIRS,
    progress: bool = False,
) -> list[MotionResult]:
    """Rotation and direction between frames of a path, by mutual matches and essential matrix.

    Frames are taken at their own size. Lenses are undistorted, with the path's calibration.
    """
    distances = sorted(set(gaps))
    if not distances or distances[0] < 1:
        raise ValueError('gaps must be 1 or more frames')
    if distances[0] >= len(path.images):
        raise ValueError(
            f'{path.name} has {len(path.images)} frames: none are {distances[0]} apart'
        )
    wanted = {gap: _starts(len(path.images) - gap, pairs) for gap in distances}
    found: dict[int, list[tuple[float, ...]]] = {gap: [] for gap in distances}
    total = sum(map(len, wanted.values()))
    kept: dict[int, Features] = {}

    def features(frame: int) -> Features:
        if frame not in kept:
            everything = extract(read_image(path.images[frame]))
            kept[frame] = in_order_of_score(everything)[:points]
        return kept[frame]

    disable = None if progress else True
    with tqdm(total=total, desc=f'motion, {path.name}', unit='pair', disable=disable) as bar:
        for start in sorted(set().union(*wanted.values())):
            for passed in [frame for frame in kept if frame < start]:
                del kept[passed]
            for gap in (gap for gap in distances if start in wanted[gap]):
                end = start + gap
                found[gap].append(_compare(features(start), features(end), path, (start, end)))
                bar.update()
    return [_summary(gap, rows) for gap, rows in found.items() if rows]


def _starts(there: int, limit: int) -> set[int]:
    """Frames that pairs begin with: all, or so many spread evenly."""
    count = max(min(there, limit), 0)
    return {int(i * there / count) for i in range(count)}


def _compare(
    first: Features, second: Features, path: CameraPath, frames: tuple[int, int]
) -> tuple[float, float, float, float]:
    """Errors of rotation and direction in degrees, matches, inliers."""
    matches = match(first, second).indices
    a, b = (
        undistort(points.astype(np.float64), path.intrinsics, path.distortion)
        for points in (first.keypoints[matches[:, 0]], second.keypoints[matches[:, 1]])
    )
    placed = np.isfinite(np.hstack([a, b])).all(axis=1)
    rotation, direction, inliers = _estimate(
        a[placed], b[placed], _THRESHOLD / path.intrinsics[0, 0]
    )
    if rotation is None or direction is None:
        return FAILED, FAILED, len(matches), 0
    truth = path.motion(*frames)
    turned = np.clip((np.trace(rotation.T @ truth[:3, :3]) - 1) / 2, -1, 1)
    way = float(np.linalg.norm(truth[:3, 3]))
    along = np.clip(direction @ truth[:3, 3] / way, -1, 1) if way > 0 else 1.0
    return *np.degrees(np.arccos([turned, along])).tolist(), len(matches), inliers


def _estimate(
    first: Matrix, second: Matrix, threshold: float
) -> tuple[Matrix | None, Matrix | None, int]:
    """Rotation, unit direction and inliers, of points in the plane at distance 1."""
    if len(first) < 6:
        return None, None, 0
    cv2.setRNGSeed(0)
    try:
        essential, mask = cv2.findEssentialMat(
            first, second, np.eye(3), method=cv2.USAC_MAGSAC, prob=_CONFIDENCE,
            threshold=threshold, maxIters=_ITERATIONS,
        )  # fmt: skip
        if essential is None or essential.shape != (3, 3):
            return None, None, 0
        inliers, rotation, direction, _ = cv2.recoverPose(
            essential, first, second, np.eye(3), mask=mask
        )
    except cv2.error:  # degenerate points
        return None, None, 0
    return np.asarray(rotation), np.asarray(direction).ravel(), int(inliers)


def _summary(gap: int, rows: list[tuple[float, ...]]) -> MotionResult:
    table: NDArray[np.float64] = np.array(rows)
    worse = table[:, :2].max(axis=1)
    rotation, direction = np.median(table[:, :2], axis=0)
    matches, inliers = table[:, 2:].mean(axis=0)
    return MotionResult(
        gap,
        len(rows),
        float(rotation),
        float(direction),
        area_under_curve(worse, WITHIN),
        float(matches),
        float(inliers),
    )
