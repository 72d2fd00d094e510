"""Extractors described by YAML files, run by the real ONNX Runtime and OpenVINO."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from kp2d_core.errors import FileError
from kp2d_core.evaluation.onnx_extractor import onnx_extractor, read_description

POINTS = np.array([[[0, 0], [31, 15], [10, 5]]], np.float32)
DESCRIPTORS = np.arange(1, 13, dtype=np.float32).reshape(1, 4, 3)  # D x N, not unit length


def write_model(
    folder, channels=3, size=('h', 'w'), points=POINTS, dtype=TensorProto.FLOAT, last=False
):
    """Keypoints and descriptors are constant; the scores are the input's mean times 1, 3, 2."""
    shape = [1, *size, channels] if last else [1, channels, *size]
    nodes = [
        helper.make_node('Cast', ['pixels'], ['real'], to=TensorProto.FLOAT),
        helper.make_node('ReduceMean', ['real'], ['mean'], keepdims=0),
        helper.make_node('Mul', ['mean', 'factors'], ['values']),
        helper.make_node('Identity', ['points'], ['kpts']),
        helper.make_node('Identity', ['vectors'], ['descriptors']),
    ]
    constants = {
        'factors': np.array([[1, 3, 2]], np.float32),
        'points': points,
        'vectors': DESCRIPTORS,
    }
    graph = helper.make_graph(
        nodes,
        'extractor',
        [helper.make_tensor_value_info('pixels', dtype, shape)],
        [
            helper.make_tensor_value_info('kpts', TensorProto.FLOAT, [1, 3, 2]),
            helper.make_tensor_value_info('values', TensorProto.FLOAT, [1, 3]),
            helper.make_tensor_value_info('descriptors', TensorProto.FLOAT, [1, 4, 3]),
        ],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid('', 17)], ir_version=8)
    onnx.save(model, folder / 'model.onnx')


def describe(folder, text):
    path = folder / 'extractor.yaml'
    path.write_text(f'model: model.onnx\nkeypoints: kpts\nscores: values\n{text}')
    return path


@pytest.fixture
def image():
    return np.full((16, 32, 3), (100, 150, 200), np.uint8)


@pytest.mark.parametrize('runtime', ['onnxruntime', 'openvino'])
def test_names_normalisation_and_layout(tmp_path, image, runtime):
    write_model(tmp_path)
    path = describe(tmp_path, f'image: pixels\nmean: 0.5\nstd: 0.25\nruntime: {runtime}\n')
    features = onnx_extractor(path, threads=1)(image)
    mean = (150 / 255 - 0.5) / 0.25
    assert features.scores == pytest.approx(np.array([3, 2, 1]) * mean, rel=1e-5)
    assert features.keypoints.tolist() == [[31, 15], [10, 5], [0, 0]]  # by score
    expected = DESCRIPTORS[0].T[[1, 2, 0]]
    expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    assert features.descriptors == pytest.approx(expected, abs=1e-6)
    assert features.image_size == (32, 16)


def test_gray_scale_and_no_scores(tmp_path, image):
    write_model(tmp_path, channels=1)
    gray = onnx_extractor(describe(tmp_path, 'scale: 1\n'))(image)
    assert gray.scores[-1] == pytest.approx(0.299 * 100 + 0.587 * 150 + 0.114 * 200, abs=1)
    unscored = onnx_extractor(describe(tmp_path, 'scores: null\n'))(image)
    assert unscored.keypoints.tolist() == POINTS[0].tolist()  # in the order given


@pytest.mark.parametrize(
    ('dtype', 'mean'), [(TensorProto.UINT8, 150), (TensorProto.FLOAT16, 150 / 255)]
)
@pytest.mark.parametrize('runtime', ['onnxruntime', 'openvino'])
def test_other_types_and_channels_last(tmp_path, image, dtype, mean, runtime):
    write_model(tmp_path, dtype=dtype, last=True)
    features = onnx_extractor(describe(tmp_path, f'runtime: {runtime}\n'))(image)
    assert features.scores == pytest.approx(np.array([3, 2, 1]) * mean, rel=1e-3)


