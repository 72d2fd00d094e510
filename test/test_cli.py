"""The command line as a user types it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from models import write_random_model

from kp2d_core.cli import COMMANDS, main
from kp2d_core.commands.extract import output_paths


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    return str(write_random_model(tmp_path_factory.mktemp('models')))


@pytest.fixture
def folder(tmp_path, photographs):
    folder = tmp_path / 'images'
    folder.mkdir()
    for name in ('astronaut', 'coffee'):
        cv2.imwrite(str(folder / f'{name}.png'), photographs[name][:160, :200, ::-1])
    return folder


def test_help_lists_every_command():
    result = subprocess.run(
        [sys.executable, '-m', 'kp2d_core.cli', '--help'],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    for name, summary in COMMANDS.items():
        assert name in result.stdout and summary.split()[0] in result.stdout


@pytest.mark.parametrize('name', COMMANDS)
def test_every_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, '--help'])
    assert stop.value.code == 0
    assert f'usage: kp2d {name}' in capsys.readouterr().out


def test_no_and_unknown_command(capsys):
    for arguments in ([], ['frobnicate']):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
    assert 'frobnicate' in capsys.readouterr().err


def test_extract(folder, tmp_path, model, capsys):
    out = tmp_path / 'features'
    arguments = ['extract', str(folder), '-o', str(out), '--overlay', '--model', model]
    assert main([*arguments, '--max-keypoints', '50']) == 0
    assert sorted(p.name for p in out.iterdir()) == [
        'astronaut.keypoints.png', 'astronaut.npz', 'coffee.keypoints.png', 'coffee.npz',
    ]  # fmt: skip
    with np.load(out / 'coffee.npz') as features:
        assert features['keypoints'].shape == (50, 2)
        assert features['descriptors'].shape == (50, 128)
        assert features['image_size'].tolist() == [200, 160]
    original = cv2.imread(str(folder / 'coffee.png'))
    overlay = cv2.imread(str(out / 'coffee.keypoints.png'))
    changed = (original != overlay).any(axis=2).mean()
    assert 0.01 < changed < 0.6
    assert '2 of 2 images' in capsys.readouterr().out


def test_extract_goes_on_after_a_bad_image(folder, tmp_path, model, capsys):
    (folder / 'broken.png').write_bytes(b'not an image')
    out = tmp_path / 'features'
    assert main(['extract', str(folder), '-o', str(out), '--model', model]) == 1
    captured = capsys.readouterr()
    assert 'skipped' in captured.err and 'broken.png' in captured.err
    assert '2 of 3 images' in captured.out
    assert (out / 'coffee.npz').is_file()


def test_extract_keeps_equal_names_of_different_folders_apart(folder, tmp_path, model):
    other = tmp_path / 'other'
    other.mkdir()
    (other / 'coffee.png').write_bytes((folder / 'coffee.png').read_bytes())
    out = tmp_path / 'features'
    assert main(['extract', str(folder), str(other), '-o', str(out), '--model', model]) == 0
    assert len(list(out.glob('*.npz'))) == 3
    drives = [Path(f'/kitti/{drive}/image_0/{n:06}.png') for drive in ('00', '01') for n in (0, 1)]
    assert output_paths(drives, out) == [
        out / f'{drive}_image_0_{n:06}.png.npz' for drive in ('00', '01') for n in (0, 1)
    ]


def test_extract_never_replaces_an_image(folder, model, capsys):
    before = {path: path.read_bytes() for path in folder.iterdir()}
    command = ['extract', str(folder), '-o', str(folder), '--overlay', '--model', model]
    assert main(command) == 0
    assert main(command) == 2  # the overlays count as images now
    assert 'an overlay would replace the image' in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before


def test_match_draws(folder, tmp_path, model, capsys):
    out = tmp_path / 'matches.png'
    image = str(folder / 'coffee.png')
    assert main(['match', image, image, '-o', str(out), '--model', model]) == 0
    assert cv2.imread(str(out)).shape == (160, 400, 3)
    assert 'inliers' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['extract', 'nowhere.png', '-o', 'x', '--model', 'nothing'], "no model 'nothing'"),
        (['match', 'nowhere.png', 'nowhere.png'], 'cannot read nowhere.png'),
        (['info', 'nowhere.safetensors'], 'nowhere.safetensors'),
        (['import-checkpoint', 'nowhere.ckpt'], 'cannot read nowhere.ckpt'),
    ],
)
def test_mistakes_get_one_sentence_and_exit_code_2(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ('option', 'value', 'message'),
    [
        ('--size', '640', 'WIDTHxHEIGHT'),
        ('--scales', '1,9', '1 to 4 different numbers from 0.1 to 4.0'),
        ('--scales', '1;2', "'1;2' cannot be used"),
    ],
)
def test_a_bad_size_is_explained(option, value, message, capsys):
    with pytest.raises(SystemExit):
        main(['extract', 'a.png', '-o', 'x', option, value])
    assert message in capsys.readouterr().err


def test_an_unwritable_format(folder, model, tmp_path, capsys):
    image = str(folder / 'coffee.png')
    assert main(['match', image, image, '-o', str(tmp_path / 'm.xyz'), '--model', model]) == 2
    assert "'.xyz'" in capsys.readouterr().err


def test_info(model, capsys):
    assert main(['info', model]) == 0
    described = capsys.readouterr().out
    assert '1.33 M parameters' in described and '128-d' in described
    assert main(['info']) == 0
    assert 'torch' in capsys.readouterr().out


def test_a_missing_library_is_named_with_what_to_install():
    """In a process in which torch cannot be imported, as on a machine that does not have it."""
    script = (
        'import sys\n'
        "sys.modules['torch'] = None\n"
        'from kp2d_core.cli import main\n'
        "sys.exit(main(['train', '--data', 'nowhere']))\n"
    )
    result = subprocess.run(
        [sys.executable, '-c', script], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert result.stderr.strip() == (
        "kp2d train: torch is not installed: pip install 'kp2d_ros[train]'"
    )
