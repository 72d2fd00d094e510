"""The debug image: keypoints, and tracks coloured by age."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import cv2
import numpy as np
from numpy.typing import NDArray

from kp2d_core.features import Float
from kp2d_core.images import Image
from kp2d_ros.pipeline import Result

OLD = 30  # frames: the age of the last colour
_SHIFT = 4  # OpenCV draws in 1/16 pixel

# Young tracks blue, old ones red; one colour per age from 0 to OLD.
_PALETTE = (
    cv2.cvtColor(
        np.asarray(
            cv2.applyColorMap(np.linspace(40, 255, OLD + 1).astype(np.uint8), cv2.COLORMAP_TURBO),
            np.uint8,
        ),
        cv2.COLOR_BGR2RGB,
    )
    .reshape(-1, 3)
    .tolist()
)


class Overlay:
    """Draws results; remembers where the tracks have been while it is asked to draw."""

    def __init__(self) -> None:
        self._past: deque[tuple[NDArray[np.int64], Float]] = deque()

    def draw(self, result: Result, caption: str, tail: int = 10) -> Image:
        """An RGB image: the frame, its keypoints, the last `tail` steps of its tracks."""
        image = result.frame.image
        canvas = cv2.cvtColor(image, cv2.COLOR_GRAY2RGB) if image.ndim == 2 else image.copy()
        points = result.features.keypoints
        if result.tracks is None:
            ages = np.zeros(len(points), np.int64)
            self._past.clear()
        else:
            ages = np.minimum(result.tracks.ages, OLD)
            self._remember(result.tracks.ids, points, result.previous is None, tail)
            self._draw_tails(canvas, ages)
        fixed = _fixed_point(points)
        for age in np.unique(ages):
            for centre in fixed[ages == age].tolist():
                cv2.circle(canvas, centre, 2 << _SHIFT, _PALETTE[age], -1, cv2.LINE_8, _SHIFT)
        _caption(canvas, caption)
        return np.asarray(canvas, np.uint8)

    def _remember(self, ids: NDArray[np.int64], points: Float, anew: bool, tail: int) -> None:
        if anew:
            self._past.clear()
        order = np.argsort(ids)
        self._past.append((ids[order], points[order]))
        while len(self._past) > tail + 1:
            self._past.popleft()
        self._order = order

    def _draw_tails(self, canvas: Image, ages: NDArray[np.int64]) -> None:
        """A line through the past of every track that is seen now."""
        frames = list(self._past)
        alive = frames[-1][0]
        ages = ages[self._order]
        for (ids, points), (next_ids, next_points) in pairwise(frames):
            common, first, second = np.intersect1d(
                ids, next_ids, assume_unique=True, return_indices=True
            )
            rows = np.searchsorted(alive, common)
            rows[rows == len(alive)] = 0
            seen = alive[rows] == common if len(alive) else np.zeros(len(common), bool)
            segments = np.stack([points[first[seen]], next_points[second[seen]]], axis=1)
            colours = ages[rows[seen]]
            for age in np.unique(colours):
                cv2.polylines(
                    canvas, list(_fixed_point(segments[colours == age])), False, _PALETTE[age],
                    1, cv2.LINE_AA, _SHIFT,
                )  # fmt: skip


def _fixed_point(points: Float) -> NDArray[np.int32]:
    return np.rint(points * (1 << _SHIFT)).astype(np.int32)


def _caption(canvas: Image, text: str) -> None:
    if not text:
        return
    scale = max(canvas.shape[1] / 1280, 0.4)
    (width, height), below = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, scale, 1)
    bar = canvas[: height + 2 * below, : width + 2 * below]
    bar //= 3
    cv2.putText(
        canvas, text, (below, height + below), cv2.FONT_HERSHEY_SIMPLEX, scale, (255, 255, 255),
        1, cv2.LINE_AA,
    )  # fmt: skip


def to_jpeg(image: Image, quality: int = 80) -> bytes:
    """RGB or gray -> the bytes of a JPEG file."""
    if image.ndim == 3:
        image = np.asarray(cv2.cvtColor(image, cv2.COLOR_RGB2BGR), np.uint8)
    done, data = cv2.imencode('.jpg', image, [cv2.IMWRITE_JPEG_QUALITY, quality])
    if not done:
        raise ValueError(f'an image of shape {image.shape} cannot be a JPEG')
    return data.tobytes()
