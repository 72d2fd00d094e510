"""`kp2d bench train`: pixels per second of training, compared with a plain implementation."""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, process_time
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from kp2d_core.commands.arguments import positive
from kp2d_core.images import Image
from kp2d_core.threads import set_waiting

if TYPE_CHECKING:
    from kp2d_core.training.config import TrainingConfig
    from kp2d_core.training.photographs import Photographs

WHOLE, CROP, CROPS = (320, 240), (160, 120), 4  # 4 crops have as many pixels as 1 whole image
PHASES = ('waiting for data', 'forward and losses', 'backward', 'optimizer')
REPLY_SECONDS = 600  # longest time of a step


@dataclass(frozen=True)
class Settings:
    config: Path
    data: list[Path] | None
    batch: int  # whole images
    threads: int | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--config', default='small', metavar='RECIPE',
        help="recipe to measure (a name or a YAML file); the paper's losses are used",
    )  # fmt: skip
    parser.add_argument(
        '--data', type=Path, nargs='+', metavar='PATH',
        help='folders of photographs (default: random noise)',
    )  # fmt: skip
    parser.add_argument('--batch', type=positive, default=8, help='whole images per step')
    parser.add_argument('--steps', type=positive, default=8, help='steps of each implementation')
    parser.add_argument('--threads', type=positive, help='CPU threads (default: all cores)')


def run(args: argparse.Namespace) -> int:
    import torch

    from kp2d_core.training.model import computing_type
    from kp2d_core.training.recipes import find_recipe, load_config

    config = find_recipe(args.config)
    recipe = load_config(config)  # reports a mistake here, not in a child process
    settings = Settings(config, args.data, args.batch, args.threads)
    with Worker('plain', settings) as plain, Worker('kp2d', settings) as ours:
        for _ in tqdm(range(args.steps + 2), unit='round'):  # in turns: other load affects both
            plain.step()
            ours.step()
    pixels = 2 * args.batch * WHOLE[0] * WHOLE[1]
    print(
        f'{pixels:,} pixels in a step: {args.batch} pairs of {WHOLE[0]}x{WHOLE[1]} (plain), '
        f'{CROPS * args.batch} of {CROP[0]}x{CROP[1]} (kp2d train)'
    )
    kind = computing_type(recipe.compute.precision, torch.device('cpu'))
    print(f'the network computes in float32 (plain), in {str(kind)[6:]} (kp2d train)')
    print(f'{"":16}{"pixels/s":>12}{"s/step":>10}{"CPU s/step":>12}')
    for name, worker in (('plain', plain), ('kp2d train', ours)):
        wall, cpu = worker.wall(), worker.cpu()
        print(f'{name:16}{pixels / wall:12,.0f}{wall:10.2f}{cpu:12.2f}')
    print(f'{"ratio":16}{plain.wall() / ours.wall():12.2f}{"":10}{plain.cpu() / ours.cpu():12.2f}')
    print('where a step of kp2d train spends its time:')
    phases = np.array([reply[2:] for reply in ours.replies])
    for name, share in zip(PHASES, phases.sum(0) / phases.sum(), strict=True):
        print(f'  {name:20}{100 * share:5.1f} %')
    return 0


class Worker:
    """One implementation in its own process, so that they do not share memory."""

    def __init__(self, way: str, settings: Settings) -> None:
        context = multiprocessing.get_context('spawn')
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(way, settings, theirs), daemon=True)
        environment = dict(os.environ)
        if way == 'kp2d':
            set_waiting()
        self._process.start()
        os.environ.clear()
        os.environ.update(environment)
        self._all: list[tuple[float, ...]] = []

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()

    def step(self) -> None:
        self._pipe.send('step')
        if not self._pipe.poll(REPLY_SECONDS):
            raise ValueError('a step did not end in time')
        try:
            self._all.append(self._pipe.recv())
        except EOFError:
            raise ValueError('a measured process died; its message is above') from None

    @property
    def replies(self) -> list[tuple[float, ...]]:
        return self._all[2:]  # the first ones warm up

    def wall(self) -> float:
        return float(np.median([reply[0] for reply in self.replies]))

    def cpu(self) -> float:
        return float(np.median([reply[1] for reply in self.replies]))


def serve(way: str, settings: Settings, pipe: Connection) -> None:
    """In the child process: make a step for every message, and reply with its seconds."""
    step = (plain_training if way == 'plain' else our_training)(settings)
    while True:
        try:
            pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        wall, cpu = perf_counter(), process_time()
        phases = step()
        pipe.send((perf_counter() - wall, process_time() - cpu, *phases))


def plain_training(settings: Settings) -> Callable[[], list[float]]:
    import torch

    from kp2d_core.benchmarks.plain import plain_loss
    from kp2d_core.training.model import TrainingModel
    from kp2d_core.training.pairs import PairSource

    config = load(settings, WHOLE, settings.batch)
    config = replace(config, compute=replace(config.compute, channels_last=False))
    batch = PairSource(photographs(settings), config).batch(0, settings.batch)
    model = TrainingModel(config)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> list[float]:
        optimizer.zero_grad()
        plain_loss(model, batch.images, batch.source_to_target).backward()
        optimizer.step()
        return []

    return step


def our_training(settings: Settings) -> Callable[[], list[float]]:
    import torch

    from kp2d_core.threads import keep_freed_memory
    from kp2d_core.training.model import TrainingModel
    from kp2d_core.training.pairs import BatchStream, PairSource

    config = load(settings, CROP, CROPS * settings.batch)
    keep_freed_memory()
    stream = BatchStream(PairSource(photographs(settings), config), 0)
    model = TrainingModel(config)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> list[float]:
        times = [perf_counter()]
        batch = next(stream)
        times.append(perf_counter())
        loss, _ = model(batch.images, batch.source_to_target, 0)
        times.append(perf_counter())
        optimizer.zero_grad()
        loss.backward()
        times.append(perf_counter())
        optimizer.step()
        times.append(perf_counter())
        return np.diff(times).tolist()

    return step


def load(settings: Settings, size: tuple[int, int], batch: int) -> TrainingConfig:
    import torch

    from kp2d_core.training.recipes import load_config

    if settings.threads:
        torch.set_num_threads(settings.threads)
    torch.manual_seed(0)
    config = load_config(settings.config)
    pairs = replace(config.pairs, width=size[0], height=size[1])
    # The plain implementation has only the paper's losses.
    loss = replace(
        config.loss,
        descriptor='triplet', location_score_power=0.0, reliability=0.0, score_of='map',
    )  # fmt: skip
    optimizer = replace(config.optimizer, batch=batch)
    return replace(config, pairs=pairs, loss=loss, optimizer=optimizer)


def photographs(settings: Settings) -> Photographs:
    from kp2d_core.training.photographs import Photographs, find_photographs

    if settings.data:
        return Photographs(find_photographs(settings.data))
    return Photographs(noise())


def noise(count: int = 8) -> list[Image]:
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (264, 352, 3), dtype=np.uint8) for _ in range(count)]
