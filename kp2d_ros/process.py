"""The process of a node: spin until it is stopped, then end quickly."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import rclpy
import rclpy.utilities
from rclpy.executors import SingleThreadedExecutor
from rclpy.impl.implementation_singleton import rclpy_implementation as _rclpy

from kp2d_core.errors import FileError
from kp2d_core.threads import set_blas_threads

SWITCH = 1e-4  # seconds until the executor yields to a worker that waits
# glibc gives each group of threads its own heap. Every transition and compilation starts a thread,
# so freed memory would stay fragmented over many heaps.
M_ARENA_MAX, ARENAS = -8, 2
GRACE = 1.0  # seconds to end cleanly after the signal


def run_node(make_node: Callable[[], Any], arguments: Sequence[str] | None = None) -> int:
    """Run a node until SIGINT, SIGTERM, or its future `finished` is done with an exit code."""
    sys.setswitchinterval(SWITCH)
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS)
    # The threads of OpenBLAS wait for each other in a busy loop. If other processes need cores,
    # as on a robot, matching takes several times as long. It has a helper thread of its own.
    if 'OPENBLAS_NUM_THREADS' not in os.environ:
        set_blas_threads(1)
    # The handler of rclpy ends the context. Python's handler would also raise KeyboardInterrupt at
    # any point, even during the clean-up; the process would then end by a signal.
    signals: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
    try:
        rclpy.init(args=None if arguments is None else ['', *arguments])
    except _rclpy.RCLError as error:  # such as a missing parameter file
        print(str(error).splitlines()[0], file=sys.stderr)
        return 2
    if signals:  # the signal came before rclpy listened
        rclpy.utilities.try_shutdown()
    node, executor, code = None, None, 0

    def finish(finished: Any) -> None:
        nonlocal code
        code = finished.result()
        rclpy.utilities.try_shutdown()

    threading.Thread(target=lambda: _leave_after_shutdown(lambda: code), daemon=True).start()
    try:
        node = make_node()
        executor = SingleThreadedExecutor()
        executor.add_node(node)
        node.finished.add_done_callback(finish)
        # Not spin_until_future_complete: it leaves a callback behind whenever it was woken.
        executor.spin()
    except (ValueError, FileError) as error:
        print(error, file=sys.stderr)
        code = 2
    except rclpy.exceptions.ParameterException as error:
        hint = ' (write 4.0, not 4)' if 'DOUBLE' in str(error) else ''
        print(f'{error}{hint}', file=sys.stderr)
        code = 2
    except Exception:  # among them ExternalShutdownException, and what the end cut short
        if rclpy.utilities.ok():
            code = 1
            traceback.print_exc()  # at once: the end may come before the interpreter says it
    finally:
        if executor is not None:
            executor.shutdown(0)
        if node is not None:
            node.destroy_node()
        rclpy.utilities.try_shutdown()
    if any(thread.name.startswith('kp2d ') for thread in threading.enumerate()):
        # The interpreter cannot end well under a thread in native code, which keeps the node, and
        # with it Fast DDS's shared memory: let go of it by force.
        vars(node).clear()
        gc.collect()
        _leave(code)
    return code


def _leave_after_shutdown(code: Callable[[], int]) -> None:
    """End the process even if a model is loading or a slow frame is being processed."""
    while rclpy.utilities.ok():
        time.sleep(0.1)
    time.sleep(GRACE)
    _leave(code())


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
