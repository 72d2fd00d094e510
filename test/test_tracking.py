"""Tracks: birth, continuation, loss and return."""

from __future__ import annotations

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


def test_points_that_suddenly_move_far_are_followed():
    t = tracker()
    for shift in (0, 3, 6):
        t.update(frame(*range(10), shift=shift))
    far = t.update(frame(*range(10), shift=300))
    assert far.ids.tolist() == list(range(10)) and (far.ages == 3).all()


def test_a_twin_far_off_is_not_taken_for_a_point_that_moves_slowly():
    t = tracker()
    for shift in (0, 3):
        t.update(frame(*range(8), shift=shift))
    now = frame(*range(8), 0, shift=6)  # the last one is point 0's twin, and even more like it
    now.keypoints[8] = [400, 300]
    now.descriptors[0] = 0.9 * WORLD[0] + np.sqrt(1 - 0.9**2) * WORLD[20]
    tracks = t.update(now)
    assert tracks.ids.tolist() == [*range(8), 8]


def test_a_radius_of_the_user_is_kept_to():
    t = tracker(radius=50.0)
    for shift in (0, 3, 6):
        t.update(frame(*range(10), shift=shift))
    assert (t.update(frame(*range(10), shift=90)).ages == 0).all()


def test_bad_option():
    with pytest.raises(ValueError, match='max_missed'):
        Tracker(max_missed=-1)
