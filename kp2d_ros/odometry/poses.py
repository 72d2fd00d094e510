"""Convert optical axes to body axes (REP 103), and poses in maps to the odometry frame.

The poses of kp2d_core are those of an optical frame: x right, y down, z forward. A body frame has
x forward, y left, z up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kp2d_core.geometry import Matrix
from kp2d_core.odometry.geometry import invert, log_rotation

# The optical frame of a camera that looks forward, in the body frame.
OPTICAL = np.array([[0.0, 0, 1, 0], [-1, 0, 0, 0], [0, -1, 0, 0], [0, 0, 0, 1]])
DRIFT = 0.02  # assumed position error, as a fraction of the path length
TURN_DRIFT = 0.002  # assumed rotation error, radians per metre


def mounting(camera_pose: Sequence[float]) -> Matrix:
    """Return the optical frame (4, 4) in the base; x, y, z in m; roll, pitch, yaw in radians."""
    x, y, z, roll, pitch, yaw = camera_pose
    (sr, cr), (sp, cp), (sy, cy) = ((np.sin(a), np.cos(a)) for a in (roll, pitch, yaw))
    about_x = np.array([[1, 0, 0], [0, cr, -sr], [0, sr, cr]])
    about_y = np.array([[cp, 0, sp], [0, 1, 0], [-sp, 0, cp]])
    about_z = np.array([[cy, -sy, 0], [sy, cy, 0], [0, 0, 1]])
    pose = np.eye(4)
    pose[:3, :3], pose[:3, 3] = about_z @ about_y @ about_x, (x, y, z)
    return np.asarray(pose @ OPTICAL)


def scaled(poses: Matrix, scale: float) -> Matrix:
    """Scale the translations of poses (..., 4, 4)."""
    result = poses.copy()
    result[..., :3, 3] *= scale
    return result


@dataclass(frozen=True)
class Anchor:
    """The place of a map in the odometry frame."""

    world: Matrix  # (4, 4) pose of the map in the odometry frame, in m
    scale: float  # metres per unit of the map

    def base(self, poses: Matrix, mount: Matrix) -> Matrix:
        """Convert camera poses (..., 4, 4) in the map to base poses in the odometry frame."""
        return np.asarray(self.world @ scaled(poses, self.scale) @ invert(mount))

    def points(self, points: Matrix) -> Matrix:
        """Convert points (N, 3) of the map to the odometry frame."""
        return np.asarray(self.scale * points @ self.world[:3, :3].T + self.world[:3, 3])


def anchored(pose: Matrix, base: Matrix, mount: Matrix, scale: float) -> Anchor:
    """Place a map so that the camera pose in it corresponds to the given pose of the base."""
    return Anchor(base @ mount @ invert(scaled(pose, scale)), scale)


@dataclass(frozen=True)
class Twist:
    """Velocity in the base frame, as in nav_msgs/Odometry."""

    linear: Matrix  # (3,) m/s
    angular: Matrix  # (3,) rad/s


def twist(before: Matrix, now: Matrix, seconds: float) -> Twist:
    """Return the mean velocity between two poses (4, 4) of the base."""
    if seconds <= 0:
        return Twist(np.zeros(3), np.zeros(3))
    step = invert(before) @ now
    return Twist(step[:3, 3] / seconds, log_rotation(step[:3, :3]) / seconds)


def pose_covariance(base: Matrix, way: float, scale_known: bool) -> Matrix:
    """Return the covariance (6, 6) of position and rotation; it grows with the path length.

    If the scale is unknown, the standard deviation of the position exceeds its distance from the
    origin. A filter then relies only on the rotation.
    """
    position = 0.01 + DRIFT * way
    if not scale_known:
        position += 1.0 + float(np.linalg.norm(base[:3, 3]))
    rotation = 0.005 + TURN_DRIFT * (way if scale_known else 1.0)
    return np.diag([position**2] * 3 + [rotation**2] * 3)


def twist_covariance(velocity: Twist, scale_known: bool) -> Matrix:
    speed = float(np.linalg.norm(velocity.linear))
    linear = 0.02 + (DRIFT if scale_known else 1.0) * speed
    if not scale_known:
        linear += 1.0
    angular = 0.01 + 0.02 * float(np.linalg.norm(velocity.angular))
    return np.diag([linear**2] * 3 + [angular**2] * 3)
