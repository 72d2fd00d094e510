"""All runtimes give the same keypoints; runtimes are chosen, refused and explained."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import onnx
import pytest
from models import random_checkpoint

from kp2d_core import KeypointDetector
from kp2d_core.checkpoint import Checkpoint, find_checkpoint, save_checkpoint, shipped_models
from kp2d_core.errors import FileError
from kp2d_core.export.graph import build_graph
from kp2d_core.export.quantization import calibration_path
from kp2d_core.export.source import Profile
from kp2d_core.features import prepare
from kp2d_core.runtimes import (
    DEFAULT_MODEL,
    available_runtimes,
    has_int8_instructions,
    open_runtime,
    suitable_precision,
)
from kp2d_core.runtimes.base import KEPT, too_many
from kp2d_core.runtimes.cuda import CudaDevice, cuda_device

COMPILED = ('openvino', 'onnxruntime')


@pytest.fixture(scope='module')
def models(tmp_path_factory) -> dict[str, str]:
    """The shipped `small`; and a random V4 and V0."""
    folder = tmp_path_factory.mktemp('models')
    paths = {}
    for variant in ('v0', 'v4'):
        checkpoint = random_checkpoint(variant)
        # Untrained scores are almost equal; spreading them makes their order meaningful.
        weights = {**checkpoint.weights, 'convDb.weight': checkpoint.weights['convDb.weight'] * 20}
        paths[variant] = str(folder / f'{variant}.safetensors')
        save_checkpoint(paths[variant], Checkpoint(checkpoint.architecture, weights))
    return {**paths, 'small': 'small'}


def agreement(found, wanted, pixels: float) -> tuple[float, np.ndarray]:
    """Return the share of wanted keypoints that are found, and the cosines of descriptors."""
    distance = np.linalg.norm(found[0][0][:, None] - wanted[0][0][None], axis=2)
    nearest = distance.argmin(axis=0)
    near = distance.min(axis=0) <= pixels
    cosines = (found[2][0][nearest] * wanted[2][0]).sum(axis=1)
    return float(near.mean()), cosines[near]


@pytest.mark.parametrize('runtime', COMPILED)
@pytest.mark.parametrize(
    ('model', 'size', 'top_k'),
    [('small', (320, 240), 300), ('small', (640, 480), 1000), ('v4', (320, 240), 300),
     ('v0', (320, 240), 300)],
)  # fmt: skip
def test_fp32_gives_the_keypoints_of_torch(runtime, model, size, top_k, models, photographs):
    reference = open_runtime(models[model], runtime='torch', precision='fp32', threads=2)
    tested = open_runtime(models[model], runtime=runtime, precision='fp32', threads=2)
    names = ('astronaut', 'coffee', 'motorcycle_left') if size[0] == 320 else ('motorcycle_left',)
    for name in names:
        image = prepare(photographs[name], size)[0][None]
        share, cosines = agreement(tested.run(image, top_k), reference.run(image, top_k), 0.05)
        assert share >= 0.99, name
        assert (cosines >= 0.9999).mean() >= 0.99, name


@pytest.mark.parametrize('runtime', COMPILED)
def test_fp16_gives_nearly_the_keypoints_of_torch(runtime, models, photographs):
    reference = open_runtime(models['small'], runtime='torch', threads=2)
    tested = open_runtime(models['small'], runtime=runtime, precision='fp16', threads=2)
    assert 'fp16' in tested.description
    for name in ('astronaut', 'coffee'):
        image = prepare(photographs[name], (320, 240))[0][None]
        share, cosines = agreement(tested.run(image, 300), reference.run(image, 300), 0.5)
        assert share >= 0.98, name
        assert np.median(cosines) >= 0.999, name


@pytest.mark.parametrize('runtime', COMPILED)
def test_any_size_and_number_and_batch(runtime, models, photographs):
    tested = open_runtime(models['small'], runtime=runtime, threads=1)
    for size, top_k in [((64, 48), 10_000), ((24, 40), 5), ((320, 240), 1)]:
        image = prepare(photographs['chelsea'], size)[0]
        cells = size[0] * size[1] // tested.cell**2
        keypoints, scores, descriptors, _ = tested.run(np.stack([image, image]), top_k)
        k = min(top_k, cells)
        assert keypoints.shape == (2, k, 2) and scores.shape == (2, k)
        assert descriptors.shape == (2, k, 128)
        assert (np.diff(scores, axis=1) <= 0).all()
        np.testing.assert_array_equal(keypoints[0], keypoints[1])
        np.testing.assert_allclose(np.linalg.norm(descriptors, axis=2), 1, atol=1e-4)


@pytest.mark.parametrize('runtime', COMPILED)
def test_outputs_outlive_the_next_run(runtime, models, photographs):
    tested = open_runtime(models['small'], runtime=runtime, threads=1)
    first, second = (prepare(photographs[n], (96, 72))[0][None] for n in ('coffee', 'rocket'))
    kept = tested.run(first, 20)
    copies = [output.copy() for output in kept]
    tested.run(second, 20)
    for output, copy in zip(kept, copies, strict=True):
        np.testing.assert_array_equal(output, copy)


def test_only_a_few_compiled_profiles_are_kept(models, photographs):
    tested = open_runtime(models['small'], runtime='onnxruntime', threads=1)

    def run(width: int) -> list[int]:
        """The widths of what is kept then."""
        tested.run(prepare(photographs['coffee'], (width, 48))[0][None], 9)
        return [profile.width for profile in tested._compiled]

    widths = [64 + 8 * step for step in range(KEPT + 2)]
    for width in widths:
        kept = run(width)
    assert kept == widths[2:]
    run(widths[2])  # used again: now the last to go
    assert widths[2] in run(640)


@pytest.mark.parametrize('runtime', COMPILED)
def test_fewer_keypoints_need_no_new_graph(runtime, models, photographs):
    tested = open_runtime(models['small'], runtime=runtime, threads=1)
    image = prepare(photographs['coffee'], (96, 72))[0][None]

    def compiled() -> list[int]:
        return [profile.top_k for profile in tested._compiled]

    forty = tested.run(image, 40)
    seven = tested.run(image, 7)
    assert compiled() == [40]
    for few, all_of_them in zip(seven, forty, strict=True):
        np.testing.assert_array_equal(few, all_of_them[:, :7])
    tested.run(image, 60)
    assert compiled() == [60]  # in the place of the smaller one
    tested.prepare(image.shape, 50)
    assert compiled() == [60]  # not worth another
    tested.prepare(image.shape, 20)
    assert compiled() == [20]


@pytest.mark.parametrize('runtime', [name for name in COMPILED if name != 'openvino'])
def test_other_runtimes_want_one_batch(runtime, models):
    assert open_runtime(models['small'], runtime=runtime, threads=2).share(2) == 1


@pytest.mark.parametrize('runtime', COMPILED)
@pytest.mark.parametrize('batch', [1, 2, None])
@pytest.mark.parametrize('mono', [False, True])
def test_exported_file_runs_as_its_weights_do(runtime, batch, mono, tmp_path, photographs):
    checkpoint = random_checkpoint('half')
    save_checkpoint(tmp_path / 'model.safetensors', checkpoint)
    profile = Profile(120, 160, 200, batch, mono)
    onnx.save(build_graph(checkpoint, profile), tmp_path / 'model.onnx')
    exported = KeypointDetector.load(tmp_path / 'model.onnx', runtime=runtime, threads=1)
    direct = KeypointDetector.load(tmp_path / 'model.safetensors', runtime=runtime, threads=1)
    photograph = photographs['coffee']
    gray = np.repeat(photograph[..., :1], 3, axis=2)  # what a mono graph can see
    image = gray if mono else photograph
    found = exported.detect(image, max_keypoints=150)
    wanted = direct.detect(image, working_size=(160, 120), scales=(1,), max_keypoints=150)
    assert len(found) == len(wanted) == 150
    np.testing.assert_array_equal(exported.detect(image, scales=(1,)).scores[:150], found.scores)
    np.testing.assert_allclose(found.scores, wanted.scores, atol=1e-5)
    three = np.stack([prepare(image, (160, 120))[0]] * 3)
    for output in exported.runtime.run(three, 50):
        assert output.shape[:2] == (3, 50)
        np.testing.assert_allclose(output[2], output[0], atol=1e-6)
    with pytest.raises(ValueError, match='exported for 160x120 images: it cannot work at another'):
        exported.detect(image, working_size=320)
    with pytest.raises(ValueError, match='exported for 160x120 images: it cannot work at scales'):
        exported.detect(image, scales=(1, 0.5))
    with pytest.raises(ValueError, match='exported for 160x120 images, got 64x48'):
        exported.runtime.run(np.zeros((1, 48, 64, 3), np.uint8), 10)


@pytest.mark.parametrize('runtime', [*COMPILED, 'torch'])
def test_read_only_images_are_taken(models, runtime, photographs):
    image = np.ascontiguousarray(photographs['coffee'][:128, :160])
    image.flags.writeable = False
    detector = KeypointDetector.load(models['small'], runtime=runtime, threads=1)
    assert len(detector.detect(image, max_keypoints=50)) == 50


def test_mistakes_get_one_clear_sentence(tmp_path, models):
    checkpoint = random_checkpoint('half')
    onnx.save(build_graph(checkpoint, Profile(48, 64, 10)), tmp_path / 'model.onnx')
    save_checkpoint(tmp_path / 'bare.safetensors', checkpoint)
    with pytest.raises(ValueError, match="there is no runtime 'tpu': choose from auto, tensorrt"):
        open_runtime(models['small'], runtime='tpu')
    with pytest.raises(ValueError, match="there is no precision 'int4'"):
        open_runtime(models['small'], precision='int4')
    with pytest.raises(ValueError, match='threads must be 1 or more, got 0'):
        open_runtime(models['small'], threads=0)
    with pytest.raises(ValueError, match='was exported as fp32, not as int8'):
        open_runtime(tmp_path / 'model.onnx', precision='int8')
    with pytest.raises(ValueError, match='torch runs .safetensors models'):
        open_runtime(tmp_path / 'model.onnx', runtime='torch')
    with pytest.raises(ValueError, match='torch runs fp32 only, not fp16'):
        open_runtime(models['small'], runtime='torch', precision='fp16')
    with pytest.raises(FileError, match='bare.int8.json next to it.*kp2d export .* --calibrate'):
        open_runtime(tmp_path / 'bare.safetensors', precision='int8')


def test_auto_says_what_it_took_and_why(models):
    runtime = open_runtime(models['small'])
    first = next(status for status in available_runtimes() if status.available)
    assert runtime.name == first.name
    assert first.detail in runtime.reason
    assert open_runtime(models['small'], runtime='torch').reason == 'asked for'


def test_auto_is_one_model_on_every_machine(models):
    for runtime in ('openvino', 'onnxruntime', 'auto'):
        assert open_runtime(runtime=runtime, threads=1).model == DEFAULT_MODEL
    assert open_runtime(models['v0'], runtime='openvino', threads=1).model == str(models['v0'])
    assert DEFAULT_MODEL in shipped_models()


def test_auto_passes_over_a_runtime_that_is_installed_but_broken(models, tmp_path):
    (tmp_path / 'openvino').mkdir()
    (tmp_path / 'openvino/__init__.py').write_text("raise ImportError('libopenvino.so: missing')")
    code = f"""
