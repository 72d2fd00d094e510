"""The processor and memory that this process takes: cores, waiting threads, freed blocks."""

from __future__ import annotations

import ctypes
import os
import sys

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


def limit_blas(threads: int = 1) -> bool:
    """Let NumPy's products of matrices use so many threads; False where it cannot be told.

    Its OpenBLAS lets its threads spin between products. Where these are many and small, as in the
    odometry, they take the cores from everything else: ten times the processor's time.
    """
    names = [
        f'{prefix}openblas_set_num_threads{suffix}'
        for prefix in ('scipy_', '')
        for suffix in ('64_', '')
    ]
    done = False
    for path in _loaded_libraries('openblas'):
        library = ctypes.CDLL(path)
        for name in names:
            if hasattr(library, name):
                getattr(library, name)(ctypes.c_int(threads))
                done = True
                break
    return done


def _loaded_libraries(part: str) -> set[str]:
    """Paths of this process's libraries with `part` in their name."""
    try:
        with open('/proc/self/maps', encoding='utf-8') as maps:  # noqa: PTH123
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if part in line}
    except OSError:
        return set()
    return {path for path in paths if part in path.rpartition('/')[2]}
