"""Several processes (gloo): the same gradient as one process, and no hang if one dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from training_runs import TIMEOUT, command, environment, finish, write_photographs

from kp2d_core.training.state import read_state

TORCHRUN = [
    sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node=2',
    '--rdzv-backend=c10d', '--rdzv-endpoint=127.0.0.1:0', '--local-addr=127.0.0.1',
]  # fmt: skip

# Batch norm uses its running statistics: with those of the batch, two halves would differ from
# the whole. Everything else is as in training: pairs, losses, IO-Net, averaging.
GRADIENTS = """
import os
import sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from kp2d_core.training.config import TrainingConfig
from kp2d_core.training.recipes import override
from kp2d_core.training.distributed import join_processes
from kp2d_core.training.model import TrainingModel
from kp2d_core.training.pairs import BatchStream, PairSource
from kp2d_core.training.photographs import Photographs, find_photographs

data, out, *settings = sys.argv[1:]
WRAPPED = 'WRAPPED' in os.environ
config = override(TrainingConfig(), [*settings, 'network.dropout=0.0', 'optimizer.batch=4'])
photographs = Photographs(find_photographs([Path(data)]))

def gradients(processes):
    torch.manual_seed(processes.rank)  # the first one's weights are shared
    model = TrainingModel(config).eval()
    processes.share(model)
    stream = BatchStream(
        PairSource(photographs, config), 3, rank=processes.rank, processes=processes.count
    )
    batch = next(stream)
    stream.close()
    called = model
    if WRAPPED:  # as on GPUs
        called = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    loss, _ = called(batch.images, batch.source_to_target, 0)
    loss.backward()
    if not WRAPPED:
        processes.average_gradients(model)
    if processes.rank == 0:
        save_file({n: p.grad.contiguous() for n, p in model.named_parameters()}, out)

def gloo_threads():
    names = [task.joinpath('comm').read_text() for task in Path('/proc/self/task').iterdir()]
    return [name for name in names if 'gloo' in name]

with join_processes('cpu') as processes:
    gradients(processes)
    during = gloo_threads()
if WRAPPED:
    os._exit(0)  # see `Processes.parallel`
assert processes.count == 1 or during, 'gloo is no longer recognised by its threads'
assert not gloo_threads(), 'these may abort the process while Python ends'
"""


@pytest.fixture(scope='module')
def data(tmp_path_factory, photographs) -> Path:
    return write_photographs(tmp_path_factory.mktemp('shared') / 'photographs', photographs)


def launch(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*TORCHRUN, *arguments],
        env={**environment(), 'GLOO_SOCKET_IFNAME': 'lo', **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize('variables', [{}, {'WRAPPED': '1'}], ids=['by hand', 'DDP'])
def test_two_processes_have_the_gradient_of_one_with_the_joined_batch(data, tmp_path, variables):
    from training_runs import TINY

    script = tmp_path / 'gradients.py'
    script.write_text(GRADIENTS)
    one, two = tmp_path / 'one.safetensors', tmp_path / 'two.safetensors'
    subprocess.run(
        [sys.executable, str(script), str(data), str(one), *TINY],
        env=environment(), check=True, timeout=TIMEOUT,
    )  # fmt: skip
    code, output = finish(launch(str(script), str(data), str(two), *TINY, **variables))
    assert code == 0, output
    alone, shared = load_file(one), load_file(two)
    assert alone.keys() == shared.keys()
    assert max(value.abs().max().item() for value in alone.values()) > 1e-3
    for name, value in alone.items():
        torch.testing.assert_close(shared[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_torchrun_trains_and_one_process_writes(data, tmp_path):
    out = tmp_path / 'run'
    code, output = finish(launch('-m', 'kp2d_core.cli', *command(data, out, '--steps', '4')))
    assert code == 0, output
    assert read_state(out / 'state.safetensors')[1].step == 4
    assert (out / 'last.safetensors').exists()


def test_a_resumed_run_needs_its_state_on_every_machine(data, tmp_path):
    """Two folders represent the disks of two machines."""
    first, second = tmp_path / 'first', tmp_path / 'second'
    code, output = finish(launch('-m', 'kp2d_core.cli', *command(data, first, '--steps', '2')))
    assert code == 0, output
    script = tmp_path / 'resume.py'
    script.write_text(
        'import os, sys\nfrom kp2d_core.cli import main\n'
        'sys.exit(main([*sys.argv[3:], "--out", sys.argv[1 + int(os.environ["RANK"])]]))\n'
    )
    resume = ['train', '--data', str(data), '--quiet', '--resume', '--steps', '4']
    code, output = finish(launch(str(script), str(first), str(second), *resume))
    assert code != 0 and 'on this machine: copy it from the first machine' in output
    second.mkdir()
    (second / 'state.safetensors').write_bytes((first / 'state.safetensors').read_bytes())
    code, output = finish(launch(str(script), str(first), str(second), *resume))
    assert code == 0, output
    assert read_state(first / 'state.safetensors')[1].step == 4
    code, output = finish(launch(str(script), str(first), str(second), *resume[:-1], '6'))
    assert code != 0 and 'is of step 2 here and of step 4 on the first machine' in output


def test_the_death_of_a_process_ends_the_run_with_a_message(data, tmp_path):
    out = tmp_path / 'run'
    settings = ['report.checkpoint_minutes=0', 'report.validate_every=1000000']
    process = launch(
        '-m', 'kp2d_core.cli', *command(data, out, '--steps', '1000000', settings=settings)
    )
    deadline = time.monotonic() + TIMEOUT
    while not (out / 'state.safetensors').exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    workers = [
        child for child in psutil.Process(process.pid).children()
        if child.environ().get('RANK') == '1'
    ]  # fmt: skip
    assert len(workers) == 1
    os.kill(workers[0].pid, signal.SIGKILL)
    code, output = finish(process)
    assert code != 0
    assert 'Signal 9 (SIGKILL)' in output  # torchrun's
    assert 'another process of the run has died' in output  # ours
    assert read_state(out / 'state.safetensors')[1].step >= 1  # what was saved is whole
