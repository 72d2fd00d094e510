"""The pose of one frame, of points whose place is known."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from kp2d_core.odometry.geometry import Bools, Matrix, invert, moved, rigid, skew, transform

NEAREST = 1e-6


@dataclass(frozen=True)
class Sight:
    """Points of the world and where a frame sees them, row by row."""

    points: Matrix  # (N, 3)
    seen: Matrix  # (N, 2) x / z, y / z
    weight: Matrix  # (N,) 1 / standard deviation
    mount: Matrix  # (N, 4, 4) camera from frame; (0, 4, 4) if every camera is the frame's own

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, which: Bools) -> Sight:
        mount = self.mount[which] if len(self.mount) else self.mount
        return Sight(self.points[which], self.seen[which], self.weight[which], mount)


def distances(sight: Sight, pose: Matrix) -> Matrix:
    """(N,) in standard deviations from where the points should be seen; infinite if behind."""
    eye = transform(pose, sight.points)
    if len(sight.mount):
        eye = np.einsum('nij,nj->ni', sight.mount[:, :3, :3], eye) + sight.mount[:, :3, 3]
    with np.errstate(divide='ignore', invalid='ignore'):
        off = np.linalg.norm(eye[:, :2] / eye[:, 2:] - sight.seen, axis=1) * sight.weight
    off[~(eye[:, 2] > NEAREST)] = np.inf
    return np.asarray(off)


def refine(sight: Sight, pose: Matrix, steps: int = 10, threshold: float = 2.0) -> Matrix:
    """The pose (4, 4, from the world) nearby that fits best; outliers count little (Cauchy)."""
    if len(sight) < 3:
        return pose
    for _ in range(steps):
        body = transform(pose, sight.points)
        eye = body
        if len(sight.mount):
            eye = np.einsum('nij,nj->ni', sight.mount[:, :3, :3], body) + sight.mount[:, :3, 3]
        ahead = eye[:, 2] > NEAREST
        depth = np.where(ahead, eye[:, 2], 1.0)
        flat = eye[:, :2] / depth[:, None]
        off = (flat - sight.seen) * sight.weight[:, None]
        robust = np.where(ahead, 1 / (1 + (off**2).sum(axis=1) / threshold**2), 0.0)
        slope = np.zeros((len(eye), 2, 3))
        slope[:, 0, 0] = slope[:, 1, 1] = 1 / depth
        slope[:, :, 2] = -flat / depth[:, None]
        slope *= sight.weight[:, None, None]
        if len(sight.mount):
            slope = slope @ sight.mount[:, :3, :3]
        jacobian = np.concatenate([slope, -slope @ skew(body)], axis=2)
        weighted = (jacobian * robust[:, None, None]).reshape(-1, 6)
        normal = weighted.T @ jacobian.reshape(-1, 6)
        normal += 1e-9 * np.diag(np.diag(normal)) + 1e-12 * np.eye(6)
        step = -np.linalg.solve(normal, weighted.T @ off.ravel())
        if not np.isfinite(step).all():
            break
        pose = moved(pose[None], step[None])[0]
        if np.abs(step).max() < 1e-7:
            break
    return pose


def find(sight: Sight, threshold: float, random: np.random.Generator) -> Matrix | None:
    """A pose from scratch, by RANSAC; None if there is none.

    threshold  in standard deviations. Only what the frame's own camera sees is used.
    """
    own = np.ones(len(sight), bool)
    if len(sight.mount):
        own &= np.isclose(sight.mount, np.eye(4)).all(axis=(1, 2))
    chosen = random.permutation(np.flatnonzero(own))  # OpenCV's own order is always the same
    if len(chosen) < 6:
        return None
    scale = float(np.median(sight.weight[chosen]))
    try:
        found, turn, shift, _ = cv2.solvePnPRansac(
            np.ascontiguousarray(sight.points[chosen]),
            np.ascontiguousarray(sight.seen[chosen]),
            np.eye(3), None, iterationsCount=300, reprojectionError=threshold / scale,
            confidence=0.999, flags=cv2.SOLVEPNP_AP3P,
        )  # fmt: skip
    except cv2.error:
        return None
    if not found:
        return None
    pose = rigid(cv2.Rodrigues(turn)[0], shift)
    return pose if np.isfinite(pose).all() else None


def step_between(before: Matrix, now: Matrix) -> Matrix:
    """The motion that takes one pose from the world to the next."""
    return np.asarray(now @ invert(before))
