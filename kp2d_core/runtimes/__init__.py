"""What runs a network: one protocol, one file per runtime, the best one chosen by `auto`."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kp2d_core.checkpoint import find_checkpoint, load_checkpoint
from kp2d_core.images import Size

# keypoints (B, K, 2) in pixels of the input, scores (B, K) descending, descriptors (B, K, D) unit
Outputs = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]


class Runtime(Protocol):
    """Runs KeyPointNet on uint8 images and keeps the `top_k` cells with the highest scores."""

    name: str  # as in `KeypointDetector.load(runtime=...)`
    description: str  # library, version, device and precision, for people
    descriptor_size: int
    fixed_size: Size | None  # (width, height) if it can run at one size only

    def run(self, images: NDArray[np.uint8], top_k: int) -> Outputs:
        """Images (B, H, W, 3) RGB, H and W multiples of 8; K = min(top_k, what it can)."""
        ...


def open_runtime(
    model: str | Path,
    *,
    runtime: str = 'auto',
    precision: str = 'fp32',
    threads: int | None = None,
) -> Runtime:
    """The runtime of that name with the model loaded; 'auto' takes the best one there is."""
    checkpoint = load_checkpoint(find_checkpoint(model))
    if runtime not in ('auto', 'torch'):
        raise ValueError(f"there is no runtime '{runtime}'")
    from kp2d_core.runtimes.torch import TorchRuntime

    return TorchRuntime(checkpoint, threads=threads)
