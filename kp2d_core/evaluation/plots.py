"""The figures of a report: bars, curves, and matches drawn side by side."""

from __future__ import annotations

import importlib.util
import io
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import cv2
import numpy as np

from kp2d_core.evaluation.metrics import correct_matches, mutual_matches
from kp2d_core.evaluation.protocol import Pair, PairResult
from kp2d_core.evaluation.reliability import BINS, EXPECTED_MEDIAN
from kp2d_core.evaluation.robustness import CHANGES
from kp2d_core.evaluation.study import Study
from kp2d_core.features import Features
from kp2d_core.geometry import scale_matrix, warp_points
from kp2d_core.images import size_of
from kp2d_core.matching import Matches
from kp2d_core.visualize import draw_matches

COLOURS = ('#2563eb', '#ea580c', '#059669', '#9333ea', '#db2777', '#0891b2', '#ca8a04', '#475569')
MANY_SEQUENCES = 12  # more bars than this are unreadable
STYLE: dict[Any, Any] = {
    'font.family': 'sans-serif',
    'font.size': 10,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.edgecolor': '#94a3b8',
    'axes.labelcolor': '#334155',
    'axes.titlesize': 11,
    'axes.titleweight': 'bold',
    'axes.titlecolor': '#0f172a',
    'axes.grid': True,
    'axes.axisbelow': True,
    'grid.color': '#e2e8f0',
    'xtick.color': '#475569',
    'ytick.color': '#475569',
    'lines.linewidth': 2,
    'legend.frameon': False,
    'svg.fonttype': 'path',
    'svg.hashsalt': 'kp2d',
}
WIDTH = 1500  # px, of a drawing


def plot_study(study: Study) -> dict[str, bytes]:
    """Draw all figures of a study: title -> SVG."""
    import matplotlib

    plots: dict[str, bytes] = {}
    with matplotlib.rc_context(STYLE):
        if study.evaluations:
            plots['Homography accuracy and matching score'] = _accuracy(study)
            if 1 < len(study.sequences) <= MANY_SEQUENCES:
                plots['Matching score and repeatability by sequence'] = _sequences(study)
        if study.reliability:
            plots[f'Points found again within {study.found_within:g} px'] = _reliability(study)
        if study.sigmas():
            plots['Errors of correct matches divided by their sigmas'] = _sigmas(study)
        if study.shift:
            plots['Shift test'] = _shift(study)
        if study.robustness:
            plots['Robustness'] = _robustness(study)
        for path in next(iter(study.motion.values()), {}):
            plots[f'Motion of the camera, {path}'] = _motion(study, path)
    return plots


def require_matplotlib() -> None:
    if importlib.util.find_spec('matplotlib') is None:
        raise ValueError('the report needs matplotlib: pip install matplotlib')


def _colours(study: Study) -> dict[str, str]:
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(study.methods)}


def _figure(columns: int, height: float = 3.2) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, height), layout='constrained')
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _accuracy(study: Study) -> bytes:
    figure, (left, right) = _figure(2)
    thresholds = np.linspace(0, 10, 201)
    for name, evaluation in study.evaluations.items():
        colour = _colours(study)[name]
        errors = np.array([pair.corner_errors for pair in evaluation.pairs]).ravel()
        share = (errors[:, None] <= thresholds).mean(axis=0)
        left.plot(thresholds, share, color=colour, label=name)
        targets = sorted({pair.target for pair in evaluation.pairs})
        scores = [
            np.mean([pair.mscore for pair in evaluation.pairs if pair.target == target])
            for target in targets
        ]
        right.plot(targets, scores, 'o-', color=colour, label=name)
        right.set_xticks(targets)
    left.set(title='Homographies by corner error', xlabel='mean corner error, px')
    left.set(ylabel='share of pairs', xlim=(0, 10), ylim=(0, 1))
    right.set(title='Matching score, image 1 against image n', xlabel='n', ylim=(0, None))
    figure.legend(*left.get_legend_handles_labels(), loc='outside lower center', ncols=6)
    return _svg(figure)


