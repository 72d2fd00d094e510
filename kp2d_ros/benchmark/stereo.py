"""The stereo part of `kp2d bench node`: one node for two cameras, against two nodes."""

from __future__ import annotations

import itertools
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import rclpy.context
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from sensor_msgs.msg import Image, PointCloud2
from std_msgs.msg import Header
from tqdm import tqdm

from kp2d_core.detector import KeypointDetector
from kp2d_ros.benchmark.rig import PATIENCE, SIZE, end_process
from kp2d_ros.bridge import image_message
from kp2d_ros.camera.moving_view import MovingView, default_photograph
from kp2d_ros.settings import Settings
from kp2d_ros.startup import start_node

WINDOW = 4.0  # seconds that one of both is fed before the other has its turn
APART = 2  # pictures of the moving view between left and right
SIDES = ('left', 'right')
# Who is fed -> the name of each camera's topics.
CAMERAS = {
    'one node': [f'/both/{side}/' for side in SIDES],
    'two nodes': [f'/{side}/' for side in SIDES],
}


@dataclass(frozen=True)
class Window:
    """What the nodes did while they were fed."""

    rate: float  # pairs per second: both images of one stamp were processed
    images: float  # half of the images per second, with or without their partner
    spent: float  # ms of CPU time of all nodes per two images
    latency: float  # seconds from publishing a pair to the keypoints of both images; the median


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
        self.heard: dict[str, dict[int, float]] = {}  # camera -> stamp -> when its cloud came
        self._publishers = {}
        for camera in itertools.chain(*CAMERAS.values()):
            self.heard[camera] = {}
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

    def feed(self, who: str, rate: float, seconds: float) -> Window:
        """Send pairs at this rate in Hz, and count what comes of them."""
        for camera in CAMERAS[who]:
            self.heard[camera].clear()
        spent = sum(processor_time(process) for process in self._processes)
        began = time.perf_counter()
        due = began
        while (now := time.perf_counter()) < began + seconds:
            self._publish(who)
            due = max(due + 1 / rate, now)
            self._spin_until(due)
        self._spin_until(time.perf_counter() + 0.2)  # what is still in work
        spent = sum(processor_time(process) for process in self._processes) - spent
        left, right = (self.heard[camera] for camera in CAMERAS[who])
        images = (len(left) + len(right)) / 2
        latencies = [max(left[s], right[s]) - s / 1e9 for s in left.keys() & right.keys()]
        return Window(
            len(latencies) / seconds,
            images / seconds,
            1e3 * spent / max(images, 1),
            float(np.median(latencies)) if latencies else 0.0,
        )

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
        def heard(cloud: PointCloud2) -> None:
            stamp = cloud.header.stamp.sec * 10**9 + cloud.header.stamp.nanosec
            self.heard[camera][stamp] = time.time()

        return heard


def compare(
    domain: int, parameters: dict[str, Any], rates: Sequence[float], seconds: float
) -> dict[float, dict[str, list[Window]]]:
    """Camera rate -> what one node does, and two nodes, which take turns."""
    found: dict[float, dict[str, list[Window]]] = {
        rate: {who: [] for who in CAMERAS} for rate in rates
    }
    with Rig(domain, parameters) as rig:
        for who in CAMERAS:
            rig.ready(who)
        for rate, windows in found.items():
            for _ in tqdm(range(max(1, round(seconds / (2 * WINDOW)))), f'stereo {rate:g} Hz'):
                for who in CAMERAS:
                    windows[who].append(rig.feed(who, rate, WINDOW))
    return found


def ratio_of(windows: dict[str, list[Window]]) -> float:
    """How many times the rate of two nodes one node has, window by window: the median."""
    one, two = (np.array([each.rate for each in windows[who]]) for who in CAMERAS)
    return float(np.median(one / np.maximum(two, 1e-9)))


def processor_time(process: subprocess.Popen[bytes]) -> float:
    """Seconds that a process has spent on all cores."""
    fields = Path(f'/proc/{process.pid}/stat').read_text().rpartition(')')[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')


def inference_alone(parameters: dict[str, Any]) -> float:
    """Milliseconds of processor time that the network needs for a pair, nothing beside it."""
    detector = KeypointDetector.load(
        parameters['model'],
        runtime=parameters['runtime'],
        precision=parameters['precision'],
        threads=parameters['threads'] or None,
    )
    pictures = MovingView(default_photograph(), SIZE).pictures()
    images = np.stack([each.image for each in itertools.islice(pictures, 2)])
    limit = detector.limit(parameters['max_keypoints'], Settings().nms_radius, masked=False)
    spent = []
    for _ in range(25):
        began = time.process_time()
        found = detector.runtime.run(images, limit or 0)
        for image in range(len(images)):
            found.descriptors[image, : parameters['max_keypoints']]
        spent.append(time.process_time() - began)
    return 1e3 * float(np.median(spent[5:]))
