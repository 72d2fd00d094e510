"""glibc's allocator, told to keep what it has.

It takes blocks of more than 32 MB from the system each time and gives them back when they are
freed. The system clears every page of them anew, so a step that allocates many large tensors
spends its time in page faults. Kept in the heap, they are reused warm.
"""

from __future__ import annotations

import ctypes
import sys

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # of malloc.h
NEVER = 2**31 - 1
DEFAULT_TRIM, DEFAULT_MMAPS = 128 * 1024, 65536


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
