"""Matching and verification, on cases worked out by hand and on a known geometry."""

from __future__ import annotations

import threading
import time
import tracemalloc
from dataclasses import replace

import cv2
import numpy as np
import pytest

from kp2d_core import Features, match, matching
from kp2d_core.matching import BAND, distance_factors, with_help
from kp2d_core.verification import ENOUGH, distances_to, verify


def unit(rows):
    rows = np.array(rows, np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def make(descriptors, points=None):
    descriptors = unit(descriptors)
    if points is None:
        points = np.zeros((len(descriptors), 2))
    scores = np.linspace(1, 0.5, len(descriptors)).astype(np.float32)
    return Features(np.array(points, np.float32), scores, descriptors)


def random_features(count, seed, dimension=64):
    rng = np.random.default_rng(seed)
    return make(rng.normal(size=(count, dimension)), rng.uniform(0, 640, (count, 2)))


def test_mutual_nearest_neighbours_by_hand():
    first = make([[1, 0, 0], [0, 1, 0], [0.9, 0.1, 0]])
    second = make([[0, 1, 0.1], [1, 0.01, 0]])
    matches = match(first, second)
    assert matches.indices.tolist() == [[0, 1], [1, 0]]  # row 2 prefers 1, which prefers row 0
    assert matches.inliers.all() and matches.model is None
    assert match(first, second, mutual=False).indices.tolist() == [[0, 1], [1, 0], [2, 1]]


def test_distances_are_euclidean():
    first, second = random_features(40, 0), random_features(30, 1)
    matches = match(first, second)
    for (i, j), distance in zip(matches.indices, matches.distances, strict=True):
        expected = np.linalg.norm(first.descriptors[i] - second.descriptors[j])
        assert distance == pytest.approx(expected, abs=1e-4)


def test_against_opencvs_cross_check():
    first, second = random_features(200, 2), random_features(220, 3)
    ours = {tuple(pair) for pair in match(first, second).indices.tolist()}
    matcher = cv2.BFMatcher(cv2.NORM_L2, crossCheck=True)
    theirs = {
        (m.queryIdx, m.trainIdx) for m in matcher.match(first.descriptors, second.descriptors)
    }
    assert ours == theirs and len(ours) > 50


def test_ratio_and_distance_limits():
    first = make([[1, 0, 0], [0, 0, 1]])
    second = make([[1, 0.1, 0], [1, 0.12, 0], [0, 0.2, 1]])
    assert match(first, second).indices.tolist() == [[0, 0], [1, 2]]
    assert match(first, second, max_ratio=0.8).indices.tolist() == [[1, 2]]
    assert match(first, second, max_distance=0.15).indices.tolist() == [[0, 0]]
    assert match(first, second[:1], max_ratio=0.8).indices.tolist() == [[0, 0]]  # no second best


def test_spatial_gate():
    first = make([[1, 0], [0, 1]], [[10, 10], [50, 50]])
    second = make([[1, 0], [1, 0.2], [0, 1]], [[200, 10], [14, 13], [53, 54]])
    assert match(first, second).indices.tolist() == [[0, 0], [1, 2]]
    assert match(first, second, radius=6).indices.tolist() == [[0, 1], [1, 2]]
    moved = np.array([[199, 10], [90, 90]], np.float32)
    assert match(first, second, radius=6, predicted=moved).indices.tolist() == [[0, 0]]
    assert len(match(first, second, radius=0.5)) == 0


@pytest.mark.parametrize('mutual', [True, False])
def test_a_radius_gives_what_comparing_all_and_then_looking_at_places_gives(mutual):
    """Though it compares band by band."""
    first, second = random_features(5 * BAND + 7, 4), random_features(4 * BAND, 5)
    similarity = first.descriptors @ second.descriptors.T
    apart = np.linalg.norm(first.keypoints[:, None] - second.keypoints[None], axis=2)
    similarity[apart > 90] = -2
    best = similarity.argmax(axis=1)
    ordered = np.sort(np.sqrt(2 - 2 * similarity), axis=1)
    expected = {
        (i, int(j)) for i, j in enumerate(best)
        if similarity[i, j] > -2 and ordered[i, 0] < 0.95 * ordered[i, 1]
        and (not mutual or similarity[:, j].argmax() == i)
    }  # fmt: skip
    found = match(first, second, radius=90, max_ratio=0.95, mutual=mutual)
    assert {(int(i), int(j)) for i, j in found.indices} == expected and len(expected) > 50
    assert (np.diff(found.indices[:, 0]) > 0).all()


def test_copies_are_matched_once():
    first = make([[1, 0, 0]] * 4 + [[0, 1, 0]])
    matches = match(first, make([[1, 0, 0], [0, 1, 0]]))
    assert matches.indices.tolist() == [[0, 0], [4, 1]]


def test_distortion_is_taken_off_for_the_verification_alone():
    first, second = two_views(0)
    descriptors = np.random.default_rng(1).normal(size=(200, 32))

    def distort(points):
        return (points - 320) * (1 + 3e-7 * ((points - 320) ** 2).sum(1, keepdims=True)) + 320

    def undistort(points):
        back = points
        for _ in range(20):
            back = (points - 320) / (1 + 3e-7 * ((back - 320) ** 2).sum(1, keepdims=True)) + 320
        return back

    views = make(descriptors, distort(first)), make(descriptors, distort(second))
    options = {'verification': 'essential', 'intrinsics': CAMERA, 'threshold': 1.0}
    assert match(*views, **options, undistort=undistort).inliers[:160].mean() > 0.95
    near = match(*views, radius=1.0, predicted=distort(second), **options, undistort=undistort)
    assert len(near) == 200  # pixels as they are


def test_squared_distances():
    rng = np.random.default_rng(0)
    a, b = rng.uniform(0, 2000, (2, 50, 2)).astype(np.float32)
    expected = ((a[:, None].astype(np.float64) - b[None]) ** 2).sum(axis=2)
    left, right = distance_factors(a, b)
    assert np.sqrt(left @ right.T) == pytest.approx(np.sqrt(expected), abs=0.02)


def test_nothing_to_match():
    some, none = random_features(5, 0), random_features(5, 0)[:0]
    for pair in ((some, none), (none, some), (none, none)):
        matches = match(*pair, verification='homography')
        assert len(matches) == 0 and matches.indices.shape == (0, 2)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'max_ratio': 0}, 'max_ratio'),
        ({'max_distance': -1}, 'max_distance'),
        ({'radius': float('nan')}, 'radius'),
        ({'predicted': np.zeros((5, 2))}, 'need a radius'),
        ({'predicted': np.zeros((4, 2)), 'radius': 3}, r'\(5, 2\)'),
        ({'verification': 'affine'}, "got 'affine'"),
        ({'verification': 'essential'}, 'intrinsics'),
        ({'verification': 'homography', 'threshold': 0}, 'threshold'),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        match(random_features(5, 0), random_features(5, 1), **options)


