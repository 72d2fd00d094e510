"""The process of a node: threads for matrices, its exit code, early signals."""

import os
import subprocess
import sys

import pytest

pytest.importorskip('rclpy')

from kp2d_core.threads import usable_cores

PATIENCE = 120  # seconds: on a busy machine the imports alone may take ten
ENDS = """
import atexit, os, signal, sys, time
from rclpy.node import Node
from rclpy.task import Future
from kp2d_ros.process import run_node

class Worker(Node):
    def __init__(self):
        super().__init__('worker')
        self.finished = Future()
        if sys.argv[1] == 'fails':
            self.finished.set_result(1)
        if sys.argv[1] == 'breaks':
            raise RuntimeError('broken')

if sys.argv[1] == 'told before it listens':
    import rclpy
    init = rclpy.init
    def late(**options):
        os.kill(os.getpid(), signal.SIGINT)
        init(**options)
    rclpy.init = late
atexit.register(time.sleep, 3)  # as native libraries may take their time
sys.exit(run_node(Worker, []))
"""


@pytest.mark.parametrize(
    ('how', 'code'), [('fails', 1), ('breaks', 1), ('told before it listens', 0)]
)
def test_the_exit_code_is_kept_and_an_early_signal_heard(domain, how, code):
    ended = subprocess.run(
        [sys.executable, '-c', ENDS, how], timeout=PATIENCE, capture_output=True, text=True,
        env={**os.environ, 'ROS_DOMAIN_ID': str(domain)},
    )  # fmt: skip
    assert ended.returncode == code
    assert ('RuntimeError: broken' if how == 'breaks' else '') in ended.stderr
    assert how == 'breaks' or ended.stderr == ''


THREADS = """
import sys
from rclpy.node import Node
from rclpy.task import Future
from kp2d_core import threads
from kp2d_ros.process import run_node

class Worker(Node):
    def __init__(self):
        super().__init__('worker')
        self.finished = Future()
        self.finished.set_result(0)
        print(*(blas.threads() for blas in threads.find_blas()))

sys.exit(run_node(Worker, []))
"""


@pytest.mark.parametrize(('asked', 'threads'), [(None, 1), ('2', min(2, usable_cores()))])
def test_matrices_are_multiplied_in_one_thread_unless_the_environment_says_otherwise(
    domain, asked, threads
):
    environment = {**os.environ, 'ROS_DOMAIN_ID': str(domain)}
    environment.pop('OPENBLAS_NUM_THREADS', None)
    if asked is not None:
        environment['OPENBLAS_NUM_THREADS'] = asked
    said = subprocess.run(
        [sys.executable, '-c', THREADS], timeout=PATIENCE, capture_output=True, text=True,
        env=environment, check=True,
    ).stdout.split()  # fmt: skip
    if not said:
        pytest.skip('NumPy does not use OpenBLAS here')
    assert {*map(int, said)} == {threads}
