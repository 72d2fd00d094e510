"""Keypoints with scores and descriptors: how the network finds them, and which are kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import cv2
import numpy as np
from numpy.typing import NDArray

from kp2d_core.architecture import CELL
from kp2d_core.geometry import Size, resize_matrix
from kp2d_core.images import Image, resize, resolve_size

if TYPE_CHECKING:
    from typing_extensions import Self

    from kp2d_core.runtimes import Runtime

Float = NDArray[np.float32]
BATCH_PIXELS = 4 << 20  # pixels per batch: more need memory and hardly save time
MOST_PAIRS = 1 << 22  # pairs that suppression compares at once: 64 MB
VOTE_RADIUS = 1.5  # px; cells whose points are closer than this vote for the same place


@dataclass(frozen=True, repr=False)
class Features:
    """The keypoints of one image, highest score first.

    Every field except `image_size` is an array with one row per keypoint.
    """

    keypoints: Float  # (N, 2): x right, y down, pixels; (0, 0) = centre of the top-left pixel
    scores: Float  # (N,) descending
    descriptors: Float  # (N, D) unit length
    image_size: tuple[int, int] = (0, 0)  # (width, height) of the image
    # (N,) scale at which each was found: 1 in the full image, 0.5 in the image at half the size
    scales: Float = None  # type: ignore[assignment]
    # (N,) expected error of each location, in pixels along x and along y; 1 if the model has none
    sigma: Float = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        for name in ('scales', 'sigma'):
            if getattr(self, name) is None:
                object.__setattr__(self, name, np.ones(len(self.keypoints), np.float32))

    def __len__(self) -> int:
        return len(self.keypoints)

    def __getitem__(self, which: NDArray[np.bool_] | NDArray[np.intp] | slice) -> Self:
        """Return a subset, by mask, indices or slice."""
        chosen: dict[str, Any] = {name: rows[which] for name, rows in self.rows().items()}
        return replace(self, **chosen)

    def __add__(self, other: Self) -> Self:
        """Concatenate both."""
        return join_features([self, other])

    def __repr__(self) -> str:
        width, height = self.image_size
        text = f'{len(self)} keypoints' + (f' in {width}x{height}' if width else '')
        if len(self):
            text += f', scores {self.scores.max():.3f} to {self.scores.min():.3f}'
        return f'Features({text}, descriptors of {self.descriptors.shape[1]})'

    def rows(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by name."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: rows for name, rows in values.items() if isinstance(rows, np.ndarray)}

    def to_dict(self) -> dict[str, NDArray[Any]]:
        """Return a dictionary with the key names of LightGlue.

        >>> data = {name: torch.from_numpy(v)[None] for name, v in features.to_dict().items()}
        """
        rows = self.rows()
        rows['keypoint_scores'] = rows.pop('scores')
        return {**rows, 'image_size': np.array(self.image_size, np.float32)}


Found = TypeVar('Found', bound=Features)


def join_features(parts: Sequence[Found]) -> Found:
    """Concatenate features of one image; the scores are then no longer in order."""
    together = [part.rows() for part in parts]
    joined: dict[str, Any] = {
        name: np.concatenate([rows[name] for rows in together]) for name in together[0]
    }
    return replace(parts[0], **joined)


def in_order_of_score(features: Found) -> Found:
    return features[np.argsort(-features.scores, kind='stable')]


@dataclass(frozen=True)
class Selection:
    """The limits of a selection; `select` applies them in order."""

    max_keypoints: int | None = None
    score_threshold: float = 0.0
    nms_radius: float = 0.0


def find(
    runtime: Runtime,
    images: Sequence[Image],
    sizes: Sequence[Sequence[Size]],
    limit: int | None,
    selection: Selection,
    masks: Sequence[NDArray[np.uint8] | None],
) -> list[Features]:
    """Find the features of each image with the network, at each of its working sizes.

    The arguments are not checked: `KeypointDetector` determines possible sizes and limits.
    """
    found: list[list[_Candidates]] = [[] for _ in images]
    runs: list[list[_Descriptors]] = [[] for _ in images]
    for same in alike(images, sizes):
        for size in sizes[same[0]]:
            run = _run(runtime, [images[index] for index in same], size, limit, len(runs[same[0]]))
            for index, (candidates, descriptors) in zip(same, run, strict=True):
                found[index].append(candidates)
                runs[index].append(descriptors)
    chosen = [
        select(
            parts[0] if len(parts) == 1 else in_order_of_score(join_features(parts)),
            max_keypoints=selection.max_keypoints,
            score_threshold=selection.score_threshold,
            nms_radius=selection.nms_radius,
            mask=mask,
        )
        for parts, mask in zip(found, masks, strict=True)
    ]
    return [_described(each, of) for each, of in zip(chosen, runs, strict=True)]


@dataclass(frozen=True, repr=False)
class _Candidates(Features):
    """Features without descriptors, which are computed for those that are kept."""

    run: NDArray[np.intp] = None  # type: ignore[assignment]  # (N,) of the network, by number
    row: NDArray[np.intp] = None  # type: ignore[assignment]  # (N,) in the outputs of this run


def _described(chosen: _Candidates, runs: Sequence[_Descriptors]) -> Features:
    descriptors = np.empty((len(chosen), runs[0].size), np.float32)
    for number, run in enumerate(runs):
        mine = np.flatnonzero(chosen.run == number)
        descriptors[mine] = run.of_all[run.image, chosen.row[mine]]
    rows = chosen.rows()
    return Features(
        **{name: rows[name] for name in ('keypoints', 'scores', 'scales', 'sigma')},
        descriptors=descriptors, image_size=chosen.image_size,
    )  # fmt: skip


def alike(images: Sequence[Image], sizes: Sequence[Sequence[Size]]) -> Iterator[list[int]]:
    """Group the indices of images of equal size into batches of at most BATCH_PIXELS."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, image in enumerate(images):
        groups.setdefault(image.shape[:2], []).append(index)
    for same in groups.values():
        width, height = max(sizes[same[0]])
        count = max(1, BATCH_PIXELS // (width * height))
        for start in range(0, len(same), count):
            yield same[start : start + count]


class _Descriptors(NamedTuple):
    """The descriptors of an image, in the outputs of a run."""

    of_all: Any  # images of the run, perhaps not computed yet
    image: int
    size: int


def _run(
    runtime: Runtime, images: list[Image], working_size: Size, limit: int | None, number: int
) -> list[tuple[_Candidates, _Descriptors]]:
    """Find the candidates of images of equal size; some may lie in the padding."""
    inputs, placements = zip(*(prepare(each, working_size) for each in images), strict=True)
    placement = placements[0]
    top_k = cells_to_ask(inputs[0], placement, runtime.cell, limit)
    batch = inputs[0][None] if len(inputs) == 1 else np.stack(inputs)
    scale = np.float32(placement.working[0] / placement.given[0])
    outputs = runtime.run(batch, top_k)
    count = outputs.scores.shape[1]
    found = []
    for image in range(len(images)):
        candidates = _Candidates(
            outputs.keypoints[image], outputs.scores[image], np.empty((count, 0), np.float32),
            placement.given, np.full(count, scale), outputs.sigmas[image] / scale,
            np.full(count, number), np.arange(count),
        )  # fmt: skip
        if runtime.cell < CELL:
            candidates = count_votes(candidates, runtime.score_line)
        points = placement.to_given(candidates.keypoints)
        descriptors = _Descriptors(outputs.descriptors, image, outputs.descriptors.shape[2])
        found.append((replace(candidates, keypoints=points), descriptors))
    return found


def count_votes(
    features: Found, score_line: tuple[float, float] = (1.0, 0.0), radius: float = VOTE_RADIUS
) -> Found:
    """Combine the points of cells that found the same place into one.

    Small cells find a place several times, and the more of them agree, the more likely it is found
    again in another image. The score becomes the probability that at least one of them is right,
    calibrated by `score_line` (slope and offset of its logit), and the position the mean of
    theirs. Of the points that voted for each other the best remains.
    """
    pairs = _close_pairs(features.keypoints, radius)
    if pairs is None:
        return features
    weights = np.maximum(features.scores, np.float32(1e-6))
    doubts = np.log1p(-np.minimum(features.scores, np.float32(1 - 1e-6)))  # of each cell
    lower, higher = pairs
    sums = []
    for values in (doubts, weights, *(weights[:, None] * features.keypoints).T):
        from_higher = np.bincount(lower, values[higher], len(values))
        from_lower = np.bincount(higher, values[lower], len(values))
        sums.append(values + from_higher + from_lower)
    doubt, weight, x, y = sums
    rank = np.where(np.isnan(doubt), np.inf, doubt)
    turned = rank[higher] < rank[lower]
    better, worse = np.where(turned, higher, lower), np.where(turned, lower, higher)
    stays = np.flatnonzero(_undominated(better, worse, len(rank)))
    stays = stays[np.argsort(rank[stays], kind='stable')]
    points = np.column_stack([x, y])[stays] / weight[stays, None]
    slope, offset = score_line
    logit = np.log(np.maximum(np.expm1(-doubt[stays]), 1e-30))
    return replace(
        features[stays],
        scores=np.asarray(1 / (1 + np.exp(-(slope * logit + offset))), np.float32),
        keypoints=np.asarray(points, np.float32),
    )


@dataclass(frozen=True)
class Placement:
    """The position of the given image in the input of the network, to map keypoints back."""

    given: Size  # of the given image
    working: Size  # after resizing, before padding on the right and below to whole cells

    def to_given(self, points: NDArray[np.float32]) -> NDArray[np.float32]:
        """Map pixels of the network to pixels of the given image, following pixel centres."""
        if self.working == self.given:
            return points
        matrix = resize_matrix(self.working, self.given)
        return (points * np.diag(matrix)[:2] + matrix[:2, 2]).astype(np.float32, copy=False)


def prepare(image: Image, working_size: Size | int | None = None) -> tuple[Image, Placement]:
    """Convert a checked image to the input of the network: RGB, whole cells, contiguous.

    `working_size` is (width, height), the longer side, or None to keep the size.
    """
    given = image.shape[1], image.shape[0]
    as_given = working_size is None or (isinstance(working_size, tuple) and working_size == given)
    working = given if as_given else resolve_size(given, working_size)
    if working != given:
        image = resize(image, working)
    if image.ndim == 2 or image.shape[2] == 1:
        image = np.asarray(cv2.cvtColor(image, cv2.COLOR_GRAY2RGB), np.uint8)
    right, below = -working[0] % CELL, -working[1] % CELL
    if right or below:
        image = np.asarray(
            cv2.copyMakeBorder(image, 0, below, 0, right, cv2.BORDER_REPLICATE), np.uint8
        )
    return np.ascontiguousarray(image), Placement(given, working)


def cells_to_ask(network_input: Image, placement: Placement, cell: int, wanted: int | None) -> int:
    """Return how many cells to request, so that `wanted` remain without those in the padding."""
    height, width = network_input.shape[:2]
    rows, columns = height // cell, width // cell
    if wanted is None:
        return rows * columns
    right, below = width - placement.working[0], height - placement.working[1]
    # Keypoints of cells in the padding lie there, and so do some of the neighbouring cells.
    padded_rows, padded_columns = (-(-pad // cell) + 1 if pad else 0 for pad in (below, right))
    return min(wanted + padded_rows * columns + padded_columns * rows, rows * columns)


# A distance or threshold beyond float32 counts as infinite. The distance between two infinities
# is NaN, which is never near.
@np.errstate(over='ignore', invalid='ignore')
def select(
    features: Found,
    *,
    max_keypoints: int | None = None,
    score_threshold: float = 0.0,
    nms_radius: float = 0.0,
    mask: NDArray[np.uint8] | NDArray[np.bool_] | None = None,
) -> Found:
    """Apply score threshold, image border, mask, suppression and the limit, in this order."""
    keep = features.scores > score_threshold
    if features.image_size != (0, 0):
        keep &= inside(features.keypoints, features.image_size)
    if mask is not None:
        keep &= _under_mask(features.keypoints, mask)
    if not keep.all():
        features = features[keep]
    if nms_radius > 0:
        features = features[suppress_neighbours(features.keypoints, nms_radius)]
    if max_keypoints is not None and len(features) > max_keypoints:
        features = features[:max_keypoints]
    return features


def inside(points: Float, image_size: tuple[int, int]) -> NDArray[np.bool_]:
    """Mark the points on the image: at most half a pixel beyond the outermost pixel centres."""
    width, height = image_size
    x, y = points[:, 0], points[:, 1]
    result: NDArray[np.bool_] = (x >= -0.5) & (y >= -0.5) & (x < width - 0.5) & (y < height - 0.5)
    return result


def _under_mask(points: Float, mask: NDArray[np.uint8] | NDArray[np.bool_]) -> NDArray[np.bool_]:
    height, width = mask.shape
    x = np.clip(np.rint(points[:, 0]).astype(np.intp), 0, width - 1)
    y = np.clip(np.rint(points[:, 1]).astype(np.intp), 0, height - 1)
    return mask[y, x].astype(bool)


@np.errstate(over='ignore', invalid='ignore')
def suppress_neighbours(points: Float, radius: float) -> NDArray[np.bool_]:
    """Greedy non-maximum suppression of points in descending order of score; mark those kept.

    A point is dropped if a kept point with a higher score is closer than `radius`. A few
    vectorised passes over all close pairs give the result of a loop over the points.
    """
    pairs = _close_pairs(points, radius)
    if pairs is None:
        return _suppress_one_by_one(points, radius)
    return _undominated(*pairs, len(points))


def _undominated(
    better: NDArray[np.intp], worse: NDArray[np.intp], count: int
) -> NDArray[np.bool_]:
    """Mark those of `count` points that remain if each in turn drops the worse ones near it."""
    undecided = np.ones(count, dtype=bool)
    stays = np.zeros(count, dtype=bool)
    while undecided.any():
        beaten = np.zeros(count, dtype=bool)
        beaten[worse[undecided[better]]] = True
        winners = undecided & ~beaten
        stays |= winners
        undecided &= ~winners
        undecided[worse[winners[better]]] = False
    return stays


def _suppress_one_by_one(points: Float, radius: float) -> NDArray[np.bool_]:
    """The same with little memory, for a wide radius, where only few points stay."""
    order = np.argsort(points[:, 0], kind='stable')
    x = points[order, 0]
    undecided = np.ones(len(points), dtype=bool)
    stays = np.zeros(len(points), dtype=bool)
    for best in range(len(points)):
        if undecided[best]:
            low, high = np.searchsorted(x, points[best, 0] + np.array([-radius, radius]))
            near = order[low:high]
            off = points[near] - points[best]
            undecided[near[(off**2).sum(axis=1) < radius**2]] = False
            stays[best] = True
    return stays


def _close_pairs(points: Float, radius: float) -> tuple[NDArray[np.intp], NDArray[np.intp]] | None:
    """Find all pairs of indices (lower, higher) of points closer than `radius`; None: too many."""
    order = np.argsort(points[:, 0])
    x, y = points[order, 0], points[order, 1]
    # How many points to the right of each are near enough along x, or hardly too far.
    following = np.searchsorted(x, x + np.float32(radius * (1 + 1e-6) + 1e-3), side='right')
    following -= np.arange(1, len(x) + 1)
    ends = np.cumsum(following)
    lower: list[NDArray[np.intp]] = [np.empty(0, dtype=np.intp)]
    higher: list[NDArray[np.intp]] = [np.empty(0, dtype=np.intp)]
    begin = count = done = 0
    while begin < len(x):
        end = max(int(np.searchsorted(ends, done + MOST_PAIRS // 4, side='right')), begin + 1)
        each, total = following[begin:end], int(ends[end - 1]) - done
        left = np.repeat(np.arange(begin, end), each)
        right = np.arange(done, done + total) - np.repeat(ends[begin:end] - each, each) + left + 1
        near = np.flatnonzero((x[right] - x[left]) ** 2 + (y[right] - y[left]) ** 2 < radius**2)
        count += len(near)
        if count > MOST_PAIRS:
            return None
        first, second = order[left[near]], order[right[near]]
        lower.append(np.minimum(first, second))
        higher.append(np.maximum(first, second))
        begin, done = end, int(ends[end - 1])
    return np.concatenate(lower), np.concatenate(higher)


def unit_descriptors(descriptors: NDArray[Any]) -> Float:
    """Convert descriptors to unit vectors with the same neighbours.

    Bits become ±1. Squared Euclidean distances are then proportional to Hamming distances, and one
    matcher serves binary and real descriptors.
    """
    if descriptors.dtype == np.uint8:
        descriptors = np.unpackbits(descriptors, axis=1).astype(np.float32) * 2 - 1
    lengths = np.linalg.norm(descriptors, axis=1, keepdims=True)
    return np.asarray(descriptors / np.maximum(lengths, 1e-12), np.float32)
