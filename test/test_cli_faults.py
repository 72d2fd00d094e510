"""Whatever a user types or a file contains: one sentence and exit code 2, no traceback."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from full_disk import run_on_full_disk
from models import random_checkpoint, write_random_model
from safetensors.numpy import load_file, save_file

from kp2d_core.checkpoint import save_checkpoint
from kp2d_core.cli import main
from kp2d_core.export.graph import build_graph
from kp2d_core.export.source import Profile
from kp2d_core.training.config import TrainingConfig

LONG = 'x' * 5000


@pytest.fixture(scope='module')
def model(tmp_path_factory) -> Path:
    return write_random_model(tmp_path_factory.mktemp('models'))


@pytest.fixture
def here(tmp_path, monkeypatch, photographs) -> Path:
    monkeypatch.chdir(tmp_path)
    cv2.imwrite('a.png', photographs['coffee'][:64, :96])
    Path('dangling').symlink_to('nowhere/at/all')
    (tmp_path / 'photos').mkdir()
    for name in 'bcdefg':
        cv2.imwrite(f'photos/{name}.png', photographs['coffee'][:160, :160])
    return tmp_path


def sentence_of(arguments: list[str], capfd) -> str:
    """Return the message of the command, which must be one line (after argparse's usage)."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    error = capfd.readouterr().err
    assert code == 2, error
    assert 'Traceback' not in error and 'fault of kp2d' not in error
    lines = [line for line in error.strip().splitlines() if line.startswith('kp2d ')]
    assert len(lines) == 1 and len(lines[0]) < 6000
    return lines[0]


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ('extract a.png -o out --nms-radius 1e300', 'must be at most 256'),
        ('extract a.png -o out --nms-radius nan', 'must be a finite number'),
        ('extract a.png -o out --score-threshold inf', 'must be a finite number'),
        ('extract a.png -o out --score-threshold high', "'high' cannot be used: not a number"),
        ('extract a.png -o out --size 999999999x999999999', 'more than the 16 megapixels'),
        ('extract a.png -o out --size 1x1', 'must be 24 or more, got 1'),
        (f'extract a.png -o out --threads {"9" * 30}', 'must be at most 1024'),
        (f'extract a.png -o out --max-keypoints {"9" * 5000}', 'must be a whole number'),
        (f'extract {LONG}.png -o out', 'File name too long'),
        (f'info {LONG}', 'File name too long'),
        ('match dangling a.png', 'cannot read dangling'),
        ('extract a.png -o dangling', 'cannot write|File exists'),
        ('match a.png a.png --max-ratio nan', 'must be a finite number'),
        ('match a.png a.png --threshold 0', 'must be above 0'),
        ('evaluate --data photos --size 1x1', 'must be 24 or more, got 1'),
        ('evaluate --data photos --nms-radius -1', '--nms-radius: .* must be 0 or more'),
        ('evaluate --data photos --found-within 0', '--found-within: .* must be above 0'),
        ('evaluate --motion photos --gaps 99999999999', 'must be at most'),
        ('export --size 80000x80000', 'more than the 16 megapixels'),
        ('make-sequences photos -o out --seed -1', 'must be 0 or more'),
        ('make-sequences photos -o dangling/x --size 128x96', ''),
        ('train --data photos --minutes nan', 'must be a finite number'),
        ('train --data photos --minutes 0', 'must be above 0'),
        ('train --data photos --every inf', 'must be a finite number'),
        ('train --data photos --seed -1', 'must be 0 or more'),
        ('train --data photos --out dangling', 'cannot make the folder dangling'),
        ('train --data photos --set optimizer.learning_rate=.nan', 'not a finite number'),
        ('train --data photos --set optimizer.learning_rate=1e400', 'must be a finite number'),
        ('train --data photos --set pairs.short_side=[.inf,1]', 'not a finite number'),
        (f'train --data photos --set optimizer.batch={"9" * 300}', 'too large a number'),
        (f'train --data photos --set loss.io={"[" * 3000}', 'nested too deep'),
        ('train-words --data photos -o w --words 1', 'must be 2 or more'),
        ('train-words --data photos --seed -1', 'must be 0 or more'),
        ('import-checkpoint dangling', 'cannot read dangling'),
    ],
    ids=lambda value: value[:40],
)
def test_odd_arguments(arguments, message, here, capfd):
    assert re.search(message, sentence_of(arguments.split(' '), capfd))


@pytest.mark.parametrize(
    'text',
    [
        'optimizer: {learning_rate: .nan}',
        'optimizer: {learning_rate: 1e400}',
        f'optimizer: {{learning_rate: {10**400}}}',
        f'seed: {10**400}',
        'loss: ' + '[' * 3000,
        '&a {pairs: *a}',
        'pairs: {short_side: [.inf, .inf]}',
        'pairs: {? [1] : 2}',
        '1: 2',
        '- 1',
        '\x00\x01',
    ],
    ids=range(11),
)
def test_odd_recipes(text, here, capfd):
    Path('recipe.yaml').write_text(text)
    told = sentence_of(['train', '--data', 'photos', '--config', 'recipe.yaml'], capfd)
    assert 'recipe.yaml cannot be used' in told


