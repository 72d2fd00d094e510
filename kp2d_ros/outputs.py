"""What the keypoint node publishes, and only to those who listen."""

from __future__ import annotations

from typing import Any

from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CompressedImage, Image, PointCloud2
from std_msgs.msg import Header

from kp2d_ros.messages import bytes_of, keypoints_to_cloud, matches_to_cloud
from kp2d_ros.overlay import Overlay, to_jpeg
from kp2d_ros.parameters import Value
from kp2d_ros.pipeline import Result
from kp2d_ros.statistics import Statistics

# Reliable meets subscribers of both kinds; a short queue lets a slow one miss frames, not lag.
QOS = QoSProfile(depth=2, reliability=ReliabilityPolicy.RELIABLE)

TOPICS: dict[str, type] = {
    'keypoints': PointCloud2,
    'matches': PointCloud2,
    'debug_image': Image,
    'debug_image/compressed': CompressedImage,
}


class Outputs:
    """Lifecycle publishers under relative names."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self._publishers = {
            topic: node.create_lifecycle_publisher(kind, topic, QOS)
            for topic, kind in TOPICS.items()
        }
        self._overlay = Overlay()

    def wanted(self, *topics: str) -> bool:
        """Whether anybody subscribes to one of the topics; without names, to any."""
        return any(
            self._publishers[topic].get_subscription_count() > 0 for topic in topics or TOPICS
        )

    def publish(
        self, result: Result, header: Header, values: dict[str, Value], statistics: Statistics
    ) -> None:
        """Keypoints first: whoever estimates motion waits for them."""
        if self.wanted('keypoints'):
            self._publishers['keypoints'].publish(
                keypoints_to_cloud(
                    header,
                    result.features,
                    result.tracks,
                    descriptor_format=str(values['descriptor_format']),
                    bearings=result.bearings,
                )
            )
        if result.tracks is not None and result.previous is not None and self.wanted('matches'):
            self._publishers['matches'].publish(
                matches_to_cloud(
                    header,
                    result.previous.features,
                    result.features,
                    result.tracks,
                    result.previous.frame.stamp,
                )
            )
        if self.wanted('debug_image', 'debug_image/compressed'):
            self._publish_overlay(result, header, values, statistics.summary().rate)

    def _publish_overlay(
        self, result: Result, header: Header, values: dict[str, Value], rate: float
    ) -> None:
        tracked = int((result.tracks.ages > 0).sum()) if result.tracks is not None else 0
        caption = f'{rate:.1f} Hz  {len(result.features)} keypoints  {tracked} tracked'
        canvas = self._overlay.draw(result, caption, int(values['overlay_tail']))
        height, width = canvas.shape[:2]
        if self.wanted('debug_image'):
            image = Image(
                header=header, height=height, width=width, encoding='rgb8', step=3 * width
            )
            image.data = bytes_of(canvas)
            self._publishers['debug_image'].publish(image)
        if self.wanted('debug_image/compressed'):
            image = CompressedImage(header=header, format='rgb8; jpeg compressed bgr8')
            image.data = bytes_of(to_jpeg(canvas, int(values['jpeg_quality'])))
            self._publishers['debug_image/compressed'].publish(image)

    def destroy(self) -> None:
        for publisher in self._publishers.values():
            self._node.destroy_lifecycle_publisher(publisher)
