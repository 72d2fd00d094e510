"""Visual odometry: features of one frame after the other in, the pose of the camera out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from kp2d_core.camera import Camera
from kp2d_core.features import Features
from kp2d_core.odometry.frames import Frame, Map, Rig, make_frame
from kp2d_core.odometry.geometry import Ints, Matrix, invert
from kp2d_core.odometry.mapping import (
    add_keyframe,
    adjust_frames,
    depth_of,
    local_points,
    neighbours,
)
from kp2d_core.odometry.pose import distances, find, refine
from kp2d_core.odometry.search import find_points, match_all, should_see
from kp2d_core.odometry.settings import Settings
from kp2d_core.odometry.start import Starter, start_from_rig


class State(str, Enum):
    """What a frame's estimate is worth."""

    STARTING = 'starting'  # no map yet: the camera has to move
    TRACKING = 'tracking'
    LOST = 'lost'  # there is a map, but this frame has no place in it
    RELOCALISED = 'relocalised'  # the first frame with a place in the map after a loss
    NEW_MAP = 'new map'  # the first frame of a map; poses of maps do not compare

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Estimate:
    """Of one frame, at the time that it came."""

    stamp: float
    state: State
    pose: Matrix | None  # (4, 4) camera to world, x right, y down, z forward; None: not known
    map_number: int  # poses of one map compare; of one camera, its scale is arbitrary
    inliers: int = 0  # features that agree with the pose
    matches: int = 0  # features that might be a point of the map
    reprojection: float = 0.0  # px, root mean square of the inliers
    keyframe: bool = False


@dataclass(frozen=True)
class Placed:
    """A frame by the keyframe it was tracked against, which the adjustment moves later."""

    stamp: float
    map_number: int
    keyframe: Frame
    pose: Matrix  # (4, 4) of the frame, from the keyframe


