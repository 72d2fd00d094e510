"""OpenVINO: the fastest on CPUs, and the one that gains most from int8."""

from __future__ import annotations

import numpy as np
import openvino
from numpy.typing import NDArray

from kp2d_core.export.graph import with_unsigned_codes
from kp2d_core.export.source import ModelSource, Profile
from kp2d_core.runtimes.base import Compiled, CompiledRuntime, Outputs, cache_folder
from kp2d_core.threads import usable_cores


class OpenVINORuntime(CompiledRuntime):
    name = 'openvino'

    def __init__(self, source: ModelSource, *, threads: int | None = None) -> None:
        super().__init__(source)
        self.core = openvino.Core()
        self.settings = {
            'PERFORMANCE_HINT': 'LATENCY',
            'INFERENCE_NUM_THREADS': threads or usable_cores(),
            'INFERENCE_PRECISION_HINT': 'f32',  # not bfloat16 where the CPU has it
            'ENABLE_CPU_PINNING': False,  # beside other busy processes, the scheduler does better
        }
        folder = cache_folder('openvino')
        try:  # compiled graphs, for a fast start; it works without, too
            folder.mkdir(parents=True, exist_ok=True)
            self.settings['CACHE_DIR'] = str(folder)
        except OSError:
            pass
        version = openvino.__version__.split('-')[0]
        device = self.core.get_property('CPU', 'FULL_DEVICE_NAME').strip()
        self.description = f'OpenVINO {version} on {device}, {source.precision}'

    def compile(self, graph: bytes, profile: Profile) -> Compiled:
        if profile.precision == 'int8':
            graph = with_unsigned_codes(graph)
        model = self.core.compile_model(self.core.read_model(graph), 'CPU', self.settings)
        request = model.create_infer_request()
        outputs = [request.get_tensor(name) for name in ('keypoints', 'scores', 'descriptors')]

        def run(images: NDArray[np.uint8]) -> Outputs:
            images = np.require(images, requirements=('C', 'W'))  # read-only ones it refuses
            request.set_input_tensor(openvino.Tensor(images, shared_memory=True))
            request.infer()
            if profile.batch is None:
                outputs[:] = [request.get_output_tensor(i) for i in range(3)]
            # Copies: the tensors are overwritten by the next run.
            keypoints, scores, descriptors = (output.data.copy() for output in outputs)
            return keypoints, scores, descriptors

        return run
