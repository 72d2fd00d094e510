"""Convert features to the formats of RTAB-Map: compressed matrices, keypoints and 3D points.

This module computes the fields of the messages. It does not need rtabmap_msgs.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kp2d_core.features import Features, Float

CV_32F = 5  # OpenCV's type number for float32 with one channel
TRAILER = struct.Struct('<iii')  # rows, columns, type
SIZE = 8.0  # of a keypoint, pixels; RTAB-Map uses the same size for its Python detector
MOST_BYTES = 1 << 28


def pack_matrix(rows: Float) -> bytes:
    """Compress a float32 matrix (N, D) as RTAB-Map does: zlib, then rows, columns, type."""
    matrix = np.ascontiguousarray(rows, '<f4')
    if matrix.ndim != 2:
        raise ValueError(f'a matrix must have two dimensions, got the shape {matrix.shape}')
    if not matrix.size:
        return b''
    return zlib.compress(matrix.tobytes(), 1) + TRAILER.pack(*matrix.shape, CV_32F)


def unpack_matrix(data: bytes) -> Float:
    """Undo pack_matrix; raise ValueError if the data is not such a matrix."""
    if not data:
        return np.empty((0, 0), np.float32)
    if len(data) <= TRAILER.size:
        raise ValueError('the matrix is too short')
    rows, columns, kind = TRAILER.unpack(data[-TRAILER.size :])
    if kind != CV_32F or rows < 0 or columns < 0 or 4 * rows * columns > MOST_BYTES:
        raise ValueError(f'{rows} x {columns} of type {kind} is not a float32 matrix')
    try:
        body = zlib.decompressobj().decompress(data[: -TRAILER.size], 4 * rows * columns + 1)
    except zlib.error as error:
        raise ValueError(f'the matrix is damaged: {error}') from None
    if len(body) != 4 * rows * columns:
        raise ValueError('the matrix is damaged')
    return np.frombuffer(body, '<f4').reshape(rows, columns)


def points_in_depth(
    pixels: Float, rays: Float, depth: NDArray[Any], farthest: float = 0.0
) -> Float:
    """Return points (N, 3) of keypoints in the camera's frame, from a registered depth image.

    depth     float32 in m, or uint16 in mm
    farthest  m; 0: no limit
    Points without a known depth are NaN, as in RTAB-Map.
    """
    height, width = depth.shape
    x = np.rint(pixels[:, 0]).astype(np.intp)
    y = np.rint(pixels[:, 1]).astype(np.intp)
    on = (x >= 0) & (y >= 0) & (x < width) & (y < height)
    z = np.full(len(pixels), np.nan, np.float32)
    found = depth[y[on], x[on]].astype(np.float32)
    z[on] = found / 1000 if depth.dtype == np.uint16 else found
    z[~(z > 0) | ~np.isfinite(z)] = np.nan
    if farthest > 0:
        z[~(z <= farthest)] = np.nan
    return np.asarray(np.column_stack([rays * z[:, None], z]), np.float32)


def key_point_fields(features: Features) -> list[dict[str, Any]]:
    """Return the fields of rtabmap_msgs/KeyPoint; octave and angle are not used."""
    return [
        {
            'pt': (x, y), 'size': SIZE / scale, 'angle': -1.0, 'response': score,
            'octave': 0, 'class_id': -1,
        }
        for (x, y), score, scale in zip(
            features.keypoints.tolist(), features.scores.tolist(), features.scales.tolist(),
            strict=True,
        )
    ]  # fmt: skip
