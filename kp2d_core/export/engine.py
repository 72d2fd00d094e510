"""Build TensorRT engines from exported graphs, with TensorRT 10.3 to 11.x and TensorRT-RTX.

The graph contains its types, so the network is strongly typed and all versions build it in the
same way. TensorRT-RTX needs no device to build; TensorRT builds for the device of the machine.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from kp2d_core.export.source import TENSORRT_TOP_K, Profile

PACKAGES = ('tensorrt', 'tensorrt_rtx')
MAXIMUM_BATCH = 8  # of graphs with a dynamic batch
WORKSPACE = 1 << 30


def load_tensorrt() -> Any:
    """Import TensorRT, else TensorRT-RTX; the ValueError explains how to install it."""
    for package in PACKAGES:
        if importlib.util.find_spec(package):
            return importlib.import_module(package)
    raise ValueError(
        'TensorRT is not installed: pip install tensorrt (or tensorrt-rtx, for RTX GPUs)'
    )


def library_version(trt: Any) -> str:
    return f'{trt.__name__} {trt.__version__}'


def is_rtx(trt: Any) -> bool:
    return bool(trt.__name__ == 'tensorrt_rtx')


def device_key(trt: Any, name: str, compute_capability: tuple[int, int]) -> str:
    """Name the target of an engine: the compute capability with RTX, else the GPU itself."""
    capability = 'sm_{}{}'.format(*compute_capability)
    return capability if is_rtx(trt) else f'{name} {capability}'


def build_engine(
    trt: Any,
    graph: bytes,
    profile: Profile,
    *,
    compute_capabilities: Sequence[int] = (),
    progress: bool = False,
) -> bytes:
    """Build the serialized engine of a graph.

    compute_capabilities  of the devices to build for with TensorRT-RTX, such as (86, 89); empty:
                          the device of this machine
    """
    check_profile(profile)
    logger = make_logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(graph):
        errors = [str(parser.get_error(i).desc()) for i in range(parser.num_errors)]
        raise ValueError(f'TensorRT cannot read the graph: {"; ".join(errors)}')
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, WORKSPACE)
    if profile.batch is None:
        shapes = builder.create_optimization_profile()
        shape = (profile.height, profile.width, profile.channels)
        shapes.set_shape('image', (1, *shape), (1, *shape), (MAXIMUM_BATCH, *shape))
        config.add_optimization_profile(shapes)
    if compute_capabilities:
        set_compute_capabilities(trt, config, compute_capabilities)
    if progress:
        config.progress_monitor = make_progress_monitor(trt)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise ValueError(f'TensorRT cannot build the engine: {"; ".join(logger.errors)}')
    return bytes(memoryview(engine))


def check_profile(profile: Profile) -> None:
    if profile.top_k > TENSORRT_TOP_K:
        raise ValueError(
            f'TensorRT returns at most {TENSORRT_TOP_K} keypoints, {profile.top_k} were requested'
        )


def set_compute_capabilities(trt: Any, config: Any, wanted: Sequence[int]) -> None:
    if not is_rtx(trt):
        raise ValueError(
            'only TensorRT-RTX builds for other devices than that of this machine: '
            'pip install tensorrt-rtx'
        )
    known = {
        int(name[2:]): value
        for name, value in trt.ComputeCapability.__members__.items()
        if name.startswith('SM')
    }
    unknown = [str(capability) for capability in wanted if capability not in known]
    if unknown:
        raise ValueError(
            f'TensorRT-RTX {trt.__version__} cannot build for compute capability '
            f'{", ".join(unknown)}: it knows {", ".join(map(str, sorted(known)))}'
        )
    config.num_compute_capabilities = len(wanted)
    for index, capability in enumerate(wanted):
        config.set_compute_capability(known[capability], index)


def make_logger(trt: Any) -> Any:
    """Collects the errors of TensorRT, to report them once, in the exception."""

    class ErrorLogger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(message.strip())

    return ErrorLogger()


def make_progress_monitor(trt: Any) -> Any:
    """Shows a progress bar of the build and the current phase of TensorRT."""
    from tqdm import tqdm

    class Bar(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.bar: Any = None
            self.outermost = ''

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if self.bar is None:
                self.outermost = phase_name
                self.bar = tqdm(total=num_steps, desc=phase_name, unit='step', miniters=0)
            else:
                self.bar.set_postfix_str(phase_name, refresh=False)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if self.bar is not None and phase_name == self.outermost:
                self.bar.update(step + 1 - self.bar.n)
            elif self.bar is not None:
                self.bar.update(0)  # refreshes the elapsed time
            return True  # continue

        def phase_finish(self, phase_name: str) -> None:
            if self.bar is not None and phase_name == self.outermost:
                self.bar.set_postfix_str('', refresh=False)
                self.bar.update(self.bar.total - self.bar.n)
                self.bar.close()
                self.bar = None

    return Bar()
