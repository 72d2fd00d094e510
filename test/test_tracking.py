"""Tracks: birth, continuation, loss and return."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from kp2d_core import Features, Tracker

WORLD = np.linalg.qr(np.random.default_rng(0).normal(size=(32, 32)))[0].astype(np.float32)


def frame(*points: int, shift: float = 0.0) -> Features:
    """Features of the given points of a world in which every descriptor is unlike all others."""
    rows = list(points)
    keypoints = np.array([[20 * p + shift, 10.0] for p in rows], np.float32).reshape(-1, 2)
    scores = np.linspace(1, 0.5, len(rows)).astype(np.float32)
    return Features(keypoints, scores, WORLD[rows].reshape(-1, 32), (640, 480))


def tracker(**options) -> Tracker:
    return Tracker(**{'max_distance': 0.7, **options})


def test_birth_and_continuation():
    t = tracker()
    first = t.update(frame(0, 1, 2))
    assert first.ids.tolist() == [0, 1, 2] and first.ages.tolist() == [0, 0, 0]
    assert len(first.matches) == 0
    second = t.update(frame(2, 5, 0))
    assert second.ids.tolist() == [2, 3, 0] and second.ages.tolist() == [1, 0, 1]
    assert sorted(second.matches.indices.tolist()) == [[0, 2], [2, 0]]


def test_a_track_survives_as_many_misses_as_allowed():
    t = tracker(max_missed=2)
    t.update(frame(0, 1))
    t.update(frame(0, 1))
    t.update(frame(1))
    t.update(frame(1))
    back = t.update(frame(1, 0))
    assert back.ids.tolist() == [1, 0] and back.ages.tolist() == [4, 2]
    assert back.matches.indices.tolist() == [[0, 0]]  # point 0 was not in the previous frame


def test_a_track_ends_after_too_many_misses():
    t = tracker(max_missed=1)
    t.update(frame(0, 1))
    t.update(frame(0, 1))
    t.update(frame(1))
    t.update(frame(1))
    assert t.update(frame(1, 0)).ids.tolist() == [1, 2]


def test_tracks_missed_in_different_frames_come_back_together():
    t = tracker(max_missed=2)
    t.update(frame(0, 1, 2))
    t.update(frame(0, 1, 2))
    t.update(frame(1, 2))
    t.update(frame(2))
    back = t.update(frame(0, 1, 2))
    assert back.ids.tolist() == [0, 1, 2] and back.ages.tolist() == [2, 3, 4]


def test_a_track_seen_once_is_not_waited_for():
    t = tracker(max_missed=2)
    t.update(frame(0, 1))
    t.update(frame(1))
    assert t.update(frame(0, 1)).ids.tolist() == [2, 1]


def test_empty_frames():
    t = tracker(max_missed=1)
    assert len(t.update(frame())) == 0
    t.update(frame(4))
    t.update(frame(4))
    assert len(t.update(frame())) == 0
    assert t.update(frame(4)).ids.tolist() == [0]
    t.update(frame())
    t.update(frame())
    assert t.update(frame(4)).ids.tolist() == [1]


def test_reset_forgets_but_never_gives_an_id_twice():
    t = tracker()
    t.update(frame(0, 1))
    t.reset()
    after = t.update(frame(0, 1))
    assert after.ids.tolist() == [2, 3] and after.ages.tolist() == [0, 0]


def test_outliers_do_not_continue_a_track():
    t = tracker(verification='homography', threshold=1.0)
    points = list(range(20))
    t.update(frame(*points))
    moved = frame(*points, shift=5)
    moved.keypoints[7] += [0, 90]
    moved.keypoints[::3, 1] += 40  # a second row, so that the points do not lie on one line
    before = frame(*points)
    before.keypoints[::3, 1] += 40
    t.reset()
    t.update(before)
    tracks = t.update(moved)
    assert not tracks.matches.inliers[tracks.matches.indices[:, 1] == 7].any()
    assert tracks.ages[7] == 0 and tracks.ages[6] == 1


def test_ids_over_a_long_random_stream_are_consistent():
    """Every id belongs to one point of the world for ever, and ages count its sightings."""
    rng = np.random.default_rng(1)
    t = tracker(max_missed=1)
    owner: dict[int, int] = {}
    sightings: dict[int, int] = {}
    for _ in range(200):
        points = rng.permutation(32)[: rng.integers(0, 20)]
        tracks = t.update(frame(*points))
        assert len(set(tracks.ids.tolist())) == len(points)
        for point, track, age in zip(points, tracks.ids, tracks.ages, strict=True):
            assert owner.setdefault(int(track), int(point)) == point
            assert age == sightings.get(int(track), 0)
            sightings[int(track)] = int(age) + 1


def test_a_radius_of_the_user_is_kept_to():
    t = tracker(radius=50.0)
    for shift in (0, 3, 6):
        t.update(frame(*range(10), shift=shift))
    assert (t.update(frame(*range(10), shift=90)).ages == 0).all()


def sideways(step: int) -> Features:
    """A camera that moves sideways: 576 far points move by 1 to 3 px a frame, 24 near ones by 62
    to 83 px."""
    rng = np.random.default_rng(7)
    far, near = rng.uniform([0, 0], [640, 480], (576, 2)), rng.uniform([0, 0], [640, 480], (24, 2))
    speeds = np.concatenate([rng.uniform(1, 3, 576), rng.uniform(62, 83, 24)])
    points = np.concatenate([far, near])
    points[:, 0] = (points[:, 0] + speeds * step) % 1280 - 320
    points += np.random.default_rng(step).normal(0, 0.3, points.shape)
    descriptors = rng.normal(size=(600, 64)).astype(np.float32)
    descriptors += 0.3 * np.random.default_rng([step, 1]).normal(size=(600, 64))
    descriptors /= np.linalg.norm(descriptors, axis=1, keepdims=True)
    scores = np.linspace(1, 0.5, 600)
    return Features(*(a.astype(np.float32) for a in (points, scores, descriptors)), (640, 480))


@pytest.mark.parametrize('verification', ['fundamental', 'none'])
def test_few_near_points_that_move_fast_are_followed_too(verification):
    """They say most about the camera's motion."""
    t = Tracker(verification=verification, threshold=2.0)
    for step in range(6):
        tracks = t.update(sideways(step))
        if step:
            where = sideways(step).keypoints[576:, 0] - sideways(step - 1).keypoints[576:, 0]
            steady = where > 0  # did not leave on one side to come back on the other
            assert (tracks.ids[576:][steady] == np.arange(576, 600)[steady]).mean() > 0.8
            assert (tracks.ids[:576] == np.arange(576)).mean() > 0.9
            inliers = tracks.matches.indices[tracks.matches.inliers]
            assert np.isin(np.flatnonzero(steady) + 576, inliers[:, 1]).mean() > 0.8
            assert len(np.unique(tracks.matches.indices[:, 0])) == len(tracks.matches)
            assert len(np.unique(tracks.matches.indices[:, 1])) == len(tracks.matches)


