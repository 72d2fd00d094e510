"""Mapping: insert keyframes, triangulate and merge points, adjust, cull."""

from __future__ import annotations

from itertools import islice

import numpy as np

from kp2d_core.odometry.adjustment import adjust, residuals
from kp2d_core.odometry.frames import FEWEST, Frame, Map
from kp2d_core.odometry.geometry import (
    Ints,
    invert,
    parallax,
    project,
    triangulate,
)
from kp2d_core.odometry.pose import distances
from kp2d_core.odometry.search import find_points, match_epipolar
from kp2d_core.odometry.settings import Settings
from kp2d_core.odometry.start import triangulate_rig

PARTNERS = 4  # keyframes to triangulate a new one with
SHARED = 15  # common points of two neighbouring keyframes, at least
TRIED = 5  # keyframes after which a rarely seen point is removed
RARELY = 0.25  # a point seen in a smaller share of the expected frames is removed
ALIVE = 0.6  # share of alive points below which memory is compacted


def add_keyframe(world: Map, frame: Frame, settings: Settings) -> None:
    """Insert a tracked frame as a keyframe and improve the map with it."""
    world.keyframes.append(frame)
    known = frame.points >= 0
    world.descriptors[frame.points[known]] = frame.features.descriptors[known]
    if len(world.rig.cameras) > 1:
        triangulate_rig(world, frame, settings)
    near = neighbours(world, frame, settings.local_keyframes)
    for other in partners(world, frame, near):
        make_points(world, other, frame, settings)
    for other in near[:PARTNERS]:
        look_again(world, other, frame, settings)
    adjust_locally(world, frame, settings)
    forget(world)


def neighbours(world: Map, frame: Frame, count: int) -> list[Frame]:
    """Return the keyframes that share most points with a frame, best first."""
    mine = np.zeros(world.count, bool)
    mine[frame.points[frame.points >= 0]] = True
    points, owner = world.observations()
    shared = np.bincount(owner[mine[points]], minlength=len(world.keyframes))
    order = np.argsort(shared, kind='stable')[::-1]
    near = (world.keyframes[i] for i in order if shared[i] >= SHARED)
    return list(islice((other for other in near if other is not frame), count))


def local_points(world: Map, frames: list[Frame]) -> Ints:
    """Return all points that any of the frames observes."""
    if not frames:
        return np.empty(0, np.int64)
    numbers = np.unique(np.concatenate([frame.points for frame in frames]))
    return numbers[numbers >= 0]


def depth_of(world: Map, frame: Frame, percent: float) -> float:
    """Return a percentile of the depths of the points that a frame observes."""
    points = frame.points[frame.points >= 0]
    depth = project(frame.pose, world.positions[points])[1]
    return float(np.percentile(depth, percent)) if len(depth) else 1.0


def partners(world: Map, frame: Frame, near: list[Frame]) -> list[Frame]:
    """Choose neighbours to triangulate with: far enough away, and not all at one place."""
    centre = invert(frame.pose)[:3, 3]
    depth = depth_of(world, frame, 50)
    chosen: list[Frame] = []
    for other in sorted(near, key=lambda other: -other.index):
        way = np.linalg.norm(invert(other.pose)[:3, 3] - centre)
        apart = [np.linalg.norm(invert(other.pose)[:3, 3] - invert(c.pose)[:3, 3]) for c in chosen]
        if way > 0.01 * depth and (not apart or min(apart) > 0.01 * depth):
            chosen.append(other)
        if len(chosen) == PARTNERS:
            break
    return chosen


def make_points(world: Map, other: Frame, frame: Frame, settings: Settings) -> int:
    """Triangulate points from features without one; return their number."""
    sides = []
    for view in (other, frame):
        free = np.flatnonzero((view.points < 0) & (view.camera == 0))
        sides.append((free, view.features.descriptors[free], view.seen[free], view.pose))
    i, j = match_epipolar(
        sides[0][1:], sides[1][1:], settings.epipolar / world.rig.focal, settings
    )
    i, j = sides[0][0][i], sides[1][0][j]
    if not len(i):
        return 0
    points = triangulate(other.pose, frame.pose, other.seen[i], frame.seen[j])
    good = np.isfinite(points).all(axis=1)
    for view, rows in ((other, i), (frame, j)):
        flat, depth = project(view.pose, points)
        off = np.linalg.norm(flat - view.seen[rows], axis=1) * view.weight[rows]
        good &= (depth > 0) & (off < settings.outlier)
    good &= np.degrees(parallax(other.pose, frame.pose, points)) > settings.min_parallax
    numbers = world.add_points(points[good], frame.features.descriptors[j[good]], frame.index)
    other.points[i[good]], frame.points[j[good]] = numbers, numbers
    return len(numbers)


