"""Visual odometry: estimate the pose of the camera from features, frame by frame."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from kp2d_core.camera import Camera
from kp2d_core.checks import number
from kp2d_core.features import Features, Float
from kp2d_core.matching import as_float32
from kp2d_core.odometry.frames import Frame, Map, Placed, Rig, Sights, make_frame
from kp2d_core.odometry.geometry import Matrix, invert
from kp2d_core.odometry.loops import Loop, adjust_all, close_loops, find_loops, join_maps
from kp2d_core.odometry.mapping import add_keyframe, adjust_frames, depth_of
from kp2d_core.odometry.retrieval import Retrieval
from kp2d_core.odometry.settings import Settings
from kp2d_core.odometry.shutter import Shutter, straighten
from kp2d_core.odometry.start import Starter, start_from_rig
from kp2d_core.odometry.thinning import inherited, thin_out
from kp2d_core.odometry.tracking import Fit, relocalise, resettle, settle_placed, track
from kp2d_core.odometry.words import check_words
from kp2d_core.threads import one_blas_thread

MOST_PLACED = 100_000  # kept poses, about an hour; beyond it, every second old one is removed

# Frames between keyframes wait until the points around them have been adjusted; then their poses
# are final. About 20 kB each.
SETTLED_AFTER = 300


class State(str, Enum):
    """The state of the odometry at a frame."""

    STARTING = 'starting'  # no map yet: the camera has to move
    TRACKING = 'tracking'
    LOST = 'lost'  # there is a map, but the pose in it is unknown
    RELOCALISED = 'relocalised'  # the first frame with a pose after a loss
    NEW_MAP = 'new map'  # the first frame of a map; poses of two maps cannot be compared

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Estimate:
    """The estimate of a frame at the time that it arrived."""

    stamp: float
    state: State
    pose: Matrix | None  # (4, 4) camera to world, x right, y down, z forward; None: not known
    map_number: int  # poses of one map can be compared; with one camera the scale is arbitrary
    inliers: int = 0  # features that agree with the pose
    matches: int = 0  # features matched with map points
    reprojection: float = 0.0  # px, root mean square of the inliers
    keyframe: bool = False


class Odometry:
    """Tracks a calibrated camera or a rig of several.

    >>> odometry = Odometry(camera)
    >>> estimate = odometry.update(detector.detect(image, nms_radius=3), stamp)
    >>> if estimate.pose is not None: ...

    The scale of one camera is arbitrary: the median depth of the first keyframe is 1.
    """

    def __init__(
        self,
        camera: Camera | Rig,
        settings: Settings | None = None,
        *,
        words: Float | None = None,
        seed: int = 0,
    ) -> None:
        """words  (K, D) visual words of the descriptors, see words.py; None: learn them"""
        if words is not None:
            check_words(words)
        if isinstance(camera, Camera):
            camera = Rig((camera,), np.eye(4)[None])
        self.rig = camera
        self.settings = settings or Settings()
        self.words = words
        self._seed = seed
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._random = np.random.default_rng(self._seed)
        self.maps: list[Map] = []
        self.world: Map | None = None  # the map of now
        self.placed: list[Placed] = []  # frames with a pose, in the order of time
        self._count = 0
        self._begun = 0  # maps so far
        self._length: int | None = None  # of the descriptors
        self._lost_for = 0
        self._starter = self._new_starter()
        self._retrieval = Retrieval(self.words)
        self._keyframes: dict[int, tuple[Map, Frame]] = {}  # by the frame's number
        self._last: Frame | None = None  # the last frame with a pose
        self._motion = np.eye(4)  # of the last frame from the one before
        self._most = 0  # points that a frame saw since the last keyframe
        self.shutter = Shutter(self.settings.readout)
        self._beside: dict[int, list[Placed]] = {}  # by the keyframe's number, while it finishes

    def use_words(self, words: Float) -> None:
        """Use visual words that became known late, unless others have been learned already."""
        check_words(words)
        if self.words is None and self._retrieval.words is None:
            self._retrieval.use(words)
        self.words = words

    def _new_starter(self) -> Starter:
        return Starter(self.rig, self.settings, self._random)

    def update(self, features: Features | Sequence[Features], stamp: float) -> Estimate:
        """Process the next frame; for a rig, pass the features of each camera in order."""
        parts = [features] if isinstance(features, Features) else list(features)
        if len(parts) != len(self.rig.cameras):
            raise ValueError(
                f'the rig has {len(self.rig.cameras)} cameras, but features of {len(parts)} came'
            )
        checked = [self._checked(part) for part in parts]
        with one_blas_thread():
            return self._update(make_frame(self.rig, checked, number(stamp, 'stamp'), self._count))

    def _update(self, frame: Frame) -> Estimate:
        self._count += 1
        if self.world is None:
            return self._start(frame, State.STARTING)
        if self._lost_for == 0 and self._last is not None:
            guess = self._motion @ self._last.pose
            self.shutter.expect(self.world, frame, self._last)
            fit = track(self.world, frame, self._last, guess, self.settings, self._random)
            if fit is not None:
                frame.pose = fit.pose
                frame.points[fit.rows] = fit.numbers
                if self.shutter.follow(self.world, self._last, frame, fit.predicted):
                    fit = resettle(self.world, frame, fit, self.settings)
                self._motion = fit.pose @ invert(self._last.pose)
                return self._go_on(frame, fit, State.TRACKING)
        return self._search(frame)

    def _checked(self, features: Features) -> Features:
        """Return features with float32 descriptors; raise ValueError if their length changed."""
        found = as_float32(features)
        if self._length not in (None, found.shape[1]):
            raise ValueError(
                f'descriptors have {found.shape[1]} values, those of the map have {self._length}'
            )
        if self.words is not None and self.words.shape[1] != found.shape[1]:
            raise ValueError(
                f'descriptors have {found.shape[1]} values, the words {self.words.shape[1]}'
            )
        if not np.isfinite(found).all():
            raise ValueError('descriptors hold NaN or infinity')
        self._length = found.shape[1]
        return replace(features, descriptors=found)

    # Starting

    def _start(self, frame: Frame, otherwise: State) -> Estimate:
        """Start a new map if this frame completes one."""
        world: Map | None
        if len(self.rig.cameras) > 1:
            world, frames = start_from_rig(self.rig, frame, self.settings), [frame]
        else:
            found = self._starter.update(frame)
            world, frames = (None, []) if found is None else (self._starter.world, found)
        if world is None:
            number = 0 if self.world is None else self.world.number
            return Estimate(frame.stamp, otherwise, None, number)
        world.number, self._begun = self._begun, self._begun + 1
        self.maps.append(world)
        self.world = world
        chosen = self._first_keyframes(frames)
        world.keyframes = chosen
        if len(chosen) > 1:
            adjust_frames(world, chosen[1:], chosen[:1], self.settings, 10)
            _rescale(world)
            world.keyframes = chosen[:-1]
            add_keyframe(world, chosen[-1], self.settings)
        for view in chosen:
            self._remember(world, view)
        for view in frames:
            if view is not frame:
                self._place(view, _nearest(world.keyframes, view))
        self._starter = self._new_starter()
        before = frames[-2].pose if len(frames) > 1 else frame.pose
        self._motion = frame.pose @ invert(before)
        self._lost_for = self._most = 0
        self.shutter.forget_motion()
        self._place(frame, frame)
        self._last = frame
        inliers = int((frame.points >= 0).sum())
        return Estimate(
            frame.stamp, State.NEW_MAP, invert(frame.pose), world.number, inliers, inliers, 0, True
        )

    def _first_keyframes(self, frames: list[Frame]) -> list[Frame]:
        """Choose the first, the last, and every frame in between that moved enough."""
        chosen = [frames[0]]
        for frame in frames[1:-1]:
            if self._shift(chosen[-1], frame) > self.settings.keyframe_shift / 2:
                chosen.append(frame)
        return [*chosen, frames[-1]] if len(frames) > 1 else chosen

    # Going on

    def _go_on(self, frame: Frame, fit: Fit, state: State) -> Estimate:
        """Continue with a frame whose pose is known."""
        world = self.world
        assert world is not None
        frame.pose = fit.pose
        frame.points[:] = -1
        frame.points[fit.rows] = fit.numbers
        world.expected[fit.expected] += 1
        world.found[np.unique(fit.numbers)] += 1
        self._lost_for = 0
        keyframe = self._is_keyframe(world, frame)
        if keyframe:
            add_keyframe(world, frame, self.settings)
            self.shutter.update(world)
            self._remember(world, frame)
            self._most = 0
        self._place(frame, world.keyframes[-1])
        self._last = frame
        return Estimate(
            frame.stamp, state, invert(frame.pose), world.number, len(fit.rows), fit.matches,
            fit.reprojection, keyframe,
        )  # fmt: skip

    def _is_keyframe(self, world: Map, frame: Frame) -> bool:
        settings, last = self.settings, world.keyframes[-1]
        shift = self._shift(last, frame)
        if shift > settings.keyframe_shift:
            return True
        way = float(np.linalg.norm(invert(frame.pose)[:3, 3] - invert(last.pose)[:3, 3]))
        if way > settings.keyframe_way * depth_of(world, frame, 20):
            return True
        tracked = int((frame.points >= 0).sum())
        self._most = max(self._most, tracked)
        if tracked < settings.keyframe_kept * self._most and shift > 3:
            return True
        return frame.index - last.index >= settings.keyframe_interval and shift > 3

    def _shift(self, first: Frame, second: Frame) -> float:
        """Median motion in px of the points that both frames observe."""
        a, b = (np.where(view.camera == 0, view.points, -1) for view in (first, second))
        common, i, j = np.intersect1d(a, b, return_indices=True)
        i, j = i[common >= 0], j[common >= 0]
        if not len(i):
            return np.inf
        off = np.linalg.norm(first.seen[i] - second.seen[j], axis=1)
        return float(np.median(off)) * self.rig.focal

    def _remember(self, world: Map, keyframe: Frame) -> None:
        own = keyframe.features.descriptors[keyframe.camera == 0]
        self._retrieval.add(keyframe.index, own)
        self._keyframes[keyframe.index] = world, keyframe
        self._thin_out()

    def _thin_out(self) -> None:
        assert self.world is not None
        heirs = thin_out(self.maps, self.world, self.settings.max_keyframes)
        if not heirs:
            return
        for index in heirs:
            self._retrieval.remove(index)
            self._keyframes.pop(index, None)
        for placed in self.placed:
            placed.pose, placed.keyframe = inherited(placed.pose, placed.keyframe, heirs)

    def _place(self, frame: Frame, keyframe: Frame) -> None:
        assert self.world is not None
        pose = frame.pose @ invert(keyframe.pose)
        placed = Placed(frame.stamp, self.world.number, keyframe, pose)
        self.placed.append(placed)
        if frame is not keyframe:
            waiting = self.world.waiting
            waiting.append(Sights.of(frame, placed))
            if len(waiting) > SETTLED_AFTER:
                self._settle(self.world, waiting.popleft())
        if len(self.placed) > MOST_PLACED:
            self.placed[: MOST_PLACED // 2] = self.placed[: MOST_PLACED // 2 : 2]

    def _settle(self, world: Map, sights: Sights) -> None:
        if self.shutter.readout:
            pose = sights.placed.pose @ sights.placed.keyframe.pose
            straighten(world, sights, pose, self.shutter.readout)
        settle_placed(world, sights, self.settings)

    # After a loss

    def _search(self, frame: Frame) -> Estimate:
        """Search for the frame in all maps; start a new map if that takes too long."""
        assert self.world is not None
        self._lost_for += 1
        own = frame.features.descriptors[frame.camera == 0]
        found = self._retrieval.query(own, self.settings.relocalise_candidates)
        for world, keyframe in [
            (self.world, self.world.keyframes[-1]),
            *(self._keyframes[index] for index, _ in found),
        ]:
            fit = relocalise(world, frame, [keyframe], self.settings, self._random)
            if fit is not None:
                self.world, self._motion = world, np.eye(4)
                self.shutter.forget_motion()
                self._starter = self._new_starter()
                return self._go_on(frame, fit, State.RELOCALISED)
        if self._lost_for > self.settings.patience:
            return self._start(frame, State.LOST)
        return Estimate(frame.stamp, State.LOST, None, self.world.number)

    # What there is

    def trajectory(self, map_number: int | None = None) -> tuple[Matrix, Matrix]:
        """Return times (N,) and poses (N, 4, 4), camera to world, of a map (default: current).

        All its frames are included, also those before the start, by the current keyframes.
        """
        if map_number is None:
            map_number = self.world.number if self.world is not None else 0
        placed = [p for p in self.placed if p.map_number == map_number]
        placed.sort(key=lambda p: p.stamp)
        poses = np.array([invert(p.pose @ p.keyframe.pose) for p in placed]).reshape(-1, 4, 4)
        return np.array([p.stamp for p in placed]), poses

    def points(self, map_number: int | None = None) -> Matrix:
        """Return the points (N, 3) of a map (default: current) with 3 or more observations."""
        world = self.world
        if map_number is not None:
            world = next((w for w in self.maps if w.number == map_number), None)
        if world is None:
            return np.empty((0, 3))
        often = world.alive[: world.count] & (world.times_seen() >= 3)
        return np.asarray(world.positions[: world.count][often])

    def finish(self, loops: bool = True) -> int:
        """Join maps, close loops and adjust everything; `trajectory` is then final.

        Return the number of loops.
        The odometry can continue afterwards, but has to relocalise first.
        """
        with one_blas_thread():
            return self._finish(loops)

    def _finish(self, loops: bool) -> int:
        closed = 0
        self._beside = defaultdict(list)
        for placed in self.placed:
            self._beside[placed.keyframe.index].append(placed)
        if loops:
            self._join_maps()
        for world in self.maps:
            if self.shutter.readout:
                self.shutter.correct(world, *self.trajectory(world.number))
            found = self._loops(world, world) if loops else []
            closed += len(found)
            if found:
                close_loops(world, found, self.settings, self._rescaled)
            else:
                adjust_all(world, self.settings)
            while world.waiting:
                self._settle(world, world.waiting.popleft())
        self._beside.clear()
        if self.world is not None:
            self._last, self._lost_for = None, 1
        return closed

    def _loops(self, first: Map, second: Map) -> list[Loop]:
        return find_loops(first, second, self.settings, self._random, self.words)

    def _join_maps(self) -> None:
        """Merge later maps into earlier ones where they overlap."""
        for second in list(reversed(self.maps[1:])):
            for first in self.maps[: self.maps.index(second)]:
                found = self._loops(first, second)
                if not found:
                    continue
                best = max(found, key=lambda loop: len(loop.points[0]))
                join_maps(first, second, best, self._rescaled)
                for placed in self.placed:
                    if placed.map_number == second.number:
                        placed.map_number = first.number
                for index, (world, frame) in list(self._keyframes.items()):
                    if world is second:
                        self._keyframes[index] = first, frame
                self.maps.remove(second)
                if self.world is second:
                    self.world = first
                break

    def _rescaled(self, keyframe: Frame, scale: float) -> None:
        """Scale the frames placed relative to a keyframe by this factor."""
        for placed in self._beside.get(keyframe.index, ()):
            placed.pose = placed.pose.copy()
            placed.pose[:3, 3] *= scale


def _nearest(keyframes: list[Frame], frame: Frame) -> Frame:
    return min(keyframes, key=lambda keyframe: abs(keyframe.index - frame.index))


def _rescale(world: Map) -> None:
    """Scale the map so that the median depth of the first keyframe is 1."""
    depth = depth_of(world, world.keyframes[0], 50)
    if depth > 0:
        world.positions[: world.count] /= depth
        for frame in world.keyframes:
            frame.pose[:3, 3] /= depth
