"""The rows of the clouds that are published, without ROS: keypoints and matches as numpy arrays.

docs/messages.md has the layout byte by byte.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kp2d_core.features import Features, Float
from kp2d_core.tracking import Tracks
from kp2d_ros.pipeline import Result
from kp2d_ros.settings import DESCRIPTOR_FORMATS, Settings
from kp2d_ros.stereo import StereoMatches

Points = NDArray[np.void]  # structured: one row a point, one name a field

LAYOUT = 2  # of what is published; docs/messages.md says what changed

NO_TRACK = 2**32 - 1  # track_id while tracking is off
NO_INDEX = 2**32 - 1  # of the only row of a cloud without matches
# int8 descriptor = round(320 * component): of 128 or 256 components none of length 1 is large.
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
    """Fill zeroed rows of `keypoint_dtype`; whether all of them are finite."""
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
        codes = np.rint(features.descriptors * INT8_SCALE)
        points['descriptor'] = np.clip(codes, -127, 127, out=codes)
    return bool(np.isfinite(rays).all())


def match_rows(tracks: Tracks) -> int:
    """How many rows a cloud of matches has: without any, one that is no match.

    The stamp of the previous frame needs a place.
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
    """Fill `match_rows` zeroed rows of MATCH_DTYPE; whether all of them are finite."""
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
    """Fill rows of STEREO_DTYPE, one for each match; whether all of them are finite."""
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


def description(result: Result, settings: Settings, model: str) -> str:
    """What the clouds do not say of themselves, as JSON."""
    width, height = result.features.image_size
    facts = {
        'layout': LAYOUT,
        'model': model,
        'descriptor_size': result.features.descriptors.shape[1],
        'descriptor_format': settings.descriptor_format,
        'image_width': width,
        'image_height': height,
        'frame_id': result.frame.frame_id,
        'calibrated': result.calibrated,
    }
    return json.dumps(facts)
