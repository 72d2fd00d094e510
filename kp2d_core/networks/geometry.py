"""From network outputs to pixels and back: normalisation, decoding, sampling."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kp2d_core import architecture
from kp2d_core.architecture import CELL, INPUT_MEAN, INPUT_SCALE


def normalise(images: Tensor) -> Tensor:
    """uint8 (B, H, W, 3) or float (B, 3, H, W) in [0, 1] -> what the network takes."""
    if images.dtype == torch.uint8:
        images = images.permute(0, 3, 1, 2).to(torch.float32).div_(255)
        return images.sub_(INPUT_MEAN).mul_(INPUT_SCALE)
    return (images - INPUT_MEAN) * INPUT_SCALE


def inner_cells(rows: int, columns: int, device: torch.device) -> Tensor:
    """(rows, columns) bool: all but the outermost ring, which has no keypoints."""
    return torch.from_numpy(architecture.inner_cells(rows, columns)).to(device)


def cell_centres(height: int, width: int, cell: int, like: Tensor) -> Tensor:
    """The pixel coordinates of the centres of height x width cells: (1, 2, height, width)."""
    middle = (cell - 1) / 2
    y = torch.arange(height, device=like.device, dtype=like.dtype) * cell + middle
    x = torch.arange(width, device=like.device, dtype=like.dtype) * cell + middle
    return torch.stack([x.expand(height, width), y[:, None].expand(height, width)])[None]


def decode_locations(offsets: Tensor, offset_range: float, cell: int = CELL) -> Tensor:
    """Offsets (B, 2, Hc, Wc) in (-1, 1) -> pixel coordinates inside the image, same shape."""
    # Not in half precision: its steps are whole pixels from 1024 on, bfloat16's from 128 on.
    offsets = offsets.to(torch.promote_types(offsets.dtype, torch.float32))
    height, width = offsets.shape[-2:]
    points = cell_centres(height, width, cell, offsets) + offsets * offset_range
    x = points[:, 0].clamp(0, cell * width - 1)
    y = points[:, 1].clamp(0, cell * height - 1)
    return torch.stack([x, y], dim=1)


def to_grid(points: Tensor, size: tuple[int, int]) -> Tensor:
    """Pixel coordinates (..., 2) of an image of (height, width) -> [-1, 1], corners at +-1."""
    height, width = size
    half = points.new_tensor([(width - 1) / 2, (height - 1) / 2])
    return points / half - 1


def sample(maps: Tensor, points: Tensor, size: tuple[int, int]) -> Tensor:
    """Values of maps (B, C, h, w) at points (B, N, 2), pixels of an image of `size`: (B, N, C).

    The corner texels of the map are pinned to the image's corner pixels (align_corners=True).
    A map at 1/4 of the resolution is so misregistered by up to 1.5 px; the authors' weights were
    trained with that, and so are ours.
    """
    grid = to_grid(points, size)[:, :, None, :]
    values = F.grid_sample(maps, grid, mode='bilinear', padding_mode='zeros', align_corners=True)
    return values[..., 0].transpose(1, 2)


def sample_descriptors(maps: Tensor, points: Tensor, size: tuple[int, int]) -> Tensor:
    """Unit descriptors (B, N, D) at points (B, N, 2); zero where the map is zero."""
    return F.normalize(sample(maps, points, size), dim=-1)
