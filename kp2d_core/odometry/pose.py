"""The pose of a frame from known 3D points (PnP)."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from kp2d_core.odometry.geometry import Bools, Matrix, moved, rigid, transform

NEAREST = 1e-6
SMALL = 1e-6  # a step that changes nothing any more: a thousandth of a pixel
_DIAGONAL = np.diag_indices(6)


@dataclass(frozen=True)
class Sight:
    """World points and their observations in a frame, row by row."""

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
    """Refine a pose (4, 4, from the world) by robust least squares (Cauchy)."""
    if len(sight) < 3:
        return pose
    for _ in range(steps):
        body = sight.points @ pose[:3, :3].T + pose[:3, 3]
        jacobian, off, ahead = slopes(sight, body)
        squared = off[0] ** 2 + off[1] ** 2
        robust = np.where(ahead, 1 / (1 + squared / threshold**2), 0.0)
        weighted = (jacobian * robust).reshape(6, -1)
        normal = weighted @ jacobian.reshape(6, -1).T
        normal[_DIAGONAL] += 1e-9 * normal[_DIAGONAL] + 1e-12
        step = -np.linalg.solve(normal, weighted @ off.ravel())
        if not np.isfinite(step).all():
            break
        pose = moved(pose[None], np.asarray(step[None], np.float64))[0]
        if np.abs(step).max() < SMALL:
            break
    return pose


def slopes(sight: Sight, body: Matrix) -> tuple[Matrix, Matrix, Bools]:
    """(6, 2, N) by translation and rotation; (2, N) residuals; (N,) which are ahead."""
    eye = body
    if len(sight.mount):
        eye = np.einsum('nij,nj->ni', sight.mount[:, :3, :3], body) + sight.mount[:, :3, 3]
    x, y, z = eye.T
    ahead = z > NEAREST
    z = np.where(ahead, z, 1.0)
    flat = np.stack([x / z, y / z])
    off = (flat - sight.seen.T) * sight.weight
    scale = sight.weight / z
    slope = np.zeros((3, 2, len(z)))
    slope[0, 0] = slope[1, 1] = scale
    slope[2] = -scale * flat
    if len(sight.mount):
        slope = np.einsum('icn,nij->jcn', slope, sight.mount[:, :3, :3])
    jacobian = np.empty((6, 2, len(z)))
    jacobian[:3] = slope
    around = body.T
    for i in range(3):  # body x slope
        j, k = (i + 1) % 3, (i + 2) % 3
        jacobian[3 + i] = around[j] * slope[k] - around[k] * slope[j]
    return jacobian, off, ahead


def find(sight: Sight, threshold: float, random: np.random.Generator) -> Matrix | None:
    """Estimate a pose without a prediction, by RANSAC; None if there is none.

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
