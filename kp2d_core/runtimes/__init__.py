"""The runtimes: one interface, one file per runtime; `auto` selects the best one."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path

from kp2d_core.checkpoint import find_checkpoint
from kp2d_core.errors import FileError
from kp2d_core.export.quantization import calibration_path
from kp2d_core.export.source import ModelSource, missing_onnx, open_source
from kp2d_core.runtimes.base import Outputs, Runtime, RuntimeStatus
from kp2d_core.runtimes.cuda import cuda_device

__all__ = [
    'DEFAULT_MODEL',
    'Outputs',
    'Runtime',
    'RuntimeStatus',
    'available_runtimes',
    'open_runtime',
    'suitable_precision',
]

RUNTIMES = ('tensorrt', 'openvino', 'onnxruntime', 'torch')  # fastest first
FASTEST_ON_CUDA = ('tensorrt', 'onnxruntime', 'torch')
# x86 instructions that multiply and add four bytes at once. Without them int8 gains little.
INT8_INSTRUCTIONS = {'avx_vnni', 'avx512_vnni', 'amx_int8'}
TENSORRT_PACKAGES = ('tensorrt', 'tensorrt_rtx')


DEFAULT_MODEL = 'small'


def open_runtime(
    model: str | Path = 'auto',
    *,
    runtime: str = 'auto',
    precision: str = 'auto',
    threads: int | None = None,
) -> Runtime:
    """Open a runtime by name with a model; 'auto' takes the best one that works.

    `model` 'auto' is the same shipped model on every machine, so that descriptors and maps can be
    exchanged. `precision` 'auto' is the fastest with almost no loss of quality
    (`suitable_precision`), or that of an exported file.
    """
    if threads is not None and threads < 1:
        raise ValueError(f'threads must be 1 or more, got {threads}')
    if runtime not in ('auto', *RUNTIMES):
        known = ', '.join(RUNTIMES)
        raise ValueError(f"there is no runtime '{runtime}': choose from auto, {known}")
    if runtime == 'auto':
        return _open_best(model, precision, threads)
    status = _status(runtime)
    if not status.available:
        raise ValueError(f'runtime {runtime} cannot be used here: {status.detail}')
    chosen = DEFAULT_MODEL if model == 'auto' else model
    source, why = _source(runtime, chosen, precision)
    opened = open_source_with(runtime, source, threads)
    opened.model, opened.reason = str(chosen), '; '.join(['asked for', *why])
    return opened


def suitable_precision(runtime: str, int8_ranges: bool) -> str:
    """Return the fastest precision of a runtime with almost no loss of quality.

    int8 loses .001 of repeatability, fp16 less (docs/runtimes.md).
    """
    if runtime == 'tensorrt':
        return 'fp16'
    if runtime == 'openvino' and int8_ranges and has_int8_instructions():
        return 'int8'
    return 'fp32'


@functools.cache
def has_int8_instructions() -> bool:
    try:
        lines = Path('/proc/cpuinfo').read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith('flags')), '')
    return not INT8_INSTRUCTIONS.isdisjoint(flags.split())


def _source(runtime: str, model: str | Path, precision: str) -> tuple[ModelSource, list[str]]:
    """Open the model in this precision, or a suitable one for 'auto'; also return the reason."""
    if precision != 'auto':
        return open_source(model, precision), []
    path = find_checkpoint(model)
    if path.suffix.lower() == '.onnx':
        return open_source(model), []
    chosen = suitable_precision(runtime, calibration_path(path).is_file())
    try:
        return open_source(model, chosen), []
    except FileError as error:
        if chosen != 'int8':
            raise
        return open_source(model, 'fp32'), [f'no int8: {error}']


def _open_best(model: str | Path, precision: str, threads: int | None) -> Runtime:
    """Open the first runtime that works; note why the ones before it do not."""
    passed_over: list[str] = []
    broken: list[str] = []
    for status in available_runtimes():
        if not status.available:
            passed_over.append(f'{status.name}: {status.detail}')
            continue
        chosen = DEFAULT_MODEL if model == 'auto' else model
        source, why = _source(status.name, chosen, precision)
        try:
            opened = open_source_with(status.name, source, threads)
        except (ImportError, OSError, RuntimeError) as error:  # installed, but broken
            broken.append(f'{status.name}: {error}')
            continue
        opened.model, opened.problem = str(chosen), '; '.join(broken)
        opened.reason = '; '.join(
            [f'the fastest here ({status.detail})', *why, *passed_over, *broken]
        )
        return opened
    raise ValueError(
        'no runtime works here: pip install openvino onnx; ' + '; '.join(passed_over + broken)
    )


def open_source_with(runtime: str, source: ModelSource, threads: int | None = None) -> Runtime:
    """Open the runtime of that name, which must be usable, with an open model."""
    return _OPENERS[runtime](source, threads)


def available_runtimes() -> list[RuntimeStatus]:
    """List all runtimes, fastest first, and whether each works on this machine."""
    names = list(RUNTIMES)
    if cuda_device().available:
        fast = [name for name in FASTEST_ON_CUDA if _runs_on_cuda(name)]
        names = [*fast, *(name for name in RUNTIMES if name not in fast)]
    return [_status(name) for name in names]


def _runs_on_cuda(name: str) -> bool:
    """Whether a runtime is installed with CUDA support on a machine with a device."""
    try:
        if name == 'onnxruntime':
            import onnxruntime

            return 'CUDAExecutionProvider' in onnxruntime.get_available_providers()
        if name == 'torch':
            import torch

            return torch.cuda.is_available()
    except (ImportError, OSError):  # not installed or broken, which its status reports
        return False
    return True


def _status(name: str) -> RuntimeStatus:
    packages = TENSORRT_PACKAGES if name == 'tensorrt' else (name,)
    package = next((p for p in packages if importlib.util.find_spec(p)), None)
    if package is None:
        return RuntimeStatus(name, False, f'not installed: pip install {_INSTALL[name]}')
    version = _version(package)
    if name == 'tensorrt':
        device = cuda_device()
        if not device.available:
            return RuntimeStatus(name, False, f'{version}, but {device.problem}')
        version = f'{version} on {device.name}'
    if name != 'torch' and importlib.util.find_spec('onnx') is None:
        return RuntimeStatus(name, False, f'{version}, but {missing_onnx()}')
    return RuntimeStatus(name, True, version)


def _version(package: str) -> str:
    try:
        return f'{package} {importlib.metadata.version(package)}'
    except importlib.metadata.PackageNotFoundError:  # not installed by pip
        return package


def _open_tensorrt(source: ModelSource, threads: int | None) -> Runtime:
    from kp2d_core.runtimes.tensorrt import TensorRTRuntime

    return TensorRTRuntime(source)


def _open_openvino(source: ModelSource, threads: int | None) -> Runtime:
    from kp2d_core.runtimes.openvino import OpenVINORuntime

    return OpenVINORuntime(source, threads=threads)


def _open_onnxruntime(source: ModelSource, threads: int | None) -> Runtime:
    from kp2d_core.runtimes.onnxruntime import OnnxRuntime

    return OnnxRuntime(source, threads=threads)


def _open_torch(source: ModelSource, threads: int | None) -> Runtime:
    if source.checkpoint is None:
        raise ValueError('torch runs .safetensors models, not exported graphs')
    if source.precision != 'fp32':
        raise ValueError(f'torch runs fp32 only, not {source.precision}: use another runtime')
    from kp2d_core.runtimes.torch import TorchRuntime

    return TorchRuntime(source.checkpoint, threads=threads)


_OPENERS: dict[str, Callable[[ModelSource, int | None], Runtime]] = {
    'tensorrt': _open_tensorrt,
    'openvino': _open_openvino,
    'onnxruntime': _open_onnxruntime,
    'torch': _open_torch,
}

_INSTALL = {
    'tensorrt': 'tensorrt cuda-python onnx',
    'openvino': 'openvino onnx',
    'onnxruntime': 'onnxruntime onnx',
    'torch': 'torch',
}
