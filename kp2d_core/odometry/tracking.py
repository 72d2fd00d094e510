"""Find the pose of a frame in a map: near a prediction, or anywhere."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kp2d_core.odometry.frames import Frame, Map, Sights
from kp2d_core.odometry.geometry import Ints, Matrix, invert, log_rotation
from kp2d_core.odometry.mapping import depth_of, local_points, neighbours
from kp2d_core.odometry.pose import distances, find, refine
from kp2d_core.odometry.search import find_points, match_all, should_see
from kp2d_core.odometry.settings import Settings


@dataclass(frozen=True)
class Fit:
    """A candidate pose of a frame and its support."""

    pose: Matrix  # (4, 4) from the world
    rows: Ints  # features that agree with it
    numbers: Ints  # the points of the map that they see
    matches: int  # features matched with map points
    expected: Ints  # points that should be seen
    reprojection: float  # root mean square of the agreeing ones, in standard deviations
    predicted: bool = True  # whether it is near the prediction


def track(
    world: Map,
    frame: Frame,
    last: Frame,
    guess: Matrix,
    settings: Settings,
    random: np.random.Generator,
) -> Fit | None:
    """Find the pose of a frame near its prediction, or else near the last frame."""
    near = neighbours(world, last, settings.local_keyframes)
    if world.keyframes[-1] not in near:
        near.append(world.keyframes[-1])
    points = local_points(world, near)
    rows, numbers = find_points(world, frame, points, guess, settings.wide_radius, settings)
    sight = world.sight(frame, rows, numbers)
    pose = refine(sight, guess, steps=20, threshold=2 * settings.robust)
    good = distances(sight, pose) < 2 * settings.outlier
    if trusted(int(good.sum()), len(good), settings):
        fit = settle(world, frame, points, pose, settings)
        if fit is not None and not _leaps(world, last, guess, fit, settings):
            return fit
    for other in [last, *near[:2]]:
        found = by_descriptors(world, frame, other, settings, random)
        if found is not None:
            fit = settle(world, frame, points, found, settings)
            if fit is not None and not _leaps(world, last, guess, fit, settings):
                return replace(fit, predicted=False)
    return None


def relocalise(
    world: Map,
    frame: Frame,
    candidates: list[Frame],
    settings: Settings,
    random: np.random.Generator,
) -> Fit | None:
    """Find the pose of a frame anywhere in the map, near one of the keyframes.

    There is no prediction, so more support is required.
    """
    for keyframe in candidates:
        pose = by_descriptors(world, frame, keyframe, settings, random)
        if pose is None:
            continue
        near = [keyframe, *neighbours(world, keyframe, settings.local_keyframes)]
        fit = settle(world, frame, local_points(world, near), pose, settings)
        if fit is None or len(fit.rows) < settings.relocalise_inliers:
            continue
        if len(fit.rows) >= settings.relocalise_found * len(fit.expected):
            return fit
    return None


def by_descriptors(
    world: Map, frame: Frame, other: Frame, settings: Settings, random: np.random.Generator
) -> Matrix | None:
    """Estimate a rough pose from the points of another frame, anywhere in the image."""
    known = np.flatnonzero((other.points >= 0) & (other.camera == 0))
    known = known[world.alive[other.points[known]]]
    own = np.flatnonzero(frame.camera == 0)
    i, j = match_all(other.features.descriptors[known], frame.features.descriptors[own], settings)
    sight = world.sight(frame, own[j], other.points[known[i]])
    pose = find(sight, 2 * settings.outlier, random)
    if pose is None:
        return None
    pose = refine(sight, pose, threshold=2 * settings.robust)
    good = distances(sight, pose) < 2 * settings.outlier
    return pose if good.sum() >= settings.min_inliers else None


def settle(world: Map, frame: Frame, points: Ints, pose: Matrix, settings: Settings) -> Fit | None:
    """Refine a rough pose with all local points; None if too few agree."""
    rows, numbers = find_points(world, frame, points, pose, settings.narrow_radius, settings)
    sight = world.sight(frame, rows, numbers)
    pose = refine(sight, pose, threshold=settings.robust)
    off = distances(sight, pose)
    good = off < settings.outlier
    expected = should_see(world, points, pose)
    if not trusted(int(good.sum()), len(good), settings):
        return None
    if good.sum() < settings.min_found * len(expected):
        return None
    reprojection = float(np.sqrt((off[good] ** 2).mean() / 2))
    return Fit(pose, rows[good], numbers[good], len(good), expected, reprojection)


def resettle(world: Map, frame: Frame, fit: Fit, settings: Settings) -> Fit:
    """Refine the pose again with the same observations after `seen` has changed slightly."""
    sight = world.sight(frame, fit.rows, fit.numbers)
    pose = refine(sight, fit.pose, threshold=settings.robust)
    off = distances(sight, pose)
    good = off < settings.outlier
    if not trusted(int(good.sum()), len(good), settings):
        return fit
    reprojection = float(np.sqrt((off[good] ** 2).mean() / 2))
    return replace(
        fit, pose=pose, rows=fit.rows[good], numbers=fit.numbers[good], reprojection=reprojection
    )


def settle_placed(world: Map, sights: Sights, settings: Settings) -> None:
    """Re-estimate the pose of a frame between keyframes from the current points."""
    rows = np.flatnonzero(sights.points >= 0)
    rows = rows[world.alive[sights.points[rows]]]
    if len(rows) < settings.min_inliers:
        return
    sight = world.sight(sights, rows, sights.points[rows])
    placed = sights.placed
    before = placed.pose @ placed.keyframe.pose
    pose = refine(sight, before, threshold=settings.robust)
    good = distances(sight, pose) < settings.outlier
    if trusted(int(good.sum()), len(good), settings):
        placed.pose = pose @ invert(placed.keyframe.pose)


def trusted(inliers: int, matches: int, settings: Settings) -> bool:
    return inliers >= settings.min_inliers and inliers >= settings.min_inlier_ratio * matches


def _leaps(world: Map, last: Frame, guess: Matrix, fit: Fit, settings: Settings) -> bool:
    """Return whether a pose with little support is also far from its prediction."""
    if len(fit.rows) >= settings.leap_inliers:
        return False
    turn = np.degrees(np.linalg.norm(log_rotation(fit.pose[:3, :3] @ guess[:3, :3].T)))
    way = np.linalg.norm(invert(fit.pose)[:3, 3] - invert(guess)[:3, 3])
    far = settings.leap_way * depth_of(world, last, 50)
    return bool(turn > settings.leap_degrees or way > far)
