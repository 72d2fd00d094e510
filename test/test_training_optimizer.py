"""Muon: orthogonal steps for kernels, Adam for everything else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kp2d_core.training.config import OptimizerConfig, TrainingConfig
from kp2d_core.training.model import TrainingModel
from kp2d_core.training.optimizer import Muon, is_kernel, make_optimizers, orthogonal
from kp2d_core.training.recipes import override


@pytest.mark.parametrize('shape', [(16, 144), (144, 16), (32, 32)])
def test_orthogonal_keeps_directions_and_evens_out_their_strengths(shape):
    torch.manual_seed(0)
    left, strengths, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    uneven = left * torch.logspace(0, -1.5, len(strengths)) @ right
    step = orthogonal(uneven)
    assert step.shape == shape
    alike = torch.linalg.svdvals(step)
    assert alike.min() > 0.6 and alike.max() < 1.3
    off = left.T @ step @ right.T
    assert (off - off.diagonal().diag()).abs().max() < 1e-3


def test_a_gradient_of_nothing_moves_nothing():
    assert orthogonal(torch.zeros(4, 9)).abs().max() == 0


def test_kernels_are_the_hidden_convolutions():
    model = TrainingModel(override(TrainingConfig(), ['network.width=8']))
    kernels = {name for name, p in model.named_parameters() if is_kernel(p)}
    assert 'network.conv1b.0.weight' in kernels and 'network.convFbb.weight' in kernels
    for name in ('conv1a.0.weight', 'convDb.weight', 'convPb.weight', 'convFbb.bias'):
        assert f'network.{name}' not in kernels
    assert all(name.startswith('network.conv') for name in kernels)


def test_steps_have_the_size_that_the_rate_says():
    convolution = nn.Conv2d(8, 16, 3)
    optimizer = Muon([convolution.weight], 5e-3)
    before = convolution.weight.detach().clone()
    convolution(torch.ones(1, 8, 5, 5)).square().sum().backward()
    optimizer.step()
    moved = torch.linalg.matrix_norm((convolution.weight.detach() - before).flatten(1), 2)
    assert moved.item() == pytest.approx(5e-3 * 0.2 * 72**0.5, rel=0.35)


@pytest.mark.parametrize('kind', ['adam', 'muon'])
def test_both_learn(kind):
    torch.manual_seed(0)
    teacher, student = (
        nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)) for _ in range(2)
    )
    config = OptimizerConfig(kind=kind, learning_rate=1e-3, kernel_rate=1e-2)
    optimizers = make_optimizers(student, config)
    losses = []
    for _ in range(150):
        images = torch.randn(8, 4, 8, 8)
        loss = (student(images) - teacher(images).detach()).square().mean()
        student.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
