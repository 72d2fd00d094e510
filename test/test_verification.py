"""Epipolar geometry where there is hardly any: a camera at rest, a slow one, a wall."""

import time

import cv2
import numpy as np
import pytest

from kp2d_core import verification
from kp2d_core.verification import NEAREST, Likely, agreeing, distances_to, verify

K = np.array([[500.0, 0, 320], [0, 500, 240], [0, 0, 1]])


def scene(motion: tuple[float, float, float], near: float = 0.3, seed: int = 0):
    """Points far away and some near ones, before and after the camera moved; 10 % are wrong."""
    random = np.random.default_rng(seed)
    depth = np.where(random.random(500) < near, random.uniform(2, 4, 500), 100)
    before = random.uniform((0, 0), (640, 480), (500, 2))
    rays = np.column_stack([before, np.ones(500)]) @ np.linalg.inv(K).T
    moved = (rays * depth[:, None] - motion) @ K.T
    after = moved[:, :2] / moved[:, 2:] + random.normal(0, 0.2, (500, 2))
    wrong = random.random(500) < 0.1
    after[wrong] = random.uniform((0, 0), (640, 480), (wrong.sum(), 2))
    return before.astype(np.float32), after.astype(np.float32), wrong


@pytest.mark.parametrize('method', ['fundamental', 'essential'])
@pytest.mark.parametrize(
    'motion', [(0.0, 0, 0), (0.0, 0, 0.2), (0.1, 0, 0), (0.3, 0.1, 0.1)], ids=str
)
def test_right_pairs_are_kept_and_wrong_ones_are_not(method, motion):
    before, after, wrong = scene(motion)
    inliers, _ = verify(before, after, method, threshold=2.0, intrinsics=K)
    assert inliers[~wrong].mean() > 0.95
    assert inliers[wrong].mean() < 0.2


def test_a_slow_camera_keeps_its_near_points():
    """Most points are far and do not move; the near ones are what odometry needs."""
    before, after, wrong = scene((0.1, 0, 0))
    moved = np.linalg.norm(after - before, axis=1) > 5
    assert 0.2 < (moved & ~wrong).mean() < 0.5
    inliers, _ = verify(before, after, 'fundamental', threshold=2.0)
    assert inliers[moved & ~wrong].mean() > 0.95


@pytest.mark.parametrize('method', ['fundamental', 'essential'])
def test_a_likely_geometry_is_taken_only_where_it_holds(method, monkeypatch):
    before, after, _ = scene((0.3, 0.1, 0.1))
    searches = []
    search = verification._estimate
    monkeypatch.setattr(
        verification, '_estimate', lambda *given: searches.append(1) or search(*given)
    )

    def found(likely: Likely | None, pairs=(before, after)):
        return agreeing(*pairs, method, 2.0, K, likely=likely)

    inliers, model = found(None)
    assert len(searches) == 1
    likely = Likely(model, inliers.mean())
    again, refitted = found(likely)
    assert len(searches) == 1
    assert (again == inliers).mean() > 0.99 and distances_to(
        refitted, method, before[inliers], after[inliers], K
    ).mean() <= 1.01 * distances_to(model, method, before[inliers], after[inliers], K).mean()
    # The camera moves elsewhere, which a quarter of the points, the near ones, tell.
    turned = scene((0.0, 0.45, 0.0), near=0.25)
    kept, _ = found(likely, turned[:2])
    assert len(searches) == 2
    moved = np.linalg.norm(turned[1] - turned[0], axis=1) > 5
    assert kept[moved & ~turned[2]].mean() > 0.9


