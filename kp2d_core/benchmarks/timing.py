"""Timing several things fairly on a machine that may be busy: in turns, so that noise hits all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
from tqdm import tqdm

PAUSE = 0.01  # seconds: threads that the one before left waiting in a loop go to sleep
REPEATS = 3  # in a row, after one that is not counted


def time_in_turns(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    progress: str | None = None,
) -> dict[str, list[float]]:
    """Milliseconds of every call, `rounds` times REPEATS of each.

    The clock `time.process_time` counts the work of all threads, however busy the machine is.
    """
    for run in contestants.values():  # whatever is compiled or allocated once
        run()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in tqdm(range(rounds), progress, unit='round', disable=progress is None):
        for name, run in contestants.items():
            time.sleep(PAUSE)
            run()
            for _ in range(REPEATS):
                start = clock()
                run()
                times[name].append(1000 * (clock() - start))
    return times


def summary(milliseconds: list[float]) -> dict[str, float]:
    return {
        'median_ms': float(np.median(milliseconds)),
        'p95_ms': float(np.percentile(milliseconds, 95)),
        'fastest_ms': min(milliseconds),
    }