from kp2d_core.runtimes import open_runtime
runtime = open_runtime({models['small']!r}, threads=1)
print(runtime.name, '-', runtime.reason, '-', runtime.problem)
"""
    path = os.pathsep.join([str(tmp_path), *sys.path])
    result = subprocess.run(
        [sys.executable, '-c', code], capture_output=True, text=True, timeout=120, check=True,
        env={**os.environ, 'PYTHONPATH': path},
    )  # fmt: skip
    assert result.stdout.startswith('onnxruntime - the fastest here')
    assert result.stdout.endswith(' - openvino: libopenvino.so: missing\n')


def test_the_precision_is_the_fastest_that_loses_next_to_nothing(models, tmp_path, monkeypatch):
    assert suitable_precision('tensorrt', int8_ranges=False) == 'fp16'
    assert suitable_precision('onnxruntime', int8_ranges=True) == 'fp32'
    fast_int8 = suitable_precision('openvino', int8_ranges=True) == 'int8'
    assert fast_int8 == has_int8_instructions()
    monkeypatch.setattr('kp2d_core.runtimes.has_int8_instructions', lambda: True)
    assert open_runtime('small', runtime='openvino', threads=1).description.endswith('int8')
    assert open_runtime('small', runtime='torch', threads=1).description.endswith('fp32')
    assert open_runtime(models['v0'], runtime='openvino', threads=1).description.endswith('fp32')
    # The ranges of other weights, as after a training: not taken, and said so.
    shutil.copy(models['v0'], tmp_path / 'mine.safetensors')
    shutil.copy(calibration_path(find_checkpoint('small')), tmp_path / 'mine.int8.json')
    mine = open_runtime(tmp_path / 'mine.safetensors', runtime='openvino', threads=1)
    assert mine.description.endswith('fp32') and 'of other weights' in mine.reason
    monkeypatch.setattr('kp2d_core.runtimes.has_int8_instructions', lambda: False)
    assert open_runtime('small', runtime='openvino', threads=1).description.endswith('fp32')


@pytest.mark.parametrize(
    ('with_cuda', 'order'),
    [
        (True, ['tensorrt', 'onnxruntime', 'torch', 'openvino']),
        (False, ['tensorrt', 'openvino', 'onnxruntime', 'torch']),
    ],
)
def test_a_cuda_device_goes_before_the_cpu(monkeypatch, with_cuda, order):
    """Without a GPU: the answers of the libraries are replaced by those of a machine with one."""
    monkeypatch.setattr('kp2d_core.runtimes.cuda_device', lambda: CudaDevice(True, 'a GPU'))
    answer = ['CUDAExecutionProvider', 'CPUExecutionProvider'][not with_cuda :]
    monkeypatch.setattr('onnxruntime.get_available_providers', lambda: answer)
    monkeypatch.setattr('torch.cuda.is_available', lambda: with_cuda)
    assert [status.name for status in available_runtimes()] == order


def test_status_lists_all_runtimes():
    statuses = {status.name: status for status in available_runtimes()}
    assert list(statuses) == ['tensorrt', 'openvino', 'onnxruntime', 'torch']
    assert statuses['openvino'].available and 'openvino 20' in statuses['openvino'].detail


def test_tensorrt_without_a_device_is_refused_before_it_is_touched(models):
    if cuda_device().available:
        pytest.skip('this machine has a CUDA device')
    code = f"""
