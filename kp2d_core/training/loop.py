"""The training loop, to be read from top to bottom."""

from __future__ import annotations

import signal
import sys
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from types import FrameType

import cv2
import torch
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from kp2d_core.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from kp2d_core.errors import FileError
from kp2d_core.training.config import TrainingConfig
from kp2d_core.training.distributed import Processes, join_processes
from kp2d_core.training.model import MovingAverage, TrainingModel, to_checkpoint
from kp2d_core.training.pairs import BatchStream, PairSource
from kp2d_core.training.photographs import Entry, Photographs, split
from kp2d_core.training.report import Table
from kp2d_core.training.schedule import learning_rate, make_budget
from kp2d_core.training.state import Progress, read_state, restore_state, save_state
from kp2d_core.training.validation import make_validation

STATE, BEST, LAST = 'state.safetensors', 'best.safetensors', 'last.safetensors'


@dataclass
class Run:
    """What to train, on what, for how long, and where to keep it."""

    config: TrainingConfig
    entries: list[Entry]  # files and frames to train on
    out: Path  # folder of checkpoints and reports
    validation: Path | None = None  # folder to validate on; None: photographs held out
    steps: int | None = None
    minutes: float | None = None
    resume: bool = False  # go on from the state in `out`
    initial: str | None = None  # model whose weights to begin with
    quiet: bool = False


@dataclass
class Interruption:
    """SIGTERM or Ctrl-C: finish the step, save, leave. A second Ctrl-C leaves at once."""

    signal: int = 0
    previous: dict[int, object] = field(default_factory=dict)

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self.previous[number] = signal.signal(number, self._note)

    def restore(self) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number


def train(run: Run) -> int:
    """Train, and return 0, or 128 + the signal that ended it early."""
    with join_processes(run.config.compute.device) as processes:
        interruption = Interruption()
        interruption.listen()
        try:
            return _train(run, processes, interruption)
        finally:
            interruption.restore()


def _train(run: Run, processes: Processes, interruption: Interruption) -> int:
    config, device, main = run.config, processes.device, processes.rank == 0
    state_path = run.out / STATE
    make_folder(run.out)
    if config.compute.threads:
        torch.set_num_threads(config.compute.threads)
    cv2.setNumThreads(1)  # several small warps at a time, beside the network: threads only hurt

    # Data.
    to_train, held_out = split(run.entries, config.report.validation_photographs, config.seed)
    photographs = Photographs(
        to_train if run.validation is None else run.entries,
        short_side=1.5 * max(*config.pairs.short_side, config.pairs.height),
        cache_gb=config.compute.cache_gb,
    )
    validate = make_validation(run.validation, held_out, config) if main else None
    budget = make_budget(config.optimizer, len(photographs), run.steps, run.minutes)

    # Model.
    torch.manual_seed(config.seed + processes.rank)
    model = TrainingModel(config).to(device, memory_format=torch.channels_last)
    if run.initial is not None:
        initial = load_checkpoint(find_checkpoint(run.initial))
        if initial.architecture.channels != config.network.architecture().channels:
            raise FileError(f'{run.initial} is another network than the configuration describes')
        weights = {k: torch.from_numpy(v) for k, v in initial.weights.items()}
        model.network.load_state_dict(weights)
    average = MovingAverage(model.network, config.optimizer.ema) if config.optimizer.ema else None
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=config.optimizer.learning_rate)
    progress = Progress()
    if run.resume:
        _, progress, tensors = read_state(state_path)
        restore_state(tensors, model, optimizer, average)
    scaler = torch.GradScaler(device.type, enabled=config.compute.precision == 'float16')
    step_model: torch.nn.Module = model
    if config.compute.compile:
        model.network.compile()
    if processes.count > 1:
        step_model = DistributedDataParallel(model)

    # Loop.
    stream = BatchStream(
        PairSource(photographs, config),
        progress.step,
        rank=processes.rank,
        processes=processes.count,
    )
    training_table = Table(run.out / 'metrics.csv', progress.step) if main else None
    validation_table = Table(run.out / 'validation.csv', progress.step) if main else None
    sums: dict[str, float] = defaultdict(float)
    counted, saved_at, begin = 0, perf_counter(), perf_counter() - progress.seconds
    bar = tqdm(
        total=None if budget.steps == float('inf') else budget.steps,
        initial=progress.step,
        unit='step',
        disable=run.quiet or not main,
        dynamic_ncols=True,
    )
    model.train()
    while True:
        progress.seconds = perf_counter() - begin
        seconds, stop = processes.agree(progress.seconds, bool(interruption.signal))
        spent = budget.spent(progress.step, seconds)
        if stop or spent >= 1:
            break

        batch = next(stream).to(device)
        rate = learning_rate(config.optimizer, progress.step, spent)
        for group in optimizer.param_groups:
            group['lr'] = rate
        loss, parts = step_model(batch.images, batch.source_to_target, progress.step)
        if not torch.isfinite(loss):
            raise FloatingPointError(f'the loss is {loss.item()} at step {progress.step}')
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        if config.optimizer.gradient_clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, config.optimizer.gradient_clip)
        scaler.step(optimizer)
        scaler.update()
        if average is not None:
            average.update(model.network, progress.step)
        progress.step += 1
        progress.seconds = perf_counter() - begin

        if main:
            for name, value in parts.items():
                sums[name] += value.item()
            counted += 1
            bar.update()
            if progress.step % config.report.log_every == 0 and training_table:
                means = {name: value / counted for name, value in sums.items()}
                bar.set_postfix({name: f'{value:.3f}' for name, value in means.items()})
                training_table.add(
                    {'step': progress.step, 'minutes': progress.seconds / 60, 'rate': rate}
                    | means
                    | {'waiting': stream.waited / (perf_counter() - begin)}
                )
                sums.clear()
                counted = 0
            if validate and progress.step % config.report.validate_every == 0:
                _validate(run, config, progress, model, average, validate, validation_table, device)
                model.train()
            if perf_counter() - saved_at > 60 * config.report.checkpoint_minutes:
                save_state(state_path, config, progress, model, optimizer, average)
                saved_at = perf_counter()

    # End.
    stream.close()
    bar.close()
    if main:
        save_state(state_path, config, progress, model, optimizer, average)
    if interruption.signal:
        if main:
            print(f'stopped at step {progress.step}; --resume goes on', file=sys.stderr)
        return 128 + interruption.signal
    if main:
        if validate:
            _validate(run, config, progress, model, average, validate, validation_table, device)
        weights = average.weights if average else model.network.state_dict()
        save_checkpoint(
            run.out / LAST, to_checkpoint(weights, config, progress.step, progress.evaluation)
        )
    return 0


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f'cannot make the folder {path}: {error.strerror or error}') from error


def _validate(run, config, progress, model, average, validate, table, device):
    weights = average.weights if average else model.network.state_dict()
    checkpoint = to_checkpoint(weights, config, progress.step, {})
    progress.evaluation = validate(checkpoint, str(device))
    table.add({'step': progress.step, 'minutes': progress.seconds / 60} | progress.evaluation)
    tqdm.write(
        f'step {progress.step}: '
        + ', '.join(f'{name} {value:.3f}' for name, value in progress.evaluation.items()),
        file=sys.stderr,
    )
    if progress.evaluation['quality'] > progress.best:
        progress.best = progress.evaluation['quality']
        progress.best_step = progress.step
        checkpoint = replace(checkpoint, evaluation=progress.evaluation)
        save_checkpoint(run.out / BEST, checkpoint)
