"""Convert the clouds of the keypoint node to objects, and back.

docs/messages.md has the layout byte by byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import PointCloud2
from std_msgs.msg import Header

from kp2d_core.features import Features, Float
from kp2d_core.tracking import Result, Tracks
from kp2d_ros.clouds import new_cloud, read_points
from kp2d_ros.outputs import (
    KEYPOINT_FIELDS,
    MATCH_DTYPE,
    NO_INDEX,
    STEREO_DTYPE,
    Points,
    fill_keypoints,
    fill_matches,
    fill_stereo,
    keypoint_dtype,
    match_rows,
)
from kp2d_ros.stereo import StereoMatches


def keypoints_to_cloud(
    header: Header,
    features: Features,
    rays: Float,
    tracks: Tracks | None = None,
    *,
    descriptor_format: str = 'float32',
) -> PointCloud2:
    """Convert features, the rays (N, 2) of their pixels, and their tracks, if any."""
    dtype = keypoint_dtype(features.descriptors.shape[1], descriptor_format)
    cloud, points = new_cloud(header, dtype, len(features))
    cloud.is_dense = fill_keypoints(points, features, rays, tracks, descriptor_format)
    return cloud


@dataclass(frozen=True)
class Keypoints:
    """The content of a keypoints cloud, row by row."""

    features: Features
    rays: Float  # (N, 2): the ray of a keypoint is (x, y, 1) in the frame of the header
    track_ids: NDArray[np.uint32]
    track_ages: NDArray[np.uint32]


def keypoints_from_cloud(cloud: Any, image_size: tuple[int, int] = (0, 0)) -> Keypoints:
    """The inverse of `keypoints_to_cloud`; raise ValueError for another cloud.

    Descriptors have unit length; float32 descriptors are views of the message.
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
    """Convert the matches of the previous frame (stamp in nanoseconds) with this one.

    Without matches the cloud has one row that is not a match, to carry the stamp.
    """
    cloud, points = new_cloud(header, MATCH_DTYPE, match_rows(tracks))
    cloud.is_dense = fill_matches(points, previous, current, rays, tracks, previous_stamp)
    return cloud


@dataclass(frozen=True)
class MatchedPoints:
    """The content of a matches cloud."""

    points: Points  # of MATCH_DTYPE, a row for each match
    previous_stamp: int  # nanoseconds


def matches_from_cloud(cloud: Any) -> MatchedPoints:
    """Read a cloud of matches; raise ValueError for another cloud."""
    points = read_points(cloud)
    if not len(points) or not set(MATCH_DTYPE.names or ()) <= set(points.dtype.names or ()):
        raise ValueError('the cloud is not one of matches')
    stamp = int(points['previous_sec'][0]) * 10**9 + int(points['previous_nanosec'][0])
    return MatchedPoints(points[points['index'] != NO_INDEX], stamp)


def stereo_to_cloud(
    header: Header, first: Result, other: Result, matches: StereoMatches
) -> PointCloud2:
    """Convert the matches of the first camera, which gives the header, with another camera."""
    cloud, points = new_cloud(header, STEREO_DTYPE, len(matches.indices))
    cloud.is_dense = fill_stereo(points, first, other, matches)
    return cloud


LATCHED = QoSProfile(
    depth=1,
    reliability=ReliabilityPolicy.RELIABLE,
    durability=DurabilityPolicy.TRANSIENT_LOCAL,
)
