"""Training on four photographs again and again: all losses fall, recall rises."""

from __future__ import annotations

import numpy as np
import torch

from kp2d_core.networks import IONet
from kp2d_core.training.config import TrainingConfig
from kp2d_core.training.losses import io_loss
from kp2d_core.training.model import TrainingModel, halves
from kp2d_core.training.optimizer import learning_rate, make_optimizers
from kp2d_core.training.pairs import Batch, BatchStream, PairSource
from kp2d_core.training.photographs import Photographs
from kp2d_core.training.recipes import override

STEPS = 120
RECIPE = [
    'network.width=8', 'network.descriptor_size=64', 'network.dropout=0.0',
    'pairs.width=128', 'pairs.height=96', 'pairs.framing=crop', 'pairs.short_side=[160, 200]',
    'pairs.strong.crop=1.0', 'pairs.strong.rotation=20', 'pairs.strong.inside=false',
    'pairs.strong.shift=8', 'pairs.mild_share=[[0, 0.7]]', 'loss.descriptor=infonce',
    'loss.descriptor_weight=0.5', 'loss.location=2.0', 'loss.location_score_power=2',
    'loss.io_points=60', 'optimizer.kind=muon', 'optimizer.batch=4', 'optimizer.schedule=cosine',
    'optimizer.warmup_steps=20', 'compute.workers=0',
]  # fmt: skip


def test_four_photographs_are_learnt(photographs):
    config = override(TrainingConfig(), RECIPE)
    names = ('astronaut', 'chelsea', 'coffee', 'motorcycle_left')
    source = PairSource(Photographs([photographs[name] for name in names]), config)
    torch.manual_seed(0)
    model = TrainingModel(config)
    optimizers = make_optimizers(model, config.optimizer)
    stream = BatchStream(source, 0)
    unlearnt = io_loss_to_constant(model, source)
    history: dict[str, list[float]] = {}
    for step in range(STEPS):
        batch = next(stream)
        loss, parts = model(batch.images, batch.source_to_target, step)
        model.zero_grad()
        loss.backward()
        rate = learning_rate(config.optimizer, step, step / STEPS)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group['lr'] = rate * group.get('factor', 1.0)
            optimizer.step()
        for name, value in parts.items():
            history.setdefault(name, []).append(value.item())

    def mean(name: str, begin: int, end: int | None) -> float:
        return float(np.mean(history[name][begin:end]))

    for name in ('location', 'score', 'descriptor', 'total'):
        assert mean(name, -20, None) < mean(name, 0, 3), name
    assert mean('descriptor', -20, None) < 0.25 * mean('descriptor', 0, 3)
    assert mean('location', -20, None) < 0.85 * mean('location', 0, 3)
    assert mean('recall', 0, 10) < 0.3
    assert mean('recall', -20, None) > 0.8
    # The task of IO-Net changes: at first nearly all pairs are outliers, which is easy to predict.
    # Its loss is therefore compared with that of the best constant answer.
    learnt = io_loss_to_constant(model, source)
    assert learnt < min(0.9, 0.8 * unlearnt), (unlearnt, learnt)


class AlwaysInlier(IONet):
    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(pairs[:, 0])


def io_loss_to_constant(model: TrainingModel, source: PairSource) -> float:
    """Ratio of IO-Net's loss on held-out batches to that of the best constant answer."""
    stream = BatchStream(source, 10 * STEPS)
    losses = [io_losses(model, next(stream)) for _ in range(3)]
    loss, loss_of_always_inlier = np.mean(losses, axis=0)
    outliers = loss_of_always_inlier / 2
    return float(loss / (2 * outliers * (1 - outliers)))


@torch.no_grad()
def io_losses(model: TrainingModel, batch: Batch) -> tuple[float, float]:
    """The losses of IO-Net, and of calling every pair an inlier."""
    source, target = halves(model.maps(batch.images))
    loss, always = (
        io_loss(network, source, target, batch.source_to_target, 60, 4.0).item()
        for network in (model.io_net, AlwaysInlier())
    )
    return loss, always
