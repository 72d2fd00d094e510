"""Refined matches, on views of photographs with known homographies."""

from __future__ import annotations

import re

import cv2
import numpy as np
import pytest

from kp2d_core import Features, Matches, refine_matches
from kp2d_core.cli import main
from kp2d_core.geometry import scale_matrix, warp_points
from kp2d_core.refinement import local_frames, refined_points
from kp2d_core.views.worlds import photographs, room, view_camera

SIZE = (480, 360)
MILD = np.array([[0.97, 0.06, 8], [-0.05, 0.95, 14], [2e-5, 4e-5, 1]])
TILTED = np.array([[0.72, -0.35, 110], [0.38, 0.80, -20], [3e-4, 2e-4, 1]])
# Turned by 40 degrees.
TURNED = np.array([[0.766, -0.643, 170], [0.643, 0.766, -110], [0, 0, 1.0]])
ZOOMED_OUT = scale_matrix(0.4, 0.4)


@pytest.fixture(scope='module')
def photograph(photographs):
    return np.asarray(cv2.resize(photographs['astronaut'], SIZE, interpolation=cv2.INTER_AREA))


def view_of(photograph, truth):
    """Render a view like a camera: average pixels where it is smaller."""
    scale = np.sqrt(abs(np.linalg.det(truth[:2, :2])))
    if scale < 1:
        photograph = cv2.GaussianBlur(photograph, (0, 0), 0.5 / scale)
    return np.asarray(cv2.warpPerspective(photograph, truth, SIZE, flags=cv2.INTER_CUBIC))


def corners_of(image, count=300):
    gray = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY) if image.ndim == 3 else image
    return cv2.goodFeaturesToTrack(gray, count, 0.01, 6).reshape(-1, 2).astype(np.float64)


def features(points):
    points = np.asarray(points, np.float32)
    return Features(points, np.ones(len(points), np.float32), np.eye(len(points), 1), SIZE)


def row_by_row(count):
    rows = np.arange(count)
    distances = np.zeros(count, np.float32)
    return Matches(np.stack([rows, rows], axis=1), distances, np.ones(count, bool))


def noisy(photograph, truth, noise=0.8, wrong=0.0, seed=0):
    """Corners and their positions in the view with noise; a share of them are wrong."""
    random = np.random.default_rng(seed)
    points = corners_of(photograph)
    there = warp_points(points, truth)
    seen = ((there > 12) & (there < np.array(SIZE) - 12)).all(axis=1)
    seen &= ((points > 12) & (points < np.array(SIZE) - 12)).all(axis=1)
    points, there = points[seen], there[seen]
    found = there + random.normal(0, noise, there.shape)
    bad = random.uniform(size=len(there)) < wrong
    found[bad] = random.uniform((20, 20), np.array(SIZE) - 20, (bad.sum(), 2))
    return points, found, there, bad


@pytest.mark.parametrize(
    ('truth', 'within', 'aligned'),
    [(MILD, 0.1, 0.9), (TURNED, 0.12, 0.8), (TILTED, 0.2, 0.7), (ZOOMED_OUT, 0.15, 0.5)],
    ids=['mild', 'turned', 'tilted', 'zoomed out'],
)
@pytest.mark.parametrize('wrong', [0, 0.35])
def test_a_noisy_match_becomes_exact(photograph, truth, within, aligned, wrong):
    points, found, there, bad = noisy(photograph, truth, wrong=wrong)
    view = view_of(photograph, truth)
    count = len(points)
    refined = refine_matches(
        photograph, view, features(points), features(found), row_by_row(count)
    )
    good = refined.aligned & ~bad
    before = np.linalg.norm(found - there, axis=1)
    after = np.linalg.norm(refined.points - there, axis=1)
    assert good.sum() >= aligned * (~bad).sum() - 0.25 * wrong * count
    assert np.median(after[good]) < within < 0.25 * np.median(before[good])
    assert np.percentile(after[good], 90) < 3 * within
    if wrong:
        assert (refined.aligned & bad).sum() <= 0.05 * bad.sum()
    still = ~refined.aligned
    np.testing.assert_array_equal(refined.points[still], features(found).keypoints[still])


def test_the_other_way_round_it_is_zoomed_in(photograph):
    points, _, there, _ = noisy(photograph, ZOOMED_OUT, noise=0)
    random = np.random.default_rng(0)
    off = points + random.normal(0, 1.2, points.shape)
    refined = refine_matches(
        view_of(photograph, ZOOMED_OUT), photograph, features(there), features(off),
        row_by_row(len(points)),
    )  # fmt: skip
    error = np.linalg.norm(refined.points - points, axis=1)[refined.aligned]
    assert refined.aligned.mean() > 0.5
    assert np.median(error) < 0.4  # pixels that are 2.5 times as small as those of the first


def test_light_and_noise_do_not_lead_astray(photograph):
    points, found, there, _ = noisy(photograph, MILD)
    random = np.random.default_rng(1)
    darker = view_of(photograph, MILD) * 0.5 + 20 + random.normal(0, 3, photograph.shape)
    view = np.clip(darker, 0, 255).astype(np.uint8)
    refined = refine_matches(
        photograph, view, features(points), features(found), row_by_row(len(points))
    )
    error = np.linalg.norm(refined.points - there, axis=1)[refined.aligned]
    assert refined.aligned.mean() > 0.8 and np.median(error) < 0.15