@pytest.mark.parametrize('method', ['homography', 'fundamental', 'essential'])
def test_distances_of_descriptors_find_the_geometry_among_many_wrong_pairs(method):
    """As between distant views: nine of ten pairs are wrong, and they have larger distances."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for seed in range(5):
        before, after = noisy_pairs(seed, planar=method == 'homography')
        random = np.random.default_rng(seed)
        right = random.random(1000) < 0.1
        after = after + random.normal(0, 0.4, after.shape)
        after[~right] = random.uniform((0, 0), (640, 480), ((~right).sum(), 2))
        distances = np.where(right, random.normal(0.7, 0.1, 1000), random.normal(0.9, 0.1, 1000))
        for known, shares in found.items():
            inliers, _ = verify(
                before.astype(np.float32), after.astype(np.float32), method, threshold=2.0,
                intrinsics=K, distances=distances.astype(np.float32) if known else None,
            )  # fmt: skip
            shares.append(inliers[right].mean())
    assert np.median(found[True]) > 0.9
    assert method == 'homography' or np.median(found[False]) < np.median(found[True])


@pytest.mark.parametrize('method', ['fundamental', 'essential'])
def test_distances_that_mislead_do_no_harm(method):
    """The most similar points belong to something that moves on its own."""
    shares: dict[bool, list[float]] = {False: [], True: []}
    for seed in range(5):
        before, after, wrong = scene((0.3, 0.1, 0.1), seed=seed)
        distances = np.full(500, 0.5, np.float32)
        own = np.flatnonzero(~wrong)[:NEAREST]
        after[own] = before[own] + np.array([40, -25], np.float32)
        distances[own] = 0.1
        left = ~wrong
        left[own] = False
        for known, found in shares.items():
            inliers, _ = verify(
                before, after, method, threshold=2.0, intrinsics=K,
                distances=distances if known else None,
            )  # fmt: skip
            found.append(inliers[left].mean())
    assert np.median(shares[True]) > 0.95
    assert np.mean(shares[True]) > np.mean(shares[False]) - 0.02


def test_distances_must_be_one_for_each_pair():
    points = np.zeros((9, 2), np.float32)
    with pytest.raises(ValueError, match=r'distances must be \(9,\)'):
        verify(points, points, 'homography', distances=np.zeros(8, np.float32))


@pytest.mark.parametrize('shift', [(1.0, 0.0), (3.0, 0.0), (0.0, 0.0), (0.3, 0.2)])
def test_degenerate_geometry_takes_no_time(shift):
    """A wall that slides by: some estimators search for half a minute."""
    random = np.random.default_rng(1)
    before = np.rint(random.uniform((0, 0), (640, 480), (900, 2)) / 4).astype(np.float32) * 4
    after = before + np.array(shift, np.float32)
    began = time.process_time()
    inliers, _ = verify(before, after, 'fundamental', threshold=2.0)
    assert inliers.mean() > 0.98
    assert time.process_time() - began < 2


@pytest.mark.parametrize('method', ['fundamental', 'essential'])
def test_a_camera_at_rest_keeps_even_a_single_point(method):
    points = np.array([[10, 20], [300, 40], [600, 450]], np.float32)
    for count in (1, 3):
        inliers, model = verify(points[:count], points[:count] + 0.5, method, intrinsics=K)
        assert inliers.all() and model is None


def through_a_wide_lens(motion: tuple[float, float, float], noise: float):
    """Points all around, seen by an equidistant lens of 170 degrees before and after a motion."""
    random = np.random.default_rng(3)
    angle, turn = random.uniform(0, np.deg2rad(85), 600), random.uniform(0, 2 * np.pi, 600)
    sine = np.sin(angle)
    rays = np.column_stack([sine * np.cos(turn), sine * np.sin(turn), np.cos(angle)])
    places = rays * random.uniform(3, 8, (600, 1))

    def seen(points):
        theta = np.arctan2(np.hypot(*points[:, :2].T), points[:, 2])
        out = points[:, :2] / np.hypot(*points[:, :2].T)[:, None]
        return 190 * theta[:, None] * out + 256 + random.normal(0, noise, (600, 2))

    return seen(places), seen(places - motion), angle


def straightened(pixels):
    """As of a pinhole camera of the same focal length."""
    offset = pixels - 256
    theta = np.linalg.norm(offset, axis=1, keepdims=True) / 190
    with np.errstate(invalid='ignore'):
        return np.where(theta < np.deg2rad(89), offset * np.tan(theta) / theta + 256, np.nan)


WIDE = np.array([[190.0, 0, 256], [0, 190, 256], [0, 0, 1]])


def test_right_pairs_are_kept_up_to_the_rim_of_a_wide_lens():
    before, after, angle = through_a_wide_lens((0.4, 0.1, 0.2), 0.4)
    after[::10] = np.random.default_rng(4).uniform(100, 400, (60, 2))
    right = np.arange(600) % 10 > 0
    inliers, model = verify(
        before, after, 'essential', threshold=2.0, intrinsics=WIDE, undistort=straightened
    )
    assert model is not None
    for begin, end in ((0, 30), (30, 60), (60, 80)):
        ring = right & (np.rad2deg(angle) >= begin) & (np.rad2deg(angle) < end)
        assert inliers[ring].mean() > 0.93, begin
    assert inliers[~right].mean() < 0.2


def test_a_wide_lens_at_rest_is_seen_to_be_so():
    before, after, _ = through_a_wide_lens((0.0, 0.0, 0.0), 0.2)
    inliers, model = verify(
        before, after, 'essential', threshold=2.0, intrinsics=WIDE, undistort=straightened
    )
    assert model is None and inliers.mean() > 0.99


@pytest.mark.parametrize('method', ['homography', 'fundamental', 'essential'])
def test_the_model_is_fitted_to_all_inliers(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """RANSAC's own model comes from few pairs; least squares over hundreds is more exact."""
    errors: dict[int, list[float]] = {0: [], verification.FITS: []}
    for seed in range(12):
        first, second = noisy_pairs(seed, planar=method == 'homography')
        for fits in errors:
            monkeypatch.setattr(verification, 'FITS', fits)
            pairs = [first + noise(seed), second + noise(seed + 100)]
            pairs[1][:300] = np.random.default_rng(seed).uniform(0, 480, (300, 2))
            _, model = verify(
                *(points.astype(np.float32) for points in pairs),
                method,
                threshold=2.0,
                intrinsics=K,
            )
            assert model is not None
            errors[fits].append(float(np.median(distances_to(model, method, first, second, K))))
    before, after = (float(np.median(values)) for values in errors.values())
    assert after < 0.8 * before


def noisy_pairs(seed: int, *, planar: bool) -> tuple[np.ndarray, np.ndarray]:
    """1000 exact pairs of a plane or a volume seen by a camera that moved sideways."""
    random = np.random.default_rng(seed)
    depth = np.full(1000, 4.0) if planar else random.uniform(3, 8, 1000)
    points = np.column_stack([random.uniform(-2, 2, 1000), random.uniform(-1.5, 1.5, 1000), depth])
    rotation = cv2.Rodrigues(random.normal(0, 0.05, 3))[0]
    moved = points @ rotation.T + [0.4, 0.1, 0.1]
    first, second = ((p @ K.T)[:, :2] / p[:, 2:] for p in (points, moved))
    return first, second


def noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed + 1000).normal(0, 0.56, (1000, 2))
