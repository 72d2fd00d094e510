"""Publish RGB-D images with our features for RTAB-Map.

Input: image, depth, camera_info and keypoints. Output: rgbd_image.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
from rcl_interfaces.msg import FloatingPointRange, ParameterDescriptor
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rclpy.task import Future
from sensor_msgs.msg import CameraInfo, Image, PointCloud2

from kp2d_ros.inputs import QUIET
from kp2d_ros.integrations.rtabmap import key_point_fields, pack_matrix, points_in_depth
from kp2d_ros.messages import keypoints_from_cloud
from kp2d_ros.process import run_node

WAITING = 10  # stamps to keep until all their messages arrive
PARTS = ('keypoints', 'rgb', 'depth')


def depth_image(message: Any) -> np.ndarray[Any, Any]:
    """Return the unconverted depth image: 32FC1 in m, 16UC1 in mm."""
    kinds = {'32FC1': 'f4', '16UC1': 'u2', 'mono16': 'u2'}
    if message.encoding not in kinds:
        raise ValueError(f"depth must be 32FC1 or 16UC1, not '{message.encoding}'")
    kind = np.dtype(('>' if message.is_bigendian else '<') + kinds[message.encoding])
    needed = message.step * message.height
    if message.step < message.width * kind.itemsize or len(message.data) < needed:
        raise ValueError('the depth image has too few bytes for its size')
    rows = np.frombuffer(message.data, np.uint8, needed).reshape(message.height, message.step)
    whole = np.ascontiguousarray(rows[:, : message.width * kind.itemsize])
    return whole.view(kind).astype(kind.newbyteorder('='), copy=False)


class Moments:
    """Collects messages with the same stamp until all of them have arrived."""

    def __init__(self) -> None:
        self._moments: OrderedDict[tuple[int, int], dict[str, Any]] = OrderedDict()

    def add(self, part: str, message: Any) -> dict[str, Any] | None:
        """Add a message; return all messages of its stamp once they are complete."""
        key = message.header.stamp.sec, message.header.stamp.nanosec
        moment = self._moments.setdefault(key, {})
        moment[part] = message
        if len(moment) == len(PARTS):
            return self._moments.pop(key)
        while len(self._moments) > WAITING:
            self._moments.popitem(last=False)
        return None


def rgbd_image(
    kinds: Any, keypoints: Any, rgb: Any, depth: Any, info: Any, farthest: float
) -> Any:
    """Create an rtabmap_msgs/RGBDImage; `kinds` is the module rtabmap_msgs.msg."""
    found = keypoints_from_cloud(keypoints)
    pixels = depth_image(depth)
    if pixels.shape != (rgb.height, rgb.width):
        raise ValueError(
            f'depth has {depth.width}x{depth.height} pixels, the image {rgb.width}x{rgb.height}: '
            'the depth image must be registered to the image'
        )
    points = points_in_depth(found.features.keypoints, found.rays, pixels, farthest)
    message = kinds.RGBDImage()
    message.header = rgb.header
    message.rgb_camera_info = message.depth_camera_info = info
    message.rgb, message.depth = rgb, depth
    for fields in key_point_fields(found.features):
        key_point = kinds.KeyPoint()
        key_point.pt.x, key_point.pt.y = fields.pop('pt')
        for name, value in fields.items():
            setattr(key_point, name, value)
        message.key_points.append(key_point)
    for x, y, z in points.tolist():
        point = kinds.Point3f()
        point.x, point.y, point.z = x, y, z
        message.points.append(point)
    message.descriptors = array('B', pack_matrix(found.features.descriptors))
    return message


class RtabmapNode(Node):
    def __init__(
        self, name: str = 'rtabmap_node', *, namespace: str = 'kp2d', **options: Any
    ) -> None:
        super().__init__(name, namespace=namespace, **options)
        self.finished = Future()  # never completes
        try:
            kinds = import_module('rtabmap_msgs.msg')  # optional: not a dependency
        except ImportError:
            raise ValueError(
                'rtabmap_node needs rtabmap_msgs: apt install ros-$ROS_DISTRO-rtabmap-msgs'
            ) from None
        self._kinds = kinds
        descriptor = ParameterDescriptor(
            description='Ignore depth beyond this many metres; 0: no limit.',
            floating_point_range=[FloatingPointRange(from_value=0.0, to_value=1000.0)],
            read_only=True,
        )
        self._farthest = float(self.declare_parameter('max_depth', 0.0, descriptor).value)
        self._moments = Moments()
        self._info: CameraInfo | None = None
        qos = QoSProfile(depth=5, reliability=ReliabilityPolicy.RELIABLE)
        self._output = self.create_publisher(kinds.RGBDImage, 'rgbd_image', qos)
        best_effort = QoSProfile(depth=5, reliability=ReliabilityPolicy.BEST_EFFORT)
        self.create_subscription(PointCloud2, 'keypoints', self._hear('keypoints'), qos)
        self.create_subscription(Image, 'image', self._hear('rgb'), best_effort)
        self.create_subscription(Image, 'depth', self._hear('depth'), best_effort)
        self.create_subscription(CameraInfo, 'camera_info', self._hear_info, best_effort)

    def _hear_info(self, message: CameraInfo) -> None:
        self._info = message

    def _hear(self, part: str) -> Any:
        def arrived(message: Any) -> None:
            moment = self._moments.add(part, message)
            if moment is None:
                return
            if self._info is None:
                self.get_logger().warning('no camera_info yet', throttle_duration_sec=QUIET)
                return
            try:
                self._output.publish(
                    rgbd_image(
                        self._kinds, moment['keypoints'], moment['rgb'], moment['depth'],
                        self._info, self._farthest,
                    )
                )  # fmt: skip
            except ValueError as error:
                self.get_logger().warning(str(error), throttle_duration_sec=QUIET)

        return arrived


def main(arguments: Sequence[str] | None = None) -> int:
    return run_node(RtabmapNode, arguments)


if __name__ == '__main__':
    sys.exit(main())