def test_two_surfaces_have_frames_of_their_own(photograph):
    """Both halves move apart, like objects at two distances: no homography fits."""
    points = corners_of(photograph)
    points = points[(np.abs(points[:, 0] - 240) > 14) & (np.abs(points[:, 1] - 180) < 165)]
    left = points[:, 0] < 240
    moved = np.array([[1, 0, -6.3], [0, 1, 0.0], [0, 0, 1]])
    view = np.where(
        (np.arange(480) < 240)[None, :, None],
        view_of(photograph, np.eye(3)), view_of(photograph, moved),
    ).astype(np.uint8)  # fmt: skip
    there = np.where(left[:, None], points, warp_points(points, moved))
    inside = (np.abs(there[:, 0] - 240) > 8) & (there > 10).all(axis=1) & (there[:, 0] < 470)
    points, there = points[inside], there[inside]
    off = there + np.random.default_rng(0).normal(0, 0.8, there.shape)
    refined = refine_matches(
        photograph, view, features(points), features(off), row_by_row(len(points))
    )
    error = np.linalg.norm(refined.points - there, axis=1)
    assert refined.aligned.mean() > 0.85
    for side in (there[:, 0] < 240, there[:, 0] > 240):
        assert np.median(error[side & refined.aligned]) < 0.1


def test_a_shift_by_parts_of_a_pixel_is_told(photograph):
    truth = np.array([[1, 0, 0.3], [0, 1, -0.45], [0, 0, 1]])
    points = corners_of(photograph)
    points = points[((points > 12) & (points < np.array(SIZE) - 12)).all(axis=1)]
    view = view_of(photograph, truth)
    same = row_by_row(len(points))
    refined = refine_matches(photograph, view, features(points), features(points), same)
    shift = (refined.points - points)[refined.aligned]
    assert refined.aligned.mean() > 0.9
    assert np.median(shift, axis=0) == pytest.approx([0.3, -0.45], abs=0.05)


def test_what_cannot_be_told_is_left_alone(photograph):
    """Flat walls, one straight edge, noise: nothing aligns, and nothing moves."""
    grid = np.stack(np.meshgrid(np.arange(30, 450, 30), np.arange(30, 330, 30)), -1).reshape(-1, 2)
    flat = np.full((360, 480), 100, np.uint8)
    edge = np.repeat((np.arange(480) % 30 < 15)[None] * np.uint8(150), 360, axis=0)
    random = np.random.default_rng(0)
    noise = [random.integers(0, 255, (360, 480), np.uint8) for _ in range(2)]
    off = grid + random.normal(0, 0.5, grid.shape)
    for first, second in ((flat, flat), (edge, edge), noise):
        same = row_by_row(len(grid))
        refined = refine_matches(first, second, features(grid), features(off), same)
        assert refined.aligned.mean() < 0.02
        kept = ~refined.aligned
        np.testing.assert_array_equal(refined.points[kept], off.astype(np.float32)[kept])


def test_limits_are_kept(photograph):
    points, found, _, _ = noisy(photograph, MILD, noise=0.8)
    view = view_of(photograph, MILD)
    given = photograph, view, features(points), features(found), row_by_row(len(points))
    free, near = refine_matches(*given), refine_matches(*given, max_shift=0.7)
    moved = np.linalg.norm(near.points - found, axis=1)
    assert moved.max() < 0.7 + 1e-4
    assert 0 < near.aligned.sum() < free.aligned.sum()
    assert not refine_matches(*given, min_correlation=1).aligned.any()
    assert refine_matches(*given, max_sigma=0.05).aligned.sum() < free.aligned.sum()


@pytest.mark.parametrize('count', [0, 1, 3, 4])
def test_few_matches(photograph, count):
    points = corners_of(photograph)[:count]
    points = np.empty((0, 2)) if not count else points
    refined = refine_matches(
        photograph, photograph, features(points), features(points), row_by_row(count)
    )
    assert refined.points.shape == (count, 2) and refined.aligned.shape == (count,)
    assert np.isfinite(refined.points).all()


def test_points_at_the_rim_stay(photograph):
    points = np.array(
        [[0, 0], [479, 0], [479, 359], [2, 180], [240, 357], *corners_of(photograph)]
    )
    given = photograph, photograph, features(points), features(points), row_by_row(len(points))
    refined = refine_matches(*given)
    assert not refined.aligned[:5].any()
    assert np.abs(refined.points - points).max() < 0.05


def test_gray_and_colour_agree(photograph):
    points, found, _, _ = noisy(photograph, MILD)
    view = view_of(photograph, MILD)
    given = features(points), features(found), row_by_row(len(points))
    colour = refine_matches(photograph, view, *given)
    gray = [cv2.cvtColor(image, cv2.COLOR_RGB2GRAY) for image in (photograph, view)]
    np.testing.assert_array_equal(colour.points, refine_matches(*gray, *given).points)
    with pytest.raises(ValueError, match='second_image must be uint8'):
        refine_matches(photograph, view.astype(np.float32), *given)


