"""Bundle adjustment: Levenberg-Marquardt with the Schur complement over the points.

It is written in NumPy with a few large matrix products. A step with ten frames and a thousand
points takes a few milliseconds. Passing the data to another library would take as long.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from kp2d_core.odometry.geometry import Bools, Ints, Matrix, moved

CHUNK = 512  # points eliminated at once
NEAREST = 1e-6  # depth below which a point counts as behind the camera
DONE = 3e-4  # stop when a step reduces the cost by less than this fraction
LOOSE = 1e-6  # damping of a point along its ray, which is weakly constrained


@dataclass
class Problem:
    """Frames and the points they observe. Observations are rows, sorted by frame."""

    poses: Matrix  # (F, 4, 4) world to frame
    points: Matrix  # (P, 3)
    frame: Ints  # (N,) frame of each observation, ascending
    point: Ints  # (N,) point of each observation
    seen: Matrix  # (N, 2) observed x / z, y / z
    weight: Matrix  # (N,) 1 / standard deviation of `seen`
    fixed: Bools  # (F,) frames whose pose is held fixed
    camera: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # (N,), empty: all 0
    rig: Matrix = field(default_factory=lambda: np.eye(4)[None])  # (C, 4, 4) frame to camera

    def spans(self) -> list[slice]:
        """Return the slice of observations of each frame."""
        ends = np.searchsorted(self.frame, np.arange(len(self.poses) + 1))
        return [slice(int(a), int(b)) for a, b in pairwise(ends)]


def residuals(problem: Problem, poses: Matrix, points: Matrix) -> Matrix:
    """Return residuals (N, 2) in standard deviations; infinite for points behind a camera."""
    _, eye = _in_cameras(problem, poses, points)
    with np.errstate(divide='ignore', invalid='ignore'):
        off = (eye[:, :2] / eye[:, 2:] - problem.seen) * problem.weight[:, None]
    off[~(eye[:, 2] > NEAREST)] = np.inf
    return np.asarray(off)


def _in_cameras(problem: Problem, poses: Matrix, points: Matrix) -> tuple[Matrix, Matrix]:
    """Return the observed points (N, 3) in the frame, and in the camera of the rig."""
    body = points[problem.point]
    for pose, span in zip(poses, problem.spans(), strict=True):
        body[span] = body[span] @ pose[:3, :3].T + pose[:3, 3]
    if not len(problem.camera):
        return body, body
    mount = problem.rig[problem.camera]
    return body, np.einsum('nij,nj->ni', mount[:, :3, :3], body) + mount[:, :3, 3]


@dataclass(frozen=True)
class Linear:
    """Weighted residuals and Jacobians at the current poses and points."""

    off: Matrix  # (N, 2)
    by_pose: Matrix  # (N, 2, 6) derivatives by translation and rotation
    by_point: Matrix  # (N, 2, 3) derivatives by the point


def linearize(problem: Problem, threshold: float) -> Linear:
    body, eye = _in_cameras(problem, problem.poses, problem.points)
    behind = ~(eye[:, 2] > NEAREST)
    depth = np.where(behind, 1.0, eye[:, 2])
    flat = eye[:, :2] / depth[:, None]
    off = (flat - problem.seen) * problem.weight[:, None]
    robust = np.sqrt(robust_weights(off, threshold))
    robust[behind] = 0
    off *= robust[:, None]
    scale = problem.weight / depth * robust
    by_pose = np.zeros((len(eye), 2, 6))
    slope = by_pose[:, :, :3]
    slope[:, 0, 0] = slope[:, 1, 1] = scale
    slope[:, :, 2] = -flat * scale[:, None]
    if len(problem.camera):
        slope[:] = slope @ problem.rig[problem.camera, :3, :3]
    for i in range(3):  # body x slope
        j, k = (i + 1) % 3, (i + 2) % 3
        by_pose[:, :, 3 + i] = (
            body[:, j, None] * slope[:, :, k] - body[:, k, None] * slope[:, :, j]
        )
    by_point = np.ascontiguousarray(slope)
    for pose, span in zip(problem.poses, problem.spans(), strict=True):
        by_point[span] = (by_point[span].reshape(-1, 3) @ pose[:3, :3]).reshape(-1, 2, 3)
    return Linear(off, by_pose, by_point)


def robust_weights(off: Matrix, threshold: float) -> Matrix:
    """Return Cauchy weights of residuals (N, 2): 1 at 0, falling fast beyond the threshold."""
    squared = off[:, 0] ** 2 + off[:, 1] ** 2
    return np.asarray(1 / (1 + np.minimum(squared, 1e12) / threshold**2))


def robust_cost(off: Matrix, threshold: float) -> float:
    """Return the cost that `robust_weights` minimise. A point behind the camera is an outlier."""
    squared = np.minimum(off[:, 0] ** 2 + off[:, 1] ** 2, 1e6)
    return float(threshold**2 * np.log1p(squared / threshold**2).sum())


def adjust(problem: Problem, steps: int = 10, threshold: float = 2.0) -> float:
    """Improve poses and points in place; return the remaining cost.

    threshold  residual in standard deviations above which an observation counts less
    """
    if not len(problem.frame):
        return 0.0
    chunks = _chunks(problem)
    damping = 1e-4
    cost = robust_cost(residuals(problem, problem.poses, problem.points), threshold)
    for _ in range(steps):
        linear = linearize(problem, threshold)
        for _ in range(4):
            poses, points = _step(problem, linear, chunks, damping)
            new_cost = robust_cost(residuals(problem, poses, points), threshold)
            if new_cost < cost:
                break
            damping *= 10
        else:
            break
        problem.poses, problem.points = poses, points
        gain, cost = cost - new_cost, new_cost
        damping = max(damping / 10, 1e-9)
        if gain < DONE * cost:
            break
    return cost


@dataclass(frozen=True)
class Chunk:
    """Some points, and the frames that observe them."""

    rows: Ints  # their observations in frames that are not fixed
    points: Ints
    frames: Ints  # frames that observe them and are not fixed
    row_frame: Ints  # index into `frames`, for each row
    row_point: Ints  # index into `points`, for each row
    cameras: list[Ints]  # rows of each camera of the rig


def _chunks(problem: Problem) -> list[Chunk]:
    """Split the points into chunks. Adjacent points have a similar age, so few frames see them."""
    moving = np.flatnonzero(~problem.fixed[problem.frame])
    order = moving[np.argsort(problem.point[moving], kind='stable')]
    sorted_points = problem.point[order]
    present = np.unique(sorted_points)
    chunks = []
    for begin in range(0, len(present), CHUNK):
        points = present[begin : begin + CHUNK]
        low = np.searchsorted(sorted_points, points[0], 'left')
        high = np.searchsorted(sorted_points, points[-1], 'right')
        rows = order[low:high]
        frames, row_frame = np.unique(problem.frame[rows], return_inverse=True)
        row_point = np.searchsorted(points, problem.point[rows])
        cameras = [np.arange(len(rows))]
        if len(problem.camera):
            own = problem.camera[rows]
            cameras = [np.flatnonzero(own == camera) for camera in range(len(problem.rig))]
        chunks.append(Chunk(rows, points, frames, row_frame.ravel(), row_point, cameras))
    return chunks


def unexplained(problem: Problem, slope: Matrix, threshold: float) -> tuple[Matrix, Matrix]:
    """Return the weighted residuals (N, 2) and their derivative (N, 2) by another parameter.

    The derivative excludes the part that a change of poses and points can compensate.

    slope  (N, 2) derivative of `seen` by that parameter
    """
    linear = linearize(problem, threshold)
    off = residuals(problem, problem.poses, problem.points)
    weight = problem.weight * np.sqrt(robust_weights(off, threshold))
    wanted = -slope * weight[:, None]
    steps, moves = _solve(problem, replace(linear, off=wanted), _chunks(problem), 1e-6)
    wanted += np.einsum('nij,nj->ni', linear.by_pose, steps[problem.frame])
    wanted += np.einsum('nij,nj->ni', linear.by_point, moves[problem.point])
    return linear.off, wanted


def _step(
    problem: Problem, linear: Linear, chunks: list[Chunk], damping: float
) -> tuple[Matrix, Matrix]:
    """Return poses and points after one damped Gauss-Newton step."""
    steps, moves = _solve(problem, linear, chunks, damping)
    return moved(problem.poses, steps), problem.points + moves


def _solve(
    problem: Problem, linear: Linear, chunks: list[Chunk], damping: float
) -> tuple[Matrix, Matrix]:
    """Compute a damped Gauss-Newton step: (F, 6) for the poses and (P, 3) for the points."""
    by_pose, by_point, off = linear.by_pose, linear.by_point, linear.off
    free = np.flatnonzero(~problem.fixed)
    place = np.full(len(problem.poses), -1)
    place[free] = np.arange(len(free))
    matrix = np.zeros((len(free), 6, len(free), 6))
    right = np.zeros((len(free), 6))
    spans = problem.spans()
    for i, number in enumerate(free):
        slope = by_pose[spans[number]].reshape(-1, 6)
        block = slope.T @ slope
        block[np.arange(6), np.arange(6)] += damping * np.diag(block) + 1e-12
        matrix[i, :, i, :] = block
        right[i] = -slope.T @ off[spans[number]].ravel()

    root = _point_roots(problem, by_point, damping)
    pulls = _pulls(problem, by_point, off)
    drawn = _forward(root, pulls[:, None, :])[:, 0]  # (P, 3)
    for chunk in chunks:
        tilted = _forward(root[problem.point[chunk.rows]], by_point[chunk.rows])  # (n, 2, 3)
        slope = by_pose[chunk.rows]
        mixed = tilted[:, 0, :, None] * slope[:, 0, None, :]
        mixed += tilted[:, 1, :, None] * slope[:, 1, None, :]  # (n, 3, 6)
        wide = np.zeros((len(chunk.points), len(chunk.frames), 3, 6))
        for own in chunk.cameras:  # a camera observes a point once, a frame once per camera
            wide[chunk.row_point[own], chunk.row_frame[own]] += mixed[own]
        flat = wide.transpose(0, 2, 1, 3).reshape(-1, 6 * len(chunk.frames))
        product = (flat.T @ flat).reshape(len(chunk.frames), 6, len(chunk.frames), 6)
        where = place[chunk.frames]
        matrix[where[:, None], :, where[None, :], :] -= product.transpose(0, 2, 1, 3)
        right[where] += (drawn[chunk.points].ravel() @ flat).reshape(-1, 6)

    steps = np.zeros((len(problem.poses), 6))
    if len(free):
        size = 6 * len(free)
        try:
            steps[free] = np.linalg.solve(matrix.reshape(size, size), right.ravel()).reshape(-1, 6)
        except np.linalg.LinAlgError:
            return steps, np.zeros_like(problem.points)
    # Given the step of the poses, each point is solved independently.
    followed = np.zeros_like(off)
    for number in free:
        slope = by_pose[spans[number]].reshape(-1, 6)
        followed[spans[number]] = (slope @ steps[number]).reshape(-1, 2)
    pulls += _pulls(problem, by_point, followed)
    return steps, -_backward(root, _forward(root, pulls[:, None, :])[:, 0])


def _point_roots(problem: Problem, by_point: Matrix, damping: float) -> Matrix:
    """Return Cholesky factors (P, 6) of the damped 3x3 point blocks: l00 l10 l11 l20 l21 l22."""
    up, down = by_point[:, 0].T, by_point[:, 1].T
    pairs = ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 2))
    values = [up[i] * up[j] + down[i] * down[j] for i, j in pairs]
    sums = _sums(problem.point, values, len(problem.points))
    diagonal = sums[:, [0, 2, 5]]
    largest = diagonal.max(axis=1, keepdims=True)
    sums[:, [0, 2, 5]] += damping * diagonal + LOOSE * largest + (largest == 0)
    a, b, c, d, e, f = sums.T
    l00 = np.sqrt(a)
    l10, l20 = b / l00, d / l00
    l11 = np.sqrt(np.maximum(c - l10**2, 1e-12 * c))
    l21 = (e - l20 * l10) / l11
    l22 = np.sqrt(np.maximum(f - l20**2 - l21**2, 1e-12 * f))
    return np.stack([l00, l10, l11, l20, l21, l22], axis=1)


def _forward(root: Matrix, rows: Matrix) -> Matrix:
    """Multiply each of the rows (N, k, 3) by L^-1."""
    l00, l10, l11, l20, l21, l22 = root.T[:, :, None]
    x = rows[:, :, 0] / l00
    y = (rows[:, :, 1] - l10 * x) / l11
    z = (rows[:, :, 2] - l20 * x - l21 * y) / l22
    return np.stack([x, y, z], axis=2)


def _backward(root: Matrix, rows: Matrix) -> Matrix:
    """Multiply the rows (N, 3) by L^-T."""
    l00, l10, l11, l20, l21, l22 = root.T
    z = rows[:, 2] / l22
    y = (rows[:, 1] - l21 * z) / l11
    x = (rows[:, 0] - l10 * y - l20 * z) / l00
    return np.stack([x, y, z], axis=1)


def _pulls(problem: Problem, by_point: Matrix, off: Matrix) -> Matrix:
    """Return the gradient (P, 3) of the cost by the points."""
    values = [by_point[:, 0, i] * off[:, 0] + by_point[:, 1, i] * off[:, 1] for i in range(3)]
    return _sums(problem.point, values, len(problem.points))


def _sums(index: Ints, values: list[Matrix], count: int) -> Matrix:
    """Sum k columns (N,) by index; return (count, k)."""
    return np.stack([np.bincount(index, column, count) for column in values], axis=1)
