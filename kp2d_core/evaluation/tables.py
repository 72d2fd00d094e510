"""Tables of a study, as plain text for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kp2d_core.evaluation.protocol import METRICS, MORE_METRICS, PLACE_METRICS, Evaluation
from kp2d_core.evaluation.reliability import BINS, EXPECTED_MEDIAN
from kp2d_core.evaluation.study import Study

TITLES = {
    'repeatability': 'Repeat.',
    'localization': 'Loc.',
    'cor1': 'Cor-1',
    'cor3': 'Cor-3',
    'cor5': 'Cor-5',
    'mscore': 'M.Score',
    'right': 'Right',
    'error': 'Error',
    'copies': 'Copies',
    'auc1': 'AUC@1',
    'auc3': 'AUC@3',
    'auc5': 'AUC@5',
    'precision': 'Precision',
    'inlier_ratio': 'Inliers',
    'matches': 'Matches',
}
EXPLANATIONS = {
    'repeatability': 'share of the points visible in both images that are found again within 3 px',
    'localization': 'mean distance in px of the points found again; lower is better',
    'cor1': 'share of homographies with a mean corner error of at most 1 px',
    'cor3': 'share of homographies with a mean corner error of at most 3 px',
    'cor5': 'share of homographies with a mean corner error of at most 5 px',
    'mscore': 'share of nearest-descriptor matches within 3 px of the truth',
    'right': 'correct mutual matches (within 3 px of the truth), mean over the pairs',
    'error': 'median error in px of all correct matches of all pairs; lower is better',
    'copies': 'share of the best points within 2 px of a better one, before suppression',
    'auc1': 'area under the curve of homographies by corner error, up to 1 px',
    'auc3': 'area under the curve of homographies by corner error, up to 3 px',
    'auc5': 'area under the curve of homographies by corner error, up to 5 px',
    'precision': 'share of mutual matches within 3 px of the truth',
    'inlier_ratio': 'share of mutual matches that are inliers of RANSAC',
    'matches': 'number of mutual matches',
}
LOWER_IS_BETTER = ('localization', 'error', 'copies')
COLUMNS = (*METRICS, *PLACE_METRICS)
NUMBERS = ('right', 'matches')  # counts, neither shares nor pixels


def format_markdown(study: Study) -> str:
    """Format the table of each split in Markdown, for documents."""
    blocks = []
    for split, evaluations in study.by_split().items():
        title, rows = _split_rows(study, split, evaluations)
        blocks.append(f'{title}\n\n{markdown(rows)}')
    return '\n\n'.join(blocks)


def format_study(study: Study) -> str:
    """Format all tables, with the paper's rows below ours."""
    blocks = [_split_block(study, split, rows) for split, rows in study.by_split().items()]
    if study.evaluations:
        blocks += [_besides_block(study.evaluations), _time_line(study.evaluations)]
    if study.reliability:
        blocks.append(_reliability_block(study))
    if study.sigmas():
        blocks.append(_sigma_block(study))
    if study.shift:
        blocks.append(_shift_block(study))
    if study.robustness:
        blocks.append(_robustness_block(study))
    if study.motion:
        blocks.append(_motion_block(study))
    return '\n\n'.join(blocks)


def figure(value: float, deviation: float | None = None) -> str:
    """Format a figure: '0.867', or '0.867±0.005' with several runs."""
    return f'{value:.3f}' if deviation is None else f'{value:.3f}±{deviation:.3f}'


def entry(name: str, value: float, deviation: float | None = None) -> str:
    """Format a metric for the tables."""
    return f'{value:.1f}' if name in NUMBERS else figure(value, deviation)


