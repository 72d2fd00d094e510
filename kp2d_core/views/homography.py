"""Random homographies between views, in pixels; (0, 0) is the centre of the top-left pixel."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from kp2d_core.checks import setting
from kp2d_core.geometry import Matrix, Size

UPRIGHT = 45.0  # degrees in both directions, as in the training of the paper
ROTATION_DRAWS = 20  # attempts to find a rotation that fits into the target; else none


@dataclass(frozen=True)
class HomographyConfig:
    """The ranges of a random homography from source to target."""

    crop: float = setting(0.7, 'the source covers this much of the target before scaling')
    scale: tuple[float, float] = setting((0.8, 1.2), 'then scales by a factor in this range')
    rotation: float = setting(45.0, 'largest rotation in degrees, up to 180')
    perspective: float = setting(
        0.2, 'how far one side may grow and the opposite one shrink, as a share of half the view'
    )
    shift: float = setting(0.0, 'without inside: largest shift in x and y, in pixels')
    inside: bool = setting(True, 'true: the target shows everything that the source shows')
    stretch: float = setting(
        1.0, 'largest ratio of the scales of two directions, as in oblique views; 1: none'
    )
    upright: float = setting(0.0, 'share of pairs rotated by at most 45 degrees')

    def __post_init__(self) -> None:
        if not (self.crop > 0 and 0 < self.scale[0] <= self.scale[1]):
            raise ValueError(
                f'crop must be above 0 and scale a range above 0, got {self.crop}, {self.scale}'
            )
        if self.stretch < 1:
            raise ValueError(f'stretch must be 1 or more, got {self.stretch}')
        if not 0 <= self.upright <= 1:
            raise ValueError(f'upright must be from 0 to 1, got {self.upright}')


def sample_source_to_target(
    random: np.random.Generator, size: Size, config: HomographyConfig
) -> Matrix:
    """Sample a homography from pixels of the source to pixels of the target, both of `size`.

    The positions of the four source corners in the target are drawn. They start as a centred patch
    of `crop` of the target. The patch becomes a symmetric trapezium in both directions and is then
    scaled, stretched in a random direction (like an oblique view of a plane), rotated and shifted.
    A share of `upright` is rotated by at most UPRIGHT degrees. With `inside`, all corners stay in
    the target; otherwise the patch shifts by up to `shift` pixels from the centre.
    """
    width, height = size
    half = np.array([(width - 1) / 2, (height - 1) / 2])
    corners = np.array([[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]])
    trapezium = random.uniform(-config.perspective, config.perspective, 2)
    patch = corners * (config.crop + trapezium * corners[:, ::-1])
    patch *= random.uniform(*config.scale) * half
    if config.stretch > 1:
        patch = _stretch(patch, random.uniform(1, config.stretch), random.uniform(0, 180))
    rotation = config.rotation
    if config.upright and random.random() < config.upright:
        rotation = min(rotation, UPRIGHT)
    if config.inside:
        patch = _shrink_into(patch, half)
        for _ in range(ROTATION_DRAWS):
            rotated = _rotate(patch, random.uniform(-rotation, rotation))
            if (_extent(rotated) <= half).all():
                patch = rotated
                break
        patch -= (patch.max(axis=0) + patch.min(axis=0)) / 2
        patch += random.uniform(-1, 1, 2) * (half - _extent(patch))
    else:
        patch = _rotate(patch, random.uniform(-rotation, rotation))
        patch += random.uniform(-config.shift, config.shift, 2)
    return corners_to_corners(half + corners * half, half + patch)


def corners_to_corners(source: Matrix, target: Matrix) -> Matrix:
    """Compute the homography from four source points (4, 2) to four target points."""
    return np.asarray(
        cv2.getPerspectiveTransform(source.astype(np.float32), target.astype(np.float32)),
        np.float64,
    )


def _rotate(points: Matrix, degrees: float) -> Matrix:
    c, s = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
    return points @ np.array([[c, s], [-s, c]])


def _stretch(points: Matrix, ratio: float, direction: float) -> Matrix:
    """Stretch by `ratio` along a direction (degrees) relative to the other; keep the area."""
    along = _rotate(points, -direction) * [np.sqrt(ratio), 1 / np.sqrt(ratio)]
    return _rotate(along, direction)


def _extent(points: Matrix) -> Matrix:
    """Return half the width and height of the points' bounding box."""
    return np.asarray((points.max(axis=0) - points.min(axis=0)) / 2)


def _shrink_into(points: Matrix, half: Matrix) -> Matrix:
    return points * min(1.0, float((half / _extent(points)).min()))