def test_normalised_coordinates(tmp_path, image):
    write_model(tmp_path, points=np.array([[[-1, -1], [1, 1], [0, 0]]], np.float32))
    features = onnx_extractor(describe(tmp_path, 'coordinates: normalised\n'))(image)
    assert features.keypoints.tolist() == [[31, 15], [15.5, 7.5], [0, 0]]


@pytest.mark.parametrize(('size', 'text'), [((32, 64), ''), (('h', 'w'), 'multiple_of: 32\n')])
def test_sizes_that_the_model_wants(tmp_path, size, text):
    """Keypoints are in pixels of the given image, including the half-pixel shift."""
    write_model(tmp_path, size=size)
    image = np.full((16 if size[0] == 32 else 40, 32, 3), 100, np.uint8)
    features = onnx_extractor(describe(tmp_path, text))(image)
    scale = np.array([0.5, 0.5]) if size[0] == 32 else np.array([1, 40 / 32])
    assert features.keypoints[-1] == pytest.approx((0.5 * scale - 0.5), abs=1e-5)
    assert features.keypoints[0] == pytest.approx((np.array([31.5, 15.5]) * scale - 0.5), abs=1e-5)


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('keypoints: points\n', "no 'points': it has kpts, values, descriptors"),
        ('image: picture\n', "no 'picture': it has pixels"),
        ('model: other.onnx\n', 'there is no file'),
        ('colour: true\n', "unknown key 'colour'"),
        ('coordinates: metres\n', 'coordinates must be one of'),
        ('runtime: caffe\n', 'runtime must be one of onnxruntime, openvino'),
        ('model: other.xml\n', 'there is no file'),
        ('multiple_of: 0\n', 'multiple_of must be'),
        ('scale: much\n', 'cannot be used'),
        ('mean: {}\n', 'cannot be used'),
    ],
)
def test_what_is_wrong_is_said(tmp_path, text, message):
    write_model(tmp_path)
    with pytest.raises(FileError, match=message):
        onnx_extractor(describe(tmp_path, text))


def test_openvinos_own_format(tmp_path, image):
    import openvino

    write_model(tmp_path, size=(16, 32))
    openvino.save_model(openvino.convert_model(tmp_path / 'model.onnx'), tmp_path / 'model.xml')
    text = 'model: model.xml\nkeypoints: kpts\nscores: values\n'
    (tmp_path / 'own.yaml').write_text(f'{text}runtime: openvino\n')
    found = onnx_extractor(tmp_path / 'own.yaml')(image)
    wanted = onnx_extractor(describe(tmp_path, ''))(image)
    assert found.keypoints.tolist() == wanted.keypoints.tolist()
    assert found.scores == pytest.approx(wanted.scores, rel=1e-5)
    (tmp_path / 'own.yaml').write_text(text)
    with pytest.raises(FileError, match='is an OpenVINO file: ONNX Runtime cannot open it'):
        onnx_extractor(tmp_path / 'own.yaml')


def test_files_that_are_something_else(tmp_path):
    (tmp_path / 'list.yaml').write_text('- 1\n')
    with pytest.raises(FileError, match='needs at least `model`'):
        read_description(tmp_path / 'list.yaml')
    with pytest.raises(FileError, match='cannot read'):
        read_description(tmp_path / 'missing.yaml')
    (tmp_path / 'model.onnx').write_bytes(b'not a model')
    with pytest.raises(FileError, match='not a model that ONNX Runtime can open'):
        onnx_extractor(describe(tmp_path, ''))
    write_model(tmp_path, channels=5)
    with pytest.raises(FileError, match='does not take images'):
        onnx_extractor(describe(tmp_path, ''))
