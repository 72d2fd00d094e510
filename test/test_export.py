"""The ONNX graph: its outputs, its metadata, its errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from models import random_checkpoint, untrained

from kp2d_core.architecture import VARIANTS, Architecture, Layer
from kp2d_core.errors import FileError
from kp2d_core.export.graph import build_graph
from kp2d_core.export.quantization import fold, quantized_layers
from kp2d_core.export.source import Profile, read_exported
from kp2d_core.features import prepare
from kp2d_core.networks import KeyPointNet
from kp2d_core.runtimes.torch import TorchRuntime

SIZE = (160, 120)


@pytest.fixture(scope='module')
def image(photographs) -> np.ndarray:
    return prepare(photographs['coffee'], SIZE)[0][None]


def profile(top_k: int = 200, **others) -> Profile:
    return Profile(height=SIZE[1], width=SIZE[0], top_k=top_k, **others)


def run(model: onnx.ModelProto, image: np.ndarray) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=['CPUExecutionProvider']
    )
    return session.run(None, {'image': image})


@pytest.mark.parametrize('variant', ['v0', 'v1', 'v4', 'half', 'small', 'fast'])
def test_every_cell_is_as_in_torch(variant, image):
    """All cells, sorted by cell, so that the order of near ties does not matter."""
    checkpoint = random_checkpoint(variant)
    everything = profile_of_all(checkpoint)
    cell, cells = everything.cell, everything.cells
    found = run(build_graph(checkpoint, everything), image)
    wanted = TorchRuntime(checkpoint, threads=1).run(image, cells)
    inner = found[1][0] > 0
    assert inner.sum() == (SIZE[0] // cell - 2) * (SIZE[1] // cell - 2)
    np.testing.assert_allclose(found[1], wanted[1], atol=1e-5)
    found, wanted = by_place(found), by_place(wanted)
    for tolerance, ours, theirs in zip((1e-3, 1e-5, 1e-4, 1e-4), found, wanted, strict=False):
        np.testing.assert_allclose(ours, theirs, atol=tolerance)


def profile_of_all(checkpoint, **others) -> Profile:
    cell = checkpoint.architecture.cell
    return profile(SIZE[0] // cell * (SIZE[1] // cell), cell=cell, **others)


class Lean(Architecture):
    """A network with other layers: everything derived from the table must follow it."""

    def layers(self) -> dict[str, Layer]:
        changes = {
            'convDa': {'kernel': 1}, 'convPb': {'kernel': 1}, 'convFbb': {'kernel': 1},
            'convPa': {'norm': False}, 'convFa': {'active': False},
        }  # fmt: skip
        return {
            name: replace(layer, **changes.get(name, {}))
            for name, layer in super().layers().items()
        }


@pytest.mark.parametrize('dense', [False, True])
def test_the_graph_follows_the_table_of_layers(image, dense):
    checkpoint = untrained(Lean('lean', width=8, descriptor_size=32))
    assert checkpoint.weights['convDa.0.weight'].shape == (64, 64, 1, 1)
    assert checkpoint.weights['convPa.bias'].shape == (64,)
    cells = profile().cells
    ours = run(build_graph(checkpoint, profile(cells), dense=dense), image)
    theirs = TorchRuntime(checkpoint).run(image, cells)
    for one, other in zip(by_place(ours), by_place(theirs), strict=False):
        np.testing.assert_allclose(one, other, atol=2e-4)
    ranges = dict.fromkeys(quantized_layers(checkpoint.architecture), 4.0)
    graph = build_graph(checkpoint, profile(cells, precision='int8'), ranges, dense=dense)
    assert all(np.isfinite(value).all() for value in run(graph, image))


def by_place(outputs) -> list[np.ndarray]:
    keypoints = outputs[0][0].round(2)
    order = np.lexsort((keypoints[:, 0], keypoints[:, 1]))
    return [output[0][order] for output in outputs]


@pytest.mark.parametrize('variant', ['v0', 'v4', 'half', 'small'])
def test_sparse_last_convolution_is_the_dense_one(variant, image):
    """Over all cells, including the border, where the padding of the convolution counts."""
    checkpoint = random_checkpoint(variant)
    everything = profile_of_all(checkpoint)
    sparse = run(build_graph(checkpoint, everything, dense=False), image)
    dense = run(build_graph(checkpoint, everything, dense=True), image)
    np.testing.assert_allclose(sparse[0], dense[0], atol=1e-4)
    assert sparse[0].min() < 8  # keypoints in the outermost texels
    assert (sparse[0].max(axis=1) > np.array(SIZE) - 8).all()
    np.testing.assert_allclose(sparse[2], dense[2], atol=1e-5)


def test_graph_has_no_dense_last_convolution_unless_all_cells_are_kept():
    checkpoint = random_checkpoint('half')
    few = {node.name for node in build_graph(checkpoint, profile(100)).graph.node}
    assert 'convFbb' not in few and 'convFaa' in few
    int8 = profile(profile().cells, precision='int8')
    ranges = dict.fromkeys(
        ['conv1a', 'conv1b', 'conv2a', 'conv2b', 'conv3a', 'conv3b', 'conv4a', 'conv4b',
         'convFa', 'convFb', 'convFaa'], 4.0
    )  # fmt: skip
    assert 'convFbb' in {n.name for n in build_graph(checkpoint, int8, ranges).graph.node}


def test_dynamic_batch_gives_what_single_images_give(photographs):
    checkpoint = random_checkpoint('half')
    images = np.stack([prepare(photographs[n], SIZE)[0] for n in ('coffee', 'rocket', 'chelsea')])
    together = run(build_graph(checkpoint, profile(batch=None)), images)
    for i in range(3):
        alone = run(build_graph(checkpoint, profile()), images[i : i + 1])
        np.testing.assert_allclose(together[1][i], alone[1][0], atol=1e-6)
        near = np.abs(together[0][i] - alone[0][0]).max(axis=1) < 0.01
        assert near.mean() > 0.98  # near ties may swap
        np.testing.assert_allclose(together[2][i][near], alone[2][0][near], atol=1e-4)


def test_mono_graph_gives_what_gray_as_rgb_gives(image):
    gray = image[..., 1:2]
    checkpoint = random_checkpoint('half')
    mono = run(build_graph(checkpoint, profile(mono=True)), gray)
    colour = run(build_graph(checkpoint, profile()), np.repeat(gray, 3, axis=-1))
    np.testing.assert_allclose(mono[1], colour[1], atol=1e-5)


def test_batch_norm_is_folded_exactly(image):
    """The folded conv1a, compared with convolution and batch norm of torch."""
    checkpoint = random_checkpoint('half')
    weight, bias = fold(checkpoint)['conv1a']
    pixels = torch.from_numpy(image.astype(np.float32)).permute(0, 3, 1, 2)
    folded = torch.nn.functional.conv2d(
        pixels - 127.5, torch.from_numpy(weight), torch.from_numpy(bias), padding=1
    )
    with torch.inference_mode():
        wanted = KeyPointNet.from_checkpoint(checkpoint).conv1a((pixels / 255 - 0.5) * 0.225)
    torch.testing.assert_close(folded, wanted, atol=1e-5, rtol=1e-4)


def test_coordinates_are_float32_in_a_float16_graph():
    graph = build_graph(random_checkpoint('half'), profile(precision='fp16'))
    inferred = onnx.shape_inference.infer_shapes(graph, strict_mode=True, data_prop=True)
    types = {value.name: value.type.tensor_type.elem_type for value in inferred.graph.value_info}
    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    assert {types['conv1a'], types['convFaa'], types['convDb'], types['product']} == {half}
    for name in ('score_map', 'offsets', 'free_keypoints', 'places', 'fraction', 'patch_shares'):
        assert types[name] == single, name


@pytest.mark.parametrize('precision', ['fp32', 'fp16'])
@pytest.mark.parametrize('variant', list(VARIANTS))
def test_graph_is_valid_onnx(variant, precision):
    model = build_graph(random_checkpoint(variant), profile(precision=precision))
    onnx.checker.check_model(model, full_check=True)
    assert model.opset_import[0].version in (17, 18)


def test_metadata_tells_what_is_inside(tmp_path):
    checkpoint = random_checkpoint('half')
    path = tmp_path / 'model.onnx'
    onnx.save(build_graph(checkpoint, profile(mono=True)), path)
    exported = read_exported(path)
    assert exported.profile == profile(mono=True)
    assert exported.architecture == checkpoint.architecture
    assert exported.checkpoint_digest == checkpoint.digest()


def test_same_model_and_profile_give_the_same_bytes():
    """An engine that was built in advance must be found again."""
    checkpoint = random_checkpoint('half')
    graphs = [build_graph(checkpoint, profile()).SerializeToString() for _ in range(2)]
    assert graphs[0] == graphs[1]


def test_foreign_and_damaged_files_are_refused(tmp_path):
    node = onnx.helper.make_node('Relu', ['x'], ['y'])
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph([node], 'g', [value('x', 1, [1])], [value('y', 1, [1])])
    onnx.save(onnx.helper.make_model(graph), tmp_path / 'foreign.onnx')
    with pytest.raises(FileError, match='not one that `kp2d export`'):
        read_exported(tmp_path / 'foreign.onnx')
    ours = build_graph(random_checkpoint('half'), profile()).SerializeToString()
    (tmp_path / 'cut.onnx').write_bytes(ours[: len(ours) // 2])
    with pytest.raises(FileError, match='cut.onnx is not a readable ONNX file'):
        read_exported(tmp_path / 'cut.onnx')
    (tmp_path / 'text.onnx').write_text('hello')
    with pytest.raises(FileError, match='text.onnx'):
        read_exported(tmp_path / 'text.onnx')


@pytest.mark.parametrize(
    ('values', 'message'),
    [
        ({'width': 100}, 'width must be a multiple of 8'),
        ({'height': 16}, 'height must be a multiple of 8 and at least 24'),
        ({'top_k': 0}, 'top_k must be from 1 to 300'),
        ({'top_k': 301}, 'top_k must be from 1 to 300'),
        ({'batch': 0}, 'batch must be 1 or more'),
        ({'precision': 'fp8'}, "there is no precision 'fp8'"),
    ],
)
def test_impossible_profiles_are_refused(values, message):
    good = {'width': 160, 'height': 120, 'top_k': 100}
    with pytest.raises(ValueError, match=message):
        Profile(**{**good, **values})
