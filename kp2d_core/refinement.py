"""Refine matches to sub-pixel accuracy by aligning the image patches around them.

The network locates a point to about half a pixel; the pixels of the two images allow more. The
patch around the first point is rotated, scaled and sheared like the neighbouring matches, laid on
the second image, and shifted until it fits. No geometry of the whole scene is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from kp2d_core.features import Features, Float
from kp2d_core.images import Image, check_image, to_gray
from kp2d_core.matching import Matches, distance_factors, match
from kp2d_core.verification import verify

NEIGHBOURS = 16  # neighbouring matches that determine the transformation (frame) of a patch
MOST_CANDIDATES = 512  # neighbours are searched among this many matches; a power of 2
PAIRS = 16  # pairs of neighbours; each gives a frame to try
TOLERANCE = 3.0, 0.15  # largest error of a neighbour: px, or share of the distance
MINIMUM_SUPPORT = 2.5  # weighted number of neighbours that must agree
LARGEST_SCALE = 8.0
LARGEST_STRETCH = 6.0  # of one axis over the other

RADIUS = 5  # px, of a patch around its centre
WINDOW = 4.0  # px, sigma of the weights in a patch
SMOOTHING = 0.7  # px, sigma, so that interpolation between pixels is unbiased
STEPS = 8  # at most
ENOUGH = 8  # with this many aligned matches the others are dropped
GEOMETRY = ('verification', 'threshold', 'intrinsics', 'undistort')  # of match's options
LONGEST_STEP = 1.0  # px
CONVERGED = 0.03  # px, of the last step
LEAST_CONTRAST = 1.0  # of 255, standard deviation in a patch


@dataclass(frozen=True)
class Refinement:
    """The refined positions of M matches."""

    points: Float  # (M, 2) in the second image; unchanged where a match did not align
    aligned: NDArray[np.bool_]  # (M,)

    def moved(self, second: Features, matches: Matches) -> Features:
        """Return the features of the second image with refined positions."""
        keypoints = second.keypoints.copy()
        keypoints[matches.indices[:, 1]] = self.points
        return replace(second, keypoints=keypoints)


def refine_matches(
    first_image: Image,
    second_image: Image,
    first: Features,
    second: Features,
    matches: Matches,
    *,
    max_shift: float = 3.0,
    min_correlation: float = 0.8,
    max_sigma: float = 0.5,
) -> Refinement:
    """Move each matched point of the second image to where its patch fits the first image best.

    max_shift        a match that would move by more pixels is not aligned
    min_correlation  smallest correlation of the two patches, at most 1
    max_sigma        largest expected error in pixels, from the patches' contrast and difference

    Images are RGB or gray uint8. The transformation of a patch comes from neighbouring inliers
    (all matches without verification); up to half of them may be wrong.
    """
    images = check_image(first_image, 'first_image'), check_image(second_image, 'second_image')
    here = first.keypoints[matches.indices[:, 0]].astype(np.float32)
    there = second.keypoints[matches.indices[:, 1]].astype(np.float32)
    result = there.copy()
    aligned = np.zeros(len(matches), bool)
    frames, usable = local_frames(here, there, matches.inliers)
    rows = np.flatnonzero(usable)
    if len(rows):
        places, correlation, sigma = _align(
            images, here[rows], there[rows], frames[rows], max_shift
        )
        shift = np.linalg.norm(places - there[rows], axis=1)
        # Patches outside the image or without contrast are NaN, which no comparison accepts.
        good = (correlation > min_correlation) & (shift < max_shift) & (sigma < max_sigma)
        aligned[rows[good]] = True
        result[rows[good]] = places[good]
    return Refinement(result, aligned)


def match_refined(
    first_image: Image, second_image: Image, first: Features, second: Features, **options: Any
) -> tuple[Matches, Refinement]:
    """Match, refine, then verify at the refined positions; options are those of `match`.

    A match that does not align is not an inlier, unless too few align.
    """
    geometry = {name: options.pop(name) for name in GEOMETRY if name in options}
    matches = match(first, second, **options)
    refined = refine_matches(first_image, second_image, first, second, matches)
    kept = _enough(refined.aligned)
    agreeing, model = verify(
        first.keypoints[matches.indices[kept, 0]],
        refined.points[kept],
        geometry.pop('verification', 'none'),
        distances=matches.distances[kept],
        **geometry,
    )
    inliers = np.zeros(len(matches), bool)
    inliers[kept] = agreeing
    return replace(matches, inliers=inliers, model=model), refined


def refined_points(
    first_image: Image, second_image: Image, first: Features, second: Features, matches: Matches
) -> tuple[Float, Float, NDArray[np.intp]]:
    """Return the points (K, 2) of the matches that align, or of all if too few align; their rows.

    Matches that do not align are mostly wrong: estimators do better without them.
    """
    refined = refine_matches(first_image, second_image, first, second, matches)
    rows = np.flatnonzero(_enough(refined.aligned))
    return first.keypoints[matches.indices[rows, 0]], refined.points[rows], rows


def _enough(aligned: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Select the matches that align, or all if too few align."""
    return aligned if aligned.sum() >= ENOUGH else np.ones(len(aligned), bool)


