"""Validation: the paper's metrics on held-out pairs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import cv2
import numpy as np

from kp2d_core.architecture import CELL
from kp2d_core.checkpoint import Checkpoint
from kp2d_core.detector import NMS_RADIUS, KeypointDetector
from kp2d_core.errors import FileError
from kp2d_core.evaluation.hpatches import Sequence, load_sequences, rescale
from kp2d_core.evaluation.protocol import (
    Evaluation,
    Extract,
    Pair,
    PairResult,
    evaluate,
    evaluate_pair,
    look,
)
from kp2d_core.evaluation.robustness import shift_test
from kp2d_core.images import Image, read_image, size_of
from kp2d_core.runtimes.torch import TorchRuntime
from kp2d_core.training.photographs import Entry, Photographs, find_photographs
from kp2d_core.training.report import draw_pair
from kp2d_core.views.pairs import MILD, TURNED, VIEWPOINT, Framing, ViewPair, make_pair
from kp2d_core.views.photometric import PhotometricConfig

SIZE = (320, 240)
TOP_K = 300
# The pairs alternate between these, whatever the recipe, so that runs can be compared.
HOMOGRAPHIES = {'mild': MILD, 'viewpoint': VIEWPOINT, 'turned': TURNED}
SHIFT = 4  # px, half a cell: the worst case for keypoints that follow the grid
SHIFT_PHOTOGRAPHS = 8


@dataclass(frozen=True)
class Validation:
    """Validation data: sequences of photographs, or pairs made of one photograph each."""

    pairs: list[ViewPair]  # made pairs, or a few pairs of the sequences for drawings
    sequences: list[Sequence]
    shifted: list[Image]  # photographs for the shift test

    def measure(self, checkpoint: Checkpoint, device: str) -> dict[str, float]:
        """Measure at 320x240 with 300 points; `quality` selects the best weights."""
        detector = KeypointDetector(TorchRuntime(checkpoint, device=device))
        # One scale, for speed; the paper's networks with the paper's protocol.
        radius = 0.0 if checkpoint.architecture.cell == CELL else NMS_RADIUS
        extract = partial(
            detector.detect,
            scales=(1,),
            max_keypoints=None,
            nms_radius=radius,
            score_threshold=0.0,
        )
        if self.sequences:
            evaluation = evaluate(extract, self.sequences, size=SIZE, top_k=TOP_K)
            return _summary(evaluation.mean())
        results = [_measure_pair(extract, pair) for pair in self.pairs]
        metrics = Evaluation('', SIZE, TOP_K, 1, results).mean()
        shift = shift_test(extract, self.shifted, [SHIFT], size=SIZE, top_k=TOP_K)
        return _summary(metrics) | {'shift4': shift[0].localization}

    def draw(self, checkpoint: Checkpoint, device: str, count: int) -> dict[str, Image]:
        """Draw the first `count` pairs."""
        runtime = TorchRuntime(checkpoint, device=device)
        detector = KeypointDetector(runtime)
        pictures: dict[str, Image] = {}
        for number, pair in enumerate(self.pairs[:count]):
            drawn = draw_pair(
                detector, runtime.network, pair.first, pair.second, pair.first_to_second
            )
            pictures |= {f'pair {number}/{name}': picture for name, picture in drawn.items()}
        return pictures


def make_validation(folder: Path | None, held_out: list[Entry]) -> Validation | None:
    """Use a folder in HPatches layout, a folder of photographs, or the held-out photographs."""
    if folder is not None and is_hpatches(folder):
        sequences = load_sequences(folder)
        return Validation([_last_pair(sequence) for sequence in sequences], sequences, [])
    entries: list[Entry] = [*find_photographs([folder])] if folder is not None else held_out
    if not entries:
        return None
    try:
        photographs = Photographs(entries, short_side=2 * SIZE[1])
    except FileError:
        if folder is not None:
            raise
        print('no held-out photograph can be read: nothing is validated', file=sys.stderr)
        return None
    shifted = [photographs[i] for i in range(min(SHIFT_PHOTOGRAPHS, len(photographs)))]
    return Validation(make_pairs(photographs), [], shifted)


def quality(metrics: dict[str, float]) -> float:
    """Combine repeatability, matching score and homography accuracy into one number."""
    return (metrics['repeatability'] + metrics['mscore'] + metrics['auc3']) / 3


def is_hpatches(folder: Path) -> bool:
    return any(folder.glob('H_1_*')) or any(folder.glob('*/H_1_*'))


def make_pairs(photographs: Photographs) -> list[ViewPair]:
    """Make one pair of each photograph, always the same; the light changes as in the paper."""
    made = []
    for number in range(len(photographs)):
        kind = list(HOMOGRAPHIES)[number % len(HOMOGRAPHIES)]
        framing = Framing(SIZE, whole=False, short_side=(240, 300), swap=0.5)
        random = np.random.default_rng([0, 3, number])
        light = PhotometricConfig(noise=(0, 0.02))
        made.append(make_pair(photographs[number], random, framing, light, HOMOGRAPHIES[kind]))
    return made


def _measure_pair(extract: Extract, pair: ViewPair) -> PairResult:
    first, second = (look(i, extract(i), TOP_K) for i in (pair.first, pair.second))
    return evaluate_pair(Pair(first, second, pair.first_to_second), TOP_K)


def _last_pair(sequence: Sequence) -> ViewPair:
    """Return the hardest pair of a sequence, at the size of the evaluation."""
    number, homography = max(sequence.homographies.items())
    images = [read_image(sequence.images[n]) for n in (1, number)]
    scaled = rescale(homography, size_of(images[0]), size_of(images[1]), SIZE)
    first, second = (np.asarray(cv2.resize(image, SIZE), np.uint8) for image in images)
    return ViewPair(first, second, scaled)


def _summary(metrics: dict[str, float]) -> dict[str, float]:
    names = ('repeatability', 'localization', 'cor1', 'cor3', 'cor5', 'mscore', 'auc3')
    return {'quality': quality(metrics)} | {name: metrics[name] for name in names}
