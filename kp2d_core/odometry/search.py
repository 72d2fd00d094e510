"""Search map points in a frame, and match two frames for new points."""

from __future__ import annotations

import numpy as np

from kp2d_core.features import Float
from kp2d_core.matching import STEEP, Gate, Neighbours, find_neighbours
from kp2d_core.odometry.frames import Frame, Map, predicted
from kp2d_core.odometry.geometry import Ints, Matrix, epipolar_matrix
from kp2d_core.odometry.settings import Settings

Pairs = tuple[Ints, Ints]  # two rows of indices that belong together


def match_all(first: Float, second: Float, settings: Settings) -> Pairs:
    """Mutual nearest descriptors (N, D) and (M, D), wherever they lie."""
    if not len(first) or not len(second):
        return _none()
    found = find_neighbours(first, second, runner_up=settings.max_ratio is not None)
    return _good(found, settings.max_distance, settings.max_ratio)


def match_near(
    first: Float, expected: Matrix, second: Float, seen: Matrix, radius: float, settings: Settings
) -> Pairs:
    """Mutual nearest descriptors among those that lie within a radius of where they should.

    Few are, so the ratio that a method needs where it compares all is too strict here.
    """
    if not len(first) or not len(second):
        return _none()
    gate = Gate(expected.astype(np.float32), seen.astype(np.float32), radius)
    ratio = settings.max_ratio and min(settings.max_ratio + 0.1, 0.95)
    found = find_neighbours(first, second, gate, runner_up=ratio is not None)
    return _good(found, settings.max_distance, ratio)


def match_epipolar(
    first: tuple[Float, Matrix, Matrix], second: tuple[Float, Matrix, Matrix],
    threshold: float, settings: Settings,
) -> Pairs:  # fmt: skip
    """Mutual nearest descriptors among those that two cameras can see as one point.

    Each side is descriptors, x / z and y / z, and the camera (4, 4, from the world).
    """
    if not len(first[0]) or not len(second[0]):
        return _none()
    essential = epipolar_matrix(first[2], second[2])
    a, b = (np.column_stack([side[1], np.ones(len(side[1]))]) for side in (first, second))
    across, back = a @ essential.T, b @ essential
    off = (across @ b.T).astype(np.float32)
    slopes = (across[:, :2] ** 2).sum(axis=1)[:, None] + (back[:, :2] ** 2).sum(axis=1)[None]
    room = threshold**2 - off**2 / np.maximum(slopes, 1e-12).astype(np.float32)
    similarity = first[0] @ second[0].T
    np.minimum(similarity, STEEP * room + 1, out=similarity)
    nearest = similarity.argmax(axis=1)
    best = similarity[np.arange(len(nearest)), nearest]
    found = Neighbours(nearest, best, np.full_like(best, -np.inf), similarity.max(axis=0))
    return _good(found, settings.max_distance, None)


def _good(found: Neighbours, max_distance: float, max_ratio: float | None) -> Pairs:
    keep = (found.best >= found.best_of_second[found.nearest]) & (
        found.best >= 1 - max_distance**2 / 2
    )
    if max_ratio is not None:
        nearest, next_one = (
            np.sqrt(np.maximum(2 - 2 * similarity, 0))
            for similarity in (found.best, found.runner_up)
        )
        keep &= nearest < max_ratio * next_one
    rows = np.flatnonzero(keep)
    columns, first = np.unique(found.nearest[rows], return_index=True)
    return rows[first], columns


def _none() -> Pairs:
    return np.empty(0, np.int64), np.empty(0, np.int64)


def find_points(
    world: Map, frame: Frame, points: Ints, pose: Matrix, radius: float, settings: Settings
) -> Pairs:
    """(rows of the frame, points of the map) that may be one, by where they should be seen.

    radius  px around there
    """
    rows, numbers = [], []
    focal = world.rig.focal
    for camera in range(len(world.rig.cameras)):
        flat, visible = predicted(world.rig, camera, pose, world.positions[points])
        candidates = points[visible]
        own = np.flatnonzero(frame.camera == camera)
        i, j = match_near(
            world.descriptors[candidates], flat[visible] * focal,
            frame.features.descriptors[own], frame.seen[own] * focal, radius, settings,
        )  # fmt: skip
        rows.append(own[j])
        numbers.append(candidates[i])
    return np.concatenate(rows), np.concatenate(numbers)


def should_see(world: Map, points: Ints, pose: Matrix) -> Ints:
    """Those of the points that the first camera should see."""
    _, visible = predicted(world.rig, 0, pose, world.positions[points])
    return np.asarray(points[visible])
