"""What the runtimes of ONNX graphs share: a graph compiled per profile, a few of them kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable

import cv2
import numpy as np
from numpy.typing import NDArray

from kp2d_core.export.profile import Profile
from kp2d_core.export.source import ModelSource
from kp2d_core.images import Size
from kp2d_core.runtimes.protocol import Outputs

# Runs one compiled graph: uint8 images of the profile's shape in, outputs that stay valid out.
Compiled = Callable[[NDArray[np.uint8]], Outputs]

KEPT = 8  # compiled profiles (two sizes of images at four scales), the oldest goes first


class CompiledRuntime(ABC):
    """Base of the runtimes that compile; they only add `compile`."""

    name: str
    most_keypoints: int | None = None  # a limit of the runtime

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self.descriptor_size = source.architecture.descriptor_size
        self.description = self.name
        self.model = self.reason = self.problem = ''
        self.fixed_size: Size | None = None
        if source.fixed is not None:
            self.fixed_size = (source.fixed.width, source.fixed.height)
        self._compiled: OrderedDict[Profile, Compiled] = OrderedDict()

    @abstractmethod
    def compile(self, graph: bytes, profile: Profile) -> Compiled:
        """What runs this graph."""

    def run(self, images: NDArray[np.uint8], top_k: int) -> Outputs:
        profile = self.source.profile(images.shape, top_k, self.most_keypoints)
        compiled = self._compiled.get(profile)
        if compiled is None:
            compiled = self.compile(self.source.graph_for(profile), profile)
            self._compiled[profile] = compiled
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(profile)
        images = _in_colour_of(profile, images)
        if profile.batch in (None, len(images)):
            keypoints, scores, descriptors = compiled(images)
        else:
            keypoints, scores, descriptors = _in_parts(compiled, images, profile.batch or 1)
        if top_k < profile.top_k:
            return keypoints[:, :top_k], scores[:, :top_k], descriptors[:, :top_k]
        return keypoints, scores, descriptors


def _in_colour_of(profile: Profile, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Gray for a mono graph, RGB for the others; an exported graph takes only one of them."""
    if images.shape[-1] == profile.channels:
        return images
    if not profile.mono:
        return np.repeat(images, 3, axis=-1)
    return np.stack([cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[..., None] for image in images])


def _in_parts(compiled: Compiled, images: NDArray[np.uint8], batch: int) -> Outputs:
    """A graph of a fixed batch, run as often as needed; the last part is filled up."""
    filled = np.concatenate([images, np.repeat(images[-1:], -len(images) % batch, axis=0)])
    parts = [compiled(filled[i : i + batch]) for i in range(0, len(filled), batch)]
    keypoints, scores, descriptors = (
        np.concatenate(output)[: len(images)] for output in zip(*parts, strict=True)
    )
    return keypoints, scores, descriptors
