"""Errors of trajectories against the ground truth, and TUM files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kp2d_core.files import atomic_write
from kp2d_core.odometry.geometry import Matrix, invert, quaternion


@dataclass(frozen=True)
class Alignment:
    """y = scale * rotation x + translation."""

    scale: float
    rotation: Matrix
    translation: Matrix

    def points(self, points: Matrix) -> Matrix:
        return np.asarray(self.scale * points @ self.rotation.T + self.translation)

    def poses(self, poses: Matrix) -> Matrix:
        result = poses.copy()
        result[:, :3, :3] = self.rotation @ poses[:, :3, :3]
        result[:, :3, 3] = self.points(poses[:, :3, 3])
        return result


def align(source: Matrix, target: Matrix, with_scale: bool = True) -> Alignment:
    """Align points (N, 3) with others by the least-squares similarity (Umeyama 1991)."""
    if len(source) < 3:
        raise ValueError(f'{len(source)} positions are too few to align: 3 are needed')
    a, b = source - source.mean(axis=0), target - target.mean(axis=0)
    left, sizes, right = np.linalg.svd(b.T @ a / len(a))
    signs = np.array([1.0, 1.0, np.sign(np.linalg.det(left) * np.linalg.det(right))])
    rotation = left * signs @ right
    spread = float((a**2).sum() / len(a))
    scale = float((sizes * signs).sum() / spread) if with_scale and spread > 0 else 1.0
    shift = target.mean(axis=0) - scale * rotation @ source.mean(axis=0)
    return Alignment(scale, np.asarray(rotation), np.asarray(shift))


@dataclass(frozen=True)
class Errors:
    """Errors of a trajectory against the ground truth."""

    ate: float  # m, root mean square of the distances after the alignment
    rpe: float  # m, root mean square of the motion's error from one frame to the next
    rpe_degrees: float  # of its rotation
    scale: float  # that the alignment took; 1 if it took none
    frames: int  # that were compared
    worst: float  # m, the largest of the distances


def errors(poses: Matrix, truth: Matrix, with_scale: bool = True) -> Errors:
    """Compare poses (N, 4, 4), camera to world, with the true ones, row by row.

    with_scale  True: one camera does not know the scale; False: a rig does
    """
    found = align(poses[:, :3, 3], truth[:, :3, 3], with_scale)
    aligned = found.poses(poses)
    off = np.linalg.norm(aligned[:, :3, 3] - truth[:, :3, 3], axis=1)
    steps = invert(aligned[:-1]) @ aligned[1:]
    true_steps = invert(truth[:-1]) @ truth[1:]
    between = invert(true_steps) @ steps
    chord = np.linalg.norm(between[:, :3, :3] - np.eye(3), axis=(1, 2)) / np.sqrt(8)
    turned = np.degrees(2 * np.arcsin(np.minimum(chord, 1)))
    return Errors(
        float(np.sqrt((off**2).mean())),
        float(np.sqrt((between[:, :3, 3] ** 2).sum(axis=1).mean())),
        float(np.sqrt((turned**2).mean())),
        found.scale,
        len(poses),
        float(off.max()),
    )


def write_tum(path: str | Path, stamps: Matrix, poses: Matrix) -> None:
    """A line a pose: time x y z qx qy qz qw."""
    lines = []
    for stamp, pose in zip(stamps, poses, strict=True):
        numbers = ' '.join(f'{value:.9g}' for value in (*pose[:3, 3], *quaternion(pose[:3, :3])))
        lines.append(f'{stamp:.6f} {numbers}\n')
    with atomic_write(path) as temporary:
        temporary.write_text(''.join(lines))
