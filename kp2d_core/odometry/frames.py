"""The data of the odometry: frames, the points that they observe, maps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kp2d_core.camera import Camera
from kp2d_core.features import Features, Float, join_features
from kp2d_core.odometry.adjustment import Problem
from kp2d_core.odometry.geometry import Bools, Ints, Matrix, transform
from kp2d_core.odometry.pose import Sight

FEWEST = 4096  # initial capacity in points
LEAST_SIGMA = 0.7  # px: the network does not know errors of calibration, shutter and map points
COLUMNS = ('positions', 'descriptors', 'alive', 'born', 'expected', 'found', 'seen_before')


@dataclass(frozen=True)
class Rig:
    """Cameras with fixed relative poses. Poses of the rig are those of the first camera."""

    cameras: tuple[Camera, ...]
    mounts: Matrix  # (C, 4, 4): each camera from the first

    @property
    def focal(self) -> float:
        """Pixels per unit of x / z of the first camera, to convert thresholds in pixels."""
        return float(self.cameras[0].matrix[0, 0])

    @cached_property
    def fields(self) -> list[tuple[Matrix, Matrix]]:
        """The smallest and largest x / z, y / z in the image of each camera."""
        return [field_of_view(camera) for camera in self.cameras]

    def rays(self, camera: int, points: Float) -> Matrix:
        """Pixels (N, 2) -> x / z, y / z (N, 2); of several cameras in their rectified frames."""
        model = self.cameras[camera]
        return np.asarray(
            model.rays(points) if len(self.cameras) == 1 else model.bearings(points), np.float64
        )


@dataclass
class Frame:
    """The features of all cameras of the rig at one time, concatenated."""

    index: int
    stamp: float
    features: Features
    seen: Matrix  # (N, 2) x / z, y / z without distortion, as if all rows were exposed at once
    raw: Matrix  # (N, 2) the same as each row was exposed
    late: Matrix  # (N,) when, as a share of the readout: -0.5 in the first row, 0.5 in the last
    weight: Matrix  # (N,) 1 / standard deviation of `seen`
    camera: Ints  # (N,)
    pose: Matrix  # (4, 4) from the world
    points: Ints  # (N,) point of the map, -1: none
    twist: Matrix  # (6,) how points pass it in a second: translation, rotation

    def __len__(self) -> int:
        return len(self.seen)

    def keep(self, rows: Ints) -> None:
        """Keep these features alone."""
        self.features = self.features[rows]
        for name in ('seen', 'raw', 'late', 'weight', 'camera', 'points'):
            setattr(self, name, getattr(self, name)[rows])


@dataclass(slots=True)
class Placed:
    """A frame relative to its keyframe, which later adjustments move."""

    stamp: float
    map_number: int
    keyframe: Frame
    pose: Matrix  # (4, 4) of the frame, from the keyframe


@dataclass(slots=True)
class Sights:
    """The observations of a frame between keyframes, kept until its pose is final."""

    placed: Placed
    seen: Matrix
    raw: Matrix
    late: Matrix
    weight: Matrix
    camera: Ints
    points: Ints  # of the map, -1: gone
    twist: Matrix  # the frame's own array: it gets more accurate with the frame after it

    @staticmethod
    def of(frame: Frame, placed: Placed) -> Sights:
        rows = np.flatnonzero(frame.points >= 0)
        return Sights(
            placed, frame.seen[rows], frame.raw[rows], frame.late[rows], frame.weight[rows],
            frame.camera[rows], frame.points[rows], frame.twist,
        )  # fmt: skip


def make_frame(rig: Rig, features: Sequence[Features], stamp: float, index: int) -> Frame:
    """Make a frame without a pose."""
    kept, seen, late, camera = [], [], [], []
    for number, found in enumerate(features):
        bearings = rig.rays(number, found.keypoints)
        placed = np.flatnonzero(np.isfinite(bearings).all(axis=1))
        kept.append(found[placed])
        seen.append(bearings[placed])
        height = rig.cameras[number].height
        late.append(found.keypoints[placed, 1].astype(np.float64) / height - 0.5)
        camera.append(np.full(len(placed), number))
    together = join_features(kept)
    weight = rig.focal / np.maximum(together.sigma.astype(np.float64), LEAST_SIGMA)
    raw = np.concatenate(seen)
    return Frame(
        index,
        stamp,
        together,
        raw.copy(),
        raw,
        np.concatenate(late),
        weight,
        np.concatenate(camera).astype(np.int64),
        np.eye(4),
        np.full(len(together), -1, np.int64),
        np.zeros(6),
    )


@dataclass
class Map:
    """Keyframes and points. Removed points are not `alive`; `compact` frees their memory."""

    rig: Rig
    number: int = 0
    keyframes: list[Frame] = field(default_factory=list)
    waiting: deque[Sights] = field(default_factory=deque)  # frames between the last keyframes
    count: int = 0  # points so far
    positions: Matrix = field(default_factory=lambda: np.empty((0, 3)))
    descriptors: Float = field(default_factory=lambda: np.empty((0, 0), np.float32))
    alive: Bools = field(default_factory=lambda: np.empty(0, bool))
    born: Ints = field(default_factory=lambda: np.empty(0, np.int64))  # keyframe that made it
    expected: Ints = field(default_factory=lambda: np.empty(0, np.int64))  # frames that should see
    found: Ints = field(default_factory=lambda: np.empty(0, np.int64))  # frames that did
    # Number of keyframes that saw it and were removed by thinning.
    seen_before: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    def add_points(self, positions: Matrix, descriptors: Float, keyframe: int) -> Ints:
        """Add points; return their numbers."""
        needed = self.count + len(positions)
        if needed > len(self.alive):
            self._grow(max(needed, 2 * len(self.alive), FEWEST), descriptors.shape[1])
        numbers = np.arange(self.count, needed)
        self.positions[numbers], self.descriptors[numbers] = positions, descriptors
        self.alive[numbers], self.born[numbers] = True, keyframe
        self.expected[numbers] = self.found[numbers] = 1
        self.seen_before[numbers] = 0
        self.count = needed
        return numbers

    def _grow(self, size: int, dimensions: int) -> None:
        if not self.count:
            self.positions = np.empty((0, 3))
            self.descriptors = np.empty((0, dimensions), np.float32)
        self._resize(np.arange(self.count), size)

    def compact(self) -> None:
        """Free the memory of dead points. The others get new numbers."""
        kept = np.flatnonzero(self.alive[: self.count])
        place = np.full(self.count, -1)
        place[kept] = np.arange(len(kept))
        views: list[Frame | Sights] = [*self.keyframes, *self.waiting]
        for view in views:
            known = view.points >= 0
            view.points[known] = place[view.points[known]]
        self._resize(kept, max(2 * len(kept), FEWEST))
        self.count = len(kept)

    def _resize(self, kept: Ints, size: int) -> None:
        def resized(old: NDArray[Any]) -> NDArray[Any]:
            new = np.zeros((size, *old.shape[1:]), old.dtype)
            new[: len(kept)] = old[kept]
            return new

        for name in COLUMNS:
            setattr(self, name, resized(getattr(self, name)))

    def drop_points(self, numbers: Ints) -> None:
        """Remove points and their observations."""
        self.alive[numbers] = False
        points, owner = self.observations()
        for place in np.unique(owner[~self.alive[points]]):
            frame = self.keyframes[place]
            frame.points[(frame.points >= 0) & ~self.alive[frame.points]] = -1

    def replace_points(self, old: Ints, new: Ints) -> None:
        """Replace points by others in all frames that do not observe the others yet."""
        target = np.arange(self.count)
        target[old] = new
        points, owner = self.observations()
        for frame in (
            self.keyframes[place] for place in np.unique(owner[target[points] != points])
        ):
            rows = np.flatnonzero(frame.points >= 0)
            changed = rows[target[frame.points[rows]] != frame.points[rows]]
            wanted = target[frame.points[changed]]
            for row, point in zip(changed, wanted, strict=True):
                twice = (frame.points == point) & (frame.camera == frame.camera[row])
                frame.points[row] = -1 if twice.any() else point
        self.found[new] += self.found[old]
        self.expected[new] += self.expected[old]
        self.seen_before[new] += self.seen_before[old]
        self.alive[old] = False

    def times_seen(self) -> Ints:
        """Count the keyframes (and cameras) that observe each point: (count,)."""
        return np.bincount(self.observations()[0], minlength=self.count)

    def observations(self) -> tuple[Ints, Ints]:
        """(N,) each: the points that keyframes see, and the places of those in `keyframes`."""
        if not self.keyframes:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        points = np.concatenate([frame.points for frame in self.keyframes])
        owner = np.repeat(np.arange(len(self.keyframes)), [len(f) for f in self.keyframes])
        known = points >= 0
        return points[known], owner[known]

    def sight(self, frame: Frame | Sights, rows: Ints, points: Ints) -> Sight:
        """Pair the features `rows` of a frame with `points` of the map."""
        return sight_of(self.rig, frame, rows, self.positions[points])

    def problem(self, frames: Sequence[Frame], fixed: Sequence[bool]) -> tuple[Problem, Ints]:
        """Set up the adjustment of these frames and of all points with two observations in them.

        Also return the numbers of its points in the map.
        """
        rows = [np.flatnonzero(frame.points >= 0) for frame in frames]
        seen_points = np.concatenate([f.points[r] for f, r in zip(frames, rows, strict=True)])
        times = np.bincount(seen_points, minlength=self.count)
        # Points that only fixed frames observe would not move.
        moving = np.zeros(self.count, bool)
        for frame, row, stays in zip(frames, rows, fixed, strict=True):
            if not stays:
                moving[frame.points[row]] = True
        numbers = np.flatnonzero((times >= 2) & moving & self.alive[: self.count])
        place = np.full(self.count, -1)
        place[numbers] = np.arange(len(numbers))
        kept = [r[place[f.points[r]] >= 0] for f, r in zip(frames, rows, strict=True)]

        def gather(values: list[NDArray[Any]]) -> NDArray[Any]:
            return np.concatenate([v[r] for v, r in zip(values, kept, strict=True)])

        several = len(self.rig.cameras) > 1
        problem = Problem(
            np.array([frame.pose for frame in frames]),
            self.positions[numbers],
            np.repeat(np.arange(len(frames)), [len(r) for r in kept]),
            place[gather([frame.points for frame in frames])],
            gather([frame.seen for frame in frames]),
            gather([frame.weight for frame in frames]),
            np.array(fixed, bool),
            gather([frame.camera for frame in frames]) if several else np.zeros(0, np.int64),
            self.rig.mounts,
        )
        return problem, numbers


def sight_of(rig: Rig, frame: Frame | Sights, rows: Ints, positions: Matrix) -> Sight:
    mount = np.empty((0, 4, 4))
    if len(rig.cameras) > 1:
        mount = rig.mounts[frame.camera[rows]]
    return Sight(positions, frame.seen[rows], frame.weight[rows], mount)


def predicted(rig: Rig, camera: int, pose: Matrix, positions: Matrix) -> tuple[Matrix, Bools]:
    """Predict where a camera of the rig sees points (N, 2), and which of them it sees.

    The limits are slightly wider than the image, whose border is curved without distortion.
    """
    eye = transform(rig.mounts[camera] @ pose, positions)
    depth = eye[:, 2]
    with np.errstate(divide='ignore', invalid='ignore'):
        flat = eye[:, :2] / depth[:, None]
    low, high = rig.fields[camera]
    with np.errstate(invalid='ignore'):
        visible = (depth > 0) & (flat > low).all(axis=1) & (flat < high).all(axis=1)
    return flat, visible


def field_of_view(camera: Camera) -> tuple[Matrix, Matrix]:
    """The smallest and largest x / z, y / z in the image of a camera."""
    width, height = camera.size
    xs, ys = np.linspace(0, width - 1, 9), np.linspace(0, height - 1, 9)
    rim = np.array(
        [(x, y) for x in xs for y in (0, height - 1)]
        + [(x, y) for y in ys for x in (0, width - 1)],
        np.float32,
    )
    rays = np.asarray(camera.bearings(rim), np.float64)
    rays = rays[np.isfinite(rays).all(axis=1)]
    if not len(rays):
        return np.array([-5.0, -5.0]), np.array([5.0, 5.0])
    return rays.min(axis=0), rays.max(axis=0)