def with_metadata(source: Path, target: Path, **changes: str) -> None:
    """Copy a model with changed metadata."""
    from safetensors import safe_open

    with safe_open(source, framework='np') as file:
        metadata = file.metadata() | changes
    save_file(load_file(source), target, metadata)


@pytest.mark.parametrize(
    'changes',
    [
        {'evaluation': '5'},
        {'evaluation': '[' * 100_000},
        {'evaluation': '{"cor1": Infinity}'},
        {'evaluation': f'{{"cor1": {10**400}}}'},
        {'step': '9' * 5000},
        {'step': 'many'},
        {'architecture': '[]'},
        {'architecture': '{"width": 1e400}'},
        {'architecture': '{"width": 16.0}'},
        {'architecture': '{"variant": 5}'},
        {'architecture': '{"cross_border": 5}'},
        {'architecture': '[' * 100_000},
    ],
    ids=range(12),
)
def test_odd_words_in_a_model_file(changes, here, model, capfd):
    with_metadata(model, here / 'odd.safetensors', **changes)
    for command in ('info odd.safetensors', 'extract a.png -o out --model odd.safetensors'):
        told = sentence_of(command.split(), capfd)
        assert 'odd.safetensors is not a readable safetensors model' in told


@pytest.mark.parametrize(
    'text',
    ['5', '[]', '{"format": "kp2d-int8-1"}', '{"format": 5}', 'NaN', '[' * 100_000, '\xff', '']
    + [json.dumps({'format': 'kp2d-int8-1', 'ranges': value}) for value in (5, [], {})],
    ids=range(11),
)
def test_odd_int8_ranges(text, here, model, capfd):
    save_checkpoint(here / 'm.safetensors', random_checkpoint('half', 0))
    Path('m.int8.json').write_text(text)
    told = sentence_of('extract a.png -o o --model m.safetensors --precision int8'.split(), capfd)
    assert 'm.int8.json' in told


@pytest.fixture(scope='module')
def graph() -> bytes:
    return build_graph(random_checkpoint('half', 0), Profile(64, 96, 20)).SerializeToString()


@pytest.mark.parametrize('runtime', ['openvino', 'onnxruntime'])
@pytest.mark.parametrize('damage', ['operator', 'shape', 'output', 'truncated weight'])
def test_a_damaged_graph_with_intact_metadata(runtime, damage, graph, here, capfd):
    import onnx

    changed = onnx.load_model_from_string(graph)
    if damage == 'operator':
        changed.graph.node[5].op_type = 'Convolve'
    elif damage == 'shape':
        changed.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 63
    elif damage == 'output':
        del changed.graph.output[1]
    else:
        weight = max(changed.graph.initializer, key=lambda tensor: len(tensor.raw_data))
        weight.raw_data = weight.raw_data[:100]
    Path('odd.onnx').write_bytes(changed.SerializeToString())
    told = sentence_of(f'extract a.png -o o --model odd.onnx --runtime {runtime}'.split(), capfd)
    assert 'odd.onnx' in told and runtime in told


@pytest.mark.parametrize(
    'profile',
    [
        {'height': 64, 'width': 96.0, 'top_k': 20},
        {'height': 64, 'width': '96', 'top_k': 20},
        {'height': 1 << 20, 'width': 1 << 20, 'top_k': 20},
        {'height': 64, 'width': 96, 'top_k': 20, 'batch': 1 << 40},
        {'height': 64, 'width': 96, 'top_k': None},
        {'height': 64, 'width': 96, 'top_k': 20, 'cell': 0},
        {'height': 64, 'width': 96, 'top_k': 20, 'mono': 5, 'precision': []},
        {'height': 64},
        5,
    ],
    ids=range(9),
)
def test_odd_words_in_an_exported_file(profile, graph, here, capfd):
    import onnx

    changed = onnx.load_model_from_string(graph)
    for entry in changed.metadata_props:
        if entry.key == 'profile':
            entry.value = json.dumps(profile)
    Path('odd.onnx').write_bytes(changed.SerializeToString())
    assert 'odd.onnx has damaged metadata' in sentence_of(['info', 'odd.onnx'], capfd)


def test_an_unwritable_engine_cache(here, model, capfd):
    pytest.importorskip('tensorrt_rtx')
    (here / 'engines').write_text('not a folder')
    command = f'export {model} --size 64x48 --compute-capability 86 --engines engines/x'
    assert 'cannot write engines/x' in sentence_of(command.split(), capfd)


def run(*arguments: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, '-m', 'kp2d_core.cli', *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, **options)


def test_a_full_disk_where_the_output_goes():
    with Path('/dev/full').open('w') as full:
        result = run('info', stdout=full)
    assert result.returncode == 2
    assert result.stderr.strip() == 'kp2d info: No space left on device'


