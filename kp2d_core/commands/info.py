"""kp2d info: show what this machine can run, or what a model file contains."""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

from kp2d_core import runtimes
from kp2d_core.checkpoint import (
    SHORT_DIGEST,
    Checkpoint,
    find_checkpoint,
    load_checkpoint,
    shipped_models,
)
from kp2d_core.errors import FileError
from kp2d_core.evaluation.tables import EXPLANATIONS
from kp2d_core.odometry.words import find_words
from kp2d_core.version import __version__

VALIDATION = (
    'last validation of the training, on held-out pairs (320x240, the best 300 points, one scale):'
)
FIGURES = EXPLANATIONS | {
    'quality': 'mean of repeatability, mscore and auc3, which selects the best weights',
    'shift4': 'mean distance in px of points found again after a shift of 4 px; lower is better',
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('model', nargs='?', help='name of a shipped model, or a model file')


def run(args: argparse.Namespace) -> int:
    print(describe_machine() if args.model is None else describe_model(args.model))
    return 0


def describe_machine() -> str:
    lines = [f'kp2d {__version__}, Python {platform.python_version()}, {platform.machine()}']
    lines += ['', 'shipped models:']
    for name in shipped_models():
        checkpoint = load_checkpoint(find_checkpoint(name))
        lines.append(f'  {name:10} {_summary(checkpoint)}')
    statuses = runtimes.available_runtimes()
    lines.append(f'  {"auto":10} {runtimes.DEFAULT_MODEL}, on every machine')
    lines += ['', 'runtimes, best first:']
    for status in statuses:
        lines.append(
            f'  {status.name:12} {"yes" if status.available else "no ":4} {status.detail}'
        )
    return '\n'.join(lines)


def describe_model(model: str) -> str:
    path = find_checkpoint(model)
    if path.suffix.lower() == '.onnx':
        return describe_exported(path)
    checkpoint = load_checkpoint(path)
    architecture = checkpoint.architecture
    lines = [
        f'{path.name}: {_summary(checkpoint)}',
        f'  offsets         up to +-{architecture.offset_range} px from the centre of a cell',
        f'  descriptor map  1/{architecture.descriptor_stride} of the resolution',
        f'  training steps  {checkpoint.step}',
        f'  written by      kp2d {checkpoint.package_version}',
        f'  digest          {checkpoint.digest()[:SHORT_DIGEST]}',
    ]
    lines.append(f'  visual words    {_words(path, checkpoint)}')
    if checkpoint.notes:
        lines.append(f'  notes           {checkpoint.notes}')
    if checkpoint.evaluation:
        lines += ['', VALIDATION]
    for name, value in checkpoint.evaluation.items():
        shown = f'{value:.3f}' if isinstance(value, float) else str(value)
        lines.append(f'  {name:15} {shown:7} {FIGURES.get(name, "")}'.rstrip())
    return '\n'.join(lines)


def _words(path: Path, checkpoint: Checkpoint) -> str:
    try:
        words = find_words(path, checkpoint.digest())
    except FileError as error:
        return f'none: {error}'
    if words is None:
        return 'none: they are learned from each recording'
    return f'{len(words.values)}, of {words.origin.get("photographs", "?")} photographs'


def describe_exported(path: Path) -> str:
    from kp2d_core.export.source import read_exported  # needs onnx

    exported = read_exported(path)
    architecture = exported.architecture
    return (
        f'{path.name}: exported {architecture.variant}, {exported.profile}, '
        f'{architecture.descriptor_size}-d descriptors\n'
        f'  weights digest  {exported.checkpoint_digest[:SHORT_DIGEST]}'
    )


def _summary(checkpoint: Checkpoint) -> str:
    architecture = checkpoint.architecture
    learned = sum(
        values.size
        for name, values in checkpoint.weights.items()
        if not name.endswith(('running_mean', 'running_var', 'num_batches_tracked'))
    )
    return (
        f'{architecture.variant}, {learned / 1e6:.2f} M parameters, width {architecture.width}, '
        f'{architecture.descriptor_size}-d descriptors'
    )
