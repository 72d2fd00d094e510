"""The state of a run in one safetensors file: everything the next step depends on."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kp2d_core.checks import number, parse_json, whole
from kp2d_core.errors import FileError
from kp2d_core.files import atomic_write
from kp2d_core.training.config import TrainingConfig
from kp2d_core.training.model import MovingAverage, TrainingModel
from kp2d_core.training.recipes import config_from_dict

FORMAT = 'kp2d training state'


@dataclass
class Progress:
    """The progress of a run. The position in the data is the step."""

    step: int = 0
    seconds: float = 0.0  # of training, over all resumed parts
    best: float = float('-inf')  # quality of the best validation so far
    best_step: int = -1
    validated_step: int = -1
    evaluation: dict[str, float] = field(default_factory=dict)  # of the last validation
    loss_scale: dict[str, float] = field(default_factory=dict)  # of float16
    steps: int | None = None  # the budget, as given
    minutes: float | None = None
    photographs: str = ''  # digest of their names, in order
    validation: str = ''  # folder of the validation data
    data: dict[str, Any] = field(default_factory=dict)  # paths, topic, every, as given


def progress_from_json(text: str) -> Progress:
    """The inverse of `json.dumps`; before the first validation, the best is -Infinity."""
    values = parse_json(text.replace('-Infinity', 'null'))
    values['best'] = -math.inf if values['best'] is None else number(values['best'], 'best')
    progress = Progress(**values)
    for name in ('step', 'steps', 'best_step', 'validated_step'):
        if getattr(progress, name) is not None:
            whole(getattr(progress, name), name, least=-1)
    for name in ('seconds', 'minutes'):
        if getattr(progress, name) is not None:
            number(getattr(progress, name), name, least=0)
    return progress


def save_state(
    path: Path,
    config: TrainingConfig,
    progress: Progress,
    model: TrainingModel,
    optimizers: list[torch.optim.Optimizer],
    average: MovingAverage | None,
) -> None:
    """Write atomically: a crash or a full disk leaves the previous file."""
    tensors = {f'model.{name}': value for name, value in model.state_dict().items()}
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, values in optimizer.state.items():
            for name, value in values.items():
                tensors[f'{_prefix(optimizer)}{names[parameter]}.{name}'] = torch.as_tensor(value)
    if average is not None:
        tensors.update({f'average.{name}': value for name, value in average.weights.items()})
    tensors['random.cpu'] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors['random.cuda'] = torch.cuda.get_rng_state()
    metadata = {
        'format': FORMAT,
        'config': json.dumps(config.to_dict()),
        'progress': json.dumps(vars(progress)),
    }
    # Weights may be in channels_last order, which the format does not support.
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    with atomic_write(path) as temporary:
        temporary.write_bytes(save(tensors, metadata))


def read_state(path: Path) -> tuple[TrainingConfig, Progress, dict[str, Tensor]]:
    """Read the configuration, progress and tensors of a run."""
    if not path.is_file() and os.environ.get('RANK', '0') != '0':
        raise FileError(
            f'there is no {path} on this machine: copy it from the first machine, or use a shared '
            'disk'
        )
    if not path.is_file():
        raise FileError(f'there is nothing to resume: no file {path}')
    try:
        with safe_open(path, framework='pt') as file:
            metadata = file.metadata() or {}
            if metadata.get('format') != FORMAT:
                raise FileError(f'{path} is not the state of a training run')
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        config = config_from_dict(parse_json(metadata['config']))
        return config, progress_from_json(metadata['progress']), tensors
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise FileError(f'{path} cannot be read: {error}') from error


def restore_state(
    tensors: dict[str, Tensor],
    model: TrainingModel,
    optimizers: list[torch.optim.Optimizer],
    average: MovingAverage | None,
) -> None:
    """Restore the tensors of `read_state`, the inverse of `save_state`."""
    try:
        model.load_state_dict(_under(tensors, 'model.'))
        for optimizer in optimizers:
            _restore_optimizer(optimizer, model, _under(tensors, _prefix(optimizer)))
        if average is not None:
            saved = _under(tensors, 'average.') or model.network.state_dict()
            for name, value in average.weights.items():
                value.copy_(saved[name])
    except (RuntimeError, KeyError, ValueError) as error:
        reason = str(error).split('\n')[0]
        raise FileError(f'the saved state does not fit the configuration: {reason}') from error
    torch.set_rng_state(tensors['random.cpu'])
    if torch.cuda.is_available() and 'random.cuda' in tensors:
        torch.cuda.set_rng_state(tensors['random.cuda'])


def _prefix(optimizer: torch.optim.Optimizer) -> str:
    return f'optimizer.{type(optimizer).__name__.lower()}.'


def _restore_optimizer(
    optimizer: torch.optim.Optimizer, model: TrainingModel, saved: dict[str, Tensor]
) -> None:
    """Restore by parameter name; a parameter that was not trained before starts with no state."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group['params']]
    state: dict[int, dict[str, Tensor]] = {}
    for index, parameter in enumerate(parameters):
        for name, value in _under(saved, f'{names[parameter]}.').items():
            if value.shape == parameter.shape:  # restore the memory order of the parameter
                value = torch.empty_like(parameter).detach().copy_(value)
            state.setdefault(index, {})[name] = value
    groups = optimizer.state_dict()['param_groups']
    optimizer.load_state_dict({'state': state, 'param_groups': groups})


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