def _sequences(study: Study) -> bytes:
    figure, axes = _figure(2)
    names = [sequence.name for sequence in study.sequences]
    width = 0.8 / len(study.evaluations)
    for axis, metric in zip(axes, ('mscore', 'repeatability'), strict=True):
        for i, (method, evaluation) in enumerate(study.evaluations.items()):
            values = [evaluation.only([name]).mean()[metric] for name in names]
            places = np.arange(len(names)) + (i - (len(study.evaluations) - 1) / 2) * width
            axis.bar(places, values, width * 0.92, color=_colours(study)[method], label=method)
        axis.set_xticks(np.arange(len(names)), names, rotation=20 if len(names) > 6 else 0)
        axis.set(title='Matching score' if metric == 'mscore' else 'Repeatability')
        axis.grid(visible=False, axis='x')
    figure.legend(*axes[0].get_legend_handles_labels(), loc='outside lower center', ncols=6)
    return _svg(figure)


def _reliability(study: Study) -> bytes:
    figure, (left, right) = _figure(2)
    centres = (np.arange(BINS) + 0.5) / BINS
    width = 0.8 / BINS / len(study.reliability)
    for i, (name, known) in enumerate(study.reliability.items()):
        colour = _colours(study)[name]
        error = f'{name}, Brier {known.brier():.3f}, error {known.calibration_error():.3f}'
        scores, shares = map(_gaps, (known.mean_scores(), known.found_shares()))
        left.plot(scores, shares, 'o-', color=colour, label=error)
        places = centres + (i - (len(study.reliability) - 1) / 2) * width
        portions = np.array(known.counts) / max(sum(known.counts), 1)
        right.bar(places, portions, width * 0.92, color=colour)
    left.plot((0, 1), (0, 1), '--', color='#94a3b8', linewidth=1)
    left.set(title='Reliability: a score is a probability on the dashed line', ylim=(0, 1.03))
    left.set(xlabel='score', ylabel='share found again', xlim=(0, 1))
    right.set(title='Scores of all points', xlabel='score', ylabel='share of points', xlim=(0, 1))
    figure.legend(*left.get_legend_handles_labels(), loc='outside lower center', ncols=3)
    return _svg(figure)


def _sigmas(study: Study) -> bytes:
    figure, (axis,) = _figure(1)
    ratios = np.linspace(0, 5, 101)
    for name, values in study.sigmas().items():
        share = (values[:, None] <= ratios).mean(axis=0)
        label = f'{name}, median {np.median(values):.2f}'
        axis.plot(ratios, share, color=_colours(study)[name], label=label)
    gaussian = 1 - np.exp(-(ratios**2) / 2)
    label = f'a Gaussian, median {EXPECTED_MEDIAN:.2f}'
    axis.plot(ratios, gaussian, '--', color='#94a3b8', linewidth=1, label=label)
    axis.set(title='Correct matches by error in sigmas', xlabel='error / sigma', xlim=(0, 5))
    axis.set(ylabel='share', ylim=(0, 1.03))
    figure.legend(*axis.get_legend_handles_labels(), loc='outside lower center', ncols=3)
    return _svg(figure)


def _shift(study: Study) -> bytes:
    figure, axes = _figure(3)
    for name, rows in study.shift.items():
        colour = _colours(study)[name]
        shifts = [row.shift for row in rows]
        axes[0].plot(shifts, [row.repeatability for row in rows], 'o-', color=colour, label=name)
        axes[1].plot(shifts, [row.localization for row in rows], 'o-', color=colour)
        axes[2].plot(shifts, [_or_gap(row.bias_x) for row in rows], 'o-', color=colour)
        axes[2].plot(shifts, [_or_gap(row.bias_y) for row in rows], 's--', color=colour, alpha=0.6)
    axes[2].axhline(0, color='#94a3b8', linewidth=1)
    axes[0].set(title='Repeatability', ylim=(0, 1.03))
    axes[1].set(title='Localization error, px', ylim=(0, None))
    axes[2].set(title='Bias in x (solid) and y (dashed), px')
    limit = max(0.25, 1.1 * float(np.abs(axes[2].get_ylim()).max()))
    axes[2].set_ylim(-limit, limit)
    for axis in axes:
        axis.set_xlabel('shift of the content, px')
    figure.legend(*axes[0].get_legend_handles_labels(), loc='outside lower center', ncols=6)
    return _svg(figure)


