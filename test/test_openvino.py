"""OpenVINO: images at the same time, threads that share it, descriptors computed late."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip('openvino')

from kp2d_core.features import prepare
from kp2d_core.runtimes import open_runtime, openvino
from kp2d_core.runtimes.base import LateDescriptors
from kp2d_core.runtimes.openvino import InParallel


@pytest.mark.parametrize(('batch', 'threads'), [(2, 2), (4, 2), (2, 4), (3, 2)])
def test_images_of_a_batch_run_beside_each_other(batch, threads, photographs):
    """OpenVINO: where threads can be shared out evenly, each image has its own."""
    runtime = open_runtime('small', runtime='openvino', threads=threads)
    image = prepare(photographs['astronaut'], (160, 120))[0]
    images = np.stack([np.roll(image, 16 * shift, axis=1) for shift in range(batch)])
    together = runtime.run(images, 200)
    shared = isinstance([*runtime._compiled.values()][-1].run, InParallel)
    assert shared == (batch != 3)
    for number, single in enumerate(images):
        for found, wanted in zip(together, runtime.run(single[None], 200), strict=True):
            np.testing.assert_allclose(found[number], wanted[0], atol=1e-4)


@pytest.mark.parametrize(('count', 'threads', 'shares'), [(2, 2, 2), (2, 1, 1), (3, 2, 1)])
def test_threads_share_a_graph(count, threads, shares, photographs):
    """OpenVINO: each runs its image on its share of the CPU; other runtimes take turns."""
    image = prepare(photographs['astronaut'], (160, 120))[0]
    images = [np.roll(image, 16 * shift, axis=1)[None] for shift in range(count)]
    alone = open_runtime('small', runtime='openvino', threads=1)
    shared = open_runtime('small', runtime='openvino', threads=threads)
    assert shared.share(count) == shares
    with ThreadPoolExecutor(count) as threaded:
        for _ in range(5):
            together = threaded.map(lambda each: shared.run(each, 200), images)
            for found, single in zip(together, images, strict=True):
                for output, wanted in zip(found, alone.run(single, 200), strict=True):
                    np.testing.assert_allclose(output, wanted, atol=1e-4)
    assert len(shared._compiled) == 1


@pytest.mark.parametrize(('precision', 'least'), [('fp32', 0.999999), ('int8', 0.999)])
@pytest.mark.parametrize(('batch', 'threads'), [(1, 1), (2, 2), (3, 2)])
def test_descriptors_computed_late_are_those_of_the_whole_graph(
    precision, least, batch, threads, photographs, monkeypatch
):
    """OpenVINO: of many candidates, only those that are kept are described."""
    top_k = openvino.MOST_DESCRIBED + 300
    image = prepare(photographs['astronaut'], (320, 240))[0]
    images = np.stack([np.roll(image, 16 * shift, axis=1) for shift in range(batch)])
    late = open_runtime('small', runtime='openvino', precision=precision, threads=threads)
    found = late.run(images, top_k)
    monkeypatch.setattr(openvino, 'MOST_DESCRIBED', top_k)
    whole = open_runtime('small', runtime='openvino', precision=precision, threads=threads)
    wanted = whole.run(images, top_k)
    assert isinstance(found.descriptors, LateDescriptors)
    assert isinstance(wanted.descriptors, np.ndarray)
    assert found.descriptors.shape == wanted.descriptors.shape
    for name in ('keypoints', 'scores', 'sigmas'):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
    assert ((np.asarray(found.descriptors) * wanted.descriptors).sum(axis=2) > least).all()


def test_descriptors_of_chosen_rows(photographs):
    image = prepare(photographs['astronaut'], (320, 240))[0]
    runtime = open_runtime('small', runtime='openvino', threads=1)
    late = runtime.run(np.stack([image, image[::-1]]), 1200).descriptors
    everything = np.asarray(late)
    for rows in (np.arange(1100), np.array([7, 3, 900]), np.empty(0, int), slice(5, 9)):
        np.testing.assert_allclose(late[1, rows], everything[1, rows], atol=1e-6)
    assert late[:, :40].shape == (2, 40, 128)
    np.testing.assert_allclose(np.asarray(late[1:, :40]), everything[1:, :40], atol=1e-6)


def test_threads_read_late_descriptors_at_once(photographs):
    images = [prepare(photographs[name], (320, 240))[0][None] for name in ('astronaut', 'coffee')]
    runtime = open_runtime('small', runtime='openvino', threads=1)
    late = [runtime.run(image, 1200).descriptors for image in images]
    wanted = [np.asarray(each) for each in late]
    with ThreadPoolExecutor(4) as threads:
        for number, found in enumerate(threads.map(lambda n: np.asarray(late[n % 2]), range(24))):
            np.testing.assert_allclose(found, wanted[number % 2], atol=1e-6)


FIRST_CALLS = """
import sys, threading
import numpy as np
from kp2d_core.runtimes import open_runtime
sys.setswitchinterval(1e-4)
runtime = open_runtime('small', runtime='openvino', threads=2)
assert runtime.share(2) == 2
images = np.zeros((1, 120, 160, 3), np.uint8)
runtime.prepare(images.shape, 200)
together = threading.Barrier(2)
threads = [
    threading.Thread(target=lambda: (together.wait(), runtime.run(images, 200))) for _ in range(2)
]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_two_first_calls_at_once_do_not_hang():
    """In OpenVINO 2026.4 every second process did."""
    for _ in range(3):
        subprocess.run([sys.executable, '-c', FIRST_CALLS], check=True, timeout=60)
