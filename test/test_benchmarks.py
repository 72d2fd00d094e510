"""`kp2d bench` runs and reports plausible figures; speed itself is not tested."""

from __future__ import annotations

import json
import time

import numpy as np
import onnx
import pytest
from models import random_checkpoint

from kp2d_core.benchmarks.contestants import BASELINE, REPEATS, summary, time_in_turns
from kp2d_core.benchmarks.plain import AuthorsWay
from kp2d_core.cli import main
from kp2d_core.features import prepare
from kp2d_core.runtimes.torch import TorchRuntime


def test_bench_measures_all_runtimes_in_one_run(tmp_path, capsys):
    """And a network of other authors, here a single convolution."""
    value = onnx.helper.make_tensor_value_info
    kernel = onnx.numpy_helper.from_array(np.ones((4, 3, 3, 3), np.float32), 'kernel')
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node('Conv', ['image', 'kernel'], ['features'])],
        'other',
        [value('image', onnx.TensorProto.FLOAT, [1, 3, 'height', 'width'])],
        [value('features', onnx.TensorProto.FLOAT, None)],
        [kernel],
    )
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid('', 17)], ir_version=8
    )
    onnx.save(model, tmp_path / 'other.onnx')
    command = [
        'bench', '--models', 'small', '--sizes', '60x44', '--rounds', '1', '--threads', '1',
        '--top-k', '2000', '--beside', str(tmp_path / 'other.onnx'),
        '--json', str(tmp_path / 'figures.json'),
    ]  # fmt: skip
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert BASELINE in printed and 'small int8 openvino' in printed
    report = json.loads((tmp_path / 'figures.json').read_text())
    rows = report['sizes']['60x44']['rows']
    expected = {BASELINE, 'small fp32 torch', 'small int8 onnxruntime', 'SIFT'}
    expected |= {'other openvino', 'other onnxruntime'}
    assert expected <= set(rows)
    assert 'match 48 with 48 of small' in rows  # a cell each
    assert rows[BASELINE]['times_faster'] == 1
    row = rows['small int8 openvino']
    assert row['times_faster'] == pytest.approx(rows[BASELINE]['median_ms'] / row['median_ms'])
    assert 20 < row['peak_memory_mb'] < 4000
    assert row['first_result_warm_s'] > 0


def test_mistakes_are_told(tmp_path, capsys):
    (tmp_path / 'no.onnx').write_text('no')
    other = str(tmp_path / 'no.onnx')
    assert main(['bench', '--sizes', '64x48', '--quick', '--beside', other]) == 2
    assert 'not a model that' in capsys.readouterr().err
    assert main(['bench', '--runtimes', 'tpu']) == 2
    assert 'cannot be used here: tpu' in capsys.readouterr().err


def test_the_authors_way_finds_the_same(photographs):
    checkpoint = random_checkpoint('v4')
    image = prepare(photographs['coffee'], (96, 72))[0][None]
    found = AuthorsWay(checkpoint, 1).run(image, 108)
    wanted = TorchRuntime(checkpoint, threads=1).run(image, 108)
    np.testing.assert_allclose(found[1], wanted[1], atol=1e-5)
    orders = [np.lexsort(output[0][0].round(2).T) for output in (found, wanted)]
    np.testing.assert_allclose(found[2][0][orders[0]], wanted[2][0][orders[1]], atol=1e-4)


def test_time_is_measured_in_turns():
    calls = []

    def slow() -> None:
        calls.append('slow')
        time.sleep(0.02)

    times = time_in_turns({'slow': slow, 'fast': lambda: calls.append('fast')}, rounds=2)
    assert len(times['slow']) == len(times['fast']) == 2 * REPEATS
    assert calls[2:] == (['slow'] * (REPEATS + 1) + ['fast'] * (REPEATS + 1)) * 2
    figures = summary(times['slow'])
    assert 20 <= figures['fastest_ms'] <= figures['median_ms'] <= figures['p95_ms']
    assert summary(times['fast'])['median_ms'] < 10
