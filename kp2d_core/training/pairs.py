"""Pairs of views of one photograph with the homography between them.

A pair is a function of the seed and its number alone, so the position in the data is a step
number: resuming is exact, and any number of processes share the work without talking.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from kp2d_core.images import Image, Size, resize_matrix, size_of
from kp2d_core.training.config import (
    PairsConfig,
    Schedule,
    TrainingConfig,
)
from kp2d_core.training.photographs import Photographs
from kp2d_core.views.homography import (
    HomographyConfig,
    Matrix,
    sample_source_to_target,
)
from kp2d_core.views.photometric import change_light, sample_shared_colour
from kp2d_core.views.rendering import pixels_per_view_pixel, render


@dataclass(frozen=True)
class Batch:
    """Views of B photographs; `source_to_target` takes source pixels to target pixels."""

    images: Tensor  # (2B, H, W, 3) uint8: B sources, then their B targets
    source_to_target: Tensor  # (B, 3, 3) float32

    def to(self, device: torch.device) -> Batch:
        return Batch(
            self.images.to(device, non_blocking=True),
            self.source_to_target.to(device, non_blocking=True),
        )


def make_pair(
    photograph: Image,
    random: np.random.Generator,
    config: TrainingConfig,
    homography: HomographyConfig,
) -> tuple[Image, Image, Matrix]:
    """Source view, target view, and the homography from source to target."""
    pairs = config.pairs
    size = pairs.width, pairs.height
    source_to_target = sample_source_to_target(random, size, homography)
    enlarged = max(1.0, 1 / pixels_per_view_pixel(source_to_target, size))
    target_to_photograph = sample_target_view(random, size_of(photograph), pairs, enlarged)
    source = render(photograph, target_to_photograph @ source_to_target, size)
    target = render(photograph, target_to_photograph, size)
    if random.random() < pairs.swap:
        source, target = target, source
        source_to_target = np.asarray(np.linalg.inv(source_to_target), np.float64)

    shared = sample_shared_colour(random, config.photometric)
    source = change_light(random, source, shared, config.photometric)
    target = change_light(random, target, shared, config.photometric)
    return source, target, source_to_target / depth_of_centre(source_to_target, size)


def sample_target_view(
    random: np.random.Generator, photograph: Size, pairs: PairsConfig, enlarged: float = 1.0
) -> Matrix:
    """The matrix from pixels of the target view to those of the photograph.

    If the source is so many times `enlarged`, the target shows more of the photograph, as far as
    there is more: else the source would be a blur, as no camera's view from nearby is.
    """
    size = pairs.width, pairs.height
    if pairs.framing == 'whole':
        to_photograph = resize_matrix(size, photograph)
    else:
        zoom = random.uniform(*pairs.short_side) / min(photograph) / enlarged
        zoom = max(zoom, size[0] / photograph[0], size[1] / photograph[1])
        room = np.array(photograph) * zoom - size
        corner = random.uniform(0, np.maximum(room, 0))
        offset = (corner + 0.5) / zoom - 0.5  # pixel centres, as cv2.resize has them
        to_photograph = np.array([[1 / zoom, 0, offset[0]], [0, 1 / zoom, offset[1]], [0, 0, 1.0]])
    if random.random() < pairs.flip:
        to_photograph = to_photograph @ np.array([[-1, 0, size[0] - 1], [0, 1, 0], [0, 0, 1.0]])
    return to_photograph


def depth_of_centre(source_to_target: Matrix, size: Size) -> float:
    """What a homography is divided by so that what is seen has a positive depth.

    Not its last entry, the depth of the corner, which may lie behind the camera.
    """
    middle = np.array([(size[0] - 1) / 2, (size[1] - 1) / 2, 1.0])
    return float(source_to_target[2] @ middle)


def value_at(step: int, schedule: Schedule) -> float:
    """Straight lines between the schedule's points, level before and after them."""
    steps, values = zip(*schedule, strict=True)
    return float(np.interp(step, steps, values))


def weaken(homography: HomographyConfig, strength: float) -> HomographyConfig:
    """Turned and stretched by this share of what it says."""
    return replace(
        homography,
        rotation=strength * homography.rotation,
        stretch=1 + strength * (homography.stretch - 1),
    )


class PairSource:
    """Pairs by number: number n shows the photograph that epoch n // count puts there."""

    def __init__(self, photographs: Photographs, config: TrainingConfig) -> None:
        self.photographs, self.config = photographs, config
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0))

    def pair(self, number: int) -> tuple[Image, Image, Matrix]:
        epoch, place = divmod(number, len(self.photographs))
        photograph = self.photographs[int(self._shuffled(epoch)[place])]
        random = np.random.default_rng([self.config.seed, 1, number])
        step = number // self.config.optimizer.batch
        pairs = self.config.pairs
        mild = random.random() < value_at(step, pairs.mild_share)
        homography = pairs.mild if mild else weaken(pairs.strong, value_at(step, pairs.strength))
        return make_pair(photograph, random, self.config, homography)

    def batch(self, first: int, count: int) -> Batch:
        made = [self.pair(number) for number in range(first, first + count)]
        sources, targets, matrices = zip(*made, strict=True)
        return Batch(
            torch.from_numpy(np.stack(sources + targets)),
            torch.from_numpy(np.stack(matrices).astype(np.float32)),
        )

    def _shuffled(self, epoch: int) -> np.ndarray:
        known, order = self._order  # one tuple, so that threads never see half of a change
        if known != epoch:
            random = np.random.default_rng([self.config.seed, 0, epoch])
            order = random.permutation(len(self.photographs))
            self._order = epoch, order
        return order


class BatchStream:
    """The batches of one process, from a step on, made ahead by threads.

    A step takes `optimizer.batch` pairs over all processes; each makes its own part of them.
    """

    def __init__(
        self, source: PairSource, first_step: int, *, rank: int = 0, processes: int = 1
    ) -> None:
        total = source.config.optimizer.batch
        if total % processes:
            raise ValueError(f'optimizer.batch ({total}) must divide by {processes} processes')
        self.source, self.step = source, first_step
        self.total, self.share = total, total // processes
        self.offset = rank * self.share
        self.waited = 0.0  # seconds that the consumer spent waiting
        workers = source.config.compute.workers
        self._pool = ThreadPoolExecutor(workers, 'pairs') if workers else None
        self._ahead: deque[Future[Batch]] = deque()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        begin = perf_counter()
        if self._pool is None:
            batch = self._make(self.step)
        else:
            wanted = self.source.config.compute.workers + 2
            while len(self._ahead) < wanted:
                step = self.step + len(self._ahead)
                self._ahead.append(self._pool.submit(self._make, step))
            batch = self._ahead.popleft().result()
            # The next one is ordered now, not when it is needed.
            step = self.step + 1 + len(self._ahead)
            self._ahead.append(self._pool.submit(self._make, step))
        self.step += 1
        self.waited += perf_counter() - begin
        return batch

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _make(self, step: int) -> Batch:
        return self.source.batch(step * self.total + self.offset, self.share)