def test_frames_are_those_of_the_view(photograph):
    points, found, _, bad = noisy(photograph, TILTED, noise=0.5, wrong=0.3)
    frames, known = local_frames(
        points.astype(np.float32), found.astype(np.float32), np.ones(len(points), bool)
    )
    step = 1e-3
    here = warp_points(points, TILTED)
    aside = [warp_points(points + np.array(d) * step, TILTED) for d in ([1, 0], [0, 1])]
    expected = np.stack([(there - here) / step for there in aside], axis=2)
    off = np.abs(frames - expected).max(axis=(1, 2))[known & ~bad]
    assert (known & ~bad).sum() > 0.8 * (~bad).sum()
    assert np.median(off) < 0.08


def test_inliers_alone_tell_frames(photograph):
    points, found, _, bad = noisy(photograph, MILD, wrong=0.7)
    view = view_of(photograph, MILD)
    matches = row_by_row(len(points))
    given = photograph, view, features(points), features(found)
    unverified = refine_matches(*given, matches).aligned & ~bad
    verified = refine_matches(*given, Matches(matches.indices, matches.distances, ~bad)).aligned
    assert (verified & ~bad).sum() > 1.5 * unverified.sum()
    assert (verified & bad).sum() <= 0.05 * bad.sum()


def test_moved_features_and_kept_points(photograph):
    points, found, there, _ = noisy(photograph, MILD)
    view = view_of(photograph, MILD)
    order = np.random.default_rng(0).permutation(len(points))
    first, second = features(points), features(found[order])
    indices = np.stack([order, np.arange(len(points))], axis=1)
    matches = Matches(indices, np.zeros(len(points), np.float32), np.ones(len(points), bool))
    refined = refine_matches(photograph, view, first, second, matches)
    moved = refined.moved(second, matches)
    error = np.linalg.norm(moved.keypoints - there[order], axis=1)
    assert np.median(error) < 0.1
    here, now, rows = refined_points(photograph, view, first, second, matches)
    assert len(here) == len(now) and (rows == np.flatnonzero(refined.aligned)).all()
    assert np.median(np.linalg.norm(warp_points(here, MILD) - now, axis=1)) < 0.1


def test_the_command_refines_and_counts(photograph, tmp_path, capsys):
    for name, image in (('a', photograph), ('b', view_of(photograph, MILD))):
        cv2.imwrite(str(tmp_path / f'{name}.png'), image[..., ::-1])
    arguments = ['match', str(tmp_path / 'a.png'), str(tmp_path / 'b.png'), '--scales', '1']
    arguments += ['-o', str(tmp_path / 'out.png'), '--threshold', '0.5', '--max-keypoints', '400']
    counts = {}
    for name, more in (('plain', []), ('refined', ['--refine'])):
        assert main([*arguments, *more]) == 0
        printed = capsys.readouterr().out
        counts[name] = int(re.search(r'(\d+) inliers', printed)[1])
    assert re.search(r'\d+ matches, \d+ aligned, \d+ inliers of one homography', printed)
    assert counts['refined'] > 1.5 * counts['plain']  # at half a pixel
    assert cv2.imread(str(tmp_path / 'out.png')).shape == (360, 960, 3)
    assert main([*arguments, '--refine', '--format', 'npz']) == 2
    assert '--refine works only with two images' in capsys.readouterr().err


def test_a_room_with_things_at_many_distances():
    """Exact views of a scene with depth (walls, floor, boxes), a step apart."""
    camera, scene = view_camera((480, 360)), room(photographs(), seed=3)
    poses = [np.eye(4), np.eye(4)]
    poses[1][:3, :3] = cv2.Rodrigues(np.array([0.02, 0.06, 0.03]))[0]
    poses[1][:3, 3] = 0.25, 0.05, 0.3
    first, second = (scene.view(camera, pose, samples=2) for pose in poses)
    depth = scene.view_with_depth(camera, poses[0])[1]
    points = corners_of(first, 400)
    x, y = np.rint(points).astype(int).T
    rays = np.column_stack([points, np.ones(len(points))]) @ np.linalg.inv(camera.matrix).T
    world = rays * depth[y, x][:, None]
    there = camera.pixels((world - poses[1][:3, 3]) @ poses[1][:3, :3])
    seen = np.isfinite(there).all(axis=1) & (there > 12).all(axis=1)
    seen &= (there < np.array(camera.size) - 12).all(axis=1)
    points, there = points[seen], there[seen]
    off = there + np.random.default_rng(0).normal(0, 0.8, there.shape)
    given = features(points), features(off), row_by_row(len(points))
    refined = refine_matches(first, second, *given)
    before, after = (np.linalg.norm(p - there, axis=1) for p in (off, refined.points))
    # Corners at the edge of a box have two depths, and many are hidden: those do not align.
    assert refined.aligned.mean() > 0.6
    assert np.median(after[refined.aligned]) < 0.25 * np.median(before)
