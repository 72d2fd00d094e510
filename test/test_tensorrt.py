"""TensorRT without a GPU: real engines of TensorRT-RTX, the cache, the API of 10.x and 11.x."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from models import random_checkpoint

from kp2d_core.architecture import VARIANTS
from kp2d_core.export import engine as engine_module
from kp2d_core.export.cache import MAGIC, CacheKey, CompiledCache
from kp2d_core.export.engine import build_engine, library_version
from kp2d_core.export.graph import build_graph
from kp2d_core.export.quantization import quantized_layers
from kp2d_core.export.source import Profile
from kp2d_core.runtimes.cuda import cuda_device

trt = pytest.importorskip('tensorrt_rtx')

PACKAGE = Path(engine_module.__file__).parents[1]
RANGES = dict.fromkeys(quantized_layers(VARIANTS['half']), 6.0)


def graph_of(variant: str, profile: Profile) -> bytes:
    return build_graph(random_checkpoint(variant), profile, RANGES).SerializeToString()


@pytest.mark.parametrize('precision', ['fp32', 'fp16', 'int8'])
@pytest.mark.parametrize('variant', ['v4', 'half'])
def test_engines_are_built_for_two_compute_capabilities(variant, precision):
    profile = Profile(240, 320, 300, precision=precision)
    graph = graph_of(variant, profile)
    engines = [
        build_engine(trt, graph, profile, compute_capabilities=[capability])
        for capability in (86, 120)
    ]
    for engine in engines:
        # RTX stores the weights unchanged: an engine below half their size would have lost some.
        assert len(engine) > len(graph) // 2
    assert engines[0] != engines[1]


def test_engine_with_a_dynamic_batch_and_the_most_keypoints():
    profile = Profile(480, 640, 3840, batch=None, precision='fp16')
    assert build_engine(trt, graph_of('half', profile), profile, compute_capabilities=[86, 89])


def test_more_keypoints_than_tensorrt_keeps_are_refused():
    profile = Profile(480, 640, 3841)
    with pytest.raises(ValueError, match='at most 3840 keypoints, 3841 were requested'):
        build_engine(trt, b'', profile)


def test_unknown_compute_capability_is_refused():
    profile = Profile(48, 64, 10)
    with pytest.raises(ValueError, match='cannot build for compute capability 87: it knows 75'):
        build_engine(trt, graph_of('half', profile), profile, compute_capabilities=[86, 87])


def test_graph_that_cannot_be_read_is_an_error_with_the_reason():
    with pytest.raises(ValueError, match='TensorRT cannot read the graph: .+'):
        build_engine(trt, b'not a graph', Profile(48, 64, 10), compute_capabilities=[86])


def test_graph_that_cannot_be_built_is_an_error_with_the_reason():
    """TensorRT-RTX has no FP32 matrix product for Turing."""
    profile = Profile(48, 64, 10)
    with pytest.raises(ValueError, match='TensorRT cannot build the engine: .*Turing'):
        build_engine(trt, graph_of('half', profile), profile, compute_capabilities=[75])


def test_progress_is_shown(capsys):
    profile = Profile(48, 64, 10)
    graph = graph_of('half', profile)
    build_engine(trt, graph, profile, compute_capabilities=[86], progress=True)
    shown = capsys.readouterr().err
    assert 'Building engine: 100%' in shown
    build_engine(trt, graph, profile, compute_capabilities=[86])
    assert capsys.readouterr().err == ''


# The cache


@pytest.fixture(scope='module')
def built() -> tuple[CacheKey, bytes]:
    profile = Profile(48, 64, 10)
    graph = graph_of('half', profile)
    key = CacheKey.of(graph, profile, library_version(trt), 'sm_86')
    return key, build_engine(trt, graph, profile, compute_capabilities=[86])


def never() -> bytes:
    raise AssertionError('the engine was built though it was in the cache')


def test_cache_hit(tmp_path, built):
    key, engine = built
    cache = CompiledCache(tmp_path)
    assert cache.get_or_build(key, lambda: engine) == (engine, True)
    assert cache.get_or_build(key, never) == (engine, False)
    assert CompiledCache(tmp_path).get(key) == engine


@pytest.mark.parametrize('field', ['model', 'library', 'device', 'profile'])
def test_any_change_is_a_miss(tmp_path, built, field):
    key, engine = built
    cache = CompiledCache(tmp_path)
    cache.put(key, engine)
    values = {name: getattr(key, name) for name in ('model', 'library', 'device', 'profile')}
    other = CacheKey(**{**values, field: values[field] + '.1'})
    assert cache.get(other) is None
    assert cache.get_or_build(other, lambda: b'another') == (b'another', True)
    assert cache.get(key) == engine


def test_key_covers_weights_precision_and_sizes():
    def key(variant='half', **values) -> CacheKey:
        profile = Profile(**{'height': 48, 'width': 64, 'top_k': 10, **values})
        return CacheKey.of(graph_of(variant, profile), profile, 'tensorrt 10.3.0', 'sm_87')

    keys = [key(), key('v4'), key(width=72), key(top_k=11), key(precision='fp16'), key(batch=2)]
    assert len({one.file_name() for one in keys}) == len(keys)
    assert key() == key()


@pytest.mark.parametrize(
    'damage',
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: b'',
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data.replace(b'sm_86', b'sm_89', 1),
        lambda data: data[len(MAGIC) :],
        lambda data: b'a foreign engine' * 100,
    ],
    ids=['cut', 'half', 'empty', 'one bit', 'other device', 'no magic', 'foreign'],
)
def test_damaged_or_foreign_engines_are_built_again(tmp_path, built, damage):
    key, engine = built
    cache = CompiledCache(tmp_path)
    cache.put(key, engine)
    path = cache.path(key)
    path.write_bytes(damage(path.read_bytes()))
    assert cache.get(key) is None
    assert cache.get_or_build(key, lambda: engine) == (engine, True)
    assert cache.get_or_build(key, never) == (engine, False)


def test_failed_build_leaves_nothing(tmp_path, built):
    key, engine = built
    cache = CompiledCache(tmp_path)

    def fail() -> bytes:
        raise ValueError('no')

    with pytest.raises(ValueError, match='no'):
        cache.get_or_build(key, fail)
    assert not list(tmp_path.glob('*.engine'))
    assert cache.get_or_build(key, lambda: engine) == (engine, True)


BUILDER = """
import sys, time
from pathlib import Path
import tensorrt_rtx as trt
from kp2d_core.export.engine import build_engine
from kp2d_core.export.cache import CacheKey, CompiledCache
from kp2d_core.export.source import Profile
folder = Path(sys.argv[1])
graph, profile = (folder / 'graph.onnx').read_bytes(), Profile(48, 64, 10)
key = CacheKey.of(graph, profile, 'tensorrt', 'sm_86')
print('ready', flush=True)
sys.stdin.readline()
def build():
    time.sleep(0.5)  # long enough that the other one comes to wait
    return build_engine(trt, graph, profile, compute_capabilities=[86])
