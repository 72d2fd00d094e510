"""Changes of light and colour. All linear changes form one 3x4 matrix, applied in one pass."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from kp2d_core.checks import setting
from kp2d_core.images import Image

ColourMatrix = NDArray[np.float64]

LUMA = np.array([0.299, 0.587, 0.114])
GRAY = np.tile(LUMA, (3, 1))
# Orthonormal axes: the gray diagonal, and two perpendicular ones, in whose plane the hue rotates.
HUE_AXES = np.array([[1, 1, 1], [2, -1, -1], [0, 1, -1]]) / np.sqrt([[3], [6], [2]])

UNEVEN = 4  # spots of light along each side of an image


@dataclass(frozen=True)
class PhotometricConfig:
    noise: tuple[float, float] = setting(
        (0.02, 0.02), 'standard deviation of Gaussian noise, drawn from this range; 1 is white'
    )
    blur: tuple[int, ...] = setting(
        (1, 3, 5), 'kernel sizes of the Gaussian blur, chosen at random; 1: none'
    )
    brightness: tuple[float, float] = setting((0.5, 1.5), 'factor')
    contrast: tuple[float, float] = setting((0.5, 1.5), 'factor, around the mean')
    saturation: tuple[float, float] = setting((0.8, 1.2), 'factor')
    hue: float = setting(0.2, 'largest hue shift, in turns of the colour circle')
    shuffle: float = setting(0.5, 'share of pairs with permuted channels, the same in both views')
    gray: float = setting(0.5, 'share of gray pairs')
    sharpen: float = setting(
        0.0, 'largest amount of unsharp masking with a blur of 1 px, for views without blur'
    )
    gamma: float = setting(
        1.0, 'largest exponent of the brightness curve, the smallest is its inverse; 1: none'
    )
    shade: float = setting(
        0.0, 'uneven light: largest standard deviation of the logarithm of its brightness; 0: none'
    )

    def __post_init__(self) -> None:
        if not self.blur or any(size < 1 or size % 2 == 0 for size in self.blur):
            raise ValueError(f'photometric.blur must list odd kernel sizes, got {self.blur}')
        if not 0 <= self.noise[0] <= self.noise[1]:
            raise ValueError(f'photometric.noise must be a range from 0 up, got {self.noise}')
        if self.sharpen < 0:
            raise ValueError(f'photometric.sharpen must be 0 or more, got {self.sharpen}')
        if not 1 <= self.gamma <= 10:
            raise ValueError(f'photometric.gamma must be in 1..10, got {self.gamma}')
        if not 0 <= self.shade <= 3:
            raise ValueError(f'photometric.shade must be in 0..3, got {self.shade}')


@dataclass(frozen=True)
class SharedColour:
    """Colour changes that both images of a pair share: shuffled channels, gray."""

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
    if config.gamma > 1:
        exponent = config.gamma ** random.uniform(-1, 1)
        image = cv2.LUT(image, (255 * np.linspace(0, 1, 256) ** exponent).astype(np.uint8))
    jitter, contrast = sample_jitter(random, config)
    matrix = jitter @ shared.matrix
    mean = float(LUMA @ matrix @ np.array(cv2.mean(image)[:3]))
    affine = np.column_stack([matrix * contrast, np.full(3, (1 - contrast) * mean)])
    changed = cv2.transform(image.astype(np.float32), affine)
    if config.shade > 0:
        changed *= uneven_light(random, changed.shape[:2], config.shade)[..., None]

    kernel = int(random.choice(config.blur))
    if kernel > 1:
        changed = cv2.GaussianBlur(changed, (kernel, kernel), 0)
    elif config.sharpen > 0:
        amount = config.sharpen * random.random()
        blurred = cv2.GaussianBlur(changed, (0, 0), 1.0)
        changed = cv2.addWeighted(changed, 1 + amount, blurred, -amount, 0)
    least, most = config.noise
    if most > 0:
        noise = random.standard_normal(changed.shape, dtype=np.float32)
        sigma = 255 * least + 255 * (most - least) * random.random()
        changed = cv2.scaleAdd(noise, sigma, changed)
    return np.asarray(cv2.convertScaleAbs(np.maximum(changed, 0)), np.uint8)


def uneven_light(
    random: np.random.Generator, size: tuple[int, int], most: float
) -> NDArray[np.float32]:
    """Make factors (height, width) that vary smoothly, like lamps, shadows and vignetting."""
    spots = random.standard_normal((UNEVEN, UNEVEN), dtype=np.float32)
    spots *= np.float32(most * random.random())
    # Interpolated as logarithms: a cubic curve of the factors could fall below 0.
    return np.exp(cv2.resize(spots, size[::-1], interpolation=cv2.INTER_CUBIC))


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
