"""Scores as probabilities and sigmas as expected errors, on data with known ground truth."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from kp2d_core.evaluation.plots import plot_study
from kp2d_core.evaluation.protocol import Evaluation, Pair, evaluate_pair, look
from kp2d_core.evaluation.reliability import (
    EXPECTED_MEDIAN,
    add,
    count,
    in_sigmas,
    local_scale,
    reliability,
)
from kp2d_core.evaluation.study import Study, to_json
from kp2d_core.evaluation.tables import format_study
from kp2d_core.features import Features
from kp2d_core.geometry import shift_matrix, warp_points

SIZE = (320, 240)
IMAGE = np.zeros((240, 320, 3), np.uint8)
TILT = np.array([[1.4, 0.1, -25], [0.05, 1.3, -12], [0.0008, 0.0005, 1]])


def features(points, scores):
    points = np.asarray(points, np.float32).reshape(-1, 2)
    descriptors = np.eye(len(points), 64, dtype=np.float32)
    return Features(points, np.asarray(scores, np.float32), descriptors, SIZE)


def test_honest_scores_lie_on_the_line():
    random = np.random.default_rng(0)
    scores = random.uniform(0, 1, 200_000)
    known = count(scores, random.uniform(0, 1, len(scores)) < scores)
    assert known.calibration_error() < 0.01
    assert known.brier() == pytest.approx(1 / 6, abs=0.003)  # the mean of s (1 - s)
    for share, centre in zip(known.found_shares(), np.arange(0.05, 1, 0.1), strict=True):
        assert share == pytest.approx(centre, abs=0.02)


def test_saturated_scores_do_not():
    found = np.random.default_rng(0).uniform(0, 1, 10_000) < 0.4
    known = count(np.full(10_000, 0.999), found)
    assert known.calibration_error() == pytest.approx(0.6, abs=0.02)
    assert known.brier() == pytest.approx(0.6, abs=0.02)
    assert known.found_shares()[:9] == [None] * 9
    assert sum(known.counts) == 10_000


def test_pairs_add_up():
    random = np.random.default_rng(0)
    scores, found = random.uniform(0, 1, 90), random.uniform(0, 1, 90) < 0.5
    parts = [count(scores[part], found[part]) for part in (slice(0, 30), slice(30, 90))]
    whole = count(scores, found)
    assert add(parts).counts == whole.counts and add(parts).found == whole.found
    assert add(parts).brier() == pytest.approx(whole.brier())
    assert add([]) is None and add([parts[0], None]) is None


def test_scores_that_are_no_shares_are_left_alone():
    assert count(np.array([0.5, 12.0]), np.array([True, False])) is None
    assert count(np.array([-0.5]), np.array([True])) is None


def test_found_again_by_hand():
    # All is moved by 50 px: (300, 50) goes out of view and (20, 80) comes into it.
    first = features([[10, 10], [100, 100], [300, 50]], [0.95, 0.55, 0.15])
    second = features([[61.4, 10], [150, 101.6], [20, 80]], [0.85, 0.45, 0.05])
    known = reliability(first, second, shift_matrix(50, 0), SIZE)
    assert known.counts == (0, 0, 0, 0, 1, 1, 0, 0, 1, 1)
    assert known.found == (0, 0, 0, 0, 0, 0, 0, 0, 1, 1)
    assert known.squares == pytest.approx(0.05**2 + 0.55**2 + 0.15**2 + 0.45**2, abs=1e-6)
    wider = reliability(first, second, shift_matrix(50, 0), SIZE, distance=1.7)
    assert sum(wider.found) == 4


def test_the_distance_is_in_the_pixels_of_the_point():
    first, second = features([[50, 50]], [0.5]), features([[104, 100]], [0.7])
    known = reliability(first, second, np.diag([2.0, 2, 1]), SIZE, distance=3)
    assert known.found[5] == 1 and known.found[7] == 0  # 2 px in the first image, 4 in the second


def noisy_pair(truth, times=1.0, count=60):
    """Points with errors of their sigma; the stated sigma is `times` the true one."""
    random = np.random.default_rng(0)
    points = random.uniform((60, 50), (250, 190), (count, 2))
    sigmas = random.uniform(0.1, 0.5, (2, count))
    first = points + random.normal(0, 1, points.shape) * sigmas[0][:, None]
    second = warp_points(points, truth) + random.normal(0, 1, points.shape) * sigmas[1][:, None]
    descriptors = np.eye(count, dtype=np.float32)
    scores = np.linspace(0.9, 0.1, count).astype(np.float32)
    return [
        Features(p.astype(np.float32), scores, descriptors, SIZE, sigma=times * sigma)
        for p, sigma in zip((first, second), sigmas, strict=True)
    ]


@pytest.mark.parametrize('truth', [shift_matrix(9, -4), TILT])
def test_errors_over_honest_sigmas_are_those_of_a_gaussian(truth):
    first, second = noisy_pair(truth, count=4000)
    errors = np.linalg.norm(warp_points(first.keypoints, truth) - second.keypoints, axis=1)
    ratios = in_sigmas(errors, first, second, truth)
    assert np.median(ratios) == pytest.approx(EXPECTED_MEDIAN, rel=0.05)
    assert (ratios < 2).mean() == pytest.approx(1 - np.exp(-2), abs=0.03)
    modest = [replace(each, sigma=each.sigma * 2) for each in (first, second)]
    assert np.median(in_sigmas(errors, *modest, truth)) == pytest.approx(EXPECTED_MEDIAN / 2, 0.05)


def test_the_local_scale_is_that_of_small_steps():
    points = np.random.default_rng(0).uniform((0, 0), SIZE, (20, 2))
    step = 1e-4
    corners = [warp_points(points + np.array(d) * step, TILT) for d in ([0, 0], [1, 0], [0, 1])]
    right, down = corners[1] - corners[0], corners[2] - corners[0]
    area = np.abs(right[:, 0] * down[:, 1] - right[:, 1] * down[:, 0]) / step**2
    assert local_scale(points, TILT) == pytest.approx(np.sqrt(area), rel=1e-4)


def test_sigmas_reach_the_figures_the_table_and_the_plots():
    views = [look(IMAGE, each, 300, nms_radius=0) for each in noisy_pair(TILT)]
    result = evaluate_pair(Pair(*views, TILT, 'v_made'), 300)
    assert len(result.in_sigmas) == len(result.errors) > 50
    evaluation = Evaluation('made', SIZE, 300, 1, [result])
    study = Study('made', SIZE, 300, 1, methods={'made': ''}, evaluations={'made': evaluation},
                  reliability={'made': evaluation.reliability()})  # fmt: skip
    written = json.loads(json.dumps(to_json(study), allow_nan=False))['methods']['made']
    assert written['sigma']['median'] == pytest.approx(np.median(result.in_sigmas))
    assert written['sigma']['expected_median'] == pytest.approx(1.1774, abs=1e-4)
    assert written['reliability']['calibration_error'] >= 0
    printed = format_study(study)
    assert f'{np.median(result.in_sigmas):.3f}' in printed and '1.177' in printed
    titles = list(plot_study(study))
    assert 'Errors of correct matches divided by their sigmas' in titles
    assert 'Points found again within 1.5 px' in titles


def test_without_sigmas_there_is_nothing_to_divide_by():
    plain = features([[50, 50]], [0.5])
    assert len(in_sigmas(np.array([1.0]), plain, plain, np.eye(3))) == 0
