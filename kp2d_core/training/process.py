"""The process that trains: how its memory is kept and its threads wait. No torch here."""

from __future__ import annotations

import ctypes
import os
import sys

# About 30 us: longer than between two layers, shorter than others on the machine notice.
SPINS = '20000'
TRIM_THRESHOLD, MMAP_MAX = -1, -4  # of malloc.h
NEVER = 2**31 - 1
DEFAULT_TRIM, DEFAULT_MMAPS = 128 * 1024, 65536


def set_waiting() -> None:
    """Spin for a moment, then sleep; unless the environment says otherwise.

    Threads that spin on take the time of whatever else runs: two trainings on two cores were ten
    times slower. Threads that sleep at once wake too late: a step then takes a tenth longer.
    """
    if 'OMP_WAIT_POLICY' not in os.environ:
        os.environ['OMP_WAIT_POLICY'] = 'PASSIVE'
        os.environ.setdefault('GOMP_SPINCOUNT', SPINS)


def keep_freed_memory(keep: bool = True) -> bool:
    """Reuse large blocks, or (`keep` false) go back to the defaults; False where it cannot be."""
    if not sys.platform.startswith('linux'):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    done = mallopt(MMAP_MAX, 0 if keep else DEFAULT_MMAPS)
    done &= mallopt(TRIM_THRESHOLD, NEVER if keep else DEFAULT_TRIM)
    return bool(done)