def test_descriptors_of_different_length():
    with pytest.raises(ValueError, match='64 and 32'):
        match(random_features(5, 0), random_features(5, 1, dimension=32))


CAMERA = np.array([[500.0, 0, 320], [0, 500, 240], [0, 0, 1]])


def test_bytes_match_as_the_vectors_that_they_stand_for():
    """As they come in messages: 127 times the component. Their products overflowed."""
    first, second = random_features(80, 0), random_features(90, 1)
    wanted = match(first, second, max_ratio=0.95)
    coarse = [
        replace(each, descriptors=np.rint(each.descriptors * 127).astype(np.int8))
        for each in (first, second)
    ]
    found = match(*coarse, max_ratio=0.95)
    pairs, others = ({tuple(pair) for pair in each.indices} for each in (wanted, found))
    assert len(pairs & others) > 0.9 * len(pairs) > 10
    assert np.abs(match(coarse[0], coarse[0]).distances).max() < 1e-3
    doubles = [
        replace(each, descriptors=each.descriptors.astype(np.float64)) for each in (first, second)
    ]
    assert np.array_equal(match(*doubles).indices, match(first, second).indices)


def test_bits_match_by_hamming_distance(photographs):
    orb = cv2.ORB_create(200)
    gray = cv2.cvtColor(photographs['coffee'], cv2.COLOR_RGB2GRAY)
    sets = [
        orb.detectAndCompute(image, None)[1] for image in (gray, cv2.GaussianBlur(gray, (5, 5), 1))
    ]
    features = [Features(np.zeros((len(d), 2), np.float32), np.ones(len(d)), d) for d in sets]
    ours = match(*features, mutual=False).indices
    distances = (np.unpackbits(sets[0], axis=1)[:, None] != np.unpackbits(sets[1], axis=1)).sum(2)
    chosen = distances[ours[:, 0], ours[:, 1]]
    assert np.array_equal(chosen, distances.min(axis=1))


