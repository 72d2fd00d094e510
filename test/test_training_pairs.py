"""Pairs: the named direction, sub-pixel accuracy on a real photograph, reproducibility."""

from __future__ import annotations

from dataclasses import replace

import cv2
import numpy as np
import pytest
from skimage import data

from kp2d_core.geometry import resize_matrix, warp_points
from kp2d_core.training.config import OptimizerConfig, PairsConfig, TrainingConfig
from kp2d_core.training.pairs import (
    BatchStream,
    PairSource,
    value_at,
)
from kp2d_core.training.photographs import Photographs
from kp2d_core.views.homography import HomographyConfig, sample_source_to_target
from kp2d_core.views.pairs import make_pair, pixels_per_view_pixel, render, sample_target_view
from kp2d_core.views.photometric import PhotometricConfig

UNCHANGED = PhotometricConfig((0, 0), (1,), (1, 1), (1, 1), (1, 1), 0.0, 0.0, 0.0)
CROPS = PairsConfig(
    160,
    128,
    framing='crop',
    short_side=(300, 400),
    flip=0.5,
    swap=0.5,
    strong=HomographyConfig(1.0, (0.8, 1.25), 180.0, 0.2, 16.0, False, stretch=1.5),
    mild_share=((0, 0.5),),
)
FRAMING = CROPS.view_framing()
KINDS = {
    'paper': TrainingConfig(photometric=UNCHANGED),
    'crops': TrainingConfig(pairs=CROPS, photometric=UNCHANGED),
}


@pytest.fixture(scope='module')
def photograph() -> np.ndarray:
    """A blurred photograph, so that two correct bilinear samplings agree closely."""
    return cv2.GaussianBlur(data.astronaut(), (0, 0), 2.5)


