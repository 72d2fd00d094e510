"""KeyPointNet (table 5 of the paper), with the authors' parameter names."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kp2d_core.architecture import CELL, LEAKY_SLOPE, Architecture
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
        c1, c2, c3, c4 = architecture.channels
        self.conv1a, self.conv1b = conv_norm(3, c1), conv_norm(c1, c1)
        self.conv2a, self.conv2b = conv_norm(c1, c2), conv_norm(c2, c2)
        self.conv3a, self.conv3b = conv_norm(c2, c3), conv_norm(c3, c3)
        self.conv4a, self.conv4b = conv_norm(c3, c4), conv_norm(c4, c4)
        self.convDa, self.convDb = conv_norm(c4, c4), nn.Conv2d(c4, 1, 3, padding=1)
        self.convPa, self.convPb = conv_norm(c4, c4), nn.Conv2d(c4, 2, 3, padding=1)
        self.convFa, self.convFb = conv_norm(c4, c4), conv_norm(c4, 2 * c4)
        self.convFaa = conv_norm(c4, c4)
        self.convFbb = nn.Conv2d(c4, architecture.descriptor_size, 3, padding=1)
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
        x = self.dropout(activate(self.conv1b(activate(self.conv1a(images)))))
        x = F.max_pool2d(x, 2)
        x = self.dropout(activate(self.conv2b(activate(self.conv2a(x)))))
        x = F.max_pool2d(x, 2)
        skip = self.dropout(activate(self.conv3b(activate(self.conv3a(x)))))
        x = F.max_pool2d(skip, 2)
        return skip, self.dropout(activate(self.conv4b(activate(self.conv4a(x)))))

    def score_head(self, trunk: Tensor) -> Tensor:
        x = self.dropout(activate(self.convDa(trunk)))
        scores = torch.sigmoid(self.convDb(x))
        return scores * inner_cells(scores.shape[-2], scores.shape[-1], scores.device)

    def location_head(self, trunk: Tensor) -> Tensor:
        x = self.dropout(activate(self.convPa(trunk)))
        return decode_locations(torch.tanh(self.convPb(x)), self.architecture.offset_range)

    def descriptor_features(self, trunk: Tensor, skip: Tensor) -> Tensor:
        """The descriptor head but for its last, linear layer."""
        x = self.dropout(activate(self.convFa(trunk)))
        if self.architecture.upsample:
            x = torch.cat([F.pixel_shuffle(self.convFb(x), 2), skip], dim=1)
        return activate(self.convFaa(x))

    def descriptor_head(self, trunk: Tensor, skip: Tensor) -> Tensor:
        descriptors: Tensor = self.convFbb(self.descriptor_features(trunk, skip))
        return descriptors


def conv_norm(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
    )


def activate(x: Tensor) -> Tensor:
    return F.leaky_relu(x, LEAKY_SLOPE, inplace=True)
