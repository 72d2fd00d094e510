"""How matching holds out against one change at a time, on pairs made from any photographs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from kp2d_core.evaluation.metrics import detection, matching_score
from kp2d_core.evaluation.protocol import Extract, in_order_of_score
from kp2d_core.images import Image, Size, size_of

Matrix = NDArray[np.float64]
IDENTITY: Matrix = np.eye(3)


@dataclass(frozen=True)
class Change:
    """One way to change a view; `apply(photograph, level, size)` gives it with its homography.

    At level `unchanged` the view is the one that the others are compared with.
    """

    name: str
    unit: str
    levels: tuple[float, ...]
    unchanged: float
    apply: Callable[[Image, float, Size], tuple[Image, Matrix]]


@dataclass(frozen=True)
class RobustnessPoint:
    """Averages over the photographs at one level of one change."""

    level: float
    mscore: float
    repeatability: float


def robustness(
    extract: Extract,
    images: Iterable[Image],
    *,
    size: Size = (320, 240),
    top_k: int = 300,
    progress: bool = False,
) -> dict[str, list[RobustnessPoint]]:
    """Matching score and repeatability of RGB photographs against each change, level by level."""
    photographs = list(images)
    if not photographs:
        raise ValueError('robustness curves need at least one image')
    curves: dict[str, list[RobustnessPoint]] = {}
    total = len(photographs) * sum(len(change.levels) for change in CHANGES)
    disable = None if progress else True
    with tqdm(total=total, desc='robustness', unit='view', disable=disable) as bar:
        for change in CHANGES:
            figures = np.zeros((len(photographs), len(change.levels), 2))
            for row, photograph in enumerate(photographs):
                view, to_view = change.apply(photograph, change.unchanged, size)
                reference = in_order_of_score(extract(view))
                for column, level in enumerate(change.levels):
                    view, to_changed = change.apply(photograph, level, size)
                    changed = in_order_of_score(extract(view))
                    truth = to_changed @ np.linalg.inv(to_view)
                    figures[row, column] = (
                        matching_score(reference, changed, truth, size, top_k),
                        detection(reference, changed, truth, size, top_k).repeatability,
                    )
                    bar.update()
            curves[change.name] = [
                RobustnessPoint(level, float(mscore), float(repeatability))
                for level, (mscore, repeatability) in zip(
                    change.levels, figures.mean(axis=0), strict=True
                )
            ]
    return curves


def _rotate(photograph: Image, degrees: float, size: Size) -> tuple[Image, Matrix]:
    """The middle of the photograph, turned; scaled so that no turn shows anything beyond it."""
    reach = int(np.ceil(np.hypot(*size)))
    given = size_of(photograph)
    scale = reach / min(given)
    large = _resize(photograph, (round(given[0] * scale), round(given[1] * scale)))
    centre = (np.array(size_of(large)) - 1) / 2
    affine = cv2.getRotationMatrix2D((float(centre[0]), float(centre[1])), degrees, 1)
    affine[:, 2] += (np.array(size) - 1) / 2 - centre
    turned = cv2.warpAffine(
        large, affine, size, flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REFLECT_101
    )
    return np.asarray(turned, np.uint8), np.vstack([affine, [0, 0, 1]]).astype(np.float64)


def _zoom(photograph: Image, factor: float, size: Size) -> tuple[Image, Matrix]:
    """The middle 1/factor of the photograph, filling the view, with the detail that it has."""
    given = np.array(size_of(photograph))
    width, height = np.maximum(np.round(given / factor), 1).astype(int)
    left, top = (given - (width, height)) // 2
    crop = np.ascontiguousarray(photograph[top : top + height, left : left + width])
    x, y = size[0] / width, size[1] / height
    # Pixel centres: x' = (x - left + 0.5) * scale - 0.5.
    to_view = np.array(
        [[x, 0, (0.5 - left) * x - 0.5], [0, y, (0.5 - top) * y - 0.5], [0, 0, 1]], np.float64
    )
    return _resize(crop, size), to_view


def _brighten(photograph: Image, factor: float, size: Size) -> tuple[Image, Matrix]:
    view = _resize(photograph, size).astype(np.float32)
    return np.clip(np.rint(view * factor), 0, 255).astype(np.uint8), IDENTITY


def _blur(photograph: Image, sigma: float, size: Size) -> tuple[Image, Matrix]:
    view = _resize(photograph, size)
    if sigma == 0:
        return view, IDENTITY
    return np.asarray(cv2.GaussianBlur(view, (0, 0), sigma), np.uint8), IDENTITY


def _add_noise(photograph: Image, sigma: float, size: Size) -> tuple[Image, Matrix]:
    view = _resize(photograph, size)
    noise = np.random.default_rng(0).normal(0, sigma, view.shape)
    return np.clip(np.rint(view + noise), 0, 255).astype(np.uint8), IDENTITY


def _resize(image: Image, size: Size) -> Image:
    shrinks = size[0] * size[1] < image.shape[0] * image.shape[1]
    method = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(image, size, interpolation=method), np.uint8)


CHANGES = (
    Change('rotation', 'degrees', (0, 10, 20, 30, 45, 60, 90, 120, 150, 180), 0, _rotate),
    Change('scale', 'times', (1, 1.25, 1.5, 2, 2.5, 3, 4), 1, _zoom),
    Change('brightness', 'times', (0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3), 1, _brighten),
    Change('blur', 'px, sigma', (0, 0.5, 1, 1.5, 2, 3, 4), 0, _blur),
    Change('noise', 'of 255, sigma', (0, 5, 10, 20, 30, 40), 0, _add_noise),
)
