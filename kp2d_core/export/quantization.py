"""The weights of the graph: folded batch norms, int8 codes, ranges."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kp2d_core.architecture import BATCH_NORM_EPSILON, INPUT_SCALE, Architecture, Layer
from kp2d_core.checkpoint import Checkpoint
from kp2d_core.checks import number, parse_json, shown, whole
from kp2d_core.errors import FileError
from kp2d_core.files import atomic_write, read_text

Array = NDArray[np.float32]
FORMAT = 'kp2d-int8-ranges-1'
LEVELS = 127  # codes go from -LEVELS to LEVELS

Ranges = dict[str, float]  # layer -> the magnitude at which its output is clipped


class Convolution(NamedTuple):
    """A convolution that keeps the size of its map."""

    weight: Array  # (outputs, inputs, kernel, kernel)
    bias: Array  # (outputs,)


def fold(checkpoint: Checkpoint, *, mono: bool = False) -> dict[str, Convolution]:
    """Fold every convolution, by name. The first takes pixels minus their mean, in 0..255."""
    layers = checkpoint.architecture.layers()
    convolutions = {name: _fold_one(checkpoint, layer) for name, layer in layers.items()}
    first = next(iter(layers))
    weight, bias = convolutions[first]
    weight = weight * np.float32(INPUT_SCALE / 255)
    if mono:  # gray is RGB with three equal channels
        weight = weight.sum(axis=1, keepdims=True)
    convolutions[first] = Convolution(weight, bias)
    return convolutions


def _fold_one(checkpoint: Checkpoint, layer: Layer) -> Convolution:
    weights, name = checkpoint.weights, layer.name
    if not layer.norm:
        return Convolution(weights[f'{name}.weight'], weights[f'{name}.bias'])
    gamma, beta, mean, variance = (
        weights[f'{name}.1.{entry}'].astype(np.float64)
        for entry in ('weight', 'bias', 'running_mean', 'running_var')
    )
    scale = gamma / np.sqrt(variance + BATCH_NORM_EPSILON)
    weight = weights[f'{name}.0.weight'] * scale[:, None, None, None]
    return Convolution(weight.astype(np.float32), (beta - mean * scale).astype(np.float32))


def quantized_layers(architecture: Architecture) -> list[str]:
    """List the layers with int8 outputs in the order of the graph: each needs a range."""
    return [name for name, layer in architecture.layers().items() if layer.int8 == 'output']


def quantize_weight(weight: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return codes, and a scale for each output channel."""
    largest = np.abs(weight).max(axis=(1, 2, 3))
    scales = (np.maximum(largest, 1e-9) / LEVELS).astype(np.float32)
    codes = np.rint(weight / scales[:, None, None, None])
    return codes.astype(np.int8), scales


def equalise(
    convolutions: dict[str, Convolution], ranges: Ranges, architecture: Architecture
) -> tuple[dict[str, Convolution], Ranges]:
    """Bring both inputs of a concatenation to one range, so that they can share a scale.

    The first input must come from a layer without activation. Its output is multiplied by a
    factor, and the weights of the joining layer are divided by the same factor.
    """
    convolutions, ranges = dict(convolutions), dict(ranges)
    for name, layer in architecture.layers().items():
        if not layer.joins:
            continue
        linear, other = layer.joins
        factor = np.float32(ranges[other] / ranges[linear])
        weight = convolutions[name].weight.copy()
        weight[:, : layer.inputs[0]] /= factor
        scaled = convolutions[linear]
        convolutions[linear] = Convolution(scaled.weight * factor, scaled.bias * factor)
        convolutions[name] = Convolution(weight, convolutions[name].bias)
        ranges[linear] = ranges[other]
    return convolutions, ranges


@dataclass(frozen=True)
class Calibration:
    """The ranges of one model, and the data that they were measured on."""

    ranges: Ranges
    checkpoint_digest: str
    images: int

    def save(self, path: str | Path) -> None:
        values = {
            'format': FORMAT,
            'checkpoint': self.checkpoint_digest,
            'images': self.images,
            # All digits: the ranges are part of the graph, and engines are identified by it.
            'ranges': {name: float(value) for name, value in self.ranges.items()},
        }
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(values, indent=2) + '\n')


def calibration_path(checkpoint_path: str | Path) -> Path:
    """Return the file of the ranges of a model: model.safetensors -> model.int8.json."""
    return Path(checkpoint_path).with_suffix('.int8.json')


def load_calibration(path: str | Path, checkpoint: Checkpoint) -> Calibration:
    """Read and check the ranges; refuse those of other weights."""
    path = Path(path)
    try:
        values = parse_json(read_text(path))
        if values['format'] != FORMAT:
            raise ValueError(f'its format is {shown(values["format"])}, not {FORMAT!r}')
        layers = quantized_layers(checkpoint.architecture)
        ranges = {
            name: number(values['ranges'][name], f'the range of {name}', above=0)
            for name in layers
        }
        images = whole(values['images'], 'the number of images')
        calibration = Calibration(ranges, str(values['checkpoint']), images)
    except (ValueError, KeyError, TypeError) as error:
        raise FileError(f'{path} does not hold int8 ranges: {error}') from error
    if calibration.checkpoint_digest != checkpoint.digest():
        raise FileError(f'{path} holds the int8 ranges of other weights: calibrate again')
    return calibration