def look_again(world: Map, other: Frame, frame: Frame, settings: Settings) -> None:
    """Search the frame's points in another keyframe, and merge duplicates."""
    candidates = np.setdiff1d(frame.points[frame.points >= 0], other.points)
    if not len(candidates):
        return
    rows, numbers = find_points(
        world, other, candidates, other.pose, settings.narrow_radius / 2, settings
    )
    sight = world.sight(other, rows, numbers)
    good = distances(sight, other.pose) < settings.outlier
    rows, numbers = rows[good], numbers[good]
    free = other.points[rows] < 0
    other.points[rows[free]] = numbers[free]
    # Keep the older of two equal points: it has been adjusted more often.
    old, new = other.points[rows[~free]], numbers[~free]
    keep, drop = np.minimum(old, new), np.maximum(old, new)
    once = np.unique(drop, return_index=True)[1]
    keep, drop = keep[once], drop[once]
    clean = ~np.isin(drop, keep) & ~np.isin(keep, drop)
    if clean.any():
        world.replace_points(drop[clean], keep[clean])


def complete(world: Map, settings: Settings) -> int:
    """Search every keyframe for points that its neighbours observe; return how many were added.

    Observations dropped while poses were inaccurate may fit now.
    """
    added = 0
    for frame in world.keyframes:
        near = neighbours(world, frame, settings.local_keyframes)
        candidates = np.setdiff1d(local_points(world, near), frame.points)
        rows, numbers = find_points(
            world, frame, candidates, frame.pose, settings.narrow_radius, settings
        )
        free = frame.points[rows] < 0
        rows, numbers = rows[free], numbers[free]
        good = distances(world.sight(frame, rows, numbers), frame.pose) < settings.outlier
        frame.points[rows[good]] = numbers[good]
        added += int(good.sum())
    return added


def adjust_locally(world: Map, frame: Frame, settings: Settings) -> None:
    """Adjust the keyframes around a keyframe; hold their neighbours fixed."""
    near = neighbours(world, frame, settings.window + settings.anchors - 1)
    moving, held = [frame, *near[: settings.window - 1]], near[settings.window - 1 :]
    first = world.keyframes[0]
    if not held and len(moving) > 1:
        # The two oldest frames fix position, rotation and scale; a rig, which has a scale, needs
        # only the oldest.
        moving.sort(key=lambda view: view.index)
        count = 1 if len(world.rig.cameras) > 1 else min(2, len(moving) - 1)
        held, moving = moving[:count], moving[count:]
    elif first in moving and len(moving) > 1:
        moving.remove(first)
        held = [*held, first]
    adjust_frames(world, moving, held, settings, settings.steps)


def adjust_frames(
    world: Map, moving: list[Frame], held: list[Frame], settings: Settings, steps: int
) -> float:
    """Adjust, drop outliers, and return the mean cost per observation."""
    frames = [*moving, *held]
    fixed = [False] * len(moving) + [True] * len(held)
    problem, numbers = world.problem(frames, fixed)
    if not len(problem.frame):
        return 0.0
    # Weakly connected frames would move anywhere.
    problem.fixed |= np.bincount(problem.frame, minlength=len(frames)) < SHARED
    cost = adjust(problem, steps, settings.robust)
    for frame, pose in zip(moving, problem.poses, strict=False):
        frame.pose = pose
    world.positions[numbers] = problem.points
    off = np.linalg.norm(residuals(problem, problem.poses, problem.points), axis=1)
    bad = off > settings.outlier
    if bad.any():
        _drop_observations(frames, problem.frame[bad], numbers[problem.point[bad]])
    _drop_single(world, numbers)
    return cost / len(problem.frame)


def _drop_observations(frames: list[Frame], which: Ints, points: Ints) -> None:
    for number in np.unique(which):
        frame = frames[number]
        gone = np.isin(frame.points, points[which == number])
        frame.points[gone] = -1


def _drop_single(world: Map, numbers: Ints) -> None:
    """Remove points with fewer than two observations: their position is undetermined."""
    few = world.times_seen()[numbers] < 2
    if few.any():
        world.drop_points(numbers[few])


def forget(world: Map) -> None:
    """Remove points that are seen too rarely, and free the memory of dead ones."""
    if len(world.keyframes) > TRIED:
        since = world.keyframes[-TRIED].index
        alive = np.flatnonzero(world.alive[: world.count])
        seldom = world.found[alive] < RARELY * world.expected[alive]
        tried = world.born[alive] <= since
        poor = tried & (world.times_seen()[alive] + world.seen_before[alive] < 3)
        drop = alive[(seldom & tried) | poor]
        if len(drop):
            world.drop_points(drop)
    if world.count > FEWEST and world.alive[: world.count].mean() < ALIVE:
        world.compact()
