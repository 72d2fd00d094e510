"""The weights as the graph wants them: each batch norm folded into its convolution."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kp2d_core.architecture import BATCH_NORM_EPSILON, INPUT_SCALE, PLAIN_CONVOLUTIONS
from kp2d_core.checkpoint import Checkpoint

Array = NDArray[np.float32]


class Convolution(NamedTuple):
    """A 3x3 convolution with padding 1."""

    weight: Array  # (outputs, inputs, 3, 3)
    bias: Array  # (outputs,)


def fold(checkpoint: Checkpoint, *, mono: bool = False) -> dict[str, Convolution]:
    """Every convolution by name. The first takes pixels minus their mean, in 0..255 units."""
    names = sorted({name.split('.')[0] for name in checkpoint.weights})
    convolutions = {name: _fold_one(checkpoint, name) for name in names}
    weight, bias = convolutions['conv1a']
    weight = weight * np.float32(INPUT_SCALE / 255)
    if mono:  # gray is RGB with three equal channels
        weight = weight.sum(axis=1, keepdims=True)
    convolutions['conv1a'] = Convolution(weight, bias)
    return convolutions


def _fold_one(checkpoint: Checkpoint, name: str) -> Convolution:
    weights = checkpoint.weights
    if name in PLAIN_CONVOLUTIONS:
        return Convolution(weights[f'{name}.weight'], weights[f'{name}.bias'])
    gamma, beta, mean, variance = (
        weights[f'{name}.1.{entry}'].astype(np.float64)
        for entry in ('weight', 'bias', 'running_mean', 'running_var')
    )
    scale = gamma / np.sqrt(variance + BATCH_NORM_EPSILON)
    weight = weights[f'{name}.0.weight'] * scale[:, None, None, None]
    return Convolution(weight.astype(np.float32), (beta - mean * scale).astype(np.float32))
