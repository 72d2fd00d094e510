"""The authors' .ckpt: files of the same structure are read, dangerous ones are refused."""

from __future__ import annotations

import os
import pickle
import pickletools
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from models import random_checkpoint
from yacs.config import CfgNode

from kp2d_core.checkpoint import load_checkpoint
from kp2d_core.cli import main
from kp2d_core.errors import FileError
from kp2d_core.reference_checkpoint import read_reference_checkpoint


def authors_config(**params: object) -> CfgNode:
    """Like the configuration inside the released files: nested, frozen, mixed values."""
    config = CfgNode()
    config.arch = CfgNode({'seed': 42, 'epochs': 50})
    config.model = CfgNode()
    config.model.params = CfgNode(
        {'use_color': True, 'do_upsample': True, 'do_cross': True, **params}
    )
    config.datasets = CfgNode({'train': CfgNode({'path': '/data', 'batch_size': 8})})
    config.freeze()
    return config


def write_ckpt(path, variant='v4', config=None, *, zip_format=True, prefix=''):
    weights = random_checkpoint(variant).weights
    state = {prefix + k: torch.from_numpy(v.copy()) for k, v in weights.items()}
    content = {'state_dict': state, 'config': config if config is not None else authors_config()}
    torch.save(content, path, _use_new_zipfile_serialization=zip_format)
    return weights


@pytest.mark.parametrize('zip_format', [True, False], ids=['zip', 'stream'])
def test_import_gives_the_same_weights(tmp_path, zip_format):
    path = tmp_path / 'v4.ckpt'
    weights = write_ckpt(path, zip_format=zip_format)
    checkpoint = read_reference_checkpoint(path)
    assert checkpoint.architecture.variant == 'v4'
    assert checkpoint.weights.keys() == weights.keys()
    assert all(np.array_equal(checkpoint.weights[k], v) for k, v in weights.items())


@pytest.mark.parametrize(
    ('params', 'variant'),
    [
        ({'do_upsample': False, 'do_cross': False}, 'v0'),
        ({'do_upsample': False}, 'v1'),
        ({}, 'v4'),
        ({'do_cross': False}, 'custom'),
        ({'keypoint_net_type': 'KeypointNet'}, 'v4'),
    ],
)
def test_the_variant_comes_from_the_configuration(tmp_path, params, variant):
    path = tmp_path / 'model.ckpt'
    write_ckpt(path, config=authors_config(**params))
    architecture = read_reference_checkpoint(path).architecture
    assert architecture.variant == variant
    assert architecture.cross_border == params.get('do_cross', True)
    assert architecture.upsample == params.get('do_upsample', True)


def test_command_line(tmp_path, capsys):
    path, output = tmp_path / 'v4.ckpt', tmp_path / 'v4.safetensors'
    write_ckpt(path, prefix='module.')  # as DataParallel saves
    assert main(['import-checkpoint', str(path), '-o', str(output)]) == 0
    assert load_checkpoint(output).notes == 'imported from v4.ckpt'
    assert '(v4)' in capsys.readouterr().out


class Attack:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.system, (f'touch {self.target}',)


@pytest.mark.parametrize('zip_format', [True, False], ids=['zip', 'stream'])
def test_a_malicious_file_is_refused_and_does_nothing(tmp_path, zip_format, capsys):
    path, target = tmp_path / 'evil.ckpt', tmp_path / 'owned'
    write_ckpt(path, config={'x': Attack(target)}, zip_format=zip_format)
    assert main(['import-checkpoint', str(path)]) == 2
    error = capsys.readouterr().err
    assert 'refused as unsafe' in error and 'system' in error
    assert not target.exists()
    assert list(tmp_path.iterdir()) == [path]
    # The file really is dangerous: unpickling runs its code.
    if not zip_format:
        script = f'import torch; torch.load({str(path)!r}, weights_only=False)'
        subprocess.run([sys.executable, '-c', script], timeout=60, check=False)
        assert target.exists()


