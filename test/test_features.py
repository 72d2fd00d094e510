"""Keeping some of the features: thresholds, masks, suppression, limits."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from kp2d_core import Features
from kp2d_core.features import count_votes, inside, join_features, select, suppress_neighbours


def make(points, scores=None, size=(0, 0)):
    points = np.array(points, np.float32).reshape(-1, 2)
    if scores is None:
        scores = np.linspace(1, 0.1, len(points))
    descriptors = np.eye(len(points), 8, dtype=np.float32)
    return Features(points, np.array(scores, np.float32), descriptors, size)


def test_subsets_keep_rows_together():
    features = make([[1, 2], [3, 4], [5, 6]], size=(10, 10))
    subset = features[np.array([2, 0])]
    assert subset.keypoints.tolist() == [[5, 6], [1, 2]]
    assert subset.scores.tolist() == pytest.approx([0.1, 1])
    assert subset.descriptors.argmax(axis=1).tolist() == [2, 0]
    assert subset.image_size == (10, 10)
    assert len(features[:0]) == 0


def test_features_are_told_in_one_line():
    features = make([[1, 2], [3, 4]], [0.5, 0.25])
    text = repr(features)
    assert text.count('\n') == 0 and '2 keypoints' in text and '0.500 to 0.250' in text
    assert '0 keypoints' in str(features[:0])


def test_names_of_lightglue():
    data = make([[1, 2], [3, 4]], [0.5, 0.25], size=(64, 48)).to_dict()
    assert {'keypoints', 'keypoint_scores', 'descriptors', 'image_size'} <= set(data)
    assert data['keypoint_scores'].tolist() == [0.5, 0.25]
    assert data['image_size'].tolist() == [64, 48]
    assert data['scales'].tolist() == [1, 1]


def test_joined_features_keep_every_field():
    first = make([[1, 2], [3, 4]], [0.5, 0.25])
    second = replace(first[:1], scales=np.array([0.5], np.float32))
    joined = join_features([first, second])
    assert joined.scales.tolist() == [1, 1, 0.5] and len(joined) == 3
    assert joined[joined.scales < 1].scores.tolist() == [0.5]


def test_threshold_is_strict():
    features = make([[1, 1], [2, 2], [3, 3]], [0.9, 0.5, 0.0])
    assert len(select(features)) == 2  # a score of 0 means: nothing here
    assert len(select(features, score_threshold=0.5)) == 1


def test_limit_keeps_the_best():
    assert select(make([[1, 1], [2, 2], [3, 3]]), max_keypoints=2).keypoints.tolist() == [
        [1, 1],
        [2, 2],
    ]


def test_points_outside_the_image_go():
    points = np.array([[-0.5, 0], [-0.6, 0], [9.4, 7.4], [9.5, 0], [0, 7.5]], np.float32)
    assert inside(points, (10, 8)).tolist() == [True, False, True, False, False]
    assert len(select(make(points, size=(10, 8)))) == 2


def test_mask_is_looked_up_at_the_nearest_pixel():
    mask = np.zeros((8, 10), np.uint8)
    mask[2, 5] = 255
    features = make([[5.4, 2.4], [5.6, 2.0], [4.6, 1.6], [2, 5]], size=(10, 8))
    assert (
        select(features, mask=mask).keypoints.tolist()
        == make([[5.4, 2.4], [4.6, 1.6]]).keypoints.tolist()
    )
    assert len(select(features, mask=mask.astype(bool))) == 2


def greedy(points, radius):
    """The definition, one by one."""
    stays = []
    for i, point in enumerate(points):
        if all(np.hypot(*(point - points[j])) >= radius for j in stays):
            stays.append(i)
    return stays


@pytest.mark.parametrize('radius', [0.5, 4, 15, 1000])
@pytest.mark.parametrize('seed', range(5))
def test_suppression_is_the_greedy_one(radius, seed):
    points = np.random.default_rng(seed).uniform(0, 120, (300, 2)).astype(np.float32)
    assert np.flatnonzero(suppress_neighbours(points, radius)).tolist() == greedy(points, radius)


def test_suppression_over_a_wide_radius_takes_little_memory():
    """Of 30,000 points within 256 px of each other, all pairs would be 7 GB."""
    points = np.random.default_rng(0).uniform(0, 300, (30_000, 2)).astype(np.float32)
    tracemalloc.start()
    stays = suppress_neighbours(points, 256)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.flatnonzero(stays).tolist() == greedy(points, 256)
    assert peak < 300e6


def test_suppression_of_coincident_points_and_of_none():
    same = np.zeros((50, 2), np.float32)
    assert suppress_neighbours(same, 3).tolist() == [True] + [False] * 49
    assert suppress_neighbours(same[:0], 3).tolist() == []
    chain = np.array([[0, 0], [3, 0], [6, 0], [9, 0]], np.float32)
    assert suppress_neighbours(chain, 4).tolist() == [True, False, True, False]


def test_cells_that_agree_outvote_a_lone_cell():
    """Two of .6 give 1 - .4 * .4 = .84, at the mean of their points; .8 alone stays .8."""
    features = make([[50, 50], [10, 10], [11, 10]], scores=[0.8, 0.6, 0.6])
    voted = count_votes(features)
    assert voted.scores == pytest.approx([0.84, 0.8], abs=1e-6)
    assert voted.keypoints == pytest.approx(np.array([[10.5, 10], [50, 50]]))
    assert voted.descriptors.argmax(axis=1).tolist() == [1, 0]


def test_better_votes_weigh_more():
    features = make([[10, 10], [11, 10]], scores=[0.9, 0.3])
    assert count_votes(features).keypoints == pytest.approx(np.array([[10.25, 10]]))


def test_certain_cells_and_cells_that_know_nothing_can_vote():
    features = make([[10, 10], [10, 10], [30, 30], [30, 31]], scores=[1.0, 1.0, 0.0, 0.0])
    voted = count_votes(features)
    assert np.isfinite(voted.keypoints).all()
    assert voted.scores == pytest.approx([1, 0], abs=1e-5)
    assert len(count_votes(features[:0])) == 0
