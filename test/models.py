"""Models for tests: seeded random weights, batch norm settled on photographs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kp2d_core.architecture import VARIANTS, Architecture
from kp2d_core.checkpoint import Checkpoint, save_checkpoint
from kp2d_core.networks import KeyPointNet


@cache
def random_checkpoint(variant: str = 'half', seed: int = 0) -> Checkpoint:
    return untrained(VARIANTS[variant], seed)


def untrained(architecture: Architecture, seed: int = 0) -> Checkpoint:
    """Make random weights with real batch norm statistics instead of zeros and ones."""
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    network = KeyPointNet(architecture)
    with torch.no_grad():
        for name, value in network.state_dict().items():
            if name.endswith('running_mean'):
                value.normal_(0, 0.1)
            elif name.endswith('running_var'):
                value.uniform_(0.5, 1.5)
            elif name.endswith('.1.bias'):
                value.normal_(0, 0.1)
    torch.set_rng_state(generator_state)
    weights = {name: value.numpy() for name, value in network.state_dict().items()}
    return Checkpoint(architecture, weights)


def write_random_model(folder: Path, variant: str = 'half', seed: int = 0) -> Path:
    path = folder / f'{variant}-{seed}.safetensors'
    save_checkpoint(path, random_checkpoint(variant, seed))
    return path


def write_responsive_model(folder: Path, gain: float = 3.0) -> Path:
    """Write an untrained model with larger weights, whose keypoints move with the image."""
    quiet = random_checkpoint('half')
    weights = {
        name: value * value.dtype.type(gain) if value.ndim == 4 else value
        for name, value in quiet.weights.items()
    }
    path = folder / 'responsive.safetensors'
    save_checkpoint(path, Checkpoint(quiet.architecture, weights))
    return path


def shift(x: float, y: float) -> Tensor:
    return torch.tensor([[[1, 0, x], [0, 1, y], [0, 0, 1.0]]])


def grid_of_points(rows: int = 4, columns: int = 5) -> Tensor:
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing='ij')
    return torch.stack([8 * x + 3.5, 8 * y + 3.5], -1).reshape(1, -1, 2).float()
