"""Drawings: where the colours are."""

from __future__ import annotations

import numpy as np
import pytest

from kp2d_core import Features, Matches
from kp2d_core.visualize import INLIER, OUTLIER, draw_keypoints, draw_matches, rank_colours


def make(points):
    points = np.array(points, np.float32)
    return Features(
        points, np.ones(len(points), np.float32), np.eye(len(points), dtype=np.float32)
    )


def test_keypoints_are_circled_and_the_image_is_left_alone():
    image = np.zeros((64, 64), np.uint8)
    drawn = draw_keypoints(image, make([[20, 30]]))
    assert drawn.shape == (64, 64, 3) and image.max() == 0
    y, x = np.nonzero(drawn.max(axis=2) > 60)
    assert (x.mean(), y.mean()) == pytest.approx((20, 30), abs=0.3)
    assert np.hypot(x - 20, y - 30).max() <= 4.5


def test_matches_are_green_for_inliers_and_red_for_outliers():
    image = np.zeros((64, 80, 3), np.uint8)
    points = make([[10, 10], [10, 50]])
    matches = Matches(np.array([[0, 0], [1, 1]]), np.zeros(2, np.float32), np.array([True, False]))
    drawn = draw_matches(image, image, points, points, matches)
    assert drawn.shape == (64, 160, 3)
    assert drawn[10, 50] == pytest.approx(INLIER, abs=30)
    assert drawn[50, 50] == pytest.approx(OUTLIER, abs=30)


def test_colours_go_from_warm_to_cold():
    colours = rank_colours(10)
    assert len(colours) == 10 and rank_colours(0) == []
    assert colours[0][0] > colours[0][2] and colours[-1][2] > colours[-1][0]
