"""The parts of `kp2d bench train` work and agree; speed itself is not tested."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import pytest
import torch

from kp2d_core.benchmarks import training as bench
from kp2d_core.benchmarks.plain import plain_loss
from kp2d_core.threads import set_waiting
from kp2d_core.training.config import TrainingConfig
from kp2d_core.training.model import TrainingModel, computing_type
from kp2d_core.training.pairs import PairSource
from kp2d_core.training.photographs import Photographs
from kp2d_core.training.recipes import override


def test_the_plain_way_computes_the_same_loss(photographs):
    """The benchmark then compares equal work, and the batched losses are right."""
    config = override(
        TrainingConfig(),
        [
            'network.width=4', 'network.descriptor_size=16', 'network.dropout=0.0',
            'pairs.width=96', 'pairs.height=80', 'pairs.framing=crop', 'loss.io_points=40',
        ],
    )  # fmt: skip
    torch.manual_seed(0)
    model = TrainingModel(config).eval()  # else batch norm sees one image or all
    batch = PairSource(Photographs([photographs['coffee']]), config).batch(0, 3)
    ours, _ = model(batch.images, batch.source_to_target, 0)
    plain = plain_loss(model, batch.images, batch.source_to_target)
    assert plain.item() == pytest.approx(ours.item(), rel=1e-4)


COUNT_FAULTS = """
import resource, sys
import torch
from kp2d_core.threads import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(16 * 1024 * 1024)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
given_back = faults()
kept = faults() if keep_freed_memory() and faults() else -1
print(given_back, kept)
"""


def test_large_blocks_are_reused_once_asked_for():
    """Count the page faults of allocating and freeing 64 MB a few times, in a new process."""
    result = subprocess.run(
        [sys.executable, '-c', COUNT_FAULTS],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    given_back, kept = map(int, result.stdout.split())
    if kept < 0:
        pytest.skip('not the C library that this is about')
    assert kept < 200 < given_back


def test_both_ways_run_and_reply(tmp_path, capsys):
    config = tmp_path / 'tiny.yaml'
    config.write_text(
        'network: {variant: tiny, width: 4, descriptor_size: 16}\npairs: {framing: crop}\n'
    )
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    arguments = ['--config', str(config), '--batch', '1', '--steps', '1', '--threads', '1']
    assert bench.run(parser.parse_args(arguments)) == 0
    said = capsys.readouterr().out
    assert 'kp2d train' in said and 'waiting for data' in said
    assert 'in float32 (plain), in float32 (kp2d train)' in said  # the paper's, not auto


def test_how_threads_wait_is_set_unless_the_user_did(monkeypatch):
    for name in ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT'):
        monkeypatch.setenv(name, '')  # so that it is put back afterwards
        monkeypatch.delenv(name)
    set_waiting()
    assert os.environ['OMP_WAIT_POLICY'] == 'PASSIVE'
    assert int(os.environ.pop('GOMP_SPINCOUNT')) > 0
    os.environ['OMP_WAIT_POLICY'] = 'ACTIVE'
    set_waiting()
    assert os.environ['OMP_WAIT_POLICY'] == 'ACTIVE' and 'GOMP_SPINCOUNT' not in os.environ


def test_crops_have_the_pixels_of_whole_images():
    assert bench.CROPS * bench.CROP[0] * bench.CROP[1] == bench.WHOLE[0] * bench.WHOLE[1]


def test_automatic_precision_is_bfloat16_only_where_it_is_multiplied(monkeypatch):
    cpu = torch.device('cpu')
    for capabilities, expected in (
        ({'avx512_f': True, 'avx512_bf16': False}, torch.float32),
        ({'avx512_bf16': True}, torch.bfloat16),
        ({'amx_bf16': True}, torch.bfloat16),
    ):
        monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda c=capabilities: c, raising=False)
        computing_type.cache_clear()
        assert computing_type('auto', cpu) is expected
        assert computing_type('float32', cpu) is torch.float32
    monkeypatch.delattr(torch.cpu, 'get_capabilities')  # torch before 2.10
    computing_type.cache_clear()
    assert computing_type('auto', cpu) is torch.float32
    computing_type.cache_clear()


def test_mixed_precision_computes_nearly_the_same_loss(photographs):
    """The network in bfloat16, decoding and losses in float32."""
    settings = [
        'network.width=4', 'network.descriptor_size=16', 'network.dropout=0.0',
        'pairs.width=96', 'pairs.height=80', 'pairs.framing=crop', 'loss.io_points=40',
    ]  # fmt: skip
    losses = []
    for precision in ('float32', 'bfloat16'):
        config = override(TrainingConfig(), [*settings, f'compute.precision={precision}'])
        torch.manual_seed(0)
        model = TrainingModel(config)
        batch = PairSource(Photographs([photographs['coffee']]), config).batch(0, 3)
        keypoints = model.maps(batch.images).keypoints.detach()
        assert keypoints.dtype == torch.float32
        assert (keypoints - keypoints.round()).abs().mean() > 0.2  # not rounded to whole pixels
        loss, _ = model(batch.images, batch.source_to_target, 0)
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(torch.isfinite(gradient).all() for gradient in gradients)
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.2) and losses[1] != losses[0]
