"""Evaluation on sequences in HPatches layout: the paper's metrics, and more.

Image 1 of a sequence is compared with each other image. By default each place counts once, and
homographies are scaled with respect to pixel centres. The paper counts copies of a point and
scales pixel coordinates: `nms_radius=0` and `truth='paper'`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import cv2
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from kp2d_core.detector import NMS_RADIUS
from kp2d_core.evaluation import metrics, reliability
from kp2d_core.evaluation.hpatches import Sequence, Truth, rescale, select_split
from kp2d_core.evaluation.reliability import FOUND, Reliability
from kp2d_core.features import Features, Float, in_order_of_score, select
from kp2d_core.images import Image, Size, read_image, size_of
from kp2d_core.matching import Matches
from kp2d_core.refinement import refined_points

Extract = Callable[[Image], Features]  # from an RGB uint8 image to features in its pixels

METRICS = ('repeatability', 'localization', 'cor1', 'cor3', 'cor5', 'mscore')  # the paper's
PLACE_METRICS = ('right', 'error', 'copies')  # copies do not improve these
MORE_METRICS = ('auc1', 'auc3', 'auc5', 'precision', 'inlier_ratio', 'matches')


@dataclass(frozen=True)
class PairResult:
    """The figures of one pair of images. A pair that fails has the worst value, never NaN."""

    sequence: str
    target: int  # number of the second image; the first is 1
    repeatability: float
    localization: float  # px
    mscore: float
    precision: float  # share of mutual matches within 3 px of the truth
    matches: int  # mutual matches
    errors: tuple[float, ...]  # px, of the correct matches, those within 3 px of the truth
    copies: float  # share of the best points within 2 px of a better one, before suppression
    corner_errors: tuple[float, ...]  # px, one for each RANSAC run; infinite without a homography
    inlier_ratios: tuple[float, ...]  # RANSAC's inliers over matches, one for each run
    failed: bool  # no point found again, or too few matches for any homography
    reliability: Reliability | None = None  # None: scores are not probabilities
    in_sigmas: tuple[float, ...] = ()  # errors divided by the sigmas of the points, if known

    def metrics(self) -> dict[str, float]:
        errors = np.array(self.corner_errors)
        return {
            'repeatability': self.repeatability,
            'localization': self.localization,
            **{f'cor{t}': float((errors <= t).mean()) for t in metrics.CORNER_THRESHOLDS},
            'mscore': self.mscore,
            'right': float(len(self.errors)),
            'error': _median(self.errors),
            'copies': self.copies,
            **{f'auc{t}': metrics.area_under_curve(errors, t) for t in metrics.CORNER_THRESHOLDS},
            'precision': self.precision,
            'inlier_ratio': float(np.mean(self.inlier_ratios)),
            'matches': float(self.matches),
        }


@dataclass(frozen=True)
class Evaluation:
    """The results of one method on a set of pairs."""

    name: str
    size: Size
    top_k: int
    seeds: int
    pairs: list[PairResult]
    milliseconds: list[float] = field(default_factory=list)  # to extract, for each image
    nms_radius: float = NMS_RADIUS
    truth: Truth = 'exact'
    refined: Evaluation | None = None  # the same with refined matches, if requested

    def mean(self) -> dict[str, float]:
        """Average every metric over the pairs; 'error' is the median over all correct matches."""
        rows = [pair.metrics() for pair in self.pairs]
        names = (*METRICS, *PLACE_METRICS, *MORE_METRICS)
        means = {name: float(np.mean([row[name] for row in rows])) for name in names}
        return means | {'error': _median([error for pair in self.pairs for error in pair.errors])}

    def deviation(self) -> dict[str, float]:
        """Standard deviation over the RANSAC runs of the metrics that depend on RANSAC."""
        errors = np.array([pair.corner_errors for pair in self.pairs])
        ratios = np.array([pair.inlier_ratios for pair in self.pairs])
        of_runs = {
            **{f'cor{t}': (errors <= t).mean(axis=0) for t in metrics.CORNER_THRESHOLDS},
            **{
                f'auc{t}': np.clip(1 - errors / t, 0, None).mean(axis=0)
                for t in metrics.CORNER_THRESHOLDS
            },
            'inlier_ratio': ratios.mean(axis=0),
        }
        return {name: float(np.std(values)) for name, values in of_runs.items()}

    def reliability(self) -> Reliability | None:
        return reliability.add(pair.reliability for pair in self.pairs)

    def in_sigmas(self) -> NDArray[np.float64]:
        """Errors of all correct matches divided by the sigmas of their points, if known."""
        return np.array([ratio for pair in self.pairs for ratio in pair.in_sigmas])

    def failures(self) -> int:
        return sum(pair.failed for pair in self.pairs)

    def time(self) -> float:
        """Median milliseconds to extract one image."""
        return float(np.median(self.milliseconds)) if self.milliseconds else 0.0

    def only(self, sequences: Iterable[str]) -> Evaluation:
        """Return the evaluation of these sequences only."""
        names = set(sequences)
        return replace(self, pairs=[pair for pair in self.pairs if pair.sequence in names])


@dataclass(frozen=True)
class View:
    """One image at the size of the evaluation, and its features."""

    image: Image
    features: Features  # in descending order of score
    given: Size  # before resizing
    copies: float = 0.0  # share of the best points before suppression


@dataclass(frozen=True)
class Pair:
    """Image 1 of a sequence, another image, and the true homography between them."""

    first: View
    second: View
    first_to_second: NDArray[np.float64]
    sequence: str = ''
    target: int = 2  # number of the second image


def evaluate(
    extract: Extract,
    sequences: list[Sequence],
    *,
    size: Size = (320, 240),
    top_k: int = 300,
    seeds: int = 1,
    nms_radius: float = NMS_RADIUS,
    truth: Truth = 'exact',
    found_within: float = FOUND,
    refine: bool = False,
    progress: bool = False,
    name: str = '',
    watch: Callable[[Pair, PairResult], object] | None = None,
) -> Evaluation:
    """Extract every image once, resized, and compare image 1 of each sequence with the others.

    extract       returns all points of an image; the metrics take the best `top_k`
    seeds         number of RANSAC runs per pair
    nms_radius    px within which only the best point counts; 0: copies count, as in the paper
    truth         'exact' or 'paper': how homographies are scaled with the images (`rescale`)
    found_within  px within which a point counts as found again, for the reliability of scores
    refine        also evaluate refined matches (`Evaluation.refined`)
    watch         called with every pair, for drawings
    """
    check_settings(sequences, size, top_k, seeds, nms_radius)
    results: list[PairResult] = []
    refined: list[PairResult] = []
    milliseconds: list[float] = []
    images = sum(len(sequence.images) for sequence in sequences)
    with tqdm(total=images, desc=name, unit='image', disable=None if progress else True) as bar:
        for sequence in sequences:
            views: dict[int, View] = {}
            for number, path in sequence.images.items():
                image = read_image(path)
                resized = np.asarray(cv2.resize(image, size), np.uint8)
                started = time.perf_counter()
                features = extract(resized)
                milliseconds.append((time.perf_counter() - started) * 1000)
                views[number] = look(resized, features, top_k, nms_radius, size_of(image))
                bar.update()
            for number, homography in sequence.homographies.items():
                exact = rescale(homography, views[1].given, views[number].given, size, truth)
                pair = Pair(views[1], views[number], exact, sequence.name, number)
                results.append(evaluate_pair(pair, top_k, seeds, found_within))
                if refine:
                    refined.append(refine_pair(pair, results[-1], top_k, seeds))
                if watch is not None:
                    watch(pair, results[-1])
    evaluation = Evaluation(name, size, top_k, seeds, results, milliseconds, nms_radius, truth)
    if refine:
        after = replace(evaluation, name=f'{name} refined', pairs=refined, milliseconds=[])
        return replace(evaluation, refined=after)
    return evaluation


def look(
    image: Image,
    features: Features,
    top_k: int,
    nms_radius: float = NMS_RADIUS,
    given: Size | None = None,
) -> View:
    """Make a view: features after suppression, and the share of copies before it."""
    ordered = in_order_of_score(features)
    copies = metrics.share_of_copies(ordered, top_k)
    return View(image, once(ordered, nms_radius), given or size_of(image), copies)


def once(features: Features, nms_radius: float) -> Features:
    """Drop points within the radius of a better one; keep all if the radius is 0."""
    if nms_radius == 0:
        return features
    return select(features, score_threshold=-np.inf, nms_radius=nms_radius)


def evaluate_pair(
    pair: Pair, top_k: int, seeds: int = 1, found_within: float = FOUND
) -> PairResult:
    """Compute all metrics of one pair."""
    first, second, truth = pair.first.features, pair.second.features, pair.first_to_second
    size = size_of(pair.first.image)
    detection = metrics.detection(first, second, truth, size, top_k)
    matched = metrics.mutual_matches(first, second, truth, size, top_k)
    points = matched[0].keypoints, matched[1].keypoints
    fit = metrics.fit_homographies(*points, truth, size, seeds)
    correct = metrics.correct_matches(*points, truth)
    # All points, as in use, where the ground truth does not tell which points both images show.
    nearest = metrics.mutually_nearest(first[:top_k], second[:top_k])
    errors = metrics.match_errors(nearest[0].keypoints, nearest[1].keypoints, truth)
    right = errors < metrics.CORRECT
    in_sigmas = reliability.in_sigmas(errors, *nearest, truth)
    return PairResult(
        sequence=pair.sequence,
        target=pair.target,
        repeatability=detection.repeatability,
        localization=detection.localization,
        mscore=metrics.matching_score(first, second, truth, size, top_k),
        precision=float(correct.mean()) if len(correct) else 0.0,
        matches=len(correct),
        errors=tuple(map(float, errors[right])),
        copies=(pair.first.copies + pair.second.copies) / 2,
        corner_errors=tuple(map(float, fit.corner_errors)),
        inlier_ratios=tuple(map(float, fit.inlier_ratios)),
        failed=detection.failed or len(correct) < metrics.MINIMUM_MATCHES,
        reliability=reliability.reliability(first, second, truth, size, found_within),
        in_sigmas=tuple(map(float, in_sigmas[right])) if len(in_sigmas) else (),
    )


def refine_pair(pair: Pair, result: PairResult, top_k: int, seeds: int = 1) -> PairResult:
    """Compute the metrics that depend on matches again, with refined matches."""
    first, second, truth = pair.first.features, pair.second.features, pair.first_to_second
    size = size_of(pair.first.image)
    points = _refined(pair, *metrics.mutual_matches(first, second, truth, size, top_k))
    fit = metrics.fit_homographies(*points, truth, size, seeds)
    correct = metrics.correct_matches(*points, truth)
    points = _refined(pair, *metrics.mutually_nearest(first[:top_k], second[:top_k]))
    errors = metrics.match_errors(*points, truth)
    return replace(
        result,
        precision=float(correct.mean()) if len(correct) else 0.0,
        matches=len(correct),
        errors=tuple(map(float, errors[errors < metrics.CORRECT])),
        corner_errors=tuple(map(float, fit.corner_errors)),
        inlier_ratios=tuple(map(float, fit.inlier_ratios)),
        reliability=None,
        in_sigmas=(),
    )


def _refined(pair: Pair, first: Features, second: Features) -> tuple[Float, Float]:
    """Refine features that are matched row by row; return their points."""
    rows = np.arange(len(first))
    unverified = np.ones(len(rows), bool)
    matches = Matches(np.stack([rows, rows], axis=1), np.zeros(len(rows), np.float32), unverified)
    here, there, _ = refined_points(pair.first.image, pair.second.image, first, second, matches)
    return here, there


def _median(errors: Iterable[float]) -> float:
    """Return the median, or the worst value if there are no errors."""
    known = list(errors)
    return float(np.median(known)) if known else metrics.CORRECT


def split_evaluation(
    evaluation: Evaluation, sequences: list[Sequence], splits: Iterable[str]
) -> dict[str, Evaluation]:
    """Return the evaluation of each split (see `select_split`) that has a sequence."""
    chosen = {split: select_split(sequences, split) for split in splits}
    return {
        split: evaluation.only(sequence.name for sequence in members)
        for split, members in chosen.items()
        if members
    }


def check_settings(
    sequences: list[Sequence], size: Size, top_k: int, seeds: int, nms_radius: float
) -> None:
    if not sequences:
        raise ValueError('there is no sequence to evaluate on')
    settings = {'width': size[0], 'height': size[1], 'top_k': top_k, 'seeds': seeds}
    for name, value in settings.items():
        if value < 1:
            raise ValueError(f'{name} must be 1 or more, got {value}')
    if not nms_radius >= 0:
        raise ValueError(f'nms_radius must be 0 or more, got {nms_radius}')
