"""The paper's tables, to stand beside new results."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import yaml

from kp2d_core.images import Size

TABLES = Path(__file__).with_name('paper.yaml')


@dataclass(frozen=True)
class PaperRow:
    method: str
    source: str  # which table
    pairs: int
    metrics: dict[str, float]
    deviation: dict[str, float]  # over RANSAC runs, where the paper gives it


@lru_cache
def paper_rows(size: Size, top_k: int, split: str) -> tuple[PaperRow, ...]:
    """All rows for this size, number of points and split; none if the paper has no such table."""
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
    """The rows to print: of the 'same' methods (and KP2D, for any model), 'all', or 'none'."""
    if which == 'none':
        return []
    rows = paper_rows(size, top_k, split)
    if which == 'all':
        return list(rows)
    wanted = {method.upper() for method in methods} | {'KP2D'}
    return [row for row in rows if row.method in wanted]
