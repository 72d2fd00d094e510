"""The report of a study: one HTML file with tables, plots and drawn matches.

This file collects the content of the tables; report.html defines their look.
"""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from typing import Any, NamedTuple

from kp2d_core.evaluation.plots import Gallery, plot_study
from kp2d_core.evaluation.protocol import METRICS, MORE_METRICS, PLACE_METRICS, Evaluation
from kp2d_core.evaluation.study import Study
from kp2d_core.evaluation.tables import (
    COLUMNS,
    EXPLANATIONS,
    LOWER_IS_BETTER,
    TITLES,
    entry,
    figure,
)
from kp2d_core.files import atomic_write
from kp2d_core.version import __version__

Means = dict[str, dict[str, float]]  # method -> metric -> its mean


class Cell(NamedTuple):
    value: str
    deviation: str = ''
    best: bool = False


class Row(NamedTuple):
    name: str
    cells: list[Cell]
    note: str = ''  # in a row of the paper: the table that it comes from


class Table(NamedTuple):
    title: str
    metrics: list[str]  # the columns, by name
    more: list[str]  # further columns, by title
    rows: list[Row]


def write_report(folder: str | Path, study: Study, gallery: Gallery) -> Path:
    """Write index.html to the folder and return its path."""
    path = Path(folder).expanduser() / 'index.html'
    page = render(study, gallery)
    with atomic_write(path) as temporary:
        temporary.write_text(page, encoding='utf-8')
    return path


def template(folder: Path, name: str) -> Any:
    """Open a Jinja2 template of a folder; it may include the templates next to this file."""
    import jinja2

    loader = jinja2.FileSystemLoader([folder, Path(__file__).parent])
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters['base64'] = lambda data: b64encode(data).decode('ascii')
    return environment.get_template(name)


def render(study: Study, gallery: Gallery) -> str:
    tables = [_split_table(study, *split) for split in study.by_split().items()]
    if study.evaluations:
        tables.append(_besides_table(study.evaluations))
    return template(Path(__file__).parent, 'report.html').render(
        study=study,
        facts=_facts(study),
        tables=tables,
        titles=TITLES,
        explanations=EXPLANATIONS,
        plots=plot_study(study),
        drawings=sorted(gallery.drawings.items()),
        version=__version__,
    )


def _facts(study: Study) -> list[str]:
    width, height = study.size
    resized = study.evaluations or study.shift or study.robustness  # frames of a camera are not
    facts = [f'{width}x{height}'] if resized else []
    facts += [f'best {study.top_k} points', study.protocol()]
    if study.evaluations:
        pairs = sum(len(sequence.homographies) for sequence in study.sequences)
        facts = [f'{study.data}: {len(study.sequences)} sequences, {pairs} pairs', *facts]
        facts.append(f'{study.seeds} RANSAC runs' if study.seeds > 1 else '1 RANSAC run')
    return facts


def _split_table(study: Study, split: str, evaluations: dict[str, Evaluation]) -> Table:
    means = {method: evaluation.mean() for method, evaluation in evaluations.items()}
    rows = []
    for method, evaluation in evaluations.items():
        deviation = evaluation.deviation() if study.seeds > 1 else {}
        cells = [_cell(means, method, name, deviation.get(name)) for name in COLUMNS]
        cells += [Cell(str(len(evaluation.pairs))), Cell(str(evaluation.failures()))]
        rows.append(Row(method, cells))
    for row in study.paper_rows(split):
        cells = [_figure(figure(row.metrics[name], row.deviation.get(name))) for name in METRICS]
        cells += [Cell('')] * len(PLACE_METRICS) + [Cell(str(row.pairs)), Cell('')]
        rows.append(Row(f'{row.method}, paper, its protocol', cells, row.source))
    return Table(split, [*COLUMNS], ['pairs', 'failed'], rows)


def _besides_table(evaluations: dict[str, Evaluation]) -> Table:
    means = {method: evaluation.mean() for method, evaluation in evaluations.items()}
    rows = []
    for method, evaluation in evaluations.items():
        cells = [_cell(means, method, name) for name in MORE_METRICS]
        rows.append(Row(method, [*cells, Cell(f'{evaluation.time():.1f}')]))
    return Table('further metrics, over all pairs', [*MORE_METRICS], ['ms per image'], rows)


def _cell(means: Means, method: str, name: str, deviation: float | None = None) -> Cell:
    values = [mean[name] for mean in means.values()]
    value = means[method][name]
    best = min(values) if name in LOWER_IS_BETTER else max(values)
    marked = len(values) > 1 and value == best
    return _figure(entry(name, value, deviation))._replace(best=marked)


def _figure(text: str) -> Cell:
    value, _, deviation = text.partition('±')
    return Cell(value, deviation)
