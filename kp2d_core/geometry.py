"""How pixels move when an image is resized, cropped or warped by a homography.

Points are (x, y), x right, y down; (0, 0) is the centre of the top-left pixel. Matrices are 3x3,
named by direction, such as `source_to_target`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Size = tuple[int, int]  # width, height
Matrix = NDArray[np.float64]  # 3x3

NEAREST = 1e-6  # depth beyond which a point is in front of the camera
FAR_AWAY = -1e4  # px, outside every view


def resize_matrix(given: Size, resized: Size) -> Matrix:
    """3x3: moves the pixels of an image that is resized from `given` to `resized`."""
    return scale_matrix(resized[0] / given[0], resized[1] / given[1])


def scale_matrix(x: float, y: float) -> Matrix:
    """3x3: moves the pixels of an image that is scaled by x and y.

    Resizing keeps the edges of an image in place. Pixel centres are at integers, half a pixel from
    the edges, so they move. This is the only place that handles the half pixel.
    """
    return np.array([[x, 0, (x - 1) / 2], [0, y, (y - 1) / 2], [0, 0, 1.0]])


def shift_matrix(x: float, y: float) -> Matrix:
    """3x3: moves pixels right by x and down by y."""
    return np.array([[1.0, 0, x], [0, 1.0, y], [0, 0, 1.0]])


def warp_points(points: NDArray[np.floating], matrix: Matrix) -> NDArray[np.float64]:
    """Map points (N, 2) by a homography; points behind the camera become infinite."""
    warped = np.asarray(points, np.float64) @ matrix[:, :2].T + matrix[:, 2]
    depth = warped[:, 2:]
    front = depth > NEAREST
    return np.where(front, warped[:, :2] / np.where(front, depth, 1), np.inf)


def warp_tensor(points: Tensor, matrices: Tensor) -> Tensor:
    """The same in torch, batched: points (B, N, 2) and homographies (B, 3, 3).

    Points behind the camera move to FAR_AWAY, because the gradient of infinity would be NaN.
    """
    warped = points @ matrices[:, :, :2].transpose(1, 2) + matrices[:, None, :, 2]
    depth = warped[..., 2:]
    front = depth > NEAREST
    placed = warped[..., :2] / depth.where(front, depth.new_ones(()))
    return placed.where(front, placed.new_full((), FAR_AWAY))


def in_front(matrix: Matrix, points: NDArray[np.floating]) -> Matrix:
    """Choose the sign of the homography that puts most of the points in front of the camera."""
    depths = np.asarray(points, np.float64) @ matrix[2, :2] + matrix[2, 2]
    return matrix if np.median(depths) > 0 else -matrix
