"""`kp2d export`: files, engines, mistakes. int8 is in test_export_int8.py."""

from __future__ import annotations

import pytest
from models import write_random_model

from kp2d_core.cli import main
from kp2d_core.export.source import Profile, read_exported
from kp2d_core.runtimes.cuda import cuda_device


@pytest.fixture(scope='module')
def model(tmp_path_factory) -> str:
    return str(write_random_model(tmp_path_factory.mktemp('model')))


def test_writes_what_was_asked_for(model, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ['export', model, '--size', '160x120', '--batch', 'dynamic', '--mono']
    assert main([*command, '--precision', 'fp16', '--top-k', '77']) == 0
    exported = read_exported(tmp_path / 'half-0-160x120-fp16.onnx')
    assert exported.profile == Profile(120, 160, 77, None, True, 'fp16')
    printed = capsys.readouterr().out
    assert 'half-0-160x120-fp16.onnx: 160x120 mono, 77 keypoints, any batch, fp16' in printed
    assert 'the loss of quality with fp16 was not measured' in printed
    assert main(['info', 'half-0-160x120-fp16.onnx']) == 0
    assert 'exported half, 160x120 mono' in capsys.readouterr().out


def test_small_images_have_fewer_keypoints_than_the_default(model, tmp_path):
    output = tmp_path / 'tiny.onnx'
    assert main(['export', model, '-o', str(output), '--size', '64x48']) == 0
    assert read_exported(output).profile.top_k == 48


def test_without_a_name_it_takes_the_model_that_nodes_take(tmp_path, monkeypatch):
    pytest.importorskip('tensorrt_rtx')
    monkeypatch.chdir(tmp_path)
    command = ['export', '--size', '64x48', '--engines', 'engines']
    assert main(command) == 0
    assert read_exported('small-64x48-fp32.onnx').architecture.variant == 'small'
    (tmp_path / 'small-64x48-fp32.onnx').unlink()
    assert main([*command, '--compute-capability', '86']) == 0
    assert read_exported('small-64x48-fp32.onnx').architecture.variant == 'small'


def test_engines_are_built_ahead_and_only_once(model, tmp_path, capsys):
    pytest.importorskip('tensorrt_rtx')
    command = [
        'export', model, '-o', str(tmp_path / 'm.onnx'), '--size', '64x48', '--precision', 'fp16',
        '--engines', str(tmp_path / 'engines'), '--compute-capability', '86', '89',
    ]  # fmt: skip
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert printed.count('MB, built') == 2 and 'fp16 engine for sm_86, tensorrt_rtx' in printed
    assert len(list((tmp_path / 'engines').glob('*.engine'))) == 2
    assert main(command) == 0
    assert capsys.readouterr().out.count('in the cache already') == 2


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--size', '100x100'], '--size must be multiples of 8, such as 96x96'),
        (['--top-k', '4000', '--tensorrt'], '--top-k can be at most 3840, the limit of TensorRT'),
        (['--calibrate', 'nowhere'], '--calibrate is for --precision int8'),
        (['--size', '64x48', '--top-k', '49'], 'top_k must be from 1 to 48'),
        (['--precision', 'int8', '--calibrate', 'nowhere'], 'there is no folder nowhere'),
        (['--size', '64x48', '--compute-capability', '87'], 'for compute capability 87'),
    ],
)
def test_mistakes_get_one_sentence(model, tmp_path, arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    if '--compute-capability' in arguments:
        pytest.importorskip('tensorrt_rtx')
    assert main(['export', model, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and 'Traceback' not in error


def test_calibration_on_a_folder_without_images_is_refused(model, tmp_path, capsys):
    (tmp_path / 'notes.txt').write_text('no image')
    assert main(['export', model, '--precision', 'int8', '--calibrate', str(tmp_path)]) == 2
    assert f'there is no image in {tmp_path}' in capsys.readouterr().err


def test_tensorrt_without_a_device_says_what_to_do(model, tmp_path, capsys):
    if cuda_device().available:
        pytest.skip('this machine has a CUDA device')
    pytest.importorskip('tensorrt_rtx')
    assert main(['export', model, '-o', str(tmp_path / 'm.onnx'), '--tensorrt']) == 2
    assert 'name their GPUs: --compute-capability 86' in capsys.readouterr().err
