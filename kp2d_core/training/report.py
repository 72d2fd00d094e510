"""What is seen of a run: the progress bar, metrics.csv, validation.csv."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from kp2d_core.files import atomic_write


class Table:
    """A CSV file that grows by rows; rows after the step that a run resumes from are dropped."""

    def __init__(self, path: Path, resume_step: int) -> None:
        self.path = path
        self.columns: list[str] = []
        if path.is_file():
            self._keep_until(resume_step)

    def add(self, row: dict[str, Any]) -> None:
        if not self.columns:
            self.columns = list(row)
            with open(self.path, 'w', newline='') as file:
                csv.writer(file).writerow(self.columns)
        with open(self.path, 'a', newline='') as file:
            csv.DictWriter(file, self.columns, extrasaction='ignore').writerow(
                {k: f'{v:.6g}' if isinstance(v, float) else v for k, v in row.items()}
            )

    def _keep_until(self, step: int) -> None:
        rows = read_table(self.path)
        if not rows:
            return
        self.columns = list(rows[0])
        with atomic_write(self.path) as temporary, open(temporary, 'w', newline='') as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(row for row in rows if int(row['step']) <= step)


def read_table(path: Path) -> list[dict[str, str]]:
    with open(path, newline='') as file:
        return list(csv.DictReader(file))
