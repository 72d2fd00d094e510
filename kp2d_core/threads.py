"""CPU and memory use of this process: cores, spinning threads, freed memory."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

# About 30 µs: longer than the pause between two layers, too short to disturb other processes.
SPINS = '20000'
TRIM_THRESHOLD, MMAP_MAX = -1, -4  # of malloc.h
NEVER = 2**31 - 1
DEFAULT_TRIM, DEFAULT_MMAPS = 128 * 1024, 65536


def usable_cores() -> int:
    """Count the cores that this process may use; a container may have fewer than the machine."""
    if hasattr(os, 'sched_getaffinity'):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_waiting() -> None:
    """Let OpenMP threads spin briefly before they sleep, unless the environment sets it otherwise.

    Call it before torch is imported. Threads that spin for long take time from other processes:
    two trainings on two cores were ten times slower. Threads that sleep at once wake too late: a
    step then takes a tenth longer.
    """
    if 'OMP_WAIT_POLICY' not in os.environ:
        os.environ['OMP_WAIT_POLICY'] = 'PASSIVE'
        os.environ.setdefault('GOMP_SPINCOUNT', SPINS)


def keep_freed_memory(keep: bool = True) -> bool:
    """Tell glibc to reuse large blocks, or restore its default; return whether that works.

    By default glibc requests blocks above 32 MB from the system and returns them on free. The
    system clears every page again, so a step that allocates many large tensors spends its time in
    page faults. Blocks that stay in the heap are reused.
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


class Blas(NamedTuple):
    """A loaded OpenBLAS."""

    path: str
    threads: Callable[[], int]
    set_threads: Callable[[int], Any]


def find_blas() -> list[Blas]:
    """Find each loaded OpenBLAS: NumPy's, and those that other packages bring."""
    found = []
    for path in _loaded_libraries('openblas'):
        library = ctypes.CDLL(path)
        for prefix, suffix in (('scipy_', '64_'), ('scipy_', ''), ('', '64_'), ('', '')):
            ask = getattr(library, f'{prefix}openblas_get_num_threads{suffix}', None)
            change = getattr(library, f'{prefix}openblas_set_num_threads{suffix}', None)
            if ask is not None and change is not None:
                found.append(Blas(path, ask, change))
                break
    return found


_known_blas = cache(find_blas)


def set_blas_threads(count: int) -> None:
    """Let NumPy multiply matrices in this many threads, where it can be told."""
    for blas in _known_blas():
        blas.set_threads(count)


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let NumPy multiply matrices in one thread meanwhile, if its OpenBLAS supports that.

    The threads of OpenBLAS spin between products. With many small products, as in the odometry,
    they take ten times the CPU time and block the cores for everything else.
    """
    before = [(blas, blas.threads()) for blas in _known_blas()]
    set_blas_threads(1)
    try:
        yield
    finally:
        for blas, count in before:
            blas.set_threads(count)


def _loaded_libraries(part: str) -> set[str]:
    """Return the paths of the loaded libraries with `part` in their name."""
    try:
        lines = Path('/proc/self/maps').read_text(encoding='utf-8').splitlines()
    except OSError:
        return set()
    paths = {line.split(maxsplit=5)[5] for line in lines if part in line}
    return {path for path in paths if part in path.rpartition('/')[2]}
