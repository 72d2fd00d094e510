"""What the keypoint node hears of one camera: its images and its calibration."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rclpy.event_handler import SubscriptionEventCallbacks
from rclpy.qos import QoSProfile, ReliabilityPolicy, qos_policy_name_from_kind
from sensor_msgs.msg import CameraInfo, CompressedImage, Image

from kp2d_core.camera import Camera, camera_from_info, names_rectified
from kp2d_ros.diagnostics import Statistics
from kp2d_ros.settings import Settings
from kp2d_ros.worker import Arrival

QUIET = 5.0  # seconds between two warnings of one kind


def image_topic(node: Any, settings: Settings) -> str:
    """To subscribe to; image/compressed goes with image unless it is remapped itself."""
    compressed = 'image/compressed'
    if settings.image_transport == 'raw':
        return 'image'
    unmapped = node.resolve_topic_name(compressed, only_expand=True)
    if node.resolve_topic_name(compressed) != unmapped:
        return compressed
    return f'{node.resolve_topic_name("image")}/compressed'


class Input:
    """Subscribes from its creation until it is closed."""

    def __init__(
        self,
        node: Any,
        settings: Settings,
        *,
        statistics: Statistics,
        arrived: Callable[[Arrival], None],
    ) -> None:
        """arrived(arrival) hears of every image."""
        self.camera: Camera | None = None
        self.last_image: float | None = None  # time.monotonic()
        self.incompatible = ''  # the QoS policy that keeps a publisher from being heard
        self.bad_camera_info = ''  # why the last one cannot be used
        self._node = node
        self._arrived = arrived
        self._statistics = statistics
        self._last_sequence = 0
        self._subscriptions: list[Any] = []
        topic = image_topic(node, settings)
        self.topic = node.resolve_topic_name(topic)
        asked = settings.image_geometry
        self._rectified = asked == 'rectified' or (asked == 'auto' and names_rectified(self.topic))
        try:
            self._subscribe(topic, settings)
        except Exception:
            self.close()
            raise

    def publishers(self) -> int:
        """That can be heard."""
        return int(self._subscriptions[0].get_publisher_count())

    def close(self) -> None:
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)
        self._subscriptions = []

    def _subscribe(self, topic: str, settings: Settings) -> None:
        callback: Any = self._image_arrived  # rclpy's types know of no second argument
        reliable = settings.reliability == 'reliable'
        qos = QoSProfile(
            depth=1,
            reliability=ReliabilityPolicy.RELIABLE if reliable else ReliabilityPolicy.BEST_EFFORT,
        )
        kind = Image if settings.image_transport == 'raw' else CompressedImage
        events = SubscriptionEventCallbacks(incompatible_qos=self._incompatible_offered)
        self._subscriptions.append(
            self._node.create_subscription(kind, topic, callback, qos, event_callbacks=events)
        )
        self._subscriptions.append(
            self._node.create_subscription(
                CameraInfo, 'camera_info', self._camera_info_arrived,
                QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT),
            )
        )  # fmt: skip

    def _image_arrived(self, message: Any, info: dict[str, int]) -> None:
        self.last_image = time.monotonic()
        self.incompatible = ''
        self._statistics.count('received')
        self._count_lost(info.get('publication_sequence_number') or 0)
        self._arrived(Arrival(message, self.last_image, self.camera))

    def _count_lost(self, sequence: int) -> None:
        """Gaps in the publisher's numbering; of two publishers they cannot be told apart."""
        if self.publishers() != 1:
            self._last_sequence = 0
            return
        missing = sequence - self._last_sequence - 1
        if self._last_sequence and missing > 0:
            self._statistics.count('lost', missing)
        self._last_sequence = sequence

    def _camera_info_arrived(self, message: CameraInfo) -> None:
        try:
            self.camera = camera_from_info(message, self._rectified)
            self.bad_camera_info = ''
        except ValueError as error:
            self.camera = None
            self.bad_camera_info = str(error)
            self._node.get_logger().warning(str(error), throttle_duration_sec=QUIET)

    def _incompatible_offered(self, event: Any) -> None:
        self.incompatible = qos_policy_name_from_kind(event.last_policy_kind)
