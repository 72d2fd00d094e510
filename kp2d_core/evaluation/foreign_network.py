"""Networks of other authors, run with ONNX Runtime or OpenVINO on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kp2d_core.errors import FileError

RUNTIMES = {'onnxruntime': 'ONNX Runtime', 'openvino': 'OpenVINO'}
_TYPES = {
    'tensor(float)': np.float32,
    'tensor(float16)': np.float16,
    'tensor(uint8)': np.uint8,
}


@dataclass(frozen=True)
class Port:
    """An input of a network."""

    name: str
    shape: tuple[int | None, ...]  # None: any
    dtype: type | None  # None: not a type of images

    def __str__(self) -> str:
        sides = 'x'.join('?' if side is None else str(side) for side in self.shape)
        return f'{self.dtype.__name__ if self.dtype else "other values,"} {sides}'


@dataclass(frozen=True)
class ForeignNetwork:
    inputs: list[Port]
    outputs: list[str]
    run: Callable[[dict[str, NDArray[Any]], list[str]], list[NDArray[Any]]]  # of these outputs


def open_network(
    path: Path, runtime: str = 'onnxruntime', threads: int | None = None
) -> ForeignNetwork:
    """Open an ONNX file, or an .xml file with OpenVINO; raise FileError if that fails."""
    if runtime not in RUNTIMES:
        raise ValueError(f"runtime must be one of {', '.join(RUNTIMES)}, got '{runtime}'")
    if not path.is_file():
        raise FileError(f'there is no file {path}')
    if path.suffix == '.xml' and runtime != 'openvino':
        raise FileError(f'{path} is an OpenVINO file: {RUNTIMES[runtime]} cannot open it')
    openers = {'onnxruntime': _open_onnxruntime, 'openvino': _open_openvino}
    try:
        return openers[runtime](path, threads)
    except ImportError as error:
        raise ValueError(f'{path} needs {runtime}: pip install {runtime}') from error
    except Exception as error:  # the exceptions of these libraries have no common base
        raise FileError(
            f'{path} is not a model that {RUNTIMES[runtime]} can open: {error}'
        ) from error


def _open_onnxruntime(path: Path, threads: int | None) -> ForeignNetwork:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, ['CPUExecutionProvider'])
    ports = [
        Port(
            node.name,
            tuple(side if isinstance(side, int) else None for side in node.shape),
            _TYPES.get(node.type),
        )
        for node in session.get_inputs()
    ]
    outputs = [node.name for node in session.get_outputs()]
    return ForeignNetwork(ports, outputs, lambda given, wanted: session.run(wanted, given))


def _open_openvino(path: Path, threads: int | None) -> ForeignNetwork:
    import openvino

    from kp2d_core.runtimes.openvino import cpu_settings

    compiled = openvino.Core().compile_model(path, 'CPU', cpu_settings(threads))
    request = compiled.create_infer_request()
    ports = []
    for port in compiled.inputs:
        sides = port.partial_shape
        shape = tuple(side.get_length() if side.is_static else None for side in sides)
        dtype = port.element_type.to_dtype().type
        ports.append(Port(port.any_name, shape, dtype if dtype in _TYPES.values() else None))

    def run(given: dict[str, NDArray[Any]], wanted: list[str]) -> list[NDArray[Any]]:
        request.infer(given)
        return [request.get_tensor(name).data.copy() for name in wanted]

    return ForeignNetwork(ports, [port.any_name for port in compiled.outputs], run)
