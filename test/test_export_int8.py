"""int8: ranges, weights, equal results of all runtimes, loss of quality."""

from __future__ import annotations

import json

import numpy as np
import pytest
from models import random_checkpoint

from kp2d_core import KeypointDetector
from kp2d_core.checkpoint import Checkpoint, save_checkpoint, shipped_models
from kp2d_core.cli import main
from kp2d_core.errors import FileError
from kp2d_core.export.calibration import BINS, best_fraction, calibrate
from kp2d_core.export.graph import build_graph, with_unsigned_codes
from kp2d_core.export.quantization import (
    calibration_path,
    equalise,
    fold,
    load_calibration,
    quantize_weight,
)
from kp2d_core.export.source import ModelSource, Profile
from kp2d_core.features import prepare
from kp2d_core.runtimes.onnxruntime import OnnxRuntime
from kp2d_core.runtimes.openvino import OpenVINORuntime

SIZE = (320, 240)


def spread(variant: str) -> Checkpoint:
    """Random weights whose scores differ enough for their order to mean something."""
    checkpoint = random_checkpoint(variant)
    weights = {**checkpoint.weights, 'convDb.weight': checkpoint.weights['convDb.weight'] * 20}
    return Checkpoint(checkpoint.architecture, weights)


@pytest.fixture(scope='module')
def calibrated(photographs) -> dict[str, tuple[Checkpoint, dict[str, float]]]:
    images = [photographs[name] for name in ('chelsea', 'rocket', 'motorcycle_right')]
    models = {variant: spread(variant) for variant in ('half', 'small', 'v0')}
    return {name: (model, calibrate(model, images).ranges) for name, model in models.items()}


@pytest.mark.parametrize('runtime', [OpenVINORuntime, OnnxRuntime])
@pytest.mark.parametrize('dense', [False, True])
@pytest.mark.parametrize('variant', ['half', 'small', 'v0'])
def test_int8_says_of_each_cell_nearly_what_fp32_says(
    runtime, dense, variant, calibrated, photographs
):
    """All cells, because the order of untrained scores is random."""
    checkpoint, ranges = calibrated[variant]
    cell = checkpoint.architecture.cell
    cells = SIZE[0] * SIZE[1] // cell**2
    profile = Profile(SIZE[1], SIZE[0], cells, precision='int8', cell=cell)
    graph = build_graph(checkpoint, profile, ranges, dense=dense).SerializeToString()
    tested = runtime(ModelSource(checkpoint.architecture, 'int8', graph=graph, fixed=profile))
    reference = OnnxRuntime(ModelSource(checkpoint.architecture, 'fp32', checkpoint))
    image = prepare(photographs['astronaut'], SIZE)[0][None]
    found, wanted = tested.run(image, cells), reference.run(image, cells)
    distance = np.linalg.norm(found[0][0][:, None] - wanted[0][0][None], axis=2)
    near = distance.min(axis=0) < 0.5
    assert near.mean() > 0.97
    cosines = (found[2][0][distance.argmin(axis=0)] * wanted[2][0]).sum(axis=1)[near]
    assert np.median(cosines) > 0.995
    np.testing.assert_allclose(found[1][0], wanted[1][0], atol=0.05)


def test_openvino_convolves_in_int8(calibrated):
    import openvino

    checkpoint, ranges = calibrated['half']
    graph = build_graph(checkpoint, Profile(240, 320, 300, precision='int8'), ranges)
    core = openvino.Core()
    unsigned = with_unsigned_codes(graph.SerializeToString())
    # As the runtime does, for processors that have bfloat16 too.
    settings = {'INFERENCE_PRECISION_HINT': 'f32'}
    model = core.compile_model(core.read_model(unsigned), 'CPU', settings)
    kinds = {}
    for node in model.get_runtime_model().get_ops():
        info = node.get_rt_info()
        if 'Convolution' in str(info['layerType'].astype(str)):
            name = node.get_friendly_name().split('/')[0]
            kinds[name] = info['primitiveType'].astype(str).lower()
    layers = checkpoint.architecture.layers()
    assert set(kinds) == set(layers) - {'convFbb'}  # which is a product at the keypoints
    for name, kind in kinds.items():
        assert kind.endswith('f32' if layers[name].int8 == 'none' else 'i8'), (name, kind)


def test_unsigned_codes_give_the_same_numbers(calibrated, photographs):
    checkpoint, ranges = calibrated['half']
    profile = Profile(120, 160, 300, precision='int8')
    signed = build_graph(checkpoint, profile, ranges).SerializeToString()
    unsigned = with_unsigned_codes(signed)
    assert unsigned != signed
    image = prepare(photographs['coffee'], (160, 120))[0][None]
    outputs = [
        OnnxRuntime(ModelSource(checkpoint.architecture, 'int8', graph=graph, fixed=profile)).run(
            image, 300
        )
        for graph in (signed, unsigned)
    ]
    np.testing.assert_allclose(outputs[1][1], outputs[0][1], atol=0.01)
    order = [np.lexsort(output[0][0].round(1).T) for output in outputs]
    near = np.abs(outputs[0][0][0][order[0]] - outputs[1][0][0][order[1]]).max(axis=1) < 0.1
    assert near.mean() > 0.9  # a code may be rounded the other way


