"""kp2d train-words: learn the visual words of a model from photographs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

from kp2d_core.checkpoint import WEIGHTS_FOLDER, find_checkpoint
from kp2d_core.commands.arguments import (
    RawHelpFormatter,
    add_model_arguments,
    load_detector,
    whole_number,
)
from kp2d_core.detector import KeypointDetector
from kp2d_core.errors import FileError
from kp2d_core.features import Float
from kp2d_core.images import find_images, read_image, size_of
from kp2d_core.odometry.words import MOST_WORDS, Words, k_means, save_words, words_path
from kp2d_core.runtimes import DEFAULT_MODEL
from kp2d_core.version import __version__
from kp2d_core.views.pairs import middle_of, render

SIZE = 640, 480  # one for all: the network is compiled once
KEYPOINTS = 1000  # of a photograph; as many as the odometry takes
SAMPLE = 200  # descriptors of a photograph that count, chosen at random
FEWEST = 20  # descriptors for each word, at least

DESCRIPTION = """\
Learn the visual words of a model from photographs, without labels. `kp2d odometry`, `kp2d map` and
the odometry node use them to find places again. They belong to the weights: learn them anew after
each training. Without them, words are learned from the first frames of each recording."""
EXAMPLES = """\
examples:
  kp2d train-words --model runs/train/best.safetensors --data photographs
  kp2d train-words --model small --data photographs -o kp2d_core/weights/small.words.safetensors"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    parser.formatter_class = RawHelpFormatter
    parser.add_argument(
        '--data', type=Path, nargs='+', required=True, metavar='PATH',
        help='image files or folders; a few hundred different photographs suffice',
    )  # fmt: skip
    parser.add_argument(
        '-o', '--output', type=Path, metavar='FILE',
        help='output file (default: MODEL.words.safetensors next to the model, where it is found)',
    )  # fmt: skip
    parser.add_argument(
        '--words', type=whole_number(2, MOST_WORDS), default=128, metavar='N',
        help='number of words; a keyframe takes N times the size of a descriptor',
    )  # fmt: skip
    parser.add_argument(
        '--seed', type=whole_number(), default=0,
        help='random seed; it chooses the descriptors and the first words',
    )  # fmt: skip
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    images = find_images(args.data)
    if not images:
        raise ValueError(f'there is no image in {", ".join(map(str, args.data))}')
    output = args.output or _beside(args.model)
    detector = load_detector(args)
    print(f'{detector.runtime.model} on {detector.runtime.description}')
    random = np.random.default_rng(args.seed)
    samples = _samples(detector, images, random)
    descriptors = np.concatenate(samples) if samples else np.empty((0, 1), np.float32)
    if len(descriptors) < FEWEST * args.words:
        raise ValueError(
            f'{len(samples)} photographs gave {len(descriptors)} descriptors: {args.words} words '
            f'need at least {FEWEST * args.words}'
        )
    origin = {
        'model': Path(detector.runtime.model).stem,
        'runtime': detector.runtime.description,
        'photographs': len(samples),
        'descriptors': len(descriptors),
        'seed': args.seed,
        'package_version': __version__,
    }
    words = k_means(descriptors, args.words, random)
    save_words(output, Words(words, detector.runtime.digest, origin))
    print(f'{output}: {args.words} words of {len(samples)} photographs')
    return 0


def _beside(model: str) -> Path:
    path = find_checkpoint(DEFAULT_MODEL if model == 'auto' else model)
    if path.parent == WEIGHTS_FOLDER:
        raise ValueError(f'{path.stem} is a shipped model: give the file to write with -o')
    return words_path(path)


def _samples(
    detector: KeypointDetector, images: list[Path], random: np.random.Generator
) -> list[Float]:
    """Return some descriptors of each photograph; report those that cannot be used."""
    found = []
    for path in tqdm(images, unit='image', disable=None):
        try:
            photograph = read_image(path)
            view = render(photograph, middle_of(size_of(photograph), SIZE), SIZE)
            rows = detector.detect(view, max_keypoints=KEYPOINTS).descriptors
        except FileError as error:
            print(f'kp2d train-words: skipped: {error}', file=sys.stderr)
            continue
        found.append(rows[random.permutation(len(rows))[:SAMPLE]])
    return found
