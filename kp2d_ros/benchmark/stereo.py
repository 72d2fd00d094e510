"""The stereo part of `kp2d bench node`: one node for two cameras, against two nodes."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import IO, Any

import numpy as np
import rclpy.context
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from sensor_msgs.msg import Image, PointCloud2
from std_msgs.msg import Header
from tqdm import tqdm

from kp2d_ros.benchmark.rig import PATIENCE, SIZE, end_process
from kp2d_ros.bridge import image_message
from kp2d_ros.camera.moving_view import MovingView, default_photograph
from kp2d_ros.startup import start_node

RATE = 30.0  # pairs a second that the cameras send: more than can be processed
WINDOW = 4.0  # seconds that one of both is fed before the other has its turn
APART = 2  # pictures of the moving view between left and right
SIDES = ('left', 'right')
# Who is fed -> the name of each camera's topics.
CAMERAS = {
    'one node': [f'/both/{side}/' for side in SIDES],
    'two nodes': [f'/{side}/' for side in SIDES],
}


class Rig:
    """Three nodes, of which one stereo node or two others are fed at a time."""

    def __init__(self, domain: int, parameters: dict[str, Any]) -> None:
        self._cleanup = ExitStack()
        self._context = rclpy.context.Context()
        self._context.init(args=[], domain_id=domain)
        self._cleanup.callback(self._context.try_shutdown)
        self.node = Node('benchmark', context=self._context, use_global_arguments=False)
        self._cleanup.callback(self.node.destroy_node)
        self._executor = SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self.node)
        self._cleanup.callback(self._executor.shutdown)
        self._log: IO[bytes] = self._cleanup.enter_context(
            tempfile.TemporaryFile()  # noqa: SIM115 - closed with the rig
        )
        self._processes = []
        for namespace, cameras in (('/both', [*SIDES]), ('/left', ['']), ('/right', [''])):
            process = start_node(
                'keypoint_node', self._log, {**parameters, 'cameras': cameras},
                '-r', f'__ns:={namespace}', ROS_DOMAIN_ID=str(domain),
            )  # fmt: skip
            self._processes.append(process)
            self._cleanup.callback(end_process, process)
        self.heard: dict[str, int] = {}  # camera -> clouds
        self._publishers = {}
        for camera in itertools.chain(*CAMERAS.values()):
            self.heard[camera] = 0
            self._publishers[camera] = self.node.create_publisher(Image, f'{camera}image', 1)
            self.node.create_subscription(
                PointCloud2, f'{camera}keypoints', self._listener(camera), 2
            )
        pictures = MovingView(default_photograph(), SIZE).pictures()
        messages = [
            image_message(Header(), p.image, 'rgb8') for p in itertools.islice(pictures, 60)
        ]
        to_and_fro = [*messages, *messages[::-1]]
        self._pairs = itertools.cycle(zip(to_and_fro, to_and_fro[APART:], strict=False))

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def feed(self, who: str, seconds: float) -> float:
        """Pairs a second that are processed."""
        before = {camera: self.heard[camera] for camera in CAMERAS[who]}
        began = time.perf_counter()
        due = began
        while (now := time.perf_counter()) < began + seconds:
            self._publish(who)
            due = max(due + 1 / RATE, now)
            self._spin_until(due)
        self._spin_until(time.perf_counter() + 0.2)  # what is still in work
        counts = [self.heard[camera] - count for camera, count in before.items()]
        return sum(counts) / len(counts) / seconds

    def ready(self, who: str) -> None:
        """Wait until every camera's images are answered."""
        end = time.perf_counter() + PATIENCE
        while not all(self.heard[camera] for camera in CAMERAS[who]):
            if time.perf_counter() > end or any(p.poll() is not None for p in self._processes):
                raise ValueError(f'{who}: no answer')
            self._publish(who)
            self._spin_until(time.perf_counter() + 0.5)

    def _publish(self, who: str) -> None:
        stamp = divmod(time.time_ns(), 10**9)
        for camera, message in zip(CAMERAS[who], next(self._pairs), strict=True):
            message.header.stamp.sec, message.header.stamp.nanosec = stamp
            self._publishers[camera].publish(message)

    def _spin_until(self, end: float) -> None:
        while (left := end - time.perf_counter()) > 0:
            self._executor.spin_once(timeout_sec=left)

    def _listener(self, camera: str) -> Callable[[PointCloud2], None]:
        def heard(_: PointCloud2) -> None:
            self.heard[camera] += 1

        return heard


def compare(domain: int, parameters: dict[str, Any], seconds: float) -> dict[str, list[float]]:
    """Pairs a second in each window, of one node and of two, which take turns."""
    rates: dict[str, list[float]] = {who: [] for who in CAMERAS}
    with Rig(domain, parameters) as rig:
        for who in CAMERAS:
            rig.ready(who)
        for _ in tqdm(range(max(1, round(seconds / (2 * WINDOW)))), 'stereo'):
            for who in CAMERAS:
                rates[who].append(rig.feed(who, WINDOW))
    return rates


def ratio_of(rates: dict[str, list[float]]) -> float:
    """How many times the rate of two nodes one node has, window by window: the median."""
    one, two = (np.array(rates[who]) for who in CAMERAS)
    return float(np.median(one / np.maximum(two, 1e-9)))
