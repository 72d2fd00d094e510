"""What the keypoint node hears of one camera: its images and its calibration."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from rclpy.clock import Clock
from rclpy.qos import (
    DurabilityPolicy,
    QoSPolicyKind,
    QoSProfile,
    ReliabilityPolicy,
    qos_policy_name_from_kind,
)
from sensor_msgs.msg import CameraInfo, CompressedImage, Image

from kp2d_core.camera import Camera, camera_from_info, names_rectified
from kp2d_core.images import Size
from kp2d_ros.compat import (
    ClockType,
    SubscriptionEventCallbacks,
    publisher_count,
    with_message_info,
)
from kp2d_ros.diagnostics import Statistics
from kp2d_ros.parameters import qos_overrides
from kp2d_ros.settings import Settings
from kp2d_ros.worker import Arrival

QUIET = 5.0  # seconds between two warnings of one kind
GRAPH_PERIOD = 0.25  # seconds between two looks at who publishes
OVERLAP = 1.0  # seconds that an old subscription is kept beside the one that replaces it
DEPTH = 5  # images that wait while the executor is busy; the newest of them is processed


def image_topic(node: Any, settings: Settings, prefix: str = '') -> str:
    """To subscribe to; image/compressed goes with image unless it is remapped itself."""
    image, compressed = f'{prefix}image', f'{prefix}image/compressed'
    if settings.image_transport == 'raw':
        return image
    unmapped = node.resolve_topic_name(compressed, only_expand=True)
    if node.resolve_topic_name(compressed) != unmapped:
        return compressed
    return f'{node.resolve_topic_name(image)}/compressed'


class Input:
    """Hears camera_info from its creation until it is closed, images while it is told to."""

    def __init__(
        self,
        node: Any,
        settings: Settings,
        *,
        statistics: Statistics,
        arrived: Callable[[Arrival], None],
        prefix: str = '',
    ) -> None:
        """arrived(arrival) hears of every image."""
        self.camera: Camera | None = None
        self.size: Size | None = None  # of the images, as camera_info says
        self.last_image: float | None = None  # time.monotonic()
        self.incompatible = ''  # the QoS policy that keeps a publisher from being heard
        self.bad_camera_info = ''  # why the last one cannot be used
        self._node = node
        self._arrived = arrived
        self._statistics = statistics
        self._last_sequence = self._last_sent = 0
        topic = image_topic(node, settings, prefix)
        self.topic = node.resolve_topic_name(topic)
        self._topic = topic
        asked = settings.image_geometry
        self._rectified = asked == 'rectified' or (asked == 'auto' and names_rectified(self.topic))
        self._overrides = qos_overrides(node, topic, 'subscription')
        overridden = QoSPolicyKind.RELIABILITY in self._overrides.policy_kinds
        self._follows = settings.reliability == 'auto' and not overridden
        self._kind = Image if settings.image_transport == 'raw' else CompressedImage
        self._info_topic = f'{prefix}camera_info'
        self._reliable = settings.reliability == 'reliable'
        self._lock = threading.RLock()  # transitions come from another thread than the timer
        self._closed = False
        self._image: Any = None
        self._infos: list[Any] = []
        self._replaced: list[tuple[float, Any]] = []  # when, an image subscription
        self._hear_camera_info(DurabilityPolicy.VOLATILE)
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        self._timer = node.create_timer(GRAPH_PERIOD, self._look_at_graph, clock=steady)
        self._look_at_graph()

    def hear_images(self) -> None:
        with self._lock:
            self._last_sequence, self.last_image, self.incompatible = 0, None, ''
            self._image = self._subscribe(
                self._reliable or (self._follows and self._all_reliable())
            )

    def hear_no_images(self) -> None:
        with self._lock:
            for subscription in [self._image, *(s for _, s in self._replaced)]:
                if subscription is not None:
                    self._node.destroy_subscription(subscription)
            self._image, self._replaced = None, []

    def publishers(self) -> int:
        """That can be heard."""
        image = self._image
        return publisher_count(self._node, image) if image is not None else 0

    def close(self) -> None:
        self.hear_no_images()
        with self._lock:
            self._node.destroy_timer(self._timer)
            self._closed = True
            for subscription in self._infos:
                self._node.destroy_subscription(subscription)

    # QoS

    def _look_at_graph(self) -> None:
        """Follow publishers that come and go: what they offer decides how they are heard best."""
        with self._lock:
            if not self._closed:
                self._follow()

    def _follow(self) -> None:
        now = time.monotonic()
        while self._replaced and now - self._replaced[0][0] > OVERLAP:
            self._node.destroy_subscription(self._replaced.pop(0)[1])
        publishers = self._node.count_publishers(self.topic)
        if not publishers:
            self.incompatible = ''
        image = self._image
        if image is not None and self._follows and publishers:
            reliable = image.qos_profile.reliability == ReliabilityPolicy.RELIABLE
            if self._all_reliable() != reliable:
                # Both for a moment: nothing that is sent meanwhile is missed.
                self._image = self._subscribe(not reliable)
                self._replaced.append((now, image))
        infos = self._node.get_publishers_info_by_topic(
            self._node.resolve_topic_name(self._info_topic)
        )
        latched = DurabilityPolicy.TRANSIENT_LOCAL
        if len(self._infos) == 1 and any(i.qos_profile.durability == latched for i in infos):
            self._hear_camera_info(latched)

    def _all_reliable(self) -> bool:
        """Whether there are publishers, and all of them resend what is lost."""
        offered = self._node.get_publishers_info_by_topic(self.topic)
        kinds = {publisher.qos_profile.reliability for publisher in offered}
        return kinds == {ReliabilityPolicy.RELIABLE}

    def _subscribe(self, reliable: bool) -> Any:
        kind = ReliabilityPolicy.RELIABLE if reliable else ReliabilityPolicy.BEST_EFFORT
        return self._node.create_subscription(
            self._kind,
            self._topic,
            with_message_info(self._image_arrived),
            QoSProfile(depth=DEPTH, reliability=kind),
            event_callbacks=SubscriptionEventCallbacks(incompatible_qos=self._incompatible),
            qos_overriding_options=self._overrides,
        )

    def _hear_camera_info(self, durability: DurabilityPolicy) -> None:
        """Volatile hears every publisher from now on, latched what some have said before."""
        volatile = durability == DurabilityPolicy.VOLATILE
        reliability = ReliabilityPolicy.BEST_EFFORT if volatile else ReliabilityPolicy.RELIABLE
        self._infos.append(
            self._node.create_subscription(
                CameraInfo,
                self._info_topic,
                self._camera_info_arrived,
                QoSProfile(depth=1, reliability=reliability, durability=durability),
                event_callbacks=SubscriptionEventCallbacks(use_default_callbacks=False),
                qos_overriding_options=qos_overrides(self._node, self._info_topic, 'subscription'),
            )
        )

    def _incompatible(self, event: Any) -> None:
        if not self._follows:
            self.incompatible = qos_policy_name_from_kind(event.last_policy_kind)

    # Messages

    def _image_arrived(self, message: Any, info: dict[str, int]) -> None:
        sent = info.get('source_timestamp') or 0
        if sent and sent == self._last_sent and self._replaced:
            return  # heard by both
        self._last_sent = sent
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
        self.size = (message.width, message.height) if message.width else None
        try:
            self.camera = camera_from_info(message, self._rectified)
            self.bad_camera_info = ''
        except ValueError as error:
            self.camera = None
            self.bad_camera_info = str(error)
            self._node.get_logger().warning(str(error), throttle_duration_sec=QUIET)
