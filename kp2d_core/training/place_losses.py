"""Losses for keypoints that are distinct and precise, with calibrated scores and sigmas.

They are not in the paper. A cell owns a point that lies inside the cell or just outside it. If
several cells find the same place, only its owner should score. The score is the probability that
the point is found again: a point of the other view lies within `found_distance` pixels of it, and
its descriptor is the nearest. Sigma is the expected error of the location.

There are B pairs with N cells (points) per view, `rows` x `columns`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kp2d_core.geometry import warp_tensor
from kp2d_core.networks import Maps
from kp2d_core.networks.geometry import cell_centres, inner_cells, sample_descriptors, vector
from kp2d_core.training.config import LossConfig
from kp2d_core.training.losses import (
    FAR,
    distance,
    excluded,
    infonce_loss,
    location_loss,
    masked_mean,
    recall,
    teaching_loss,
)

BLOCK = 2  # one point per BLOCK x BLOCK cells is used for the descriptor loss
CLEAR = 3.0  # px; a larger error is a wrong partner and tells nothing about sigma


class ViewPoints(NamedTuple):
    """The points of one view of each pair."""

    scores: Tensor  # (B, N)
    coarse: Tensor  # (B, N, 2) before the refinement
    points: Tensor  # (B, N, 2) refined
    sigma: Tensor  # (B, N) px
    descriptors: Tensor  # (B, D, h, w)
    owned: Tensor  # (B, N) owned by the cell, and not in the border ring


class Lesson(NamedTuple):
    """The descriptor maps of a teacher, for both views."""

    source: Tensor  # (B, D, h, w)
    target: Tensor
    pinned: bool  # `Architecture.pinned` of the teacher

    def reversed(self) -> Lesson:
        return Lesson(self.target, self.source, self.pinned)


def place_loss(
    source: Maps,
    target: Maps,
    source_to_target: Tensor,
    cell: int,
    config: LossConfig,
    lesson: Lesson | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weighted sum over both directions, and each part (detached) by name."""
    rows, columns = source.scores.shape[-2:]
    size = (cell * rows, cell * columns)
    views = [flatten_view(maps, cell, config.own_margin) for maps in (source, target)]
    back = invert(source_to_target, size)
    ways = [
        one_way(views[0], views[1], source_to_target, (rows, columns), cell, config, lesson),
        one_way(
            views[1], views[0], back, (rows, columns), cell, config, lesson and lesson.reversed()
        ),
    ]
    parts = {name: (ways[0][name] + ways[1][name]) / 2 for name in ways[0]}
    weights = {
        'location': config.location,
        'coarse': config.coarse,
        'descriptor': config.descriptor_weight,
        'score': config.score,
        'agreement': config.agreement,
        'sigma': config.sigma,
    }
    if lesson is not None:
        weights['teaching'] = config.teaching
    total = torch.stack([weights[name] * parts[name] for name in weights]).sum()
    parts = {name: value.detach() for name, value in parts.items()}
    return total, parts | {'total': total.detach()}


def flatten_view(maps: Maps, cell: int, margin: float) -> ViewPoints:
    rows, columns = maps.scores.shape[-2:]
    points = maps.keypoints.flatten(2).transpose(1, 2)
    centres = cell_centres(rows, columns, cell, points).flatten(2).transpose(1, 2)
    within = (points.detach() - centres).abs().amax(-1) <= cell / 2 + margin
    return ViewPoints(
        maps.scores.flatten(1),
        maps.coarse.flatten(2).transpose(1, 2),
        points,
        maps.sigma.flatten(1),
        maps.descriptors,
        within & inner_cells(rows, columns, points.device).flatten(),
    )


def one_way(
    source: ViewPoints,
    target: ViewPoints,
    matrices: Tensor,
    cells: tuple[int, int],
    cell: int,
    config: LossConfig,
    lesson: Lesson | None,
) -> dict[str, Tensor]:
    """Compute the parts of the loss in one direction, from source points to the target."""
    rows, columns = cells
    size = (cell * rows, cell * columns)
    warped = warp_tensor(source.points, matrices)
    inner = inner_cells(rows, columns, warped.device).flatten()
    visible = inside(warped.detach(), size, cell) & inner
    apart, partner = nearest_point(warped, target.points, cells, cell)
    error = apart.detach()
    same_place = visible & source.owned & (error < config.match_distance)
    weights = source.scores.detach() ** config.location_score_power

    coarse = warp_tensor(source.coarse, matrices)
    coarse_apart, _ = nearest_point(coarse, target.coarse, cells, cell)
    coarse_near = visible & (coarse_apart.detach() < config.match_distance)

    # There are too many descriptors to compare all, and neighbours are nearly the same.
    chosen = one_of_each_block(torch.where(source.owned & visible, source.scores, -1.0), cells)
    seen, places = take(visible, chosen), take(warped.detach(), chosen)
    points = take(source.points.detach(), chosen)
    anchors = sample_descriptors(source.descriptors, points, size, pinned=False)
    positives = sample_descriptors(target.descriptors, places, size, pinned=False)
    similarity = anchors @ positives.transpose(1, 2)
    barred = excluded(places, seen, config.relaxation)

    teaching: dict[str, Tensor] = {}
    if lesson is not None:
        taught = sample_descriptors(lesson.source, points, size, pinned=lesson.pinned)
        examples = sample_descriptors(lesson.target, places, size, pinned=lesson.pinned)
        taught = taught @ examples.transpose(1, 2)
        teaching['teaching'] = teaching_loss(similarity, taught, seen, barred, config.temperature)

    with torch.no_grad():
        hardest = similarity.masked_fill(barred, -2.0).amax(-1)
        told_apart = similarity.diagonal(dim1=1, dim2=2) > hardest
        near = source.owned & (error < config.found_distance)
        if config.kept_share < 1:
            kept = kept_points(target, cells, config)
            again, _ = nearest_point(warped, kept, cells, cell)
            alone = distinct(source, cells, config.copy_distance)
            near = source.owned & alone & (again < config.found_distance)
        near = take(near, chosen)
        found = (told_apart & near).to(error.dtype)
    asked = take(source.scores, chosen).clamp(1e-6, 1 - 1e-6)
    weigh = asked.detach() ** config.descriptor_score_power
    surprise = F.binary_cross_entropy(asked, found, reduction='none')
    others = inner & ~source.owned
    copies = -torch.log1p(-source.scores.clamp_max(1 - 1e-6))

    same_point = visible & source.owned & (error < config.found_distance)
    disagreement = (source.scores - target.scores.gather(1, partner)).square()
    variance = source.sigma.square() + target.sigma.gather(1, partner).square()
    likelihood = error.square() / (2 * variance) + variance.log()
    return {
        'location': location_loss(apart, same_place, weights),
        'coarse': location_loss(coarse_apart, coarse_near, weights),
        'descriptor': infonce_loss(similarity, seen, barred, config.temperature, weigh),
        'score': masked_mean(surprise, seen) + masked_mean(copies, others) / 2,
        'agreement': masked_mean(disagreement, same_point),
        'sigma': masked_mean(likelihood, same_place & (error < CLEAR)),
        'recall': recall(similarity, seen, barred),
        'found': masked_mean(found, seen),
        **teaching,
    }


