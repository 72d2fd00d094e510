"""The CUDA device and its memory: pinned buffers, a stream, graph capture; no torch needed."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class CudaDevice(NamedTuple):
    """The first CUDA device, or the reason why there is none."""

    available: bool
    name: str = ''
    compute_capability: tuple[int, int] = (0, 0)
    problem: str = ''


@functools.cache
def cuda_device() -> CudaDevice:
    """Find the first device of this machine with libcuda, without creating a context."""
    try:
        driver = ctypes.CDLL('libcuda.so.1')
    except OSError:
        return CudaDevice(False, problem='no CUDA device: the NVIDIA driver is not installed')
    code = driver.cuInit(0)
    if code:
        return CudaDevice(False, problem=f'no CUDA device: the driver answers error {code}')
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    if count.value < 1:
        return CudaDevice(False, problem='no CUDA device: the driver finds none')
    device = ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), 0)
    name = ctypes.create_string_buffer(256)
    driver.cuDeviceGetName(name, len(name), device)
    capability = []
    for attribute in (75, 76):  # compute capability, major and minor
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(value.value)
    return CudaDevice(True, name.value.decode(), (capability[0], capability[1]))


class Buffer(Protocol):
    """An array in pinned memory of the host and its copy on the device."""

    host: NDArray[Any]
    address: int  # on the device


class CudaMemory(Protocol):
    """A stream and its buffers."""

    stream: int  # the handle that TensorRT takes

    def buffer(self, shape: tuple[int, ...], dtype: Any) -> Any: ...

    def upload(self, buffer: Any) -> None: ...

    def download(self, buffer: Any) -> None: ...

    def synchronize(self) -> None: ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record the work as a CUDA graph; return a function that launches it."""
        ...


def open_cuda_memory() -> CudaMemory:
    """Open the memory with cuda-python if installed, else with torch."""
    runtime = find_cuda_python()
    if runtime is not None:
        return CudaPythonMemory(runtime)
    if importlib.util.find_spec('torch'):
        import torch

        if torch.cuda.is_available():
            return TorchMemory(torch)
    raise RuntimeError('TensorRT needs cuda-python for device memory: pip install cuda-python')


def find_cuda_python() -> Any | None:
    """Find the runtime module of cuda-python, which moved between versions 12 and 13."""
    for name in ('cuda.bindings.runtime', 'cuda.cudart'):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    return None


class CudaPythonBuffer:
    def __init__(self, memory: CudaPythonMemory, shape: tuple[int, ...], dtype: Any) -> None:
        self.memory = memory
        self.bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.address = int(memory.call('cudaMalloc', self.bytes))
        self.host_address = int(memory.call('cudaHostAlloc', self.bytes, 0))
        pinned = (ctypes.c_byte * self.bytes).from_address(self.host_address)
        self.host: NDArray[Any] = np.frombuffer(pinned, dtype=dtype).reshape(shape)

    def __del__(self) -> None:
        if hasattr(self, 'address'):
            self.memory.runtime.cudaFree(self.address)
        if hasattr(self, 'host_address'):
            self.memory.runtime.cudaFreeHost(self.host_address)


class CudaPythonMemory:
    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime
        non_blocking = 1
        self.stream = int(self.call('cudaStreamCreateWithFlags', non_blocking))

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function of the CUDA runtime; raise its error as an exception."""
        error, *values = getattr(self.runtime, function)(*arguments)
        if int(error):
            raise RuntimeError(f'CUDA: {function} failed with {error.name} ({int(error)})')
        return values[0] if values else None

    def buffer(self, shape: tuple[int, ...], dtype: Any) -> CudaPythonBuffer:
        return CudaPythonBuffer(self, shape, dtype)

    def upload(self, buffer: CudaPythonBuffer) -> None:
        kind = self.runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        source, target = buffer.host_address, buffer.address
        self.call('cudaMemcpyAsync', target, source, buffer.bytes, kind, self.stream)

    def download(self, buffer: CudaPythonBuffer) -> None:
        kind = self.runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        source, target = buffer.address, buffer.host_address
        self.call('cudaMemcpyAsync', target, source, buffer.bytes, kind, self.stream)

    def synchronize(self) -> None:
        self.call('cudaStreamSynchronize', self.stream)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        mode = self.runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self.call('cudaStreamBeginCapture', self.stream, mode)
        try:
            work()
        finally:  # a stream that stays in capture mode is unusable
            graph = self.call('cudaStreamEndCapture', self.stream)
        executable = self.call('cudaGraphInstantiate', graph, 0)
        return lambda: self.call('cudaGraphLaunch', executable, self.stream)


class TorchBuffer:
    def __init__(self, torch: Any, shape: tuple[int, ...], dtype: Any) -> None:
        kind = torch.from_numpy(np.empty(0, dtype)).dtype
        self.pinned = torch.empty(shape, dtype=kind, pin_memory=True)
        self.device = torch.empty(shape, dtype=kind, device='cuda')
        self.host: NDArray[Any] = self.pinned.numpy()
        self.address = int(self.device.data_ptr())


class TorchMemory:
    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.torch_stream = torch.cuda.Stream()
        self.stream = int(self.torch_stream.cuda_stream)

    def buffer(self, shape: tuple[int, ...], dtype: Any) -> TorchBuffer:
        return TorchBuffer(self.torch, shape, dtype)

    def upload(self, buffer: TorchBuffer) -> None:
        with self.torch.cuda.stream(self.torch_stream):
            buffer.device.copy_(buffer.pinned, non_blocking=True)

    def download(self, buffer: TorchBuffer) -> None:
        with self.torch.cuda.stream(self.torch_stream):
            buffer.pinned.copy_(buffer.device, non_blocking=True)

    def synchronize(self) -> None:
        self.torch_stream.synchronize()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, stream=self.torch_stream):
            work()

        def launch() -> None:
            with self.torch.cuda.stream(self.torch_stream):
                graph.replay()

        return launch
