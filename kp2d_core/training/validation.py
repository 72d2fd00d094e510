"""How good the weights are: the paper's metrics on pairs that are not trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kp2d_core.checkpoint import Checkpoint
from kp2d_core.detector import KeypointDetector
from kp2d_core.evaluation.hpatches import Sequence, load_sequences
from kp2d_core.evaluation.protocol import Evaluation, Pair, evaluate, evaluate_pair
from kp2d_core.evaluation.shift import shift_test
from kp2d_core.images import Image
from kp2d_core.runtimes.torch import TorchRuntime
from kp2d_core.training.config import TrainingConfig
from kp2d_core.training.pairs import make_pair
from kp2d_core.training.photographs import Entry, Photographs, find_photographs

SIZE = (320, 240)
TOP_K = 300
SHIFT = 4  # px, half a cell: where keypoints that follow the grid are worst
SHIFT_PHOTOGRAPHS = 8

Validate = Callable[[Checkpoint, str], dict[str, float]]  # weights and a device -> metrics


def quality(metrics: dict[str, float]) -> float:
    """One number to choose weights by: found again, matched, and good for a homography."""
    return (metrics['repeatability'] + metrics['mscore'] + metrics['auc3']) / 3


@dataclass(frozen=True)
class MadePair:
    first: Image
    second: Image
    first_to_second: NDArray[np.float64]


def make_validation(
    folder: Path | None, held_out: list[Entry], config: TrainingConfig
) -> Validate | None:
    """On a folder in HPatches layout, on a folder of photographs, or on those held out."""
    if folder is not None and is_hpatches(folder):
        sequences = load_sequences(folder)
        return lambda checkpoint, device: validate_on_sequences(checkpoint, device, sequences)
    entries: list[Entry] = [*find_photographs([folder])] if folder is not None else held_out
    if not entries:
        return None
    photographs = Photographs(entries, short_side=2 * SIZE[1])
    pairs = make_pairs(photographs, config)
    shifted = [photographs[i] for i in range(min(SHIFT_PHOTOGRAPHS, len(photographs)))]
    return lambda checkpoint, device: validate_on_pairs(checkpoint, device, pairs, shifted)


def is_hpatches(folder: Path) -> bool:
    return any(folder.glob('H_1_*')) or any(folder.glob('*/H_1_*'))


def make_pairs(photographs: Photographs, config: TrainingConfig) -> list[MadePair]:
    """One pair of each photograph, always the same; every other one is mild."""
    width, height = SIZE
    pairs = replace(
        config.pairs, width=width, height=height, framing='crop', short_side=(240.0, 320.0)
    )
    config = replace(config, pairs=pairs)
    made = []
    for number in range(len(photographs)):
        random = np.random.default_rng([0, 3, number])
        pair = make_pair(photographs[number], random, config, mild=number % 2 == 1)
        made.append(MadePair(*pair))
    return made


def validate_on_pairs(
    checkpoint: Checkpoint, device: str, pairs: list[MadePair], photographs: list[Image]
) -> dict[str, float]:
    detector = KeypointDetector(TorchRuntime(checkpoint, device=device))
    results = [
        evaluate_pair(
            Pair(detector.detect(pair.first), detector.detect(pair.second), pair.first_to_second),
            SIZE,
            TOP_K,
        )
        for pair in pairs
    ]
    metrics = Evaluation('', SIZE, TOP_K, 1, results).mean()
    shift = shift_test(detector.detect, photographs, [SHIFT], size=SIZE, top_k=TOP_K)
    return _summary(metrics) | {'shift4': shift[0].localization}


def validate_on_sequences(
    checkpoint: Checkpoint, device: str, sequences: list[Sequence]
) -> dict[str, float]:
    detector = KeypointDetector(TorchRuntime(checkpoint, device=device))
    return _summary(evaluate(detector.detect, sequences, size=SIZE, top_k=TOP_K).mean())


def _summary(metrics: dict[str, float]) -> dict[str, float]:
    names = ('repeatability', 'localization', 'cor1', 'cor3', 'cor5', 'mscore', 'auc3')
    return {'quality': quality(metrics)} | {name: metrics[name] for name in names}
