"""How matching holds out against one change at a time, on pairs made from any photographs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from kp2d_core.evaluation.metrics import detection, matching_score
from kp2d_core.evaluation.protocol import Extract
from kp2d_core.features import in_order_of_score
from kp2d_core.geometry import Matrix, resize_matrix, shift_matrix
from kp2d_core.images import Image, Size, resize, size_of

Seen = tuple[Image, Matrix]  # a view, with where the photograph's pixels are in it
STEP = 4  # px by which views of another light or sharpness are moved besides: half a cell


@dataclass(frozen=True)
class Change:
    """One way to change a view of a photograph."""

    name: str
    unit: str
    levels: tuple[float, ...]
    reference: Callable[[Image, Size], Seen]  # the view that the others are compared with
    apply: Callable[[Image, float, Size], Seen]


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
    """Matching score and repeatability of RGB photographs against each change, level by level.

    Where only light or sharpness change, the view is moved by half a cell too: else keypoints that
    sit on the network's grid, whatever the image shows, would seem to be found again.
    """
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
                view, to_view = change.reference(photograph, size)
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


def _rotate(photograph: Image, degrees: float, size: Size) -> Seen:
    """The middle of the photograph, turned; scaled so that no turn shows anything beyond it."""
    reach = int(np.ceil(np.hypot(*size)))
    given = size_of(photograph)
    scale = reach / min(given)
    large = resize(photograph, (round(given[0] * scale), round(given[1] * scale)))
    centre = (np.array(size_of(large)) - 1) / 2
    affine = cv2.getRotationMatrix2D((float(centre[0]), float(centre[1])), degrees, 1)
    affine[:, 2] += (np.array(size) - 1) / 2 - centre
    turned = cv2.warpAffine(
        large, affine, size, flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REFLECT_101
    )
    return np.asarray(turned, np.uint8), np.vstack([affine, [0, 0, 1]]).astype(np.float64)


def _zoom(photograph: Image, factor: float, size: Size) -> Seen:
    """The middle 1/factor of the photograph, filling the view, with the detail that it has."""
    given = np.array(size_of(photograph))
    width, height = np.maximum(np.round(given / factor), 1).astype(int)
    left, top = (given - (width, height)) // 2
    crop = np.ascontiguousarray(photograph[top : top + height, left : left + width])
    return resize(crop, size), resize_matrix((width, height), size) @ shift_matrix(-left, -top)


def _still(photograph: Image, size: Size) -> Seen:
    return _crop(photograph, 0, size)


def _brighten(photograph: Image, factor: float, size: Size) -> Seen:
    view, to_view = _crop(photograph, STEP, size)
    return _to_image(view * np.float32(factor)), to_view


def _blur(photograph: Image, sigma: float, size: Size) -> Seen:
    view, to_view = _crop(photograph, STEP, size)
    if sigma > 0:
        view = np.asarray(cv2.GaussianBlur(view, (0, 0), sigma), np.uint8)
    return view, to_view


def _add_noise(photograph: Image, sigma: float, size: Size) -> Seen:
    view, to_view = _crop(photograph, STEP, size)
    return _to_image(view + np.random.default_rng(0).normal(0, sigma, view.shape)), to_view


def _crop(photograph: Image, start: int, size: Size) -> Seen:
    """The photograph resized to a little more than the view, from `start` px on in x and y."""
    large = resize(photograph, (size[0] + STEP, size[1] + STEP))
    view = np.ascontiguousarray(large[start : start + size[1], start : start + size[0]])
    return view, shift_matrix(-start, -start)


def _to_image(values: NDArray[np.floating]) -> Image:
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


CHANGES = (
    Change(
        'rotation', 'degrees', (0, 10, 20, 30, 45, 60, 90, 120, 150, 180),
        lambda photograph, size: _rotate(photograph, 0, size), _rotate,
    ),
    Change(
        'scale', 'times', (1, 1.25, 1.5, 2, 2.5, 3, 4),
        lambda photograph, size: _zoom(photograph, 1, size), _zoom,
    ),
    Change('brightness', 'times', (0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 3), _still, _brighten),
    Change('blur', 'px, sigma', (0, 0.5, 1, 1.5, 2, 3, 4), _still, _blur),
    Change('noise', 'of 255, sigma', (0, 5, 10, 20, 30, 40), _still, _add_noise),
)  # fmt: skip