def test_a_full_disk_where_files_go(here, model):
    """Every command that writes; none leaves a partial file."""
    full = here / 'full'
    commands = {
        'extract': f'extract photos -o {full}/e --overlay --model {model}',
        'match': f'match photos/b.png photos/c.png -o {full}/m.png --model {model}',
        'export': f'export {model} -o {full}/m.onnx --size 64x48',
        'engine': f'export {model} --size 64x48 --compute-capability 86 --engines {full}/x',
        'make-sequences': f'make-sequences photos -o {full}/s --size 128x96',
        'train-words': f'train-words --data photos -o {full}/w --words 2 --model {model}',
        'hloc': f'match photos -o {full}/h --format hloc --model {model}',
        'colmap': f'extract photos -o {full}/c.db --format colmap --model {model}',
        'map': f'map photos -o {full}/model --model {model}',
        'frames': f'map scene:room --every 100 -o {full}/scene --model {model}',
        'evaluate': f'evaluate --robustness photos/b.png --model {model} --json {full}/j.json',
    }
    needs = {'engine': 'tensorrt_rtx', 'hloc': 'h5py'}
    needs |= dict.fromkeys(('colmap', 'map', 'frames'), 'pycolmap')
    for name, library in needs.items():
        if importlib.util.find_spec(library) is None:
            del commands[name]
    script = (
        'import sys, os\nfrom pathlib import Path\nfrom kp2d_core.cli import main\n'
        f'Path({str(full)!r}, "filling").write_bytes(bytes(14_000))\n'
        f'for name, command in {commands!r}.items():\n'
        '    print(name, main(command.split()), flush=True)\n'
        f'print([str(p) for p in Path({str(full)!r}).rglob("*") if p.stat().st_size == 0 '
        'and p.is_file()])\n'
    )
    result = run_on_full_disk([sys.executable, '-c', script], full, '16k')
    codes = dict(line.split() for line in result.stdout.splitlines() if line.count(' ') == 1)
    assert codes == dict.fromkeys(commands, '2'), result.stderr
    told = [line for line in result.stderr.splitlines() if line.startswith('kp2d ')]
    assert len(told) == len(commands) and 'Traceback' not in result.stderr
    assert all('cannot write' in line for line in told)
    assert all('No space left on device' in line or 'MB are left' in line for line in told)
    assert result.stdout.splitlines()[-1] == '[]'


def test_a_reader_that_has_seen_enough():
    reading, writing = os.pipe()
    os.close(reading)
    result = run('info', stdout=writing)
    os.close(writing)
    assert result.returncode == 0 and result.stderr == ''


def test_memory_that_runs_out(here):
    """A real limit on the address space, and an image that does not fit under it."""
    cv2.imwrite('large.png', np.zeros((6000, 10000, 3), np.uint8))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (700 << 20, 700 << 20))

    environment = os.environ | {'OPENBLAS_NUM_THREADS': '1', 'OMP_NUM_THREADS': '1'}
    result = run('match', 'large.png', 'large.png', preexec_fn=limit, env=environment)
    assert result.returncode == 2
    lines = result.stderr.strip().splitlines()
    assert lines[-1].startswith('kp2d match: ') and 'memory' in lines[-1].lower()
    assert 'Traceback' not in result.stderr


def test_a_fault_of_ours_is_told_with_what_to_report(here, monkeypatch, capfd):
    """In a process where a part of the package is broken."""
    script = (
        'import sys, kp2d_core.commands.info as info\n'
        'def run(args): return {}["nothing"]\n'
        'info.run = run\n'
        'from kp2d_core.cli import main\n'
        "sys.exit(main(['info', 'small']))\n"
    )
    result = subprocess.run(
        [sys.executable, '-c', script], capture_output=True, text=True, timeout=60,
        env=os.environ | {'TMPDIR': str(here)},
    )  # fmt: skip
    assert result.returncode == 2
    assert result.stderr.startswith("kp2d info: KeyError: 'nothing'. This is a fault of kp2d")
    assert len(result.stderr.strip().splitlines()) == 1
    (kept,) = here.glob('kp2d-fault-*.txt')
    assert str(kept) in result.stderr
    text = kept.read_text()
    assert 'Traceback' in text and "arguments: ['info', 'small']" in text
    debugging = subprocess.run(
        [sys.executable, '-c', script], capture_output=True, text=True, timeout=60,
        env=os.environ | {'KP2D_DEBUG': '1'},
    )  # fmt: skip
    assert 'Traceback' in debugging.stderr and debugging.returncode == 1


def test_every_number_of_a_recipe_is_checked():
    """By type, wherever it is: all values pass the same check."""
    from kp2d_core.training.recipes import config_from_dict

    def leaves(values, path=()):
        for name, value in values.items():
            if isinstance(value, dict):
                yield from leaves(value, (*path, name))
            elif isinstance(value, float | int) and not isinstance(value, bool):
                yield (*path, name)

    found = list(leaves(TrainingConfig().to_dict()))
    assert len(found) > 40
    for path in found:
        for value in (float('nan'), float('inf'), 10**400, 'text', None, [1]):
            document = value
            for name in reversed(path):
                document = {name: document}
            with pytest.raises(ValueError):
                config_from_dict(document)
