"""Calibrated scores and sigmas agree with the truth."""

import numpy as np
import pytest
import torch
from models import untrained

from kp2d_core import KeypointDetector
from kp2d_core.architecture import Architecture
from kp2d_core.runtimes.torch import TorchRuntime
from kp2d_core.training.score_calibration import calibrate_scores, fit_logistic, logit
from kp2d_core.views.pairs import ViewPair


def test_the_fit_finds_slope_and_offset():
    random = np.random.default_rng(0)
    values = random.normal(0, 2, 20_000)
    outcomes = random.random(20_000) < 1 / (1 + np.exp(-(0.5 * values - 1)))
    slope, offset = fit_logistic(values, outcomes)
    assert slope == pytest.approx(0.5, abs=0.03) and offset == pytest.approx(-1, abs=0.05)


@pytest.mark.parametrize('outcome', [False, True])
def test_outcomes_that_are_all_alike_give_finite_numbers(outcome):
    slope, offset = fit_logistic(np.linspace(-1, 1, 50), np.full(50, outcome))
    assert np.isfinite([slope, offset]).all() and slope > 0
    assert (1 / (1 + np.exp(-offset)) > 0.5) == outcome


def test_logits_of_certainty_are_finite():
    assert np.isfinite(logit(np.array([0.0, 0.5, 1.0]))).all()


def test_what_is_always_found_scores_high(photographs):
    """In two equal images every point is found again exactly: scores rise, sigmas fall."""
    checkpoint = untrained(Architecture('tiny', 8, 16, cell=4, context=True, saliency=4))
    image = photographs['astronaut'][100:260, 60:284]
    pair = ViewPair(image, image, np.eye(3))
    calibrated = calibrate_scores(checkpoint, [pair])
    before, after = (
        KeypointDetector(TorchRuntime(each, threads=1)).detect(
            image, scales=(1,), max_keypoints=400, score_threshold=0
        )
        for each in (checkpoint, calibrated)
    )
    assert np.median(after.scores) > 0.9 > np.median(before.scores)
    assert after.sigma.mean() < 0.2 * before.sigma.mean()
    for name, value in checkpoint.weights.items():
        assert name.startswith('convDb') or value is calibrated.weights[name]


def test_a_network_of_the_paper_stays_as_it_is():
    checkpoint = untrained(Architecture('plain', 8, 16))
    torch.manual_seed(0)
    assert calibrate_scores(checkpoint, []) is checkpoint
