"""The detector on real photographs."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import torch
from models import random_checkpoint, write_random_model

from kp2d_core import FileError, KeypointDetector
from kp2d_core.networks import KeyPointNet
from kp2d_core.networks.geometry import normalise, sample_descriptors


@pytest.fixture(scope='module')
def detector(tmp_path_factory):
    return KeypointDetector.load(
        write_random_model(tmp_path_factory.mktemp('models')), runtime='torch'
    )


@pytest.fixture(scope='module')
def image(photographs):
    return photographs['astronaut'][:240, :320]


def test_no_limits_gives_every_cell_with_a_score_as_the_paper_evaluates(detector, image):
    features = detector.detect(image, scales=(1,), max_keypoints=None)
    assert len(features) == 28 * 38  # 30 x 40 cells without the border ring
    assert features.keypoints.dtype == features.scores.dtype == np.float32
    assert features.descriptors.dtype == np.float32 and features.descriptors.shape[1] == 128
    assert (np.diff(features.scores) <= 0).all() and features.scores[-1] > 0
    assert np.linalg.norm(features.descriptors, axis=1) == pytest.approx(1, abs=1e-5)
    assert features.image_size == (320, 240)


def test_the_features_are_those_of_the_network(detector, image):
    """Compared with the maps of the network, cell by cell."""
    network = KeyPointNet.from_checkpoint(random_checkpoint())
    with torch.no_grad():
        maps = network(normalise(torch.from_numpy(image.copy())[None]))
        points = maps.keypoints.flatten(2).transpose(1, 2)
        descriptors = sample_descriptors(maps.descriptors, points, (240, 320))[0].numpy()
    features = detector.detect(image, scales=(1,))
    scores, cells = maps.scores.flatten().sort(descending=True, stable=True)
    top = cells[: len(features)].numpy()
    assert features.scores == pytest.approx(scores[: len(features)].numpy(), abs=1e-5)
    order = np.lexsort(features.keypoints.T)
    expected_order = np.lexsort(points[0].numpy()[top].T)
    assert features.keypoints[order] == pytest.approx(
        points[0].numpy()[top][expected_order], abs=1e-3
    )
    assert np.abs(features.descriptors[order] - descriptors[top][expected_order]).max() < 1e-4


def test_options(detector, image):
    everything = detector.detect(image)
    best = detector.detect(image, max_keypoints=100)
    assert np.allclose(best.scores, everything.scores[:100])
    middle = float(everything.scores[len(everything) // 2])
    assert len(detector.detect(image, score_threshold=middle)) < len(everything) / 2 + 1
    spread = detector.detect(image, nms_radius=12).keypoints
    gaps = np.linalg.norm(spread[:, None] - spread[None], axis=2) + 1e9 * np.eye(len(spread))
    assert gaps.min() >= 12
    mask = np.zeros((240, 320), np.uint8)
    mask[:, 160:] = 1
    right = detector.detect(image, mask=mask, max_keypoints=50)
    assert len(right) == 50 and right.keypoints[:, 0].min() >= 159.5


@pytest.mark.parametrize('size', [(241, 323), (247, 320), (30, 30), (24, 500)])
def test_any_size(detector, photographs, size):
    height, width = size
    features = detector.detect(photographs['astronaut'][:height, :width])
    assert features.image_size == (width, height)
    assert features.keypoints.min() >= 0
    assert (features.keypoints <= [width - 0.5, height - 0.5]).all()


def test_a_limit_is_filled_although_padding_drops_points(detector, photographs):
    assert len(detector.detect(photographs['astronaut'][:241, :321], max_keypoints=900)) == 900


def test_gray_and_colour_of_the_same_pixels_agree(detector, photographs):
    gray = photographs['astronaut'][:96, :96, 1].copy()
    colour = np.repeat(gray[..., None], 3, axis=2)
    assert np.array_equal(detector.detect(gray).keypoints, detector.detect(colour).keypoints)


def test_working_size_maps_keypoints_back(detector, photographs):
    image = photographs['astronaut']
    features = detector.detect(image, working_size=(256, 256))
    assert features.image_size == (512, 512)
    assert features.keypoints.max() > 400
    by_side = detector.detect(image, working_size=256)
    assert np.array_equal(features.keypoints, by_side.keypoints)


def test_scales_give_the_best_points_of_all_sizes(detector, photographs):
    image = photographs['astronaut'][:240, :320]
    sizes = ((320, 240), (160, 120))
    parts = [detector.detect(image, working_size=size, scales=(1,)) for size in sizes]
    both = detector.detect(image)  # 1 and 0.5 are the default
    assert len(both) == sum(map(len, parts)) and both.image_size == (320, 240)
    assert (np.diff(both.scores) <= 0).all()
    for part in parts:  # each with its own place and descriptor
        mine = np.flatnonzero(np.isin(both.scores, part.scores))
        rows = {tuple(point): d for point, d in zip(part.keypoints, part.descriptors, strict=True)}
        found = [i for i in mine if tuple(both.keypoints[i]) in rows]
        assert len(found) == len(part)
        for i in found:
            np.testing.assert_array_equal(both.descriptors[i], rows[tuple(both.keypoints[i])])
    best = detector.detect(image, scales=(1, 0.5), max_keypoints=100)
    np.testing.assert_array_equal(best.scores, both.scores[:100])  # some scores are equal
    np.testing.assert_array_equal(
        detector.detect(image, scales=(0.5, 0.501)).scores, parts[1].scores
    )
    by_size = detector.detect(image, working_size=160, scales=(2, 1))
    np.testing.assert_array_equal(by_size.keypoints, both.keypoints)
    tiny = detector.detect(image, working_size=(32, 24))  # half of it is too small to work at
    alone = detector.detect(image, working_size=(32, 24), scales=(1,))
    np.testing.assert_array_equal(tiny.keypoints, alone.keypoints)


def test_scales_spread_and_mask_over_all_sizes(detector, image):
    left = np.zeros((240, 320), bool)
    left[:, :160] = True
    points = detector.detect(image, scales=(1, 0.5), nms_radius=8, mask=left).keypoints
    gaps = np.linalg.norm(points[:, None] - points[None], axis=2) + 1e9 * np.eye(len(points))
    assert len(points) > 50 and gaps.min() >= 8 and points[:, 0].max() < 160


def test_views_into_larger_arrays_work(detector, photographs):
    view = photographs['astronaut'][10:106, 20:148]
    assert not view.flags.c_contiguous
    assert np.array_equal(detector.detect(view).scores, detector.detect(view.copy()).scores)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'max_keypoints': 0}, 'max_keypoints'),
        ({'nms_radius': -1}, 'nms_radius'),
        ({'nms_radius': float('nan')}, 'nms_radius'),
        ({'mask': np.zeros((3, 3), bool)}, 'mask'),
        ({'working_size': (8, 8)}, 'too small'),
        ({'scales': (1, 0.05)}, 'scales must be 1 to 4 different numbers'),
        ({'scales': ()}, 'scales must be'),
        ({'scales': (1, 1)}, 'scales must be'),
        ({'scales': (1, float('nan'))}, 'scales must be'),
        ({'scales': (1, 0.5, 0.25, 0.2, 2)}, 'scales must be'),
        ({'scales': 'half'}, "scales must be .* got 'half'"),
        ({'scales': 0.5}, 'scales must be .* got 0.5'),
        (
            {'working_size': 64, 'scales': (1, 0.25)},
            '0.25 the network would run at 16x12',
        ),
        ({'working_size': 4096, 'scales': (4,)}, 'would run at 16384x12288 pixels, more than'),
        ({'working_size': 10000}, '10000x7500 pixels, more than the 16 megapixels'),
        ({'working_size': (640.5, 480)}, 'working_size must be a whole number, got 640.5'),
        ({'working_size': 10**30}, 'working_size must be at most'),
        ({'max_keypoints': 10.0}, 'max_keypoints must be a whole number, got 10.0'),
        ({'max_keypoints': True}, 'max_keypoints must be a whole number'),
        ({'score_threshold': float('nan')}, 'score_threshold must be a finite number'),
        ({'nms_radius': 1e300}, 'nms_radius must be at most 256'),
        ({'nms_radius': '3'}, "nms_radius must be a number, got '3'"),
    ],
)
def test_bad_options_are_named(detector, image, options, message):
    with pytest.raises(ValueError, match=message):
        detector.detect(image, **options)


def assert_same(features, alone):
    """Except for the order of points whose scores differ in the last digit."""
    assert features.image_size == alone.image_size and len(features) == len(alone)
    np.testing.assert_allclose(features.scores, alone.scores, atol=1e-5)
    same = np.isclose(features.keypoints, alone.keypoints, atol=1e-2).all(axis=1)
    assert same.mean() > 0.9
    np.testing.assert_allclose(features.descriptors[same], alone.descriptors[same], atol=1e-3)


def test_a_list_gives_what_its_images_give_alone(photographs):
    """Images of one size run together; the results are in the order of the list."""
    detector = KeypointDetector.load('small', runtime='torch')
    first, second = (photographs[name][:120, :160] for name in ('coffee', 'astronaut'))
    other = photographs['chelsea'][:96, :128]
    calls = []

    class Watched:
        def __getattr__(self, name):
            return getattr(detector.runtime, name)

        def run(self, images, top_k):
            calls.append(images.shape)
            return detector.runtime.run(images, top_k)

    options = {'max_keypoints': 100, 'nms_radius': 2}
    batch = [first, other, torch.from_numpy(second.copy())]
    found = KeypointDetector(Watched()).detect(batch, **options)
    assert sorted(calls) == [(1, 48, 64, 3), (1, 96, 128, 3), (2, 64, 80, 3), (2, 120, 160, 3)]
    for features, image in zip(found, batch, strict=True):
        assert_same(features, detector.detect(image, **options))
    assert detector.detect([]) == []
    with pytest.raises(ValueError, match='image 1 is too small'):
        detector.detect([first, first[:10]])


def test_many_images_run_in_parts(photographs, monkeypatch):
    detector = KeypointDetector.load('small', runtime='torch')
    monkeypatch.setattr('kp2d_core.features.BATCH_PIXELS', 2 * 96 * 128)
    images = [np.roll(photographs['coffee'][:96, :128], 9 * n, axis=1) for n in range(5)]
    found = detector.detect(images, max_keypoints=50)
    for features, image in zip(found, images, strict=True):
        assert_same(features, detector.detect(image, max_keypoints=50))


def test_points_know_the_scale_that_they_were_found_at(detector, image):
    features = detector.detect(image, scales=(1, 0.5), max_keypoints=None)
    whole = detector.detect(image, scales=(1,), max_keypoints=None)
    half = detector.detect(image, scales=(0.5,), max_keypoints=None)
    assert set(features.scales) == {1, 0.5} and set(half.scales) == {0.5}
    at_half = features[features.scales == 0.5]
    np.testing.assert_array_equal(at_half.keypoints, half.keypoints)
    np.testing.assert_array_equal(features[features.scales == 1].scores, whole.scores)
    small = detector.detect(image, working_size=image.shape[1] // 2, scales=(1,))
    assert set(small.scales) == {0.5}


def test_integers_of_numpy_are_integers(detector, image):
    features = detector.detect(
        image, working_size=np.int64(160), max_keypoints=np.int32(50), nms_radius=np.float32(2)
    )
    assert len(features) == 50
    assert len(detector.detect(image, working_size=np.array([160, 120]))) > 50


def test_an_image_that_costs_gigabytes_is_refused_or_shrunk(detector, photographs):
    """A flipped byte in the header of a VGA JPEG can make one: 2.7 GB and 15 s."""
    tall = np.resize(photographs['coffee'], (32736, 640, 3))
    with pytest.raises(ValueError, match='would run at 640x32736 pixels, more than the 16 mega'):
        detector.detect(tall)
    assert len(detector.detect(tall, working_size=1500)) > 50


def test_without_a_number_the_best_2000_are_given(detector, photographs):
    image = cv2.resize(photographs['astronaut'], (640, 640))
    everything = detector.detect(image, max_keypoints=None)
    assert len(everything) > 2000
    assert np.array_equal(detector.detect(image).scores, everything.scores[:2000])


def test_unknown_model_and_runtime(tmp_path):
    with pytest.raises(FileError, match='shipped models'):
        KeypointDetector.load('enormous')
    with pytest.raises(ValueError, match="runtime 'abacus'"):
        KeypointDetector.load(write_random_model(tmp_path), runtime='abacus')
