"""The detector on real photographs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models import random_checkpoint, write_random_model

from kp2d_core import FileError, KeypointDetector
from kp2d_core.networks.geometry import normalise, sample_descriptors
from kp2d_core.runtimes.torch import network_of


@pytest.fixture(scope='module')
def detector(tmp_path_factory):
    return KeypointDetector.load(
        write_random_model(tmp_path_factory.mktemp('models')), runtime='torch'
    )


@pytest.fixture(scope='module')
def image(photographs):
    return photographs['astronaut'][:240, :320]


def test_no_limits_gives_every_cell_with_a_score_as_the_paper_evaluates(detector, image):
    features = detector.detect(image)
    assert len(features) == 28 * 38  # 30 x 40 cells without the border ring
    assert features.keypoints.dtype == features.scores.dtype == np.float32
    assert features.descriptors.dtype == np.float32 and features.descriptors.shape[1] == 128
    assert (np.diff(features.scores) <= 0).all() and features.scores[-1] > 0
    assert np.linalg.norm(features.descriptors, axis=1) == pytest.approx(1, abs=1e-5)
    assert features.image_size == (320, 240)


def test_the_features_are_those_of_the_network(detector, image):
    """Against the network's maps, cell by cell."""
    network = network_of(random_checkpoint())
    with torch.no_grad():
        maps = network(normalise(torch.from_numpy(image.copy())[None]))
        points = maps.keypoints.flatten(2).transpose(1, 2)
        descriptors = sample_descriptors(maps.descriptors, points, (240, 320))[0].numpy()
    features = detector.detect(image)
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
    ],
)
def test_bad_options_are_named(detector, image, options, message):
    with pytest.raises(ValueError, match=message):
        detector.detect(image, **options)


def test_unknown_model_and_runtime(tmp_path):
    with pytest.raises(FileError, match='shipped models'):
        KeypointDetector.load('enormous')
    with pytest.raises(ValueError, match="runtime 'abacus'"):
        KeypointDetector.load(write_random_model(tmp_path), runtime='abacus')
