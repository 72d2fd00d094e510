"""A study as one HTML file that needs nothing else: tables, plots, matches drawn."""

from __future__ import annotations

from base64 import b64encode
from html import escape
from pathlib import Path

from kp2d_core.evaluation.plots import Drawing, Gallery, plot_study
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

_STYLE = """
:root { --ink: #0f172a; --soft: #64748b; --line: #e2e8f0; --accent: #2563eb; }
* { box-sizing: border-box; }
body { margin: 0; background: #f8fafc; color: var(--ink); line-height: 1.5;
       font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 40px 24px 80px; }
h1 { font-size: 28px; margin: 0 0 4px; letter-spacing: -0.02em; }
h2 { font-size: 19px; margin: 44px 0 12px; letter-spacing: -0.01em; }
h3 { font-size: 15px; margin: 24px 0 8px; }
p { margin: 4px 0; } .soft { color: var(--soft); }
.card { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 16px 20px;
        margin: 12px 0; overflow-x: auto; box-shadow: 0 1px 2px rgb(15 23 42 / 4%); }
.card > img { display: block; width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: 6px; }
th, td { padding: 6px 10px; text-align: right; white-space: nowrap; }
th { font-weight: 500; color: var(--soft); border-bottom: 1px solid var(--line); }
th[title] { cursor: help; }
th:first-child, td:first-child { text-align: left; }
tr + tr td { border-top: 1px solid #f1f5f9; }
tr.paper td { color: var(--soft); font-size: 14px; }
td.best { font-weight: 700; } td small { color: var(--soft); font-weight: 400; }
.pair { display: grid; gap: 14px;
        grid-template-columns: repeat(auto-fit, minmax(min(760px, 100%), 1fr)); }
figure { margin: 0; } figure img { width: 100%; height: auto; border-radius: 6px; display: block; }
figcaption { font-size: 13px; color: var(--soft); padding: 4px 2px 8px; }
figcaption b { color: var(--ink); }
.green { color: #15803d; } .red { color: #dc2626; }
details summary { cursor: pointer; font-weight: 600; padding: 2px 0; }
"""


def write_report(folder: str | Path, study: Study, gallery: Gallery) -> Path:
    """Write index.html into the folder and give its path."""
    path = Path(folder).expanduser() / 'index.html'
    page = render(study, gallery)
    with atomic_write(path) as temporary:
        temporary.write_text(page, encoding='utf-8')
    return path


def render(study: Study, gallery: Gallery) -> str:
    sections = [_header(study)]
    for split, evaluations in study.by_split().items():
        sections.append(_split_table(study, split, evaluations))
    if study.evaluations:
        sections += [_besides_table(study.evaluations), _definitions()]
    sections += [
        f'<h2>{escape(title)}</h2><div class="card">{_picture(svg, "svg+xml", title)}</div>'
        for title, svg in plot_study(study).items()
    ]
    if gallery.drawings:
        sections.append(_matches(gallery))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>Evaluation of {escape(", ".join(study.methods))}</title>'
        f'<style>{_STYLE}</style></head><body><main>{"".join(sections)}</main></body></html>\n'
    )


def _header(study: Study) -> str:
    width, height = study.size
    resized = study.evaluations or study.shift or study.robustness  # a camera's frames are not
    facts = [f'{width}x{height}'] if resized else []
    facts += [f'best {study.top_k} points', study.protocol()]
    if study.evaluations:
        pairs = sum(len(sequence.homographies) for sequence in study.sequences)
        facts = [f'{study.data}: {len(study.sequences)} sequences, {pairs} pairs', *facts]
        facts.append(f'{study.seeds} RANSAC runs' if study.seeds > 1 else '1 RANSAC run')
    methods = ''.join(
        f'<p class="soft"><b>{escape(name)}</b>: {escape(description)}</p>'
        for name, description in study.methods.items()
    )
    skipped = ''.join(f'<p class="red">{escape(sentence)}</p>' for sentence in study.skipped)
    return (
        f'<h1>{escape(", ".join(study.methods))}</h1>'
        f'<p class="soft">{escape(" · ".join(facts))} · kp2d {__version__}</p>{methods}{skipped}'
    )


