"""Models to time. Speed does not depend on the weights: random ones stand in where none ship."""

from __future__ import annotations

import numpy as np

from kp2d_core.architecture import VARIANTS
from kp2d_core.checkpoint import Checkpoint, find_checkpoint, load_checkpoint, shipped_models
from kp2d_core.export.quantization import QUANTIZED_LAYERS
from kp2d_core.export.source import ModelSource


def checkpoint_to_time(name: str) -> Checkpoint:
    """A shipped model or file; for the name of a variant that does not ship, random weights."""
    if name in VARIANTS and name not in shipped_models():
        return random_checkpoint(name)
    return load_checkpoint(find_checkpoint(name))


def random_checkpoint(variant: str) -> Checkpoint:
    random = np.random.default_rng(0)
    architecture = VARIANTS[variant]
    weights = {}
    for name, shape in architecture.parameter_shapes().items():
        if len(shape) == 4:
            deviation = np.sqrt(2 / (9 * shape[1]))
            weights[name] = random.normal(0, deviation, shape).astype(np.float32)
        elif name.endswith('num_batches_tracked'):
            weights[name] = np.zeros(shape, np.int64)
        else:
            one = name.endswith(('1.weight', 'running_var'))
            weights[name] = np.full(shape, float(one), np.float32)
    return Checkpoint(architecture, weights, notes='random weights, to measure speed')


def source_to_time(name: str, precision: str) -> ModelSource:
    """Any ranges do for int8: the arithmetic is the same."""
    checkpoint = checkpoint_to_time(name)
    ranges = dict.fromkeys(QUANTIZED_LAYERS, 8.0) if precision == 'int8' else None
    return ModelSource(checkpoint.architecture, precision, checkpoint, ranges)
