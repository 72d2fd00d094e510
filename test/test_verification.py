"""Epipolar geometry where there is hardly any: a camera at rest, a slow one, a wall."""

import time

import numpy as np
import pytest

from kp2d_core.verification import verify

K = np.array([[500.0, 0, 320], [0, 500, 240], [0, 0, 1]])


def scene(motion: tuple[float, float, float], near: float = 0.3, seed: int = 0):
    """Points far away and some near ones, before and after the camera moved; 10 % are wrong."""
    random = np.random.default_rng(seed)
    depth = np.where(random.random(500) < near, random.uniform(2, 4, 500), 100)
    before = random.uniform((0, 0), (640, 480), (500, 2))
    rays = np.column_stack([before, np.ones(500)]) @ np.linalg.inv(K).T
    moved = (rays * depth[:, None] - motion) @ K.T
    after = moved[:, :2] / moved[:, 2:] + random.normal(0, 0.2, (500, 2))
    wrong = random.random(500) < 0.1
    after[wrong] = random.uniform((0, 0), (640, 480), (wrong.sum(), 2))
    return before.astype(np.float32), after.astype(np.float32), wrong


@pytest.mark.parametrize('method', ['fundamental', 'essential'])
@pytest.mark.parametrize(
    'motion', [(0.0, 0, 0), (0.0, 0, 0.2), (0.1, 0, 0), (0.3, 0.1, 0.1)], ids=str
)
def test_right_pairs_are_kept_and_wrong_ones_are_not(method, motion):
    before, after, wrong = scene(motion)
    inliers, _ = verify(before, after, method, threshold=2.0, intrinsics=K)
    assert inliers[~wrong].mean() > 0.95
    assert inliers[wrong].mean() < 0.2


def test_a_slow_camera_keeps_its_near_points():
    """Most points are far and do not move; the near ones are what odometry needs."""
    before, after, wrong = scene((0.1, 0, 0))
    moved = np.linalg.norm(after - before, axis=1) > 5
    assert 0.2 < (moved & ~wrong).mean() < 0.5
    inliers, _ = verify(before, after, 'fundamental', threshold=2.0)
    assert inliers[moved & ~wrong].mean() > 0.95


@pytest.mark.parametrize('shift', [(1.0, 0.0), (3.0, 0.0), (0.0, 0.0), (0.3, 0.2)])
def test_degenerate_geometry_takes_no_time(shift):
    """A wall that slides by: some estimators search for half a minute."""
    random = np.random.default_rng(1)
    before = np.rint(random.uniform((0, 0), (640, 480), (900, 2)) / 4).astype(np.float32) * 4
    after = before + np.array(shift, np.float32)
    began = time.process_time()
    inliers, _ = verify(before, after, 'fundamental', threshold=2.0)
    assert inliers.mean() > 0.98
    assert time.process_time() - began < 2
