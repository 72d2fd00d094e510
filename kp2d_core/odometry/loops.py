"""Loop closure: find loops by retrieval, verify them by geometry, correct the map."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kp2d_core.features import Float
from kp2d_core.odometry.frames import Frame, Map
from kp2d_core.odometry.geometry import Ints, invert, log_rotation, transform
from kp2d_core.odometry.graph import Edge, relax
from kp2d_core.odometry.mapping import adjust_frames, complete
from kp2d_core.odometry.retrieval import Retrieval
from kp2d_core.odometry.search import match_all
from kp2d_core.odometry.settings import Settings
from kp2d_core.odometry.similarity import (
    Similarity,
    TwoSights,
    find_similarity,
    from_pose,
)

CANDIDATES = 4  # keyframes to check for each keyframe
APART = 15  # keyframes between the two of a loop, at least
SHARED = 5  # common points, at most: with more, the loop is already closed
MIN_PAIRS = 20  # points that one similarity must align
MIN_SHARE = 0.25  # of the similar pairs
MIN_KNOWN = 0.12  # of the points that one of them observes
MOST_DRIFT = 0.15  # largest distance, relative to the path between them
MOST_TURN = 40.0  # degrees, largest rotation between them
LIMIT = 6.0  # px, largest error of an aligned point
STEPS = 12  # of the adjustment of everything


@dataclass(frozen=True)
class Loop:
    """Two keyframes that observe the same place as different map points."""

    first: Frame
    second: Frame
    motion: Similarity  # of points: second camera from first
    points: tuple[Ints, Ints]  # that are one, of the first's map and of the second's


def find_loops(
    first: Map,
    second: Map,
    settings: Settings,
    random: np.random.Generator,
    words: Float | None = None,
) -> list[Loop]:
    """Find loops within a map (pass it twice) or between two maps.

    words  visual words of the descriptors; None: learn them from the first map
    """
    retrieval = Retrieval(words)
    loops: list[Loop] = []
    if not first.keyframes:
        return loops
    for frame in first.keyframes:
        retrieval.add(frame.index, _own(frame))
    order = {frame.index: i for i, frame in enumerate(first.keyframes)}
    same = first is second
    way = _way(first)
    for number, frame in enumerate(second.keyframes):
        tried = 0
        for index, _ in retrieval.query(_own(frame), 40):
            if same and order[index] > number - APART:
                continue
            tried += 1
            if tried > CANDIDATES:
                break
            other = first.keyframes[order[index]]
            loop = prove(first, other, second, frame, settings, random)
            if loop is not None and (not same or _believable(loop, way)):
                loops.append(loop)
                break
    return loops


def _way(world: Map) -> dict[int, float]:
    """Return the length of the path at each keyframe."""
    centres = np.array([invert(frame.pose)[:3, 3] for frame in world.keyframes])
    steps = np.linalg.norm(np.diff(centres, axis=0, prepend=centres[:1]), axis=1)
    return dict(zip((f.index for f in world.keyframes), np.cumsum(steps).tolist(), strict=True))


def _believable(loop: Loop, way: dict[int, float]) -> bool:
    """Whether drift can explain the correction that the loop requires.

    Otherwise two places only look the same, such as two equal doors.
    """
    known = from_pose(loop.first.pose @ invert(loop.second.pose))
    said = loop.motion.inverse()
    drift = float(np.linalg.norm(known.translation - said.translation))
    turn = np.degrees(np.linalg.norm(log_rotation(known.rotation @ said.rotation.T)))
    gone = way[loop.second.index] - way[loop.first.index]
    return drift < MOST_DRIFT * gone and turn < MOST_TURN


def _own(frame: Frame) -> Float:
    """Descriptors of the first camera."""
    return frame.features.descriptors[frame.camera == 0]


def prove(
    first_map: Map,
    first: Frame,
    second_map: Map,
    second: Frame,
    settings: Settings,
    random: np.random.Generator,
) -> Loop | None:
    """Verify a loop: one similarity must align enough points of both keyframes."""
    rows = [np.flatnonzero((f.points >= 0) & (f.camera == 0)) for f in (first, second)]
    if first_map is second_map:
        shared = np.isin(first.points[rows[0]], second.points[rows[1]]).sum()
        if shared > SHARED:
            return None
    i, j = match_all(
        first.features.descriptors[rows[0]], second.features.descriptors[rows[1]], settings
    )
    i, j = rows[0][i], rows[1][j]
    if len(i) < MIN_PAIRS:
        return None
    points = first.points[i], second.points[j]
    sights = TwoSights(
        transform(first.pose, first_map.positions[points[0]]),
        transform(second.pose, second_map.positions[points[1]]),
        first.seen[i],
        second.seen[j],
    )
    with_scale = len(first_map.rig.cameras) == 1
    found = find_similarity(sights, LIMIT / first_map.rig.focal, random, with_scale)
    if found is None:
        return None
    motion, good = found
    known = min(len(each) for each in rows)
    if good.sum() < max(MIN_PAIRS, MIN_KNOWN * known) or good.mean() < MIN_SHARE:
        return None
    return Loop(first, second, motion, (points[0][good], points[1][good]))


def close_loops(
    world: Map,
    loops: list[Loop],
    settings: Settings,
    on_scale: Callable[[Frame, float], None],
) -> None:
    """Correct all keyframes and points for the loops, then adjust everything.

    on_scale  called with each keyframe and the factor by which the map around it has grown
    """
    frames = world.keyframes
    order = {id(frame): i for i, frame in enumerate(frames)}
    old = [from_pose(frame.pose) for frame in frames]
    edges = [Edge(order[id(p.first)], order[id(p.second)], p.motion) for p in loops]
    new = relax(old, edges, with_scale=len(world.rig.cameras) == 1)
    owner = np.full(world.count, -1)
    for number in reversed(range(len(frames))):
        points = frames[number].points
        owner[points[points >= 0]] = number
    for number, (before, after) in enumerate(zip(old, new, strict=True)):
        mine = owner == number
        world.positions[: world.count][mine] = after.inverse()(
            before(world.positions[: world.count][mine])
        )
        frames[number].pose = after.rigid()
        on_scale(frames[number], 1 / after.scale)
    merge_seen_twice(world, loops)
    adjust_all(world, settings)


def merge_seen_twice(world: Map, loops: list[Loop]) -> None:
    for loop in loops:
        first, second = loop.points
        once = np.unique(second, return_index=True)[1]
        first, second = first[once], second[once]
        there = world.alive[first] & world.alive[second] & (first != second)
        clean = there & ~np.isin(second, first)
        if clean.any():
            world.replace_points(second[clean], first[clean])


def adjust_all(world: Map, settings: Settings, steps: int = STEPS) -> float:
    """Adjust all keyframes but the first, search for more observations, adjust again."""
    if len(world.keyframes) < 2:
        return 0.0
    first, others = world.keyframes[:1], world.keyframes[1:]
    adjust_frames(world, others, first, settings, steps)
    complete(world, settings)
    return adjust_frames(world, others, first, settings, steps)


def join_maps(
    first: Map, second: Map, loop: Loop, on_scale: Callable[[Frame, float], None]
) -> None:
    """Merge the second map into the first."""
    # World of the second <- its camera <- the first's camera <- world of the first.
    there = from_pose(loop.second.pose).inverse() @ loop.motion @ from_pose(loop.first.pose)
    back = there.inverse()
    alive = np.flatnonzero(second.alive[: second.count])
    numbers = first.add_points(
        back(second.positions[alive]), second.descriptors[alive], second.keyframes[0].index
    )
    place = np.full(second.count, -1)
    place[alive] = numbers
    first.found[numbers], first.expected[numbers] = second.found[alive], second.expected[alive]
    for frame in second.keyframes:
        known = frame.points >= 0
        frame.points[known] = place[frame.points[known]]
        frame.pose = (from_pose(frame.pose) @ there).rigid()
        on_scale(frame, back.scale)
    for sights in second.waiting:
        known = sights.points >= 0
        sights.points[known] = place[sights.points[known]]
    first.waiting += second.waiting
    first.keyframes += second.keyframes
    first.keyframes.sort(key=lambda frame: frame.index)
    merged = Loop(loop.first, loop.second, loop.motion, (loop.points[0], place[loop.points[1]]))
    merge_seen_twice(first, [merged])
