"""Threads and cores of the process."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from kp2d_core.matching import blas_has_one_thread, find_neighbours, keep_off_this_core
from kp2d_core.threads import find_blas, one_blas_thread, usable_cores

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


@pytest.mark.skipif(not find_blas(), reason='NumPy has no OpenBLAS')
def test_matching_has_a_helper_only_where_the_blas_has_one_thread():
    random = np.random.default_rng(0)
    first, second = (random.normal(size=(900, 64)).astype(np.float32) for _ in range(2))
    before = [blas.threads() for blas in find_blas()]
    with one_blas_thread():
        assert blas_has_one_thread()
        helped = find_neighbours(first, second, None, runner_up=True)
    for blas in find_blas():
        blas.set_threads(2)
    try:
        assert not blas_has_one_thread()
        alone = find_neighbours(first, second, None, runner_up=True)
    finally:
        for blas, count in zip(find_blas(), before, strict=True):
            blas.set_threads(count)
    similarity = first @ second.T
    for found in (helped, alone):
        np.testing.assert_array_equal(found.nearest, similarity.argmax(axis=1))
        np.testing.assert_allclose(found.best, similarity.max(axis=1), rtol=1e-4)