def test_tens_of_thousands_of_points_are_matched_in_blocks():
    """All products at once took 6 GB of 40,000 points; 64 MB at a time give the same."""
    first, second = random_features(9000, 0, 16), random_features(5000, 1, 16)
    tracemalloc.start()
    matches = match(first, second, max_ratio=0.99)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 150e6  # 180 MB is the matrix of all products
    similarity = first.descriptors @ second.descriptors.T
    nearest = similarity.argmax(axis=1)
    mutual = similarity.argmax(axis=0)[nearest] == np.arange(9000)
    distance = np.sqrt(2 - 2 * np.sort(similarity, axis=1)[:, -2:])
    clear = distance[:, 1] < 0.99 * distance[:, 0]
    wanted = np.flatnonzero(mutual & clear)
    assert len(np.setxor1d(matches.indices[:, 0], wanted)) < 3  # but for rounding
    assert np.array_equal(matches.indices[:, 1], nearest[matches.indices[:, 0]])


def test_a_position_that_cannot_be_predicted_costs_only_its_own_match():
    first = random_features(300, 0)
    predicted = first.keypoints.copy()
    predicted[[5, 70]] = [[np.nan, 3], [np.inf, np.nan]]
    rows = match(first, first, radius=10, predicted=predicted).indices[:, 0]
    assert set(range(300)) - set(rows.tolist()) == {5, 70}


def test_wild_descriptors_are_named():
    good = random_features(5, 0)
    bad = replace(good, descriptors=np.full((5, 64), np.nan, np.float32))
    with pytest.raises(ValueError, match='descriptors hold NaN'):
        match(good, bad)
    with pytest.raises(ValueError, match='5 keypoints need as many rows of descriptors'):
        match(good, replace(good, descriptors=good.descriptors[:3]))
    with pytest.raises(ValueError, match='as many rows of descriptors'):
        match(good, replace(good, descriptors=good.descriptors[:, 0]))


def two_views(seed, outliers=40, planar=False):
    """Points of a scene seen by two cameras, with the last `outliers` pairs scrambled."""
    rng = np.random.default_rng(seed)
    scene = rng.uniform([-2, -1.5, 4], [2, 1.5, 4 if planar else 9], (200, 3))
    rotation, _ = cv2.Rodrigues(np.array([0.03, -0.08, 0.05]))
    moved = scene @ rotation.T + np.array([0.5, 0.1, 0.2])
    views = []
    for points in (scene, moved):
        projected = points @ CAMERA.T
        views.append(projected[:, :2] / projected[:, 2:] + rng.normal(0, 0.2, (200, 2)))
    views[1][-outliers:] = rng.uniform([0, 0], [640, 480], (outliers, 2))
    return views[0].astype(np.float32), views[1].astype(np.float32)


@pytest.mark.parametrize('method', ['homography', 'fundamental', 'essential'])
@pytest.mark.parametrize('seed', range(3))
def test_verification_finds_the_outliers(method, seed):
    first, second = two_views(seed, planar=method == 'homography')
    inliers, model = verify(first, second, method, threshold=2.0, intrinsics=CAMERA)
    assert model is not None and model.shape == (3, 3)
    assert inliers[:160].mean() > 0.95
    assert inliers[160:].mean() < 0.25  # by chance some lie near their epipolar line


