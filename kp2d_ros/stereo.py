"""Several cameras: synchronised images, and matches between them. Without ROS."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kp2d_core.camera import Camera
from kp2d_core.features import Float
from kp2d_core.matching import match
from kp2d_core.tracking import Result
from kp2d_ros.settings import Settings

WAITING = 5  # images of a camera that wait for their partners

Item = TypeVar('Item')


class Pairing(Generic[Item]):
    """Groups images of the same time, one per camera."""

    def __init__(self, cameras: int) -> None:
        self._waiting: list[deque[tuple[int, Item]]] = [deque() for _ in range(cameras)]

    def add(
        self, camera: int, stamp: int, item: Item, tolerance: int
    ) -> tuple[list[Item] | None, int]:
        """Return the group that this image completes, if any, and the number of dropped images.

        Stamps and the tolerance are in nanoseconds. An image is dropped when a later one of its
        camera has found its partners, or when too many wait.
        """
        self._waiting[camera].append((stamp, item))
        found: list[int] = []
        for waiting in self._waiting:
            apart = [abs(each - stamp) for each, _ in waiting]
            if not apart or min(apart) > tolerance:
                return None, self._thin(camera)
            found.append(int(np.argmin(apart)))
        together, gone = [], 0
        for waiting, index in zip(self._waiting, found, strict=True):
            together.append(waiting[index][1])
            gone += index
            for _ in range(index + 1):
                waiting.popleft()
        return together, gone

    def _thin(self, camera: int) -> int:
        waiting = self._waiting[camera]
        if len(waiting) <= WAITING:
            return 0
        waiting.popleft()
        return 1


@dataclass(frozen=True)
class StereoMatches:
    """Matches between the first camera and another one, row by row."""

    indices: NDArray[np.intp]  # (M, 2): index in the first camera's features, in the other's
    distances: Float  # (M,) of the descriptors
    inliers: NDArray[np.bool_]  # (M,) agrees with the geometry
    points: Float  # (M, 3) metres in the first camera's frame; NaN where that is not known


def match_stereo(first: Result, second: Result, settings: Settings) -> StereoMatches:
    """Match with the stereo calibration, or with a fundamental matrix if there is none."""
    views = [_rectified(result) for result in (first, second)]
    baseline = second.frame.baseline
    calibrated = views[0] is not None and views[1] is not None and baseline > 0
    found = match(
        first.features,
        second.features,
        max_ratio=settings.match_ratio or None,
        max_distance=settings.match_distance or None,
        verification='none' if calibrated else 'fundamental',
        threshold=settings.verification_threshold,
    )
    left, right = found.indices.T
    points = np.full((len(found), 3), np.nan)
    inliers = found.inliers
    if calibrated and len(found):
        assert views[0] is not None and views[1] is not None
        (rays, turn, focal), (others, _, _) = views[0], views[1]
        disparity, rows = (rays[left] - others[right]).T
        off = settings.verification_threshold / focal
        inliers = (np.abs(rows) < off) & (disparity > -off)
        with np.errstate(divide='ignore', invalid='ignore'):
            depth = np.where(disparity > 0, baseline / disparity, np.nan)
        points = depth[:, None] * np.column_stack([rays[left], np.ones(len(left))]) @ turn
        points[~inliers] = np.nan
    return StereoMatches(found.indices, found.distances, inliers, points.astype(np.float32))


def _rectified(result: Result) -> tuple[NDArray[np.float64], NDArray[np.float64], float] | None:
    """Return rays in the shared rectified frame, the rotation into it, and a focal length."""
    camera: Camera | None = result.frame.camera
    camera = camera.of(result.features.image_size) if camera is not None else None
    if camera is None:
        return None
    turn = np.reshape(camera.rotation, (3, 3))
    rays = np.column_stack([result.rays, np.ones(len(result.rays))]) @ turn.T
    return rays[:, :2] / rays[:, 2:], turn, camera.intrinsics[0]


def baseline_of(projection: Sequence[float]) -> float:
    """Return the baseline in metres to the right of the first camera, from P."""
    return -projection[3] / projection[0] if projection[0] else 0.0
