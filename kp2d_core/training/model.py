"""The module that is trained: KeyPointNet and IO-Net; its output is the loss."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kp2d_core.architecture import Architecture
from kp2d_core.checkpoint import Checkpoint, Weights
from kp2d_core.networks import IONet, KeyPointNet, Maps
from kp2d_core.networks.geometry import normalise
from kp2d_core.training.association import FrontLayer
from kp2d_core.training.config import TrainingConfig
from kp2d_core.training.losses import Lesson, total_loss

SPREAD = 0.5  # standard deviation of the part that cancels out, relative to that of the weights


class TrainingModel(nn.Module):
    """From images and homographies to the loss."""

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__()
        self.config = config
        self.network = KeyPointNet(config.network.architecture(), config.network.dropout)
        self.io_net = IONet()
        # In a list, so that its weights are neither trained nor saved.
        self.teachers: list[KeyPointNet] = []
        if config.loss.teacher:
            self.teachers = [KeyPointNet.from_pretrained(config.loss.teacher, dropout=0.0)]
        self.to(memory_format=self.memory_format)  # type: ignore[call-overload]

    def forward(
        self,
        images: Tensor,
        source_to_target: Tensor,
        step: int,
        front: FrontLayer | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config.network
        self.network.dropout.p = config.dropout if step >= config.dropout_from else 0.0
        maps = self.maps(images)
        source, target = halves(maps)
        cell = self.network.architecture.cell
        return total_loss(
            source, target, source_to_target, self.io_net, self.config.loss, step, cell,
            self.lesson(images), front,
        )  # fmt: skip

    def maps(self, images: Tensor) -> Maps:
        """Run on uint8 images (2B, H, W, 3) in the configured precision; return float32."""
        device = images.device
        kind = computing_type(self.config.compute.precision, device)
        exact = kind == torch.float32
        with nullcontext() if exact else torch.autocast(device.type, kind):
            maps = self.network(normalise(images).contiguous(memory_format=self.memory_format))
        return Maps(*(value.float() for value in maps))

    def lesson(self, images: Tensor) -> Lesson | None:
        """Return the output of the teacher, if there is one."""
        if not self.teachers:
            return None
        teacher = self.teachers[0].to(images.device)
        with torch.no_grad():
            x = normalise(images).contiguous(memory_format=self.memory_format)
            source, target = teacher(x).descriptors.chunk(2)
        return Lesson(source, target, teacher.architecture.pinned)

    @property
    def memory_format(self) -> torch.memory_format:
        if self.config.compute.channels_last:
            return torch.channels_last
        return torch.contiguous_format


def halves(maps: Maps) -> tuple[Maps, Maps]:
    """Split the maps of a batch into those of the sources and of the targets."""
    sources, targets = zip(*(value.chunk(2) for value in maps), strict=True)
    return Maps(*sources), Maps(*targets)


class MovingAverage:
    """Exponential moving average of the weights, usable at any time during the run."""

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {k: v.detach().clone() for k, v in network.state_dict().items()}

    @torch.no_grad()
    def update(self, network: nn.Module, step: int) -> None:
        decay = min(self.decay, (step + 1) / (step + 10))  # smaller at first, to forget the start
        current = network.state_dict()
        averaged = [k for k, v in current.items() if v.is_floating_point()]
        torch._foreach_lerp_(
            [self.weights[k] for k in averaged], [current[k] for k in averaged], 1 - decay
        )
        for name in current.keys() - set(averaged):
            self.weights[name].copy_(current[name])


def to_weights(state: dict[str, Tensor]) -> Weights:
    return {name: value.detach().cpu().contiguous().numpy() for name, value in state.items()}


def to_checkpoint(
    state: dict[str, Tensor], config: TrainingConfig, step: int, evaluation: dict[str, float]
) -> Checkpoint:
    return Checkpoint(
        config.network.architecture(), to_weights(state), step=step, evaluation=evaluation
    )


@lru_cache
def computing_type(precision: str, device: torch.device) -> torch.dtype:
    """Return the type for `compute.precision`; auto is bfloat16 if the device supports it."""
    if precision != 'auto':
        return getattr(torch, precision)
    return torch.bfloat16 if multiplies_bfloat16(device) else torch.float32


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device computes bfloat16 in hardware, faster than float32."""
    if device.type == 'cuda':
        return torch.cuda.get_device_capability(device) >= (8, 0)
    # Only x86 reports its instructions, and only to torch 2.10 or newer.
    capabilities: dict[str, object] = getattr(torch.cpu, 'get_capabilities', dict)()
    return any(capabilities.get(name) for name in ('avx512_bf16', 'amx_bf16'))


def grows_into(small: Architecture, large: Architecture) -> bool:
    """Whether `large` is the same network with a multiple of the channels."""
    copies, rest = divmod(large.width, small.width)
    if copies < 2 or rest or large.descriptor_size != copies * small.descriptor_size:
        return False
    alike = replace(small, width=large.width, descriptor_size=large.descriptor_size)
    return replace(alike, variant=large.variant) == large


def grow(checkpoint: Checkpoint, wanted: Architecture, seed: int = 0) -> Weights:
    """Grow a checkpoint to `wanted`, so that both networks compute the same.

    Every channel is copied. In the next layer, the weights of each copy are a share of the
    original weights plus a random part, and the random parts cancel out. The output is the same to
    the last digits, but no two copies are identical, so each learns by itself from the first step
    (after Chen, Goodfellow and Shlens, "Net2Net", 2016).
    """
    small = checkpoint.architecture
    if not grows_into(small, wanted):
        raise ValueError(f'a {small.variant} network does not grow into {wanted.variant}')
    copies = wanted.width // small.width
    random = np.random.default_rng(seed)
    grown: Weights = {}
    layers = small.layers()
    for name, shape in wanted.parameter_shapes().items():
        value = checkpoint.weights[name]
        if value.ndim and len(value) != shape[0]:
            value = np.concatenate([value] * copies)
        if value.ndim == 4 and value.shape[1] != shape[1]:
            # Each of the concatenated input maps has its own copies.
            ends = np.cumsum(layers[name.split('.')[0]].inputs)
            parts = np.split(value, ends[:-1], axis=1)
            value = np.concatenate([split(part, copies, random) for part in parts], axis=1)
        grown[name] = np.asarray(value, order='C')
    return grown


def split(
    kernel: NDArray[np.float32], copies: int, random: np.random.Generator
) -> NDArray[np.float32]:
    """Copy (outputs, inputs, 3, 3) to (outputs, copies * inputs, 3, 3); the sum stays the same."""
    noise = random.normal(0, SPREAD * kernel.std(), (copies, *kernel.shape))
    noise -= noise.mean(axis=0)
    return np.concatenate([*(kernel / copies + noise)], axis=1).astype(np.float32)
