"""The results of one command for all methods, and their JSON form."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from kp2d_core.detector import NMS_RADIUS
from kp2d_core.evaluation.hpatches import Sequence, Truth
from kp2d_core.evaluation.motion import MotionResult
from kp2d_core.evaluation.protocol import (
    Evaluation,
    PairResult,
    split_evaluation,
)
from kp2d_core.evaluation.reliability import EXPECTED_MEDIAN, FOUND, Reliability
from kp2d_core.evaluation.robustness import RobustnessPoint, ShiftResult
from kp2d_core.files import atomic_write
from kp2d_core.images import Size
from kp2d_core.version import __version__

TABLES = Path(__file__).with_name('paper.yaml')
PERCENTILES = (5, 25, 50, 75, 95)  # of errors divided by sigmas


@dataclass
class Study:
    """Results by the name of the method, in the order in which they are shown."""

    data: str  # name of the folder of sequences, '' if there is none
    size: Size
    top_k: int
    seeds: int
    splits: list[str] = field(default_factory=list)
    nms_radius: float = NMS_RADIUS
    truth: Truth = 'exact'
    found_within: float = FOUND
    paper: str = 'same'  # which of its rows to show: 'same' methods, 'all', 'none'
    sequences: list[Sequence] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # a sentence for each file left out
    methods: dict[str, str] = field(default_factory=dict)  # name -> what runs it
    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    reliability: dict[str, Reliability] = field(default_factory=dict)  # of scores that are shares
    shift: dict[str, list[ShiftResult]] = field(default_factory=dict)
    robustness: dict[str, dict[str, list[RobustnessPoint]]] = field(default_factory=dict)
    motion: dict[str, dict[str, list[MotionResult]]] = field(default_factory=dict)  # by path

    def by_split(self) -> dict[str, dict[str, Evaluation]]:
        """split -> method -> evaluation, of the splits that have a sequence."""
        table: dict[str, dict[str, Evaluation]] = {}
        for method, evaluation in self.evaluations.items():
            parts = split_evaluation(evaluation, self.sequences, self.splits)
            for split, part in parts.items():
                table.setdefault(split, {})[method] = part
        return table

    def protocol(self) -> str:
        """Describe suppression and ground truth in words."""
        if self.nms_radius == 0 and self.truth == 'paper':
            return "the paper's protocol: copies count"
        places = f'each place once, radius {self.nms_radius:g} px'
        truth = 'exact truth' if self.truth == 'exact' else "the paper's truth"
        return f'{places if self.nms_radius else "copies count"}, {truth}'

    def sigmas(self) -> dict[str, NDArray[np.float64]]:
        """Errors of right matches over sigmas, of the methods that have any."""
        ratios = {name: each.in_sigmas() for name, each in self.evaluations.items()}
        return {name: values for name, values in ratios.items() if len(values)}

    def paper_rows(self, split: str) -> list[PaperRow]:
        return rows_beside(self.methods, self.size, self.top_k, split, self.paper)


def to_json(study: Study) -> dict[str, Any]:
    """Plain data; infinite errors become null."""
    by_split = study.by_split()
    return {
        'kp2d_version': __version__,
        'data': study.data,
        'size': list(study.size),
        'top_k': study.top_k,
        'seeds': study.seeds,
        'protocol': study.protocol(),
        'nms_radius': study.nms_radius,
        'truth': study.truth,
        'sequences': [sequence.name for sequence in study.sequences],
        'skipped': study.skipped,
        'methods': {
            method: {
                'description': description,
                **_evaluation_json(method, study, by_split),
                **_reliability_json(method, study),
                **({'shift': _rows(study.shift[method])} if method in study.shift else {}),
                **_curves_json(method, study),
            }
            for method, description in study.methods.items()
        },
        'paper': {
            split: {
                row.method: {
                    **row.metrics,
                    'deviation': row.deviation,
                    'pairs': row.pairs,
                    'source': row.source,
                }
                for row in study.paper_rows(split)
            }
            for split in by_split
        },
    }


def write_json(path: str | Path, study: Study) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(to_json(study), indent=1, allow_nan=False) + '\n')


def _evaluation_json(
    method: str, study: Study, by_split: dict[str, dict[str, Evaluation]]
) -> dict[str, Any]:
    if method not in study.evaluations:
        return {}
    evaluation = study.evaluations[method]
    return {
        'milliseconds': evaluation.time(),
        'splits': {
            split: {
                **evaluations[method].mean(),
                'deviation': evaluations[method].deviation(),
                'pairs': len(evaluations[method].pairs),
                'failures': evaluations[method].failures(),
            }
            for split, evaluations in by_split.items()
        },
        'pairs': [_pair_json(pair) for pair in evaluation.pairs],
    }


def _reliability_json(method: str, study: Study) -> dict[str, Any]:
    written: dict[str, Any] = {}
    known = study.reliability.get(method)
    if known is not None:
        written['reliability'] = {
            'found_within': study.found_within,
            'brier': known.brier(),
            'calibration_error': known.calibration_error(),
            'points': list(known.counts),
            'score': known.mean_scores(),
            'found': known.found_shares(),
        }
    ratios = study.sigmas().get(method)
    if ratios is not None:
        written['sigma'] = {
            'median': float(np.median(ratios)),
            'expected_median': EXPECTED_MEDIAN,
            'percentiles': {
                str(share): float(np.percentile(ratios, share)) for share in PERCENTILES
            },
        }
    return written


def _curves_json(method: str, study: Study) -> dict[str, Any]:
    tests: dict[str, dict[str, Any]] = {'robustness': study.robustness, 'motion': study.motion}
    return {
        test: {name: _rows(rows) for name, rows in results[method].items()}
        for test, results in tests.items()
        if method in results
    }


def _pair_json(pair: PairResult) -> dict[str, Any]:
    errors = [error if math.isfinite(error) else None for error in pair.corner_errors]
    return {
        'sequence': pair.sequence,
        'target': pair.target,
        **pair.metrics(),
        'corner_errors': errors,
        'failed': pair.failed,
    }


def _rows(results: list[Any]) -> list[dict[str, Any]]:
    return [asdict(result) for result in results]


@dataclass(frozen=True)
class PaperRow:
    method: str
    source: str  # which table
    pairs: int
    metrics: dict[str, float]
    deviation: dict[str, float]  # over RANSAC runs, where the paper gives it


@lru_cache
def paper_rows(size: Size, top_k: int, split: str) -> tuple[PaperRow, ...]:
    """Return the paper's rows for this size, number of points and split, if there is a table."""
    split = split.removeprefix('v_')
    found: list[PaperRow] = []
    for table in yaml.safe_load(TABLES.read_text()):
        if (tuple(table['size']), table['top_k'], table['split']) != (size, top_k, split):
            continue
        for method, row in table['rows'].items():
            deviation = row.pop('deviation', {})
            found.append(PaperRow(method, table['source'], table['pairs'], row, deviation))
    return tuple(found)


def rows_beside(
    methods: Collection[str], size: Size, top_k: int, split: str, which: str = 'same'
) -> list[PaperRow]:
    """Select the rows to print: of the 'same' methods (KP2D for any model), 'all', or 'none'."""
    if which == 'none':
        return []
    rows = paper_rows(size, top_k, split)
    if which == 'all':
        return list(rows)
    wanted = {method.upper() for method in methods} | {'KP2D'}
    return [row for row in rows if row.method in wanted]
