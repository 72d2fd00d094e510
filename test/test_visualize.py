"""Drawings: colours at the right places."""

from __future__ import annotations

import numpy as np
import pytest

from kp2d_core import Features, Matches
from kp2d_core.visualize import (
    INLIER,
    OPACITY,
    OUTLIER,
    draw_keypoints,
    draw_matches,
    rank_colours,
)


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
    drawn = draw_matches(image, image, points, points, matches, judge=True)
    assert drawn.shape == (64, 160, 3)
    assert drawn[10, 50] == pytest.approx(OPACITY * np.array(INLIER), abs=30)
    assert drawn[50, 50] == pytest.approx(OPACITY * np.array(OUTLIER), abs=30)


def test_matches_have_the_colour_of_their_place_and_outliers_are_left_out():
    image = np.zeros((64, 80, 3), np.uint8)
    points = make([[4, 10], [76, 50], [40, 30]])
    indices = np.repeat(np.arange(3)[:, None], 2, axis=1)
    matches = Matches(indices, np.zeros(3, np.float32), np.array([True, True, False]))
    drawn = draw_matches(image, image, points, points, matches).astype(int)
    left, right = drawn[10, 50], drawn[50, 120]
    assert left[0] > left[2] + 50 and right[2] > right[0] + 50  # red is on the left, blue right
    assert drawn[30, 50:110].max() == 0
    assert draw_matches(image, image, points, points, matches, 1)[50].max() == 0


def test_lines_let_the_image_through():
    image = np.full((64, 80, 3), 255, np.uint8)
    points = make([[10, 10]])
    matches = Matches(np.array([[0, 0]]), np.zeros(1, np.float32), np.array([True]))
    drawn = draw_matches(image, image, points, points, matches)
    assert drawn[10, 50].min() >= 255 * (1 - OPACITY) - 1 and drawn[10, 50].min() < 230


def test_colours_go_from_warm_to_cold():
    colours = rank_colours(10)
    assert len(colours) == 10 and rank_colours(0) == []
    assert colours[0][0] > colours[0][2] and colours[-1][2] > colours[-1][0]
