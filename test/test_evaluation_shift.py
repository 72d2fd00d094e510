"""The shift test separates points that follow the image from points that sit on a grid."""

from __future__ import annotations

import numpy as np
import pytest

from kp2d_core.evaluation.methods import baseline
from kp2d_core.evaluation.robustness import shift_test
from kp2d_core.features import Features


def grid(image):
    """Keypoints in the middle of every cell of 8 px, whatever the image shows."""
    height, width = image.shape[:2]
    y, x = np.mgrid[0:height:8, 0:width:8] + 3.5
    points = np.stack([x.ravel(), y.ravel()], axis=1).astype(np.float32)
    return Features(points, np.ones(len(points), np.float32), np.ones((len(points), 1)))


def test_a_grid_is_found_out():
    image = np.zeros((240, 320, 3), np.uint8)
    results = {row.shift: row for row in shift_test(grid, [image], size=(160, 120))}
    assert sorted(results) == list(range(9))
    for shift in (0, 8):
        assert results[shift].repeatability == 1
        assert results[shift].localization == results[shift].bias_x == 0
    for shift in (1, 2):  # lagging behind by the whole shift
        assert results[shift].localization == pytest.approx(shift * 2**0.5)
        assert results[shift].bias_x == results[shift].bias_y == pytest.approx(-shift)
    assert results[7].bias_x == pytest.approx(1)  # the next cell has overtaken
    assert results[4].repeatability == 0 and results[4].bias_x is None


def test_sift_follows_the_image(photographs):
    images = [photographs['astronaut'], photographs['coffee']]
    still, *moved = shift_test(baseline('sift'), images, (0, 3, 8))
    assert (still.repeatability, still.localization, still.bias_x) == (1, 0, 0)
    for row in moved:
        assert row.repeatability > 0.85
        assert row.localization < 0.15
        assert abs(row.bias_x) < 0.05 and abs(row.bias_y) < 0.05


def test_bad_arguments():
    with pytest.raises(ValueError, match='at least one image'):
        shift_test(grid, [])
    for shifts in ((), (-1, 0)):
        with pytest.raises(ValueError, match='shifts of 0 px or more'):
            shift_test(grid, [np.zeros((240, 320, 3), np.uint8)], shifts)
