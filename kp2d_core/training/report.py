"""What is seen of a run: the progress bar, CSV tables, TensorBoard, and the curves at its end."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor
from tqdm import tqdm

from kp2d_core.errors import FileError
from kp2d_core.files import atomic_write
from kp2d_core.images import Image
from kp2d_core.training.config import TrainingConfig
from kp2d_core.training.state import Progress
from kp2d_core.training.table import Rows, Table, read_table

METRICS, VALIDATION, CURVES = 'metrics.csv', 'validation.csv', 'curves.png'


class Report:
    """Of one process; all others have none."""

    def __init__(
        self, folder: Path, config: TrainingConfig, progress: Progress, quiet: bool = False
    ) -> None:
        self.folder, self.config = folder, config
        self.metrics = Table(folder / METRICS, progress.step)
        self.validation = Table(folder / VALIDATION, progress.step)
        self.tensorboard = _open_tensorboard(folder / 'tensorboard', progress.step)
        self.bar = tqdm(
            initial=progress.step, unit='step', disable=quiet, dynamic_ncols=True, smoothing=0.05
        )
        self._start_anew()

    def step(
        self,
        progress: Progress,
        parts: dict[str, Tensor],
        *,
        rate: float,
        spent: float,
        waited: float,
    ) -> None:
        """Note a step; every `log_every` steps, say the means since."""
        for name, value in parts.items():
            self._sums[name] += float(value)
        self._steps += 1
        self.bar.total = max(progress.step, round(progress.step / max(spent, 1e-9)))
        self.bar.update()
        if progress.step % self.config.report.log_every:
            return
        seconds = perf_counter() - self._since
        means = {name: total / self._steps for name, total in self._sums.items()}
        images = 2 * self.config.optimizer.batch * self._steps / seconds
        row: dict[str, Any] = {'step': progress.step, 'minutes': progress.seconds / 60}
        row |= {'rate': rate} | means
        row |= {'images_per_second': images, 'waiting': (waited - self._waited) / seconds}
        self.metrics.add(row)
        shown = {name: f'{value:.3f}' for name, value in means.items()}
        self.bar.set_postfix(shown | {'images/s': f'{images:.0f}'})
        self._scalars('train', row, progress.step)
        self._start_anew(waited)

    def validated(self, progress: Progress, pictures: dict[str, Image]) -> None:
        figures = progress.evaluation
        self.validation.add({'step': progress.step, 'minutes': progress.seconds / 60} | figures)
        self._scalars('validation', figures, progress.step)
        if self.tensorboard:
            with self._no_room():
                for name, picture in pictures.items():
                    self.tensorboard.add_image(name, picture, progress.step, dataformats='HWC')
                self.tensorboard.flush()
        text = ', '.join(f'{name} {value:.3f}' for name, value in figures.items())
        self.bar.write(f'step {progress.step}: {text}', file=sys.stderr)

    def close(self) -> None:
        self.bar.close()
        if self.tensorboard:
            self.tensorboard.close()

    def _scalars(self, group: str, values: dict[str, Any], step: int) -> None:
        if self.tensorboard:
            with self._no_room():
                for name, value in values.items():
                    self.tensorboard.add_scalar(f'{group}/{name}', value, step)

    @contextmanager
    def _no_room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = self.folder / 'tensorboard'
            raise FileError(f'cannot write {where}: {error.strerror or error}') from error

    def leave_out(self, seconds: float) -> None:
        """Of the time that the steps took."""
        self._since += seconds

    def _start_anew(self, waited: float = 0.0) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._steps, self._since, self._waited = 0, perf_counter(), waited


def _open_tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # the tables say the same
        return None
    return SummaryWriter(folder, purge_step=step or None)


def draw_curves(folder: Path) -> Path | None:
    """The tables as a figure beside them; None if there is nothing to draw."""
    metrics, validation = read_table(folder / METRICS), read_table(folder / VALIDATION)
    if not metrics:
        return None
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot

    losses = [n for n in ('location', 'score', 'descriptor', 'io') if _has(metrics, n)]
    rates = [n for n in ('repeatability', 'mscore', 'cor1', 'cor3', 'cor5') if _has(validation, n)]
    offs = [n for n in ('localization', 'shift4') if _has(validation, n)]
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    panels: tuple[tuple[str, Rows, list[str]], ...] = (
        ('losses', metrics, losses),
        ('training', metrics, ['recall']),
        ('validation', validation, rates),
        ('validation, pixels', validation, offs),
    )
    for axis, (title, rows, names) in zip(axes.flat, panels, strict=True):
        for name in names:
            known = [row for row in rows if row.get(name)]  # a resumed run may do without
            steps, values = [int(row['step']) for row in known], [float(r[name]) for r in known]
            axis.plot(steps, values, label=name)
        axis.set(title=title, xlabel='step')
        axis.grid(alpha=0.3)
        if names:
            axis.legend()
    path = folder / CURVES
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=100)
    pyplot.close(figure)
    return path


def _has(rows: Rows, name: str) -> bool:
    return any(row.get(name) for row in rows)
