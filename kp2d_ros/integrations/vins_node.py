"""Publish tracks for VINS-Fusion. Input: keypoints. Output: feature_tracker/feature."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from geometry_msgs.msg import Point32
from numpy.typing import NDArray
from rcl_interfaces.msg import IntegerRange, ParameterDescriptor
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rclpy.task import Future
from sensor_msgs.msg import ChannelFloat32, PointCloud, PointCloud2

from kp2d_ros.inputs import QUIET
from kp2d_ros.messages import Keypoints, keypoints_from_cloud
from kp2d_ros.outputs import NO_TRACK
from kp2d_ros.process import run_node

TOPIC = '/feature_tracker/feature'  # VINS-Fusion subscribes to it
# VINS-Fusion uses the first 6 channels. If there are more than 5, it reads 9. The last three are
# the ground-truth position, if one is known.
CHANNELS = ('id', 'camera', 'u', 'v', 'velocity_x', 'velocity_y', 'x', 'y', 'z')
IDS = 2**24  # float32 represents all smaller ids exactly
LONGEST_GAP = 1.0  # seconds; velocities are 0 if two frames are further apart

Rows = NDArray[np.float32]


class Velocities:
    """Computes the velocity of each track in the plane z = 1 from its previous position."""

    def __init__(self) -> None:
        self._ids: NDArray[np.int64] = np.empty(0, np.int64)
        self._rays: NDArray[np.float64] = np.empty((0, 2))
        self._stamp = 0.0

    def update(
        self, ids: NDArray[np.int64], rays: NDArray[np.float64], stamp: float
    ) -> NDArray[np.float64]:
        """Return velocities (N, 2) per second; 0 for a track not seen in the previous frame."""
        result = np.zeros((len(ids), 2))
        seconds = stamp - self._stamp
        if 0 < seconds < LONGEST_GAP:
            _, now, before = np.intersect1d(ids, self._ids, return_indices=True)
            result[now] = (rays[now] - self._rays[before]) / seconds
        self._ids, self._rays, self._stamp = ids, rays, stamp
        return result


def feature_rows(
    keypoints: Keypoints, velocities: Velocities, stamp: float, min_age: int, camera: int = 0
) -> tuple[Rows, Rows]:
    """Return points (N, 3) and channels (9, N) of tracks seen in `min_age` earlier frames."""
    sound = (keypoints.track_ids != NO_TRACK) & np.isfinite(keypoints.rays).all(axis=1)
    ids = keypoints.track_ids[sound].astype(np.int64)
    rays = keypoints.rays[sound].astype(np.float64)
    speed = velocities.update(ids, rays, stamp)
    old = keypoints.track_ages[sound] >= min_age
    ids, rays, speed = ids[old], rays[old], speed[old]
    pixels = keypoints.features.keypoints[sound][old]
    points = np.column_stack([rays, np.ones(len(rays))])
    channels = np.zeros((len(CHANNELS), len(ids)))
    channels[0], channels[1] = ids % IDS, camera
    channels[2], channels[3] = pixels.T
    channels[4], channels[5] = speed.T
    return points.astype(np.float32), channels.astype(np.float32)


def feature_message(header: Any, points: Rows, channels: Rows) -> PointCloud:
    message = PointCloud(header=header)
    message.points = [Point32(x=x, y=y, z=z) for x, y, z in points.tolist()]
    message.channels = [
        ChannelFloat32(name=name, values=array('f', row.tobytes()))
        for name, row in zip(CHANNELS, channels, strict=True)
    ]
    return message


class VinsNode(Node):
    def __init__(
        self, name: str = 'vins_node', *, namespace: str = 'kp2d', **options: Any
    ) -> None:
        super().__init__(name, namespace=namespace, **options)
        self.finished = Future()  # never completes
        descriptor = ParameterDescriptor(
            description='Publish tracks that were seen in at least this many earlier frames.',
            integer_range=[IntegerRange(from_value=0, to_value=1000, step=1)],
            read_only=True,
        )
        self._min_age = int(self.declare_parameter('min_age', 1, descriptor).value)
        self._velocities = Velocities()
        qos = QoSProfile(depth=10, reliability=ReliabilityPolicy.RELIABLE)
        self._features = self.create_publisher(PointCloud, TOPIC, qos)
        self.create_subscription(PointCloud2, 'keypoints', self._arrived, qos)
        self.get_logger().info(
            f'publishing tracks from {self.resolve_topic_name("keypoints")} '
            f'to {self.resolve_topic_name(TOPIC)}'
        )

    def _arrived(self, cloud: PointCloud2) -> None:
        try:
            keypoints = keypoints_from_cloud(cloud)
        except ValueError as error:
            self.get_logger().warning(str(error), throttle_duration_sec=QUIET)
            return
        if len(keypoints.track_ids) and (keypoints.track_ids == NO_TRACK).all():
            self.get_logger().warning(
                'the keypoints have no tracks: set track of the keypoint node to true',
                throttle_duration_sec=QUIET,
            )
        stamp = cloud.header.stamp.sec + cloud.header.stamp.nanosec * 1e-9
        points, channels = feature_rows(keypoints, self._velocities, stamp, self._min_age)
        self._features.publish(feature_message(cloud.header, points, channels))


def main(arguments: Sequence[str] | None = None) -> int:
    return run_node(VinsNode, arguments)


if __name__ == '__main__':
    sys.exit(main())
