"""sensor_msgs/PointCloud2 to and from numpy, without copies.

A cloud is read and written as a structured array that shares its bytes.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sensor_msgs.msg import PointField

from kp2d_ros.outputs import Points
from kp2d_ros.outputs import new_cloud as new_cloud

_NUMPY_OF = {
    PointField.INT8: 'i1', PointField.UINT8: 'u1',
    PointField.INT16: 'i2', PointField.UINT16: 'u2',
    PointField.INT32: 'i4', PointField.UINT32: 'u4',
    PointField.FLOAT32: 'f4', PointField.FLOAT64: 'f8',
}  # fmt: skip


def read_points(cloud: Any) -> Points:
    """Return any PointCloud2 as a structured view of its data, (width,) or (height, width).

    Raise ValueError if fields, steps and data do not fit together.
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
    """Convert to the type that uint8[] takes fastest; a numpy array takes 1000 times as long."""
    data = array('B')
    data.frombytes(values if isinstance(values, bytes) else np.ascontiguousarray(values).data)
    return data