@pytest.mark.parametrize('method', ['homography', 'fundamental', 'essential'])
def test_of_many_pairs_some_are_enough_to_judge_all(method):
    views = [two_views(seed, planar=method == 'homography') for seed in (4, 5, 6, 7)]
    first, second = (np.concatenate([view[side] for view in views]) for side in (0, 1))
    assert len(first) == 800 > 2 * ENOUGH
    inliers, model = verify(first, second, method, threshold=2.0, intrinsics=CAMERA)
    right = np.tile(np.arange(200) < 160, 4)
    assert inliers[right].mean() > 0.95 and inliers[~right].mean() < 0.25
    assert verify(first[:200], second[:200], method, intrinsics=CAMERA)[1] is not None
    for sign in (1, -1):  # a matrix and its negative are one geometry
        off = distances_to(sign * model, method, first[right], second[right], CAMERA)
        assert np.median(off) < 0.6  # noise of 0.2 px in both


def test_verification_with_too_few_or_degenerate_points():
    points = np.zeros((20, 2), np.float32)
    for method in ('homography', 'fundamental', 'essential'):
        inliers, model = verify(points[:3], points[:3] + 9, method, intrinsics=CAMERA)
        assert model is None and not inliers.any()
        inliers, model = verify(points[:0], points[:0], method, intrinsics=CAMERA)
        assert model is None and len(inliers) == 0
        inliers, model = verify(points, points, method, intrinsics=CAMERA)
        assert len(inliers) == 20


@pytest.mark.parametrize('method', ['homography', 'fundamental', 'essential'])
def test_points_without_a_place_are_outliers(method):
    first, second = two_views(0, planar=method == 'homography')
    first[5], second[7] = np.nan, np.inf
    inliers, model = verify(first, second, method, threshold=2.0, intrinsics=CAMERA)
    assert model is not None and not inliers[[5, 7]].any() and inliers[:160].mean() > 0.9


def test_match_reports_inliers_of_the_geometry():
    first_points, second_points = two_views(0, planar=True)
    descriptors = np.random.default_rng(1).normal(size=(200, 32))
    first, second = make(descriptors, first_points), make(descriptors, second_points)
    matches = match(first, second, verification='homography', threshold=2.0)
    assert len(matches) == 200
    assert matches.inliers[:160].mean() > 0.95 and matches.inliers[160:].mean() < 0.1


@pytest.mark.parametrize('method', ['fundamental', 'essential'])
def test_a_camera_at_rest_keeps_what_did_not_move(method):
    first, _ = two_views(0)
    noise = np.random.default_rng(5).normal(0, 0.3, first.shape)
    second = (first + noise).astype(np.float32)
    second[:30] += 60
    inliers, model = verify(first, second, method, threshold=2.0, intrinsics=CAMERA)
    assert model is None
    assert not inliers[:30].any() and inliers[30:].mean() > 0.95


def test_a_stain_on_the_lens_is_no_inlier_of_a_moving_camera():
    first, second = two_views(1, outliers=20)
    second[-20:] = first[-20:]
    inliers, _ = verify(first, second, 'fundamental', threshold=1.0)
    assert inliers[:180].mean() > 0.9 and inliers[-20:].mean() < 0.5


def test_two_threads_share_the_parts_of_a_product():
    parts = [slice(start, start + 1) for start in range(6)]
    done = []

    def work(part: slice) -> None:
        time.sleep(0.01)  # as a product, without the interpreter
        done.append((part.start, threading.current_thread().name))

    with_help(work, parts)
    assert sorted(start for start, _ in done) == [*range(6)]
    assert len({name for _, name in done}) == 2


def test_a_helper_that_has_not_begun_is_not_waited_for():
    go_on, done = threading.Event(), []
    busy = matching._helper.submit(go_on.wait, 10)
    with_help(done.append, [slice(0, 1), slice(1, 2)])
    assert done == [slice(0, 1), slice(1, 2)] and not busy.done()
    go_on.set()


def test_an_error_of_the_helper_is_heard():
    def work(part: slice) -> None:
        time.sleep(0.01)
        if threading.current_thread().name.startswith('matching'):
            raise ValueError('broken')

    with pytest.raises(ValueError, match='broken'):
        with_help(work, [slice(start, start + 1) for start in range(6)])
