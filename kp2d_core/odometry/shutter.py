"""Rolling shutter: estimate the readout time of the sensor, and undo what it does.

Most cheap cameras expose one row after another, each from another pose while the camera moves. At
30 degrees a second and 30 ms of readout, 8 px lie between the first row and the last. At 0.5 m a
second, it is as much for what is 1 m away. A pose explains that as a motion that never was.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from kp2d_core.odometry.adjustment import unexplained
from kp2d_core.odometry.frames import Frame, Map, Rig, Sights
from kp2d_core.odometry.geometry import Matrix, invert, log_rotation, project

LONGEST_STEP = 0.25  # s between two frames that still tell how fast the camera turned
MEMORY = 0.5  # share of what was learned that is left after a keyframe
VIEWS, FEWEST_VIEWS = 10, 4  # keyframes to learn from
SOON, SELDOM = 30, 5  # learn from each of the first keyframes, later from every fifth
SMALLEST = 0.004  # s; a shorter readout is not worth correcting
CERTAIN = 6.0  # standard deviations that the readout must be away from zero
GAIN = 1.5  # what fits the readout so far was chosen, what does not was dropped: go further
CHANGE = 0.001  # s by which the estimate must change before keyframes are corrected again
LEAP = 4.0  # times the speed before and after is no motion but a jump to another place
ROBUST = 2.0  # standard deviations from which on an observation counts less


def twist_between(first: Matrix, second: Matrix, seconds: float) -> Matrix | None:
    """How points pass a camera between two poses from the world; None: unknown.

    (6,) a second, against the motion: translation in units of the map, rotation in rad.
    """
    if not 0 < seconds <= LONGEST_STEP:
        return None
    back = first @ invert(second)
    return np.array([*back[:3, 3], *log_rotation(back[:3, :3])]) / seconds


def straighten(world: Map, view: Frame | Sights, pose: Matrix, readout: float) -> None:
    """Set `seen` to what the camera would have seen with all rows exposed with the middle one."""
    view.seen = view.raw + readout * _drift(world.rig, view, _nearness(world, view, pose))


def _nearness(world: Map, view: Frame | Sights, pose: Matrix) -> Matrix:
    """(N,) 1 / depth of what the features see; the median of the others where it is not known."""
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
    """(N, 2) by which `seen` changes for each second of readout."""
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
    """The twist at each of the poses, by those before and after it."""
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
    """None in place of those that are much larger than the ones before and after."""
    sizes = np.zeros((len(rates) + 2, 2))  # translation, rotation
    for size, rate in zip(sizes[1:-1], rates, strict=True):
        if rate is not None:
            size[:] = np.linalg.norm(rate.reshape(2, 3), axis=1)
    sizes[0], sizes[-1] = sizes[1], sizes[-2]
    leaps = np.asarray((sizes[1:-1] > LEAP * np.maximum(sizes[:-2], sizes[2:])).any(axis=1))
    return [None if leap else rate for rate, leap in zip(rates, leaps, strict=True)]


class Shutter:
    """Learns the readout time from the frames of one camera, or of the cameras of a rig."""

    def __init__(self, readout: float | None = None) -> None:
        """With a readout time in seconds, nothing is learned; 0: a global shutter."""
        self.readout = readout or 0.0
        self._known = readout is not None
        self._rate: Matrix | None = None  # rad/s, between the last two frames
        self._information, self._pull = 0.0, 0.0
        self._keyframes = 0  # so far

    def expect(self, world: Map, frame: Frame, last: Frame) -> None:
        """Before the pose of a frame is known: it moves as the last one did."""
        frame.twist = last.twist.copy()
        if self.readout:
            near = np.full(len(frame), np.median(_nearness(world, last, last.pose)))
            frame.seen = frame.raw + self.readout * _drift(world.rig, frame, near)

    def follow(self, world: Map, last: Frame, frame: Frame, predicted: bool) -> bool:
        """Take up the pose and the points of a frame; return whether its `seen` has changed.

        predicted  False: it is elsewhere than expected, so that nobody knows how it moves
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
        """After a new keyframe: learn, and correct the keyframes if that changes the readout."""
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
        """Correct all frames of a map by its poses (N, 4, 4), camera to world."""
        twists = dict(zip(stamps.tolist(), twists_of(stamps, poses), strict=True))
        for frame in world.keyframes:
            frame.twist = twists.get(frame.stamp, frame.twist)
            straighten(world, frame, frame.pose, self.readout)
        for sights in world.waiting:
            sights.twist = twists.get(sights.placed.stamp, sights.twist)

    def _learn(self, world: Map) -> None:
        """What the residuals of the last keyframes say of the readout, wherever they may be.

        Poses and points hide most of what the shutter does: what they can explain, after a step
        of the adjustment towards it, does not count.
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