def _or_gap(value: float | None) -> float:
    return np.nan if value is None else value


def _gaps(values: list[float | None]) -> list[float]:
    return [_or_gap(value) for value in values]


def _robustness(study: Study) -> bytes:
    figure, axes = _figure(len(CHANGES), 2.7)
    for axis, change in zip(axes, CHANGES, strict=True):
        for name, curves in study.robustness.items():
            points = curves[change.name]
            levels, scores = [p.level for p in points], [p.mscore for p in points]
            axis.plot(levels, scores, 'o-', ms=3.5, color=_colours(study)[name], label=name)
        axis.set(title=change.name.capitalize(), xlabel=change.unit, ylim=(0, 1.03))
        if change.unit == 'times':
            ticks = [level for level in change.levels if np.log2(level).is_integer()]
            axis.set_xscale('log', base=2)
            axis.set_xticks(ticks, [f'{Fraction(tick)}' for tick in ticks])
    axes[0].set_ylabel('matching score')
    figure.legend(*axes[0].get_legend_handles_labels(), loc='outside lower center', ncols=6)
    return _svg(figure)


def _motion(study: Study, path: str) -> bytes:
    figure, axes = _figure(3)
    for name, paths in study.motion.items():
        rows = paths[path]
        gaps, colour = [row.gap for row in rows], _colours(study)[name]
        axes[0].plot(gaps, [row.auc5 for row in rows], 'o-', color=colour, label=name)
        axes[1].plot(gaps, [row.rotation for row in rows], 'o-', color=colour)
        axes[2].plot(gaps, [row.direction for row in rows], 'o-', color=colour)
    axes[0].set(title='AUC of both errors, up to 5 degrees', ylim=(0, 1.03))
    axes[1].set(title='Rotation, median error in degrees', yscale='log')
    axes[2].set(title='Direction, median error in degrees', yscale='log')
    for axis in axes:
        axis.set(xlabel='frames apart', xticks=gaps)
    figure.legend(*axes[0].get_legend_handles_labels(), loc='outside lower center', ncols=6)
    return _svg(figure)


def _svg(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format='svg', transparent=True, metadata={'Date': None})
    return buffer.getvalue()


@dataclass(frozen=True)
class Drawing:
    method: str
    webp: bytes
    correct: int
    result: PairResult


@dataclass
class Gallery:
    """Draws the pairs with these targets while they are evaluated."""

    targets: dict[str, set[int]]  # sequence -> numbers of the second images
    top_k: int
    drawings: dict[tuple[str, int], list[Drawing]] = field(default_factory=dict)

    def add(self, method: str, pair: Pair, result: PairResult) -> None:
        if pair.target not in self.targets.get(pair.sequence, ()):
            return
        drawing = draw_pair(method, pair, result, self.top_k)
        self.drawings.setdefault((pair.sequence, pair.target), []).append(drawing)


def draw_pair(method: str, pair: Pair, result: PairResult, top_k: int) -> Drawing:
    """Draw the mutual matches that the homography is estimated from."""
    size = size_of(pair.first.image)
    matched = mutual_matches(
        pair.first.features, pair.second.features, pair.first_to_second, size, top_k
    )
    first, second = (each.keypoints for each in matched)
    correct = correct_matches(first, second, pair.first_to_second)
    scale = WIDTH / (2 * size[0])
    enlarged = [
        np.asarray(
            cv2.resize(view.image, None, fx=scale, fy=scale, interpolation=cv2.INTER_CUBIC),
            np.uint8,
        )
        for view in (pair.first, pair.second)
    ]
    points = [
        Features(
            warp_points(each, scale_matrix(scale, scale)).astype(np.float32),
            np.ones(len(each), np.float32),
            np.empty((len(each), 0), np.float32),
        )
        for each in (first, second)
    ]
    rows = np.arange(len(first))
    matches = Matches(np.stack([rows, rows], axis=1), np.zeros(len(first), np.float32), correct)
    canvas = draw_matches(enlarged[0], enlarged[1], points[0], points[1], matches, judge=True)
    _, encoded = cv2.imencode(
        '.webp', cv2.cvtColor(canvas, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_WEBP_QUALITY, 80]
    )
    return Drawing(method, encoded.tobytes(), int(correct.sum()), result)