engine, built = CompiledCache(folder / 'engines').get_or_build(key, build)
print(len(engine), built)
"""


def test_of_two_processes_at_once_one_builds_and_both_get_the_engine(tmp_path):
    (tmp_path / 'graph.onnx').write_bytes(graph_of('half', Profile(48, 64, 10)))
    processes = [
        subprocess.Popen(
            [sys.executable, '-c', BUILDER, str(tmp_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        for process in processes:
            assert process.stdout.readline() == 'ready\n'
        for process in processes:  # start both at the same moment
            process.stdin.write('go\n')
            process.stdin.flush()
        answers = [process.communicate(timeout=60)[0].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert sorted(answer[1] for answer in answers) == ['False', 'True']
    assert answers[0][0] == answers[1][0]
    assert len(list((tmp_path / 'engines').glob('*.engine'))) == 1


# The API of the versions that cannot be installed here

CLASSES = {
    'builder': 'Builder',
    'config': 'IBuilderConfig',
    'parser': 'OnnxParser',
    'shapes': 'IOptimizationProfile',
    'engine': 'ICudaEngine',
    'context': 'IExecutionContext',
    'runtime': 'Runtime',
}
RTX_ONLY = {('config', 'num_compute_capabilities'), ('config', 'set_compute_capability')}
VERSIONS = json.loads((Path(__file__).parent / 'tensorrt_api.json').read_text())


def names_used() -> set[tuple[str, str]]:
    """List (object, attribute) of everything in TensorRT that our code uses."""
    found = set()
    for path in (PACKAGE / 'export/engine.py', PACKAGE / 'runtimes/tensorrt.py'):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute):
                continue
            owner = ast.unparse(node.value)
            if owner.startswith('trt.') and owner.count('.') == 1:
                found.add((owner.removeprefix('trt.'), node.attr))
            elif owner.removeprefix('self.') in CLASSES:
                found.add((owner.removeprefix('self.'), node.attr))
    return {
        (owner, name) for owner, name in found
        if not name.startswith('__') and owner not in ('ComputeCapability', '__name__')
    }  # fmt: skip


def test_code_is_searched_for_what_it_uses():
    used = names_used()
    assert ('context', 'execute_async_v3') in used
    assert ('builder', 'build_serialized_network') in used
    assert ('runtime', 'deserialize_cuda_engine') in used
    assert ('NetworkDefinitionCreationFlag', 'STRONGLY_TYPED') in used
    assert len(used) > 15


@pytest.mark.parametrize('version', ['10.3', '10.16', '11.1'])
def test_all_that_is_used_exists_in(version):
    classes = VERSIONS[version]
    for owner, name in names_used() - RTX_ONLY:
        known = classes[CLASSES.get(owner, owner)].split()
        assert name in known, f'TensorRT {version} has no {owner}.{name}'


def test_all_that_is_used_exists_in_rtx():
    for owner, name in names_used():
        assert hasattr(getattr(trt, CLASSES.get(owner, owner)), name), f'{owner}.{name}'


def test_the_table_knows_what_went_away():
    assert 'EXPLICIT_BATCH' in VERSIONS['10.3']['NetworkDefinitionCreationFlag'].split()
    assert 'EXPLICIT_BATCH' not in VERSIONS['11.1']['NetworkDefinitionCreationFlag'].split()
    assert not {'max_workspace_size', 'execute_async_v2'} & {name for _, name in names_used()}


def test_cuda_python_has_what_is_called_and_its_errors_are_raised():
    runtime = pytest.importorskip('cuda.bindings.runtime')
    from kp2d_core.runtimes.cuda import CudaPythonMemory, find_cuda_python

    assert find_cuda_python() is runtime
    tree = ast.parse((PACKAGE / 'runtimes/cuda.py').read_text())
    called = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and str(node.value).startswith('cuda')
    }
    called -= {'cuda', 'cuda.bindings.runtime', 'cuda.cudart'}
    assert {'cudaMalloc', 'cudaGraphLaunch', 'cudaStreamBeginCapture'} <= called
    for name in called:
        assert hasattr(runtime, name), name
    assert runtime.cudaMemcpyKind.cudaMemcpyHostToDevice is not None
    assert runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal is not None
    if not cuda_device().available:
        with pytest.raises(RuntimeError, match='cudaStreamCreateWithFlags failed with cudaError'):
            CudaPythonMemory(runtime)


def test_runs_on_the_gpu_as_on_the_cpu(photographs, tmp_path):
    """Only where there is a device."""
    if not cuda_device().available:
        pytest.skip(cuda_device().problem)
    from models import write_random_model

    from kp2d_core.features import prepare
    from kp2d_core.runtimes import open_runtime

    model = write_random_model(tmp_path)
    image = prepare(photographs['coffee'], (320, 240))[0][None]
    found = open_runtime(model, runtime='tensorrt').run(image, 1200)
    wanted = open_runtime(model, runtime='onnxruntime').run(image, 1200)
    np.testing.assert_allclose(found[1], wanted[1], atol=1e-3)
