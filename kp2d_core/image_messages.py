"""sensor_msgs/Image and CompressedImage as the uint8 RGB or gray array that everything here takes.

With numpy and OpenCV: padded rows, either endianness, Bayer and YUV. Any object with a message's
fields will do, so that bags are read where there is no ROS.
"""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from kp2d_core.checks import shown
from kp2d_core.images import MOST_READ, Image, check_pixels, decode_image

MAXIMUM_BYTES = 1 << 30  # a frame that claims more is damaged

# encoding -> (channels, bytes per channel, conversion to RGB or None if it is RGB or gray already)
PACKED: dict[str, tuple[int, int, int | None]] = {
    'rgb8': (3, 1, None),
    'bgr8': (3, 1, cv2.COLOR_BGR2RGB),
    'rgba8': (4, 1, cv2.COLOR_RGBA2RGB),
    'bgra8': (4, 1, cv2.COLOR_BGRA2RGB),
    'rgb16': (3, 2, None),
    'bgr16': (3, 2, cv2.COLOR_BGR2RGB),
    'rgba16': (4, 2, cv2.COLOR_RGBA2RGB),
    'bgra16': (4, 2, cv2.COLOR_BGRA2RGB),
    'mono8': (1, 1, None),
    'mono16': (1, 2, None),
    '8UC1': (1, 1, None),
    '8UC3': (3, 1, cv2.COLOR_BGR2RGB),  # by OpenCV's habit, as cv_bridge takes it
    '8UC4': (4, 1, cv2.COLOR_BGRA2RGB),
    '16UC1': (1, 2, None),
    # OpenCV names a Bayer pattern by its second row, ROS by its first.
    'bayer_rggb8': (1, 1, cv2.COLOR_BayerBG2RGB),
    'bayer_bggr8': (1, 1, cv2.COLOR_BayerRG2RGB),
    'bayer_gbrg8': (1, 1, cv2.COLOR_BayerGR2RGB),
    'bayer_grbg8': (1, 1, cv2.COLOR_BayerGB2RGB),
    'bayer_rggb16': (1, 2, cv2.COLOR_BayerBG2RGB),
    'bayer_bggr16': (1, 2, cv2.COLOR_BayerRG2RGB),
    'bayer_gbrg16': (1, 2, cv2.COLOR_BayerGR2RGB),
    'bayer_grbg16': (1, 2, cv2.COLOR_BayerGB2RGB),
    # Two bytes a pixel: U Y V Y and Y U Y V.
    'yuv422': (2, 1, cv2.COLOR_YUV2RGB_UYVY),
    'uyvy': (2, 1, cv2.COLOR_YUV2RGB_UYVY),
    'yuv422_yuy2': (2, 1, cv2.COLOR_YUV2RGB_YUYV),
    'yuyv': (2, 1, cv2.COLOR_YUV2RGB_YUYV),
}
# Planes one below the other: full-resolution Y, then half-resolution U and V side by side.
_PLANAR = {'nv12': cv2.COLOR_YUV2RGB_NV12, 'nv21': cv2.COLOR_YUV2RGB_NV21}

ENCODINGS = (*PACKED, *_PLANAR)


def decode(message: Any) -> Image:
    """The pixels of a sensor_msgs/Image, HxWx3 RGB or HxW if it is gray, maybe a view of its data.

    16-bit values are scaled to 8 bits (65535 -> 255). A damaged message is a ValueError.
    """
    width, height, encoding = message.width, message.height, message.encoding
    if width < 1 or height < 1:
        raise ValueError(f'the image is empty: {width}x{height}')
    if encoding in _PLANAR:
        return _decode_planar(message, _PLANAR[encoding])
    if encoding not in PACKED:
        raise ValueError(f'the encoding {shown(encoding)} is not one of {", ".join(ENCODINGS)}')
    channels, depth, conversion = PACKED[encoding]
    pixels: NDArray[Any] = rows_of(message, height, width * channels * depth)
    if depth == 2:
        pixels = _native(pixels, bool(message.is_bigendian))
    if channels > 1:
        pixels = pixels.reshape(height, width, channels)
    if conversion is not None:
        try:
            pixels = np.asarray(cv2.cvtColor(np.ascontiguousarray(pixels), conversion))
        except cv2.error as error:
            raise ValueError(f'{width}x{height} {encoding} is refused: {error.err}') from None
    if depth == 2:
        pixels = np.asarray(cv2.convertScaleAbs(pixels, alpha=1 / 257), np.uint8)
    return pixels


def _decode_planar(message: Any, conversion: int) -> Image:
    width, height = message.width, message.height
    if width % 2 or height % 2:
        raise ValueError(f'a {message.encoding} image has even sides, not {width}x{height}')
    planes = rows_of(message, height + height // 2, width)
    return np.asarray(cv2.cvtColor(np.ascontiguousarray(planes), conversion), np.uint8)


def rows_of(message: Any, count: int, used: int) -> Image:
    """The used part of each row, as a view that steps over the padding."""
    check_pixels((message.width, message.height), MOST_READ, 'the image has')
    step = message.step
    if step < used:
        raise ValueError(
            f'the step of a {message.width} px wide {message.encoding} image is at least {used} '
            f'bytes, not {step}'
        )
    if count * step > MAXIMUM_BYTES:
        raise ValueError(f'the image claims {count} rows of {step} bytes: too large')
    data = np.frombuffer(message.data, np.uint8)
    # The last row may end before its padding.
    needed = (count - 1) * step + used
    if len(data) < needed:
        raise ValueError(f'the image has {len(data)} bytes of data where {needed} are needed')
    return np.ndarray((count, used), np.uint8, data, 0, (step, 1))


def _native(rows: Image, big_endian: bool) -> NDArray[np.uint16]:
    kind = '>u2' if big_endian else '<u2'
    return np.ascontiguousarray(rows).view(kind).astype(np.uint16, copy=False)


def decode_compressed(message: Any) -> Image:
    """The pixels of a sensor_msgs/CompressedImage (JPEG, PNG, ...), RGB, or gray if stored so."""
    if 'compressedDepth' in message.format:
        raise ValueError('a compressedDepth image holds depths, not intensities')
    data = bytes(message.data)
    flags = cv2.IMREAD_ANYCOLOR | cv2.IMREAD_IGNORE_ORIENTATION
    return decode_image(data, flags, f'a message of format {shown(message.format)}')
