"""ONNX Runtime, on the CPU or with CUDA if its GPU build is installed."""

from __future__ import annotations

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from kp2d_core.export.source import ModelSource, Profile
from kp2d_core.runtimes.base import Array, Compiled, CompiledRuntime
from kp2d_core.runtimes.cuda import cuda_device
from kp2d_core.threads import usable_cores


class OnnxRuntime(CompiledRuntime):
    name = 'onnxruntime'
    parallel = True

    def __init__(self, source: ModelSource, *, threads: int | None = None) -> None:
        super().__init__(source)
        self.options = onnxruntime.SessionOptions()
        self.options.intra_op_num_threads = threads or usable_cores()
        self.options.inter_op_num_threads = 1
        # Spinning threads would take the cores from other processes.
        self.options.add_session_config_entry('session.intra_op.allow_spinning', '0')
        self.options.log_severity_level = 3
        self.providers = providers()
        device = 'CUDA' if len(self.providers) > 1 else 'CPU'
        self.description = (
            f'ONNX Runtime {onnxruntime.__version__} on {device}, {source.precision}'
        )

    def compile(self, graph: bytes, profile: Profile) -> Compiled:
        session = onnxruntime.InferenceSession(graph, self.options, providers=self.providers)

        def run(images: NDArray[np.uint8]) -> dict[str, Array]:
            names = self.source.outputs
            return dict(zip(names, session.run(names, {'image': images}), strict=True))

        return run


def providers() -> list[str]:
    """List the providers: CUDA first, if this build supports it and there is a device."""
    has_cuda = 'CUDAExecutionProvider' in onnxruntime.get_available_providers()
    if has_cuda and cuda_device().available:
        return ['CUDAExecutionProvider', 'CPUExecutionProvider']
    return ['CPUExecutionProvider']