def _split_table(study: Study, split: str, evaluations: dict[str, Evaluation]) -> str:
    means = {method: evaluation.mean() for method, evaluation in evaluations.items()}
    rows = [_head([*COLUMNS], ['pairs', 'failed'])]
    for method, evaluation in evaluations.items():
        deviation = evaluation.deviation() if study.seeds > 1 else {}
        cells = [_cell(means, method, name, deviation.get(name)) for name in COLUMNS]
        cells += [f'<td>{len(evaluation.pairs)}</td><td>{evaluation.failures()}</td>']
        rows.append(f'<tr><td>{escape(method)}</td>{"".join(cells)}</tr>')
    for row in study.paper_rows(split):
        figures = [figure(row.metrics[name], row.deviation.get(name)) for name in METRICS]
        cells = [f'<td>{_with_small_deviation(text)}</td>' for text in figures]
        cells += ['<td></td>'] * len(PLACE_METRICS)
        name = f'<td title="{escape(row.source)}">{escape(row.method)}, paper, its protocol</td>'
        rows.append(f'<tr class="paper">{name}{"".join(cells)}<td>{row.pairs}</td><td></td></tr>')
    return _table(split, rows)


def _besides_table(evaluations: dict[str, Evaluation]) -> str:
    means = {method: evaluation.mean() for method, evaluation in evaluations.items()}
    rows = [_head([*MORE_METRICS], ['ms per image'])]
    for method, evaluation in evaluations.items():
        cells = [_cell(means, method, name) for name in MORE_METRICS]
        time = f'{evaluation.time():.1f}' if evaluation.milliseconds else ''
        cells.append(f'<td>{time}</td>')
        rows.append(f'<tr><td>{escape(method)}</td>{"".join(cells)}</tr>')
    return _table('besides, over all pairs', rows)


def _definitions() -> str:
    items = ''.join(
        f'<p><b>{escape(TITLES[name])}</b> <span class="soft">{escape(text)}</span></p>'
        for name, text in EXPLANATIONS.items()
    )
    return f'<details class="card"><summary>What the columns mean</summary>{items}</details>'


def _table(title: str, rows: list[str]) -> str:
    body = ''.join(rows)
    return f'<div class="card"><table><caption>{escape(title)}</caption>{body}</table></div>'


def _head(metrics: list[str], more: list[str]) -> str:
    cells = [f'<th title="{escape(EXPLANATIONS[m])}">{escape(TITLES[m])}</th>' for m in metrics]
    cells += [f'<th>{escape(title)}</th>' for title in more]
    return f'<tr><th></th>{"".join(cells)}</tr>'


def _cell(
    means: dict[str, dict[str, float]], method: str, name: str, deviation: float | None = None
) -> str:
    values = [mean[name] for mean in means.values()]
    value = means[method][name]
    best = min(values) if name in LOWER_IS_BETTER else max(values)
    mark = ' class="best"' if len(values) > 1 and value == best else ''
    return f'<td{mark}>{_with_small_deviation(entry(name, value, deviation))}</td>'


def _with_small_deviation(text: str) -> str:
    value, plus_minus, deviation = text.partition('±')
    return f'{value}<small> ±{deviation}</small>' if plus_minus else value


def _matches(gallery: Gallery) -> str:
    parts = [
        '<h2>Matches</h2><p class="soft">Mutual matches, from which homographies are estimated: '
        '<span class="green">within 3 px of the truth</span>, <span class="red">wrong</span>.</p>'
    ]
    for (sequence, target), drawings in sorted(gallery.drawings.items()):
        figures = ''.join(_drawing(drawing) for drawing in drawings)
        parts.append(
            f'<h3>{escape(sequence)}, image 1 and {target}</h3>'
            f'<div class="card"><div class="pair">{figures}</div></div>'
        )
    return ''.join(parts)


def _drawing(drawing: Drawing) -> str:
    result = drawing.result
    caption = (
        f'<b>{escape(drawing.method)}</b> · <span class="green">{drawing.correct} correct</span> '
        f'of {result.matches} · matching score {result.mscore:.3f}'
    )
    picture = _picture(drawing.webp, 'webp', f'matches of {drawing.method}')
    return f'<figure>{picture}<figcaption>{caption}</figcaption></figure>'


def _picture(data: bytes, kind: str, text: str) -> str:
    encoded = b64encode(data).decode('ascii')
    return f'<img alt="{escape(text)}" src="data:image/{kind};base64,{encoded}">'
