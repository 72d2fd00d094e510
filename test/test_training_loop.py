"""Training runs in real processes: exact resume, signals, a full disk, mistakes."""

from __future__ import annotations

import random
import re
import resource
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from training_runs import (
    SAVE_EVERY_STEP,
    TIMEOUT,
    command,
    finish,
    run,
    same_tensors,
    start,
    write_photographs,
)

from kp2d_core import KeypointDetector
from kp2d_core.checkpoint import load_checkpoint
from kp2d_core.cli import main
from kp2d_core.training.report import Table, read_table
from kp2d_core.training.state import read_state

STEPS = '24'


@pytest.fixture(scope='module')
def data(tmp_path_factory, photographs) -> Path:
    return write_photographs(tmp_path_factory.mktemp('training') / 'photographs', photographs)


@pytest.fixture(scope='module')
def finished(tmp_path_factory, data) -> Path:
    """A run that was never interrupted."""
    out = tmp_path_factory.mktemp('finished') / 'run'
    code, output = run(command(data, out, '--steps', STEPS))
    assert code == 0, output
    return out


def wait_for_step(state: Path, step: int, process) -> None:
    """Wait until the state on disk has reached this step."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        if state.exists() and read_state(state)[1].step >= step:
            return
        assert process.poll() is None, finish(process)[1]
        time.sleep(0.01)
    raise AssertionError('no state was written in time')


def test_tables_survive_any_number_of_kills(tmp_path):
    path = tmp_path / 'metrics.csv'
    Table(path, 0).add({'step': 2, 'loss': 1.0})
    for _ in range(3):  # killed each time before the next row
        table = Table(path, 1)
    table.add({'step': 2, 'loss': 0.5})
    assert path.read_text().splitlines() == ['step,loss', '2,0.5']
    path.write_text('step,loss\n2,0.5\nstep,loss\n4,0.25\n6,')
    assert [row['step'] for row in read_table(path)] == ['2', '4', '6']
    Table(path, 0).add({'step': 1, 'other': 3})
    assert path.read_text().splitlines() == ['step,other', '1,3']


def test_a_run_of_a_few_steps_leaves_its_files_and_resumes_without_being_told_the_data(
    data, tmp_path
):
    out, settings = tmp_path / 'run', ['report.log_every=20', 'report.validate_every=500']
    arguments = command(data, out, '--steps', '3', settings=settings)
    code, output = run(arguments, cwd=tmp_path)
    assert code == 0, output
    assert [row['step'] for row in read_table(out / 'metrics.csv')] == ['3']
    assert (out / 'curves.png').stat().st_size > 1000
    again = ['train', '--out', str(out), '--resume', '--steps', '5', '--quiet']
    code, output = run(again, cwd=tmp_path.parent)
    assert code == 0 and 'not the photographs' not in output, output
    assert [row['step'] for row in read_table(out / 'metrics.csv')] == ['3', '5']


def test_the_bar_tells_the_time_that_is_left(data, tmp_path):
    arguments = command(data, tmp_path / 'run', '--minutes', '0.05')
    arguments.remove('--quiet')
    code, output = run(arguments)
    assert code == 0, output
    told = re.findall(r'step (\d+), (\d\d:\d\d) left', output)
    assert len(told) > 1 and {left for _, left in told} <= {'00:03', '00:02', '00:01', '00:00'}


def test_curves_appear_while_a_run_goes_on(data, tmp_path):
    out = tmp_path / 'run'
    process = start(command(data, out, '--steps', '1000000'))
    deadline = time.monotonic() + TIMEOUT
    while not (out / 'curves.png').exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 128 + signal.SIGTERM


def test_a_run_leaves_models_tables_curves_and_pictures(finished, photographs):
    names = {path.name for path in finished.iterdir()}
    assert names >= {
        'state.safetensors', 'best.safetensors', 'last.safetensors',
        'metrics.csv', 'validation.csv', 'curves.png', 'tensorboard',
    }  # fmt: skip
    assert [int(row['step']) for row in read_table(finished / 'metrics.csv')] == [*range(2, 25, 2)]
    assert [int(row['step']) for row in read_table(finished / 'validation.csv')] == [8, 16, 24]
    best, last = (load_checkpoint(finished / f'{n}.safetensors') for n in ('best', 'last'))
    assert last.step == 24
    figures = read_table(finished / 'validation.csv')
    chosen = max(figures, key=lambda row: float(row['quality']))
    assert best.step == int(chosen['step'])
    assert best.evaluation['mscore'] == pytest.approx(float(chosen['mscore']), rel=1e-4)

    features = KeypointDetector.load(finished / 'best.safetensors', runtime='torch').detect(
        photographs['coffee'], working_size=(160, 120), max_keypoints=50
    )
    assert len(features) == 50 and np.isfinite(features.descriptors).all()


def test_tensorboard_has_scalars_and_pictures(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished / 'tensorboard')).Reload()
    assert {'train/location', 'train/recall', 'validation/mscore'} <= set(events.Tags()['scalars'])
    assert {'pair 0/keypoints', 'pair 0/scores', 'pair 0/matches'} <= set(events.Tags()['images'])
    assert [event.step for event in events.Scalars('validation/mscore')] == [8, 16, 24]


def test_killed_at_any_moment_and_resumed_it_ends_bit_identical(finished, data, tmp_path):
    out = tmp_path / 'run'
    process = start(command(data, out, '--steps', STEPS, settings=[SAVE_EVERY_STEP]))
    wait_for_step(out / 'state.safetensors', 5, process)
    time.sleep(random.random() * 0.3)
    process.kill()
    finish(process)
    assert 5 <= read_state(out / 'state.safetensors')[1].step < int(STEPS)
    code, output = run(command(data, out, '--steps', STEPS, '--resume'))
    assert code == 0, output
    assert same_tensors(out / 'state.safetensors', finished / 'state.safetensors')
    assert same_tensors(out / 'last.safetensors', finished / 'last.safetensors')
    assert same_tensors(out / 'best.safetensors', finished / 'best.safetensors')
    steps = [int(row['step']) for row in read_table(out / 'metrics.csv')]
    assert steps == sorted(set(steps)) and steps[-1] == int(STEPS)


def test_the_same_in_bfloat16_with_two_threads(data, tmp_path):
    """Like small.yaml on a processor with bfloat16."""
    settings = ['compute.precision=bfloat16', 'compute.threads=2', SAVE_EVERY_STEP]
    whole, out = tmp_path / 'whole', tmp_path / 'run'
    code, output = run(command(data, whole, '--steps', '10', settings=settings))
    assert code == 0, output
    process = start(command(data, out, '--steps', '10', settings=settings))
    wait_for_step(out / 'state.safetensors', 4, process)
    process.kill()
    finish(process)
    code, output = run(command(data, out, '--resume'))  # the budget is in the state
    assert code == 0, output
    assert same_tensors(out / 'state.safetensors', whole / 'state.safetensors')


def test_a_resumed_run_may_change_its_recipe(finished, data, tmp_path):
    out = tmp_path / 'run'
    shutil.copytree(finished, out)
    more = ['--set', 'loss.io=0', '--set', 'optimizer.kind=adam', '--val', str(data)]
    code, output = run(command(data, out, '--steps', '28', '--resume', *more))
    assert code == 0, output
    # None is held out any more.
    assert 'not the photographs of the first part of the run' in output
    assert (out / 'curves.png').stat().st_mtime > (finished / 'curves.png').stat().st_mtime
    assert read_state(out / 'state.safetensors')[1].best_step == 28  # on other photographs


@pytest.mark.parametrize(('number', 'code'), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_ends_the_run(data, tmp_path, number, code):
    out = tmp_path / 'run'
    process = start(command(data, out, '--steps', STEPS, settings=[SAVE_EVERY_STEP]))
    wait_for_step(out / 'state.safetensors', 3, process)
    process.send_signal(number)
    returned, output = finish(process)
    assert returned == code
    assert 'stopped at step' in output and 'Traceback' not in output
    step = read_state(out / 'state.safetensors')[1].step
    assert f'stopped at step {step};' in output


def test_a_full_disk_is_a_clear_error_and_the_last_state_survives(finished, data, tmp_path):
    """Files are limited to half the size of a state, which replaces a full disk."""
    out = tmp_path / 'run'
    shutil.copytree(finished, out)
    state = out / 'state.safetensors'
    before = state.read_bytes()
    limit = len(before) // 2
    code, output = run(
        command(data, out, '--steps', '26', '--resume'),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert code == 2, output
    assert 'cannot write' in output and 'Traceback' not in output
    assert state.read_bytes() == before
    assert {path.name for path in out.glob('.*')} <= {'.lock'}, 'the half-written file is gone'
    assert read_state(state)[1].step == int(STEPS)


def test_training_goes_on_from_a_model(finished, data, tmp_path, capsys):
    model = str(finished / 'best.safetensors')
    code, output = run(command(data, tmp_path / 'a', '--steps', '2', '--init', model))
    assert code == 0, output
    wider = ['network.width=8', 'network.descriptor_size=32']
    arguments = command(data, tmp_path / 'wide', '--steps', '2', '--init', model, settings=wider)
    code, output = run(arguments)
    assert code == 0, output
    assert load_checkpoint(tmp_path / 'wide' / 'last.safetensors').architecture.width == 8
    other = ['network.width=8']
    arguments = command(data, tmp_path / 'b', '--steps', '2', '--init', model, settings=other)
    assert main(arguments) == 2
    assert 'is a tiny network' in capsys.readouterr().err


def test_mistakes_are_a_sentence(finished, data, tmp_path, capsys):
    """In this process, because none of them starts the training."""
    empty = tmp_path / 'empty'
    empty.mkdir()
    broken = tmp_path / 'broken'
    broken.mkdir()
    (broken / 'a.png').write_bytes(b'no image')
    (tmp_path / 'file').touch()
    cases = {
        (str(tmp_path / 'absent'), str(tmp_path / 'x')): 'no folder or file',
        (str(empty), str(tmp_path / 'x')): 'there is no image in',
        (str(broken), str(tmp_path / 'x')): 'none of the 1 images',
        (str(data), str(finished)): 'holds a run',
        (str(data), str(tmp_path / 'file' / 'x')): 'cannot make the folder',
        (str(data), str(tmp_path / 'new'), '--resume'): 'nothing to resume',
        (str(data), str(tmp_path / 'new'), '--resume', '--config', 'v4'): 'do not give --config',
        (str(data), str(tmp_path / 'new'), '--set', 'los.io=1'): 'no setting',
        (str(data), str(tmp_path / 'new'), '--init', 'nothing'): "no model 'nothing'",
        (str(data), str(tmp_path / 'new'), '--set', 'compute.device=qpu'): 'no device',
    }
    for (where, out, *more), message in cases.items():
        assert main(['train', '--data', where, '--out', out, '--steps', '1', *more]) == 2
        assert message in capsys.readouterr().err


def test_a_state_of_another_network_is_refused(finished, data, tmp_path):
    arguments = ['train', '--data', str(data), '--out', str(finished), '--resume', '--steps', '30']
    before = (finished / 'state.safetensors').read_bytes()
    assert main([*arguments, '--set', 'network.width=8']) == 2
    assert (finished / 'state.safetensors').read_bytes() == before
