"""The training loop, to be read from top to bottom."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any

import cv2
import torch
from torch import nn

from kp2d_core.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from kp2d_core.errors import FileError
from kp2d_core.files import remove_leftovers, sole_use
from kp2d_core.threads import keep_freed_memory
from kp2d_core.training.config import PairsConfig, TrainingConfig
from kp2d_core.training.distributed import Processes, join_processes
from kp2d_core.training.model import (
    MovingAverage,
    TrainingModel,
    computing_type,
    grow,
    grows_into,
    to_checkpoint,
)
from kp2d_core.training.optimizer import learning_rate, make_budget, make_optimizers
from kp2d_core.training.pairs import BatchStream, PairSource
from kp2d_core.training.photographs import Entry, Photographs, digest, split
from kp2d_core.training.report import Report
from kp2d_core.training.score_calibration import calibrate_scores
from kp2d_core.training.state import Progress, read_state, restore_state, save_state
from kp2d_core.training.validation import Validation, make_validation

STATE = 'state.safetensors'  # everything needed to resume
BEST, LAST = 'best.safetensors', 'last.safetensors'  # models for KeypointDetector.load


@dataclass(frozen=True)
class Run:
    """A training run: recipe, data, budget and output folder."""

    config: TrainingConfig
    entries: list[Entry]  # files and frames of the training data
    out: Path  # folder of checkpoints and reports
    validation: Path | None = None  # folder of the validation data; None: hold out photographs
    steps: int | None = None
    minutes: float | None = None
    resume: bool = False  # continue from the state in `out`
    initial: str | None = None  # model with the initial weights
    data: dict[str, Any] = field(default_factory=dict)  # the arguments that `entries` come from
    quiet: bool = False


def train(run: Run) -> int:
    """Train to the end of the budget and return 0, or 128 + the signal that stopped it."""
    with join_processes(run.config.compute.device) as processes, Interruption() as interruption:
        try:
            with its_folder(run, processes):
                return _train(run, processes, interruption)
        except RuntimeError as error:
            if processes.lost(error):
                raise ValueError(
                    'another process of the run has died; --resume continues from the last state'
                ) from error
            raise


def _train(run: Run, processes: Processes, interruption: Interruption) -> int:
    config, device, leads = run.config, processes.device, processes.rank == 0
    if config.compute.threads:
        torch.set_num_threads(config.compute.threads)
    keep_freed_memory()
    cv2.setNumThreads(1)  # more threads for small warps would slow the network down

    # Data
    entries, held_out = run.entries, list[Entry]()
    if run.validation is None:
        entries, held_out = split(entries, config.report.validation_photographs, config.seed)
    photographs = Photographs(
        entries,
        short_side=largest_useful_side(config.pairs),
        cache_gb=config.compute.cache_gb,
    )
    validation = make_validation(run.validation, held_out) if leads else None
    progress, tensors = Progress(), dict[str, torch.Tensor]()
    if run.resume:
        _, progress, tensors = read_state(run.out / STATE)
        first_step, _ = processes.agree(progress.step, False)
        if first_step != progress.step:
            raise ValueError(
                f'{run.out / STATE} is of step {progress.step} here and of step {first_step:.0f} '
                'on the first machine: copy it from there'
            )
    note_run(progress, run, digest(entries), say=leads)
    budget = make_budget(config.optimizer, len(photographs), progress.steps, progress.minutes)

    # Model
    torch.manual_seed(config.seed + processes.rank)
    model = TrainingModel(config).to(device)
    if processes.count > 1 and device.type == 'cuda':  # gloo has none: each normalises its part
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if run.initial is not None:
        load_initial(model, run.initial)
    average = MovingAverage(model.network, config.optimizer.ema) if config.optimizer.ema else None
    kind = computing_type(config.compute.precision, device)
    coarse = processes.all(kind == torch.bfloat16)
    optimizers = make_optimizers(
        model, config.optimizer, torch.bfloat16 if coarse else torch.float32
    )
    scaler = torch.GradScaler(device.type, enabled=kind == torch.float16)
    if run.resume:
        restore_state(tensors, model, optimizers, average)
        if progress.loss_scale:
            scaler.load_state_dict(progress.loss_scale)
        if not leads:  # the saved random state is the first process's
            torch.manual_seed(hash((config.seed, processes.rank, progress.step)))
    if config.compute.compile:
        model.network.compile()
    processes.share(model)
    parallel = processes.parallel(model)

    newest: dict[str, torch.Tensor] = {}  # of the last step

    def check() -> None:
        for name, value in newest.items():
            if not torch.isfinite(value):
                raise ValueError(
                    f'the {name} is {float(value)} at step {progress.step}; '
                    f'{run.out / STATE} is intact'
                )

    def save() -> None:
        check()
        progress.loss_scale = scaler.state_dict()
        save_state(run.out / STATE, config, progress, model, optimizers, average)

    # Loop
    source = PairSource(photographs, config)
    stream = BatchStream(
        source,
        progress.step,
        rank=processes.rank,
        processes=processes.count,
        pinned=device.type == 'cuda',
    )
    report = Report(run.out, config, progress, run.quiet) if leads else None
    first, saved, begin = progress.step, perf_counter(), perf_counter() - progress.seconds
    model.train()
    while True:
        progress.seconds = perf_counter() - begin
        seconds, stop = processes.agree(progress.seconds, bool(interruption.signal))
        spent = budget.spent(progress.step, seconds)
        if stop or spent >= 1:
            break

        # Forward, losses
        batch = next(stream).to(device)
        loss, parts = parallel(batch.images, batch.source_to_target, progress.step, batch.front)

        # Step
        rate = learning_rate(config.optimizer, progress.step, spent)
        model.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        processes.average_gradients(model)
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
            for group in optimizer.param_groups:
                group['lr'] = rate * group.get('factor', 1.0)
        clip = config.optimizer.gradient_clip or math.inf
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        newest['loss'] = loss.detach()
        if not scaler.is_enabled():  # it deals with infinite gradients
            newest['gradient'] = norm
        # Reading a value waits for the GPU. What is not finite once stays so in the weights.
        if device.type == 'cpu' or progress.step % config.report.log_every == 0:
            check()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        if average is not None:
            average.update(model.network, progress.step)
        progress.step += 1
        progress.seconds = perf_counter() - begin

        # Log, validate, checkpoint
        if report is None:
            continue
        spent = budget.spent(progress.step, progress.seconds)
        report.step(progress, parts, rate=rate, spent=spent, waited=stream.waited)
        if validation and progress.step % config.report.validate_every == 0:
            validate(run, progress, model, average, validation, report)
        if perf_counter() - saved > 60 * config.report.checkpoint_minutes:
            save()
            report.draw()
            saved = perf_counter()

    # End
    stream.close()
    if report is None:
        return 128 + interruption.signal if interruption.signal else 0
    save()
    if spent < 1:
        report.close()
        print(f'stopped at step {progress.step}; continue with --resume', file=sys.stderr)
        return 128 + interruption.signal if interruption.signal else 1
    if validation and progress.validated_step != progress.step:
        validate(run, progress, model, average, validation, report)
        save()
    final = to_checkpoint(kept_weights(model, average), config, progress.step, progress.evaluation)
    if validation and validation.pairs:
        final = calibrate_scores(final, validation.pairs, str(device))
    save_checkpoint(run.out / LAST, final)
    if not validation:
        save_checkpoint(run.out / BEST, final)
    report.close()
    finished = 'finished' if progress.step > first else 'nothing to do, the run had finished'
    print(f'{finished} at step {progress.step}: {run.out / LAST}', file=sys.stderr)
    if photographs.unreadable:
        print(f'{len(photographs.unreadable)} images could not be used', file=sys.stderr)
    return 0


def validate(
    run: Run,
    progress: Progress,
    model: TrainingModel,
    average: MovingAverage | None,
    validation: Validation,
    report: Report,
) -> None:
    """Measure the weights, and save them if they are the best so far."""
    began = perf_counter()
    checkpoint = to_checkpoint(kept_weights(model, average), run.config, progress.step, {})
    device = str(next(model.parameters()).device)
    progress.evaluation = validation.measure(checkpoint, device)
    progress.validated_step = progress.step
    report.validated(progress, validation.draw(checkpoint, device, run.config.report.pictures))
    if progress.evaluation['quality'] > progress.best:
        progress.best, progress.best_step = progress.evaluation['quality'], progress.step
        save_checkpoint(run.out / BEST, replace(checkpoint, evaluation=progress.evaluation))
    report.draw()
    report.leave_out(perf_counter() - began)


def largest_useful_side(pairs: PairsConfig) -> float:
    """The shorter side of a photograph, in pixels, above which views do not get sharper."""
    nearest = pairs.height / min(1.0, *pairs.strong.scale)  # if the other view shows everything
    return max(1.5 * max(*pairs.short_side, pairs.height), nearest)


def note_run(progress: Progress, run: Run, photographs: str, say: bool) -> None:
    """Store the settings of the run in the state; report where a resumed run differs."""
    if run.steps is not None or run.minutes is not None:
        progress.steps, progress.minutes = run.steps, run.minutes
    validation = str(run.validation.resolve()) if run.validation is not None else ''
    begun = bool(progress.photographs)
    if begun and photographs != progress.photographs and say:
        print(
            'these are not the photographs of the first part of the run: it continues, but the '
            'result will differ from that of an uninterrupted run',
            file=sys.stderr,
        )
    if begun and validation != progress.validation:
        progress.best, progress.best_step = -math.inf, -1  # not comparable
    progress.photographs, progress.validation = photographs, validation
    progress.data = run.data or progress.data


def kept_weights(model: TrainingModel, average: MovingAverage | None) -> dict[str, torch.Tensor]:
    """Return the moving average if there is one, else the current weights."""
    return average.weights if average is not None else model.network.state_dict()


def load_initial(model: TrainingModel, name: str) -> None:
    """Load the weights of a model of the same shape, or of one that can grow to it."""
    initial = load_checkpoint(find_checkpoint(name))
    wanted = model.network.architecture
    weights = initial.weights
    if grows_into(initial.architecture, wanted):
        weights = grow(initial, wanted, model.config.seed)
    elif initial.architecture.parameter_shapes() != wanted.parameter_shapes():
        raise FileError(
            f"'{name}' is a {initial.architecture.variant} network, "
            f"the recipe's is {wanted.variant}"
        )
    model.network.load_state_dict({key: torch.from_numpy(v) for key, v in weights.items()})


@contextmanager
def its_folder(run: Run, processes: Processes) -> Iterator[None]:
    """Lock the folder of the run; only the first process does so."""
    if processes.rank > 0:
        yield
        return
    make_folder(run.out)
    with sole_use(run.out):
        if not run.resume:
            check_new(run.out)
        remove_leftovers(run.out)
        yield


def check_new(out: Path) -> None:
    if (out / STATE).exists():
        raise ValueError(f'{out} holds a run: --resume it, or choose another --out')


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f'cannot make the folder {path}: {error.strerror or error}') from error


class Interruption:
    """Stores signals instead of acting on them; a second Ctrl-C raises KeyboardInterrupt.

    >>> with Interruption() as interruption:
    ...     while not interruption.signal:
    ...         step()
    """

    def __init__(self) -> None:
        self.signal = 0  # the last signal, or 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number
