"""The paper's protocol on HPatches: every sequence, image 1 against the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import cv2
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from kp2d_core.evaluation import metrics
from kp2d_core.evaluation.hpatches import Sequence, rescale, select_split
from kp2d_core.features import Features, in_order_of_score
from kp2d_core.images import Image, Size, read_image, size_of

Extract = Callable[[Image], Features]  # an RGB uint8 image in, features in its pixels out

METRICS = ('repeatability', 'localization', 'cor1', 'cor3', 'cor5', 'mscore')  # the paper's
MORE_METRICS = ('auc1', 'auc3', 'auc5', 'precision', 'inlier_ratio', 'matches')


@dataclass(frozen=True)
class PairResult:
    """One pair of images. A pair that fails has the worst value there is, never NaN."""

    sequence: str
    target: int  # number of the second image; the first is 1
    repeatability: float
    localization: float  # px
    mscore: float
    precision: float  # share of mutual matches within 3 px of the truth
    matches: int  # mutual matches
    corner_errors: tuple[float, ...]  # px, one for each RANSAC run; infinite without a homography
    inlier_ratios: tuple[float, ...]  # RANSAC's inliers over matches, one for each run
    failed: bool  # no point found again, or too few matches for any homography

    def metrics(self) -> dict[str, float]:
        errors = np.array(self.corner_errors)
        return {
            'repeatability': self.repeatability,
            'localization': self.localization,
            **{f'cor{t}': float((errors <= t).mean()) for t in metrics.CORNER_THRESHOLDS},
            'mscore': self.mscore,
            **{f'auc{t}': metrics.area_under_curve(errors, t) for t in metrics.CORNER_THRESHOLDS},
            'precision': self.precision,
            'inlier_ratio': float(np.mean(self.inlier_ratios)),
            'matches': float(self.matches),
        }


@dataclass(frozen=True)
class Evaluation:
    """One method on one set of pairs."""

    name: str
    size: Size
    top_k: int
    seeds: int
    pairs: list[PairResult]
    milliseconds: list[float] = field(default_factory=list)  # to extract, for each image

    def mean(self) -> dict[str, float]:
        """Every metric, averaged over the pairs."""
        rows = [pair.metrics() for pair in self.pairs]
        return {
            name: float(np.mean([row[name] for row in rows])) for name in (*METRICS, *MORE_METRICS)
        }

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

    def failures(self) -> int:
        return sum(pair.failed for pair in self.pairs)

    def time(self) -> float:
        """Median milliseconds to extract one image."""
        return float(np.median(self.milliseconds)) if self.milliseconds else 0.0

    def only(self, sequences: Iterable[str]) -> Evaluation:
        """The same, of these sequences alone."""
        names = set(sequences)
        return replace(self, pairs=[pair for pair in self.pairs if pair.sequence in names])


@dataclass(frozen=True)
class View:
    """One image at the size of the evaluation, and what was found in it."""

    image: Image
    features: Features  # in descending order of score
    given: Size  # before it was resized


@dataclass(frozen=True)
class Pair:
    """Image 1 of a sequence, another, and the true homography between them."""

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
    progress: bool = False,
    name: str = '',
    watch: Callable[[Pair, PairResult], object] | None = None,
) -> Evaluation:
    """Extract every image once, resized, and compare image 1 of each sequence with the others.

    extract  gives all points that the method finds: the metrics take the best `top_k`
    seeds    how many times RANSAC runs on each pair
    watch    is called with every pair, for drawings
    """
    check_settings(sequences, size, top_k, seeds)
    results: list[PairResult] = []
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
                views[number] = View(resized, in_order_of_score(features), size_of(image))
                bar.update()
            for number, homography in sequence.homographies.items():
                truth = rescale(homography, views[1].given, views[number].given, size)
                pair = Pair(views[1], views[number], truth, sequence.name, number)
                results.append(evaluate_pair(pair, top_k, seeds))
                if watch is not None:
                    watch(pair, results[-1])
    return Evaluation(name, size, top_k, seeds, results, milliseconds)


def evaluate_pair(pair: Pair, top_k: int, seeds: int = 1) -> PairResult:
    """All metrics of one pair."""
    first, second, truth = pair.first.features, pair.second.features, pair.first_to_second
    size = size_of(pair.first.image)
    detection = metrics.detection(first, second, truth, size, top_k)
    matched = metrics.mutual_matches(first, second, truth, size, top_k)
    fit = metrics.fit_homographies(*matched, truth, size, seeds)
    correct = metrics.correct_matches(*matched, truth)
    return PairResult(
        sequence=pair.sequence,
        target=pair.target,
        repeatability=detection.repeatability,
        localization=detection.localization,
        mscore=metrics.matching_score(first, second, truth, size, top_k),
        precision=float(correct.mean()) if len(correct) else 0.0,
        matches=len(correct),
        corner_errors=tuple(map(float, fit.corner_errors)),
        inlier_ratios=tuple(map(float, fit.inlier_ratios)),
        failed=detection.failed or len(correct) < metrics.MINIMUM_MATCHES,
    )


def split_evaluation(
    evaluation: Evaluation, sequences: list[Sequence], splits: Iterable[str]
) -> dict[str, Evaluation]:
    """The evaluation of each split (see `select_split`) that has a sequence."""
    chosen = {split: select_split(sequences, split) for split in splits}
    return {
        split: evaluation.only(sequence.name for sequence in members)
        for split, members in chosen.items()
        if members
    }


def check_settings(sequences: list[Sequence], size: Size, top_k: int, seeds: int) -> None:
    if not sequences:
        raise ValueError('there is no sequence to evaluate on')
    settings = {'width': size[0], 'height': size[1], 'top_k': top_k, 'seeds': seeds}
    for name, value in settings.items():
        if value < 1:
            raise ValueError(f'{name} must be 1 or more, got {value}')
