"""Bundle adjustment by Levenberg and Marquardt, the points eliminated (Schur's complement).

In NumPy, with the work in a few large products: a window of ten frames and a thousand points takes
some milliseconds a step, where handing the problem over to another library would take as long.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kp2d_core.odometry.geometry import Bools, Ints, Matrix, moved, skew

CHUNK = 512  # points that are eliminated at once
NEAREST = 1e-6  # depth below which a point counts as behind the camera


@dataclass
class Problem:
    """Frames that see points. Observations are rows of equal length."""

    poses: Matrix  # (F, 4, 4) from the world
    points: Matrix  # (P, 3)
    frame: Ints  # (N,) of each observation
    point: Ints  # (N,)
    seen: Matrix  # (N, 2) x / z, y / z
    weight: Matrix  # (N,) 1 / its standard deviation, in the same units
    fixed: Bools  # (F,) frames that stay
    camera: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # (N,), empty: all 0
    rig: Matrix = field(default_factory=lambda: np.eye(4)[None])  # (C, 4, 4) from the frame


@dataclass(frozen=True)
class Linear:
    """Observations at the present poses and points."""

    residuals: Matrix  # (N, 2), in standard deviations
    by_pose: Matrix  # (N, 2, 6)
    by_point: Matrix  # (N, 2, 3)


def residuals(problem: Problem, poses: Matrix, points: Matrix) -> Matrix:
    """(N, 2) in standard deviations; infinite for points behind a camera."""
    _, eye = _in_cameras(problem, poses, points)
    with np.errstate(divide='ignore', invalid='ignore'):
        off = (eye[:, :2] / eye[:, 2:] - problem.seen) * problem.weight[:, None]
    off[~(eye[:, 2] > NEAREST)] = np.inf
    return np.asarray(off)


def _in_cameras(problem: Problem, poses: Matrix, points: Matrix) -> tuple[Matrix, Matrix]:
    """(N, 3) each: the observed points in the frame, and in the camera of the rig."""
    pose = poses[problem.frame]
    body = np.einsum('nij,nj->ni', pose[:, :3, :3], points[problem.point]) + pose[:, :3, 3]
    if not len(problem.camera):
        return body, body
    mount = problem.rig[problem.camera]
    return body, np.einsum('nij,nj->ni', mount[:, :3, :3], body) + mount[:, :3, 3]


def linearize(problem: Problem, poses: Matrix, points: Matrix) -> Linear:
    body, eye = _in_cameras(problem, poses, points)
    behind = ~(eye[:, 2] > NEAREST)
    depth = np.where(behind, 1.0, eye[:, 2])
    flat = eye[:, :2] / depth[:, None]
    off = (flat - problem.seen) * problem.weight[:, None]
    scale = np.where(behind, 0.0, problem.weight / depth)
    slope = np.zeros((len(eye), 2, 3))
    slope[:, 0, 0] = slope[:, 1, 1] = scale
    slope[:, :, 2] = -flat * scale[:, None]
    if len(problem.camera):
        slope = slope @ problem.rig[problem.camera, :3, :3]
    by_pose = np.concatenate([slope, -slope @ skew(body)], axis=2)
    by_point = slope @ poses[problem.frame, :3, :3]
    off[behind] = 0
    return Linear(off, by_pose, by_point)


def robust_weights(off: Matrix, threshold: float) -> Matrix:
    """Cauchy's, of residuals (N, 2): 1 for none, falling fast beyond the threshold."""
    squared = (off**2).sum(axis=1)
    return np.asarray(1 / (1 + np.minimum(squared, 1e12) / threshold**2))


def robust_cost(off: Matrix, threshold: float) -> float:
    """What `robust_weights` minimise; a point behind the camera costs as much as one far off."""
    squared = np.minimum((off**2).sum(axis=1), 1e6)
    return float(threshold**2 * np.log1p(squared / threshold**2).sum())


def adjust(problem: Problem, steps: int = 10, threshold: float = 2.0) -> float:
    """Improve poses and points in place; the cost that is left.

    threshold  residuals, in standard deviations, from which on an observation counts less
    """
    free = np.flatnonzero(~problem.fixed)
    if not len(problem.frame):
        return 0.0
    chunks = _chunks(problem)
    damping = 1e-4
    cost = robust_cost(residuals(problem, problem.poses, problem.points), threshold)
    for _ in range(steps):
        linear = linearize(problem, problem.poses, problem.points)
        weights = np.sqrt(robust_weights(linear.residuals, threshold))[:, None]
        linear = Linear(
            linear.residuals * weights,
            linear.by_pose * weights[:, :, None],
            linear.by_point * weights[:, :, None],
        )
        accepted = False
        for _ in range(4):
            poses, points = _step(problem, linear, chunks, free, damping)
            new_cost = robust_cost(residuals(problem, poses, points), threshold)
            if new_cost < cost:
                accepted = True
                break
            damping *= 10
        if not accepted:
            break
        problem.poses, problem.points = poses, points
        gain, cost = cost - new_cost, new_cost
        damping = max(damping / 10, 1e-9)
        if gain < 1e-4 * cost:
            break
    return cost


