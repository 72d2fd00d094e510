"""Rolling shutter: estimate the readout time of the sensor and correct its effect.

Most cheap cameras expose one row after another. While the camera moves, each row sees the scene
from a different pose. At 30 degrees per second and a readout time of 30 ms, the first and the last
row differ by 8 px. At 0.5 m per second, points at a distance of 1 m are shifted by as much.
Without a correction, the pose estimate turns this into a motion that did not happen.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from kp2d_core.odometry.adjustment import unexplained
from kp2d_core.odometry.frames import Frame, Map, Rig, Sights
from kp2d_core.odometry.geometry import Matrix, invert, log_rotation, project

LONGEST_STEP = 0.25  # s; no velocity is computed if two frames are further apart
MEMORY = 0.5  # weight of earlier estimates after each update
VIEWS, FEWEST_VIEWS = 10, 4  # keyframes to estimate from: at most, at least
SOON, SELDOM = 30, 5  # estimate at each of the first 30 keyframes, then at every fifth
SMALLEST = 0.004  # s; a shorter readout is not worth correcting
CERTAIN = 6.0  # a significant readout time exceeds this many standard deviations
# Outlier rejection prefers observations that fit the current readout time. This biases the
# estimate towards it, so go further than the estimate says.
GAIN = 1.5
CHANGE = 0.001  # s; correct the keyframes again if the estimate changes by more
LEAP = 4.0  # a speed this many times that before and after is a jump, not a motion
ROBUST = 2.0  # residuals beyond this many standard deviations have less weight


def twist_between(first: Matrix, second: Matrix, seconds: float) -> Matrix | None:
    """Return the velocity of the scene relative to the camera between two poses; None: unknown.

    The poses are world to camera. The result (6,) is opposite to the motion of the camera:
    translation in units of the map per second, rotation in rad per second.
    """
    if not 0 < seconds <= LONGEST_STEP:
        return None
    back = first @ invert(second)
    return np.array([*back[:3, 3], *log_rotation(back[:3, :3])]) / seconds


def straighten(world: Map, view: Frame | Sights, pose: Matrix, readout: float) -> None:
    """Set `seen` to the observations of a camera that exposes all rows with the middle row."""
    view.seen = view.raw + readout * _drift(world.rig, view, _nearness(world, view, pose))


def _nearness(world: Map, view: Frame | Sights, pose: Matrix) -> Matrix:
    """Return 1 / depth (N,) of the features; where it is unknown, the median of the others."""
    near = np.zeros(len(view.raw))
    rows = np.flatnonzero(view.points >= 0)
    depth = project(pose, world.positions[view.points[rows]])[1]
    ahead = depth > 0
    rows = rows[ahead]
    if len(rows):
        near[:] = np.median(1 / depth[ahead])
        near[rows] = 1 / depth[ahead]
    return near


def _drift(rig: Rig, view: Frame | Sights, near: Matrix) -> Matrix:
    """Return the change (N, 2) of `seen` per second of readout time."""
    shift, spin = (np.broadcast_to(part, (len(view.raw), 3)) for part in np.split(view.twist, 2))
    if len(rig.cameras) > 1:
        mount = rig.mounts[view.camera]
        shift, spin = (np.einsum('nij,nj->ni', mount[:, :3, :3], part) for part in (shift, spin))
        shift = shift - np.cross(spin, mount[:, :3, 3])
    x, y = view.raw.T
    a, b, c = (spin * view.late[:, None]).T
    u, v, w = (shift * (view.late * near)[:, None]).T
    # shift / depth + spin x (x, y, 1), divided by depth again
    ahead = w + a * y - b * x
    return np.column_stack([u + b - c * y - x * ahead, v + c * x - a - y * ahead])


def twists_of(stamps: Matrix, poses: Matrix) -> list[Matrix]:
    """Return the twist at each pose, computed from the poses before and after it."""
    from_world = invert(poses)
    rates = [
        twist_between(first, second, seconds)
        for first, second, seconds in zip(
            from_world[:-1], from_world[1:], np.diff(stamps), strict=True
        )
    ]
    rates = _without_leaps(rates)
    around = ([before, after] for before, after in pairwise([None, *rates, None]))
    known = ([rate for rate in both if rate is not None] for both in around)
    return [np.mean(both, axis=0) if both else np.zeros(6) for both in known]


def _without_leaps(rates: list[Matrix | None]) -> list[Matrix | None]:
    """Replace twists that are much larger than those before and after with None."""
    sizes = np.zeros((len(rates) + 2, 2))  # translation, rotation
    for size, rate in zip(sizes[1:-1], rates, strict=True):
        if rate is not None:
            size[:] = np.linalg.norm(rate.reshape(2, 3), axis=1)
    sizes[0], sizes[-1] = sizes[1], sizes[-2]
    leaps = np.asarray((sizes[1:-1] > LEAP * np.maximum(sizes[:-2], sizes[2:])).any(axis=1))
    return [None if leap else rate for rate, leap in zip(rates, leaps, strict=True)]


class Shutter:
    """Estimates the readout time from the frames of one camera or of a rig."""

    def __init__(self, readout: float | None = None) -> None:
        """A given readout time in seconds is not estimated; 0 is a global shutter."""
        self.readout = readout or 0.0
        self._known = readout is not None
        self._rate: Matrix | None = None  # rad/s, between the last two frames
        self._information, self._pull = 0.0, 0.0
        self._keyframes = 0  # number of keyframes so far

    def expect(self, world: Map, frame: Frame, last: Frame) -> None:
        """Predict the twist before the pose is known: the frame moves like the last one."""
        frame.twist = last.twist.copy()
        if self.readout:
            near = np.full(len(frame), np.median(_nearness(world, last, last.pose)))
            frame.seen = frame.raw + self.readout * _drift(world.rig, frame, near)

    def follow(self, world: Map, last: Frame, frame: Frame, predicted: bool) -> bool:
        """Update the twist from the pose of a frame; return whether its `seen` has changed.

        predicted  False: the pose differs from the prediction, so the motion is unknown
        """
        rate = twist_between(last.pose, frame.pose, frame.stamp - last.stamp)
        rate = rate if predicted else None
        before, self._rate = self._rate, rate
        if rate is None:
            frame.twist = np.zeros(6)
        else:
            before = rate if before is None else before
            last.twist[:] = (before + rate) / 2
            frame.twist = rate + (rate - before) / 2
            if self.readout:
                straighten(world, last, last.pose, self.readout)
        if self.readout:
            straighten(world, frame, frame.pose, self.readout)
        return self.readout != 0

    def forget_motion(self) -> None:
        self._rate = None

    def update(self, world: Map) -> None:
        """Estimate after a new keyframe; correct all keyframes if the readout time changes."""
        self._keyframes += 1
        if self._known or (self._keyframes > SOON and self._keyframes % SELDOM):
            return
        self._learn(world)
        if not self._information:
            return
        learned = self._pull / self._information
        certain = abs(learned) > CERTAIN / np.sqrt(self._information)
        wanted = learned if certain and abs(learned) > SMALLEST else 0.0
        if abs(wanted - self.readout) > CHANGE:
            self.readout = wanted
            for frame in world.keyframes:
                straighten(world, frame, frame.pose, self.readout)

    def correct(self, world: Map, stamps: Matrix, poses: Matrix) -> None:
        """Correct all frames of a map with the poses (N, 4, 4), camera to world."""
        twists = dict(zip(stamps.tolist(), twists_of(stamps, poses), strict=True))
        for frame in world.keyframes:
            frame.twist = twists.get(frame.stamp, frame.twist)
            straighten(world, frame, frame.pose, self.readout)
        for sights in world.waiting:
            sights.twist = twists.get(sights.placed.stamp, sights.twist)

    def _learn(self, world: Map) -> None:
        """Update the estimate from the residuals of the last keyframes.

        Poses and points absorb most of the effect of the shutter. Only the part that an adjustment
        step cannot absorb counts.
        """
        frames = world.keyframes[-VIEWS:]
        if len(frames) < FEWEST_VIEWS:
            return
        problem, numbers = world.problem(frames, [True] + [False] * (len(frames) - 1))
        if not len(problem.frame):
            return
        member = np.zeros(world.count, bool)
        member[numbers] = True
        drifts = [
            _drift(world.rig, frame, _nearness(world, frame, frame.pose))[
                (frame.points >= 0) & member[frame.points]
            ]
            for frame in frames
        ]
        off, slope = unexplained(problem, np.concatenate(drifts), ROBUST)
        information = float((slope**2).sum())
        self._information = MEMORY * self._information + information
        self._pull *= MEMORY
        self._pull += information * self.readout - GAIN * float((slope * off).sum())
