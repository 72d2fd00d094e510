"""Tiny training runs in separate processes, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[1]
TIMEOUT = 120  # seconds, of anything

# A network and views that take milliseconds; dropout and averaging are on because they have state.
TINY = [
    'network.variant=tiny', 'network.width=4', 'network.descriptor_size=16', 'network.dropout=0.2',
    'pairs.width=64', 'pairs.height=64', 'pairs.framing=crop', 'pairs.mild_share=[[0, 0.5]]',
    'loss.io_points=30', 'optimizer.kind=muon', 'optimizer.batch=2', 'optimizer.ema=0.9',
    'optimizer.schedule=cosine',
    'compute.threads=1', 'compute.device=cpu', 'report.log_every=2', 'report.validate_every=8',
    'report.validation_photographs=1', 'report.pictures=1',
]  # fmt: skip
SAVE_EVERY_STEP = 'report.checkpoint_minutes=0'


def write_photographs(folder: Path, photographs: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    for name, image in photographs.items():
        small = cv2.resize(image, (160, 120), interpolation=cv2.INTER_AREA)
        cv2.imwrite(str(folder / f'{name}.png'), small[..., ::-1])
    return folder


def environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get('PYTHONPATH', '')]
    path = os.pathsep.join(filter(None, paths))
    return {**os.environ, 'PYTHONPATH': path, 'OMP_NUM_THREADS': '1'}


def command(data: Path, out: Path, *more: str, settings: list[str] | None = None) -> list[str]:
    recipe = ['--config', 'v4', *(f'--set={value}' for value in [*TINY, *(settings or [])])]
    if '--resume' in more:
        recipe = []
    return ['train', '--data', str(data), '--out', str(out), '--quiet', *recipe, *more]


def start(arguments: list[str], **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, '-m', 'kp2d_core.cli', *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return code and output; a process that hangs is killed and fails the test."""
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, output


def run(arguments: list[str], **options: object) -> tuple[int, str]:
    return finish(start(arguments, **options))


def same_tensors(first: Path, second: Path) -> bool:
    """Bit for bit."""
    a, b = load_file(first), load_file(second)
    return a.keys() == b.keys() and all(a[k].tobytes() == b[k].tobytes() for k in a)
