"""Batches of pairs of views, made in advance by threads.

A pair depends only on the seed and its number, so the position in the data is a step number. A run
resumes exactly, and any number of processes share the work without communication.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from kp2d_core.training.association import FrontLayer
from kp2d_core.training.config import Schedule, TrainingConfig
from kp2d_core.training.photographs import Photographs
from kp2d_core.views.homography import HomographyConfig
from kp2d_core.views.pairs import Front, ViewPair, make_pair


@dataclass(frozen=True)
class Batch:
    """Views of B photographs; `source_to_target` maps source pixels to target pixels."""

    images: Tensor  # (2B, H, W, 3) uint8: B sources, then their B targets
    source_to_target: Tensor  # (B, 3, 3) float32
    front: FrontLayer | None = None

    def to(self, device: torch.device) -> Batch:
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        """Return the batch in pinned memory, from which a GPU copies while it computes."""
        return self._each(torch.Tensor.pin_memory)

    def _each(self, move: Callable[[Tensor], Tensor]) -> Batch:
        front = None if self.front is None else FrontLayer(*map(move, self.front))
        return Batch(move(self.images), move(self.source_to_target), front)


def value_at(step: int, schedule: Schedule) -> float:
    """Interpolate the schedule linearly; constant before its first and after its last point."""
    steps, values = zip(*schedule, strict=True)
    return float(np.interp(step, steps, values))


def weaken(homography: HomographyConfig, strength: float) -> HomographyConfig:
    """Scale the rotation and the stretch of the ranges by this share."""
    return replace(
        homography,
        rotation=strength * homography.rotation,
        stretch=1 + strength * (homography.stretch - 1),
    )


class PairSource:
    """Makes pairs by number; each epoch shows all photographs in its own order."""

    def __init__(self, photographs: Photographs, config: TrainingConfig) -> None:
        self.photographs, self.config = photographs, config
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0))

    def pair(self, number: int) -> ViewPair:
        epoch, place = divmod(number, len(self.photographs))
        photograph = self.photographs[int(self._shuffled(epoch)[place])]
        random = np.random.default_rng([self.config.seed, 1, number])
        step = number // self.config.optimizer.batch
        pairs = self.config.pairs
        mild = random.random() < value_at(step, pairs.mild_share)
        homography = pairs.mild if mild else weaken(pairs.strong, value_at(step, pairs.strength))
        in_front = None
        if pairs.front_share and random.random() < pairs.front_share:
            in_front = self.photographs[int(random.integers(len(self.photographs)))]
        return make_pair(
            photograph, random, pairs.view_framing(), self.config.photometric, homography, in_front
        )

    def batch(self, first: int, count: int) -> Batch:
        made = [self.pair(number) for number in range(first, first + count)]
        sources, targets, matrices, fronts = zip(*made, strict=True)
        return Batch(
            torch.from_numpy(np.stack(sources + targets)),
            torch.from_numpy(np.stack(matrices).astype(np.float32)),
            front_layer(fronts, sources[0].shape[:2]) if any(fronts) else None,
        )

    def _shuffled(self, epoch: int) -> np.ndarray:
        known, order = self._order  # one tuple, so that threads never see a partial change
        if known != epoch:
            random = np.random.default_rng([self.config.seed, 0, epoch])
            order = random.permutation(len(self.photographs))
            self._order = epoch, order
        return order


def front_layer(fronts: Sequence[Front | None], shape: tuple[int, int]) -> FrontLayer:
    """Stack the objects in front of the pairs of a batch; some pairs have none."""
    nothing = np.zeros(shape, bool)
    filled = [front or Front(nothing, nothing, np.eye(3)) for front in fronts]
    first, second, matrices = (np.stack(values) for values in zip(*filled, strict=True))
    return FrontLayer(
        torch.from_numpy(first), torch.from_numpy(second),
        torch.from_numpy(matrices.astype(np.float32)),
    )  # fmt: skip


class BatchStream:
    """The batches of one process, starting at a step, made in advance by threads.

    A step uses `optimizer.batch` pairs of all processes together; each makes its own part.
    """

    def __init__(
        self,
        source: PairSource,
        first_step: int,
        *,
        rank: int = 0,
        processes: int = 1,
        pinned: bool = False,
    ) -> None:
        total = source.config.optimizer.batch
        if total % processes:
            raise ValueError(f'optimizer.batch ({total}) must divide by {processes} processes')
        self.source, self.step = source, first_step
        self.total, self.share = total, total // processes
        self.offset = rank * self.share
        self.pinned = pinned
        self.waited = 0.0  # seconds that the training has waited for data
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
            # Start the next batch now, not when it is needed.
            step = self.step + 1 + len(self._ahead)
            self._ahead.append(self._pool.submit(self._make, step))
        self.step += 1
        self.waited += perf_counter() - begin
        return batch

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _make(self, step: int) -> Batch:
        batch = self.source.batch(step * self.total + self.offset, self.share)
        return batch.pinned() if self.pinned else batch
