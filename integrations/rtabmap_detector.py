"""Our keypoints inside RTAB-Map: its parameter PyDetector/Path is the path of this file.

RTAB-Map calls init(cuda) once and detect(image) for every image. The environment may choose:
KP2D_MODEL (auto), KP2D_RUNTIME (auto), KP2D_MAX_KEYPOINTS (1000), KP2D_NMS_RADIUS (3).
docs/integrations.md says how to set it up.
"""

import os

import numpy as np

from kp2d_core import KeypointDetector

_detector = None


def init(cuda):
    """cuda: RTAB-Map's PyDetector/Cuda, 0 or 1."""
    global _detector
    runtime = os.environ.get('KP2D_RUNTIME', 'auto')
    if not cuda and runtime == 'auto':
        runtime = 'onnxruntime'  # a CPU's, wherever it is installed
        if not _has('onnxruntime'):
            runtime = 'openvino' if _has('openvino') else 'auto'
    _detector = KeypointDetector.load(os.environ.get('KP2D_MODEL', 'auto'), runtime=runtime)


def detect(image):
    """A gray image (H, W) uint8 -> (N, 3) float32: x, y, score; (N, D) float32 descriptors.

    RTAB-Map reads the memory of both row by row.
    """
    if _detector is None:
        init(0)
    found = _detector.detect(
        np.repeat(np.asarray(image)[:, :, None], 3, axis=2),
        max_keypoints=int(os.environ.get('KP2D_MAX_KEYPOINTS', '1000')),
        nms_radius=float(os.environ.get('KP2D_NMS_RADIUS', '3')),
    )
    points = np.column_stack([found.keypoints, found.scores])
    return (
        np.ascontiguousarray(points, np.float32),
        np.ascontiguousarray(found.descriptors, np.float32),
    )


def _has(module):
    from importlib.util import find_spec

    return find_spec(module) is not None
