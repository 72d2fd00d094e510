"""What the keypoint node publishes: keypoints and matches as clouds, and to whom.

docs/messages.md has the layout byte by byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CompressedImage, Image, PointCloud2
from std_msgs.msg import Header, String

from kp2d_core.features import Features, Float
from kp2d_core.tracking import Tracks
from kp2d_ros.bridge import image_message, jpeg_message
from kp2d_ros.clouds import new_cloud, read_points
from kp2d_ros.overlay import Overlay
from kp2d_ros.parameters import qos_overrides
from kp2d_ros.pipeline import Result
from kp2d_ros.rows import (
    KEYPOINT_FIELDS,
    MATCH_DTYPE,
    NO_INDEX,
    STEREO_DTYPE,
    Points,
    description,
    fill_keypoints,
    fill_matches,
    fill_stereo,
    keypoint_dtype,
    match_rows,
)
from kp2d_ros.settings import Settings
from kp2d_ros.stereo import StereoMatches, match_stereo


def keypoints_to_cloud(
    header: Header,
    features: Features,
    rays: Float,
    tracks: Tracks | None = None,
    *,
    descriptor_format: str = 'float32',
) -> PointCloud2:
    """Features, the (N, 2) rays of their pixels, and their tracks if there are any."""
    dtype = keypoint_dtype(features.descriptors.shape[1], descriptor_format)
    cloud, points = new_cloud(header, dtype, len(features))
    cloud.is_dense = fill_keypoints(points, features, rays, tracks, descriptor_format)
    return cloud


@dataclass(frozen=True)
class Keypoints:
    """What a keypoints cloud says, row by row."""

    features: Features
    rays: Float  # (N, 2): the ray of a keypoint is (x, y, 1) in the frame of the header
    track_ids: NDArray[np.uint32]
    track_ages: NDArray[np.uint32]


def keypoints_from_cloud(cloud: Any, image_size: tuple[int, int] = (0, 0)) -> Keypoints:
    """The inverse of `keypoints_to_cloud`; ValueError if it is no cloud of keypoints.

    Descriptors have unit length; those that travel as float32 are views of the message.
    """
    points = read_points(cloud)
    names = points.dtype.names or ()
    for name, *_ in KEYPOINT_FIELDS:
        if name not in names:
            raise ValueError(f"the cloud has no field '{name}': it is not one of keypoints")
    descriptors = np.empty((len(points), 0), np.float32)
    if 'descriptor' in names:
        size = int(np.prod(points.dtype['descriptor'].shape))
        descriptors = points['descriptor'].reshape(len(points), size)
        if descriptors.dtype.kind == 'u':
            descriptors = np.ascontiguousarray(descriptors).view(np.float16)
        if descriptors.dtype != np.float32:
            descriptors = descriptors.astype(np.float32)
            lengths = np.linalg.norm(descriptors, axis=1, keepdims=True)
            descriptors /= np.maximum(lengths, 1e-12)
    positions = np.stack([points['u'], points['v']], axis=1)
    return Keypoints(
        features=Features(
            positions,
            points['score'],
            descriptors,
            image_size,
            scales=points['scale'],
            sigma=points['sigma'],
        ),
        rays=np.stack([points['x'], points['y']], axis=1),
        track_ids=points['track_id'],
        track_ages=points['track_age'],
    )


def matches_to_cloud(
    header: Header,
    previous: Features,
    current: Features,
    rays: Float,
    tracks: Tracks,
    previous_stamp: int,
) -> PointCloud2:
    """Matches between the previous frame (its stamp in nanoseconds) and this one.

    Without any, one row that is no match: the stamp needs a place.
    """
    cloud, points = new_cloud(header, MATCH_DTYPE, match_rows(tracks))
    cloud.is_dense = fill_matches(points, previous, current, rays, tracks, previous_stamp)
    return cloud


@dataclass(frozen=True)
class MatchedPoints:
    """What a matches cloud says."""

    points: Points  # of MATCH_DTYPE, a row for each match
    previous_stamp: int  # nanoseconds


def matches_from_cloud(cloud: Any) -> MatchedPoints:
    """ValueError if it is no cloud of matches."""
    points = read_points(cloud)
    if not len(points) or not set(MATCH_DTYPE.names or ()) <= set(points.dtype.names or ()):
        raise ValueError('the cloud is not one of matches')
    stamp = int(points['previous_sec'][0]) * 10**9 + int(points['previous_nanosec'][0])
    return MatchedPoints(points[points['index'] != NO_INDEX], stamp)


def stereo_to_cloud(
    header: Header, first: Result, other: Result, matches: StereoMatches
) -> PointCloud2:
    """Matches between the first camera, whose header it is, and another one."""
    cloud, points = new_cloud(header, STEREO_DTYPE, len(matches.indices))
    cloud.is_dense = fill_stereo(points, first, other, matches)
    return cloud


LATCHED = QoSProfile(
    depth=1,
    reliability=ReliabilityPolicy.RELIABLE,
    durability=DurabilityPolicy.TRANSIENT_LOCAL,
)

TOPICS: dict[str, type] = {
    'keypoints': PointCloud2,
    'matches': PointCloud2,
    'debug_image': Image,
    'debug_image/compressed': CompressedImage,
}


class Outputs:
    """Lifecycle publishers of one camera, under relative names."""

    def __init__(self, node: Any, model: str, prefix: str = '', stereo: bool = False) -> None:
        """stereo: it is one of several cameras, and not the first."""
        self._node = node
        self._model = model
        topics = {**TOPICS, **({'stereo_matches': PointCloud2} if stereo else {})}
        # Reliable meets subscribers of both kinds; with a short queue a slow one misses frames
        # instead of lagging.
        self._publishers = {
            topic: node.create_lifecycle_publisher(
                kind,
                prefix + topic,
                QoSProfile(depth=2, reliability=ReliabilityPolicy.RELIABLE),
                qos_overriding_options=qos_overrides(node, prefix + topic, 'publisher'),
            )
            for topic, kind in topics.items()
        }
        self._info = node.create_lifecycle_publisher(String, f'{prefix}info', LATCHED)
        self._described = String()
        self._overlay = Overlay()

    def wanted(self, *topics: str) -> bool:
        """Whether anybody subscribes to one of the topics; without names, to any."""
        publishers = self._publishers
        return any(
            publishers[topic].get_subscription_count() > 0
            for topic in topics or publishers
            if topic in publishers
        )

    def publish(
        self, result: Result, header: Header, settings: Settings, rate: Callable[[], float]
    ) -> None:
        """Keypoints first: whoever estimates motion waits for them."""
        described = String(data=description(result, settings, self._model))
        if described != self._described:
            self._described = described
            self._info.publish(described)
        if self.wanted('keypoints'):
            self._publishers['keypoints'].publish(
                keypoints_to_cloud(
                    header,
                    result.features,
                    result.rays,
                    result.tracks,
                    descriptor_format=settings.descriptor_format,
                )
            )
        if result.tracks is not None and result.previous is not None and self.wanted('matches'):
            self._publishers['matches'].publish(
                matches_to_cloud(
                    header,
                    result.previous.features,
                    result.features,
                    result.rays,
                    result.tracks,
                    result.previous.frame.stamp,
                )
            )
        if self.wanted('debug_image', 'debug_image/compressed'):
            self._publish_overlay(result, header, settings, rate())

    def publish_stereo(
        self, header: Header, first: Result, other: Result, settings: Settings
    ) -> None:
        if self.wanted('stereo_matches'):
            matches = match_stereo(first, other, settings)
            self._publishers['stereo_matches'].publish(
                stereo_to_cloud(header, first, other, matches)
            )

    def _publish_overlay(
        self, result: Result, header: Header, settings: Settings, rate: float
    ) -> None:
        tracked = int((result.tracks.ages > 0).sum()) if result.tracks is not None else 0
        caption = f'{rate:.1f} Hz  {len(result.features)} keypoints  {tracked} tracked'
        canvas = self._overlay.draw(result, caption, settings.overlay_tail)
        if self.wanted('debug_image'):
            self._publishers['debug_image'].publish(image_message(header, canvas, 'rgb8'))
        if self.wanted('debug_image/compressed'):
            message = jpeg_message(header, canvas, settings.jpeg_quality)
            self._publishers['debug_image/compressed'].publish(message)

    def close(self) -> None:
        for publisher in (*self._publishers.values(), self._info):
            self._node.destroy_lifecycle_publisher(publisher)
