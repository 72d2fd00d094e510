"""sensor_msgs/PointCloud2 to and from numpy, without copies.

A cloud is read as a structured array over its own bytes, and written by filling such an array:
its bytes are the message's.
"""

from __future__ import annotations

import sys
from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sensor_msgs.msg import PointCloud2, PointField
from std_msgs.msg import Header

from kp2d_ros.rows import Points

_NUMPY_OF = {
    PointField.INT8: 'i1', PointField.UINT8: 'u1',
    PointField.INT16: 'i2', PointField.UINT16: 'u2',
    PointField.INT32: 'i4', PointField.UINT32: 'u4',
    PointField.FLOAT32: 'f4', PointField.FLOAT64: 'f8',
}  # fmt: skip
_FIELD_OF = {kind: code for code, kind in _NUMPY_OF.items()}


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


def bytes_of(values: NDArray[Any] | bytes) -> array[int]:
    """What a message's uint8[] takes fastest. A numpy array costs it 1000 times as much."""
    data = array('B')
    data.frombytes(values if isinstance(values, bytes) else np.ascontiguousarray(values).data)
    return data


assert sys.byteorder == 'little', 'clouds are written in place, on little-endian machines only'
