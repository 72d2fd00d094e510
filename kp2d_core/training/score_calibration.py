"""Calibrate scores to probabilities and sigmas to errors, on held-out pairs.

Training uses small, strongly warped views. On whole images and the points that `detect` keeps, its
scores have the right order but are too low or too high. Two numbers correct the scores of places
(`Architecture.score_line`), and one corrects the sigmas: it goes into the bias of the last layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kp2d_core.checkpoint import Checkpoint
from kp2d_core.detector import KeypointDetector
from kp2d_core.evaluation.metrics import CORRECT, match_errors, mutual_matches
from kp2d_core.evaluation.reliability import EXPECTED_MEDIAN, found_again, in_sigmas
from kp2d_core.images import size_of
from kp2d_core.runtimes.torch import TorchRuntime
from kp2d_core.views.pairs import ViewPair

MOST_POINTS = 1000  # per image, the default of the node
LEAST = 200  # observations; with fewer, nothing is changed
LOG_SIGMA = 3  # output of convDb


def calibrate_scores(
    checkpoint: Checkpoint, pairs: Sequence[ViewPair], device: str = 'cpu'
) -> Checkpoint:
    """Return the network with calibrated scores and sigmas."""
    if not checkpoint.architecture.has_sigma:
        return checkpoint
    plain = replace(checkpoint.architecture, score_slope=1.0, score_offset=0.0)
    checkpoint = replace(checkpoint, architecture=plain)
    detector = KeypointDetector(TorchRuntime(checkpoint, device=device))
    scores, found, ratios = [], [], []
    for pair in pairs:
        first, second = (
            detector.detect(image, scales=(1,), max_keypoints=MOST_POINTS, score_threshold=0.0)
            for image in (pair.first, pair.second)
        )
        truth, size = pair.first_to_second, size_of(pair.first)
        observed = found_again(first, second, truth, size)
        scores.append(observed[0])
        found.append(observed[1])
        ours, theirs = mutual_matches(first, second, truth, size, MOST_POINTS)
        errors = match_errors(ours.keypoints, theirs.keypoints, truth)
        right = errors < CORRECT
        ratios.append(in_sigmas(errors[right], ours[right], theirs[right], truth))
    architecture, weights = checkpoint.architecture, dict(checkpoint.weights)
    all_scores, all_ratios = np.concatenate(scores), np.concatenate(ratios)
    if len(all_scores) >= LEAST:
        slope, offset = fit_logistic(logit(all_scores), np.concatenate(found))
        architecture = replace(architecture, score_slope=slope, score_offset=offset)
    if len(all_ratios) >= LEAST:
        bias = weights['convDb.bias'].copy()
        bias[LOG_SIGMA] += np.log(max(float(np.median(all_ratios)), 1e-3) / EXPECTED_MEDIAN)
        weights['convDb.bias'] = bias
    return replace(checkpoint, architecture=architecture, weights=weights)


def logit(shares: NDArray[np.floating]) -> NDArray[np.float64]:
    clipped = np.clip(np.asarray(shares, np.float64), 1e-6, 1 - 1e-6)
    return np.asarray(np.log(clipped / (1 - clipped)))


def fit_logistic(
    values: NDArray[np.float64], outcomes: NDArray[np.bool_], rounds: int = 30
) -> tuple[float, float]:
    """Fit `sigmoid(slope * value + offset)` to the outcomes; return slope and offset.

    Newton's method on the likelihood. Half an outcome of each kind at the mean value keeps it
    finite if all outcomes are equal. The slope stays positive, so the order of scores does not
    change.
    """
    x = np.append(values, [values.mean()] * 2)
    y = np.append(outcomes.astype(np.float64), [0.0, 1.0])
    count = np.append(np.ones(len(values)), [0.5, 0.5])
    rows = np.column_stack([x, np.ones(len(x))])
    found = np.array([1.0, 0.0])
    for _ in range(rounds):
        share = 1 / (1 + np.exp(-np.clip(rows @ found, -30, 30)))
        gradient = rows.T @ (count * (share - y))
        curvature = (rows * (count * share * (1 - share))[:, None]).T @ rows + 1e-6 * np.eye(2)
        step = np.linalg.solve(curvature, gradient)
        found = found - step
        found[0] = np.clip(found[0], 0.05, 20)
        if np.abs(step).max() < 1e-8:
            break
    return float(found[0]), float(found[1])
