"""`kp2d bench node`: its figures and what they are made of."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

pytest.importorskip('rclpy')

from robot import new_domain


def test_bench_node_measures(tmp_path):
    """Briefly, for its figures to be there and to add up; speed is not judged here."""
    report = tmp_path / 'figures.json'
    done = subprocess.run(
        [sys.executable, '-m', 'kp2d_core.cli', 'bench', 'node', '--parts', 'overhead', 'camera',
         'soak', '--frames', '8', '--seconds', '3', '--soak', '4', '--domain',
         str(new_domain()), '--runtime', 'torch', '--threads', '1', '--json', str(report)],
        capture_output=True, text=True, timeout=150, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(report.read_text())
    overhead = figures['overhead']['with tracking']
    assert 0 < overhead['inference_p50_ms'] < overhead['latency_p50_ms']
    assert overhead['overhead_p50_ms'] > 0
    assert 0 < figures['camera']['rate_hz'] <= 31
    soak = figures['soak']
    assert soak['sent'] == soak['received'] + soak['lost'] and soak['processed'] > 3
    assert soak['threads'][0] == soak['threads'][1]
    assert 'overhead' in done.stdout and 'accounted for' in done.stdout


def test_rates_are_compared_window_by_window():
    """What else runs on the machine then slows down both."""
    from kp2d_ros.benchmark.stereo import Window, ratio_of

    one = [Window(rate, rate, 70.0, 0.1) for rate in (24.0, 6.0, 26.0)]
    two = [Window(rate, rate, 80.0, 0.1) for rate in (20.0, 5.0, 20.0)]
    assert ratio_of({'one node': one, 'two nodes': two}) == pytest.approx(1.2)


def test_processor_time_of_a_process():
    from kp2d_ros.benchmark.stereo import processor_time

    busy = 'import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()'
    with subprocess.Popen(
        [sys.executable, '-c', busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 0.25 < processor_time(process) < 3
        process.communicate(b'\n')
