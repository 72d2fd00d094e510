"""What every runtime is, whichever library does the work."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kp2d_core.images import Size

# keypoints (B, K, 2) in pixels of the input, scores (B, K) descending, descriptors (B, K, D) unit
Outputs = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]


class Runtime(Protocol):
    """Runs KeyPointNet on uint8 images and keeps the `top_k` cells with the highest scores."""

    name: str  # as in `KeypointDetector.load(runtime=...)`
    description: str  # library, version, device and precision, for people
    model: str  # what it runs: a shipped name or a file, for people
    reason: str  # why it was chosen, for people
    problem: str  # which better runtime is here but broken, for people; '': none
    descriptor_size: int
    fixed_size: Size | None  # (width, height) if it can run at one size only

    def run(self, images: NDArray[np.uint8], top_k: int) -> Outputs:
        """Images (B, H, W, 3) RGB, H and W multiples of 8; K = min(top_k, what it can)."""
        ...


class RuntimeStatus(NamedTuple):
    """Whether a runtime works on this machine."""

    name: str
    available: bool
    detail: str  # version and device; or what is missing, and the line that installs it


def usable_cores() -> int:
    """Cores that this process may use, which in a container are fewer than the machine has."""
    if hasattr(os, 'sched_getaffinity'):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cache_folder(name: str) -> Path:
    """A folder for what can be made again: $XDG_CACHE_HOME/kp2d/<name>, else in ~/.cache."""
    base = os.environ.get('XDG_CACHE_HOME')
    return (Path(base) if base else Path.home() / '.cache') / 'kp2d' / name
