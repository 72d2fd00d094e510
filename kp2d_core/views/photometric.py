"""Changes of light and colour. Everything linear is one 3x4 matrix, applied in one pass."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from kp2d_core.images import Image

ColourMatrix = NDArray[np.float64]

LUMA = np.array([0.299, 0.587, 0.114])
GRAY = np.tile(LUMA, (3, 1))
# Orthonormal axes: the gray diagonal, and two across it, in whose plane the hue turns.
HUE_AXES = np.array([[1, 1, 1], [2, -1, -1], [0, 1, -1]]) / np.sqrt([[3], [6], [2]])


@dataclass(frozen=True)
class PhotometricConfig:
    noise: float = 0.02
    blur: tuple[int, ...] = (1, 3, 5)
    brightness: tuple[float, float] = (0.5, 1.5)
    contrast: tuple[float, float] = (0.5, 1.5)
    saturation: tuple[float, float] = (0.8, 1.2)
    hue: float = 0.2
    shuffle: float = 0.5
    gray: float = 0.5
    sharpen: float = 0.0

    def __post_init__(self) -> None:
        if not self.blur or any(size < 1 or size % 2 == 0 for size in self.blur):
            raise ValueError(f'photometric.blur must list odd kernel sizes, got {self.blur}')
        if self.sharpen < 0:
            raise ValueError(f'photometric.sharpen must be 0 or more, got {self.sharpen}')


@dataclass(frozen=True)
class SharedColour:
    """Colour changes that both images of a pair share: shuffled channels, no colour."""

    matrix: ColourMatrix


def sample_shared_colour(random: np.random.Generator, config: PhotometricConfig) -> SharedColour:
    matrix = np.eye(3)
    if random.random() < config.shuffle:
        matrix = matrix[random.permutation(3)]
    if random.random() < config.gray:
        matrix = GRAY @ matrix
    return SharedColour(matrix)


def change_light(
    random: np.random.Generator, image: Image, shared: SharedColour, config: PhotometricConfig
) -> Image:
    """Change light and colour of an RGB image, blur or sharpen it, add noise."""
    jitter, contrast = sample_jitter(random, config)
    matrix = jitter @ shared.matrix
    mean = float(LUMA @ matrix @ np.array(cv2.mean(image)[:3]))
    affine = np.column_stack([matrix * contrast, np.full(3, (1 - contrast) * mean)])
    changed = cv2.transform(image.astype(np.float32), affine)

    kernel = int(random.choice(config.blur))
    if kernel > 1:
        changed = cv2.GaussianBlur(changed, (kernel, kernel), 0)
    elif config.sharpen > 0:
        amount = config.sharpen * random.random()
        blurred = cv2.GaussianBlur(changed, (0, 0), 1.0)
        changed = cv2.addWeighted(changed, 1 + amount, blurred, -amount, 0)
    if config.noise > 0:
        noise = random.standard_normal(changed.shape, dtype=np.float32)
        changed = cv2.scaleAdd(noise, 255 * config.noise * random.random(), changed)
    return np.asarray(cv2.convertScaleAbs(np.maximum(changed, 0)), np.uint8)


def sample_jitter(
    random: np.random.Generator, config: PhotometricConfig
) -> tuple[ColourMatrix, float]:
    """Sample the matrix for brightness, saturation and hue, and the factor for contrast."""
    saturation = random.uniform(*config.saturation)
    matrix = saturation * np.eye(3) + (1 - saturation) * GRAY
    matrix = rotate_hue(random.uniform(-config.hue, config.hue)) @ matrix
    matrix = random.uniform(*config.brightness) * matrix
    return matrix, random.uniform(*config.contrast)


def rotate_hue(turns: float) -> ColourMatrix:
    """Return the matrix that rotates the hue by this share of a full turn and keeps grays."""
    c, s = np.cos(2 * np.pi * turns), np.sin(2 * np.pi * turns)
    turn = np.array([[1, 0, 0], [0, c, -s], [0, s, c]])
    return np.asarray(HUE_AXES.T @ turn @ HUE_AXES)