def local_frames(
    first: Float, second: Float, inliers: NDArray[np.bool_]
) -> tuple[Float, NDArray[np.bool_]]:
    """Estimate the local affine map (M, 2, 2) from the first image to the second; (M,): if known.

    Each match with two of its neighbours gives a map. The one that most neighbours agree with is
    fitted to them by least squares.
    """
    frames = np.broadcast_to(np.eye(2, dtype=np.float32), (len(first), 2, 2))
    others = np.flatnonzero(inliers)
    others = others[:: max(-(-len(others) // MOST_CANDIDATES), 1)]
    count = min(NEIGHBOURS, len(others) - 1)
    if count < 3:
        return frames, np.zeros(len(first), bool)
    nearest = _nearest(first, others, count)
    steps = _Steps(*(axis[nearest] - axis[:, None] for axis in (*first.T, *second.T)))
    limit = np.maximum(TOLERANCE[0], TOLERANCE[1] * np.hypot(steps.u, steps.v)) ** 2

    weights = _agreeing(steps, limit)
    for _ in range(2):
        frames, offsets = _fit(steps, weights)
        (a, b), (c, d) = frames.transpose(1, 2, 0)[..., None]
        right = a * steps.x + b * steps.y + offsets[:, :1] - steps.u
        down = c * steps.x + d * steps.y + offsets[:, 1:] - steps.v
        weights = np.clip(1 - (right * right + down * down) / limit, 0, 1) ** 2

    area = frames[:, 0, 0] * frames[:, 1, 1] - frames[:, 0, 1] * frames[:, 1, 0]
    squares = (frames * frames).sum(axis=(1, 2))
    usable = (area > LARGEST_SCALE**-2) & (area < LARGEST_SCALE**2)  # excludes mirrored ones
    usable &= squares < area * (LARGEST_STRETCH + 1 / LARGEST_STRETCH)
    return frames, usable & (weights.sum(axis=1) >= MINIMUM_SUPPORT)


@dataclass(frozen=True)
class _Steps:
    """From each match to its K neighbours, (M, K) each, px."""

    x: Float  # in the first image
    y: Float
    u: Float  # in the second
    v: Float


def _nearest(points: Float, others: NDArray[np.intp], count: int) -> NDArray[np.intp]:
    """Find the nearest of the `others` to each point, without the point itself: (M, count)."""
    left, right = distance_factors(points, points[others])
    distances = np.maximum(left @ right.T, 0)
    columns = np.arange(len(others), dtype=np.int32)
    distances[others, columns] = np.inf
    # Floats sort like their bits. The last bits are not needed and hold the column instead, so
    # that a plain partition will do, in half the time of argpartition.
    keys = (distances.view(np.int32) & -MOST_CANDIDATES) | columns
    nearest = np.partition(keys, count - 1, axis=1)[:, :count] & (MOST_CANDIDATES - 1)
    return others[nearest]


def _agreeing(steps: _Steps, limit: Float) -> Float:
    """Mark neighbours (M, K) within their squared limit of the frame with the most support."""
    pairs = list(combinations(range(limit.shape[1]), 2))
    i, j = np.array(pairs)[np.random.default_rng(0).permutation(len(pairs))[:PAIRS]].T
    xi, yi, xj, yj = steps.x[:, i], steps.y[:, i], steps.x[:, j], steps.y[:, j]
    area = xi * yj - yi * xj
    # Two neighbours in nearly the same direction do not determine the other direction.
    flat = np.abs(area) < 0.2 * np.hypot(xi, yi) * np.hypot(xj, yj) + 1
    scale = 1 / np.where(flat, np.float32(1), area)
    off = np.zeros((*area.shape, limit.shape[1]), np.float32)
    places = np.stack([steps.x, steps.y, np.zeros_like(steps.x)], axis=1)
    for along in (steps.u, steps.v):
        frame = np.stack([
            (along[:, i] * yj - along[:, j] * yi) * scale,
            (along[:, j] * xi - along[:, i] * xj) * scale,
            -np.ones_like(scale),
        ], axis=2)  # fmt: skip
        places[:, 2] = along
        astray = frame @ places
        astray *= astray
        off += astray
    off /= limit[:, None]
    cost = np.minimum(off, 1).sum(axis=2)
    cost[flat] = np.inf
    best = off[np.arange(len(limit)), cost.argmin(axis=1)]
    return (best < 1).astype(np.float32)


def _fit(steps: _Steps, weights: Float) -> tuple[Float, Float]:
    """Fit frames (M, 2, 2) and offsets (M, 2) by least squares; the match has a weight of 1."""
    total = weights.sum(axis=1) + 1
    x, y, u, v = steps.x, steps.y, steps.u, steps.v
    wx, wy = weights * x, weights * y

    def mean(values: Float) -> Float:
        return np.asarray(values.sum(axis=1) / total)

    mx, my, mu, mv = mean(wx), mean(wy), mean(weights * u), mean(weights * v)
    xx, xy, yy = (
        mean(a) - b for a, b in ((wx * x, mx * mx), (wx * y, mx * my), (wy * y, my * my))
    )
    ux, uy = mean(wx * u) - mu * mx, mean(wy * u) - mu * my
    vx, vy = mean(wx * v) - mv * mx, mean(wy * v) - mv * my
    area = np.maximum(xx * yy - xy * xy, 1e-3)
    frames = np.array([
        [(ux * yy - uy * xy) / area, (uy * xx - ux * xy) / area],
        [(vx * yy - vy * xy) / area, (vy * xx - vx * xy) / area],
    ], np.float32)  # fmt: skip
    offsets = np.array([mu, mv], np.float32) - frames[:, 0] * mx - frames[:, 1] * my
    return frames.transpose(2, 0, 1), offsets.T


class Pyramid:
    """A gray image and its halved versions, made on demand."""

    def __init__(self, image: Image) -> None:
        gray = to_gray(image)
        kernel = cv2.getGaussianKernel(5, SMOOTHING)
        self._levels = [cv2.sepFilter2D(gray, cv2.CV_32F, kernel, kernel)]

    def level(self, number: int) -> Float:
        """Return the image at 1 / 2**number of the size; coordinates are scaled by the same."""
        while len(self._levels) <= number:
            self._levels.append(cv2.pyrDown(self._levels[-1]))
        return np.asarray(self._levels[number], np.float32)


def _align(
    images: tuple[Image, Image], here: Float, there: Float, frames: Float, max_shift: float
) -> tuple[Float, Float, Float]:
    """Align patches: return their positions, correlations and expected errors in pixels.

    A patch that moves by more than `max_shift` is given up.

    A patch has the coarser of the two resolutions, so that no pixels are skipped: each image is
    halved until a step is about one of its pixels.
    """
    scale = np.sqrt(frames[:, 0, 0] * frames[:, 1, 1] - frames[:, 0, 1] * frames[:, 1, 0])
    step = np.maximum(1, 1 / scale)
    levels = np.rint(np.log2(np.stack([step, step * scale], axis=1))).astype(int)
    pyramids = [Pyramid(image) for image in images]
    places, correlation = there.copy(), np.empty(len(there), np.float32)
    sigma = np.empty(len(there), np.float32)
    for pair in np.unique(levels, axis=0):
        rows = np.flatnonzero((levels == pair).all(axis=1))
        first, second = (0.5**pair).astype(np.float32)
        found = _align_at(
            pyramids[0].level(int(pair[0])),
            pyramids[1].level(int(pair[1])),
            here[rows] * first,
            there[rows] * second,
            step[rows] * first,
            frames[rows] * (step[rows] * second)[:, None, None],
            max_shift * second,
        )
        places[rows], correlation[rows] = found[0] / second, found[1]
        sigma[rows] = found[2] * step[rows] * scale[rows]
    return places, correlation, sigma


def _align_at(
    first: Float,
    second: Float,
    here: Float,
    there: Float,
    step: Float,
    frames: Float,
    max_shift: float,
) -> tuple[Float, Float, Float]:
    """Align patches of two images: with this step in the first, with `frames` in the second.

    Lucas-Kanade, inverse compositional. It fits a shift within the frame, for patches of zero mean
    and unit variance. The expected error is in steps.
    """
    side = 2 * RADIUS + 1
    wide = np.arange(-RADIUS - 1, RADIUS + 2, dtype=np.float32)
    y, x = (axis.ravel() for axis in np.meshgrid(wide, wide, indexing='ij'))
    inner = (np.abs(x) <= RADIUS) & (np.abs(y) <= RADIUS)
    window = np.exp(-(x * x + y * y)[inner] / (2 * WINDOW**2))
    window /= window.sum()

    reach = np.repeat((RADIUS + 1) * step[:, None], 2, axis=1)
    seen = _sample(first, here, reach, x * step[:, None], y * step[:, None])
    seen = seen.reshape(-1, side + 2, side + 2)
    template, contrast = _normalised(seen[:, 1:-1, 1:-1].reshape(len(here), -1), window)
    slopes = np.stack([seen[:, 1:-1, 2:] - seen[:, 1:-1, :-2],
                       seen[:, 2:, 1:-1] - seen[:, :-2, 1:-1]], axis=1)  # fmt: skip
    slopes = slopes.reshape(len(here), 2, -1) / (2 * contrast[:, None, None])
    # Remove the part of the gradients that a change of brightness or contrast explains. The
    # patches themselves then need no correction.
    slopes -= (slopes @ window)[..., None]
    slopes -= (slopes @ (template * window)[..., None]) * template[:, None]
    weighted = slopes * window
    tensor = weighted @ slopes.transpose(0, 2, 1)
    xx, xy, yy = tensor[:, 0, 0], tensor[:, 0, 1], tensor[:, 1, 1]
    weakest = (xx + yy) / 2 - np.sqrt((xx - yy) ** 2 / 4 + xy * xy)
    area = np.maximum(xx * yy - xy * xy, 1e-9)
    solve = np.array([[-yy, xy], [xy, -xx]], np.float32).transpose(2, 0, 1) / area[:, None, None]
    # The products of a patch with these are its shift along x and y, and its correlation.
    tools = np.empty((len(here), 3, len(window)), np.float32)
    np.matmul(solve, weighted, out=tools[:, :2])
    np.multiply(template, window, out=tools[:, 2])

    across = frames[:, 0, :1] * x[inner] + frames[:, 0, 1:] * y[inner]
    down = frames[:, 1, :1] * x[inner] + frames[:, 1, 1:] * y[inner]
    reach = RADIUS * np.abs(frames).sum(axis=2)
    places, correlation = there.copy(), np.full(len(there), np.nan, np.float32)
    rows = np.flatnonzero(contrast >= LEAST_CONTRAST)  # false for NaN
    kept = [array[rows] for array in (frames, reach, across, down, tools)]
    late = np.ones(len(rows), bool)
    for _ in range(STEPS if len(rows) else 0):
        found = _sample(second, places[rows], *kept[1:4])
        deviation = np.sqrt(np.maximum((found * found) @ window - (found @ window) ** 2, 1e-3))
        fitted = (kept[4] @ found[..., None])[..., 0] / deviation[:, None]
        shift, correlation[rows] = fitted[:, :2], fitted[:, 2]
        length = np.hypot(*shift.T)
        shift = shift * np.minimum(1, LONGEST_STEP / np.maximum(length, 1e-9))[:, None]
        places[rows] += (kept[0] @ shift[..., None])[..., 0]
        late = length > CONVERGED
        late &= np.abs(places[rows] - there[rows]).max(axis=1) < max_shift
        if not late.any():
            break
        if late.mean() < 0.7:  # otherwise dropping them takes longer than it saves
            rows, late, kept = rows[late], late[late], [array[late] for array in kept]
    correlation[rows[late]] = np.nan
    pixels = 1 / (window @ window)
    variance = (1 - correlation**2) / (pixels * np.maximum(weakest, 1e-9))
    return places, correlation, np.sqrt(np.maximum(variance, 0))


def _sample(image: Float, middles: Float, reach: Float, x: Float, y: Float) -> Float:
    """Sample values (M, P) at offsets (x, y) from centres (M, 2); NaN rows outside the image."""
    values = cv2.remap(image, middles[:, :1] + x, middles[:, 1:] + y, cv2.INTER_LINEAR)
    last = np.array(image.shape[::-1], np.float32) - 1
    values[((middles < reach) | (middles > last - reach)).any(axis=1)] = np.nan
    return np.asarray(values, np.float32)


def _normalised(patches: Float, window: Float) -> tuple[Float, Float]:
    """Normalise patches (M, P) to zero mean and unit variance; also return their deviations."""
    centred = patches - (patches @ window)[:, None]
    contrast = np.maximum(np.sqrt((centred * centred) @ window), np.float32(1e-3))
    return np.asarray(centred / contrast[:, None], np.float32), contrast
