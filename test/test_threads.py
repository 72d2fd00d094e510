"""Threads and cores of the process."""

from __future__ import annotations

import os
import threading

import pytest

from kp2d_core.matching import keep_off_this_core
from kp2d_core.threads import usable_cores

linux_with_two_cores = pytest.mark.skipif(
    not hasattr(os, 'sched_setaffinity') or usable_cores() < 2, reason='needs Linux and two cores'
)


@linux_with_two_cores
def test_a_thread_is_kept_off_the_core_of_its_caller():
    everywhere, end = os.sched_getaffinity(0), threading.Event()
    other = threading.Thread(target=end.wait, args=(60,))
    other.start()
    assert other.native_id is not None
    try:
        keep_off_this_core(other.native_id)
        left = os.sched_getaffinity(other.native_id)
        assert left < everywhere and len(left) == len(everywhere) - 1
        assert os.sched_getaffinity(0) == everywhere  # the caller's own cores do not change
    finally:
        end.set()
        other.join()


@linux_with_two_cores
def test_a_thread_of_one_core_keeps_its_helper():
    """Where there is no other core, the helper stays where it may run."""
    end = threading.Event()
    other = threading.Thread(target=end.wait, args=(60,))
    other.start()
    everywhere = os.sched_getaffinity(0)
    assert other.native_id is not None
    try:
        os.sched_setaffinity(0, {min(everywhere)})
        keep_off_this_core(other.native_id)
        assert os.sched_getaffinity(other.native_id) == everywhere
    finally:
        os.sched_setaffinity(0, everywhere)
        end.set()
        other.join()


def test_a_thread_that_has_ended_is_no_error():
    other = threading.Thread(target=lambda: None)
    other.start()
    other.join()
    assert other.native_id is not None
    keep_off_this_core(other.native_id)
