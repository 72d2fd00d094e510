"""kp2d import-checkpoint: convert a model file of the KP2D authors."""

from __future__ import annotations

import argparse
from pathlib import Path

from kp2d_core.checkpoint import save_checkpoint
from kp2d_core.reference_checkpoint import read_reference_checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('checkpoint', type=Path, help='checkpoint of the authors, such as v4.ckpt')
    parser.add_argument(
        '-o', '--output', type=Path, help='output file (default: the same name with .safetensors)'
    )
    parser.add_argument(
        '--variant', choices=('v0', 'v1', 'v2', 'v3', 'v4'),
        help='variant of the network (default: that of the file)',
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    checkpoint = read_reference_checkpoint(args.checkpoint, args.variant)
    output = args.output or args.checkpoint.with_suffix('.safetensors')
    save_checkpoint(output, checkpoint)
    print(f'{args.checkpoint} ({checkpoint.architecture.variant}) written to {output}')
    return 0
