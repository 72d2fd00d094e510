"""What is trained: KeyPointNet and IO-Net in one module whose output is the loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kp2d_core.checkpoint import Checkpoint, Weights
from kp2d_core.networks import IONet, KeyPointNet, Maps
from kp2d_core.networks.geometry import normalise
from kp2d_core.training.config import TrainingConfig
from kp2d_core.training.losses import total_loss
from kp2d_core.training.precision import computing_type


class TrainingModel(nn.Module):
    """Images and homographies in, loss out."""

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__()
        self.config = config
        self.network = KeyPointNet(config.network.architecture(), config.network.dropout)
        self.io_net = IONet()
        self.to(memory_format=self.memory_format)  # type: ignore[call-overload]

    def forward(
        self, images: Tensor, source_to_target: Tensor, step: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        maps = self.maps(images)
        source, target = halves(maps)
        return total_loss(source, target, source_to_target, self.io_net, self.config.loss, step)

    def maps(self, images: Tensor) -> Maps:
        """Of uint8 images (2B, H, W, 3); in the configured precision, returned in float32."""
        device = images.device
        kind = computing_type(self.config.compute.precision, device)
        with torch.autocast(device.type, kind, enabled=kind != torch.float32):
            maps = self.network(normalise(images).contiguous(memory_format=self.memory_format))
        return Maps(*(value.float() for value in maps))

    @property
    def memory_format(self) -> torch.memory_format:
        if self.config.compute.channels_last:
            return torch.channels_last
        return torch.contiguous_format


def halves(maps: Maps) -> tuple[Maps, Maps]:
    """The source's and the target's maps of a batch that holds both."""
    sources, targets = zip(*(value.chunk(2) for value in maps), strict=True)
    return Maps(*sources), Maps(*targets)


class MovingAverage:
    """Exponential average of a network's weights: they can be used at any time, and are better."""

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {k: v.detach().clone() for k, v in network.state_dict().items()}

    @torch.no_grad()
    def update(self, network: nn.Module, step: int) -> None:
        decay = min(self.decay, (step + 1) / (step + 10))  # short at first, to forget the start
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
