"""Drop redundant keyframes when there are too many.

The oldest keyframes are kept: a camera that returns needs them. A keyframe is dropped if others
observe the same points. The remaining ones then cover all places evenly, old and new.
"""

from __future__ import annotations

import numpy as np

from kp2d_core.odometry.frames import Frame, Map
from kp2d_core.odometry.geometry import Matrix, invert

RECENT = 20  # keyframes of the map of now that stay: the adjustment is at work there
SPARE = 0.05  # share of the most that goes at once, so that it is not done for each keyframe
KEPT = 200  # features of an older keyframe, once there are too many: enough to find its place by
LEAST = 3  # keyframes of another map; with fewer, it is forgotten

Heirs = dict[int, tuple[Frame, Frame]]  # by the number of one that went: it, and its heir


def thin_out(maps: list[Map], current: Map, most: int) -> Heirs:
    """Drop keyframes until all maps together have fewer than the most.

    Frames placed relative to a dropped keyframe move to its heir, the previous keyframe.
    """
    heirs: Heirs = {}
    total = sum(len(world.keyframes) for world in maps)
    if total <= most:
        return heirs
    aim = most - int(SPARE * most)
    while total > aim:
        ranked = _ranked(maps, current)
        if not ranked:
            others = [world for world in maps if world is not current and world.keyframes]
            if not others:
                break
            smallest = min(others, key=lambda world: len(world.keyframes))
            total -= len(smallest.keyframes)
            _forget_map(smallest, heirs)
            continue
        # Not two neighbours at once: the second is needed more when the first is gone.
        taken: set[tuple[int, int]] = set()
        for world, place in ranked[: max(1, len(ranked) // 3)]:
            if {(id(world), place - 1), (id(world), place + 1)} & taken:
                continue
            taken.add((id(world), place))
            if len(taken) == total - aim:
                break
        for world in maps:
            _drop(world, sorted(place for number, place in taken if number == id(world)), heirs)
        total -= len(taken)
    for world in maps:
        _slim(world, world.keyframes[: -RECENT if world is current else None])
    return heirs


def _ranked(maps: list[Map], current: Map) -> list[tuple[Map, int]]:
    """List the keyframes (map, position) that may be dropped, least needed first."""
    found: list[tuple[float, float, int, Map]] = []
    for world in maps:
        last = len(world.keyframes) - (RECENT if world is current else 1)
        if last < 2 or (world is not current and len(world.keyframes) <= LEAST):
            continue
        often = world.times_seen() > 2 * len(world.rig.cameras)  # by two others at least
        centres = invert(np.array([frame.pose for frame in world.keyframes]))[:, :3, 3]
        for place in range(1, last):
            points = world.keyframes[place].points
            points = points[points >= 0]
            covered = float(often[points].mean()) if len(points) else 1.0
            gap = float(np.linalg.norm(centres[place + 1] - centres[place - 1]))
            found.append((-covered, gap, place, world))
    found.sort(key=lambda entry: entry[:3])
    return [(world, place) for _, _, place, world in found]


def _drop(world: Map, places: list[int], heirs: Heirs) -> None:
    for place in reversed(places):
        frame = world.keyframes.pop(place)
        points = frame.points[frame.points >= 0]
        np.add.at(world.seen_before, points, 1)
        heirs[frame.index] = frame, world.keyframes[place - 1]
    if places:
        _drop_unseen(world)


def _slim(world: Map, frames: list[Frame]) -> None:
    """Leave the frames their points that were seen most often.

    Otherwise each keyframe would in the end have as many points of its own as it has features.
    """
    often = world.times_seen() + world.seen_before[: world.count]
    most = KEPT * len(world.rig.cameras)
    for frame in frames:
        if len(frame) > most:
            seeing = np.flatnonzero(frame.points >= 0)
            best = np.argsort(-often[frame.points[seeing]], kind='stable')[:most]
            gone = np.delete(seeing, best)
            np.add.at(world.seen_before, frame.points[gone], 1)
            frame.keep(np.sort(seeing[best]))
    _drop_unseen(world)


def _drop_unseen(world: Map) -> None:
    unseen = np.flatnonzero(world.alive[: world.count] & (world.times_seen() < 1))
    if len(unseen):
        world.drop_points(unseen)


def _forget_map(world: Map, heirs: Heirs) -> None:
    """Remove a map except for the pose of its first keyframe, which placed frames refer to."""
    first = world.keyframes[0]
    for frame in world.keyframes[1:]:
        heirs[frame.index] = frame, first
    heirs[first.index] = first, first
    first.keep(np.empty(0, np.int64))
    world.keyframes = []
    world.waiting.clear()
    world.alive[:] = False
    world.compact()


def inherited(pose: Matrix, frame: Frame, heirs: Heirs) -> tuple[Matrix, Frame]:
    """Convert a pose relative to a dropped keyframe to one relative to its heir."""
    while frame.index in heirs and heirs[frame.index][1] is not frame:
        heir = heirs[frame.index][1]
        pose = pose @ frame.pose @ invert(heir.pose)
        frame = heir
    return pose, frame