def sample(image: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Sample bilinearly, written out here to be independent of the conventions of libraries."""
    low = np.floor(points).astype(int)
    x, y = low.T
    fx, fy = (points - low).T[:, :, None]
    image = image.astype(float)
    top = image[y, x] * (1 - fx) + image[y, x + 1] * fx
    bottom = image[y + 1, x] * (1 - fx) + image[y + 1, x + 1] * fx
    return top * (1 - fy) + bottom * fy


def misregistration(source, target, source_to_target) -> np.ndarray:
    """Measure the shift (x, y) of the target from the position that the homography predicts.

    Least squares on the gradients of the target give the shift that explains the differences.
    """
    height, width = source.shape[:2]
    x, y = np.meshgrid(np.arange(0, width, 2), np.arange(0, height, 2))
    grid = np.stack([x, y], -1).reshape(-1, 2)
    there = warp_points(grid, source_to_target)
    limits = target.shape[1] - 3, target.shape[0] - 3
    inside = ((there >= 2) & (there < limits)).all(1)
    assert inside.mean() > 0.2
    there, wanted = there[inside], source[::2, ::2].reshape(-1, 3)[inside].astype(float)
    slopes = [
        (sample(target, there + step) - sample(target, there - step)).ravel()
        for step in (np.array([0.5, 0]), np.array([0, 0.5]))
    ]
    difference = (wanted - sample(target, there)).ravel()
    return np.linalg.lstsq(np.stack(slopes, 1), difference, rcond=None)[0]


def test_misregistration_is_measured_rightly(photograph):
    shift = np.array([[1, 0, 0.5], [0, 1, -0.25], [0, 0, 1]])
    moved = render(photograph, shift, (512, 512))  # moved(x) = photograph(x + 0.5)
    assert misregistration(moved, photograph, np.eye(3)) == pytest.approx([0.5, -0.25], abs=0.02)


def pair_of(photograph, random, config, homography):
    framing = config.pairs.view_framing()
    return make_pair(photograph, random, framing, config.photometric, homography)[:3]


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('mild', [False, True])
def test_the_homography_takes_source_pixels_to_the_same_pixels_of_the_target(
    photograph, kind, mild
):
    off = []
    for seed in range(8):
        random = np.random.default_rng(seed)
        pairs = KINDS[kind].pairs
        pair = pair_of(photograph, random, KINDS[kind], pairs.mild if mild else pairs.strong)
        off.append(misregistration(*pair))
    assert np.abs(off).max() < 0.05
    assert np.abs(np.mean(off, axis=0)).max() < 0.02


@pytest.mark.parametrize('swap', [0.0, 1.0])
def test_objects_in_front_move_by_their_own_homography(photograph, swap):
    """They show another photograph, here one of a single colour with one mark."""
    grass = np.full((400, 600, 3), (0, 200, 0), np.uint8)
    framing = replace(FRAMING, swap=swap)
    differ = 0
    for seed in range(12):
        random = np.random.default_rng(seed)
        pair = make_pair(photograph, random, framing, UNCHANGED, CROPS.strong, grass)
        front = pair.front
        for image, mask in ((pair.first, front.first), (pair.second, front.second)):
            inner = cv2.erode(mask.astype(np.uint8), np.ones((9, 9), np.uint8)) > 0
            assert (image[inner] == (0, 200, 0)).all()
        # A pixel in front comes to one that is in front as well, if both are inside.
        y, x = np.nonzero(cv2.erode(front.first.astype(np.uint8), np.ones((5, 5), np.uint8)))
        there = np.rint(warp_points(np.stack([x, y], 1), front.first_to_second)).astype(int)
        inside = ((there >= 0) & (there < (160, 128))).all(1)
        assert front.second[there[inside, 1], there[inside, 0]].mean() > 0.97 or not inside.any()
        differ += int(not np.allclose(front.first_to_second, pair.first_to_second, atol=1e-3))
    assert differ == 12


def test_the_opposite_direction_is_wrong(photograph):
    def error(source, target, matrix):
        points = np.random.default_rng(0).uniform([80, 60], [240, 180], (500, 2)).round()
        there = np.clip(warp_points(points, matrix), 0, [318, 238])
        x, y = points.astype(int).T
        return np.abs(sample(target, there) - source[y, x]).mean()

    random = np.random.default_rng(5)
    source, target, matrix = pair_of(
        photograph, random, KINDS['paper'], KINDS['paper'].pairs.strong
    )
    assert error(source, target, matrix) < 2
    assert error(target, source, matrix) > 10


def test_a_view_larger_than_the_photograph_and_one_much_smaller_stay_registered(photograph):
    """The same half-pixel rule must hold for interpolation and for averaging."""
    for size in ((800, 640), (160, 120)):
        view_to_photograph = resize_matrix(size, (512, 512))
        view = render(photograph, view_to_photograph, size)
        assert np.abs(misregistration(view, photograph, view_to_photograph)).max() < 0.05


def test_paper_homographies_keep_the_source_inside_the_target():
    for rotation in (45.0, 180.0):
        config = HomographyConfig(rotation=rotation)
        corners = np.array([[0, 0], [319, 0], [319, 239], [0, 239]], float)
        angles = []
        for seed in range(200):
            matrix = sample_source_to_target(np.random.default_rng(seed), (320, 240), config)
            there = warp_points(corners, matrix)
            assert (there > -0.01).all() and (there < [319.01, 239.01]).all()
            top = there[1] - there[0]
            angles.append(np.degrees(np.arctan2(top[1], top[0])))
        assert np.max(np.abs(angles)) > 0.6 * rotation


def test_mild_homographies_move_no_pixel_far():
    config = TrainingConfig().pairs.mild
    for seed in range(50):
        matrix = sample_source_to_target(np.random.default_rng(seed), (160, 128), config)
        centre = np.array([[79.5, 63.5]])
        assert np.abs(warp_points(centre, matrix) - centre).max() <= 8.01


def test_a_share_stays_upright():
    config = HomographyConfig(1.0, (1, 1), 180.0, 0.0, 0.0, False, upright=0.6)
    random = np.random.default_rng(0)
    matrices = [sample_source_to_target(random, (64, 48), config) for _ in range(400)]
    angles = np.array([np.rad2deg(np.arctan2(m[1, 0], m[0, 0])) for m in matrices])
    expected = 0.6 + 0.4 * 45 / 180
    assert np.mean(np.abs(angles) <= 45) == pytest.approx(expected, abs=0.06)
    assert np.abs(angles).max() > 160


def test_stretch_shortens_one_direction_and_keeps_the_area():
    config = HomographyConfig(1.0, (1, 1), 0.0, 0.0, 0.0, False, stretch=3.0)
    ratios = []
    for seed in range(100):
        matrix = sample_source_to_target(np.random.default_rng(seed), (160, 128), config)
        large, small = np.linalg.svd(matrix[:2, :2] / matrix[2, 2])[1]
        assert large * small == pytest.approx(1, abs=1e-4)
        ratios.append(large / small)
    assert 1 <= min(ratios) < 1.2 and 2.8 < max(ratios) <= 3.001


def test_pixels_per_view_pixel():
    assert pixels_per_view_pixel(np.diag([3.0, 3.0, 1.0]), (32, 32)) == pytest.approx(3)
    assert pixels_per_view_pixel(np.diag([2.0, 2.0, 2.0]), (32, 32)) == pytest.approx(1)


def test_a_photograph_smaller_than_the_view_is_enlarged():
    view = sample_target_view(np.random.default_rng(0), (50, 40), FRAMING)
    corners = warp_points(np.array([[0, 0], [159, 127]]), view)
    assert (corners > -0.5).all() and (corners < [49.5, 39.5]).all()


def test_an_enlarged_view_is_as_sharp_as_the_photograph_lets_it_be():
    photograph, factors = (640, 480), (1.0, 2.0, 50.0)
    coarseness = [
        pixels_per_view_pixel(
            sample_target_view(np.random.default_rng(0), photograph, FRAMING, enlarged), (160, 128)
        )
        for enlarged in factors
    ]
    assert coarseness[1] == pytest.approx(2 * coarseness[0])
    assert coarseness[2] == pytest.approx(480 / 128)  # it shows no more than there is


def test_a_schedule_follows_straight_lines():
    schedule = ((0, 0.0), (100, 0.6))
    assert value_at(0, schedule) == 0
    assert value_at(50, schedule) == pytest.approx(0.3)
    assert value_at(1000, schedule) == 0.6


def test_strong_pairs_turn_as_far_as_the_strength_of_their_step_lets_them(photograph):
    strong = HomographyConfig(1.0, (1.0, 1.0), 180.0, 0.0, 0.0, False, stretch=3.0)
    pairs = replace(CROPS, strong=strong, mild_share=((0, 0.0),), strength=((0, 0.1), (100, 1.0)))
    config = TrainingConfig(pairs=pairs, optimizer=OptimizerConfig(batch=1))
    source = PairSource(Photographs([photograph]), config)
    angles, ratios = [], []
    for number in range(150):
        left, sizes, right = np.linalg.svd(source.pair(number)[2][:2, :2])
        turn = left @ right
        angles.append(abs(np.degrees(np.arctan2(turn[1, 0], turn[0, 0]))))
        ratios.append(sizes[0] / sizes[1])
    assert max(angles[:10]) < 45 and max(angles[100:]) > 150
    assert max(ratios[:10]) < 1.4 and max(ratios[100:]) > 2.5


def test_the_share_of_mild_pairs_follows_its_schedule(photograph):
    pairs = replace(CROPS, mild_share=((0, 0.9), (100, 0.2)))
    config = TrainingConfig(pairs=pairs, optimizer=OptimizerConfig(batch=1))
    source = PairSource(Photographs([photograph]), config)

    def is_mild(number: int) -> bool:
        matrix = source.pair(number)[2]
        return abs(np.degrees(np.arctan2(matrix[1, 0], matrix[0, 0]))) < 12

    # One in fifteen strong pairs turns as little as mild ones do.
    assert np.mean([is_mild(n) for n in range(12)]) > 0.6
    assert np.mean([is_mild(n) for n in range(100, 200)]) < 0.45


def test_what_is_seen_is_in_front_of_the_camera(photograph):
    """Also in swapped pairs, whose corner may lie behind it."""
    strong = HomographyConfig(1.0, (0.45, 1.25), 180.0, 0.25, 24.0, False, stretch=2.5)
    config = TrainingConfig(pairs=replace(CROPS, swap=1.0))
    middle = np.array([79.5, 63.5, 1.0])
    for seed in range(600):
        *_, matrix = pair_of(photograph[:64, :64], np.random.default_rng(seed), config, strong)
        assert (matrix @ middle)[2] == pytest.approx(1)


@pytest.fixture(scope='module')
def photographs() -> Photographs:
    return Photographs([data.astronaut(), data.coffee(), data.chelsea()])


CONFIG = TrainingConfig(pairs=CROPS)
CONFIG = replace(CONFIG, optimizer=replace(CONFIG.optimizer, batch=4))


def test_a_pair_depends_on_seed_and_number_alone(photographs):
    first, second = PairSource(photographs, CONFIG), PairSource(photographs, CONFIG)
    second.pair(0)
    for a, b in zip(first.pair(7)[:3], second.pair(7)[:3], strict=True):
        np.testing.assert_array_equal(a, b)
    other = PairSource(photographs, replace(CONFIG, seed=1)).pair(7)
    assert not np.array_equal(first.pair(7)[0], other[0])


def test_epochs_show_every_photograph_once_and_never_repeat_a_pair(photographs):
    source = PairSource(photographs, CONFIG)
    for epoch in range(3):
        assert sorted(source._shuffled(epoch)) == [0, 1, 2]
    views = [source.pair(number)[0].tobytes() for number in range(12)]
    assert len(set(views)) == 12


def test_a_stream_begun_later_gives_the_same_batches(photographs):
    """With or without threads, starting at any step."""
    threaded = replace(CONFIG, compute=replace(CONFIG.compute, workers=3))
    alone = replace(CONFIG, compute=replace(CONFIG.compute, workers=0))
    whole = BatchStream(PairSource(photographs, threaded), 0)
    expected = [next(whole).images.numpy() for _ in range(6)]
    whole.close()
    late = BatchStream(PairSource(photographs, alone), 4)
    np.testing.assert_array_equal(next(late).images.numpy(), expected[4])
    np.testing.assert_array_equal(next(late).images.numpy(), expected[5])


def test_processes_share_a_batch(photographs):
    joined = next(BatchStream(PairSource(photographs, CONFIG), 3))
    parts = [
        next(BatchStream(PairSource(photographs, CONFIG), 3, rank=rank, processes=2))
        for rank in (0, 1)
    ]
    sources = np.concatenate([part.images[:2].numpy() for part in parts])
    np.testing.assert_array_equal(sources, joined.images[:4].numpy())
    with pytest.raises(ValueError, match='divide by 3'):
        BatchStream(PairSource(photographs, CONFIG), 0, processes=3)
