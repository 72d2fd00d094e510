"""The ablation: V0 to V4 really train, stop and continue, and end in one table."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import pytest
from training_runs import TIMEOUT, finish, run, same_tensors, start, write_photographs

from kp2d_core.benchmarks.ablation import BATCH8, VARIANTS
from kp2d_core.training.recipes import find_recipe, load_config, override
from kp2d_core.training.state import read_state

TINY = [
    'network.width=4', 'network.descriptor_size=16', 'pairs.width=64', 'pairs.height=64',
    'loss.io_points=20', 'optimizer.batch=2', 'compute.threads=1', 'compute.device=cpu',
    'report.log_every=5', 'report.checkpoint_minutes=0',
]  # fmt: skip


@pytest.fixture(scope='module')
def data(tmp_path_factory, photographs) -> Path:
    return write_photographs(tmp_path_factory.mktemp('ablation') / 'photographs', photographs)


def command(data: Path, out: Path, *more: str) -> list[str]:
    settings = [f'--set={value}' for value in TINY]
    return ['bench', 'ablation', '--data', str(data), '--out', str(out), '--steps', '20',
            '--seeds', '1', '--quiet', *settings, *more]  # fmt: skip


def test_it_stops_continues_and_ends_in_the_table(data, tmp_path):
    out, whole = tmp_path / 'stopped', tmp_path / 'whole'
    process = start(command(data, out))
    deadline = time.monotonic() + TIMEOUT
    while not (out / 'v1-1' / 'state.safetensors').exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 128 + signal.SIGTERM, output
    assert not (out / 'v4-1').exists()

    code, output = run(command(data, out))
    assert code == 0, output
    assert 'v0-1:' not in output  # it had finished
    code, plain = run(command(data, whole))
    assert code == 0, plain
    for variant in VARIANTS:
        assert read_state(out / f'{variant}-1' / 'state.safetensors')[1].step == 20
        last = Path(f'{variant}-1') / 'last.safetensors'
        assert same_tensors(out / last, whole / last), variant
    table = (out / 'table.md').read_text()
    for row in ('V0, seed 1', '**V4, mean**', 'SIFT', "paper's KP2D V3, full HPatches"):
        assert row in table
    assert '0.544' in table  # the paper's matching score of V4
    assert table == (whole / 'table.md').read_text()

    for variant in VARIANTS:  # the figures outlive the weights
        shutil.rmtree(out / f'{variant}-1')
    code, output = run(command(data, out, '--set=compute.threads=2'))
    assert code == 0 and 'v0-1:' not in output, output
    assert table == (out / 'table.md').read_text()

    code, output = run(command(data, out, '--strict'))
    assert code == 2 and 'other settings' in output


def test_its_two_changes_are_those_of_v4_batch8():
    wanted = load_config(find_recipe('v4-batch8'))
    assert override(load_config(find_recipe('v4')), [*BATCH8]) == wanted


def test_some_runs_can_be_chosen(data, tmp_path):
    code, output = run(command(data, tmp_path, '--runs', 'v2-1'))
    assert code == 0, output
    table = (tmp_path / 'table.md').read_text()
    assert 'V2, seed 1' in table and 'V0' not in table.replace("paper's KP2D V0", '')
    code, output = run(command(data, tmp_path, '--runs', 'v2-7'))
    assert code == 2 and "'v2-7' is not one of the runs" in output
