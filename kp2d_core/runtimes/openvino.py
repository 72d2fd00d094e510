"""OpenVINO: the fastest runtime on CPUs, which gains most from int8."""

from __future__ import annotations

from typing import Any

import openvino

from kp2d_core.export.cache import CacheKey, CompiledCache
from kp2d_core.export.graph import with_unsigned_codes
from kp2d_core.export.source import ModelSource, Profile
from kp2d_core.runtimes.base import Compiled, CompiledRuntime, cache_folder
from kp2d_core.threads import usable_cores


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
        # Not OpenVINO's own cache, which accepts damaged graphs and has no size limit.
        self.cache = CompiledCache(cache_folder('openvino'))
        self.device = self.core.get_property('CPU', 'FULL_DEVICE_NAME').strip()
        version = openvino.__version__.split('-')[0]
        self.description = f'OpenVINO {version} on {self.device}, {source.precision}'

    def compile(self, graph: bytes, profile: Profile) -> Compiled:
        if profile.precision == 'int8':
            graph = with_unsigned_codes(graph)
        # Called with images, it returns copies of its outputs.
        return self._open(graph, profile)

    def _open(self, graph: bytes, profile: Profile) -> openvino.CompiledModel:
        """Load the compiled graph from the cache, or compile and cache it."""
        settings = ', '.join(f'{name} {value}' for name, value in self.settings.items())
        key = CacheKey.of(
            graph, profile, f'OpenVINO {openvino.__version__}', f'{self.device}, {settings}'
        )
        made: list[openvino.CompiledModel] = []

        def build() -> bytes:
            model = self.core.read_model(graph)
            made.append(self.core.compile_model(model, 'CPU', self.settings))
            return bytes(made[0].export_model().getbuffer())

        compiled, built = self.cache.get_or_build(key, build)
        if built:
            return made[0]
        try:
            return self.core.import_model(compiled, 'CPU', self.settings)
        except RuntimeError:  # the file is intact, but this OpenVINO refuses it
            self.cache.discard(key)
            build()
            return made[0]
