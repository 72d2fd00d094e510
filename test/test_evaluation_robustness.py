"""Robustness curves: the pairs have the stated homography."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from test_evaluation_shift import grid

from kp2d_core.evaluation.methods import baseline
from kp2d_core.evaluation.robustness import CHANGES, robustness
from kp2d_core.geometry import warp_points

SIZE = (160, 120)


@pytest.fixture(scope='module')
def photograph(photographs):
    return photographs['astronaut']


@pytest.fixture(scope='module')
def curves(photograph):
    return robustness(baseline('sift'), [photograph], size=SIZE)


def scores(curve):
    return {point.level: point.mscore for point in curve}


def test_levels_are_those_announced(curves):
    assert set(curves) == {'rotation', 'scale', 'brightness', 'blur', 'noise'}
    for change in CHANGES:
        assert tuple(point.level for point in curves[change.name]) == change.levels
    assert curves['rotation'][-1].level == 180 and curves['scale'][-1].level == 4


def test_sift_turns_with_the_image(curves):
    rotation = scores(curves['rotation'])
    assert rotation[0] == 1
    assert min(rotation[90], rotation[180]) > 0.5


def test_curves_fall(curves):
    for name, mildest, worst in (('scale', 1, 4), ('blur', 0, 4), ('noise', 0, 40)):
        curve = scores(curves[name])
        assert curve[mildest] > 0.8 > curve[worst]
    brightness = scores(curves['brightness'])
    assert brightness[1] > 0.8 > brightness[3]


@pytest.mark.parametrize('change', CHANGES, ids=lambda change: change.name)
def test_the_homography_is_true(change, photograph):
    """A bright dot of the photograph is where the homography says, in both views."""
    dot = photograph.copy()
    dot[:] = 40
    dot[250:291, 270:311] = 200
    reference, to_reference = change.reference(dot, SIZE)
    view, to_view = change.apply(dot, change.levels[2], SIZE)
    expected = warp_points(centroid(reference)[None], to_view @ np.linalg.inv(to_reference))[0]
    assert centroid(view) == pytest.approx(expected, abs=0.25)


def centroid(view):
    """The centre of the pixels brighter than the background, around the brightest one."""
    weights = view.mean(axis=2) - np.median(view)
    y, x = np.mgrid[: view.shape[0], : view.shape[1]]
    top = np.unravel_index(cv2.blur(weights, (9, 9)).argmax(), weights.shape)
    weights[np.hypot(x - top[1], y - top[0]) > 25] = 0
    return np.array([(weights * x).sum(), (weights * y).sum()]) / weights.sum()


def test_a_grid_gains_nothing_from_views_that_stay(photograph):
    curves = robustness(grid, [photograph], size=SIZE, top_k=2000)
    for name in ('brightness', 'blur', 'noise'):
        assert max(point.repeatability for point in curves[name]) == 0


def test_bad_arguments():
    with pytest.raises(ValueError, match='at least one image'):
        robustness(grid, [])