import sys
from kp2d_core.runtimes import open_runtime
try:
    open_runtime({models['small']!r}, runtime='tensorrt')
except ValueError as error:
    print(error, [name for name in sys.modules if name.startswith('tensorrt')])
"""
    result = subprocess.run(
        [sys.executable, '-c', code], capture_output=True, text=True, timeout=120, check=True
    )
    assert 'runtime tensorrt cannot be used here: ' in result.stdout
    assert 'no CUDA device' in result.stdout or 'not installed' in result.stdout
    assert result.stdout.endswith('[]\n')


WITHOUT = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {blocked!r}:
            raise ModuleNotFoundError(name + ' is blocked', name=name)
sys.meta_path.insert(0, Blocker())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name in {blocked!r} else found(name, *a)
import numpy as np
from kp2d_core.runtimes import open_runtime
try:
    runtime = open_runtime({model!r}, runtime={runtime!r}, threads=1)
    print(runtime.name, runtime.run(np.zeros((1, 48, 64, 3), np.uint8), 5)[2].shape)
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ('blocked', 'runtime', 'printed'),
    [
        ({'torch', 'onnxruntime'}, 'auto', 'openvino (1, 5, 128)'),
        ({'torch', 'openvino'}, 'auto', 'onnxruntime (1, 5, 128)'),
        ({'onnx', 'openvino', 'onnxruntime'}, 'auto', 'torch (1, 5, 128)'),
        ({'openvino'}, 'openvino', 'not installed: pip install openvino onnx'),
        ({'onnxruntime'}, 'onnxruntime', 'not installed: pip install onnxruntime onnx'),
        ({'torch'}, 'torch', 'not installed: pip install torch'),
        ({'onnx'}, 'openvino', 'the onnx package is not installed: pip install onnx'),
        ({'torch', 'openvino', 'onnxruntime'}, 'auto', 'no runtime works here: pip install'),
    ],
)
def test_each_runtime_needs_none_of_the_others(blocked, runtime, printed, models):
    code = WITHOUT.format(blocked=blocked, runtime=runtime, model=models['small'])
    result = subprocess.run(
        [sys.executable, '-c', code], capture_output=True, text=True, timeout=120, check=True
    )
    assert printed in result.stdout


def test_second_start_of_openvino_comes_from_its_cache(models, tmp_path, monkeypatch):
    """The compiled graph is in the cache folder, and is not written again."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    image = np.zeros((1, 48, 64, 3), np.uint8)
    kept = tmp_path / 'kp2d/openvino'
    open_runtime(models['small'], runtime='openvino', threads=1).run(image, 5)
    (compiled,) = kept.iterdir()
    before = compiled.stat()
    open_runtime(models['small'], runtime='openvino', threads=1).run(image, 5)
    assert [path.stat().st_ino for path in kept.iterdir()] == [before.st_ino]
    open_runtime(models['small'], runtime='openvino', threads=1).run(image, 6)
    assert len(list(kept.iterdir())) == 2


