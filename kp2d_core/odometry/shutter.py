"""Rolling shutter: estimate the readout time of the sensor, and undo what it does.

Most cheap cameras expose one row after another. While the camera turns, each row then looks into
another direction: at 30 degrees a second and 30 ms of readout, 8 px between the first row and the
last. A pose explains that as a motion to the side that never was.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from kp2d_core.odometry.frames import Frame, Map, Rig, Sights
from kp2d_core.odometry.geometry import Matrix, invert, log_rotation
from kp2d_core.odometry.pose import slopes

LONGEST_STEP = 0.25  # s between two frames that still tell how fast the camera turned
MEMORY = 0.96  # share of what was learned that is left after a frame
SMALLEST = 0.004  # s; a shorter readout is not worth correcting
CERTAIN = 6.0  # standard deviations that the readout must be away from zero
CHANGE = 0.001  # s by which the estimate must change before keyframes are corrected again
GAIN = 2.5  # points were made with the error and hide a part of it: go further than the frame says
ROBUST = 2.0  # standard deviations from which on an observation counts less


def spin_between(first: Matrix, second: Matrix, seconds: float) -> Matrix | None:
    """Return the rotation rate (3,), rad/s, between two poses from the world; None: unknown."""
    if not 0 < seconds <= LONGEST_STEP:
        return None
    return log_rotation(first[:3, :3] @ second[:3, :3].T) / seconds


def straighten(rig: Rig, view: Frame | Sights, readout: float) -> None:
    """Set `seen` to what the camera would have seen with all rows exposed with the middle one."""
    view.seen = view.raw + readout * _drift(rig, view)


def _drift(rig: Rig, view: Frame | Sights) -> Matrix:
    """(N, 2) by which `seen` changes for each second of readout."""
    spin = np.broadcast_to(view.spin, (len(view.raw), 3))
    if len(rig.cameras) > 1:
        spin = np.einsum('nij,nj->ni', rig.mounts[view.camera, :3, :3], spin)
    x, y = view.raw.T
    a, b, c = (spin * view.late[:, None]).T
    # spin x (x, y, 1), divided by depth again
    return np.column_stack([b - c * y - x * (a * y - b * x), c * x - a - y * (a * y - b * x)])


def _spins(stamps: Matrix, poses: Matrix) -> list[Matrix]:
    """The rotation rate at each of the poses, by those before and after it."""
    from_world = invert(poses)
    rates = [
        spin_between(first, second, seconds)
        for first, second, seconds in zip(
            from_world[:-1], from_world[1:], np.diff(stamps), strict=True
        )
    ]
    around = ([before, after] for before, after in pairwise([None, *rates, None]))
    known = ([rate for rate in both if rate is not None] for both in around)
    return [np.mean(both, axis=0) if both else np.zeros(3) for both in known]


class Shutter:
    """Learns the readout time from the frames of one camera, or of the cameras of a rig."""

    def __init__(self, readout: float | None = None) -> None:
        """With a readout time in seconds, nothing is learned; 0: a global shutter."""
        self.readout = readout or 0.0
        self._known = readout is not None
        self._rate: Matrix | None = None  # rad/s, between the last two frames
        self._information, self._pull = 0.0, 0.0

    def expect(self, rig: Rig, frame: Frame, last: Frame) -> None:
        """Before the pose of a frame is known: it turns as the last one did."""
        frame.spin = last.spin.copy()
        if self.readout:
            straighten(rig, frame, self.readout)

    def follow(self, world: Map, last: Frame, frame: Frame) -> bool:
        """Take up the pose of a frame; return whether its `seen` has changed."""
        rate = spin_between(last.pose, frame.pose, frame.stamp - last.stamp)
        before, self._rate = self._rate, rate
        if rate is None:
            return False
        if before is None:
            frame.spin = rate
        else:
            last.spin[:] = (before + rate) / 2
            frame.spin = rate + (rate - before) / 2
            if self.readout:
                straighten(world.rig, last, self.readout)
            self._information, self._pull = MEMORY * self._information, MEMORY * self._pull
            self._learn(world, last, last.pose)
        if self.readout:
            straighten(world.rig, frame, self.readout)
        return self.readout != 0

    def forget_motion(self) -> None:
        self._rate = None

    def update(self, rig: Rig, keyframes: list[Frame]) -> None:
        """Adopt what was learned; correct the keyframes if that changes them."""
        if self._known or not self._information:
            return
        learned = self._pull / self._information
        certain = abs(learned) > CERTAIN / np.sqrt(self._information)
        wanted = learned if certain and abs(learned) > SMALLEST else 0.0
        if abs(wanted - self.readout) > CHANGE:
            self.readout = wanted
            for frame in keyframes:
                straighten(rig, frame, self.readout)

    def correct(self, world: Map, stamps: Matrix, poses: Matrix) -> None:
        """Correct all frames of a map by its poses (N, 4, 4), camera to world."""
        spins = dict(zip(stamps.tolist(), _spins(stamps, poses), strict=True))
        for frame in world.keyframes:
            frame.spin = spins.get(frame.stamp, frame.spin)
            straighten(world.rig, frame, self.readout)
        for sights in world.waiting:
            sights.spin = spins.get(sights.placed.stamp, sights.spin)

    def _learn(self, world: Map, frame: Frame | Sights, pose: Matrix) -> None:
        """What the residuals of a frame say of the readout, whatever its pose is."""
        if self._known:
            return
        rows = np.flatnonzero(frame.points >= 0)
        rows = rows[world.alive[frame.points[rows]]]
        if len(rows) < 30:
            return
        sight = world.sight(frame, rows, frame.points[rows])
        body = sight.points @ pose[:3, :3].T + pose[:3, 3]
        jacobian, off, ahead = slopes(sight, body)
        weight = np.where(ahead, 1 / (1 + (off**2).sum(axis=0) / ROBUST**2), 0.0)
        by_pose = (jacobian * np.sqrt(weight)).reshape(6, -1)
        drift = _drift(world.rig, frame)[rows].T * sight.weight * np.sqrt(weight)
        columns = np.vstack([by_pose, -drift.reshape(1, -1)])
        normal = columns @ columns.T
        right = -columns @ (off * np.sqrt(weight)).ravel()
        try:
            solved = np.linalg.solve(
                normal[:6, :6] + 1e-9 * np.diag(np.diag(normal[:6, :6])),
                np.column_stack([normal[:6, 6], right[:6]]),
            )
        except np.linalg.LinAlgError:
            return
        information = float(normal[6, 6] - normal[6, :6] @ solved[:, 0])
        pull = float(right[6] - normal[6, :6] @ solved[:, 1])
        self._information += information
        self._pull += GAIN * pull + information * self.readout
