"""Classical features of OpenCV as extractors for the protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from kp2d_core.evaluation.protocol import Extract
from kp2d_core.features import Features, Float
from kp2d_core.images import Image, size_of


def _create(name: str, **settings: Any) -> Any:
    """A detector from where this OpenCV keeps it: version 5 moved some to the contrib module."""
    for module in (cv2, getattr(cv2, 'xfeatures2d', None)):
        if hasattr(module, f'{name}_create'):
            return getattr(module, f'{name}_create')(**settings)
    raise ValueError(f'this OpenCV has no {name}: install opencv-contrib-python-headless')


# ORB spreads a given number of points over its pyramid. 1000 for the best 300 gives the paper's
# repeatability on its three sequences to 0.006; 500, OpenCV's own number, is up to 0.12 away.
_METHODS: dict[str, Callable[[int], Any]] = {
    'sift': lambda top_k: _create('SIFT'),
    'orb': lambda top_k: _create('ORB', nfeatures=max(1000, 2 * top_k)),
    'brisk': lambda top_k: _create('BRISK'),
    'akaze': lambda top_k: _create('AKAZE'),
}
BASELINES = tuple(_METHODS)


def baseline(name: str, top_k: int = 300) -> Extract:
    """'sift', 'orb', 'brisk' or 'akaze' with OpenCV's settings; scores are its responses."""
    if name not in _METHODS:
        raise ValueError(f"there is no baseline '{name}': choose from {', '.join(BASELINES)}")
    method = _METHODS[name](top_k)

    def extract(image: Image) -> Features:
        gray = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY) if image.ndim == 3 else image
        found, descriptors = method.detectAndCompute(gray, None)
        points = np.array([point.pt for point in found], np.float32).reshape(-1, 2)
        scores = np.array([point.response for point in found], np.float32)
        if descriptors is None:
            descriptors = np.empty((0, method.descriptorSize()), np.float32)
        order = np.argsort(-scores, kind='stable')
        unit = unit_descriptors(descriptors)
        return Features(points[order], scores[order], unit[order], size_of(image))

    return extract


def unit_descriptors(descriptors: NDArray[Any]) -> Float:
    """Any descriptors as unit vectors with the same neighbours.

    Bits become +-1: then squared Euclidean distances are proportional to Hamming distances, and
    one way of matching serves binary and real descriptors alike.
    """
    if descriptors.dtype == np.uint8:
        descriptors = np.unpackbits(descriptors, axis=1).astype(np.float32) * 2 - 1
    lengths = np.linalg.norm(descriptors, axis=1, keepdims=True)
    return np.asarray(descriptors / np.maximum(lengths, 1e-12), np.float32)
