"""A cloud of 3D points with descriptors, and the features that a camera would find.

It renders no image and runs no network, so it simulates hours of motion in minutes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kp2d_core.camera import Camera
from kp2d_core.features import Features, Float
from kp2d_core.geometry import Matrix

FAR = 10.0  # m, largest distance of visible points


@dataclass(frozen=True)
class Cloud:
    """Points in descending order of score."""

    points: Matrix  # (N, 3) x right, y down, z forward
    descriptors: Float  # (N, D) unit length

    def view(
        self,
        camera: Camera,
        pose: Matrix,
        random: np.random.Generator,
        *,
        count: int = 300,
        noise: float = 0.5,
    ) -> Features:
        """Return the features of a camera at a pose (4, 4), camera to world.

        count  features at most
        noise  standard deviation of their positions in px, along x and y
        """
        near = np.flatnonzero(np.abs(self.points - pose[:3, 3]).max(axis=1) < FAR)
        eye = (self.points[near] - pose[:3, 3]) @ pose[:3, :3]
        near, eye = near[eye[:, 2] > 0.2], eye[eye[:, 2] > 0.2]
        pixels = camera.pixels(eye)
        pixels = pixels + random.normal(0, noise, pixels.shape)
        limit = np.array(camera.size) - 1
        inside = np.flatnonzero(((pixels > 0) & (pixels < limit)).all(axis=1))[:count]
        seen = self.descriptors[near[inside]].astype(np.float64)
        seen += random.normal(0, 0.3 / np.sqrt(seen.shape[1]), seen.shape)
        seen /= np.linalg.norm(seen, axis=1, keepdims=True)
        scores = np.linspace(1, 0.5, len(inside), dtype=np.float32)
        return Features(
            pixels[inside].astype(np.float32), scores, seen.astype(np.float32), camera.size
        )


def tube(way: Matrix, count: int, random: np.random.Generator, *, dimensions: int = 32) -> Cloud:
    """Place `count` points around a path of poses (N, 4, 4), 1.2 m to 3 m away from it."""
    chosen = way[random.integers(0, len(way), count)]
    angle = random.uniform(0, 2 * np.pi, count)
    off = random.uniform(1.2, 3.0, count)
    aside = np.stack([off * np.cos(angle), off * np.sin(angle), np.zeros(count)], axis=1)
    points = (chosen[:, :3, :3] @ aside[:, :, None])[:, :, 0] + chosen[:, :3, 3]
    descriptors = random.normal(size=(count, dimensions)).astype(np.float32)
    descriptors /= np.linalg.norm(descriptors, axis=1, keepdims=True)
    return Cloud(points, descriptors)
