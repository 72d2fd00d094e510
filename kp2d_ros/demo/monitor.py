"""What `make run` knows of the running nodes: it hears what any neighbour could hear."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np
from diagnostic_msgs.msg import DiagnosticArray
from rclpy.node import Node
from sensor_msgs.msg import CompressedImage, PointCloud2

from kp2d_ros.diagnostics import STATUS_SUFFIX
from kp2d_ros.messages import matches_from_cloud

WINDOW = 3.0  # seconds that figures look back


class Monitor(Node):
    """Listens to a keypoint node in `namespace`, whose full name is `node_name`."""

    def __init__(self, namespace: str = '/kp2d', node_name: str = 'keypoint_node') -> None:
        super().__init__('monitor', namespace=namespace)
        self.jpeg = b''  # the newest overlay
        self.frames = 0  # keypoint messages heard
        self._status: Any = None
        self._diagnosed = f'{namespace}/{node_name}{STATUS_SUFFIX}'.lstrip('/')
        self._arrivals: deque[tuple[float, int]] = deque()  # when, keypoints
        self._matches: deque[tuple[float, int, int]] = deque()  # when, matches, inliers
        self.create_subscription(PointCloud2, 'keypoints', self._keypoints, 2)
        self.create_subscription(PointCloud2, 'matches', self._matched, 2)
        self.create_subscription(CompressedImage, 'debug_image/compressed', self._overlay, 1)
        self.create_subscription(DiagnosticArray, '/diagnostics', self._diagnostics, 10)

    def figures(self) -> dict[str, str]:
        """Of the last seconds, for people; {} while nothing has come."""
        now = time.monotonic()
        for record in (self._arrivals, self._matches):
            while record and now - record[0][0] > WINDOW:
                record.popleft()
        if not self._arrivals:
            return {}
        times, keypoints = np.array(self._arrivals).T
        rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 1 / WINDOW
        matches = sum(count for _, count, _ in self._matches)
        inliers = sum(count for _, _, count in self._matches)
        counts = {value.key: value.value for value in self._status.values} if self._status else {}
        return {
            'rate': f'{rate:.1f} Hz',
            # The node's own: stamps may be of another clock, as in a simulation.
            'latency': _milliseconds(counts.get('latency p50 (ms)', '')),
            'latency p95': _milliseconds(counts.get('latency p95 (ms)', '')),
            'keypoints': f'{keypoints.mean():.0f}',
            'matches': f'{matches / max(len(self._matches), 1):.0f}',
            'inliers': f'{100 * inliers / matches:.0f} %' if matches else '-',
            'dropped': counts.get('frames dropped', '-'),
            'lost': counts.get('frames lost', '-'),
            'runtime': counts.get('runtime', '-'),
        }

    def state(self) -> str:
        """What the node says of itself."""
        return self._status.message if self._status is not None else 'waiting for the node'

    def _keypoints(self, cloud: PointCloud2) -> None:
        self._arrivals.append((time.monotonic(), cloud.width))
        self.frames += 1

    def _matched(self, cloud: PointCloud2) -> None:
        points = matches_from_cloud(cloud).points
        self._matches.append((time.monotonic(), len(points), int(points['inlier'].sum())))

    def _overlay(self, image: CompressedImage) -> None:
        self.jpeg = bytes(image.data)

    def _diagnostics(self, message: DiagnosticArray) -> None:
        for status in message.status:
            if status.name == self._diagnosed:
                self._status = status


def _milliseconds(text: str) -> str:
    return f'{text} ms' if text not in ('', '0.0') else '-'  # 0.0: no frame before that report
