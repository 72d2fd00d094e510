"""The debug image: tracks coloured by age, with fading tails and a legend."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import cv2
import numpy as np
from numpy.typing import NDArray

from kp2d_core.features import Float
from kp2d_core.geometry import scale_matrix, warp_points
from kp2d_core.images import Image
from kp2d_core.tracking import Result

LASTED = 3  # frames: younger tracks are faint dots, because most end soon
OLD = 40  # frames: the age of the last colour
SMALL = 480  # px; narrower images are doubled to be readable
LONGEST = 0.12  # of the image width: largest reach of a tail; longer ones are a tangle
SHADES = 12  # colours between LASTED and OLD
WHITE, BLACK = (255, 255, 255), (0, 0, 0)
_SHIFT = 4  # OpenCV draws in 1/16 pixel
_FONT = cv2.FONT_HERSHEY_SIMPLEX


def _palette() -> list[tuple[int, int, int]]:
    """Make colours from blue (young) to orange (old), light enough for a photograph."""
    ramp = np.linspace(55, 205, SHADES).astype(np.uint8)
    colours = np.asarray(cv2.applyColorMap(ramp, cv2.COLORMAP_TURBO), np.uint8)
    return [(int(r), int(g), int(b)) for b, g, r in colours.reshape(-1, 3)]


PALETTE = _palette()
Colours = NDArray[np.int64] | tuple[int, int, int]  # one for each, or one for all


def shades_of(ages: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the row of PALETTE for each age, in equal steps on a logarithmic scale."""
    share = np.log(np.maximum(ages, LASTED) / LASTED) / np.log(OLD / LASTED)
    return np.minimum(share * SHADES, SHADES - 1).astype(np.int64)


class Overlay:
    """Draws results, and remembers the past positions of tracks."""

    def __init__(self) -> None:
        self._past: deque[tuple[NDArray[np.int64], Float]] = deque()

    def draw(self, result: Result, caption: str, tail: int = 10) -> Image:
        """An RGB image: the frame, its keypoints, the last `tail` steps of its tracks."""
        image = result.frame.image
        canvas = np.asarray(cv2.cvtColor(image, cv2.COLOR_GRAY2RGB)) if image.ndim == 2 else image
        zoom = 2 if image.shape[1] < SMALL else 1
        if zoom > 1:
            canvas = cv2.resize(canvas, None, fx=zoom, fy=zoom, interpolation=cv2.INTER_CUBIC)
        moved = warp_points(result.features.keypoints, scale_matrix(zoom, zoom))
        points = moved.astype(np.float32)
        layer = Layer(canvas.shape[1], canvas.shape[0])
        if result.tracks is None:
            self._past.clear()
            layer.dots(points, WHITE, 0.8)
        else:
            ages = result.tracks.ages
            lasted = ages >= LASTED
            self._remember(result.tracks.ids, points, result.previous is None, tail)
            layer.dots(points[~lasted], WHITE, 0.3)
            shades = shades_of(ages[lasted])
            self._draw_tails(
                layer, result.tracks.ids[lasted], points[lasted], shades, LONGEST * canvas.shape[1]
            )
            layer.dots(points[lasted], np.array(PALETTE)[shades], 1.0, rim=True)
        canvas = layer.over(cv2.convertScaleAbs(canvas, alpha=0.82))
        if caption:
            write(canvas, caption)
            if result.tracks is not None:
                draw_legend(canvas)
        return canvas

    def _remember(self, ids: NDArray[np.int64], points: Float, anew: bool, tail: int) -> None:
        if anew:
            self._past.clear()
        order = np.argsort(ids)
        self._past.append((ids[order], points[order]))
        while len(self._past) > tail + 1:
            self._past.popleft()

    def _draw_tails(
        self,
        layer: Layer,
        alive: NDArray[np.int64],
        places: Float,
        shades: NDArray[np.int64],
        reach: float,
    ) -> None:
        """Draw a line through the past of each given track; older parts are fainter.

        It ends at most `reach` pixels from the current position of the track.
        """
        if not len(alive):
            return
        order = np.argsort(alive)
        alive, places, shades = alive[order], places[order], shades[order]
        steps = list(pairwise(self._past))
        for number, ((ids, points), (next_ids, next_points)) in enumerate(steps, 1):
            common, first, second = np.intersect1d(
                ids, next_ids, assume_unique=True, return_indices=True
            )
            rows = np.minimum(np.searchsorted(alive, common), len(alive) - 1)
            seen = alive[rows] == common
            seen &= ((points[first] - places[rows]) ** 2).sum(axis=1) < reach**2
            segments = np.stack([points[first[seen]], next_points[second[seen]]], axis=1)
            colours = shades[rows[seen]]
            for shade in np.unique(colours):
                layer.lines(segments[colours == shade], PALETTE[shade], number / len(steps))


