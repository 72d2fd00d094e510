"""The folder of a run: one run at a time, killed runs, full disks, damaged states."""

from __future__ import annotations

import json
import signal
import sys
import time

import pytest
from full_disk import run_on_full_disk
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from training_runs import command, environment, run, start, write_photographs

from kp2d_core.errors import FileError
from kp2d_core.files import MARK
from kp2d_core.training.state import read_state


@pytest.fixture(scope='module')
def data(tmp_path_factory, photographs):
    return write_photographs(tmp_path_factory.mktemp('data') / 'photographs', photographs)


@pytest.fixture(scope='module')
def finished(data, tmp_path_factory):
    """A run of one step."""
    out = tmp_path_factory.mktemp('runs') / 'run'
    assert run(command(data, out, '--steps', '1'))[0] == 0
    return out


def test_two_trainings_in_one_folder(data, tmp_path):
    """The second is refused at once; after the first is killed, the folder is usable."""
    out = tmp_path / 'run'
    never = 'report.checkpoint_minutes=99'  # no state that would tell that there is a run
    first = start(command(data, out, '--steps', '100000', settings=[never]))
    try:
        deadline = time.monotonic() + 60
        while not (out / 'metrics.csv').exists():
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        code, told = run(command(data, out, '--steps', '1'))
        assert code == 2
        assert told == f'kp2d train: another process is using {out}\n'
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    (out / f'.state.safetensors.killed{MARK}.safetensors').write_bytes(b'half of it')
    code, told = run(command(data, out, '--steps', '1'))
    assert code == 0, told
    assert not any(MARK in path.name for path in out.iterdir())


@pytest.mark.parametrize(
    ('room', 'what'),
    [('16k', 'tensorboard'), ('200k', 'state.safetensors')],
)
def test_a_full_disk(room, what, data, tmp_path):
    full = tmp_path / 'full'
    every = 'report.checkpoint_minutes=0' if room == '200k' else 'report.checkpoint_minutes=9'
    arguments = command(data, full / 'run', '--steps', '30', settings=[every])
    result = run_on_full_disk(
        [sys.executable, '-m', 'kp2d_core.cli', *arguments], full, room, env=environment()
    )
    assert result.returncode == 2
    (line,) = result.stderr.strip().splitlines()
    assert f'cannot write {full}/run/{what}: No space left on device' in line


@pytest.mark.parametrize(
    'change',
    [
        {'minutes': float('nan')},
        {'minutes': 'ten'},
        {'step': -5},
        {'step': 1.5},
        {'steps': 10**400},
        {'seconds': float('inf')},
        {'best': float('nan')},
        {'nothing': 1},
        {'best': None},
    ],
    ids=str,
)
def test_odd_words_in_a_state(change, finished, tmp_path):
    path = finished / 'state.safetensors'
    with safe_open(path, framework='np') as file:
        metadata = file.metadata()
    progress = json.loads(metadata['progress']) | change
    save_file(load_file(path), tmp_path / 'odd', metadata | {'progress': json.dumps(progress)})
    if change == {'best': None}:  # nothing was validated yet
        assert read_state(tmp_path / 'odd')[1].best == float('-inf')
        return
    with pytest.raises(FileError, match='odd cannot be read'):
        read_state(tmp_path / 'odd')
