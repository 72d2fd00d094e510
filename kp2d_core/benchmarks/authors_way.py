"""KeyPointNet as its authors run it: eager torch, NCHW, descriptors sampled at every cell."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kp2d_core.checkpoint import Checkpoint
from kp2d_core.networks.geometry import sample_descriptors
from kp2d_core.runtimes.base import Outputs
from kp2d_core.runtimes.torch import network_of


class AuthorsWay:
    def __init__(self, checkpoint: Checkpoint, threads: int) -> None:
        torch.set_num_threads(threads)
        self.network = network_of(checkpoint)

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
        return points.numpy(), scores.numpy(), descriptors.numpy()
