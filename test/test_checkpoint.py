"""Model files: a round trip keeps everything, damaged files are refused with a sentence."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from models import random_checkpoint
from safetensors.numpy import save_file

from kp2d_core.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from kp2d_core.errors import FileError
from kp2d_core.files import atomic_write
from kp2d_core.networks import KeyPointNet


@pytest.fixture
def path(tmp_path):
    return tmp_path / 'model.safetensors'


def test_round_trip(path):
    saved = random_checkpoint('half')
    saved.step, saved.evaluation, saved.notes = 7, {'mscore': 0.5}, 'a test'
    save_checkpoint(path, saved)
    loaded = load_checkpoint(path)
    assert loaded.architecture == saved.architecture
    assert (loaded.step, loaded.evaluation, loaded.notes) == (7, {'mscore': 0.5}, 'a test')
    assert loaded.weights.keys() == saved.weights.keys()
    for name, value in saved.weights.items():
        assert (
            np.array_equal(loaded.weights[name], value)
            and loaded.weights[name].shape == value.shape
        )
    assert loaded.digest() == saved.digest()


def test_half_storage_takes_half_the_space_and_loads_as_float32(path, tmp_path):
    checkpoint = random_checkpoint('half')
    save_checkpoint(path, checkpoint, half=True)
    save_checkpoint(tmp_path / 'full.safetensors', checkpoint)
    ratio = path.stat().st_size / (tmp_path / 'full.safetensors').stat().st_size
    assert ratio < 0.52
    loaded = load_checkpoint(path).weights['conv1a.0.weight']
    assert loaded.dtype == np.float32
    assert np.allclose(loaded, checkpoint.weights['conv1a.0.weight'], rtol=1e-3, atol=1e-4)


def test_half_storage_of_large_variances_computes_the_same(path):
    """Float16 ends at 65504; a batch norm divides a factor of its channel out again."""
    checkpoint = random_checkpoint('half')
    weights = dict(checkpoint.weights)
    factors = np.float32(2.0) ** np.arange(-4, 12)
    for entry, factor in (
        ('0.weight', factors[:, None, None, None]),
        ('1.running_mean', factors),
        ('1.running_var', factors**2),
    ):
        weights[f'conv1b.{entry}'] = weights[f'conv1b.{entry}'] * factor
    large = replace(checkpoint, weights=weights)
    assert large.weights['conv1b.1.running_var'].max() > 1e6
    save_checkpoint(path, large, half=True)
    images = torch.rand(1, 3, 64, 80) - 0.5
    with torch.no_grad():
        found, wanted = (
            KeyPointNet.from_checkpoint(each)(images) for each in (load_checkpoint(path), large)
        )
    assert torch.allclose(found.scores, wanted.scores, atol=0.01)
    assert torch.allclose(found.keypoints, wanted.keypoints, atol=0.1)


def test_digest_tells_models_apart():
    digests = {
        random_checkpoint(v, seed).digest() for v in ('small', 'half', 'v4') for seed in (0, 1)
    }
    assert len(digests) == 6


def test_truncated_file(path):
    save_checkpoint(path, random_checkpoint('half'))
    path.write_bytes(path.read_bytes()[:100_000])
    with pytest.raises(FileError, match='not a readable safetensors model'):
        load_checkpoint(path)


@pytest.mark.parametrize('content', [b'', b'\x00' * 4, b'PK\x03\x04 zip', b'{"json": 1}' * 50])
def test_garbage(path, content):
    path.write_bytes(content)
    with pytest.raises(FileError, match='model'):
        load_checkpoint(path)


def test_foreign_safetensors(path):
    save_file({'x': np.zeros(3, np.float32)}, path)
    with pytest.raises(FileError, match='not a kp2d model'):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda w: w.pop('convDb.bias'), 'missing.*convDb.bias'),
        (lambda w: w.update(extra=np.zeros(1, np.float32)), 'not belong to this network.*extra'),
        (
            lambda w: w.update({'convDb.bias': np.zeros(2, np.float32)}),
            r'convDb.bias has shape \(2,\)',
        ),
        (lambda w: w.update({'convDb.bias': np.full(1, np.nan, np.float32)}), 'NaN'),
    ],
)
def test_wrong_weights(path, change, message):
    checkpoint = random_checkpoint('half')
    weights = dict(checkpoint.weights)
    change(weights)
    metadata = {
        'format': 'kp2d',
        'architecture': json.dumps(checkpoint.architecture.to_dict()),
    }
    save_file(weights, path, metadata)
    with pytest.raises(FileError, match=message):
        load_checkpoint(path)


@pytest.mark.parametrize(
    'architecture', ['not json', '[1, 2]', '{"width": "wide"}', '{"depth": 1}']
)
def test_broken_metadata(path, architecture):
    weights = random_checkpoint('half').weights
    save_file(weights, path, {'format': 'kp2d', 'architecture': architecture})
    with pytest.raises(FileError, match='model.safetensors'):
        load_checkpoint(path)


def test_missing_file_and_unknown_name(tmp_path):
    with pytest.raises(FileError, match='no file'):
        load_checkpoint(tmp_path / 'none.safetensors')
    with pytest.raises(FileError, match="no model 'tiny'"):
        find_checkpoint('tiny')


def test_a_full_disk_leaves_the_old_file(path):
    """A limit of the file size replaces a full disk: the write fails half-way."""
    save_checkpoint(path, random_checkpoint('half'))
    before = path.read_bytes()
    script = (
        'import resource, signal, sys\n'
        'from kp2d_core.checkpoint import load_checkpoint, save_checkpoint\n'
        'from kp2d_core.errors import FileError\n'
        f'checkpoint = load_checkpoint({str(path)!r})\n'
        'signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n'
        'resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))\n'
        'try:\n'
        f'    save_checkpoint({str(path)!r}, checkpoint)\n'
        'except FileError as error:\n'
        '    sys.exit(f"refused: {error}")\n'
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1_000_000
    result = subprocess.run(
        [sys.executable, '-c', script], capture_output=True, text=True, timeout=60
    )
    assert 'refused: cannot write' in result.stderr
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_only_regular_files_are_replaced(tmp_path):
    os.mkfifo(tmp_path / 'pipe')
    with pytest.raises(FileError, match='not a regular file'), atomic_write(tmp_path / 'pipe'):
        pass
    assert (tmp_path / 'pipe').is_fifo()
    (tmp_path / 'link').symlink_to(tmp_path / 'file')
    with atomic_write(tmp_path / 'link') as temporary:
        temporary.write_text('new')
    assert (tmp_path / 'link').is_symlink() and (tmp_path / 'file').read_text() == 'new'
    (tmp_path / 'loop').symlink_to(tmp_path / 'loop')
    for impossible in ('loop', 'x' * 300):
        with pytest.raises(FileError, match='cannot write'), atomic_write(tmp_path / impossible):
            pass


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(FileError, match='cannot write'):
        save_checkpoint(tmp_path / 'file' / 'model.safetensors', random_checkpoint('half'))
