"""Matching under one change at a time (rotation, scale, light), and under a small shift."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from kp2d_core.evaluation.metrics import CORRECT, detection, in_view, inverse, matching_score
from kp2d_core.evaluation.protocol import Extract
from kp2d_core.features import Features, in_order_of_score
from kp2d_core.geometry import Matrix, resize_matrix, shift_matrix, warp_points
from kp2d_core.images import Image, Size, resize, size_of

Seen = tuple[Image, Matrix]  # a view, and the homography from the photograph to it
STEP = 4  # px, half a cell: extra shift of views with another light or sharpness
SHIFTS = tuple(range(9))  # 0 to 8 px: a whole cell of the network


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
    """Measure matching score and repeatability of RGB photographs at each level of each change.

    Where only light or sharpness changes, the view is also shifted by half a cell. Otherwise
    keypoints on the network's grid would count as found again, whatever the image shows.
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
    """Rotate the centre of the photograph; at its scale no rotation leaves the photograph."""
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
    """Enlarge the central 1/factor of the photograph to the view, with its own detail."""
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
    """Crop the photograph, resized to slightly more than the view, from `start` px in x and y."""
    large = resize(photograph, (size[0] + STEP, size[1] + STEP))
    return _window(large, start, size), shift_matrix(-start, -start)


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


@dataclass(frozen=True)
class ShiftResult:
    """Averages over images whose content is shifted by `shift` px to the right and down."""

    shift: int
    repeatability: float
    localization: float  # px
    bias_x: float | None  # px; below 0, keypoints lag behind; None: no point was found again
    bias_y: float | None


def shift_test(
    extract: Extract,
    images: Iterable[Image],
    shifts: Iterable[int] = SHIFTS,
    *,
    size: Size = (320, 240),
    top_k: int = 300,
    progress: bool = False,
) -> list[ShiftResult]:
    """Measure repeatability, localization and signed bias under pure translation.

    Each RGB photograph is resized to slightly more than `size` and cropped twice, `shift` pixels
    apart in x and y. Nothing is interpolated, so a perfect detector has an error of 0.
    """
    photographs = list(images)
    distances = sorted(set(shifts))
    if not photographs:
        raise ValueError('the shift test needs at least one image')
    if not distances or distances[0] < 0:
        raise ValueError('the shift test needs shifts of 0 px or more')
    rows: dict[int, list[ShiftResult]] = {shift: [] for shift in distances}
    total = len(photographs) * len(distances)
    with tqdm(total=total, desc='shift', unit='shift', disable=None if progress else True) as bar:
        for photograph in photographs:
            margin = distances[-1]
            large = cv2.resize(photograph, (size[0] + margin, size[1] + margin))
            still = in_order_of_score(extract(_window(large, margin, size)))
            for shift in distances:
                moved = in_order_of_score(extract(_window(large, margin - shift, size)))
                rows[shift].append(_compare(still, moved, shift, size, top_k))
                bar.update()
    return [_average(rows[shift]) for shift in distances]


def _window(image: NDArray[np.generic], start: int, size: Size) -> Image:
    crop = image[start : start + size[1], start : start + size[0]]
    return np.ascontiguousarray(crop, dtype=np.uint8)


def _compare(still: Features, moved: Features, shift: int, size: Size, top_k: int) -> ShiftResult:
    truth = shift_matrix(shift, shift)
    found = detection(still, moved, truth, size, top_k)
    bias = _bias(still, moved, truth, size, top_k)
    return ShiftResult(shift, found.repeatability, found.localization, *bias)


def _bias(
    still: Features, moved: Features, truth: NDArray[np.float64], size: Size, top_k: int
) -> tuple[float, float] | tuple[None, None]:
    """Mean of found minus true positions, over the points that were found again."""
    warped = warp_points(still.keypoints, truth)
    expected = warped[in_view(warped, size)][:top_k]
    back = warp_points(moved.keypoints, inverse(truth))
    found = moved.keypoints[in_view(back, size)][:top_k]
    if not len(expected) or not len(found):
        return None, None
    astray = found[None] - expected[:, None]
    distances = np.linalg.norm(astray, axis=2)
    nearest = distances.argmin(axis=1)
    hits = np.flatnonzero(distances.min(axis=1) <= CORRECT)
    if not len(hits):
        return None, None
    x, y = astray[hits, nearest[hits]].mean(axis=0)
    return float(x), float(y)


def _average(rows: list[ShiftResult]) -> ShiftResult:
    def bias(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return float(np.mean(known)) if known else None

    return ShiftResult(
        rows[0].shift,
        float(np.mean([row.repeatability for row in rows])),
        float(np.mean([row.localization for row in rows])),
        bias([row.bias_x for row in rows]),
        bias([row.bias_y for row in rows]),
    )