def test_a_getattr_gadget_is_refused(tmp_path):
    path = tmp_path / 'evil.ckpt'
    payload = pickle.dumps({'state_dict': getattr})
    assert 'getattr' in ''.join(str(op) for op in pickletools.genops(payload))
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('archive/data.pkl', payload)
    with pytest.raises(FileError, match='builtins.getattr'):
        read_reference_checkpoint(path)


@pytest.mark.parametrize('share', [0.0, 0.01, 0.5, 0.999])
@pytest.mark.parametrize('zip_format', [True, False], ids=['zip', 'stream'])
def test_truncated(tmp_path, share, zip_format):
    path = tmp_path / 'v4.ckpt'
    write_ckpt(path, 'half', zip_format=zip_format)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(FileError, match='cannot be imported'):
        read_reference_checkpoint(path)


def test_wrong_shape_is_named(tmp_path):
    path = tmp_path / 'v4.ckpt'
    write_ckpt(path, 'half')
    with pytest.raises(FileError, match='conv1a.0.weight has shape'):
        read_reference_checkpoint(path)


@pytest.mark.parametrize(
    ('config', 'message'),
    [
        ({}, '--variant'),
        (authors_config(keypoint_net_type='KeypointResnet'), 'KeypointResnet'),
        (authors_config(use_color=False), 'gray'),
    ],
)
def test_configurations_that_cannot_be_used(tmp_path, config, message):
    path = tmp_path / 'model.ckpt'
    write_ckpt(path, config=config)
    with pytest.raises(FileError, match=message):
        read_reference_checkpoint(path)
    if not config:
        assert read_reference_checkpoint(path, 'v2').architecture.variant == 'v2'


def test_other_files(tmp_path):
    path = tmp_path / 'model.ckpt'
    for content in (b'hello', pickle.dumps([1, 2]), pickle.dumps({'state_dict': {'a': 1}})):
        path.write_bytes(content)
        with pytest.raises(FileError, match='cannot be imported'):
            read_reference_checkpoint(path)
    with pytest.raises(FileError, match='cannot read'):
        read_reference_checkpoint(tmp_path / 'none.ckpt')
    torch.save(torch.zeros(3), path)
    with pytest.raises(FileError, match='state_dict'):
        read_reference_checkpoint(path)


def test_a_tensor_that_reaches_beyond_its_storage(tmp_path):
    path = tmp_path / 'evil.ckpt'
    storage = torch.zeros(4)
    view = torch.as_strided(storage, (2, 2), (1, 2))
    torch.save({'state_dict': {'a': view}}, path)
    with pytest.raises(FileError, match='row by row'):
        read_reference_checkpoint(path)


def peak_memory(path) -> tuple[int, str]:
    """Return the additional MB that importing the file takes, and the message."""
    script = (
        'import resource, sys\n'
        'from kp2d_core.reference_checkpoint import read_reference_checkpoint\n'
        'peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10\n'
        'before = peak()\n'
        'try:\n'
        '    read_reference_checkpoint(sys.argv[1])\n'
        'except Exception as error:\n'
        '    print(peak() - before, type(error).__name__, error)\n'
    )
    result = subprocess.run(
        [sys.executable, '-c', script, str(path)], capture_output=True, text=True, check=True,
        timeout=60,
    )  # fmt: skip
    megabytes, _, sentence = result.stdout.partition(' ')
    return int(megabytes), sentence


def rezip(path, changed, compression) -> None:
    """The same file with some entries changed, or compressed, which torch never does."""
    with zipfile.ZipFile(path) as archive:
        entries = {each.filename: archive.read(each) for each in archive.infolist()}
    with zipfile.ZipFile(path, 'w', compression) as archive:
        for name, data in (entries | changed(entries)).items():
            archive.writestr(name, data)