def test_a_damaged_cache_gives_no_wrong_keypoints(models, photographs, tmp_path, monkeypatch):
    """One flipped bit in OpenVINO's own cache gave other keypoints, and no error."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    image = photographs['coffee'][None, :96, :128]
    right = open_runtime(models['small'], runtime='openvino', threads=1).run(image, 20)
    (path,) = (tmp_path / 'kp2d/openvino').iterdir()
    good = path.read_bytes()
    random = np.random.default_rng(0)
    damages = [good[:1000], b'', b'x' * len(good), good + b'x']
    for place in random.integers(0, len(good), 12):
        flipped = bytearray(good)
        flipped[place] ^= 1 << random.integers(8)
        damages.append(bytes(flipped))
    for damage in damages:
        path.write_bytes(damage)
        found = open_runtime(models['small'], runtime='openvino', threads=1).run(image, 20)
        for a, b in zip(found, right, strict=True):
            np.testing.assert_array_equal(a, b)
        assert len(path.read_bytes()) > 0.99 * len(good) and path.read_bytes() != damage


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(models, tmp_path, monkeypatch):
    (tmp_path / 'kp2d').write_text('in the way')
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    image = np.zeros((1, 48, 64, 3), np.uint8)
    assert open_runtime(models['small'], runtime='openvino').run(image, 5)[0].shape == (1, 5, 2)


@pytest.mark.parametrize('runtime', ['openvino', 'onnxruntime', 'torch'])
def test_several_threads_share_a_detector(runtime, models, photographs):
    """Each thread gets the features of its own image; with OpenVINO most were mixed up."""
    detector = KeypointDetector.load(models['small'], runtime=runtime, threads=1)
    image = photographs['coffee']
    crops = [image[y : y + 96, x : x + 128] for y in (0, 150) for x in (0, 200, 400)]
    wanted = [detector.detect(crop, max_keypoints=50) for crop in crops]
    with ThreadPoolExecutor(6) as pool:
        jobs = [
            (i, pool.submit(detector.detect, crops[i], max_keypoints=50))
            for _ in range(10)
            for i in range(len(crops))
        ]
    for i, job in jobs:
        assert np.array_equal(job.result().keypoints, wanted[i].keypoints)
        assert np.array_equal(job.result().descriptors, wanted[i].descriptors)


def test_large_compiled_graphs_are_kept_only_as_far_as_one_image_needs_them():
    vga, large = Profile(480, 640, 300), Profile(3000, 4000, 300)
    assert not too_many([vga] * 8) and too_many([vga] * 9)
    assert not too_many([large] * 4) and too_many([large] * 5)
    assert not too_many([large, large, *[vga] * 6])
    assert too_many([replace(vga, batch=64)] * 5)


def test_padding_costs_no_keypoint(photographs):
    """If the size is not a multiple of the cell, the best k points are still all in the image."""
    detector = KeypointDetector.load('half', runtime='onnxruntime', threads=1)
    image = photographs['coffee'][:233, :317]
    everything = detector.detect(image)
    best = detector.detect(image, max_keypoints=100)
    assert len(best) == 100
    np.testing.assert_allclose(best.scores, everything.scores[:100], atol=1e-6)
