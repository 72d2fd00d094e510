"""The outputs of the keypoint node: keypoints and matches as clouds, and their publishers.

docs/messages.md describes the layout byte by byte. ROS is imported only to publish.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kp2d_core.checkpoint import SHORT_DIGEST
from kp2d_core.features import Features, Float
from kp2d_core.runtimes.base import Runtime
from kp2d_core.tracking import Result, Tracks
from kp2d_ros.overlay import Overlay
from kp2d_ros.settings import DESCRIPTOR_FORMATS, Settings
from kp2d_ros.stereo import StereoMatches, match_stereo

Points = NDArray[np.void]  # structured: one row a point, one name a field

LAYOUT = 2  # of the messages; docs/messages.md lists the changes

NO_TRACK = 2**32 - 1  # track_id while tracking is off
NO_INDEX = 2**32 - 1  # of the only row of a cloud without matches
# int8 descriptor = round(320 * component): components of 128-d or 256-d unit vectors are small.
INT8_SCALE = 320

KEYPOINT_FIELDS: list[tuple[Any, ...]] = [
    ('x', '<f4'), ('y', '<f4'), ('z', '<f4'),  # 1 m along the optical axis, where its ray passes
    ('u', '<f4'), ('v', '<f4'),  # pixels
    ('score', '<f4'),
    ('sigma', '<f4'),  # expected error of u and v, pixels
    ('scale', '<f4'),  # at which it was found, 1 = the image as it is
    ('track_id', '<u4'), ('track_age', '<u4'),
]  # fmt: skip
DESCRIPTOR_KINDS = {'float32': '<f4', 'float16': '<u2', 'int8': 'i1'}  # PointField has no half

MATCH_DTYPE = np.dtype([
    ('x', '<f4'), ('y', '<f4'), ('z', '<f4'),  # as of the keypoint
    ('u', '<f4'), ('v', '<f4'),  # in this frame, pixels
    ('previous_u', '<f4'), ('previous_v', '<f4'),  # in the previous frame
    ('index', '<u4'), ('previous_index', '<u4'),  # rows of the two keypoint clouds
    ('distance', '<f4'),  # of the descriptors, 0 to 2
    ('track_id', '<u4'),
    ('previous_sec', '<i4'), ('previous_nanosec', '<u4'),  # the previous frame's stamp
    ('inlier', '<u4'),  # 1 if it agrees with the estimated geometry
])  # fmt: skip

STEREO_DTYPE = np.dtype([
    ('x', '<f4'), ('y', '<f4'), ('z', '<f4'),  # metres in the first camera's frame, or NaN
    ('u', '<f4'), ('v', '<f4'),  # in the first camera's image, pixels
    ('other_u', '<f4'), ('other_v', '<f4'),  # in this camera's image
    ('index', '<u4'), ('other_index', '<u4'),  # rows of the two keypoint clouds
    ('distance', '<f4'),  # of the descriptors, 0 to 2
    ('track_id', '<u4'), ('other_track_id', '<u4'),
    ('inlier', '<u4'),  # 1 if it agrees with the geometry
])  # fmt: skip


def keypoint_dtype(descriptor_size: int, descriptor_format: str = 'float32') -> np.dtype[np.void]:
    """One keypoint: KEYPOINT_FIELDS and, unless the format is 'none', its descriptor."""
    if descriptor_format not in DESCRIPTOR_FORMATS:
        raise ValueError(
            f'descriptor_format must be one of {", ".join(DESCRIPTOR_FORMATS)}, '
            f"got '{descriptor_format}'"
        )
    if descriptor_format == 'none':
        return np.dtype(KEYPOINT_FIELDS)
    kind = DESCRIPTOR_KINDS[descriptor_format]
    return np.dtype([*KEYPOINT_FIELDS, ('descriptor', kind, (descriptor_size,))])


def fill_keypoints(
    points: Points, features: Features, rays: Float, tracks: Tracks | None, descriptor_format: str
) -> bool:
    """Fill zeroed rows of `keypoint_dtype`; return whether all are finite."""
    points['x'], points['y'], points['z'] = rays[:, 0], rays[:, 1], 1.0
    points['u'], points['v'] = features.keypoints.T
    points['score'] = features.scores
    points['sigma'] = features.sigma
    points['scale'] = features.scales
    points['track_id'] = NO_TRACK if tracks is None else tracks.ids % NO_TRACK
    points['track_age'] = 0 if tracks is None else tracks.ages
    if descriptor_format == 'float32':
        points['descriptor'] = features.descriptors
    elif descriptor_format == 'float16':
        points['descriptor'] = features.descriptors.astype('<f2').view('<u2')
    elif descriptor_format == 'int8':
        codes = features.descriptors * INT8_SCALE
        points['descriptor'] = np.clip(np.rint(codes, out=codes), -127, 127, out=codes)
    return bool(np.isfinite(rays).all())


def match_rows(tracks: Tracks) -> int:
    """Count the rows of a cloud of matches.

    Without matches there is one row that is not a match, to carry the previous stamp.
    """
    return max(len(tracks.matches), 1)


def fill_matches(
    points: Points,
    previous: Features,
    current: Features,
    rays: Float,
    tracks: Tracks,
    previous_stamp: int,
) -> bool:
    """Fill `match_rows` zeroed rows of MATCH_DTYPE; return whether all are finite."""
    matches = tracks.matches
    before, now = matches.indices.T
    points['previous_sec'], points['previous_nanosec'] = divmod(previous_stamp, 10**9)
    if not len(matches):
        points['x'] = points['y'] = points['z'] = points['distance'] = np.nan
        points['u'] = points['v'] = points['previous_u'] = points['previous_v'] = np.nan
        points['index'] = points['previous_index'] = NO_INDEX
        points['track_id'] = NO_TRACK
        return False
    points['x'], points['y'], points['z'] = rays[now, 0], rays[now, 1], 1.0
    points['u'], points['v'] = current.keypoints[now].T
    points['previous_u'], points['previous_v'] = previous.keypoints[before].T
    points['index'], points['previous_index'] = now, before
    points['distance'] = matches.distances
    points['track_id'] = tracks.ids[now] % NO_TRACK
    points['inlier'] = matches.inliers
    return bool(np.isfinite(points['x']).all())


def fill_stereo(points: Points, first: Result, other: Result, matches: StereoMatches) -> bool:
    """Fill rows of STEREO_DTYPE, one per match; return whether all are finite."""
    left, right = matches.indices.T
    points['x'], points['y'], points['z'] = matches.points.T
    points['u'], points['v'] = first.features.keypoints[left].T
    points['other_u'], points['other_v'] = other.features.keypoints[right].T
    points['index'], points['other_index'] = left, right
    points['distance'] = matches.distances
    points['track_id'] = _track_ids(first)[left]
    points['other_track_id'] = _track_ids(other)[right]
    points['inlier'] = matches.inliers
    return bool(np.isfinite(matches.points).all())


def _track_ids(result: Result) -> NDArray[np.int64]:
    if result.tracks is None:
        return np.full(len(result.features), NO_TRACK)
    return result.tracks.ids % NO_TRACK


def description(result: Result, settings: Settings, runtime: Runtime) -> str:
    """Describe what the clouds do not contain, as JSON."""
    width, height = result.features.image_size
    facts = {
        'layout': LAYOUT,
        'model': runtime.model,
        'weights': runtime.digest[:SHORT_DIGEST],
        'descriptor_size': result.features.descriptors.shape[1],
        'descriptor_format': settings.descriptor_format,
        'image_width': width,
        'image_height': height,
        'frame_id': result.frame.frame_id,
        'calibrated': result.calibrated,
    }
    return json.dumps(facts)


# sensor_msgs/PointField.datatype of a numpy kind
DATATYPES = {'i1': 1, 'u1': 2, 'i2': 3, 'u2': 4, 'i4': 5, 'u4': 6, 'f4': 7, 'f8': 8}


def point_fields(dtype: np.dtype[Any], kind: type) -> list[Any]:
    """The PointField of every field of a structured type; a sub-array is one with a count."""
    assert dtype.fields is not None
    result = []
    for name, (of, offset, *_) in dtype.fields.items():
        base, shape = of.subdtype if of.subdtype is not None else (of, (1,))
        code = DATATYPES[base.str[1:]]
        result.append(kind(name=name, offset=offset, datatype=code, count=int(shape[0])))
    return result


def new_cloud(header: Any, dtype: np.dtype[Any], count: int) -> tuple[Any, Points]:
    """Make a cloud of `count` zero points, and the array to fill, which shares its memory."""
    from sensor_msgs.msg import PointCloud2, PointField

    cloud = PointCloud2()
    cloud.header = header
    cloud.height = 1
    cloud.width = count
    cloud.fields = point_fields(dtype, PointField)
    cloud.is_bigendian = False
    cloud.point_step = dtype.itemsize
    cloud.row_step = count * dtype.itemsize
    cloud.is_dense = True
    cloud.data = array('B', bytes(count * dtype.itemsize))
    return cloud, np.frombuffer(cloud.data, dtype)  # some releases keep a copy


TOPICS = ('keypoints', 'matches', 'debug_image', 'debug_image/compressed')


class Outputs:
    """Lifecycle publishers of one camera, under relative names."""

    def __init__(
        self,
        node: Any,
        runtime: Runtime,
        rate: Callable[[], float],
        prefix: str = '',
        other: bool = False,
    ) -> None:
        """rate() is shown on the overlay; `other` marks a further camera of several."""
        from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
        from sensor_msgs.msg import CompressedImage, Image, PointCloud2
        from std_msgs.msg import String

        from kp2d_ros.parameters import qos_overrides

        self._node, self._runtime, self._rate = node, runtime, rate
        kinds = PointCloud2, PointCloud2, Image, CompressedImage
        topics: dict[str, type] = dict(zip(TOPICS, kinds, strict=True))
        if other:
            topics['stereo_matches'] = PointCloud2
        # Reliable matches both kinds of subscribers. With a short queue a slow subscriber misses
        # frames instead of lagging behind.
        self._topics = {
            topic: node.create_lifecycle_publisher(
                kind,
                prefix + topic,
                QoSProfile(depth=2, reliability=ReliabilityPolicy.RELIABLE),
                qos_overriding_options=qos_overrides(node, prefix + topic, 'publisher'),
            )
            for topic, kind in topics.items()
        }
        self.publishers = [*self._topics.values()]
        latched = QoSProfile(
            depth=1,
            reliability=ReliabilityPolicy.RELIABLE,
            durability=DurabilityPolicy.TRANSIENT_LOCAL,
        )
        self._info = node.create_lifecycle_publisher(String, f'{prefix}info', latched)
        self._described = String()
        self._overlay = Overlay()

    def publish(self, result: Result, header: Any, settings: Settings) -> None:
        """Publish keypoints first, because motion estimation waits for them."""
        if self._wanted('keypoints'):
            kind = settings.descriptor_format
            dtype = keypoint_dtype(result.features.descriptors.shape[1], kind)
            cloud, points = new_cloud(header, dtype, len(result.features))
            cloud.is_dense = fill_keypoints(
                points, result.features, result.rays, result.tracks, kind
            )
            self._topics['keypoints'].publish(cloud)
        described = type(self._described)(data=description(result, settings, self._runtime))
        if described != self._described:
            self._described = described
            self._info.publish(described)
        tracks, previous = result.tracks, result.previous
        if tracks is not None and previous is not None and self._wanted('matches'):
            cloud, points = new_cloud(header, MATCH_DTYPE, match_rows(tracks))
            cloud.is_dense = fill_matches(
                points, previous.features, result.features, result.rays, tracks,
                previous.frame.stamp,
            )  # fmt: skip
            self._topics['matches'].publish(cloud)
        if self._wanted('debug_image') or self._wanted('debug_image/compressed'):
            self._publish_overlay(result, header, settings)

    def publish_stereo(
        self, first: Result, result: Result, header: Any, settings: Settings
    ) -> None:
        """Publish the matches with the first camera, in its frame: `header` is its header."""
        if self._wanted('stereo_matches'):
            found = match_stereo(first, result, settings)
            cloud, points = new_cloud(header, STEREO_DTYPE, len(found.indices))
            cloud.is_dense = fill_stereo(points, first, result, found)
            self._topics['stereo_matches'].publish(cloud)

    def _wanted(self, topic: str) -> bool:
        return topic in self._topics and self._topics[topic].get_subscription_count() > 0

    def _publish_overlay(self, result: Result, header: Any, settings: Settings) -> None:
        from kp2d_ros.bridge import image_message, jpeg_message

        tracked = int((result.tracks.ages > 0).sum()) if result.tracks is not None else 0
        caption = f'{self._rate():.1f} Hz  {len(result.features)} keypoints  {tracked} tracked'
        canvas = self._overlay.draw(result, caption, settings.overlay_tail)
        if self._wanted('debug_image'):
            self._topics['debug_image'].publish(image_message(header, canvas, 'rgb8'))
        if self._wanted('debug_image/compressed'):
            message = jpeg_message(header, canvas, settings.jpeg_quality)
            self._topics['debug_image/compressed'].publish(message)

    def close(self) -> None:
        for publisher in (*self.publishers, self._info):
            self._node.destroy_lifecycle_publisher(publisher)


assert sys.byteorder == 'little', 'clouds are written in place, on little-endian machines only'
