"""The paper's metrics on small cases computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from kp2d_core.evaluation.metrics import (
    area_under_curve,
    correct_matches,
    detection,
    fit_homographies,
    in_view,
    matching_score,
    mutual_matches,
    share_of_copies,
)
from kp2d_core.features import Features
from kp2d_core.geometry import warp_points

SIZE = (100, 80)
IDENTITY = np.eye(3)


def moved_by(x, y):
    return np.array([[1.0, 0, x], [0, 1, y], [0, 0, 1]])


def features(points, descriptors=None):
    """In the order given, scores descending; without descriptors each point has its own."""
    points = np.array(points, np.float32).reshape(-1, 2)
    if descriptors is None:
        descriptors = np.eye(16)[: len(points)]
    scores = np.linspace(1, 0.5, len(points))
    return Features(points, scores.astype(np.float32), np.asarray(descriptors, np.float32), SIZE)


def random_features(seed, count=60):
    random = np.random.default_rng(seed)
    descriptors = random.normal(size=(count, 8))
    descriptors /= np.linalg.norm(descriptors, axis=1, keepdims=True)
    return features(random.uniform((0, 0), SIZE, (count, 2)), descriptors)


NOTHING = features([], np.empty((0, 16)))


def test_warp_divides_and_keeps_what_is_behind_away():
    doubling = np.diag([2.0, 2, 1])
    assert warp_points(np.array([[3, 4]]), doubling).tolist() == [[6, 8]]
    # Behind the camera from x = 10 on; divided all the same, (20, 10) would be at (80, 30).
    horizon = np.array([[1.0, 0, -100], [0, -1, -20], [-0.1, 0, 1]])
    warped = warp_points(np.array([[120.0, 10], [20, 10], [0, 10]]), horizon)
    assert in_view(warped, SIZE).tolist() == [False, False, False]
    assert np.isinf(warped[:2]).all() and warped[2].tolist() == [-100, -30]


def test_view_is_half_open():
    points = np.array([[0, 0], [99.9, 79.9], [100, 0], [0, 80], [-0.1, 5]])
    assert in_view(points, SIZE).tolist() == [True, True, False, False, False]


def test_identical_points():
    same = features([[10, 10], [50, 40], [90, 70]])
    assert detection(same, same, IDENTITY, SIZE, 300) == (1.0, 0.0, False)
    assert matching_score(same, same, IDENTITY, SIZE, 300) == 1.0


def test_repeatability_and_localization_by_hand():
    first = features([[10, 10], [50, 40], [80, 60]])
    second = features([[11, 10], [50, 43], [20, 70]])
    # From both sides: 1 px (found again), 3 px (found again, the limit counts), too far.
    result = detection(first, second, IDENTITY, SIZE, 300)
    assert result.repeatability == pytest.approx(4 / 6)
    assert result.localization == pytest.approx((1 + 3 + 1 + 3) / 4)


def test_two_points_may_share_a_neighbour():
    first, second = features([[10, 10], [12, 10]]), features([[11, 10]])
    assert detection(first, second, IDENTITY, SIZE, 300) == (1.0, 1.0, False)


def test_a_known_shift():
    first = features([[10, 10], [50, 40]])
    second = features([[15, 13], [55, 43.5]])
    result = detection(first, second, moved_by(5, 3), SIZE, 300)
    assert result.repeatability == 1
    assert result.localization == pytest.approx(0.25)
    assert detection(first, second, IDENTITY, SIZE, 300).repeatability == 0


def test_points_outside_the_other_view_do_not_count_in_repeatability():
    # The content moves 50 px to the right: x >= 50 of the first goes, x < 50 of the second is new.
    first = features([[80, 10], [10, 10]])
    second = features([[20, 30], [60, 10]])
    assert detection(first, second, moved_by(50, 0), SIZE, 300).repeatability == 1


def test_the_best_are_taken_after_what_is_out_of_view():
    first = features([[80, 10], [90, 10], [10, 10]])  # the two with the best scores are gone
    second = features([[60, 10]])
    assert detection(first, second, moved_by(50, 0), SIZE, 1).repeatability == 1


def test_matching_score_takes_the_best_before_what_is_out_of_view():
    descriptors = np.eye(16)
    first = features([[80, 10], [10, 10]], descriptors[[0, 1]])
    second = features([[60, 10]], descriptors[[1]])
    truth = moved_by(50, 0)
    # With 1 point, (80, 10) is matched with (60, 10), which was at (10, 10): wrong. Back, it is
    # the query (60, 10) whose match would now be out of view, and does not count.
    assert matching_score(first, second, truth, SIZE, 1) == 0
    # With 2, forward 1 of 2 is right, back 1 of 1.
    assert matching_score(first, second, truth, SIZE, 2) == pytest.approx((1 / 2 + 1) / 2)


def test_matches_out_of_view_do_not_count_in_the_matching_score():
    descriptors = np.eye(16)
    first = features([[80, 10], [10, 10]], descriptors[[0, 1]])
    second = features([[20, 30], [60, 10]], descriptors[[0, 1]])
    # (20, 30) was at (-30, 30) and (80, 10) will be at (130, 10): that match does not count.
    assert matching_score(first, second, moved_by(50, 0), SIZE, 300) == 1


def test_matching_score_by_hand():
    descriptors = np.eye(16)
    first = features([[10, 10], [50, 40], [80, 60]], descriptors[[0, 1, 2]])
    second = features([[10, 10], [50, 43], [80, 61]], descriptors[[0, 1, 2]])
    # 0 px and 1 px are right, 3 px is not: here the limit does not count.
    assert matching_score(first, second, IDENTITY, SIZE, 300) == pytest.approx(2 / 3)
    swapped = features([[10, 10], [50, 43], [80, 61]], descriptors[[1, 0, 2]])
    assert matching_score(first, swapped, IDENTITY, SIZE, 300) == pytest.approx(1 / 3)


def test_fewer_points_than_asked_for():
    few = features([[10, 10], [50, 40]])
    assert detection(few, few, IDENTITY, SIZE, 1000) == (1.0, 0.0, False)
    assert matching_score(few, few, IDENTITY, SIZE, 1000) == 1


@pytest.mark.parametrize('pair', [(NOTHING, NOTHING), (NOTHING, 1), (1, NOTHING)])
def test_no_points_are_a_failure_and_not_a_number_out_of_range(pair):
    first, second = (features([[10, 10]]) if each == 1 else each for each in pair)
    assert detection(first, second, IDENTITY, SIZE, 300) == (0.0, 3.0, True)
    assert matching_score(first, second, IDENTITY, SIZE, 300) == 0
    matched = mutual_matches(first, second, IDENTITY, SIZE, 300)
    assert len(matched[0]) == len(matched[1]) == 0
    points = (each.keypoints for each in matched)
    fit = fit_homographies(*points, IDENTITY, SIZE, 3)
    assert np.isinf(fit.corner_errors).all() and not fit.inlier_ratios.any()


def test_no_point_found_again_is_a_failure():
    result = detection(features([[10, 10]]), features([[60, 60]]), IDENTITY, SIZE, 300)
    assert result == (0.0, 3.0, True)


def test_mutual_matches_are_mutual_and_in_view_of_both():
    a, b, c = np.eye(16)[:3]
    nearly_a = 0.9 * a + 0.1
    first = features([[10, 10], [20, 20], [90, 70]], [a, nearly_a, c])
    second = features([[40, 10], [70, 70], [60, 50]], [a, b, c])
    # (20, 20) is nearest to a, which prefers the other a, and (90, 70) is moved out of view:
    # b and c are left without a partner.
    truth = moved_by(30, 0)
    there = mutual_matches(first, second, truth, SIZE, 300)
    back = mutual_matches(second, first, np.linalg.inv(truth), SIZE, 300)
    assert [each.keypoints.tolist() for each in there] == [[[10, 10]], [[40, 10]]]
    assert [each.keypoints.tolist() for each in back] == [[[40, 10]], [[10, 10]]]


def test_copies_are_points_close_to_a_better_one():
    # (11, 10) and (10, 11.9) are copies of the first, (11.5, 11.5) of both of them, not of it.
    points = features([[10, 10], [50, 40], [11, 10], [10, 11.9], [11.5, 11.5], [52, 40]])
    assert share_of_copies(points, 300) == pytest.approx(3 / 6)
    assert share_of_copies(points, 3) == pytest.approx(1 / 3)
    assert share_of_copies(points, 2) == share_of_copies(NOTHING, 300) == 0


def test_symmetric_metrics_do_not_care_which_image_is_first():
    first, second = random_features(1), random_features(2)
    turn = np.array([[0.8, -0.6, 40], [0.6, 0.8, -20], [0, 0, 1]])
    tilt = np.array([[1.1, 0.1, -5], [0.05, 0.9, 3], [0.001, 0.002, 1]])
    there = detection(first, second, turn, SIZE, 40)  # a rotation keeps distances
    back = detection(second, first, np.linalg.inv(turn), SIZE, 40)
    assert there == pytest.approx(back)
    assert 0 < there.repeatability < 1
    for truth in (turn, tilt):
        # Descriptors of the same points: some matches are right.
        seen = Features(warp_points(first.keypoints, truth).astype(np.float32), first.scores,
                        first.descriptors, SIZE)  # fmt: skip
        there = matching_score(first, seen, truth, SIZE, 40)
        assert there == matching_score(seen, first, np.linalg.inv(truth), SIZE, 40)
        assert there > 0.5


def test_homography_of_exact_matches():
    truth = np.array([[1.1, 0.1, -5], [0.05, 0.9, 3], [0.001, 0.002, 1]])
    points = np.random.default_rng(0).uniform((0, 0), SIZE, (50, 2))
    fit = fit_homographies(points, warp_points(points, truth), truth, SIZE, 2)
    assert (fit.corner_errors < 1e-3).all()
    assert (fit.inlier_ratios == 1).all()
    assert correct_matches(points, warp_points(points, truth), truth).all()


def test_corner_error_is_the_mean_distance_of_the_corners():
    points = np.random.default_rng(0).uniform((0, 0), SIZE, (50, 2))
    fit = fit_homographies(points, points + np.array([3, 4]), IDENTITY, SIZE)
    assert fit.corner_errors[0] == pytest.approx(5, abs=1e-3)


@pytest.mark.parametrize('count', [0, 1, 3])
def test_too_few_matches_for_a_homography(count):
    points = np.random.default_rng(0).uniform((0, 0), SIZE, (count, 2))
    assert np.isinf(fit_homographies(points, points, IDENTITY, SIZE, 2).corner_errors).all()


def test_matches_without_a_homography():
    line = np.stack([np.arange(10.0), np.arange(10.0)], axis=1)
    errors = fit_homographies(line, line, IDENTITY, SIZE).corner_errors
    assert not np.isnan(errors).any()


def test_ransac_runs_differ_and_repeat():
    random = np.random.default_rng(0)
    first = random.uniform((0, 0), SIZE, (60, 2))
    second = first + random.normal(0, 1.5, first.shape)
    second[:40] = random.uniform((0, 0), SIZE, (40, 2))
    errors = fit_homographies(first, second, IDENTITY, SIZE, 5).corner_errors
    assert len(set(errors)) > 1
    assert errors.tolist() == fit_homographies(first, second, IDENTITY, SIZE, 5)[0].tolist()


def test_area_under_the_curve_by_hand():
    # Of errors 0, 1 and none, up to 2 px: 1/3 of the pairs from 0 on, 2/3 from 1 px on.
    assert area_under_curve(np.array([0, 1, np.inf]), 2) == pytest.approx((1 / 3 + 2 / 3) / 2)
    assert area_under_curve(np.array([0.0, 0]), 1) == 1
    assert area_under_curve(np.array([np.inf]), 5) == 0
