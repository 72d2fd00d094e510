"""Rendered cameras: one moves through a room, the other over a photograph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from kp2d_core.camera import pinhole_info
from kp2d_core.errors import FileError
from kp2d_core.images import Image, Size, read_image, size_of
from kp2d_core.views.worlds import photographs, room, room_path, view_camera


@dataclass(frozen=True)
class Picture:
    image: Image  # RGB or gray
    info: Any = None  # what has the fields of a CameraInfo, where the source knows it


class MovingView:
    """A pinhole camera that swings over a photograph on a plane. Its intrinsics are exact."""

    rate = 0.0
    PERIOD = 600  # pictures until it is where it began

    def __init__(self, photograph: Image, size: Size, name: str = 'a photograph') -> None:
        width, height = size_of(photograph)
        self.description = f'a view that moves over {name} of {width}x{height} pixels'
        self._photograph = photograph
        self._size = size
        self.intrinsics = np.array(
            [[size[0], 0, (size[0] - 1) / 2], [0, size[0], (size[1] - 1) / 2], [0, 0, 1]],
            np.float64,
        )

    def pictures(self) -> Iterator[Picture]:
        info = pinhole_info(self._size, self.intrinsics)
        for number in range(self.PERIOD):
            image = cv2.warpPerspective(
                self._photograph, self.photograph_to_view(number), self._size,
                flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REFLECT_101,
            )  # fmt: skip
            yield Picture(np.asarray(image, np.uint8), info)

    def photograph_to_view(self, number: int) -> NDArray[np.float64]:
        """The homography of one picture: what the camera sees of the plane z = 0."""
        width, height = size_of(self._photograph)
        phase = 2 * np.pi * number / self.PERIOD
        # Far enough to see two thirds of the photograph, never beyond its edge by much.
        distance = 0.65 * min(width, height * self._size[0] / self._size[1])
        distance *= 1 + 0.12 * np.sin(3 * phase)
        across = 0.15 * width * np.sin(2 * phase)
        down = 0.15 * height * np.sin(3 * phase + 1)
        turn, _ = cv2.Rodrigues(
            np.array([0.06 * np.sin(4 * phase), 0.06 * np.sin(5 * phase), 0.15 * np.sin(phase)])
        )
        centre = np.array([across, down, -distance])
        plane_to_camera = np.column_stack([turn[:, 0], turn[:, 1], -turn @ centre])
        photograph_to_plane = np.array(
            [[1, 0, -(width - 1) / 2], [0, 1, -(height - 1) / 2], [0, 0, 1]], np.float64
        )
        return np.asarray(self.intrinsics @ plane_to_camera @ photograph_to_plane)


class MovingCamera:
    """A pinhole camera that moves through a room with depth and returns."""

    rate = 20.0  # Hz: a view takes a while to draw, beside a node that needs the processor
    PERIOD = 600  # pictures until it is where it began

    def __init__(self, size: Size) -> None:
        self.description = 'a camera that moves through a room of photographs'
        try:
            images = photographs()
        except FileError:  # without scikit-image
            images = [drawn_photograph(seed=seed) for seed in range(6)]
            self.description = 'a camera that moves through a room of drawn walls'
        self.camera = view_camera(size)
        self.scene = room(images)
        self.poses = room_path(self.PERIOD + 1)[:-1]  # camera to world

    def pictures(self) -> Iterator[Picture]:
        info = pinhole_info(self.camera.size, self.camera.matrix)
        for pose in self.poses:
            yield Picture(self.scene.view(self.camera, pose), info)


def default_photograph() -> Image:
    spec = find_spec('skimage')
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(folder) / 'data' / 'motorcycle_left.png'
        if path.is_file():
            return read_image(path)
    return drawn_photograph()


def drawn_photograph(width: int = 960, height: int = 720, seed: int = 0) -> Image:
    """Draw polygons of all sizes on a mottled ground, with enough corners for any detector."""
    random = np.random.default_rng(seed)
    ground = random.integers(60, 200, (height // 40, width // 40, 3)).astype(np.uint8)
    image = np.asarray(cv2.resize(ground, (width, height)), np.uint8)
    for radius in np.geomspace(120, 6, 400):
        centre = random.uniform((0, 0), (width, height))
        angles = np.sort(random.uniform(0, 2 * np.pi, random.integers(3, 7)))
        corners = centre + radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)
        colour = random.integers(0, 256, 3).tolist()
        cv2.fillPoly(image, [np.rint(corners).astype(np.int32)], colour, cv2.LINE_AA)
    return image