@pytest.mark.parametrize(
    ('compression', 'message'),
    [(zipfile.ZIP_DEFLATED, 'it is compressed'), (zipfile.ZIP_STORED, 'not have its stated size')],
)
def test_a_zip_bomb_is_refused_before_it_is_read(tmp_path, compression, message):
    """A file of 2 MB took 3.3 GB."""
    path = tmp_path / 'bomb.ckpt'
    write_ckpt(path)

    def grow(entries):
        first = next(name for name in entries if '/data/' in name)
        return {first: bytes(300_000_000)}

    rezip(path, grow, compression)
    megabytes, sentence = peak_memory(path)
    assert sentence.startswith('FileError') and message in sentence
    assert megabytes < 100 + 2 * (path.stat().st_size >> 20)


def test_a_pickle_that_numbers_an_object_by_the_billion_is_refused(tmp_path):
    """For 10 bytes of pickle, Python allocates a table of twice as many entries of 8 bytes."""
    path = tmp_path / 'memo.ckpt'
    bomb = b'\x80\x02}r' + (1 << 28).to_bytes(4, 'little') + b'.'
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('archive/data.pkl', bomb)
    megabytes, sentence = peak_memory(path)
    assert 'not numbered consecutively' in sentence and megabytes < 200
    path.write_bytes(bomb)
    megabytes, sentence = peak_memory(path)
    assert 'not numbered consecutively' in sentence and megabytes < 200


def test_many_tensors_of_one_storage_are_refused_before_they_are_copied(tmp_path):
    path = tmp_path / 'shared.ckpt'
    tensor = torch.zeros(2_500_000)
    torch.save({'state_dict': {f'w{i}': tensor for i in range(500)}}, path)
    megabytes, sentence = peak_memory(path)
    assert 'its tensors are larger than the file' in sentence and megabytes < 200


def test_what_a_file_calls_its_network_is_told_in_a_line(tmp_path):
    laughs = ['ha']
    for _ in range(60):
        laughs = [laughs, laughs]  # 2**60 of them if they were written out
    path = tmp_path / 'laughs.ckpt'
    content = {'state_dict': {}, 'config': {'model': {'params': {'keypoint_net_type': laughs}}}}
    torch.save(content, path)
    with pytest.raises(FileError, match='only KeypointNet can be imported') as error:
        read_reference_checkpoint(path)
    assert len(str(error.value)) < 1000


def nested_twice(depth: int) -> bytes:
    """A tuple that holds another one twice, and so on: 2**depth values, 6 bytes per level."""
    levels = b''.join(b'q' + bytes([n]) + b'h' + bytes([n]) + b'\x86' for n in range(depth))
    return b')' + levels


@pytest.mark.parametrize(
    ('pickled', 'message'),
    [
        (b'}' + nested_twice(60) + b'Ns.', 'a tuple of more than 200 values'),  # a key
        (b'}' + nested_twice(60) + b'Q.', 'a tuple of more than 200 values'),  # a tensor's name
        (b'c__builtin__\nset\n]' + nested_twice(60) + b'a\x85R.', 'a tuple of more than 200'),
        (b'ctorch._utils\n_rebuild_parameter\n)\x85R.', 'a parameter has no tensor'),
        (b'0' * 10 + b'.', 'it has a POP'),
        (b'N2.', 'it has a DUP'),
        (b'K\x01' * 60_000 + b'.', 'it takes more than 50000 steps'),
        (b'ctorch._utils\n_rebuild_tensor_v2\nN}X\x05\0\0\0countNs\x86b.', 'it changes a name'),
        (b']' * 20_000 + b'a' * 19_999 + b'.', "no 'state_dict'"),  # deep, but only once
        (b'h\x07.', 'it is damaged'),
        (b'a.', 'it is damaged'),
    ],
    ids='key persistent set parameter pop dup steps name deep memo empty'.split(),
)
def test_a_pickle_that_builds_more_than_a_checkpoint_is_refused(tmp_path, pickled, message):
    """Hashing the first three took years; the one that changes a name damaged the next file."""
    path = tmp_path / 'bomb.ckpt'
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('archive/data.pkl', b'\x80\x02' + pickled)
    with pytest.raises(FileError, match=message):
        read_reference_checkpoint(path)
