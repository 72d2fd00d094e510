"""Is there a CUDA device? Asked of the driver itself: TensorRT crashes where there is none."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple


class CudaDevice(NamedTuple):
    """The first CUDA device, or why there is none."""

    available: bool
    name: str = ''
    compute_capability: tuple[int, int] = (0, 0)
    problem: str = ''


@functools.cache
def cuda_device() -> CudaDevice:
    """The first device of this machine, through libcuda, without creating a context."""
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
