"""KeyPointNet in eager torch: the reference that the other runtimes are compared with."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kp2d_core.checkpoint import Checkpoint
from kp2d_core.images import Size
from kp2d_core.networks import KeyPointNet
from kp2d_core.networks.geometry import normalise
from kp2d_core.runtimes.base import Outputs


class TorchRuntime:
    name = 'torch'
    fixed_size: Size | None = None
    model = reason = problem = ''

    def __init__(
        self, checkpoint: Checkpoint, *, threads: int | None = None, device: str | None = None
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.device = torch.device(device or ('cuda' if torch.cuda.is_available() else 'cpu'))
        self.network = KeyPointNet.from_checkpoint(checkpoint).to(self.device)
        self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.digest = checkpoint.digest()
        self.descriptor_size = checkpoint.architecture.descriptor_size
        self.cell = checkpoint.architecture.cell
        self.score_line = checkpoint.architecture.score_line
        self.description = f'torch {torch.__version__} on {self.device}, fp32'

    def prepare(self, shape: tuple[int, ...], top_k: int) -> None:
        """Nothing is compiled."""

    def share(self, count: int) -> int:
        return 1

    @torch.inference_mode()
    def run(self, images: NDArray[np.uint8], top_k: int) -> Outputs:
        images = np.require(images, requirements='W')
        batch = normalise(torch.from_numpy(images).to(self.device))
        maps = self.network(batch.contiguous(memory_format=torch.channels_last))
        scores, cells = maps.scores.flatten(1).topk(min(top_k, maps.scores[0].numel()), dim=1)
        points = maps.keypoints.flatten(2).transpose(1, 2)
        points = points.gather(1, cells[..., None].expand(-1, -1, 2))
        descriptors = self.network.describe(maps, points)
        sigmas = maps.sigma.flatten(1).gather(1, cells)
        return Outputs(*(x.cpu().numpy() for x in (points, scores, descriptors, sigmas)))
