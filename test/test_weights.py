"""The shipped weights: complete, good enough, and as good as their cards state."""

from __future__ import annotations

import re
from functools import cache, partial

import cv2
import numpy as np
import pytest

from kp2d_core import KeypointDetector
from kp2d_core.checkpoint import WEIGHTS_FOLDER, find_checkpoint, load_checkpoint, shipped_models
from kp2d_core.evaluation.hpatches import load_sequences
from kp2d_core.evaluation.protocol import evaluate
from kp2d_core.matching import match

METRICS = ('repeatability', 'localization', 'cor1', 'cor3', 'cor5', 'mscore')
FLOOR = (0.67, 1.10, 0.32, 0.56, 0.64, 0.40)  # on hpatches_mini at 320x240 with 300 points
AIM = (0.72, 0.95, 0.46, 0.80, 0.92, 0.52)
MODELS = ('fast', 'half', 'small')


def test_the_models_ship_and_are_small_enough():
    assert shipped_models() == sorted(MODELS)
    sizes = [path.stat().st_size for path in WEIGHTS_FOLDER.glob('*.safetensors')]
    assert sum(sizes) < 10e6


@pytest.mark.parametrize('name', MODELS)
def test_a_model_comes_with_its_card_its_int8_ranges_and_its_origin(name):
    checkpoint = load_checkpoint(find_checkpoint(name))
    assert checkpoint.architecture.variant in (name, 'small')  # `half` was called small
    assert checkpoint.step > 0 and checkpoint.notes
    assert (WEIGHTS_FOLDER / f'{name}.int8.json').is_file()
    card = (WEIGHTS_FOLDER / f'{name}.md').read_text()
    for heading in ('Data', 'Recipe', 'Figures', 'Where it fails'):
        assert f'## {heading}' in card
    for picture in re.findall(r'!\[.*?\]\((.*?)\)', card):
        assert (WEIGHTS_FOLDER / picture).resolve().is_file()


@pytest.mark.parametrize('name', MODELS)
def test_a_model_matches_two_photographs_of_one_thing(name, photographs):
    detector = KeypointDetector.load(name, threads=2)
    first, second = (
        detector.detect(photographs[f'motorcycle_{side}'], max_keypoints=500)
        for side in ('left', 'right')
    )
    matches = match(first, second, verification='fundamental')
    left, right = matches.indices.T
    rows_apart = first.keypoints[left, 1] - second.keypoints[right, 1]
    assert (abs(rows_apart) < 3).sum() > 150  # a stereo pair: the same row in both


def test_scales_bridge_a_change_of_distance(photographs):
    """Four times closer: correct matches at two scales, hardly any at one."""
    detector = KeypointDetector.load('small', threads=2)
    photograph = photographs['astronaut']
    far = np.asarray(cv2.resize(photograph, (128, 128), interpolation=cv2.INTER_AREA), np.uint8)

    def right_matches(scales):
        first, second = (
            detector.detect(image, scales=scales, max_keypoints=500) for image in (photograph, far)
        )
        near, distant = match(first, second).indices.T
        there = (first.keypoints[near] + 0.5) * (128 / 512) - 0.5
        return (np.linalg.norm(there - second.keypoints[distant], axis=1) < 3).sum()

    assert right_matches((1, 0.5)) > 15 > right_matches((1,))


@pytest.mark.parametrize('name', MODELS)
def test_a_model_is_as_good_as_its_card_says_and_above_the_floor(name, shared_data):
    card = (WEIGHTS_FOLDER / f'{name}.md').read_text()
    for title, scales in ((rf'\*\*{name}\*\*', None), (rf'{name}, `--scales 1`', (1,))):
        found = measure(name, scales, shared_data)
        row = re.search(rf'\| {title} \|(.+)\|', card)
        assert row is not None
        said = [float(value.strip(' *')) for value in row[1].split('|')]
        assert found == pytest.approx(said, abs=0.03)
        for metric, value, floor in zip(METRICS, found, FLOOR, strict=True):
            assert value <= floor if metric == 'localization' else value >= floor, metric


def test_half_is_at_the_aim_or_a_pair_short_of_it_but_for_cor_1(shared_data):
    found = dict(zip(METRICS, measure('half', None, shared_data), strict=True))
    aim = dict(zip(METRICS, AIM, strict=True))
    assert found['localization'] <= aim['localization']
    for metric in ('repeatability', 'mscore'):
        assert found[metric] >= aim[metric], metric
    for metric in ('cor3', 'cor5'):
        assert found[metric] >= aim[metric] - 1 / 25 - 0.02, metric  # processors differ by 0.02


@cache
def measure(name, scales, shared_data):
    """Measure on hpatches_mini with the paper's protocol, 320x240, 300 points; as METRICS."""
    extract = partial(
        KeypointDetector.load(name, precision='fp32').detect,
        scales=scales, max_keypoints=None, nms_radius=0.0, score_threshold=0.0,
    )  # fmt: skip
    sequences = load_sequences(shared_data / 'hpatches_mini')
    evaluation = evaluate(extract, sequences, seeds=10, nms_radius=0, truth='paper')
    means = evaluation.mean()
    return [means[metric] for metric in METRICS]


@pytest.mark.parametrize('name', MODELS)
def test_an_image_without_texture_has_next_to_no_keypoints(name, photographs):
    detector = KeypointDetector.load(name, precision='fp32')
    sharp = photographs['coffee']
    images = {
        'black': np.zeros((480, 640, 3), np.uint8),
        'flat': np.full((480, 640, 3), 128, np.uint8),
        'defocused': np.asarray(cv2.GaussianBlur(sharp, (0, 0), 16), np.uint8),
    }
    found = {kind: len(detector.detect(image, scales=(1,))) for kind, image in images.items()}
    assert len(detector.detect(sharp, scales=(1,))) > 500
    assert found['black'] < 10 and found['flat'] < 10 and found['defocused'] < 200, found