def _chunks(problem: Problem) -> list[tuple[Ints, Ints, Ints]]:
    """Observations in groups of points: their rows, the points, and the free frames they touch.

    Points that are neighbours in the list were made at one time, and are seen by few frames.
    """
    order = np.argsort(problem.point, kind='stable')
    present = np.unique(problem.point)
    chunks = []
    for begin in range(0, len(present), CHUNK):
        points = present[begin : begin + CHUNK]
        low = np.searchsorted(problem.point[order], points[0], 'left')
        high = np.searchsorted(problem.point[order], points[-1], 'right')
        rows = order[low:high]
        frames = np.unique(problem.frame[rows])
        chunks.append((rows, points, frames[~problem.fixed[frames]]))
    return chunks


def _step(
    problem: Problem,
    linear: Linear,
    chunks: list[tuple[Ints, Ints, Ints]],
    free: Ints,
    damping: float,
) -> tuple[Matrix, Matrix]:
    """Poses and points after one damped step of Gauss and Newton."""
    frames, points = len(problem.poses), len(problem.points)
    by_pose, by_point, off = linear.by_pose, linear.by_point, linear.residuals
    blocks = _sums(problem.frame, by_pose.transpose(0, 2, 1) @ by_pose, frames)
    slopes = _sums(problem.frame, np.einsum('nij,ni->nj', by_pose, off), frames)
    corners = _sums(problem.point, by_point.transpose(0, 2, 1) @ by_point, points)
    pulls = _sums(problem.point, np.einsum('nij,ni->nj', by_point, off), points)

    diagonal = np.einsum('pii->pi', corners)
    # Along the ray of a point that is far away there is next to nothing to hold it.
    corners = corners + _diagonals(damping * diagonal + 1e-6 * diagonal.max(axis=1, keepdims=True))
    empty = diagonal.sum(axis=1) == 0
    corners[empty] = np.eye(3)
    inverses = np.linalg.inv(corners)
    roots = np.linalg.cholesky((inverses + inverses.transpose(0, 2, 1)) / 2)

    place = np.full(frames, -1)
    place[free] = np.arange(len(free))
    size = 6 * len(free)
    matrix = np.zeros((len(free), 6, len(free), 6))
    right = -slopes[free]
    diagonal = np.einsum('fii->fi', blocks[free])
    index = np.arange(len(free))
    matrix[index, :, index, :] = blocks[free] + _diagonals(damping * diagonal + 1e-12)

    mixed = (by_pose.transpose(0, 2, 1) @ by_point) @ roots[problem.point]  # (N, 6, 3)
    drawn = np.einsum('pji,pj->pi', roots, pulls)  # (P, 3)
    for rows, members, touched in chunks:
        if not len(touched):
            continue
        rows = rows[~problem.fixed[problem.frame[rows]]]
        column = np.searchsorted(members, problem.point[rows])
        row = np.searchsorted(touched, problem.frame[rows])
        wide = np.zeros((len(touched), len(members), 6, 3))
        if len(problem.camera):  # a frame may see a point twice
            np.add.at(wide, (row, column), mixed[rows])
        else:
            wide[row, column] = mixed[rows]
        flat = wide.transpose(0, 2, 1, 3).reshape(6 * len(touched), 3 * len(members))
        product = (flat @ flat.T).reshape(len(touched), 6, len(touched), 6)
        where = place[touched]
        matrix[where[:, None], :, where[None, :], :] -= product.transpose(0, 2, 1, 3)
        right[where] += (flat @ drawn[members].ravel()).reshape(-1, 6)

    steps = np.zeros((frames, 6))
    if size:
        try:
            steps[free] = np.linalg.solve(matrix.reshape(size, size), right.ravel()).reshape(-1, 6)
        except np.linalg.LinAlgError:
            return problem.poses, problem.points
    # The points follow from the poses, each for itself.
    change = np.einsum(
        'nij,ni->nj', by_point, np.einsum('nij,nj->ni', by_pose, steps[problem.frame])
    )
    pulled = pulls + _sums(problem.point, change, points)
    move = -np.einsum('pij,pj->pi', inverses, pulled)
    move[empty] = 0
    return moved(problem.poses, steps), problem.points + move


def _sums(index: Ints, values: Matrix, count: int) -> Matrix:
    """(count, ...) sums of rows of values by index."""
    flat = values.reshape(len(values), -1)
    columns = [np.bincount(index, flat[:, i], count) for i in range(flat.shape[1])]
    return np.asarray(np.stack(columns, axis=1).reshape(count, *values.shape[1:]))


def _diagonals(values: Matrix) -> Matrix:
    """(N, k) -> (N, k, k)."""
    return np.asarray(values[:, :, None] * np.eye(values.shape[1]))
