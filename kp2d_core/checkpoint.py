"""Model files: safetensors with the architecture in the metadata. Read without torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from kp2d_core.architecture import INPUT_MEAN, INPUT_SCALE, Architecture
from kp2d_core.checks import parse_json, shown, whole
from kp2d_core.errors import FileError
from kp2d_core.files import atomic_write
from kp2d_core.version import __version__

FORMAT = 'kp2d'
SHORT_DIGEST = 16  # characters of a digest that name weights
WEIGHTS_FOLDER = Path(__file__).parent / 'weights'

Weights = dict[str, NDArray[Any]]


@dataclass
class Checkpoint:
    """A KeyPointNet: its architecture, its weights (float32) and their origin."""

    architecture: Architecture
    weights: Weights
    step: int = 0  # number of training steps
    evaluation: dict[str, Any] = field(default_factory=dict)  # measured figures
    notes: str = ''  # a sentence about the origin of the weights
    package_version: str = __version__  # of the package that wrote the file

    def __post_init__(self) -> None:
        check_weights(self.weights, self.architecture)

    def digest(self) -> str:
        """SHA-256 of names, shapes and values, which identifies a model in caches."""
        sha = hashlib.sha256(json.dumps(self.architecture.to_dict(), sort_keys=True).encode())
        for name in sorted(self.weights):
            array = self.weights[name]
            sha.update(f'{name} {array.dtype} {array.shape}'.encode())
            sha.update(array.tobytes())
        return sha.hexdigest()


def check_weights(weights: Weights, architecture: Architecture) -> None:
    """Raise FileError unless every entry exists, has the right shape and is finite."""
    expected = architecture.parameter_shapes()
    missing = sorted(set(expected) - set(weights))
    if missing:
        raise FileError(f'{len(missing)} weights are missing, the first is {missing[0]}')
    foreign = sorted(set(weights) - set(expected))
    if foreign:
        raise FileError(
            f'{len(foreign)} weights do not belong to this network, the first is {foreign[0]}'
        )
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise FileError(
                f'{name} has shape {weights[name].shape}, a {architecture.variant} network '
                f'of width {architecture.width} needs {shape}'
            )
        if not np.isfinite(weights[name]).all():
            raise FileError(f'{name} holds NaN or infinity')


def save_checkpoint(path: str | Path, checkpoint: Checkpoint, *, half: bool = False) -> None:
    """Write a model file atomically. `half` stores float16, for the shipped models."""
    weights = {name: np.asarray(v, order='C') for name, v in checkpoint.weights.items()}
    if half:
        weights = {
            name: value.astype(np.float16) if value.dtype == np.float32 else value
            for name, value in near_one(weights, checkpoint.architecture).items()
        }
        check_weights(weights, checkpoint.architecture)  # detects an overflow
    metadata = {
        'format': FORMAT,
        'architecture': json.dumps(checkpoint.architecture.to_dict()),
        'normalisation': json.dumps({'mean': INPUT_MEAN, 'scale': INPUT_SCALE}),
        'step': str(checkpoint.step),
        'evaluation': json.dumps(checkpoint.evaluation),
        'notes': checkpoint.notes,
        'package_version': __version__,
    }
    with atomic_write(path) as temporary:
        temporary.write_bytes(save(weights, metadata))


def near_one(weights: Weights, architecture: Architecture) -> Weights:
    """Scale each channel before a batch norm, so that its variance lies between 1/2 and 2.

    The batch norm divides the factor out again. Long training makes variances of thousands, which
    float16 stores badly or not at all. Factors are powers of 2, which change no digits.
    """
    scaled = dict(weights)
    for name, layer in architecture.layers().items():
        if layer.norm:
            kernel, mean, variance = (
                f'{name}.{entry}' for entry in ('0.weight', '1.running_mean', '1.running_var')
            )
            factor = np.exp2(-np.round(np.log2(np.maximum(weights[variance], 1e-9)) / 2))
            scaled[kernel] = weights[kernel] * factor[:, None, None, None]
            scaled[mean] = weights[mean] * factor
            scaled[variance] = weights[variance] * factor**2
    return scaled


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read and check a model file; float16 becomes float32."""
    path = Path(path)
    if not path.is_file():
        raise FileError(f'there is no file {path}')
    try:
        with safe_open(path, framework='np') as file:
            metadata = file.metadata() or {}
            if metadata.get('format') != FORMAT:
                raise FileError('it is not a kp2d model (no such format in its metadata)')
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return Checkpoint(
            architecture=Architecture.from_dict(parse_json(metadata['architecture'])),
            weights={name: _to_float32(value) for name, value in weights.items()},
            step=whole(int(metadata.get('step', 0)), 'step', most=2**63),
            evaluation=_figures(parse_json(metadata.get('evaluation', '{}'))),
            notes=metadata.get('notes', ''),
            package_version=metadata.get('package_version', 'unknown'),
        )
    except FileError as error:
        raise FileError(f'{path} cannot be used: {error}') from error
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f'{path} is not a readable safetensors model: {error}') from error


def _figures(values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ValueError(f'evaluation must hold figures by name, got {shown(values)}')
    return values


def shipped_models() -> list[str]:
    """List the models in the package by the names that `KeypointDetector.load` takes."""
    names = (path.stem for path in WEIGHTS_FOLDER.glob('*.safetensors'))
    return sorted(name for name in names if '.' not in name)  # small.words is no model


def find_checkpoint(name_or_path: str | Path) -> Path:
    """Return the file of a shipped model such as 'small', or the path itself."""
    if str(name_or_path) in shipped_models():
        return WEIGHTS_FOLDER / f'{name_or_path}.safetensors'
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path
    raise FileError(
        f"there is no model '{name_or_path}': give a file, or one of the shipped models: "
        f'{", ".join(shipped_models()) or "none"}'
    )


def _to_float32(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.float32) if array.dtype == np.float16 else array
