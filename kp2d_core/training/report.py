"""The reports of a run: progress bar, CSV tables, TensorBoard, curves, pictures."""

from __future__ import annotations

import csv
import math
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from kp2d_core.detector import KeypointDetector
from kp2d_core.errors import FileError
from kp2d_core.features import prepare
from kp2d_core.files import atomic_write
from kp2d_core.geometry import warp_points
from kp2d_core.images import Image
from kp2d_core.matching import match
from kp2d_core.networks import KeyPointNet
from kp2d_core.networks.geometry import normalise
from kp2d_core.training.config import TrainingConfig
from kp2d_core.training.state import Progress
from kp2d_core.visualize import draw_keypoints, draw_matches, side_by_side

METRICS, VALIDATION, CURVES = 'metrics.csv', 'validation.csv', 'curves.png'
Rows = list[dict[str, str]]
LOSSES = (
    'location',
    'score',
    'descriptor',
    'io',
    'agreement',
    'sigma',
    'teaching',
)  # those that are drawn
DRAW_EVERY = 60.0  # seconds at least: a drawing takes a second
SHOWN = 150  # keypoints in each image
CORRECT = 3.0  # px


class Report:
    """The reports of a run, written by the first process only."""

    def __init__(
        self, folder: Path, config: TrainingConfig, progress: Progress, quiet: bool = False
    ) -> None:
        self.folder, self.config = folder, config
        self.metrics = Table(folder / METRICS, progress.step)
        self.validation = Table(folder / VALIDATION, progress.step)
        with self._no_room():
            self.tensorboard = _open_tensorboard(folder / 'tensorboard', progress.step)
        self.bar = tqdm(
            total=100,
            bar_format='{percentage:3.0f}%|{bar}| {desc}',
            disable=quiet,
            dynamic_ncols=True,
        )
        self._row: dict[str, Any] = {}  # of the last step
        self._losses = ''  # as last shown
        self._drawn = -math.inf
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
        """Record a step; every `log_every` steps, report the means since the last report."""
        for name, value in parts.items():
            self._sums[name] = self._sums[name] + value.double()  # read only when it is shown
        self._steps += 1
        self._row = {'step': progress.step, 'minutes': progress.seconds / 60, 'rate': rate}
        if progress.step % self.config.report.log_every == 0:
            self._log(waited)
        self._show(progress, spent)

    def _log(self, waited: float) -> None:
        """Write a row of means since the last row."""
        seconds = perf_counter() - self._since
        means = {name: float(total) / self._steps for name, total in self._sums.items()}
        images = 2 * self.config.optimizer.batch * self._steps / seconds
        row = self._row | means
        row |= {'images_per_second': images, 'waiting': (waited - self._waited) / seconds}
        self.metrics.add(row)
        self._losses = ', '.join(f'{name} {value:.3f}' for name, value in means.items())
        self._losses += f', {images:.0f} images/s'
        self._scalars('train', row, row['step'])
        self._start_anew(waited)

    def _show(self, progress: Progress, spent: float) -> None:
        """Format the used share of the budget and the remaining time at this rate."""
        left = progress.seconds / max(spent, 1e-9) - progress.seconds
        self.bar.n = min(100 * spent, 100)
        text = f'step {progress.step}, {tqdm.format_interval(max(left, 0))} left'
        self.bar.set_description_str(f'{text}, {self._losses}' if self._losses else text, False)
        self.bar.update(0)

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
        """Write and draw the rest, and close the files."""
        if self._steps:
            self._log(self._waited)
        draw_curves(self.folder)
        self.bar.close()
        if self.tensorboard:
            with self._no_room():
                self.tensorboard.close()

    def draw(self) -> None:
        """Draw the curves so far, but not at every step."""
        if perf_counter() - self._drawn > DRAW_EVERY:
            draw_curves(self.folder)
            self._drawn = perf_counter()

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
        """Do not count these seconds as time of the steps."""
        self._since += seconds

    def _start_anew(self, waited: float = 0.0) -> None:
        self._sums: dict[str, Any] = defaultdict(float)  # tensors, where the losses are
        self._steps, self._since, self._waited = 0, perf_counter(), waited


