"""The weights as the graph wants them: batch norms folded in, int8 codes, ranges."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kp2d_core.architecture import BATCH_NORM_EPSILON, INPUT_SCALE, PLAIN_CONVOLUTIONS
from kp2d_core.checkpoint import Checkpoint
from kp2d_core.errors import FileError
from kp2d_core.files import atomic_write

Array = NDArray[np.float32]
FORMAT = 'kp2d-int8-ranges-1'
LEVELS = 127  # codes go from -LEVELS to LEVELS

Ranges = dict[str, float]  # layer -> the largest magnitude of its output that counts

# The layers whose outputs are quantized, in the order of the graph.
QUANTIZED_LAYERS = (
    'conv1a', 'conv1b', 'conv2a', 'conv2b', 'conv3a', 'conv3b', 'conv4a', 'conv4b',
    'convFa', 'convFb', 'convFaa',
)  # fmt: skip


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


def quantize_weight(weight: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Codes, and a scale for each output channel."""
    largest = np.abs(weight).max(axis=(1, 2, 3))
    scales = (np.maximum(largest, 1e-9) / LEVELS).astype(np.float32)
    codes = np.rint(weight / scales[:, None, None, None])
    return codes.astype(np.int8), scales


def equalise(
    convolutions: dict[str, Convolution], ranges: Ranges
) -> tuple[dict[str, Convolution], Ranges]:
    """Bring both inputs of the concatenation to one range, so that one scale fits both.

    convFb has no activation: what is multiplied into its output divides out of convFaa's weights.
    """
    factor = np.float32(ranges['conv3b'] / ranges['convFb'])
    upsampled, joined = convolutions['convFb'], convolutions['convFaa']
    weight = joined.weight.copy()
    weight[:, : len(upsampled.bias) // 4] /= factor  # the pixel shuffle leaves 1/4 of the channels
    changed = {
        'convFb': Convolution(upsampled.weight * factor, upsampled.bias * factor),
        'convFaa': Convolution(weight, joined.bias),
    }
    return convolutions | changed, ranges | {'convFb': ranges['conv3b']}


@dataclass(frozen=True)
class Calibration:
    """The ranges of one model, and what they were measured on."""

    ranges: Ranges
    checkpoint_digest: str
    images: int

    def save(self, path: str | Path) -> None:
        values = {
            'format': FORMAT,
            'checkpoint': self.checkpoint_digest,
            'images': self.images,
            # To the last digit: engines are found by their graph, which these are part of.
            'ranges': {name: float(value) for name, value in self.ranges.items()},
        }
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(values, indent=2) + '\n')


def calibration_path(checkpoint_path: str | Path) -> Path:
    """Where the ranges of a model lie: model.safetensors -> model.int8.json."""
    return Path(checkpoint_path).with_suffix('.int8.json')


def load_calibration(path: str | Path, checkpoint: Checkpoint) -> Calibration:
    """Read and check; the ranges of other weights are refused."""
    path = Path(path)
    try:
        values = json.loads(path.read_text())
        if values['format'] != FORMAT:
            raise ValueError(f'its format is {values["format"]!r}, not {FORMAT!r}')
        ranges = {name: float(values['ranges'][name]) for name in QUANTIZED_LAYERS}
        if not all(0 < value < float('inf') for value in ranges.values()):
            raise ValueError('a range is not above 0')
        calibration = Calibration(ranges, str(values['checkpoint']), int(values['images']))
    except OSError as error:
        raise FileError(f'cannot read {path}: {error.strerror or error}') from error
    except (ValueError, KeyError, TypeError) as error:
        raise FileError(f'{path} does not hold int8 ranges: {error}') from error
    if calibration.checkpoint_digest != checkpoint.digest():
        raise FileError(f'{path} holds the int8 ranges of other weights: calibrate again')
    return calibration