class Layer:
    """A transparent layer that is drawn over an image."""

    def __init__(self, width: int, height: int) -> None:
        self._pixels = np.zeros((height, width, 4), np.uint8)  # RGB times opacity, opacity
        self._size = max(1.0, width / 800)

    def lines(self, segments: Float, colour: tuple[int, int, int], opacity: float) -> None:
        thick = max(1, round(self._size))
        cv2.polylines(
            self._pixels, list(_fixed_point(segments)), False, _paint(colour, 0.9 * opacity),
            thick, cv2.LINE_AA, _SHIFT,
        )  # fmt: skip

    def dots(self, points: Float, colours: Colours, opacity: float, rim: bool = False) -> None:
        """Draw a coloured dot for each point, with a dark rim to be visible anywhere."""
        if rim:
            self._discs(points, BLACK, 2.9 * self._size, 0.5)
        self._discs(points, colours, (1.9 if rim else 1.2) * self._size, opacity)

    def _discs(self, points: Float, colours: Colours, radius: float, opacity: float) -> None:
        """Draw all at once: small dots of OpenCV are neither round nor smooth."""
        reach = np.arange(-np.ceil(radius), np.ceil(radius) + 1)
        window = np.stack(np.meshgrid(reach, reach), axis=-1).reshape(1, -1, 2)
        pixels = np.rint(points)[:, None] + window.astype(np.float32)  # (N, K, 2)
        far = np.hypot(*np.moveaxis(pixels - points[:, None], 2, 0))
        covered = np.clip(radius + 0.5 - far, 0, 1)
        height, width = self._pixels.shape[:2]
        inside = ((pixels >= 0) & (pixels < (width, height))).all(axis=2)
        rows, columns = np.nonzero(inside & (covered > 0))
        x, y = pixels[rows, columns].astype(np.intp).T
        share = opacity * covered[rows, columns, None]
        painted = np.full((len(points), 4), 255.0, np.float32)
        painted[:, :3] = colours
        self._pixels[y, x] = painted[rows] * share + self._pixels[y, x] * (1 - share)

    def over(self, image: Image) -> Image:
        through = cv2.cvtColor(255 - self._pixels[..., 3], cv2.COLOR_GRAY2RGB)
        dimmed = cv2.multiply(image, through, scale=1 / 255)
        return np.asarray(cv2.add(dimmed, self._pixels[..., :3]), np.uint8)


def _paint(colour: tuple[int, int, int], opacity: float) -> tuple[float, ...]:
    return tuple(opacity * value for value in (*colour, 255))


def _fixed_point(points: Float) -> NDArray[np.int32]:
    return np.rint(points * (1 << _SHIFT)).astype(np.int32)


def write(canvas: Image, text: str) -> None:
    """Write a line into the upper left corner, on a dark background."""
    scale = _text_scale(canvas)
    (width, height), below = cv2.getTextSize(text, _FONT, scale, 1)
    canvas[: height + 2 * below, : width + 2 * below] //= 3
    cv2.putText(canvas, text, (below, height + below), _FONT, scale, WHITE, 1, cv2.LINE_AA)


def draw_legend(canvas: Image) -> None:
    """Explain the colours in the lower left corner."""
    scale = _text_scale(canvas)
    first, last = f'track seen in {LASTED}', f'{OLD}+ frames'
    (before, height), below = cv2.getTextSize(first, _FONT, scale, 1)
    after = cv2.getTextSize(last, _FONT, scale, 1)[0][0]
    step = max(3, height // 2)
    bar = step * SHADES
    rows = canvas.shape[0]
    canvas[rows - height - 2 * below :, : before + bar + after + 6 * below] //= 3
    baseline = rows - below - 1
    cv2.putText(canvas, first, (below, baseline), _FONT, scale, WHITE, 1, cv2.LINE_AA)
    x = before + 3 * below
    for number, colour in enumerate(PALETTE):
        left = x + number * step
        canvas[baseline - height : baseline + 1, left : left + step] = colour
    cv2.putText(canvas, last, (x + bar + 2 * below, baseline), _FONT, scale, WHITE, 1, cv2.LINE_AA)


def _text_scale(canvas: Image) -> float:
    return max(canvas.shape[1] / 1400, 0.38)


def to_jpeg(image: Image, quality: int = 80) -> bytes:
    """RGB or gray -> the bytes of a JPEG file."""
    if image.ndim == 3:
        image = np.asarray(cv2.cvtColor(image, cv2.COLOR_RGB2BGR), np.uint8)
    done, data = cv2.imencode('.jpg', image, [cv2.IMWRITE_JPEG_QUALITY, quality])
    if not done:
        raise ValueError(f'an image of shape {image.shape} cannot be a JPEG')
    return data.tobytes()
