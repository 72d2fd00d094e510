"""CSV files that grow by rows while a run goes on, and survive its being resumed."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from kp2d_core.errors import FileError
from kp2d_core.files import atomic_write

Rows = list[dict[str, str]]


class Table:
    """A CSV file with a column `step`; rows after the step that a run resumes from are dropped.

    A run that begins anew begins its file anew.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        self.path = path
        self.columns: list[str] = []
        if resume_step == 0:
            path.unlink(missing_ok=True)
        rows = read_table(path)
        if path.is_file():
            with path.open(newline='', errors='replace') as file:
                self.columns = next(csv.reader(file), [])
            with atomic_write(path) as temporary, temporary.open('w', newline='') as file:
                writer = csv.DictWriter(file, self.columns)
                if self.columns:
                    writer.writeheader()
                writer.writerows(row for row in rows if int(row['step']) <= resume_step)

    def add(self, row: dict[str, Any]) -> None:
        try:
            with self.path.open('a', newline='') as file:
                if not self.columns:
                    self.columns = list(row)
                    csv.writer(file).writerow(self.columns)
                csv.DictWriter(file, self.columns, extrasaction='ignore').writerow(
                    {k: f'{v:.6g}' if isinstance(v, float) else v for k, v in row.items()}
                )
        except OSError as error:
            raise FileError(f'cannot write {self.path}: {error.strerror or error}') from error


def read_table(path: Path) -> Rows:
    """All whole rows; none if there is no such file."""
    if not path.is_file():
        return []
    with path.open(newline='', errors='replace') as file:
        rows = [row for row in csv.DictReader(file) if None not in row.values()]
    return [row for row in rows if row.get('step', '').isdecimal()]
