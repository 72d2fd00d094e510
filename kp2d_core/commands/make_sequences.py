"""kp2d make-sequences: make test sequences from photographs."""

from __future__ import annotations

import argparse
import sys
import zlib
from pathlib import Path

import numpy as np
from tqdm import tqdm

from kp2d_core.commands.arguments import size, whole_number
from kp2d_core.commands.extract import output_paths
from kp2d_core.errors import FileError
from kp2d_core.evaluation.hpatches import write_sequence
from kp2d_core.images import find_images, read_image, size_of
from kp2d_core.views.pairs import make_sequences


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        'Make test sequences in HPatches layout with exact homographies. Each photograph gives '
        'two sequences: v_NAME with shifted, oblique, rotated and zoomed views, and i_NAME with '
        'changes of light. Use the folder with `kp2d evaluate --data` or `kp2d train --val`.'
    )
    parser.add_argument('images', nargs='+', type=Path, help='image files or folders')
    parser.add_argument(
        '-o', '--output', type=Path, required=True, metavar='DIR', help='new folder to write'
    )
    parser.add_argument(
        '--size', type=size, default=(640, 480), metavar='WxH',
        help='size of the views; smaller photographs are skipped (default: 640x480)',
    )  # fmt: skip
    parser.add_argument(
        '--seed', type=whole_number(), default=0, help='random seed; it determines the views'
    )


def run(args: argparse.Namespace) -> int:
    images = find_images(args.images)
    if not images:
        raise ValueError(f'there is no image in {", ".join(map(str, args.images))}')
    if args.output.exists() and not args.output.is_dir():
        raise ValueError(f'{args.output} is a file: give a new folder to -o')
    if args.output.exists() and any(args.output.iterdir()):
        raise ValueError(f'{args.output} is not empty: old sequences would stay among new ones')
    names = [path.stem for path in output_paths(images, args.output)]
    used = 0
    for path, name in zip(tqdm(images, unit='image', disable=None), names, strict=True):
        try:
            photograph = read_image(path)
            given = size_of(photograph)
            if given[0] < args.size[0] or given[1] < args.size[1]:
                raise FileError(f'{path} has only {given[0]}x{given[1]} pixels')
        except FileError as error:
            print(f'kp2d make-sequences: skipped: {error}', file=sys.stderr)
            continue
        # Seeded by name, so that the views of a photograph do not depend on the other ones.
        random = np.random.default_rng([args.seed, zlib.crc32(name.encode())])
        for sequence in make_sequences(photograph, name, args.size, random):
            write_sequence(args.output, sequence)
        used += 1
    if not used:
        raise FileError('none of the photographs could be used')
    print(f'{2 * used} sequences of {used} photographs in {args.output}')
    return 0
