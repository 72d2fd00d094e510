"""The reference of the benchmarks: KeyPointNet run and trained as by its authors, eager torch."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kp2d_core.architecture import CELL
from kp2d_core.checkpoint import Checkpoint
from kp2d_core.networks import KeyPointNet, Maps
from kp2d_core.networks.geometry import (
    inner_cells,
    normalise,
    sample_descriptors,
    to_grid,
)
from kp2d_core.runtimes.base import Outputs, with_sigmas
from kp2d_core.training.config import LossConfig
from kp2d_core.training.model import TrainingModel


class AuthorsWay:
    """Inference as in the authors' code: descriptors sampled at every cell, NCHW in memory."""

    def __init__(self, checkpoint: Checkpoint, threads: int) -> None:
        torch.set_num_threads(threads)
        self.network = KeyPointNet.from_checkpoint(checkpoint)

    @torch.inference_mode()
    def run(self, images: NDArray[np.uint8], top_k: int) -> Outputs:
        size = images.shape[1], images.shape[2]
        batch = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().float() / 255
        maps = self.network((batch - 0.5) * 0.225)
        points = maps.keypoints.flatten(2).transpose(1, 2)
        descriptors = sample_descriptors(maps.descriptors, points, size)
        scores, cells = maps.scores.flatten(1).topk(top_k, dim=1)
        best = cells[..., None]
        points = points.gather(1, best.expand(-1, -1, 2))
        descriptors = descriptors.gather(1, best.expand(-1, -1, descriptors.shape[-1]))
        return with_sigmas([points.numpy(), scores.numpy(), descriptors.numpy()])


def plain_loss(model: TrainingModel, images: Tensor, matrices: Tensor) -> Tensor:
    """Compute the loss of a batch (sources, then targets), image by image.

    It has the structure of the reference code: source and target pass through the network one
    after the other, with default memory order and whole images. The losses loop over the images
    of a batch, and the hardest negative is found by sorting all candidates. The equations are
    those of `kp2d train` (the paper's triplet loss).
    """
    batch = len(matrices)
    source: Maps = model.network(normalise(images[:batch]).contiguous())
    target: Maps = model.network(normalise(images[batch:]).contiguous())
    total = images.new_zeros((), dtype=torch.float32)
    for i in range(batch):
        total = total + image_loss(
            Maps(*(value[i : i + 1] for value in source)),
            Maps(*(value[i : i + 1] for value in target)),
            matrices[i],
            model,
        )
    return total / batch


def image_loss(source: Maps, target: Maps, matrix: Tensor, model: TrainingModel) -> Tensor:
    config = model.config.loss
    rows, columns = source.scores.shape[-2:]
    size = (CELL * rows, CELL * columns)
    source_points = source.keypoints[0].reshape(2, -1).T
    target_points = target.keypoints[0].reshape(2, -1).T
    homogeneous = torch.cat([source_points, torch.ones_like(source_points[:, :1])], 1) @ matrix.T
    warped = homogeneous[:, :2] / homogeneous[:, 2:]
    edge = warped.new_tensor([size[1] - 1, size[0] - 1])
    visible = ((warped > 0) & (warped < edge)).all(1)
    visible &= inner_cells(rows, columns, warped.device).flatten()

    apart = (warped[:, None] - target_points[None]).square().sum(2).add(1e-12).sqrt()
    nearest, partner = apart.min(1)
    valid = visible & (nearest < config.match_distance)
    source_scores, target_scores = source.scores.flatten(), target.scores.flatten()
    loss = warped.sum() * 0
    if valid.any():
        near = nearest[valid]
        loss = loss + config.location * near.mean()
        first, second = source_scores[valid], target_scores[partner[valid]]
        merit = (first + second) / 2 * (near - near.mean())
        loss = loss + config.score * (merit + (first - second).square()).mean()

    anchors = sample_descriptors(source.descriptors, source_points[None].detach(), size)[0]
    positives = sample_descriptors(target.descriptors, warped[None].detach(), size)[0]
    loss = loss + descriptor_loss(anchors, positives, warped.detach(), visible, config)
    if config.io:
        loss = loss + config.io * io_loss(source, target, matrix, model, size)
    return loss


def descriptor_loss(
    anchors: Tensor, positives: Tensor, warped: Tensor, visible: Tensor, config: LossConfig
) -> Tensor:
    anchors, positives, warped = anchors[visible], positives[visible], warped[visible]
    if len(anchors) < 20:
        return anchors.sum() * 0
    distances = (2 - 2 * (anchors @ positives.T)).clamp_min(1e-6).sqrt()
    # In this order, the first candidate far from the true place is the hardest negative.
    ordered, candidates = distances.sort(1)
    near = (warped[candidates] - warped[:, None]).abs().amax(2) <= config.relaxation
    first = ordered.masked_fill(near, 1e4).argmin(1, keepdim=True)
    negatives = positives[candidates.gather(1, first)[:, 0]]
    triplet = (anchors - positives).norm(dim=1) - (anchors - negatives).norm(dim=1)
    return config.descriptor_weight * (triplet + config.margin).clamp_min(0).mean()


def io_loss(
    source: Maps, target: Maps, matrix: Tensor, model: TrainingModel, size: tuple[int, int]
) -> Tensor:
    config = model.config.loss
    rows, columns = source.scores.shape[-2:]
    inner = inner_cells(rows, columns, source.scores.device).flatten()
    count = min(config.io_points, int(inner.sum()))
    chosen = []
    for maps in (source, target):
        scores = maps.scores.flatten().detach().masked_fill(~inner, 1e4)
        cells = scores.topk(count, largest=False).indices
        chosen.append(maps.keypoints[0].reshape(2, -1).T[cells])
    first = sample_descriptors(source.descriptors, chosen[0][None], size)[0]
    second = sample_descriptors(target.descriptors, chosen[1][None], size)[0]
    best, match = (first @ second.T).max(1)
    matched = chosen[1][match]
    homogeneous = torch.cat([chosen[0], torch.ones_like(chosen[0][:, :1])], 1) @ matrix.T
    astray = (homogeneous[:, :2] / homogeneous[:, 2:] - matched).square().sum(1).sqrt()
    inlier = astray.detach() < config.match_distance
    if not inlier.any():
        return best.sum() * 0
    apart = (2 - 2 * best).clamp_min(1e-6).sqrt()[:, None]
    seen = torch.cat([to_grid(chosen[0], size), to_grid(matched, size), apart], 1)
    answer = model.io_net(seen.T[None])[0]
    return (answer - torch.where(inlier, 1.0, -1.0)).square().mean() / 2
