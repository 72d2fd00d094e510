"""Do keypoints follow the image or the network's grid? One photograph, moved by a few pixels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from kp2d_core.evaluation.metrics import CORRECT, detection, in_view, inverse
from kp2d_core.evaluation.protocol import Extract
from kp2d_core.features import Features, in_order_of_score
from kp2d_core.geometry import shift_matrix, warp_points
from kp2d_core.images import Image, Size

SHIFTS = tuple(range(9))  # 0 to 8 px: a whole cell of the network


@dataclass(frozen=True)
class ShiftResult:
    """Averages over the images, the content moved by `shift` px to the right and down."""

    shift: int
    repeatability: float
    localization: float  # px
    bias_x: float | None  # px, signed: below 0 keypoints lag behind; None if none was found again
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
    """Repeatability, localization and signed bias under pure translation, with real pixels.

    Each RGB photograph is resized to a little more than `size`, and cropped twice, `shift` pixels
    apart in x and y: nothing is interpolated, so that a perfect detector has an error of 0.
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
            still = in_order_of_score(extract(_crop(large, margin, size)))
            for shift in distances:
                moved = in_order_of_score(extract(_crop(large, margin - shift, size)))
                rows[shift].append(_compare(still, moved, shift, size, top_k))
                bar.update()
    return [_average(rows[shift]) for shift in distances]


def _crop(image: NDArray[np.generic], start: int, size: Size) -> Image:
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
    """Mean of where points were found minus where they should be, over those found again."""
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
