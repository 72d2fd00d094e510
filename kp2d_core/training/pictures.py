"""What the network sees in a pair: keypoints, score map and matches, as one picture."""

from __future__ import annotations

from dataclasses import replace

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from kp2d_core.detector import KeypointDetector
from kp2d_core.images import Image, prepare
from kp2d_core.matching import match
from kp2d_core.networks import KeyPointNet
from kp2d_core.networks.geometry import normalise
from kp2d_core.views.homography import warp_points
from kp2d_core.visualize import draw_keypoints, draw_matches, side_by_side

SHOWN = 150  # keypoints in each image
CORRECT = 3.0  # px


def draw_pair(
    detector: KeypointDetector,
    network: KeyPointNet,
    first: Image,
    second: Image,
    first_to_second: NDArray[np.float64],
) -> dict[str, Image]:
    """By name: the keypoints of both, their score maps, the matches, green if correct."""
    left, right = (
        detector.detect(image, scales=(1,), max_keypoints=SHOWN) for image in (first, second)
    )
    matches = match(left, right)
    expected = warp_points(first_to_second, left.keypoints[matches.indices[:, 0]])
    astray = np.linalg.norm(expected - right.keypoints[matches.indices[:, 1]], axis=1)
    matches = replace(matches, inliers=astray < CORRECT)
    return {
        'keypoints': side_by_side(draw_keypoints(first, left), draw_keypoints(second, right)),
        'scores': side_by_side(draw_scores(network, first), draw_scores(network, second)),
        'matches': draw_matches(first, second, left, right, matches),
    }


@torch.inference_mode()
def draw_scores(network: KeyPointNet, image: Image) -> Image:
    """The score map in colours, blue low and red high, as large as the image."""
    device = next(network.parameters()).device
    prepared = torch.from_numpy(prepare(image)[0])[None].to(device)
    trunk = network.encode(normalise(prepared))[1]
    scores = network.score_head(trunk)[0, 0].cpu().numpy()
    scaled = (255 * scores / max(float(scores.max()), 1e-6)).astype(np.uint8)
    large = cv2.resize(scaled, image.shape[1::-1], interpolation=cv2.INTER_NEAREST)
    coloured = cv2.applyColorMap(large, cv2.COLORMAP_JET)
    return np.asarray(cv2.cvtColor(coloured, cv2.COLOR_BGR2RGB), np.uint8)
