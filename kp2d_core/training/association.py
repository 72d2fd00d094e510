"""Which points of two views are pairs: the same point of the scene, found in both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kp2d_core.architecture import CELL
from kp2d_core.geometry import warp_tensor
from kp2d_core.networks.geometry import inner_cells, to_cells, vector

DRIFT = 4.0  # px that the refinement may move a point


class FrontLayer(NamedTuple):
    """Objects in front of the scene, which move differently."""

    source: Tensor  # (B, H, W) bool, where they are
    target: Tensor
    source_to_target: Tensor  # (B, 3, 3)

    def warp(self, points: Tensor, warped: Tensor) -> tuple[Tensor, Tensor]:
        """Warp the points (B, N, 2) that are in front, keep those `warped` with the scene.

        Also return which points the objects of the target do not hide (B, N).
        """
        ours = layer_at(self.source, points)
        warped = torch.where(ours[..., None], warp_tensor(points, self.source_to_target), warped)
        return warped, layer_at(self.target, warped) == ours


def layer_at(layer: Tensor, points: Tensor) -> Tensor:
    """Look up the pixels of a layer (B, H, W) that are nearest to points (B, N, 2): (B, N)."""
    height, width = layer.shape[1:]
    x, y = points.detach().round().long().unbind(-1)
    return layer.flatten(1).gather(1, y.clamp(0, height - 1) * width + x.clamp(0, width - 1))


@dataclass(frozen=True)
class Association:
    """Source points warped to the target, and the target point nearest to each."""

    warped: Tensor  # (B, N, 2) source points in pixels of the target
    visible: Tensor  # (B, N) inside the target, and not in the border ring
    nearest: Tensor  # (B, N) index of the nearest target point
    distance: Tensor  # (B, N) to that point, in pixels
    valid: Tensor  # (B, N) visible, and near enough to count as the same point


def associate(
    source: Tensor,
    target: Tensor,
    matrices: Tensor,
    cells: tuple[int, int],
    threshold: float,
    cell: int = CELL,
    front: FrontLayer | None = None,
) -> Association:
    """Pair source points (B, N, 2) with target points by position. `cells` is (rows, columns)."""
    rows, columns = cells
    warped = warp_tensor(source, matrices)
    shown = None
    if front is not None:
        warped, shown = front.warp(source, warped)
    with torch.no_grad():
        edge = vector(cell * columns - 1, cell * rows - 1, warped)
        inside = ((warped > 0) & (warped < edge)).all(-1)
        visible = inside & inner_cells(rows, columns, source.device).reshape(1, -1)
        if shown is not None:
            visible = visible & shown
        nearest = nearest_point(warped, target, cells, threshold, cell)
    partner = take(target, nearest)
    apart = distance(warped - partner)
    return Association(warped, visible, nearest, apart, visible & (apart.detach() < threshold))


def nearest_point(
    points: Tensor, target: Tensor, cells: tuple[int, int], threshold: float, cell: int
) -> Tensor:
    """The index (B, N) of the target point nearest to each point, if it is below the threshold.

    A target point lies near its cell, so only the cells around each point are searched: comparing
    all points took a third of a training step. Beyond the threshold, another point may be nearer.
    """
    rows, columns = cells
    reach = int((cell - 1 + DRIFT + threshold + cell / 2) / cell)  # cells in each direction
    steps = torch.arange(-reach, reach + 1, device=points.device)
    middle = to_cells(points, cell).round().long()
    x = (middle[..., :1] + steps).clamp(0, columns - 1)[:, :, None]
    y = (middle[..., 1:] + steps).clamp(0, rows - 1)[..., None]
    around = (y * columns + x).flatten(2)  # (B, N, candidates)
    found = take(target, around.flatten(1)).unflatten(1, around.shape[1:])
    best = (found - points[:, :, None]).square().sum(-1).argmin(-1, keepdim=True)
    return around.gather(2, best)[..., 0]


def distance(difference: Tensor) -> Tensor:
    """Compute the Euclidean norm of the last dimension; its gradient at 0 is 0, not NaN."""
    return (difference.square().sum(-1) + 1e-12).sqrt()


def take(values: Tensor, index: Tensor) -> Tensor:
    """Take values (B, N) or (B, N, C) at index (B, M)."""
    if values.dim() == 2:
        return values.gather(1, index)
    return values.gather(1, index[..., None].expand(-1, -1, values.shape[-1]))