def _open_tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # the tables say the same
        return None
    threading.excepthook = _quiet_writer
    return SummaryWriter(folder, purge_step=step or None)


def _quiet_writer(failure: threading.ExceptHookArgs) -> None:
    """Hide an error in the writer thread of TensorBoard: its next call raises it again."""
    if not type(failure.thread).__module__.startswith('tensorboard'):
        threading.__excepthook__(failure)


def draw_curves(folder: Path) -> Path | None:
    """Draw the tables as curves next to them; None if they are empty or matplotlib is missing."""
    metrics, validation = read_table(folder / METRICS), read_table(folder / VALIDATION)
    if not metrics:
        return None
    try:
        from matplotlib.figure import Figure
    except ImportError:  # the tables say the same
        return None
    losses = [n for n in LOSSES if _has(metrics, n)]
    rates = [n for n in ('repeatability', 'mscore', 'cor1', 'cor3', 'cor5') if _has(validation, n)]
    offs = [n for n in ('localization', 'shift4') if _has(validation, n)]
    figure = Figure(figsize=(13, 7), layout='constrained')
    panels: tuple[tuple[str, Rows, list[str]], ...] = (
        ('losses', metrics, losses),
        ('training', metrics, ['recall']),
        ('validation', validation, rates),
        ('validation, pixels', validation, offs),
    )
    for axis, (title, rows, names) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        for name in names:
            known = [row for row in rows if row.get(name)]  # a resumed run may lack it
            steps, values = [int(row['step']) for row in known], [float(r[name]) for r in known]
            axis.plot(steps, values, label=name, marker='.' if len(steps) < 20 else '')
        axis.set(title=title, xlabel='step')
        axis.grid(alpha=0.3)
        if names:  # next to the curves, where it hides nothing
            axis.legend(loc='center left', bbox_to_anchor=(1.0, 0.5), frameon=False)
    path = folder / CURVES
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=100)
    return path


def _has(rows: Rows, name: str) -> bool:
    return any(row.get(name) for row in rows)


class Table:
    """A CSV file with a column `step`. A new run starts a new file.

    A resumed run drops the rows after the step that it resumes from.
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
    """Read all complete rows; none if there is no such file."""
    if not path.is_file():
        return []
    with path.open(newline='', errors='replace') as file:
        rows = [row for row in csv.DictReader(file) if None not in row.values()]
    return [row for row in rows if row.get('step', '').isdecimal()]


def draw_pair(
    detector: KeypointDetector,
    network: KeyPointNet,
    first: Image,
    second: Image,
    first_to_second: NDArray[np.float64],
) -> dict[str, Image]:
    """Draw keypoints and score maps of both images, and the matches, green if correct."""
    left, right = (
        detector.detect(image, scales=(1,), max_keypoints=SHOWN) for image in (first, second)
    )
    matches = match(left, right)
    expected = warp_points(left.keypoints[matches.indices[:, 0]], first_to_second)
    astray = np.linalg.norm(expected - right.keypoints[matches.indices[:, 1]], axis=1)
    matches = replace(matches, inliers=astray < CORRECT)
    return {
        'keypoints': side_by_side(draw_keypoints(first, left), draw_keypoints(second, right)),
        'scores': side_by_side(draw_scores(network, first), draw_scores(network, second)),
        'matches': draw_matches(first, second, left, right, matches, judge=True),
    }


@torch.inference_mode()
def draw_scores(network: KeyPointNet, image: Image) -> Image:
    """Draw the score map at the size of the image, from blue (low) to red (high)."""
    device = next(network.parameters()).device
    prepared = torch.from_numpy(prepare(image)[0])[None].to(device)
    scores = network(normalise(prepared)).scores[0, 0].cpu().numpy()
    scaled = (255 * scores / max(float(scores.max()), 1e-6)).astype(np.uint8)
    large = cv2.resize(scaled, image.shape[1::-1], interpolation=cv2.INTER_NEAREST)
    coloured = cv2.applyColorMap(large, cv2.COLORMAP_JET)
    return np.asarray(cv2.cvtColor(coloured, cv2.COLOR_BGR2RGB), np.uint8)
