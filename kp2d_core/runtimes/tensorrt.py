"""TensorRT and TensorRT-RTX on an NVIDIA GPU: cached engines, pinned memory, a CUDA graph."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kp2d_core.export.cache import CacheKey, CompiledCache
from kp2d_core.export.engine import (
    MAXIMUM_BATCH,
    build_engine,
    device_key,
    library_version,
    load_tensorrt,
    make_logger,
)
from kp2d_core.export.source import TENSORRT_TOP_K, ModelSource, Profile
from kp2d_core.runtimes.base import Array, Compiled, CompiledRuntime, cache_folder
from kp2d_core.runtimes.cuda import CudaMemory, cuda_device, open_cuda_memory

log = logging.getLogger(__name__)


class TensorRTRuntime(CompiledRuntime):
    name = 'tensorrt'
    most_keypoints = TENSORRT_TOP_K
    compiles_beside = False  # the first run and the capture of a CUDA graph need the stream

    def __init__(self, source: ModelSource) -> None:
        super().__init__(source)
        self.device = cuda_device()
        if not self.device.available:  # without one, TensorRT's runtime crashes the process
            raise RuntimeError(f'runtime tensorrt cannot be used here: {self.device.problem}')
        self.trt = load_tensorrt()
        self.memory = open_cuda_memory()
        self.logger = make_logger(self.trt)
        self.runtime = self.trt.Runtime(self.logger)
        self.cache = CompiledCache(cache_folder('engines'))
        self.description = f'{library_version(self.trt)} on {self.device.name}, {source.precision}'

    def compile(self, graph: bytes, profile: Profile) -> Compiled:
        if profile.top_k == TENSORRT_TOP_K < profile.cells:
            log.warning(
                'TensorRT keeps the best %d keypoints at most, of %d cells',
                TENSORRT_TOP_K, profile.cells,
            )  # fmt: skip
        device = device_key(self.trt, self.device.name, self.device.compute_capability)
        key = CacheKey.of(graph, profile, library_version(self.trt), device)

        def build() -> bytes:
            log.warning('building an engine for %s: this can take minutes, once', profile)
            return build_engine(self.trt, graph, profile, progress=True)

        serialized, built = self.cache.get_or_build(key, build)
        engine = self.runtime.deserialize_cuda_engine(serialized)
        if engine is None and not built:  # the file is intact, but this TensorRT refuses it
            self.cache.discard(key)
            serialized, _ = self.cache.get_or_build(key, build)
            engine = self.runtime.deserialize_cuda_engine(serialized)
        if engine is None:
            raise RuntimeError(f'TensorRT refuses its own engine: {self.logger.errors}')
        return EngineRun(engine, profile, self.source, self.memory)


class EngineRun:
    """One engine with its buffers; calling it runs a batch."""

    def __init__(
        self, engine: Any, profile: Profile, source: ModelSource, memory: CudaMemory
    ) -> None:
        self.engine = engine  # must outlive the context
        self.context = engine.create_execution_context()
        if self.context is None:
            raise RuntimeError('TensorRT cannot create an execution context: not enough memory?')
        self.memory = memory
        self.profile = profile
        batch = profile.batch or MAXIMUM_BATCH
        top_k = profile.top_k
        image = (batch, profile.height, profile.width, profile.channels)
        self.image = memory.buffer(image, np.uint8)
        shapes = {
            'keypoints': (batch, top_k, 2),
            'scores': (batch, top_k),
            'descriptors': (batch, top_k, source.architecture.descriptor_size),
            'sigmas': (batch, top_k),
        }
        self.names = source.outputs
        self.outputs = [memory.buffer(shapes[name], np.float32) for name in self.names]
        self.context.set_tensor_address('image', self.image.address)
        for name, buffer in zip(self.names, self.outputs, strict=True):
            self.context.set_tensor_address(name, buffer.address)
        self.launch = self.enqueue
        if profile.batch is not None:
            self.launch = self.captured()

    def __call__(self, images: NDArray[np.uint8]) -> dict[str, Array]:
        count = len(images)
        if count > len(self.image.host):  # only with a dynamic batch
            parts = [self(images[i : i + MAXIMUM_BATCH]) for i in range(0, count, MAXIMUM_BATCH)]
            return {name: np.concatenate([part[name] for part in parts]) for name in self.names}
        if self.profile.batch is None:
            self.context.set_input_shape('image', images.shape)
        np.copyto(self.image.host[:count], images)
        self.launch()
        self.memory.synchronize()
        outputs = [buffer.host[:count].copy() for buffer in self.outputs]
        return dict(zip(self.names, outputs, strict=True))

    def enqueue(self) -> None:
        self.memory.upload(self.image)
        if not self.context.execute_async_v3(self.memory.stream):
            raise RuntimeError('TensorRT refused to run the engine')
        for buffer in self.outputs:
            self.memory.download(buffer)

    def captured(self) -> Any:
        """Record upload, network and download as a CUDA graph; single calls if that fails."""
        self.enqueue()  # a graph must not record the first run, in which TensorRT initialises
        self.memory.synchronize()
        try:
            return self.memory.capture(self.enqueue)
        except RuntimeError as error:
            log.warning('no CUDA graph, running without: %s', error)
            return self.enqueue
