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

MANY = 100_000  # ORB's limit, out of the way: the protocol takes the best itself


def _module(name: str) -> Any:
    """Where this OpenCV keeps a class: some have moved to the contrib module in version 5."""
    for module in (cv2, getattr(cv2, 'xfeatures2d', None)):
        if hasattr(module, f'{name}_create'):
            return module
    raise ValueError(f'this OpenCV has no {name}: install opencv-contrib-python-headless')


_CREATE: dict[str, Callable[[], Any]] = {
    'sift': lambda: cv2.SIFT_create(),
    'orb': lambda: cv2.ORB_create(nfeatures=MANY),
    'brisk': lambda: _module('BRISK').BRISK_create(),
    'akaze': lambda: _module('AKAZE').AKAZE_create(),
}
BASELINES = tuple(_CREATE)


def baseline(name: str) -> Extract:
    """'sift', 'orb', 'brisk' or 'akaze' with OpenCV's settings; scores are its responses."""
    if name not in _CREATE:
        raise ValueError(f"there is no baseline '{name}': choose from {', '.join(BASELINES)}")
    method = _CREATE[name]()

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

    Bits become +-1: then the squared Euclidean distance is four times the Hamming distance, and one
    matching serves binary and real descriptors alike.
    """
    if descriptors.dtype == np.uint8:
        descriptors = np.unpackbits(descriptors, axis=1).astype(np.float32) * 2 - 1
    lengths = np.linalg.norm(descriptors, axis=1, keepdims=True)
    return np.asarray(descriptors / np.maximum(lengths, 1e-12), np.float32)
