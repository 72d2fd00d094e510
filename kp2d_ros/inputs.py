"""The inputs of the keypoint node for one camera: images, calibration, mask."""

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
from kp2d_core.images import Image as Array
from kp2d_core.images import Size, decode
from kp2d_ros.compat import (
    ClockType,
    SubscriptionEventCallbacks,
    publisher_counter,
    with_message_info,
)
from kp2d_ros.parameters import qos_overrides
from kp2d_ros.pipeline import Arrival
from kp2d_ros.settings import Settings
from kp2d_ros.stereo import baseline_of

LATCHED = DurabilityPolicy.TRANSIENT_LOCAL
QUIET = 5.0  # seconds between two warnings of one kind
GRAPH_PERIOD = 0.25  # seconds between two looks at who publishes
OVERLAP = 1.0  # seconds that an old subscription is kept beside the one that replaces it
OWN_TRANSPORTS = ('raw', 'compressed')  # that need no plugin
DEPTH = 5  # images that wait while the executor is busy; the newest of them is processed


def image_topic(node: Any, settings: Settings, prefix: str = '') -> str:
    """Return the topic to subscribe to; image/compressed follows image unless it is remapped."""
    image, compressed = f'{prefix}image', f'{prefix}image/compressed'
    if settings.image_transport != 'compressed':
        return image
    unmapped = node.resolve_topic_name(compressed, only_expand=True)
    if node.resolve_topic_name(compressed) != unmapped:
        return compressed
    return f'{node.resolve_topic_name(image)}/compressed'


def subscribe_by_plugin(
    node: Any, topic: str, transport: str, callback: Callable[[Any], None]
) -> Any:
    """A subscription of image_transport, whose plugins decode what others encoded."""
    try:
        from image_transport_py import ImageTransport
    except ImportError as error:
        raise ValueError(
            f"image_transport '{transport}' needs the package image_transport_py, which is not "
            'installed; raw and compressed need nothing'
        ) from error
    name, resolved = f'{node.get_name()}_{transport}', node.resolve_topic_name(topic)
    try:
        return ImageTransport(node, name, transport).subscribe(node, resolved, DEPTH, callback)
    except TypeError:  # until Kilted it takes no node
        return ImageTransport(name, transport).subscribe(resolved, DEPTH, callback)