def align(rows: Sequence[Sequence[str]]) -> str:
    """Align columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        '  '.join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    return '\n'.join(f'  {line}'.rstrip() for line in lines)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [f'| {" | ".join(row)} |' for row in rows]
    return '\n'.join([lines[0], '|---' * len(rows[0]) + '|', *lines[1:]])


def _split_block(study: Study, split: str, evaluations: dict[str, Evaluation]) -> str:
    title, rows = _split_rows(study, split, evaluations)
    return f'{title}\n{align(rows)}'


def _split_rows(
    study: Study, split: str, evaluations: dict[str, Evaluation]
) -> tuple[str, list[list[str]]]:
    """Return the title and the rows; the first row holds the column titles."""
    several = study.seeds > 1
    rows = [['', *(TITLES[name] for name in COLUMNS), 'pairs', 'failed']]
    for method, evaluation in evaluations.items():
        mean, deviation = evaluation.mean(), evaluation.deviation() if several else {}
        figures = [entry(name, mean[name], deviation.get(name)) for name in COLUMNS]
        rows.append([method, *figures, str(len(evaluation.pairs)), str(evaluation.failures())])
    for row in study.paper_rows(split):
        figures = [figure(row.metrics[name], row.deviation.get(name)) for name in METRICS]
        figures += [''] * len(PLACE_METRICS)
        rows.append([f"paper's {row.method}, by its protocol", *figures, str(row.pairs), ''])
    runs = f', {study.seeds} RANSAC runs' if several else ''
    size = f'{study.size[0]}x{study.size[1]}'
    title = f'{split}: {size}, best {study.top_k} points, {study.protocol()}{runs}'
    return title, rows


def _besides_block(evaluations: dict[str, Evaluation]) -> str:
    rows = [['', *(TITLES[name] for name in MORE_METRICS)]]
    for method, evaluation in evaluations.items():
        mean = evaluation.mean()
        rows.append([method, *(entry(name, mean[name]) for name in MORE_METRICS)])
    return f'further metrics, over all pairs\n{align(rows)}'


def _time_line(evaluations: dict[str, Evaluation]) -> str:
    timed = {name: each for name, each in evaluations.items() if each.milliseconds}
    times = ', '.join(f'{name} {each.time():.1f} ms' for name, each in timed.items())
    return f'time per image, median: {times}'


def _reliability_block(study: Study) -> str:
    rows = [['score', *(f'{i / BINS:g}-' for i in range(BINS)), 'Brier', 'calibration error']]
    for method, known in study.reliability.items():
        shares = ['' if share is None else f'{share:.2f}' for share in known.found_shares()]
        ends = [figure(known.brier()), figure(known.calibration_error())]
        rows.append([f'{method}: share found again', *shares, *ends])
        rows.append(['  points', *map(str, known.counts), '', ''])
    return f'points found again within {study.found_within:g} px, by score\n{align(rows)}'


def _sigma_block(study: Study) -> str:
    rows = [['', 'median', 'below 1', 'below 2']]
    for method, ratios in study.sigmas().items():
        below = [f'{(ratios < limit).mean():.3f}' for limit in (1, 2)]
        rows.append([method, f'{np.median(ratios):.3f}', *below])
    expected = [1 - np.exp(-(limit**2) / 2) for limit in (1, 2)]
    rows.append(['a Gaussian', f'{EXPECTED_MEDIAN:.3f}', *(f'{share:.3f}' for share in expected)])
    return f'errors of correct matches divided by their sigmas\n{align(rows)}'


def _shift_block(study: Study) -> str:
    shifts = [str(row.shift) for row in next(iter(study.shift.values()))]
    rows = [['shift of the content, px', *shifts]]
    for method, results in study.shift.items():
        rows.append([f'{method}: repeatability', *(f'{r.repeatability:.3f}' for r in results)])
        rows.append(['  localization, px', *(f'{r.localization:.2f}' for r in results)])
        rows.append(['  bias in x, px', *(_signed(r.bias_x) for r in results)])
        rows.append(['  bias in y, px', *(_signed(r.bias_y) for r in results)])
    return f'shift test (bias below 0: keypoints lag behind the image)\n{align(rows)}'


def _signed(value: float | None) -> str:
    return '-' if value is None else f'{value:+.2f}'


def _robustness_block(study: Study) -> str:
    blocks = []
    for change in next(iter(study.robustness.values())):
        levels = [f'{p.level:g}' for p in next(iter(study.robustness.values()))[change]]
        rows = [[f'{change}', *levels]]
        for method, curves in study.robustness.items():
            rows.append([method, *(f'{point.mscore:.3f}' for point in curves[change])])
        blocks.append(align(rows))
    return '\n\n'.join(['robustness: matching score against', *blocks])


def _motion_block(study: Study) -> str:
    blocks = []
    for path in next(iter(study.motion.values())):
        given = next(iter(study.motion.values()))[path]
        rows = [[f'{path}: frames apart', *(str(row.gap) for row in given)]]
        rows.append(['  pairs', *(str(row.pairs) for row in given)])
        for method, paths in study.motion.items():
            results = paths[path]
            rows.append([f'{method}: AUC@5', *(f'{row.auc5:.3f}' for row in results)])
            rows.append(['  rotation, degrees', *(f'{row.rotation:.3f}' for row in results)])
            rows.append(['  direction, degrees', *(f'{row.direction:.2f}' for row in results)])
            rows.append(['  matches', *(f'{row.matches:.0f}' for row in results)])
            rows.append(['  inliers', *(f'{row.inliers:.0f}' for row in results)])
        blocks.append(align(rows))
    title = f'motion of the camera, best {study.top_k} points, medians of the errors'
    return '\n\n'.join([title, *blocks])
