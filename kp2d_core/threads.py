"""The processor and memory that this process takes: cores, waiting threads, freed blocks."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

# About 30 us: longer than between two layers, shorter than others on the machine notice.
SPINS = '20000'
TRIM_THRESHOLD, MMAP_MAX = -1, -4  # of malloc.h
NEVER = 2**31 - 1
DEFAULT_TRIM, DEFAULT_MMAPS = 128 * 1024, 65536


def usable_cores() -> int:
    """Cores that this process may use, which in a container are fewer than the machine has."""
    if hasattr(os, 'sched_getaffinity'):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_waiting() -> None:
    """Let OpenMP's threads spin for a moment, then sleep; unless the environment says otherwise.

    To be called before torch is imported, which reads it then.
    Threads that spin on take the time of whatever else runs: two trainings on two cores were ten
    times slower. Threads that sleep at once wake too late: a step then takes a tenth longer.
    """
    if 'OMP_WAIT_POLICY' not in os.environ:
        os.environ['OMP_WAIT_POLICY'] = 'PASSIVE'
        os.environ.setdefault('GOMP_SPINCOUNT', SPINS)


def keep_freed_memory(keep: bool = True) -> bool:
    """Tell glibc to reuse large blocks, or (`keep` false) as by default; False where it cannot be.

    It takes blocks of more than 32 MB from the system each time and gives them back when they are
    freed. The system clears every page of them anew, so a step that allocates many large tensors
    spends its time in page faults. Kept in the heap, they are reused warm.
    """
    if not sys.platform.startswith('linux'):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    done = mallopt(MMAP_MAX, 0 if keep else DEFAULT_MMAPS)
    done &= mallopt(TRIM_THRESHOLD, NEVER if keep else DEFAULT_TRIM)
    return bool(done)


def set_blas_threads(count: int) -> None:
    """Let NumPy multiply matrices in this many threads, where it can be told."""
    for _, change in _blas_threads():
        change(count)


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let NumPy multiply matrices in one thread meanwhile, where it can be told.

    Its OpenBLAS lets its threads spin between products. Where these are many and small, as in the
    odometry, they take the cores from everything else: ten times the processor's time.
    """
    before = [(change, ask()) for ask, change in _blas_threads()]
    set_blas_threads(1)
    try:
        yield
    finally:
        for change, count in before:
            change(count)


@cache
def _blas_threads() -> list[tuple[Callable[[], int], Callable[[int], Any]]]:
    """Of each OpenBLAS in this process: what asks for the number of threads, what changes it."""
    found: list[tuple[Callable[[], int], Callable[[int], Any]]] = []
    for path in _loaded_libraries('openblas'):
        library = ctypes.CDLL(path)
        for prefix, suffix in (('scipy_', '64_'), ('scipy_', ''), ('', '64_'), ('', '')):
            ask = getattr(library, f'{prefix}openblas_get_num_threads{suffix}', None)
            change = getattr(library, f'{prefix}openblas_set_num_threads{suffix}', None)
            if ask is not None and change is not None:
                found.append((ask, change))
                break
    return found


def _loaded_libraries(part: str) -> set[str]:
    """Paths of this process's libraries with `part` in their name."""
    try:
        lines = Path('/proc/self/maps').read_text(encoding='utf-8').splitlines()
    except OSError:
        return set()
    paths = {line.split(maxsplit=5)[5] for line in lines if part in line}
    return {path for path in paths if part in path.rpartition('/')[2]}
