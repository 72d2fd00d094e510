"""A robot for tests: real nodes in real processes over DDS, in a domain of their own."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

ROOT = Path(__file__).parents[1]
os.environ['FASTRTPS_DEFAULT_PROFILES_FILE'] = str(ROOT / 'config' / 'fastdds.xml')
os.environ['ROS_AUTOMATIC_DISCOVERY_RANGE'] = 'LOCALHOST'

import rclpy  # noqa: E402
import rclpy.context  # noqa: E402
from diagnostic_msgs.msg import DiagnosticArray  # noqa: E402
from rclpy.executors import SingleThreadedExecutor  # noqa: E402
from rclpy.node import Node  # noqa: E402
from sensor_msgs.msg import Image  # noqa: E402

from kp2d_ros.clouds import bytes_of  # noqa: E402

PATIENCE = 60.0  # seconds; never reached on a machine that is merely busy


_domains = itertools.count(13 * os.getppid())
# `pytest -n 2`: two halves of the tests at once, each with domains of its own.
_HALF = 50 * (os.environ.get('PYTEST_XDIST_WORKER', 'gw0') != 'gw0')


def new_domain() -> int:
    """Not used before in this run, unlikely to be in use by another run on this machine."""
    return 1 + _HALF + next(_domains) % 50


class Process:
    """A child process whose output can be waited for. Ended at the latest on leaving the block."""

    running: ClassVar[list[Process]] = []

    def __init__(self, log: Path, *command: str, domain: int, **environment: str) -> None:
        self.log = log
        path = os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')]).rstrip(os.pathsep)
        self._file = log.open('wb')
        self.process = subprocess.Popen(
            [sys.executable, '-u', *command],
            stdout=self._file,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            env={
                **os.environ,
                'PYTHONPATH': path,
                'ROS_DOMAIN_ID': str(domain),
                'OMP_NUM_THREADS': '1',
                'ROS_LOG_DIR': str(log.parent / 'ros_log'),
                **environment,
            },
        )

    def __enter__(self) -> Process:
        self.running.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.running.remove(self)
        self.stop()

    @property
    def output(self) -> str:
        return self.log.read_text(errors='replace')

    def wait_for(self, text: str, timeout: float = PATIENCE) -> None:
        end = time.monotonic() + timeout
        while text not in self.output:
            assert self.process.poll() is None, f'it ended: {self.output}'
            assert time.monotonic() < end, f"no '{text}' in: {self.output}"
            time.sleep(0.05)

    def stop(
        self, how: signal.Signals = signal.SIGINT, timeout: float = 20.0
    ) -> tuple[int, float]:
        """The exit code, and the seconds that it took."""
        began = time.monotonic()
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
            raise
        finally:
            self._file.close()
        return self.process.returncode, time.monotonic() - began


def _last_words() -> str:
    """Of the processes that run, or should."""
    return '\n'.join(f'{p.process.poll()} {p.output[-2000:]}' for p in Process.running)


def keypoint_node(log: Path, domain: int, model: Path, *arguments: str, **values: Any) -> Process:
    """A keypoint node; `values` are parameters, `arguments` anything else after --ros-args."""
    parameters = {'model': model, 'runtime': 'torch', 'threads': 1, 'diagnostics_period': 0.2}
    parameters.update(values)
    return Process(
        log, '-m', 'kp2d_ros.keypoint_node', '--ros-args', *arguments,
        *(part for name, value in parameters.items() for part in ('-p', f'{name}:={value}')),
        domain=domain,
    )  # fmt: skip


class Robot:
    """The test's own place in the graph: publishes images, hears what comes of them."""

    def __init__(self, domain: int) -> None:
        self.context = rclpy.context.Context()
        self.context.init(args=[], domain_id=domain)
        self.node = Node('test', context=self.context, use_global_arguments=False)
        self.executor = SingleThreadedExecutor(context=self.context)
        self.executor.add_node(self.node)
        self._status: dict[str, Any] = {}
        self._clients: dict[str, Any] = {}
        self.node.create_subscription(DiagnosticArray, '/diagnostics', self._diagnosed, 10)

    def close(self) -> None:
        self.executor.shutdown()
        self.node.destroy_node()
        self.context.try_shutdown()

    def _diagnosed(self, message: DiagnosticArray) -> None:
        for status in message.status:
            self._status[status.name.removesuffix(': keypoints')] = status

    def wait(self, condition: Callable[[], Any], what: str, timeout: float = PATIENCE) -> Any:
        """Spin until the condition holds; its value."""
        end = time.monotonic() + timeout
        while not (result := condition()):
            assert time.monotonic() < end, f'waited in vain for {what}\n{_last_words()}'
            self.executor.spin_once(timeout_sec=0.02)
        return result

    def spin(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.executor.spin_once(timeout_sec=0.02)

    def listen(self, kind: type, topic: str, qos: Any = 10) -> list[Any]:
        """A list that grows with what is heard, once somebody publishes."""
        heard: list[Any] = []
        subscription = self.node.create_subscription(kind, topic, heard.append, qos)
        self.wait(subscription.get_publisher_count, f'a publisher of {topic}')
        self.spin(0.3)  # the other side matches a little later
        self._last_subscription = subscription
        return heard

    def publisher(self, kind: type, topic: str, qos: Any = 1) -> Any:
        publisher = self.node.create_publisher(kind, topic, qos)
        self.wait(publisher.get_subscription_count, f'a subscriber of {topic}')
        return publisher

    def ask(self, kind: type, name: str, request: Any) -> Any:
        """A future of the answer."""
        if name not in self._clients:
            self._clients[name] = self.node.create_client(kind, name)
            assert self._clients[name].wait_for_service(PATIENCE), f'no service {name}'
            self._wait_to_be_found(name)
        return self._clients[name].call_async(request)

    def call(self, kind: type, name: str, request: Any) -> Any:
        future = self.ask(kind, name, request)
        self.wait(future.done, f'an answer of {name}')
        return future.result()

    def _wait_to_be_found(self, service: str) -> None:
        """Until a node has found the client of its service: before, its answers would be lost.

        A node finds what is made here in the order of making: once a subscription hears it, it
        has found what was made before.
        """

        def provider() -> str:
            for name, namespace in self.node.get_node_names_and_namespaces():
                offered = self.node.get_service_names_and_types_by_node(name, namespace)
                if service in dict(offered):
                    return f'{namespace}/{name}:'.lstrip('/')
            return ''

        node = self.wait(provider, f'who offers {service}')
        heard: list[str] = []
        subscription = self.node.create_subscription(
            DiagnosticArray, '/diagnostics', lambda m: heard.extend(s.name for s in m.status), 10
        )
        self.wait(lambda: any(name.startswith(node) for name in heard), f'a word of {node}')
        self.node.destroy_subscription(subscription)

    def status(self, name: str = 'kp2d/keypoint_node', fresh: bool = True) -> Any:
        """The next diagnostic status of a node."""
        if fresh:
            self._status.pop(name, None)
        return self.wait(lambda: self._status.get(name), f'diagnostics of {name}')

    def figures(self, name: str = 'kp2d/keypoint_node') -> dict[str, str]:
        return {value.key: value.value for value in self.status(name).values}

    def count(self, counter: str, name: str = 'kp2d/keypoint_node') -> int:
        return int(self.figures(name)[f'frames {counter}'])

    def exchange(
        self, publisher: Any, message: Any, heard: list[Any], timeout: float = PATIENCE
    ) -> Any:
        """Publish a message; what is heard with its stamp. Sent again if there is no answer."""
        stamp = message.header.stamp
        sent = -float('inf')

        def answer() -> Any:
            nonlocal sent
            if time.monotonic() - sent > 10:
                publisher.publish(message)
                sent = time.monotonic()
            return next((m for m in heard if m.header.stamp == stamp), None)

        return self.wait(answer, 'what comes of an image', timeout)


def image_message(
    image: np.ndarray, stamp: float, encoding: str = 'rgb8', frame_id: str = 'camera'
) -> Image:
    """HxWxC or HxW, as it is, with a padding of 5 bytes a row."""
    rows = np.ascontiguousarray(image).view(np.uint8).reshape(image.shape[0], -1)
    message = Image(encoding=encoding, height=image.shape[0], width=image.shape[1])
    padded = np.pad(rows, ((0, 0), (0, 5)), constant_values=77)
    message.step = padded.shape[1]
    message.data = bytes_of(padded)
    message.header.frame_id = frame_id
    message.header.stamp.sec, fraction = divmod(round(stamp * 1e9), 10**9)
    message.header.stamp.nanosec = fraction
    return message
