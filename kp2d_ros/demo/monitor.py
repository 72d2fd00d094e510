"""The view of `make run` on the running nodes, from their topics only."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np
from diagnostic_msgs.msg import DiagnosticArray
from rcl_interfaces.msg import Parameter, ParameterType, ParameterValue
from rcl_interfaces.srv import GetParameters, SetParameters
from rclpy.node import Node
from sensor_msgs.msg import CompressedImage, PointCloud2

from kp2d_ros.diagnostics import STATUS_SUFFIX
from kp2d_ros.messages import LATCHED, matches_from_cloud
from kp2d_ros.settings import TABLE

Path: Any = None
with suppress(ImportError):  # the odometry node needs it, not this one
    Path = import_module('nav_msgs.msg').Path

WINDOW = 3.0  # seconds that figures look back
MOST_PLACES = 500  # of the path that the page draws
HISTORY = 120  # reports of rate and latency, one a second
LEVELS = {b'\0': 'ok', b'\1': 'warn', b'\2': 'error', b'\3': 'error'}
# parameter -> lowest, highest, step: narrower than what the node takes, to be of use by hand
SLIDERS = {
    'max_keypoints': (50, 3000, 50),
    'score_threshold': (0.0, 0.95, 0.05),
    'nms_radius': (0.0, 20.0, 0.5),
    'overlay_tail': (0, 50, 1),
}


class Monitor(Node):
    """Listens to a keypoint node in `namespace`, whose full name is `node_name`."""

    def __init__(self, namespace: str = '/kp2d', node_name: str = 'keypoint_node') -> None:
        super().__init__('monitor', namespace=namespace)
        self.jpeg = b''  # the newest overlay
        self.frames = 0  # keypoint messages heard
        self.refused = ''  # why the node did not take the last change of a parameter
        self.history: deque[tuple[float | None, float | None]] = deque(maxlen=HISTORY)
        self.path: list[tuple[float, float]] = []  # from above: to the right, ahead
        self._status: Any = None
        self._values: dict[str, float] = {}
        self._asked = False
        node = f'{namespace}/{node_name}'
        self._get = self.create_client(GetParameters, f'{node}/get_parameters')
        self._set = self.create_client(SetParameters, f'{node}/set_parameters')
        self._diagnosed = f'{namespace}/{node_name}{STATUS_SUFFIX}'.lstrip('/')
        self._arrivals: deque[tuple[float, int]] = deque()  # when, keypoints
        self._matches: deque[tuple[float, int, int]] = deque()  # when, matches, inliers
        self.create_subscription(PointCloud2, 'keypoints', self._keypoints, 2)
        self.create_subscription(PointCloud2, 'matches', self._matched, 2)
        self.create_subscription(CompressedImage, 'debug_image/compressed', self._overlay, 1)
        self.create_subscription(DiagnosticArray, '/diagnostics', self._diagnostics, 10)
        if Path is not None:
            self.create_subscription(Path, 'path', self._moved, LATCHED)

    def figures(self) -> dict[str, str]:
        """Figures of the last seconds as text; {} before the first message."""
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

    def remember(self, figures: dict[str, str]) -> None:
        """Add a point to the charts of rate and latency; None if unknown."""
        self.history.append((_number(figures.get('rate')), _number(figures.get('latency'))))

    def level(self) -> str:
        return LEVELS[self._status.level] if self._status is not None else 'ok'

    def troubled(self) -> bool:
        return self.level() != 'ok'

    def parameters(self) -> list[dict[str, Any]]:
        """Parameters for the sliders; [] until the node has reported their values."""
        if not self._asked and self._get.service_is_ready():
            self._asked = True
            request = GetParameters.Request(names=list(SLIDERS))
            self._get.call_async(request).add_done_callback(self._told)
        return [
            {
                'name': name, 'value': self._values[name], 'low': low, 'high': high, 'step': step,
                'text': TABLE[name].limits.description,
            }
            for name, (low, high, step) in SLIDERS.items() if name in self._values
        ]  # fmt: skip

    def change(self, name: str, value: float) -> None:
        """Ask the node to change a parameter; `refused` explains why it did not."""
        if name not in SLIDERS or not self._set.service_is_ready():
            self.refused = f'{name[:40]} cannot be changed here'
            return
        if isinstance(TABLE[name].default, int):
            value = round(value) if abs(value) < 1e9 else 0
            given = ParameterValue(type=ParameterType.PARAMETER_INTEGER, integer_value=value)
        else:
            given = ParameterValue(type=ParameterType.PARAMETER_DOUBLE, double_value=value)

        def answered(future: Any) -> None:
            (result,) = future.result().results
            self.refused = '' if result.successful else result.reason
            self._asked = False  # what it is now

        request = SetParameters.Request(parameters=[Parameter(name=name, value=given)])
        self._set.call_async(request).add_done_callback(answered)

    def _told(self, future: Any) -> None:
        for name, value in zip(SLIDERS, future.result().values, strict=False):
            whole = value.type == ParameterType.PARAMETER_INTEGER
            self._values[name] = value.integer_value if whole else round(value.double_value, 4)

    def state(self) -> str:
        """The diagnostics of the node."""
        return self._status.message if self._status is not None else 'waiting for the node'

    def _keypoints(self, cloud: PointCloud2) -> None:
        self._arrivals.append((time.monotonic(), cloud.width))
        self.frames += 1

    def _matched(self, cloud: PointCloud2) -> None:
        points = matches_from_cloud(cloud).points
        self._matches.append((time.monotonic(), len(points), int(points['inlier'].sum())))

    def _moved(self, path: Any) -> None:
        poses = path.poses[:: 1 + len(path.poses) // MOST_PLACES]
        places = [pose.pose.position for pose in poses]
        self.path = [(round(-place.y, 3), round(place.x, 3)) for place in places]

    def _overlay(self, image: CompressedImage) -> None:
        self.jpeg = bytes(image.data)

    def _diagnostics(self, message: DiagnosticArray) -> None:
        for status in message.status:
            if status.name == self._diagnosed:
                self._status = status


def _milliseconds(text: str) -> str:
    return f'{text} ms' if text not in ('', '0.0') else '-'  # 0.0: no frame before that report


def _number(text: str | None) -> float | None:
    """'12.3 Hz' -> 12.3; None if there is none."""
    return float(text.split()[0]) if text and text[0].isdigit() else None
