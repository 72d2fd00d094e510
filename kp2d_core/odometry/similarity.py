"""Similarity transforms (Sim(3)) between two views of the same place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kp2d_core.odometry.geometry import Bools, Ints, Matrix, exp_rotation, log_rotation, skew

TRIES = 300  # samples of RANSAC


@dataclass(frozen=True)
class Similarity:
    """y = scale * rotation x + translation."""

    scale: float
    rotation: Matrix
    translation: Matrix

    def __call__(self, points: Matrix) -> Matrix:
        return np.asarray(self.scale * points @ self.rotation.T + self.translation)

    def __matmul__(self, other: Similarity) -> Similarity:
        return Similarity(
            self.scale * other.scale,
            self.rotation @ other.rotation,
            self.scale * self.rotation @ other.translation + self.translation,
        )

    def inverse(self) -> Similarity:
        turn = self.rotation.T
        return Similarity(1 / self.scale, turn, -turn @ self.translation / self.scale)

    def rigid(self) -> Matrix:
        """Of a camera from the world: the pose (4, 4) in the world as large as it now is."""
        pose = np.eye(4)
        pose[:3, :3], pose[:3, 3] = self.rotation, self.translation / self.scale
        return pose

    def log(self) -> Matrix:
        """(7,) translation, rotation vector, logarithm of the scale; near the identity."""
        return np.array([*self.translation, *log_rotation(self.rotation), np.log(self.scale)])

    def adjoint(self) -> Matrix:
        """(7, 7): a small step before it as one after it."""
        result = np.eye(7)
        result[:3, :3] = self.scale * self.rotation
        result[:3, 3:6] = skew(self.translation) @ self.rotation
        result[:3, 6] = -self.translation
        result[3:6, 3:6] = self.rotation
        return result

    def moved(self, step: Matrix) -> Similarity:
        """After a small step (7,) on the left."""
        turn, scale = exp_rotation(step[3:6]), float(np.exp(step[6]))
        rotation = turn @ self.rotation
        rotation = 1.5 * rotation - 0.5 * rotation @ rotation.T @ rotation
        return Similarity(scale * self.scale, rotation, scale * turn @ self.translation + step[:3])


IDENTITY = Similarity(1.0, np.eye(3), np.zeros(3))


def from_pose(pose: Matrix) -> Similarity:
    return Similarity(1.0, pose[:3, :3].copy(), pose[:3, 3].copy())


@dataclass(frozen=True)
class TwoSights:
    """Points as two cameras know them: in their own coordinates, and where they see them."""

    first: Matrix  # (N, 3)
    second: Matrix  # (N, 3)
    seen_first: Matrix  # (N, 2)
    seen_second: Matrix  # (N, 2)

    def off(self, there: Similarity) -> Matrix:
        """(N,) how far off the worse of both cameras sees them, in units of x / z."""
        worst = np.zeros(len(self.first))
        for points, seen, way in (
            (self.first, self.seen_second, there),
            (self.second, self.seen_first, there.inverse()),
        ):
            eye = way(points)
            with np.errstate(divide='ignore', invalid='ignore'):
                off = np.linalg.norm(eye[:, :2] / eye[:, 2:] - seen, axis=1)
            off[~(eye[:, 2] > 0)] = np.inf
            worst = np.maximum(worst, off)
        return worst


def find_similarity(
    sights: TwoSights, limit: float, random: np.random.Generator, with_scale: bool = True
) -> tuple[Similarity, Bools] | None:
    """From the first camera to the second, and which points agree; by RANSAC.

    limit  how far off a point may be seen, in units of x / z
    """
    count = len(sights.first)
    if count < 6:
        return None
    samples = random.random((TRIES, count)).argpartition(3, axis=1)[:, :3]
    best = _best_fit(sights, samples, limit, with_scale)
    if (sights.off(best) < limit).sum() < 6:
        return None
    for _ in range(5):
        good = sights.off(best) < limit
        better = _refined(sights, best, good, with_scale)
        if (sights.off(better) < limit).sum() < good.sum():
            break
        best = better
    return best, sights.off(best) < limit


def _best_fit(sights: TwoSights, samples: Ints, limit: float, with_scale: bool) -> Similarity:
    """Of the similarities (Umeyama's) of samples (T, 3), the one that most points agree with."""
    first, second = sights.first[samples], sights.second[samples]
    a = first - first.mean(axis=1, keepdims=True)
    b = second - second.mean(axis=1, keepdims=True)
    left, sizes, right = np.linalg.svd(b.transpose(0, 2, 1) @ a)
    signs = np.ones((len(a), 3))
    signs[:, 2] = np.sign(np.linalg.det(left) * np.linalg.det(right))
    turns = (left * signs[:, None, :]) @ right
    spread = np.maximum((a**2).sum(axis=(1, 2)), 1e-12)
    scales = (sizes * signs).sum(axis=1) / spread if with_scale else np.ones(len(a))
    scales = np.maximum(scales, 1e-3)
    turns_and_scales = scales[:, None, None] * turns
    shifts = second.mean(axis=1) - (turns_and_scales @ first.mean(axis=1)[:, :, None])[:, :, 0]
    eye = turns_and_scales @ sights.first.T + shifts[:, :, None]  # (T, 3, N)
    with np.errstate(divide='ignore', invalid='ignore'):
        off = np.hypot(*(eye[:, i] / eye[:, 2] - sights.seen_second[:, i] for i in (0, 1)))
        agree = ((off < limit) & (eye[:, 2] > 0)).sum(axis=1)
    best = int(agree.argmax())
    return Similarity(float(scales[best]), turns[best], shifts[best])


def _refined(
    sights: TwoSights, start: Similarity, good: Bools, with_scale: bool, steps: int = 3
) -> Similarity:
    """Fits where both cameras see the good points, by Gauss and Newton."""
    there = start
    for _ in range(steps):
        normal, right = np.zeros((7, 7)), np.zeros(7)
        back = there.inverse()
        adjoint = back.adjoint()
        for points, seen, way, forward in (
            (sights.first, sights.seen_second, there, True),
            (sights.second, sights.seen_first, back, False),
        ):
            eye = way(points[good])
            flat = eye[:, :2] / eye[:, 2:]
            slope = np.zeros((len(eye), 2, 3))
            slope[:, 0, 0] = slope[:, 1, 1] = 1 / eye[:, 2]
            slope[:, :, 2] = -flat / eye[:, 2:]
            jacobian = np.concatenate(
                [slope, -slope @ skew(eye), slope @ eye[:, :, None]], axis=2
            ).reshape(-1, 7)
            if not forward:  # the inverse of exp(step) S is S^-1 exp(-step)
                jacobian = -jacobian @ adjoint
            off = (flat - seen[good]).ravel()
            normal += jacobian.T @ jacobian
            right -= jacobian.T @ off
        if not with_scale:
            normal[6], normal[:, 6], right[6] = 0, 0, 0
            normal[6, 6] = 1
        normal += 1e-9 * np.diag(np.diag(normal)) + 1e-12 * np.eye(7)
        there = there.moved(np.asarray(np.linalg.solve(normal, right), np.float64))
    return there