def nearest_point(
    places: Tensor, points: Tensor, cells: tuple[int, int], cell: int
) -> tuple[Tensor, Tensor]:
    """Find the nearest point in the 3x3 cells around each place; return distance and index."""
    rows, columns = cells
    with torch.no_grad():
        around = torch.tensor([-1, 0, 1], device=places.device)
        column = (places[..., :1] / cell).floor().clamp(0, columns - 1) + around.repeat(3)
        row = (places[..., 1:] / cell).floor().clamp(0, rows - 1) + around.repeat_interleave(3)
        index = (row.clamp(0, rows - 1) * columns + column.clamp(0, columns - 1)).long()
        candidates = take(points, index.flatten(1)).unflatten(1, index.shape[1:])
        best = (candidates - places[:, :, None]).square().sum(-1).argmin(-1, keepdim=True)
        chosen = index.gather(2, best)[..., 0]
    return distance(places - take(points, chosen)), chosen


def kept_points(view: ViewPoints, cells: tuple[int, int], config: LossConfig) -> Tensor:
    """Return the points (B, N, 2), moving those that a detector would drop far away."""
    eligible = view.owned & distinct(view, cells, config.copy_distance)
    scores = torch.where(eligible, view.scores.detach(), -1.0)
    least = scores.topk(max(1, round(config.kept_share * scores.shape[1])), dim=1).values[:, -1:]
    kept = eligible & (scores >= least)
    return torch.where(kept[..., None], view.points.detach(), -FAR)


def distinct(view: ViewPoints, cells: tuple[int, int], radius: float) -> Tensor:
    """Mark points (B, N) without a better point of a neighbouring cell within `radius` pixels."""
    shape = (-1, *cells)
    scores = view.scores.detach().reshape(shape)
    x, y = (view.points.detach()[..., axis].reshape(shape) for axis in (0, 1))
    around = [F.pad(values, (1, 1, 1, 1), value=-FAR) for values in (scores, x, y)]
    beaten = torch.zeros_like(scores, dtype=torch.bool)
    rows, columns = cells
    for row in range(3):
        for column in range(3):
            score, u, v = (a[:, row : row + rows, column : column + columns] for a in around)
            near = (u - x).square() + (v - y).square() < radius**2
            beaten |= near & (score > scores)
    return ~beaten.flatten(1)


def one_of_each_block(scores: Tensor, cells: tuple[int, int]) -> Tensor:
    """Choose one cell per block (B, N / 4): the best half of the time, else a random one."""
    rows, columns = cells
    numbers = torch.arange(rows * columns, device=scores.device).reshape(rows, columns)
    numbers = numbers[: rows // BLOCK * BLOCK, : columns // BLOCK * BLOCK]
    blocks = numbers.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).transpose(1, 2)
    blocks = blocks.reshape(-1, BLOCK**2)
    best = scores.detach()[:, blocks].argmax(-1)
    shape, device = best.shape, best.device
    random = torch.randint(BLOCK**2, shape, device=device)
    pick = torch.where(torch.rand(shape, device=device) < 0.5, best, random)
    return blocks.expand(len(scores), -1, -1).gather(2, pick[..., None])[..., 0]


def take(values: Tensor, index: Tensor) -> Tensor:
    """Take values (B, N) or (B, N, C) at index (B, M)."""
    if values.dim() == 2:
        return values.gather(1, index)
    return values.gather(1, index[..., None].expand(-1, -1, values.shape[-1]))


def inside(places: Tensor, size: tuple[int, int], margin: float) -> Tensor:
    """Mark places inside an image of (height, width), at least `margin` px from its edge."""
    edge = vector(size[1] - 1 - margin, size[0] - 1 - margin, places)
    return ((places > margin) & (places < edge)).all(-1)


def invert(matrices: Tensor, size: tuple[int, int]) -> Tensor:
    """Invert homographies; the depth is positive where the centre of the source is seen."""
    height, width = size
    middle = vector((width - 1) / 2, (height - 1) / 2, matrices).expand(len(matrices), 1, 2)
    seen = F.pad(warp_tensor(middle, matrices), (0, 1), value=1.0)
    back = torch.linalg.inv(matrices.double()).to(matrices.dtype)
    return back / (seen @ back[:, 2, :, None])
