"""Keypoints and matches as sensor_msgs/PointCloud2, to and from numpy without copies.

A cloud is read as a structured array over its own bytes, and written by filling such an array:
its bytes are the message's. docs/messages.md has the layout byte by byte.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sensor_msgs.msg import PointCloud2, PointField
from std_msgs.msg import Header

from kp2d_core.features import Features, Float
from kp2d_core.tracking import Tracks

Points = NDArray[np.void]  # structured: one row a point, one name a field

DESCRIPTOR_FORMATS = ('float32', 'int8', 'none')
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

_NUMPY_OF = {
    PointField.INT8: 'i1', PointField.UINT8: 'u1',
    PointField.INT16: 'i2', PointField.UINT16: 'u2',
    PointField.INT32: 'i4', PointField.UINT32: 'u4',
    PointField.FLOAT32: 'f4', PointField.FLOAT64: 'f8',
}  # fmt: skip
_FIELD_OF = {kind: code for code, kind in _NUMPY_OF.items()}


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


def new_cloud(header: Header, dtype: np.dtype[Any], count: int) -> tuple[PointCloud2, Points]:
    """A cloud of `count` zero points and the array to fill, which shares its memory."""
    data = array('B', [0]) * (count * dtype.itemsize)
    cloud = PointCloud2()
    cloud.header = header
    cloud.height = 1
    cloud.width = count
    cloud.fields = point_fields(dtype)
    cloud.is_bigendian = False
    cloud.point_step = dtype.itemsize
    cloud.row_step = count * dtype.itemsize
    cloud.is_dense = True
    cloud.data = data
    return cloud, np.frombuffer(cloud.data, dtype)  # some releases keep a copy


def point_fields(dtype: np.dtype[Any]) -> list[PointField]:
    """The PointField of every field of a structured type; a sub-array is one with a count."""
    assert dtype.fields is not None
    result = []
    for name, (kind, offset, *_) in dtype.fields.items():
        base, shape = kind.subdtype if kind.subdtype is not None else (kind, (1,))
        result.append(
            PointField(
                name=name, offset=offset, datatype=_FIELD_OF[base.str[1:]], count=int(shape[0])
            )
        )
    return result


def read_points(cloud: Any) -> Points:
    """Any PointCloud2 as a structured array over its own data, (width,) or (height, width).

    ValueError if its fields, steps and data do not fit each other.
    """
    order = '>' if cloud.is_bigendian else '<'
    names, formats, offsets = [], [], []
    for field in cloud.fields:
        if field.datatype not in _NUMPY_OF or field.count < 1:
            raise ValueError(
                f"field '{field.name}' has datatype {field.datatype} and count {field.count}"
            )
        names.append(field.name)
        kind = order + _NUMPY_OF[field.datatype]
        formats.append(kind if field.count == 1 else (kind, (field.count,)))
        offsets.append(field.offset)
    dtype = np.dtype(
        {'names': names, 'formats': formats, 'offsets': offsets, 'itemsize': cloud.point_step}
    )
    data = np.frombuffer(cloud.data, np.uint8)
    fits = cloud.width * cloud.point_step <= cloud.row_step
    if not fits or len(data) < cloud.height * cloud.row_step:
        raise ValueError(
            f'the cloud has {len(data)} bytes, not {cloud.height} rows of {cloud.width} points '
            f'of {cloud.point_step} bytes'
        )
    points: Points = np.ndarray(
        (cloud.height, cloud.width), dtype, data, 0, (cloud.row_step, cloud.point_step)
    )
    return points[0] if cloud.height == 1 else points


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


def bytes_of(values: NDArray[Any] | bytes) -> array[int]:
    """What a message's uint8[] takes fastest. A numpy array costs it 1000 times as much."""
    data = array('B')
    data.frombytes(values if isinstance(values, bytes) else np.ascontiguousarray(values).data)
    return data


assert sys.byteorder == 'little', 'clouds are written in place, on little-endian machines only'
