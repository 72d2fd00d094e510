"""Render a 3D scene of textured planar pieces, with exact poses and depth.

Each piece is rendered with its own homography. If several pieces cover a pixel, the nearest one is
visible. The inverse depth of a plane is linear in the image, so the comparison is cheap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import cv2
import numpy as np
from numpy.typing import NDArray

from kp2d_core.camera import Camera
from kp2d_core.geometry import Matrix, scale_matrix
from kp2d_core.images import Image

NEAR = 0.05  # m, closest visible distance
FINEST = 1.4  # photograph pixels per image pixel above which a smaller copy is used
_BITS = 4  # fractional bits of the pixel coordinates of corners


@dataclass(frozen=True)
class Texture:
    """A photograph as an image pyramid."""

    photograph: Image  # RGB

    @cached_property
    def levels(self) -> list[Image]:
        found = [self.photograph]
        while min(found[-1].shape[:2]) >= 16:
            height, width = found[-1].shape[:2]
            half = cv2.resize(found[-1], (width // 2, height // 2), interpolation=cv2.INTER_AREA)
            found.append(np.asarray(half, np.uint8))
        return found


@dataclass(frozen=True)
class Piece:
    """A parallelogram in the world, textured with a parallelogram of a photograph."""

    corner: Matrix  # (3,) of the world, x right, y down, z forward
    across: Matrix  # (3,) from the corner along the top
    down: Matrix  # (3,)
    texture: Texture
    on_texture: Matrix  # (3, 3) from 0..1 across and down to pixels of the photograph
    light: float = 1.0  # factor of the brightness

    @cached_property
    def corners(self) -> Matrix:
        """The corners (4, 3) in order around the piece."""
        a, d = self.across, self.down
        return self.corner + np.array([0 * a, a, a + d, d])


@dataclass(frozen=True)
class Scene:
    """Planar pieces that can be rendered from any pose."""

    pieces: Sequence[Piece]

    @cached_property
    def _corners(self) -> Matrix:
        return np.array([piece.corners for piece in self.pieces])

    def view(self, camera: Camera, pose: Matrix, samples: int = 1) -> Image:
        """Render the RGB image of a camera without distortion at a pose (4, 4), camera to world.

        samples  per pixel in each direction: more samples give smoother edges
        """
        if samples == 1:
            return self.view_with_depth(camera, pose)[0]
        finer = camera.width * samples, camera.height * samples
        matrix = scale_matrix(samples, samples) @ camera.matrix
        fine = self.view_with_depth(Camera.create(finer, matrix), pose)[0]
        return np.asarray(cv2.resize(fine, camera.size, interpolation=cv2.INTER_AREA), np.uint8)

    def view_with_depth(self, camera: Camera, pose: Matrix) -> tuple[Image, NDArray[np.float32]]:
        """Render the image and the depth (z) of each pixel in m, infinite where it is empty."""
        if camera.fisheye or any(camera.distortion):
            raise ValueError('a scene can only be rendered for cameras without distortion')
        turn, centre = pose[:3, :3], pose[:3, 3]
        corners = (self._corners - centre) @ turn  # (P, 4, 3) in the camera
        image = np.zeros((camera.height, camera.width, 3), np.uint8)
        inverse_depth = np.zeros((camera.height, camera.width), np.float32)
        ahead = np.flatnonzero((corners[:, :, 2] > NEAR).any(axis=1))
        # Nearest first: hidden pixels need not be drawn.
        for number in ahead[np.argsort(corners[ahead, :, 2].mean(axis=1))]:
            _draw(self.pieces[number], corners[number], camera, image, inverse_depth)
        with np.errstate(divide='ignore'):
            return image, np.float32(1) / inverse_depth


def _draw(
    piece: Piece,
    corners: Matrix,
    camera: Camera,
    image: Image,
    inverse_depth: NDArray[np.float32],
) -> None:
    outline = _before_camera(corners)
    if len(outline) < 3:
        return
    pixels = camera.pixels(outline)
    low = np.floor(pixels.min(axis=0)).astype(int)
    high = np.ceil(pixels.max(axis=0)).astype(int) + 1
    x0, y0 = max(low[0], 0), max(low[1], 0)
    x1, y1 = min(high[0], camera.width), min(high[1], camera.height)
    if x0 >= x1 or y0 >= y1:
        return

    # normal . x = offset for points x of the plane; a ray (u, v, 1) meets it at the depth
    # offset / (normal . ray).
    normal = np.cross(corners[1] - corners[0], corners[3] - corners[0])
    offset = float(normal @ corners[0])
    if abs(offset) < 1e-9:  # seen edge-on
        return
    slope = normal @ np.linalg.inv(camera.matrix) / offset
    columns, rows = np.arange(x0, x1), np.arange(y0, y1)
    inverse = np.add.outer(
        (slope[1] * rows + slope[2]).astype(np.float32), (slope[0] * columns).astype(np.float32)
    )
    mask = np.zeros(inverse.shape, np.uint8)
    polygon = np.rint((pixels - (x0, y0)) * (1 << _BITS)).clip(-(2**24), 2**24).astype(np.int32)
    cv2.fillConvexPoly(mask, polygon, 255, lineType=cv2.LINE_8, shift=_BITS)
    behind = inverse_depth[y0:y1, x0:x1]
    # Two pieces that meet at an edge have the same depth there: the first one stays.
    nearer = (mask > 0) & (inverse > behind * 1.0001)
    if not nearer.any():
        return

    to_camera = np.column_stack([corners[1] - corners[0], corners[3] - corners[0], corners[0]])
    plane_to_pixels = camera.matrix @ to_camera
    photograph_to_pixels = plane_to_pixels @ np.linalg.inv(piece.on_texture)
    level = _level(piece, corners, camera)
    photograph = piece.texture.levels[level]
    given = piece.texture.photograph
    shrink = scale_matrix(
        photograph.shape[1] / given.shape[1], photograph.shape[0] / given.shape[0]
    )
    window = np.array([[1, 0, x0], [0, 1, y0], [0, 0, 1.0]])
    window_to_photograph = shrink @ np.linalg.inv(photograph_to_pixels) @ window
    drawn = cv2.warpPerspective(
        photograph, window_to_photograph, (x1 - x0, y1 - y0),
        flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP, borderMode=cv2.BORDER_REFLECT_101,
    )  # fmt: skip
    if piece.light != 1:
        drawn = cv2.convertScaleAbs(drawn, alpha=piece.light)
    cv2.copyTo(drawn, nearer.astype(np.uint8), image[y0:y1, x0:x1])
    np.copyto(behind, inverse, where=nearer)


def _level(piece: Piece, corners: Matrix, camera: Camera) -> int:
    """Choose the pyramid level whose resolution is nearest to that of the view."""
    depth = max(float(np.mean(np.maximum(corners[:, 2], NEAR))), NEAR)
    length = np.sqrt(np.linalg.norm(np.cross(piece.across, piece.down)))
    pixels = np.sqrt(abs(np.linalg.det(piece.on_texture[:2, :2])))
    ratio = pixels / max(camera.matrix[0, 0] * length / depth, 1e-9)
    level = int(np.ceil(np.log2(max(ratio / FINEST, 1.0))))
    return min(level, len(piece.texture.levels) - 1)


def _before_camera(corners: Matrix) -> Matrix:
    """Clip a polygon (N, 3) to the part further away than NEAR."""
    kept: list[Matrix] = []
    for here, there in zip(corners, np.roll(corners, -1, axis=0), strict=True):
        if here[2] > NEAR:
            kept.append(here)
        if (here[2] > NEAR) != (there[2] > NEAR):
            share = (NEAR - here[2]) / (there[2] - here[2])
            kept.append(here + share * (there - here))
    return np.array(kept).reshape(-1, 3)