def test_what_moves_on_its_own_is_reported_but_is_no_inlier():
    t = Tracker(verification='fundamental', threshold=2.0)
    for step in range(4):
        features = sideways(step)
        features.keypoints[560:576, 1] = 40 + 80 * step  # a car that crosses
        tracks = t.update(features)
    crossing = np.isin(tracks.matches.indices[:, 1], np.arange(560, 576))
    assert crossing.sum() > 12 and tracks.matches.inliers[crossing].mean() < 0.2


def test_a_missed_track_is_not_given_to_the_only_point_that_is_left():
    t = Tracker()
    t.update(frame(0, 1))
    t.update(frame(0, 1))
    t.update(frame(1))
    assert t.update(frame(1, 9)).ids.tolist() == [1, 2]  # 9 is not like 0 at all


def test_bad_option():
    with pytest.raises(ValueError, match='max_missed'):
        Tracker(max_missed=-1)


def test_frames_with_their_images_are_refined(photographs):
    """A camera that moves by parts of a pixel, features that are off by more than half a pixel."""
    photograph, random = photographs['astronaut'], np.random.default_rng(0)
    gray = cv2.cvtColor(photograph, cv2.COLOR_RGB2GRAY)
    corners = cv2.goodFeaturesToTrack(gray[60:420, 60:420], 150, 0.02, 8).reshape(-1, 2) + 60
    descriptors = np.linalg.qr(random.normal(size=(200, 200)))[0][: len(corners)]
    steps = np.array([[0, 0], [2.4, -1.3], [5.1, -2.2], [6.6, -4.9]])

    def seen(step):
        moved = np.array([[1, 0, step[0]], [0, 1, step[1]]])
        image = cv2.warpAffine(photograph, moved, (512, 512), flags=cv2.INTER_CUBIC)
        off = random.normal(0, 0.6, corners.shape)
        points = (corners + step + off).astype(np.float32)
        scores = np.ones(len(points), np.float32)
        return Features(points, scores, descriptors.astype(np.float32), (512, 512)), image

    plain, refining = (Tracker(verification='homography') for _ in range(2))
    lasting = {}
    for number, step in enumerate(steps):
        features, image = seen(step)
        assert plain.update(features).refined is None
        tracks = refining.update(features, image)
        if number == 0:
            np.testing.assert_array_equal(tracks.refined.keypoints, features.keypoints)
            start = features.keypoints
            continue
        inliers = tracks.matches.inliers
        assert inliers.mean() > 0.85
        assert (tracks.ages == number).mean() > 0.8
        old = tracks.ages == number
        # Each point follows the place that it was found at first, wherever that was.
        way = tracks.refined.keypoints[old] - start[tracks.ids[old]]
        assert np.median(np.linalg.norm(way - step, axis=1)) < 0.15
        lasting[number] = old.sum()
    assert lasting[3] > 0.8 * len(corners)
    # Without an image there is nothing to refine by; with the next one there is again.
    assert refining.update(seen(steps[3])[0]).refined is None
    assert refining.update(*seen(steps[3])).refined is not None