def test_weights_are_within_half_a_step():
    weight = fold(random_checkpoint('half'))['conv3a'].weight
    codes, scales = quantize_weight(weight)
    assert codes.dtype == np.int8 and np.abs(codes).max() == 127
    error = np.abs(codes * scales[:, None, None, None] - weight)
    assert (error <= scales[:, None, None, None] * 0.5001).all()


def test_equalised_network_is_the_same_network(calibrated, photographs):
    checkpoint, ranges = calibrated['half']
    convolutions = fold(checkpoint)
    changed, same_ranges = equalise(convolutions, ranges, checkpoint.architecture)
    assert same_ranges['convFb'] == same_ranges['conv3b'] == ranges['conv3b']
    factor = ranges['conv3b'] / ranges['convFb']
    assert abs(factor - 1) > 0.01  # else this shows nothing
    shuffled = len(convolutions['convFb'].bias) // 4
    np.testing.assert_allclose(
        changed['convFb'].bias / factor, convolutions['convFb'].bias, rtol=1e-5
    )
    np.testing.assert_allclose(
        changed['convFaa'].weight[:, :shuffled] * factor,
        convolutions['convFaa'].weight[:, :shuffled], rtol=1e-5,
    )  # fmt: skip
    np.testing.assert_array_equal(
        changed['convFaa'].weight[:, shuffled:], convolutions['convFaa'].weight[:, shuffled:]
    )


def test_clipping_gives_up_outliers_but_not_the_rest():
    flat = np.ones(BINS)
    assert best_fraction(flat) > 0.95
    outlier = np.zeros(BINS)
    outlier[: BINS // 4], outlier[-1] = 1e6, 1
    assert 0.24 < best_fraction(outlier) < 0.5


def test_ranges_are_kept_and_those_of_other_weights_refused(tmp_path, photographs):
    checkpoint = random_checkpoint('half')
    calibration = calibrate(checkpoint, [photographs['coffee']])
    calibration.save(tmp_path / 'ranges.json')
    again = load_calibration(tmp_path / 'ranges.json', checkpoint)
    assert again.ranges == calibration.ranges  # or engines built ahead would not be found
    with pytest.raises(FileError, match='int8 ranges of other weights'):
        load_calibration(tmp_path / 'ranges.json', random_checkpoint('half', seed=1))
    values = json.loads((tmp_path / 'ranges.json').read_text())
    for damaged in ('{', '{}', json.dumps({**values, 'ranges': {}}), json.dumps([1])):
        (tmp_path / 'damaged.json').write_text(damaged)
        with pytest.raises(FileError, match='does not hold int8 ranges'):
            load_calibration(tmp_path / 'damaged.json', checkpoint)
    values['ranges']['conv1a'] = 0
    (tmp_path / 'zero.json').write_text(json.dumps(values))
    with pytest.raises(FileError, match='must be above 0'):
        load_calibration(tmp_path / 'zero.json', checkpoint)


def test_calibration_without_images_is_refused():
    with pytest.raises(ValueError, match='at least one image'):
        calibrate(random_checkpoint('half'), [])


def test_command_calibrates_exports_and_tells_the_loss(tmp_path, photographs, capsys):
    import cv2

    folder = tmp_path / 'images'
    folder.mkdir()
    for name in ('coffee', 'chelsea'):
        cv2.imwrite(str(folder / f'{name}.png'), cv2.resize(photographs[name], (160, 120)))
    model = tmp_path / 'mine.safetensors'
    save_checkpoint(model, spread('half'))
    output = tmp_path / 'mine.onnx'
    command = ['export', str(model), '-o', str(output), '--size', '160x120', '--precision', 'int8']
    assert main(command) == 2
    assert 'int8 needs images: --calibrate FOLDER' in capsys.readouterr().err
    assert main([*command, '--calibrate', str(folder), '--top-k', '100']) == 0
    printed = capsys.readouterr().out
    assert '160x120 rgb, 100 keypoints, batch 1, int8' in printed
    assert 'repeatability' in printed and 'difference' in printed
    assert calibration_path(model).is_file()
    assert main(command) == 0  # the ranges are there now
    assert 'not measured: give --evaluate FOLDER' in capsys.readouterr().out
    found = KeypointDetector.load(output).detect(photographs['coffee'], max_keypoints=50)
    wanted = KeypointDetector.load(model, precision='int8').detect(
        photographs['coffee'], working_size=(160, 120), scales=(1,), max_keypoints=50
    )
    assert len(found) == len(wanted) == 50
    np.testing.assert_allclose(found.scores, wanted.scores, atol=1e-5)


@pytest.mark.parametrize('runtime', ['openvino', 'onnxruntime'])
@pytest.mark.parametrize('name', shipped_models())
def test_a_shipped_model_loses_little(name, runtime, shared_data):
    from kp2d_core.evaluation.hpatches import load_sequences
    from kp2d_core.evaluation.protocol import evaluate

    sequences = load_sequences(shared_data / 'hpatches_mini')
    means = {}
    for precision in ('fp32', 'int8'):
        detector = KeypointDetector.load(name, runtime=runtime, precision=precision)
        means[precision] = evaluate(detector.detect, sequences, size=SIZE, top_k=300).mean()
    for metric in ('repeatability', 'mscore'):
        assert abs(means['int8'][metric] - means['fp32'][metric]) <= 0.02, metric