class Input:
    """Receives camera_info and masks until it is closed, and images on request."""

    def __init__(
        self,
        node: Any,
        settings: Settings,
        prefix: str = '',
    ) -> None:
        self.camera: Camera | None = None
        self.size: Size | None = None  # of the images, as camera_info says
        self.baseline = 0.0  # metres, from P of camera_info
        self.mask: Array | None = None  # the last one
        self.last_image: float | None = None  # time.monotonic()
        self.incompatible = ''  # the QoS policy that keeps a publisher from being heard
        self.bad_camera_info = ''  # why the last one cannot be used
        self._node = node
        self._submit: Callable[[Arrival], None] = lambda arrival: None
        self._last_sequence = self._last_sent = 0
        topic = image_topic(node, settings, prefix)
        self.topic = node.resolve_topic_name(topic)
        self._topic = topic
        asked = settings.image_geometry
        self._rectified = asked == 'rectified' or (asked == 'auto' and names_rectified(self.topic))
        self._overrides = qos_overrides(node, topic, 'subscription')
        overridden = QoSPolicyKind.RELIABILITY in self._overrides.policy_kinds
        self._follows = settings.reliability == 'auto' and not overridden
        self._transport = settings.image_transport
        self._kind = CompressedImage if self._transport == 'compressed' else Image
        self._reliable = settings.reliability == 'reliable'
        self._lock = threading.RLock()  # transitions come from another thread than the timer
        self._closed = False
        self._image: Any = None
        self._count_publishers: Callable[[], int] | None = None  # while images are heard
        self._plugin: Any = None  # a subscription of image_transport_py
        self._beside: list[Any] = []  # subscriptions to camera_info and mask
        self._latched: dict[str, tuple[type, Callable[[Any], None]]] = {}  # not yet heard as such
        self._replaced: list[tuple[float, Any]] = []  # when, an image subscription
        self._hear(CameraInfo, f'{prefix}camera_info', self._camera_info_arrived)
        self._hear(Image, f'{prefix}mask', self._mask_arrived)
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        self._timer = node.create_timer(GRAPH_PERIOD, self._look_at_graph, clock=steady)
        self._look_at_graph()

    def hear_images(self, submit: Callable[[Arrival], None]) -> None:
        """Call submit(arrival) for every image."""
        with self._lock:
            self._submit = submit
            self._last_sequence, self.last_image, self.incompatible = 0, None, ''
            if self._transport not in OWN_TRANSPORTS:
                self._plugin = subscribe_by_plugin(
                    self._node, self._topic, self._transport, lambda m: self._image_arrived(m, {})
                )
                self._count_publishers = self._plugin.get_num_publishers
                return
            self._hear_image(self._reliable or (self._follows and self._all_reliable()))

    def hear_no_images(self) -> None:
        with self._lock:
            for subscription in [self._image, *(s for _, s in self._replaced)]:
                if subscription is not None:
                    self._node.destroy_subscription(subscription)
            self._image, self._replaced, self._count_publishers = None, [], None
            if self._plugin is not None:
                self._plugin.shutdown()
            self._plugin = None

    def publishers(self) -> int:
        """Count the publishers that can be received."""
        count = self._count_publishers
        return int(count()) if count is not None else 0

    def close(self) -> None:
        self.hear_no_images()
        with self._lock:
            self._node.destroy_timer(self._timer)
            self._closed = True
            for subscription in self._beside:
                self._node.destroy_subscription(subscription)

    # QoS

    def _look_at_graph(self) -> None:
        """Adapt the subscription to the QoS of the publishers, which come and go."""
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
                # Keep both for a moment, so that no message is missed.
                self._hear_image(not reliable)
                self._replaced.append((now, image))
        for topic, (kind, callback) in [*self._latched.items()]:
            offered = self._node.get_publishers_info_by_topic(self._node.resolve_topic_name(topic))
            if any(each.qos_profile.durability == LATCHED for each in offered):
                del self._latched[topic]
                self._hear(kind, topic, callback, latched=True)

    def _all_reliable(self) -> bool:
        """Whether there are publishers and all of them are reliable."""
        offered = self._node.get_publishers_info_by_topic(self.topic)
        kinds = {publisher.qos_profile.reliability for publisher in offered}
        return kinds == {ReliabilityPolicy.RELIABLE}

    def _hear_image(self, reliable: bool) -> None:
        kind = ReliabilityPolicy.RELIABLE if reliable else ReliabilityPolicy.BEST_EFFORT
        self._image = self._node.create_subscription(
            self._kind,
            self._topic,
            with_message_info(self._image_arrived),
            QoSProfile(depth=DEPTH, reliability=kind),
            event_callbacks=SubscriptionEventCallbacks(incompatible_qos=self._incompatible),
            qos_overriding_options=self._overrides,
        )
        self._count_publishers = publisher_counter(self._node, self._image)

    def _hear(
        self, kind: type, topic: str, callback: Callable[[Any], None], *, latched: bool = False
    ) -> None:
        """Subscribe twice: volatile receives every publisher, latched also earlier messages."""
        if not latched:
            self._latched[topic] = kind, callback
        qos = QoSProfile(
            depth=1,
            reliability=ReliabilityPolicy.RELIABLE if latched else ReliabilityPolicy.BEST_EFFORT,
            durability=LATCHED if latched else DurabilityPolicy.VOLATILE,
        )
        self._beside.append(
            self._node.create_subscription(
                kind,
                topic,
                callback,
                qos,
                event_callbacks=SubscriptionEventCallbacks(use_default_callbacks=False),
                qos_overriding_options=qos_overrides(self._node, topic, 'subscription'),
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
        lost = self._lost_before(info.get('publication_sequence_number') or 0)
        self._submit(
            Arrival(message, self.last_image, self.camera, self.mask, self.baseline, lost)
        )

    def _lost_before(self, sequence: int) -> int:
        """Return the gap in the sequence numbers; with two publishers it is unknown."""
        last, self._last_sequence = self._last_sequence, sequence
        if self._count_publishers is None or self._count_publishers() != 1:
            self._last_sequence = 0
            return 0
        return max(sequence - last - 1, 0) if last else 0

    def _camera_info_arrived(self, message: CameraInfo) -> None:
        self.size = (message.width, message.height) if message.width else None
        self.baseline = baseline_of(message.p)
        try:
            self.camera = camera_from_info(message, self._rectified)
            self.bad_camera_info = ''
        except ValueError as error:
            self.camera = None
            self.bad_camera_info = str(error)  # the report says so on the console too

    def _mask_arrived(self, message: Image) -> None:
        """Use this mask until the next one; it need not have the size of the images."""
        try:
            mask = decode(message)
            self.mask = mask if mask.ndim == 2 else mask.max(axis=2)
        except ValueError as error:
            self._node.get_logger().warning(f'mask: {error}', throttle_duration_sec=QUIET)
