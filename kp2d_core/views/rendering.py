"""Views of a photograph through a homography, without aliasing."""

from __future__ import annotations

import cv2
import numpy as np

from kp2d_core.images import Image, Size, resize_matrix, size_of
from kp2d_core.views.homography import Matrix

ALIASING = 1.2  # photograph pixels per view pixel from which the photograph is shrunk first


def render(photograph: Image, view_to_photograph: Matrix, size: Size) -> Image:
    """The view of `size`, bilinear; beyond the photograph's edge, its mirror image."""
    shrink = pixels_per_view_pixel(view_to_photograph, size)
    if shrink > ALIASING:
        given = size_of(photograph)
        reduced = max(1, round(given[0] / shrink)), max(1, round(given[1] / shrink))
        photograph = np.asarray(
            cv2.resize(photograph, reduced, interpolation=cv2.INTER_AREA), np.uint8
        )
        view_to_photograph = resize_matrix(given, reduced) @ view_to_photograph
    view = cv2.warpPerspective(
        photograph,
        view_to_photograph,
        size,
        flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_REFLECT_101,
    )
    return np.asarray(view, np.uint8)


def pixels_per_view_pixel(view_to_photograph: Matrix, size: Size) -> float:
    """How far apart, in the photograph, neighbouring pixels in the middle of the view are."""
    x, y = (size[0] - 1) / 2, (size[1] - 1) / 2
    u, v, w = view_to_photograph @ np.array([x, y, 1.0])
    jacobian = (
        view_to_photograph[:2, :2] * w - np.outer([u, v], view_to_photograph[2, :2])
    ) / w**2
    return float(np.sqrt(abs(np.linalg.det(jacobian))))
