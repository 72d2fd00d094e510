"""The losses of the paper (section 3), the score loss of the authors' code, and our additions.

Each loss is a mean over images of the mean over the points of an image. The loss of a batch is
therefore the mean of the losses of its parts, with any number of processes. An image without a
valid point adds 0. B images have N cells (points) each; `valid` masks are (B, N) bool.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kp2d_core.architecture import CELL
from kp2d_core.geometry import warp_tensor
from kp2d_core.networks import IONet, Maps
from kp2d_core.networks.geometry import (
    inner_cells,
    sample_descriptors,
    to_cells,
    to_grid,
)
from kp2d_core.training.association import Association, FrontLayer, associate, distance, take
from kp2d_core.training.config import LossConfig

FAR = 1e4  # larger than every distance, in pixels or between descriptors
BLOCK = 2  # with small cells, one point per BLOCK x BLOCK cells is used for the descriptor loss
CLEAR = 3.0  # px; a larger error is a wrong partner and tells nothing about sigma


class Lesson(NamedTuple):
    """The descriptor maps of a teacher, for both views."""

    source: Tensor  # (B, D, h, w)
    target: Tensor
    pinned: bool  # `Architecture.pinned` of the teacher


def descriptor_distance(similarity: Tensor) -> Tensor:
    """Compute the distance of unit vectors from their dot product; finite gradient at 1."""
    return (2 - 2 * similarity).clamp_min(1e-6).sqrt()


def masked_mean(values: Tensor, valid: Tensor, weights: Tensor | None = None) -> Tensor:
    """Average over the valid points of each image (weighted), then over images: (B, N) -> ()."""
    chosen = valid.to(values.dtype) if weights is None else weights * valid
    # `where`, not a product: invalid values may be infinite.
    total = torch.where(valid, values * chosen, 0).sum(-1)
    return (total / chosen.sum(-1).clamp_min(1e-6)).mean()


def location_loss(apart: Tensor, valid: Tensor, weights: Tensor | None = None) -> Tensor:
    """Equation 1: the distance of warped source points to their target points, in pixels."""
    return masked_mean(apart, valid, weights)


def excluded(warped: Tensor, visible: Tensor, relaxation: float) -> Tensor:
    """Mark pairs (B, N, N) where j is not a negative of i: it is invisible or too close."""
    x, y = warped.unbind(-1)  # one coordinate at a time needs half the memory
    near = ((axis[:, :, None] - axis[:, None]).abs_() <= relaxation for axis in (x, y))
    return (next(near) & next(near)) | ~visible[:, None, :]


def triplet_loss(similarity: Tensor, visible: Tensor, excluded: Tensor, margin: float) -> Tensor:
    """Equation 3: anchor i, positive i, and the hardest negative j that is not excluded.

    similarity[b, i, j] is that of source descriptor i and the target descriptor at warped point j.
    """
    positive = descriptor_distance(similarity.diagonal(dim1=1, dim2=2))
    hardest = similarity.masked_fill(excluded, -FAR).amax(-1)
    negative = descriptor_distance(hardest)
    usable = visible & (hardest > -FAR)
    return masked_mean((positive - negative + margin).clamp_min(0), usable)


def infonce_loss(
    similarity: Tensor,
    visible: Tensor,
    excluded: Tensor,
    temperature: float,
) -> Tensor:
    """InfoNCE: symmetric softmax cross-entropy of the positive among the other candidates."""
    forward = softmax_logits(similarity, excluded, temperature)
    # Distances are symmetric, but invisible points must not compete in the other direction either.
    backward = softmax_logits(similarity, excluded | ~visible[:, :, None], temperature)
    wanted = forward.diagonal(dim1=1, dim2=2)
    surprise = (forward.logsumexp(2) + backward.logsumexp(1)) / 2 - wanted
    return masked_mean(surprise, visible)


def softmax_logits(similarity: Tensor, excluded: Tensor, temperature: float) -> Tensor:
    """Divide similarities by the temperature; excluded ones, except the positive, become tiny."""
    positive = torch.eye(similarity.shape[1], dtype=torch.bool, device=similarity.device)
    never = -1 / temperature - 30  # not lower: exp() is slow where it underflows
    return (similarity / temperature).masked_fill(excluded & ~positive, never)


def teaching_loss(
    similarity: Tensor, taught: Tensor, visible: Tensor, excluded: Tensor, temperature: float
) -> Tensor:
    """KL divergence of the student's softmax over the candidates of a point from the teacher's.

    Only similarities are compared, so both may have descriptors of different lengths.
    """
    student = softmax_logits(similarity, excluded, temperature).log_softmax(-1)
    teacher = softmax_logits(taught, excluded, temperature).log_softmax(-1)
    return masked_mean((teacher.exp() * (teacher - student)).sum(-1), visible)


def recall(similarity: Tensor, visible: Tensor, excluded: Tensor) -> Tensor:
    """The share of visible points whose own descriptor is nearer than all others not excluded."""
    with torch.no_grad():
        hardest = similarity.masked_fill(excluded, -FAR).amax(-1)
        hit = similarity.diagonal(dim1=1, dim2=2) > hardest
        return masked_mean(hit.to(similarity.dtype), visible)


def score_loss(source_scores: Tensor, target_scores: Tensor, association: Association) -> Tensor:
    """Equation 4: pairs closer than average gain score; both points of a pair get the same score.

    `target_scores` (B, N) are those of the nearest target points.
    """
    valid = association.valid
    merit = score_merit(source_scores, target_scores, association.distance, valid)
    difference = (source_scores - target_scores).square()
    return merit + masked_mean(difference, valid & (target_scores > 0))  # 0: the border ring


def score_map_loss(
    source_scores: Tensor, target_scores: Tensor, sampled: Tensor, association: Association
) -> Tensor:
    """Equation 4 as in the authors' code: a score equals the score map of the other image.

    `sampled` (B, N) is the score map of the target at all visible warped source points, with a
    partner or without. The code doubles both terms: `loss.score: 2`.
    """
    merit = score_merit(source_scores, target_scores, association.distance, association.valid)
    difference = (source_scores - sampled).square()
    return merit + masked_mean(difference, association.visible)


def partner_score_loss(
    source_scores: Tensor, target_scores: Tensor, association: Association, farthest: float
) -> Tensor:
    """Equation 4 with two changes.

    In the paper a point without a partner keeps its score. Here it loses score, as if its partner
    were at the `farthest` distance. Distances are detached, so this loss does not move points with
    a low score apart.
    """
    valid = association.valid
    apart = association.distance.detach().clamp_max(farthest)
    partners = torch.where(valid, target_scores, source_scores)
    merit = score_merit(source_scores, partners, apart, association.visible)
    difference = (source_scores - target_scores).square()
    return merit + masked_mean(difference, valid & (target_scores > 0))  # 0: the border ring


def score_merit(
    source_scores: Tensor, target_scores: Tensor, apart: Tensor, valid: Tensor
) -> Tensor:
    """The first term of equation 4: points closer than average gain score."""
    count = valid.sum(-1, keepdim=True).clamp_min(1)
    average = torch.where(valid, apart, 0).sum(-1, keepdim=True) / count
    return masked_mean((source_scores + target_scores) / 2 * (apart - average), valid)


def reliability_loss(
    source_scores: Tensor,
    sampled: Tensor,
    similarity: Tensor,
    visible: Tensor,
    excluded: Tensor,
    temperature: float,
) -> Tensor:
    """Points with a more distinctive descriptor than average gain score. Not in the paper.

    Position alone also rewards points on an edge, whose descriptors match anywhere along it. The
    descriptors are detached.
    """
    logits = softmax_logits(similarity.detach(), excluded, temperature)
    # Minus the logarithm of the probability of the correct match.
    confusion = (logits.logsumexp(2) - logits.diagonal(dim1=1, dim2=2)).clamp_max(4.0)
    count = visible.sum(-1, keepdim=True).clamp_min(1)
    average = torch.where(visible, confusion, 0).sum(-1, keepdim=True) / count
    return masked_mean((source_scores + sampled) / 2 * (confusion - average), visible)


def sigma_loss(association: Association, source: Tensor, target: Tensor) -> Tensor:
    """Minus the likelihood of the distances of pairs, with the sigmas (B, N) of both points."""
    error = association.distance.detach()
    variance = source.square() + target.square()
    likelihood = error.square() / (2 * variance) + variance.log()
    return masked_mean(likelihood, association.valid & (error < CLEAR))


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


def sample_scores(scores: Tensor, points: Tensor, cell: int = CELL) -> Tensor:
    """Sample the score map (B, 1, Hc, Wc) between cell centres at pixels (B, N, 2): (B, N)."""
    rows, columns = scores.shape[-2:]
    grid = to_grid(to_cells(points, cell), (rows, columns))[:, :, None]
    values = F.grid_sample(scores, grid, padding_mode='border', align_corners=True)
    return values[:, 0, :, 0]


def io_loss(
    io_net: IONet,
    source: Maps,
    target: Maps,
    matrices: Tensor,
    points: int,
    threshold: float,
    cell: int = CELL,
) -> Tensor:
    """Equation 5 on the points with the lowest scores: IO-Net separates inliers from outliers.

    Source points are matched by descriptor. Gradients reach locations and descriptors through the
    inputs of IO-Net: both positions and the descriptor distance.
    """
    size = (cell * source.scores.shape[-2], cell * source.scores.shape[-1])
    source_points = lowest_scored(source, points)
    target_points = lowest_scored(target, points)
    source_descriptors = sample_descriptors(source.descriptors, source_points, size)
    target_descriptors = sample_descriptors(target.descriptors, target_points, size)
    similarity = source_descriptors @ target_descriptors.transpose(1, 2)
    best, match = similarity.max(-1)
    matched = target_points.gather(1, match[..., None].expand(-1, -1, 2))

    with torch.no_grad():
        apart = distance(warp_tensor(source_points, matrices) - matched)
        inlier = apart < threshold
        label = torch.where(inlier, 1.0, -1.0)
        informative = inlier.any(-1, keepdim=True).expand_as(inlier)
    seen = torch.cat(
        [
            to_grid(source_points, size),
            to_grid(matched, size),
            descriptor_distance(best)[..., None],
        ],
        dim=-1,
    )
    answer = io_net(seen.transpose(1, 2))
    return masked_mean((answer - label).square() / 2, informative)


def lowest_scored(maps: Maps, points: int) -> Tensor:
    """Return the (B, K, 2) keypoints with the lowest scores, without the border ring."""
    rows, columns = maps.scores.shape[-2:]
    inner = inner_cells(rows, columns, maps.scores.device).reshape(1, -1)
    scores = maps.scores.detach().flatten(1).masked_fill(~inner, FAR)
    count = min(points, (rows - 2) * (columns - 2))
    chosen = scores.topk(count, largest=False).indices
    flat = maps.keypoints.flatten(2).transpose(1, 2)
    return flat.gather(1, chosen[..., None].expand(-1, -1, 2))


def total_loss(
    source: Maps,
    target: Maps,
    matrices: Tensor,
    io_net: IONet,
    config: LossConfig,
    step: int,
    cell: int = CELL,
    lesson: Lesson | None = None,
    front: FrontLayer | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weighted sum, and each part (detached) by name, including the recall."""
    rows, columns = source.scores.shape[-2:]
    size = (cell * rows, cell * columns)
    source_points = source.keypoints.flatten(2).transpose(1, 2)
    target_points = target.keypoints.flatten(2).transpose(1, 2)
    source_scores, target_scores = source.scores.flatten(1), target.scores.flatten(1)
    pairing = associate(
        source_points, target_points, matrices, (rows, columns), config.match_distance, cell, front
    )

    weights = None
    if config.location_score_power:
        weights = source_scores.detach() ** config.location_score_power
    parts = {'location': location_loss(pairing.distance, pairing.valid, weights)}
    total = config.location * parts['location']

    # Positions are detached: the descriptor loss must not move points to easier places.
    warped = pairing.warped.detach()
    sampled = sample_scores(target.scores, warped, cell)
    if config.score:
        partners = target_scores.gather(1, pairing.nearest)
        if config.score_of == 'pair':
            parts['score'] = score_loss(source_scores, partners, pairing)
        elif config.score_of == 'map':
            parts['score'] = score_map_loss(source_scores, partners, sampled, pairing)
        else:
            parts['score'] = partner_score_loss(
                source_scores, partners, pairing, config.match_distance
            )
        total = total + config.score * parts['score']

    pinned = cell == CELL
    visible, described = pairing.visible, source_points.detach()
    if cell < CELL:
        sigmas = source.sigma.flatten(1), target.sigma.flatten(1).gather(1, pairing.nearest)
        parts['sigma'] = sigma_loss(pairing, *sigmas)
        total = total + config.sigma * parts['sigma']
        # There are too many descriptors to compare all, and neighbours are nearly the same.
        chosen = one_of_each_block(torch.where(visible, source_scores, -1.0), (rows, columns))
        visible, described, warped = (take(v, chosen) for v in (visible, described, warped))
    anchors = sample_descriptors(source.descriptors, described, size, pinned=pinned)
    positives = sample_descriptors(target.descriptors, warped, size, pinned=pinned)
    similarity = anchors @ positives.transpose(1, 2)
    barred = excluded(warped, visible, config.relaxation)
    if config.descriptor != 'none' and config.descriptor_weight:
        if config.descriptor == 'infonce' or step < config.infonce_steps:
            loss = infonce_loss(similarity, visible, barred, config.temperature)
        else:
            loss = triplet_loss(similarity, visible, barred, config.margin)
        parts['descriptor'] = loss
        total = total + config.descriptor_weight * loss
    if lesson is not None:
        taught = sample_descriptors(lesson.source, described, size, pinned=lesson.pinned)
        examples = sample_descriptors(lesson.target, warped, size, pinned=lesson.pinned)
        taught = taught @ examples.transpose(1, 2)
        parts['teaching'] = teaching_loss(similarity, taught, visible, barred, config.temperature)
        total = total + config.teaching * parts['teaching']

    if config.reliability:
        if cell < CELL:
            source_scores, sampled = take(source_scores, chosen), take(sampled, chosen)
        parts['reliability'] = reliability_loss(
            source_scores, sampled, similarity, visible, barred, config.temperature
        )
        total = total + config.reliability * parts['reliability']

    if config.io:
        parts['io'] = io_loss(
            io_net, source, target, matrices, config.io_points, config.match_distance, cell
        )
        total = total + config.io * parts['io']

    parts = {name: value.detach() for name, value in parts.items()}
    parts['total'] = total.detach()
    parts['recall'] = recall(similarity, visible, barred)
    return total, parts
