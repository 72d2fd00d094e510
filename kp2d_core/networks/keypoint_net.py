"""KeyPointNet (table 5 of the paper), with the authors' parameter names."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kp2d_core.architecture import CELL, LEAKY_SLOPE, Architecture, Layer
from kp2d_core.networks.geometry import decode_locations, inner_cells


class Maps(NamedTuple):
    """What the network says of a batch of images, cell by cell (Hc = H / 8, Wc = W / 8)."""

    scores: Tensor  # (B, 1, Hc, Wc) in [0, 1], zero in the outermost ring of cells
    keypoints: Tensor  # (B, 2, Hc, Wc): x, y in pixels
    descriptors: Tensor  # (B, D, H / 4, W / 4), or / 8 without upsampling; not normalised


class KeyPointNet(nn.Module):
    """Scores, locations and a descriptor map from normalised images (B, 3, H, W).

    H and W must be multiples of 8; `normalise` in geometry.py prepares uint8 images.
    """

    def __init__(self, architecture: Architecture | None = None, dropout: float = 0.2) -> None:
        super().__init__()
        self.architecture = architecture = architecture or Architecture()
        self.layers = architecture.layers()
        for name, layer in self.layers.items():
            self.add_module(name, convolution(layer))
        self.dropout = nn.Dropout2d(dropout)

    def forward(self, images: Tensor) -> Maps:
        if images.shape[-2] % CELL or images.shape[-1] % CELL:
            raise ValueError(f'height and width must be multiples of {CELL}: {images.shape[-2:]}')
        skip, trunk = self.encode(images)
        return Maps(
            scores=self.score_head(trunk),
            keypoints=self.location_head(trunk),
            descriptors=self.descriptor_head(trunk, skip),
        )

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The features after the third block (1/4 of the resolution) and the fourth (1/8)."""
        x = self.block('conv1a', 'conv1b', images)
        x = self.block('conv2a', 'conv2b', F.max_pool2d(x, 2))
        skip = self.block('conv3a', 'conv3b', F.max_pool2d(x, 2))
        return skip, self.block('conv4a', 'conv4b', F.max_pool2d(skip, 2))

    def score_head(self, trunk: Tensor) -> Tensor:
        x = self.dropout(self.convolve('convDa', trunk))
        scores = torch.sigmoid(self.convolve('convDb', x))
        return scores * inner_cells(scores.shape[-2], scores.shape[-1], scores.device)

    def location_head(self, trunk: Tensor) -> Tensor:
        x = self.dropout(self.convolve('convPa', trunk))
        offsets = torch.tanh(self.convolve('convPb', x))
        return decode_locations(offsets, self.architecture.offset_range, self.architecture.cell)

    def descriptor_features(self, trunk: Tensor, skip: Tensor) -> Tensor:
        """The descriptor head but for its last, linear layer."""
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
        """A layer of the table: convolution, batch norm and activation, as far as it has them."""
        module = self._modules[name]
        assert module is not None
        x = module(x)
        if self.layers[name].active:
            x = F.leaky_relu(x, LEAKY_SLOPE, inplace=True)
        return x


def convolution(layer: Layer) -> nn.Module:
    outputs, inputs, kernel, _ = layer.weight_shape
    if not layer.norm:
        return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )
