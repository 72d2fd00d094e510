"""OpenVINO: the fastest runtime on CPUs, which gains most from int8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import gcd
from typing import Any

import numpy as np
import openvino
from numpy.typing import NDArray

from kp2d_core.export.cache import CacheKey, CompiledCache
from kp2d_core.export.graph import with_unsigned_codes
from kp2d_core.export.source import ModelSource, Profile
from kp2d_core.runtimes.base import (
    Array,
    Compiled,
    CompiledRuntime,
    Describer,
    Network,
    cache_folder,
)
from kp2d_core.threads import usable_cores

MOST_DESCRIBED = 1024  # candidates that are all described, in the graph that finds them
DESCRIBED = 512  # keypoints that are described at a time: fewer cost more calls, more are wasted


def cpu_settings(threads: int | None) -> dict[str, Any]:
    return {
        'PERFORMANCE_HINT': 'LATENCY',
        'INFERENCE_NUM_THREADS': threads or usable_cores(),
        'INFERENCE_PRECISION_HINT': 'f32',  # not bfloat16
        'ENABLE_CPU_PINNING': False,  # the scheduler does better when other processes are busy
    }


class OpenVINORuntime(CompiledRuntime):
    name = 'openvino'

    def __init__(self, source: ModelSource, *, threads: int | None = None) -> None:
        super().__init__(source)
        self.core = openvino.Core()
        self.settings = cpu_settings(threads)
        self._shared_by = 1  # threads that run images at the same time
        # Not OpenVINO's own cache, which accepts damaged graphs and has no size limit.
        self.cache = CompiledCache(cache_folder('openvino'))
        self.device = self.core.get_property('CPU', 'FULL_DEVICE_NAME').strip()
        version = openvino.__version__.split('-')[0]
        self.description = f'OpenVINO {version} on {self.device}, {source.precision}'

    def share(self, count: int) -> int:
        shares = gcd(count, self.settings['INFERENCE_NUM_THREADS'])
        if shares > 1 and self.source.graph is None:
            self._shared_by, self.parallel = shares, True
        return self._shared_by

    def make(self, profile: Profile) -> Network:
        if self.source.graph is not None:
            return super().make(profile)
        images = self._shared_by * (profile.batch or 1)
        streams = gcd(images, self.settings['INFERENCE_NUM_THREADS'])
        if streams > 1:
            profile = replace(profile, batch=1)
        describer = None
        if profile.top_k <= MOST_DESCRIBED:
            graph = self.source.graph_for(profile)
        else:  # most candidates are copies of better ones: describe those that are kept
            graph, describing = self.source.parts_for(profile, DESCRIBED)
            described = replace(profile, batch=1, top_k=DESCRIBED)
            describer = Describer(
                self._open(describing, described), DESCRIBED, self.descriptor_size
            )
        model = self._open(graph, profile, streams)
        return Network(InParallel(model, profile) if streams > 1 else model, describer)

    def compile(self, graph: bytes, profile: Profile) -> Compiled:
        return self._open(graph, profile)  # called with images, it returns copies of its outputs

    def _open(self, graph: bytes, profile: Profile, streams: int = 1) -> openvino.CompiledModel:
        """Load the compiled graph from the cache, or compile and cache it."""
        if profile.precision == 'int8':
            graph = with_unsigned_codes(graph)
        settings = {**self.settings, 'NUM_STREAMS': streams} if streams > 1 else self.settings
        shown = ', '.join(f'{name} {value}' for name, value in settings.items())
        key = CacheKey.of(
            graph, profile, f'OpenVINO {openvino.__version__}', f'{self.device}, {shown}'
        )
        made: list[openvino.CompiledModel] = []

        def build() -> bytes:
            model = self.core.read_model(graph)
            made.append(self.core.compile_model(model, 'CPU', settings))
            return bytes(made[0].export_model().getbuffer())

        compiled, built = self.cache.get_or_build(key, build)
        if built:
            return made[0]
        try:
            return self.core.import_model(compiled, 'CPU', settings)
        except RuntimeError:  # the file is intact, but this OpenVINO refuses it
            self.cache.discard(key)
            build()
            return made[0]


class InParallel:
    """Runs images at the same time, each on its share of the threads.

    Threads that share an image wait for each other after every layer, and longer if other threads
    take their core: two images on two threads took 77 ms of processor time in a busy stereo node,
    84 ms as one batch. Several threads may call it at once.
    """

    def __init__(self, model: openvino.CompiledModel, profile: Profile) -> None:
        self._model = model
        self._idle: list[openvino.InferRequest] = []
        # OpenVINO sets up its types at the first call. Two first calls at once hung.
        self(np.zeros((1, profile.height, profile.width, profile.channels), np.uint8))

    def __call__(self, images: NDArray[np.uint8]) -> Mapping[Any, Array]:
        requests = [self._request() for _ in images]
        for request, image in zip(requests, images, strict=True):
            request.start_async({0: image[None]}, share_inputs=True)
        for request in requests:
            request.wait()
        results = [request.results for request in requests]
        outputs = {name: np.concatenate([each[name] for each in results]) for name in results[0]}
        self._idle += requests  # not before: the next image overwrites their results
        return outputs

    def _request(self) -> openvino.InferRequest:
        try:
            return self._idle.pop()
        except IndexError:
            return self._model.create_infer_request()
