"""Rigid motions as 4x4 matrices, and points seen from two places."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def invert(pose: Matrix) -> Matrix:
    """The inverse of rigid motions (..., 4, 4)."""
    result = np.zeros_like(pose)
    turn = np.swapaxes(pose[..., :3, :3], -1, -2)
    result[..., :3, :3] = turn
    result[..., :3, 3] = -(turn @ pose[..., :3, 3, None])[..., 0]
    result[..., 3, 3] = 1
    return result


def rigid(rotation: Matrix, translation: Matrix) -> Matrix:
    pose = np.eye(4)
    pose[:3, :3], pose[:3, 3] = rotation, np.ravel(translation)
    return pose


def skew(vectors: Matrix) -> Matrix:
    """(..., 3) -> (..., 3, 3) with skew(a) @ b = a x b."""
    result = np.zeros((*vectors.shape[:-1], 3, 3))
    x, y, z = np.moveaxis(vectors, -1, 0)
    result[..., 0, 1], result[..., 0, 2], result[..., 1, 2] = -z, y, -x
    result[..., 1, 0], result[..., 2, 0], result[..., 2, 1] = z, -y, x
    return result


def exp_rotation(vectors: Matrix) -> Matrix:
    """Rotation vectors (..., 3) -> matrices (..., 3, 3), by Rodrigues' formula."""
    angle = np.linalg.norm(vectors, axis=-1)[..., None, None]
    small = angle < 1e-8
    safe = np.where(small, 1.0, angle)
    cross = skew(vectors)
    first = np.where(small, 1.0, np.sin(safe) / safe)
    second = np.where(small, 0.5, (1 - np.cos(safe)) / safe**2)
    return np.asarray(np.eye(3) + first * cross + second * (cross @ cross))


def log_rotation(rotation: Matrix) -> Matrix:
    """The rotation vector (3,) of a matrix (3, 3)."""
    x, y, z, w = quaternion(rotation)
    vector = np.array([x, y, z])
    length = float(np.linalg.norm(vector))
    if length < 1e-12:
        return 2 * vector
    return np.asarray(vector / length * 2 * np.arctan2(length, w))


def quaternion(rotation: Matrix) -> Matrix:
    """x, y, z, w of a rotation matrix (3, 3), with w >= 0."""
    r = rotation
    # Divide by the largest of the four, for the smallest rounding error.
    candidates = np.array(
        [
            [1 + r[0, 0] - r[1, 1] - r[2, 2], r[1, 0] + r[0, 1], r[0, 2] + r[2, 0],
             r[2, 1] - r[1, 2]],
            [r[1, 0] + r[0, 1], 1 - r[0, 0] + r[1, 1] - r[2, 2], r[2, 1] + r[1, 2],
             r[0, 2] - r[2, 0]],
            [r[0, 2] + r[2, 0], r[2, 1] + r[1, 2], 1 - r[0, 0] - r[1, 1] + r[2, 2],
             r[1, 0] - r[0, 1]],
            [r[2, 1] - r[1, 2], r[0, 2] - r[2, 0], r[1, 0] - r[0, 1], 1 + np.trace(r)],
        ]
    )  # fmt: skip
    row = candidates[int(np.argmax(np.diag(candidates)))]
    row = row / np.linalg.norm(row)
    return np.asarray(-row if row[3] < 0 else row)


def moved(poses: Matrix, steps: Matrix) -> Matrix:
    """Poses (F, 4, 4) after small steps (F, 6): translation, then rotation vector, on the left."""
    turn = exp_rotation(steps[:, 3:])
    result = poses.copy()
    product = turn @ poses[:, :3, :3]
    # Repeated products drift away from rotations, and `invert` doubles the error.
    square = product @ np.swapaxes(product, 1, 2)
    result[:, :3, :3] = 1.5 * product - 0.5 * square @ product
    result[:, :3, 3] = (turn @ poses[:, :3, 3, None])[:, :, 0] + steps[:, :3]
    return result


def transform(pose: Matrix, points: Matrix) -> Matrix:
    """Points (N, 3) after a motion (or similarity) (4, 4)."""
    return np.asarray(points @ pose[:3, :3].T + pose[:3, 3])


def project(pose: Matrix, points: Matrix) -> tuple[Matrix, Matrix]:
    """(N, 2) x / z, y / z of points (N, 3) for a camera from the world (4, 4), and (N,) z."""
    seen = transform(pose, points)
    depth = seen[:, 2]
    with np.errstate(divide='ignore', invalid='ignore'):
        return seen[:, :2] / depth[:, None], depth


def triangulate(first: Matrix, second: Matrix, a: Matrix, b: Matrix) -> Matrix:
    """Points (N, 3) of the world from where two cameras (4, 4, from the world) see them (N, 2).

    The solution is linear; a few steps of the adjustment then make it accurate.
    """
    rows = np.stack(
        [
            a[:, :1] * first[2] - first[0],
            a[:, 1:] * first[2] - first[1],
            b[:, :1] * second[2] - second[0],
            b[:, 1:] * second[2] - second[1],
        ],
        axis=1,
    )
    # Least squares of A[:, :3] X = -A[:, 3] take a third of the time of a singular value
    # decomposition. Points at infinity still become far points.
    left, right = rows[:, :, :3], -rows[:, :, 3:]
    normal = left.transpose(0, 2, 1) @ left
    normal += 1e-12 * np.trace(normal, axis1=1, axis2=2)[:, None, None] * np.eye(3)
    return np.asarray(np.linalg.solve(normal, left.transpose(0, 2, 1) @ right)[:, :, 0])


def parallax(first: Matrix, second: Matrix, points: Matrix) -> Matrix:
    """Angles (N,) in radians between the rays of two cameras (4, 4, from the world) to points."""
    a, b = (points - invert(pose)[:3, 3] for pose in (first, second))
    cross = np.linalg.norm(np.cross(a, b), axis=1)
    return np.asarray(np.arctan2(cross, (a * b).sum(axis=1)))


def epipolar_matrix(first: Matrix, second: Matrix) -> Matrix:
    """E (3, 3) with b' E a = 0 for rays a, b of two cameras (4, 4, from the world)."""
    motion = second @ invert(first)
    return np.asarray(skew(motion[:3, 3]) @ motion[:3, :3])
