"""Draw features and matches on images."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from kp2d_core.features import Features
from kp2d_core.files import atomic_write
from kp2d_core.images import Image, Size, size_of
from kp2d_core.matching import Matches

INLIER = (60, 220, 90)  # colours are RGB
OUTLIER = (235, 70, 60)
MOST_LINES = 200  # more would hide the images
OPACITY = 0.6  # of lines
_SUBPIXEL_BITS = 4


def draw_keypoints(image: Image, features: Features, radius: int = 3) -> Image:
    """Draw a circle per keypoint on a copy; warm colours mark high scores."""
    canvas = to_rgb(image)
    colours = rank_colours(len(features))
    for point, colour in zip(features.keypoints[::-1], colours[::-1], strict=True):
        cv2.circle(
            canvas, _subpixel(point), radius << _SUBPIXEL_BITS, colour, 1, cv2.LINE_AA,
            _SUBPIXEL_BITS,
        )  # fmt: skip
    return canvas


def draw_matches(
    first_image: Image,
    second_image: Image,
    first: Features,
    second: Features,
    matches: Matches,
    max_lines: int = MOST_LINES,
    *,
    judge: bool = False,
) -> Image:
    """Draw both images side by side with a translucent line per match, for the best points.

    Only inliers are drawn, coloured by position in the first image. With `judge`, all matches are
    drawn: inliers in green, above the others in red.
    """
    canvas = side_by_side(to_rgb(first_image), to_rgb(second_image))
    shift = np.array([first_image.shape[1], 0], np.float32)
    rows = np.flatnonzero(matches.inliers)[:max_lines]
    if judge:
        wrong = np.flatnonzero(~matches.inliers)[: max_lines - len(rows)]
        rows = np.concatenate([wrong, rows])
    starts = first.keypoints[matches.indices[rows, 0]]
    ends = second.keypoints[matches.indices[rows, 1]] + shift
    colours = position_colours(starts, size_of(first_image))
    if judge:
        colours = [INLIER if matches.inliers[row] else OUTLIER for row in rows]
    lines = canvas.copy()
    for start, end, colour in zip(starts, ends, colours, strict=True):
        cv2.line(lines, _subpixel(start), _subpixel(end), colour, 1, cv2.LINE_AA, _SUBPIXEL_BITS)
    canvas = np.asarray(cv2.addWeighted(lines, OPACITY, canvas, 1 - OPACITY, 0), np.uint8)
    for points in (starts, ends):
        for point, colour in zip(points, colours, strict=True):
            cv2.circle(canvas, _subpixel(point), 36, colour, -1, cv2.LINE_AA, _SUBPIXEL_BITS)
    return canvas


def position_colours(points: NDArray[np.float32], size: Size) -> list[tuple[int, int, int]]:
    """Choose colours by position: hue from left to right, brightness from top to bottom."""
    x, y = np.clip(points / np.array(size, np.float32), 0, 1).T
    hsv = np.stack([120 * x, np.full_like(x, 210), 255 - 75 * y], axis=1).astype(np.uint8)
    rgb = cv2.cvtColor(hsv[:, None], cv2.COLOR_HSV2RGB)[:, 0] if len(hsv) else hsv
    return [(int(r), int(g), int(b)) for r, g, b in rgb]


def rank_colours(count: int) -> list[tuple[int, int, int]]:
    """Make `count` colours from warm (first) to cold."""
    ramp = np.linspace(255, 60, max(count, 1)).astype(np.uint8)
    bgr = cv2.applyColorMap(ramp[:, None], cv2.COLORMAP_TURBO)[:, 0]
    return [(int(r), int(g), int(b)) for b, g, r in bgr[:count]]


def put_caption(image: Image, text: str) -> None:
    """Write a line at the top left, on a dark bar, in place."""
    font, size = cv2.FONT_HERSHEY_SIMPLEX, 0.55
    (width, height), below = cv2.getTextSize(text, font, size, 1)
    bar = image[: height + below + 10, : width + 16]
    bar[:] = bar // 4
    cv2.putText(image, text, (8, height + 5), font, size, (255, 255, 255), 1, cv2.LINE_AA)


def to_rgb(image: Image) -> Image:
    """Return a copy in colour."""
    if image.ndim == 2 or image.shape[2] == 1:
        return np.asarray(cv2.cvtColor(image, cv2.COLOR_GRAY2RGB), np.uint8)
    return image.copy()


def side_by_side(left: Image, right: Image) -> Image:
    height = max(left.shape[0], right.shape[0])
    canvas = np.zeros((height, left.shape[1] + right.shape[1], 3), np.uint8)
    canvas[: left.shape[0], : left.shape[1]] = left
    canvas[: right.shape[0], left.shape[1] :] = right
    return canvas


def write_image(path: str | Path, image: Image) -> None:
    """Write RGB atomically; the format follows the suffix, PNG without one."""
    path = Path(path)
    suffix = path.suffix or '.png'
    try:
        _, data = cv2.imencode(suffix, np.ascontiguousarray(image[..., ::-1]))
    except cv2.error:
        raise ValueError(f"cannot write images as '{suffix}': use .png or .jpg") from None
    with atomic_write(path) as temporary:
        temporary.write_bytes(data.tobytes())


def _subpixel(point: NDArray[np.float32]) -> tuple[int, int]:
    x, y = np.rint(point * (1 << _SUBPIXEL_BITS)).astype(int)
    return int(x), int(y)
