"""What `kp2d bench` times: our runtimes, V4 in the authors' code, SIFT, other ONNX networks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from kp2d_core.architecture import VARIANTS
from kp2d_core.checkpoint import Checkpoint, find_checkpoint, load_checkpoint, shipped_models
from kp2d_core.detector import KeypointDetector
from kp2d_core.evaluation.foreign_network import Port, open_network
from kp2d_core.export.quantization import quantized_layers
from kp2d_core.export.source import ModelSource
from kp2d_core.features import Features
from kp2d_core.images import Image
from kp2d_core.runtimes import Outputs, Runtime, open_source_with
from kp2d_core.runtimes.base import LateDescriptors

BASELINE = "v4 the authors' way"
PAUSE = 0.01  # seconds, in which spinning threads of the previous contestant go to sleep
REPEATS = 3  # in a row, after one warm-up call


@dataclass(frozen=True)
class Contestant:
    """Something to time on one image."""

    name: str
    run: Callable[[], object]
    ours: Ours | None = None


@dataclass(frozen=True)
class Ours:
    """One of our models in one of our runtimes."""

    model: str
    runtime: str
    precision: str
    opened: Runtime


def ours(
    model: str, runtime: str, precision: str, threads: int, image: Image, top_k: int
) -> Contestant:
    opened = open_source_with(runtime, source_to_time(model, precision), threads)
    images = image[None]
    name = f'{model} {precision} {runtime}'
    entry = Ours(model, runtime, precision, opened)
    return Contestant(name, lambda: np.asarray(opened.run(images, top_k).descriptors), entry)


class WholeWay:
    """A call from frame to `Features`; `shares` holds the share of each call outside inference."""

    def __init__(self, runtime: Runtime, image: Image, top_k: int) -> None:
        self.detector = KeypointDetector(runtime)
        self.image, self.top_k = image, top_k
        self.shares: list[float] = []

    def __call__(self) -> None:
        runtime = self.detector.runtime
        run, inside = runtime.run, []

        def timed(function: Callable[..., Any]) -> Callable[..., Any]:
            def measured(*arguments: Any) -> Any:
                start = time.perf_counter()
                result = function(*arguments)
                inside.append(time.perf_counter() - start)
                return result

            return measured

        def run_timed(images: NDArray[np.uint8], top_k: int) -> Outputs:
            outputs: Outputs = timed(run)(images, top_k)
            if isinstance(outputs.descriptors, LateDescriptors):
                outputs.descriptors.describe = timed(outputs.descriptors.describe)
            return outputs

        runtime.run = run_timed  # type: ignore[method-assign]
        try:
            start = time.perf_counter()
            self.detector.detect(self.image, scales=(1,), max_keypoints=self.top_k)
            total = time.perf_counter() - start
        finally:
            del runtime.run  # restores the method of the class
        self.shares.append((total - sum(inside)) / total)


def authors_way(threads: int, image: Image, top_k: int) -> Contestant:
    from kp2d_core.benchmarks.plain import AuthorsWay

    network = AuthorsWay(checkpoint_to_time('v4'), threads)
    images = image[None]
    return Contestant(BASELINE, lambda: network.run(images, top_k))


def sift(image: Image, top_k: int) -> Contestant:
    gray = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    detector = cv2.SIFT_create(nfeatures=top_k)
    return Contestant('SIFT', lambda: detector.detectAndCompute(gray, None))


def other_network(path: Path, runtime: str, threads: int, image: Image) -> Contestant:
    """A network of other authors, on the photograph."""
    network = open_network(path, runtime, threads)
    inputs = {port.name: _input_for(port, image) for port in network.inputs}
    return Contestant(f'{path.stem} {runtime}', lambda: network.run(inputs, network.outputs))


def matching(model: str, top_k: int) -> Callable[[], object]:
    """Mutual nearest neighbours of two sets of descriptors of the model's length."""
    from kp2d_core.matching import match

    length = checkpoint_to_time(model).architecture.descriptor_size
    random = np.random.default_rng(0)
    sets = []
    for _ in range(2):
        descriptors = random.normal(0, 1, (top_k, length)).astype(np.float32)
        descriptors /= np.linalg.norm(descriptors, axis=1, keepdims=True)
        points = random.uniform(0, 100, (top_k, 2)).astype(np.float32)
        sets.append(Features(points, np.ones(top_k, np.float32), descriptors))
    return lambda: match(sets[0], sets[1])


def _input_for(port: Port, image: Image) -> np.ndarray[Any, Any]:
    """Return the photograph in the size of the port: float NCHW in 0..1, or uint8 NHWC."""
    if len(port.shape) != 4:
        raise ValueError(f'--beside takes networks of one image, got an input of {port}')
    planar = port.shape[1] in (1, 3)
    height, width = image.shape[:2]
    free = (1, 3, height, width) if planar else (1, height, width, 3)
    shape = [b if a is None else a for a, b in zip(port.shape, free, strict=True)]
    if shape[1 if planar else 3] not in (1, 3):
        raise ValueError(f'--beside takes networks of one image, got an input of {port}')
    channels, height, width = shape[1:] if planar else (shape[3], *shape[1:3])
    resized = np.asarray(cv2.resize(image, (width, height)))
    if channels == 1:
        resized = cv2.cvtColor(resized, cv2.COLOR_RGB2GRAY)[..., None]
    if planar:
        resized = resized.transpose(2, 0, 1)
    batch = np.ascontiguousarray(np.repeat(resized[None], shape[0], axis=0))
    return batch if port.dtype is np.uint8 else (batch / 255).astype(port.dtype)


def checkpoint_to_time(name: str) -> Checkpoint:
    """Load a shipped model or a file, or make random weights for a variant that does not ship."""
    if name in VARIANTS and name not in shipped_models():
        return random_checkpoint(name)
    return load_checkpoint(find_checkpoint(name))


def random_checkpoint(variant: str) -> Checkpoint:
    random = np.random.default_rng(0)
    architecture = VARIANTS[variant]
    weights = {}
    for name, shape in architecture.parameter_shapes().items():
        if len(shape) == 4:
            deviation = np.sqrt(2 / np.prod(shape[1:]))
            weights[name] = random.normal(0, deviation, shape).astype(np.float32)
        elif name.endswith('num_batches_tracked'):
            weights[name] = np.zeros(shape, np.int64)
        else:
            one = name.endswith(('1.weight', 'running_var'))
            weights[name] = np.full(shape, float(one), np.float32)
    return Checkpoint(architecture, weights, notes='random weights, to measure speed')


def source_to_time(name: str, precision: str) -> ModelSource:
    """Load a model to time. For int8 any ranges will do: the arithmetic is the same."""
    checkpoint = checkpoint_to_time(name)
    layers = quantized_layers(checkpoint.architecture)
    ranges = dict.fromkeys(layers, 8.0) if precision == 'int8' else None
    return ModelSource(checkpoint.architecture, precision, checkpoint, ranges)


def time_in_turns(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    progress: str | None = None,
) -> dict[str, list[float]]:
    """Measure the milliseconds of every call, `rounds` times REPEATS calls of each contestant.

    With the clock `time.process_time`, they are CPU time of all threads, however busy the
    machine is.
    """
    for run in contestants.values():  # compiles and allocates
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
