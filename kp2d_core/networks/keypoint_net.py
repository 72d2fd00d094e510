"""KeyPointNet (table 6 of the paper), with the authors' parameter names."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kp2d_core.architecture import CELL, LEAKY_SLOPE, LOG_SIGMA_RANGE, Architecture, Layer
from kp2d_core.checkpoint import Checkpoint, find_checkpoint, load_checkpoint
from kp2d_core.networks.geometry import decode_locations, inner_cells, refine, sample_descriptors


class Maps(NamedTuple):
    """The outputs for a batch of images, by cell (Hc = H / cell, Wc = W / cell)."""

    scores: Tensor  # (B, 1, Hc, Wc) in [0, 1], zero in the outermost ring of cells
    keypoints: Tensor  # (B, 2, Hc, Wc): x, y in pixels, refined if the network has a refinement
    descriptors: Tensor  # (B, D, H / 4, W / 4), or / 8 without upsampling; not normalised
    sigma: Tensor  # (B, 1, Hc, Wc): expected error of the keypoints in pixels; 1 if not estimated


class KeyPointNet(nn.Module):
    """Computes scores, locations and a descriptor map of normalised images (B, 3, H, W).

    It is an ordinary `nn.Module`: its only state are weights and batch norms. H and W must be
    multiples of 8.

    >>> network = KeyPointNet.from_pretrained('small')  # or KeyPointNet(VARIANTS['small'])
    >>> maps = network(normalise(images))  # uint8 (B, H, W, 3), or floats in [0, 1] (B, 3, H, W)
    >>> points = maps.keypoints.flatten(2).transpose(1, 2)  # (B, N, 2) in pixels, one per cell
    >>> scores = maps.scores.flatten(1)  # (B, N)
    >>> descriptors = network.describe(maps, points)  # (B, N, D), of unit length
    >>> save_checkpoint('mine.safetensors', network.to_checkpoint())  # for KeypointDetector.load

    `normalise` is in kp2d_core.networks.geometry, the losses of the paper are in
    kp2d_core.training.losses. examples/train_your_own.py is a complete training loop.

    architecture  one of `architecture.VARIANTS`, or your own; default: V4
    dropout       share of channels that are dropped in training mode
    """

    def __init__(self, architecture: Architecture | None = None, dropout: float = 0.2) -> None:
        super().__init__()
        self.architecture = architecture = architecture or Architecture()
        self.layers = architecture.layers()
        for name, layer in self.layers.items():
            self.add_module(name, convolution(layer))
        self.dropout = nn.Dropout2d(dropout)

    @classmethod
    def from_pretrained(cls, model: str | Path, dropout: float = 0.2) -> KeyPointNet:
        """Load a shipped model by name, or a .safetensors file, in evaluation mode."""
        return cls.from_checkpoint(load_checkpoint(find_checkpoint(model)), dropout)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, dropout: float = 0.2) -> KeyPointNet:
        network = cls(checkpoint.architecture, dropout)
        network.load_state_dict({k: torch.from_numpy(v) for k, v in checkpoint.weights.items()})
        return network.eval()

    def to_checkpoint(self, step: int = 0, notes: str = '') -> Checkpoint:
        """Return the current weights, for `save_checkpoint`."""
        weights = {k: v.detach().cpu().contiguous().numpy() for k, v in self.state_dict().items()}
        return Checkpoint(self.architecture, weights, step=step, notes=notes)

    def forward(self, images: Tensor) -> Maps:
        if images.shape[-2] % CELL or images.shape[-1] % CELL:
            raise ValueError(f'height and width must be multiples of {CELL}: {images.shape[-2:]}')
        early, half, skip, trunk = self.encode(images)
        if self.architecture.cell == CELL:
            scores, coarse = self.score_head(trunk), self.location_head(trunk)
            descriptors, sigma = self.descriptor_head(trunk, skip), torch.ones_like(scores)
        else:
            scores, coarse, descriptors, sigma = self.shared_heads(trunk, skip)
        keypoints = coarse
        if self.architecture.saliency:
            points = coarse.flatten(2).transpose(1, 2)
            points = refine(self.saliency(early, half).float(), points)
            keypoints = points.transpose(1, 2).unflatten(2, coarse.shape[2:])
        return Maps(scores, keypoints, descriptors, sigma)

    def describe(self, maps: Maps, points: Tensor) -> Tensor:
        """Sample descriptors (B, N, D) of unit length at points (B, N, 2), in pixels."""
        cell, (rows, columns) = self.architecture.cell, maps.scores.shape[-2:]
        size = cell * rows, cell * columns
        return sample_descriptors(maps.descriptors, points, size, pinned=self.architecture.pinned)

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute the features at 1 (or 1/2), 1/2, 1/4 and 1/8 of the resolution."""
        early = self.block('conv1a', 'conv1b', images)
        x = early if self.architecture.stem == 2 else F.max_pool2d(early, 2)
        half = self.block('conv2a', 'conv2b', x)
        skip = self.block('conv3a', 'conv3b', F.max_pool2d(half, 2))
        return early, half, skip, self.block('conv4a', 'conv4b', F.max_pool2d(skip, 2))

    def shared_heads(self, trunk: Tensor, skip: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute scores, locations, descriptors and sigma with the shared decoder."""
        x = trunk
        if self.architecture.context:
            deep = self.convolve('conv5a', F.max_pool2d(trunk, 2, ceil_mode=True))
            deep = F.pixel_shuffle(self.convolve('conv5b', deep), 2)
            x = torch.cat([deep[..., : trunk.shape[-2], : trunk.shape[-1]], trunk], dim=1)
        x = self.convolve('convFb', self.dropout(self.convolve('convFa', x)))
        x = torch.cat([F.pixel_shuffle(x, 2), skip], dim=1)
        x = self.convolve('convFaa', x)
        found = self.convolve('convDb', self.convolve('convDa', x)).float()
        scores = torch.sigmoid(found[:, :1])
        return (
            scores * inner_cells(scores.shape[-2], scores.shape[-1], scores.device),
            decode_locations(
                torch.tanh(found[:, 1:3]), self.architecture.offset_range, self.architecture.cell
            ),
            self.convolve('convFbb', x),
            found[:, 3:].clamp(*LOG_SIGMA_RANGE).exp(),
        )

    def saliency(self, early: Tensor, half: Tensor) -> Tensor:
        """Compute the saliency map (B, 1, H, W): high at pixels that can be found again."""
        fine = self.convolve('convSb', self.convolve('convSa', early))
        coarse = self.convolve('convSc', half)
        if self.architecture.stem == 2:
            return F.pixel_shuffle(fine + coarse, 2)
        return fine + F.pixel_shuffle(coarse, 2)

    def score_head(self, trunk: Tensor) -> Tensor:
        x = self.dropout(self.convolve('convDa', trunk))
        scores = torch.sigmoid(self.convolve('convDb', x))
        return scores * inner_cells(scores.shape[-2], scores.shape[-1], scores.device)

    def location_head(self, trunk: Tensor) -> Tensor:
        x = self.dropout(self.convolve('convPa', trunk))
        offsets = torch.tanh(self.convolve('convPb', x))
        return decode_locations(offsets, self.architecture.offset_range, self.architecture.cell)

    def descriptor_features(self, trunk: Tensor, skip: Tensor) -> Tensor:
        """Compute the descriptor head without its last, linear layer."""
        x = self.dropout(self.convolve('convFa', trunk))
        if self.architecture.upsample:
            x = torch.cat([F.pixel_shuffle(self.convolve('convFb', x), 2), skip], dim=1)
        return self.convolve('convFaa', x)

    def descriptor_head(self, trunk: Tensor, skip: Tensor) -> Tensor:
        return self.convolve('convFbb', self.descriptor_features(trunk, skip))

    def block(self, first: str, second: str, x: Tensor) -> Tensor:
        dropped: Tensor = self.dropout(self.convolve(second, self.convolve(first, x)))
        return dropped

    def convolve(self, name: str, x: Tensor) -> Tensor:
        """Compute a layer of the table: convolution, and batch norm and activation if any."""
        module = self._modules[name]
        assert module is not None
        x = module(x)
        if self.layers[name].active:
            x = F.leaky_relu(x, LEAKY_SLOPE, inplace=True)
        return x


def convolution(layer: Layer) -> nn.Module:
    outputs, inputs, kernel, _ = layer.weight_shape
    convolution = nn.Conv2d(
        inputs, outputs, kernel, layer.stride, layer.padding, bias=not layer.norm
    )
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs)) if layer.norm else convolution
