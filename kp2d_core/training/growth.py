"""A wider network that computes just what a trained one does: a head start for it.

Every channel is copied. Where copies come in, each copy's weights are a share of the original's
plus something random that cancels out over the copies: the outputs are the same to the last
digits, and yet no two copies are alike, so each learns on its own from the first step (after
Chen, Goodfellow and Shlens, "Net2Net", 2016).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kp2d_core.architecture import Architecture
from kp2d_core.checkpoint import Checkpoint, Weights

SPREAD = 0.5  # standard deviation of what cancels out, as a share of that of the weights


def grows_into(small: Architecture, large: Architecture) -> bool:
    """Whether it is the same network with a multiple of the channels."""
    copies, rest = divmod(large.width, small.width)
    return (
        copies > 1
        and rest == 0
        and large.descriptor_size == copies * small.descriptor_size
        and (large.cross_border, large.upsample) == (small.cross_border, small.upsample)
    )


def grow(checkpoint: Checkpoint, wanted: Architecture, seed: int = 0) -> Weights:
    """The weights of `wanted`, which says what the checkpoint says."""
    small = checkpoint.architecture
    if not grows_into(small, wanted):
        raise ValueError(f'a {small.variant} network does not grow into {wanted.variant}')
    copies = wanted.width // small.width
    random = np.random.default_rng(seed)
    grown: Weights = {}
    for name, shape in wanted.parameter_shapes().items():
        value = checkpoint.weights[name]
        if value.ndim and len(value) != shape[0]:
            value = np.concatenate([value] * copies)
        if value.ndim == 4 and value.shape[1] != shape[1]:
            # Two maps side by side enter convFaa if there is upsampling: each has its copies.
            parts = np.split(value, 2 if small.upsample and name == 'convFaa.0.weight' else 1, 1)
            value = np.concatenate([split(part, copies, random) for part in parts], axis=1)
        grown[name] = np.asarray(value, order='C')
    return grown


def split(
    kernel: NDArray[np.float32], copies: int, random: np.random.Generator
) -> NDArray[np.float32]:
    """(outputs, inputs, 3, 3) -> (outputs, copies * inputs, 3, 3), the sum over copies kept."""
    noise = random.normal(0, SPREAD * kernel.std(), (copies, *kernel.shape))
    noise -= noise.mean(axis=0)
    return np.concatenate([*(kernel / copies + noise)], axis=1).astype(np.float32)