class Odometry:
    """Follows a calibrated camera, or a rig of them.

    >>> odometry = Odometry(camera)
    >>> estimate = odometry.update(detector.detect(image), stamp)
    >>> if estimate.pose is not None: ...

    Of one camera the scale is arbitrary: the points of the first frame are at 1 in the median.
    """

    def __init__(
        self,
        camera: Camera | Rig,
        settings: Settings | None = None,
        *,
        seed: int = 0,
    ) -> None:
        if isinstance(camera, Camera):
            camera = Rig((camera,), np.eye(4)[None])
        self.rig = camera
        self.settings = settings or Settings()
        self._random = np.random.default_rng(seed)
        self._seed = seed
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.maps: list[Map] = []
        self.placed: list[Placed] = []  # frames with a pose, in the order of time
        self._count = 0
        self._lost_for = 0
        self._starter = Starter(self.rig, self.settings, self._random)
        self._last: Frame | None = None  # the frame before, if it has a pose
        self._motion = np.eye(4)  # of the last frame from the one before
        self._most = 0  # points that a frame saw since the last keyframe

    @property
    def world(self) -> Map | None:
        """The map of now."""
        return self.maps[-1] if self.maps else None

    def update(self, features: Features | Sequence[Features], stamp: float) -> Estimate:
        """The estimate of the next frame; of a rig, features of each camera in its order."""
        parts = [features] if isinstance(features, Features) else list(features)
        if len(parts) != len(self.rig.cameras):
            raise ValueError(
                f'the rig has {len(self.rig.cameras)} cameras, but features of {len(parts)} came'
            )
        frame = make_frame(self.rig, parts, stamp, self._count)
        self._count += 1
        if self.world is None:
            return self._start(frame, State.STARTING)
        estimate = self._track(frame)
        if estimate is not None:
            return estimate
        return self._lose(frame)

    # Starting

    def _start(self, frame: Frame, otherwise: State) -> Estimate:
        """A new map if this frame completes one."""
        world: Map | None
        if len(self.rig.cameras) > 1:
            world, frames = start_from_rig(self.rig, frame, self.settings), [frame]
        else:
            found = self._starter.update(frame)
            world, frames = (None, []) if found is None else (self._starter.world, found)
        if world is None:
            return Estimate(frame.stamp, otherwise, None, max(len(self.maps) - 1, 0))
        world.number = len(self.maps)
        self.maps.append(world)
        chosen = self._first_keyframes(frames)
        world.keyframes = chosen
        if len(chosen) > 1:
            adjust_frames(world, chosen[1:], chosen[:1], self.settings, 10)
            _rescale(world)
            world.keyframes = chosen[:-1]
            add_keyframe(world, chosen[-1], self.settings)
        for view in frames:
            if view is not frame:
                self._place(view, _nearest(world.keyframes, view))
        self._starter = Starter(self.rig, self.settings, self._random)
        before = frames[-2].pose if len(frames) > 1 else frame.pose
        self._motion = frame.pose @ invert(before)
        self._lost_for = 0
        return self._accept(frame, State.NEW_MAP, True, int((frame.points >= 0).sum()))

    def _first_keyframes(self, frames: list[Frame]) -> list[Frame]:
        """First, last, and every one that moved enough between."""
        chosen = [frames[0]]
        for frame in frames[1:-1]:
            if self._shift(chosen[-1], frame) > self.settings.keyframe_shift / 2:
                chosen.append(frame)
        return [*chosen, frames[-1]] if len(frames) > 1 else chosen

    # Tracking

    def _track(self, frame: Frame) -> Estimate | None:
        world, settings = self.world, self.settings
        assert world is not None
        if self._last is None:
            return None
        near = neighbours(world, self._last, settings.local_keyframes)
        if world.keyframes[-1] not in near:
            near.append(world.keyframes[-1])
        points = local_points(world, near)
        guess = self._motion @ self._last.pose
        rows, numbers = find_points(world, frame, points, guess, settings.wide_radius, settings)
        pose = self._fitted(frame, rows, numbers, guess)
        if pose is None:
            pose = self._without_prediction(frame, [self._last, *near[:2]])
            if pose is None:
                return None
        rows, numbers = find_points(world, frame, points, pose, settings.narrow_radius, settings)
        sight = world.sight(frame, rows, numbers)
        pose = refine(sight, pose, threshold=settings.robust)
        off = distances(sight, pose)
        good = off < settings.outlier
        if not self._trusted(int(good.sum()), len(good)):
            return None
        frame.pose = pose
        frame.points[rows[good]] = numbers[good]
        expected = should_see(world, points, pose)
        world.expected[expected] += 1
        world.found[np.unique(numbers[good])] += 1
        state = State.TRACKING if self._lost_for == 0 else State.RELOCALISED
        self._motion = pose @ invert(self._last.pose) if self._lost_for == 0 else np.eye(4)
        self._lost_for = 0
        keyframe = self._is_keyframe(frame)
        if keyframe:
            add_keyframe(world, frame, settings)
        reprojection = float(np.sqrt((off[good] ** 2).mean() / 2))
        return self._accept(frame, state, keyframe, int(good.sum()), len(good), reprojection)

    def _fitted(self, frame: Frame, rows: Ints, numbers: Ints, guess: Matrix) -> Matrix | None:
        """The pose near the guess that these pairs agree on; None if they do not."""
        assert self.world is not None
        sight = self.world.sight(frame, rows, numbers)
        pose = refine(sight, guess, steps=20, threshold=2 * self.settings.robust)
        good = distances(sight, pose) < 2 * self.settings.outlier
        return pose if self._trusted(int(good.sum()), len(good)) else None

    def _without_prediction(self, frame: Frame, others: list[Frame]) -> Matrix | None:
        """The pose by descriptors alone, of the points that frames nearby saw."""
        assert self.world is not None
        for other in others:
            known = np.flatnonzero((other.points >= 0) & (other.camera == 0))
            i, j = match_all(
                other.features.descriptors[known], frame.features.descriptors, self.settings
            )
            own = frame.camera[j] == 0
            rows, numbers = j[own], other.points[known[i[own]]]
            sight = self.world.sight(frame, rows, numbers)
            pose = find(sight, 2 * self.settings.outlier, self._random)
            if pose is None:
                continue
            pose = refine(sight, pose, threshold=2 * self.settings.robust)
            good = distances(sight, pose) < 2 * self.settings.outlier
            if good.sum() >= self.settings.min_inliers:
                return pose
        return None

    def _trusted(self, inliers: int, matches: int) -> bool:
        enough = self.settings.min_inliers
        return inliers >= enough and inliers >= self.settings.min_inlier_ratio * matches

    def _shift(self, first: Frame, second: Frame) -> float:
        """Px that the points which both see have moved, in the median."""
        a, b = (np.where(view.camera == 0, view.points, -1) for view in (first, second))
        _, i, j = np.intersect1d(a, b, return_indices=True)
        i, j = i[a[i] >= 0], j[b[j] >= 0]
        if not len(i):
            return np.inf
        off = np.linalg.norm(first.seen[i] - second.seen[j], axis=1)
        return float(np.median(off)) * self.rig.focal

    def _is_keyframe(self, frame: Frame) -> bool:
        world, settings = self.world, self.settings
        assert world is not None
        last = world.keyframes[-1]
        shift = self._shift(last, frame)
        if shift > settings.keyframe_shift:
            return True
        way = float(np.linalg.norm(invert(frame.pose)[:3, 3] - invert(last.pose)[:3, 3]))
        if way > settings.keyframe_way * depth_of(world, frame, 20):
            return True
        tracked = int((frame.points >= 0).sum())
        if self._most < tracked:
            self._most = tracked
        if tracked < settings.keyframe_kept * self._most and shift > 3:
            return True
        return frame.index - last.index >= settings.keyframe_interval and shift > 3

    def _accept(
        self,
        frame: Frame,
        state: State,
        keyframe: bool,
        inliers: int,
        matches: int = 0,
        reprojection: float = 0.0,
    ) -> Estimate:
        world = self.world
        assert world is not None
        if keyframe:
            self._most = 0
        self._place(frame, world.keyframes[-1])
        self._last = frame
        return Estimate(
            frame.stamp,
            state,
            invert(frame.pose),
            world.number,
            inliers,
            max(matches, inliers),
            reprojection,
            keyframe,
        )

    def _place(self, frame: Frame, keyframe: Frame) -> None:
        assert self.world is not None
        pose = frame.pose @ invert(keyframe.pose)
        self.placed.append(Placed(frame.stamp, self.world.number, keyframe, pose))

    # Losing

    def _lose(self, frame: Frame) -> Estimate:
        assert self.world is not None
        self._lost_for += 1
        self._motion = np.eye(4)
        if self._lost_for > self.settings.patience:
            return self._start(frame, State.LOST)
        return Estimate(frame.stamp, State.LOST, None, self.world.number)

    # What there is so far

    def trajectory(self, map_number: int | None = None) -> tuple[Matrix, Matrix]:
        """Times (N,) and poses (N, 4, 4) camera to world, of a map (default: the last).

        Of all its frames, those before the start too, as the keyframes lie now.
        """
        number = len(self.maps) - 1 if map_number is None else map_number
        placed = [p for p in self.placed if p.map_number == number]
        placed.sort(key=lambda p: p.stamp)
        poses = np.array([invert(p.pose @ p.keyframe.pose) for p in placed]).reshape(-1, 4, 4)
        return np.array([p.stamp for p in placed]), poses

    def points(self) -> Matrix:
        """(N, 3) points of the map of now that three keyframes or more see."""
        world = self.world
        if world is None:
            return np.empty((0, 3))
        often = world.alive[: world.count] & (world.times_seen() >= 3)
        return np.asarray(world.positions[: world.count][often])


def _nearest(keyframes: list[Frame], frame: Frame) -> Frame:
    return min(keyframes, key=lambda keyframe: abs(keyframe.index - frame.index))


def _rescale(world: Map) -> None:
    """Let the points of the first keyframe be at 1 in the median."""
    first = world.keyframes[0]
    points = first.points[first.points >= 0]
    depth = float(np.median((world.positions[points] @ first.pose[2, :3]) + first.pose[2, 3]))
    if depth > 0:
        world.positions[: world.count] /= depth
        for frame in world.keyframes:
            frame.pose[:3, 3] /= depth
