"""What the keypoint node publishes: keypoints and matches as clouds, and to whom.

docs/messages.md has the layout byte by byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CompressedImage, Image, PointCloud2
from std_msgs.msg import Header

from kp2d_core.features import Features, Float
from kp2d_core.tracking import Tracks
from kp2d_ros.clouds import bytes_of, new_cloud, read_points
from kp2d_ros.overlay import Overlay, to_jpeg
from kp2d_ros.pipeline import Result
from kp2d_ros.settings import DESCRIPTOR_FORMATS, Settings

__all__ = ['keypoints_from_cloud', 'keypoints_to_cloud', 'matches_to_cloud', 'read_points']

NO_TRACK = 2**32 - 1  # track_id while tracking is off
INT8_SCALE = 127  # int8 descriptor = round(127 * component)

MATCH_DTYPE = np.dtype([
    ('x', '<f4'), ('y', '<f4'), ('z', '<f4'),  # in this frame, pixels; z = 0
    ('previous_x', '<f4'), ('previous_y', '<f4'),  # in the previous frame
    ('index', '<u4'), ('previous_index', '<u4'),  # rows of the two keypoint clouds
    ('distance', '<f4'),  # of the descriptors, 0 to 2
    ('track_id', '<u4'),
    ('previous_sec', '<i4'), ('previous_nanosec', '<u4'),  # the previous frame's stamp
    ('inlier', '<u4'),  # 1 if it agrees with the estimated geometry
])  # fmt: skip

# Reliable meets subscribers of both kinds; a short queue lets a slow one miss frames, not lag.
QOS = QoSProfile(depth=2, reliability=ReliabilityPolicy.RELIABLE)

TOPICS: dict[str, type] = {
    'keypoints': PointCloud2,
    'matches': PointCloud2,
    'debug_image': Image,
    'debug_image/compressed': CompressedImage,
}


def keypoint_dtype(
    descriptor_size: int, descriptor_format: str = 'float32', *, bearings: bool = False
) -> np.dtype[np.void]:
    """One keypoint: x, y, z, score, track_id, track_age, [bearing_x, bearing_y,] [descriptor]."""
    if descriptor_format not in DESCRIPTOR_FORMATS:
        raise ValueError(
            f'descriptor_format must be one of {", ".join(DESCRIPTOR_FORMATS)}, '
            f"got '{descriptor_format}'"
        )
    fields: list[tuple[Any, ...]] = [
        ('x', '<f4'), ('y', '<f4'), ('z', '<f4'), ('score', '<f4'),
        ('track_id', '<u4'), ('track_age', '<u4'),
    ]  # fmt: skip
    if bearings:
        fields += [('bearing_x', '<f4'), ('bearing_y', '<f4')]
    if descriptor_format != 'none':
        fields.append(
            ('descriptor', '<f4' if descriptor_format == 'float32' else 'i1', (descriptor_size,))
        )
    return np.dtype(fields)


def keypoints_to_cloud(
    header: Header,
    features: Features,
    tracks: Tracks | None = None,
    *,
    descriptor_format: str = 'float32',
    bearings: Float | None = None,
) -> PointCloud2:
    """Features, their tracks if there are any, and (N, 2) bearings if they are wanted."""
    dtype = keypoint_dtype(
        features.descriptors.shape[1], descriptor_format, bearings=bearings is not None
    )
    cloud, points = new_cloud(header, dtype, len(features))
    points['x'] = features.keypoints[:, 0]
    points['y'] = features.keypoints[:, 1]
    points['score'] = features.scores
    points['track_id'] = NO_TRACK if tracks is None else tracks.ids % NO_TRACK
    points['track_age'] = 0 if tracks is None else tracks.ages
    if bearings is not None:
        points['bearing_x'] = bearings[:, 0]
        points['bearing_y'] = bearings[:, 1]
        cloud.is_dense = bool(np.isfinite(bearings).all())
    if descriptor_format == 'float32':
        points['descriptor'] = features.descriptors
    elif descriptor_format == 'int8':
        points['descriptor'] = np.rint(features.descriptors * INT8_SCALE)
    return cloud


@dataclass(frozen=True)
class Keypoints:
    """What a keypoints cloud says."""

    features: Features
    track_ids: NDArray[np.uint32]
    track_ages: NDArray[np.uint32]
    bearings: Float | None  # (N, 2), None if the cloud has none


def keypoints_from_cloud(cloud: Any, image_size: tuple[int, int] = (0, 0)) -> Keypoints:
    """The inverse of `keypoints_to_cloud`. float32 descriptors are views, int8 are normalised."""
    points = read_points(cloud)
    names = points.dtype.names or ()
    for name in ('x', 'y', 'score', 'track_id', 'track_age'):
        if name not in names:
            raise ValueError(f"the cloud has no field '{name}': it is not one of keypoints")
    descriptors = np.empty((len(points), 0), np.float32)
    if 'descriptor' in names:
        size = int(np.prod(points.dtype['descriptor'].shape))
        descriptors = points['descriptor'].reshape(len(points), size)
        if descriptors.dtype == np.int8:
            descriptors = descriptors.astype(np.float32)
            lengths = np.linalg.norm(descriptors, axis=1, keepdims=True)
            descriptors /= np.maximum(lengths, 1e-12)
    bearings = None
    if 'bearing_x' in names:
        bearings = np.stack([points['bearing_x'], points['bearing_y']], axis=1)
    positions = np.stack([points['x'], points['y']], axis=1)
    features = Features(positions, points['score'], descriptors, image_size)
    return Keypoints(features, points['track_id'], points['track_age'], bearings)


def matches_to_cloud(
    header: Header,
    previous: Features,
    current: Features,
    tracks: Tracks,
    previous_stamp: int,
) -> PointCloud2:
    """Matches between the previous frame (its stamp in nanoseconds) and this one."""
    matches = tracks.matches
    before, now = matches.indices.T
    cloud, points = new_cloud(header, MATCH_DTYPE, len(matches))
    points['x'], points['y'] = current.keypoints[now].T
    points['previous_x'], points['previous_y'] = previous.keypoints[before].T
    points['index'], points['previous_index'] = now, before
    points['distance'] = matches.distances
    points['track_id'] = tracks.ids[now] % NO_TRACK
    points['previous_sec'], points['previous_nanosec'] = divmod(previous_stamp, 10**9)
    points['inlier'] = matches.inliers
    return cloud


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
        self, result: Result, header: Header, settings: Settings, rate: Callable[[], float]
    ) -> None:
        """Keypoints first: whoever estimates motion waits for them."""
        if self.wanted('keypoints'):
            self._publishers['keypoints'].publish(
                keypoints_to_cloud(
                    header,
                    result.features,
                    result.tracks,
                    descriptor_format=settings.descriptor_format,
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
            self._publish_overlay(result, header, settings, rate())

    def _publish_overlay(
        self, result: Result, header: Header, settings: Settings, rate: float
    ) -> None:
        tracked = int((result.tracks.ages > 0).sum()) if result.tracks is not None else 0
        caption = f'{rate:.1f} Hz  {len(result.features)} keypoints  {tracked} tracked'
        canvas = self._overlay.draw(result, caption, settings.overlay_tail)
        height, width = canvas.shape[:2]
        if self.wanted('debug_image'):
            image = Image(
                header=header, height=height, width=width, encoding='rgb8', step=3 * width
            )
            image.data = bytes_of(canvas)
            self._publishers['debug_image'].publish(image)
        if self.wanted('debug_image/compressed'):
            image = CompressedImage(header=header, format='rgb8; jpeg compressed bgr8')
            image.data = bytes_of(to_jpeg(canvas, settings.jpeg_quality))
            self._publishers['debug_image/compressed'].publish(image)

    def destroy(self) -> None:
        for publisher in self._publishers.values():
            self._node.destroy_lifecycle_publisher(publisher)
