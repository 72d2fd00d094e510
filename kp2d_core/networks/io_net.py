"""IO-Net (table 7 of the paper): classifies pairs of keypoints as inliers, only for training."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class IONet(nn.Module):
    """From (B, 5, N) to (B, N): near +1 for an inlier, near -1 for an outlier.

    The five inputs of a pair are source x, y and target x, y in [-1, 1], and descriptor distance.
    """

    def __init__(self, channels: int = 128, blocks: int = 4) -> None:
        super().__init__()
        self.enter = nn.Sequential(
            nn.Conv1d(5, channels, 1, bias=False),
            nn.BatchNorm1d(channels, momentum=0.9),  # the authors' momentum
            nn.ReLU(inplace=True),
        )
        self.blocks = nn.ModuleList(ResidualBlock(channels) for _ in range(blocks))
        self.leave = nn.Conv1d(channels, 1, 1)

    def forward(self, pairs: Tensor) -> Tensor:
        x = self.enter(pairs)
        for block in self.blocks:
            x = block(x)
        inlier: Tensor = self.leave(x)[:, 0]
        return inlier


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv1d(channels, channels, 1), nn.BatchNorm1d(channels)
        self.conv2, self.norm2 = nn.Conv1d(channels, channels, 1), nn.BatchNorm1d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(F.instance_norm(self.conv1(x))))
        y = F.relu(self.norm2(F.instance_norm(self.conv2(y))))
        return x + y
