"""The rig of `kp2d bench node`: a node in its own process; this one is camera and listener."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import rclpy.context
from diagnostic_msgs.msg import DiagnosticArray
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from rcl_interfaces.srv import SetParameters
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import Parameter
from sensor_msgs.msg import Image, PointCloud2
from std_msgs.msg import Header

from kp2d_ros.bridge import image_message
from kp2d_ros.camera.moving_view import MovingView, default_photograph
from kp2d_ros.diagnostics import STATUS_SUFFIX
from kp2d_ros.startup import start_node

SIZE = (640, 480)
PATIENCE = 120.0  # seconds
NODE = 'kp2d/keypoint_node'
LOGGER = 'kp2d.keypoint_node'
TRACE = re.compile(r'frame (\d+): waited .*detected ([\d.]+), tracked ([\d.]+)')


def end_process(process: subprocess.Popen[bytes], how: signal.Signals = signal.SIGINT) -> float:
    """Seconds from the signal to the end."""
    began = time.perf_counter()
    process.send_signal(how)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return time.perf_counter() - began


class Rig:
    """Starts a keypoint node; `figures` and `answers` grow while it is spun."""

    def __init__(self, domain: int, **parameters: Any) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the rig
        given = {'diagnostics_period': 0.5, **parameters}
        self.process = start_node(
            'keypoint_node', self._log, given, '--log-level', f'{LOGGER}:=debug',
            ROS_DOMAIN_ID=str(domain),
        )  # fmt: skip
        self.context = rclpy.context.Context()
        self.context.init(args=[], domain_id=domain)
        self.node = Node('benchmark', context=self.context, use_global_arguments=False)
        self._executor = SingleThreadedExecutor(context=self.context)
        self._executor.add_node(self.node)
        self.figures: dict[str, str] = {}
        self.answers: dict[int, float] = {}  # stamp in ns -> seconds from publishing to receiving
        self.sent: dict[int, float] = {}
        self._clients: dict[str, Any] = {}
        self._images = self.node.create_publisher(Image, '/kp2d/image', 1)
        self.node.create_subscription(PointCloud2, '/kp2d/keypoints', self._answered, 2)
        self.node.create_subscription(DiagnosticArray, '/diagnostics', self._diagnosed, 10)
        self.show(SIZE)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.end()
        self._executor.shutdown()
        self.node.destroy_node()
        self.context.try_shutdown()
        self._log.close()

    def end(self, how: signal.Signals = signal.SIGINT) -> float:
        """Seconds from the signal to the end of the process."""
        return end_process(self.process, how)

    def show(self, size: tuple[int, int], count: int = 60) -> None:
        """Pictures of this size from now on."""
        pictures = itertools.islice(MovingView(default_photograph(), size).pictures(), count)
        messages = [image_message(Header(), each.image, 'rgb8') for each in pictures]
        self._pictures = itertools.cycle([*messages, *messages[::-1]])  # to and fro: no jump

    def publish(self) -> int:
        """The next picture; its stamp."""
        message = next(self._pictures)
        stamp = time.time_ns()
        message.header.stamp.sec, message.header.stamp.nanosec = divmod(stamp, 10**9)
        self.sent[stamp] = time.perf_counter()
        self._images.publish(message)
        return stamp

    def spin(self, until: Callable[[], Any], timeout: float = PATIENCE) -> bool:
        """Spin until the condition holds; return whether it did in time."""
        end = time.perf_counter() + timeout
        while not until():
            left = end - time.perf_counter()
            if left <= 0:
                return False
            if self.process.poll() is not None:
                raise ValueError(f'the node ended: {self.output()}')
            self._executor.spin_once(timeout_sec=min(left, 0.1))
        return True

    def exchange(self) -> float | None:
        """One picture there, its keypoints back: seconds; None if no answer came for a while."""
        stamp = self.publish()
        self.spin(lambda: stamp in self.answers, 10.0)
        return self.answers.get(stamp)

    def film(self, rate: float, seconds: float) -> Iterator[float]:
        """Pictures at a rate in Hz, answered or not; the seconds passed, with each."""
        began = due = time.perf_counter()
        while (now := time.perf_counter()) < began + seconds:
            self.publish()
            due = max(due + 1 / rate, now)
            self.spin(lambda: False, due - now)
            yield now - began

    def ready(self) -> None:
        """Wait until the node answers."""
        for _ in range(int(PATIENCE)):
            self.publish()
            if self.spin(lambda: self.answers, 1.0):
                self.spin(lambda: False, 0.1)
                return
        raise ValueError(f'the node does not answer: {self.output()}')

    def wait_for_node(self) -> None:
        """Until it can be seen; it may not have loaded its model yet."""
        self.spin(lambda: NODE.rpartition('/')[2] in self.node.get_node_names())

    def count(self, name: str) -> int:
        return int(self.figures.get(f'frames {name}', 0))

    def fresh_figures(self) -> dict[str, str]:
        self.figures = {}
        self.spin(lambda: self.figures)
        return self.figures

    def set(self, **values: Any) -> None:
        request = SetParameters.Request()
        request.parameters = [Parameter(k, value=v).to_parameter_msg() for k, v in values.items()]
        self._call(SetParameters, f'/{NODE}/set_parameters', request)

    def transition(self, number: int) -> None:
        request = ChangeState.Request(transition=Transition(id=number))
        self._call(ChangeState, f'/{NODE}/change_state', request)

    def memory(self) -> float:
        """Resident, MB."""
        pages = int(Path(f'/proc/{self.process.pid}/statm').read_text().split()[1])
        return pages * os.sysconf('SC_PAGESIZE') / 2**20

    def threads(self) -> int:
        return len(list(Path(f'/proc/{self.process.pid}/task').iterdir()))

    def output(self) -> str:
        """Return the end of its log."""
        return self._read()[-500:]

    def traces(self) -> dict[int, tuple[float, float]]:
        """Stamp -> ms in the detector, ms in the tracker, as the node's debug log has it."""
        found = TRACE.findall(self._read())
        return {int(stamp): (float(detect), float(track)) for stamp, detect, track in found}

    def _read(self) -> str:
        # Not seek and read: the child writes at the position that both share.
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors='replace')

    def _call(self, kind: type, name: str, request: Any) -> None:
        if name not in self._clients:
            self._clients[name] = self.node.create_client(kind, name)
            self.spin(self._clients[name].service_is_ready)
            self.spin(lambda: False, 0.5)  # the node finds the client a little later
        future = self._clients[name].call_async(request)
        self.spin(future.done)

    def _answered(self, cloud: PointCloud2) -> None:
        stamp = cloud.header.stamp.sec * 10**9 + cloud.header.stamp.nanosec
        if stamp in self.sent:
            self.answers[stamp] = time.perf_counter() - self.sent[stamp]

    def _diagnosed(self, message: DiagnosticArray) -> None:
        for status in message.status:
            if status.name == NODE + STATUS_SUFFIX:
                self.figures = {value.key: value.value for value in status.values}
