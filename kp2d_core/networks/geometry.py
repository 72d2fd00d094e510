"""From network outputs to pixels and back: normalisation, decoding, sampling."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kp2d_core.architecture import (
    CELL,
    INPUT_MEAN,
    INPUT_SCALE,
    REFINE_RADIUS,
    REFINE_SPREAD,
    REFINE_STEPS,
)
from kp2d_core.geometry import resize_matrix, scale_matrix


def normalise(images: Tensor) -> Tensor:
    """Convert uint8 (B, H, W, 3) or float (B, 3, H, W) in [0, 1] to the input of the network."""
    if images.dtype == torch.uint8:
        images = images.permute(0, 3, 1, 2).to(torch.float32).div_(255)
        return images.sub_(INPUT_MEAN).mul_(INPUT_SCALE)
    return (images - INPUT_MEAN) * INPUT_SCALE


def inner_cells(rows: int, columns: int, device: torch.device) -> Tensor:
    """Mark all cells except the outermost ring, which has no keypoints: (rows, columns)."""
    inner = torch.zeros(rows, columns, dtype=torch.bool, device=device)
    inner[1:-1, 1:-1] = True
    return inner


def vector(x: float, y: float, like: Tensor) -> Tensor:
    """Make (x, y) on the device of `like`: a copy from the CPU would wait for the GPU."""
    return torch.stack([like.new_full((), x), like.new_full((), y)])


def cell_centres(height: int, width: int, cell: int, like: Tensor) -> Tensor:
    """The pixel coordinates of the centres of height x width cells: (1, 2, height, width)."""
    middle = scale_matrix(cell, cell)[0, 2]
    y = torch.arange(height, device=like.device, dtype=like.dtype) * cell + middle
    x = torch.arange(width, device=like.device, dtype=like.dtype) * cell + middle
    return torch.stack([x.expand(height, width), y[:, None].expand(height, width)])[None]


def to_cells(points: Tensor, cell: int) -> Tensor:
    """Convert pixels to units of cells; the centres of cells are at integers."""
    return (points - scale_matrix(cell, cell)[0, 2]) / cell


def decode_locations(offsets: Tensor, offset_range: float, cell: int = CELL) -> Tensor:
    """Convert offsets (B, 2, Hc, Wc) in (-1, 1) to pixels inside the image, of the same shape."""
    # In float32: float16 has steps of a whole pixel from 1024 on, bfloat16 from 128 on.
    offsets = offsets.to(torch.promote_types(offsets.dtype, torch.float32))
    height, width = offsets.shape[-2:]
    points = cell_centres(height, width, cell, offsets) + offsets * offset_range
    x = points[:, 0].clamp(0, cell * width - 1)
    y = points[:, 1].clamp(0, cell * height - 1)
    return torch.stack([x, y], dim=1)


def to_grid(points: Tensor, size: tuple[int, int]) -> Tensor:
    """Convert pixels (..., 2) of an image of (height, width) to [-1, 1], corner pixels at ±1."""
    height, width = size
    half = vector((width - 1) / 2, (height - 1) / 2, points)
    return points / half - 1


def sample(maps: Tensor, points: Tensor, size: tuple[int, int], *, pinned: bool = True) -> Tensor:
    """Sample maps (B, C, h, w) at points (B, N, 2), pixels of an image of `size`: (B, N, C).

    pinned  the corner texels of the map lie on the corner pixels of the image, as the authors'
            weights expect; this shifts a map at 1/4 of the resolution by up to 1.5 px. Otherwise
            each texel lies in the middle of its pixels
    """
    if pinned:
        grid, padding = to_grid(points, size), 'zeros'
    else:
        height, width = maps.shape[-2:]
        to_map = resize_matrix((size[1], size[0]), (width, height))
        ratio = vector(to_map[0, 0], to_map[1, 1], points)
        offset = vector(to_map[0, 2], to_map[1, 2], points)
        grid, padding = to_grid(points * ratio + offset, (height, width)), 'border'
    values = F.grid_sample(maps, grid[:, :, None], 'bilinear', padding, align_corners=True)
    return values[..., 0].transpose(1, 2)


def sample_descriptors(
    maps: Tensor, points: Tensor, size: tuple[int, int], *, pinned: bool = True
) -> Tensor:
    """Sample descriptors (B, N, D) of unit length at points (B, N, 2); 0 where the map is 0."""
    return F.normalize(sample(maps, points, size, pinned=pinned), dim=-1)


def refine(saliency: Tensor, points: Tensor) -> Tensor:
    """Move points (B, N, 2) towards the saliency (B, 1, H, W) around them, by mean shift.

    The window consists of whole pixels and moves with the point. Points therefore follow the
    image, not the grid of cells.
    """
    height, width = saliency.shape[-2:]
    steps = torch.arange(-REFINE_RADIUS, REFINE_RADIUS + 1, device=points.device)
    window = torch.cartesian_prod(steps, steps).flip(-1).to(points.dtype)  # (T, 2), x fastest
    offsets = (window[:, 1] * width + window[:, 0]).long()
    falloff = window.square().sum(-1) / (2 * REFINE_SPREAD**2)
    last = vector(width - 1, height - 1, points) - REFINE_RADIUS
    values = saliency.flatten(1)
    for _ in range(REFINE_STEPS):
        middle = points.detach().round().clamp_min(REFINE_RADIUS).minimum(last)
        index = (middle[..., 1] * width + middle[..., 0]).long()[..., None] + offsets
        salient = values.gather(1, index.flatten(1)).view(index.shape)
        # The Gaussian around the point, without the terms that are constant in the window.
        nearness = (points - middle) @ window.T / REFINE_SPREAD**2 - falloff
        points = middle + (salient + nearness).softmax(-1) @ window
    return points
