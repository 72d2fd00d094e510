"""sensor_msgs/Image and CompressedImage as the uint8 RGB or gray array that kp2d_core takes.

Own decoding with numpy and OpenCV: padded rows, either endianness, Bayer and YUV. Where cv_bridge
is installed and proves to work it does the conversion instead, to the same pixels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from kp2d_core.images import Image

MAXIMUM_BYTES = 1 << 30  # a frame that claims more is damaged

# encoding -> (channels, bytes per channel, conversion to RGB or None if it is RGB or gray already)
_PACKED: dict[str, tuple[int, int, int | None]] = {
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

ENCODINGS = (*_PACKED, *_PLANAR)


Decoder = Callable[[Any], Image]


def decode(message: Any) -> Image:
    """The pixels of a sensor_msgs/Image, HxWx3 RGB or HxW if it is gray, maybe a view of its data.

    16-bit values are scaled to 8 bits (65535 -> 255). A damaged message is a ValueError.
    """
    width, height, encoding = message.width, message.height, message.encoding
    if width < 1 or height < 1:
        raise ValueError(f'the image is empty: {width}x{height}')
    if encoding in _PLANAR:
        return _decode_planar(message, _PLANAR[encoding])
    if encoding not in _PACKED:
        raise ValueError(f"the encoding '{encoding}' is not one of {', '.join(ENCODINGS)}")
    channels, depth, conversion = _PACKED[encoding]
    pixels: NDArray[Any] = _rows(message, height, width * channels * depth)
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
    planes = _rows(message, height + height // 2, width)
    return np.asarray(cv2.cvtColor(np.ascontiguousarray(planes), conversion), np.uint8)


def _rows(message: Any, count: int, used: int) -> Image:
    """The used part of each row, as a view that steps over the padding."""
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
    data = np.frombuffer(message.data, np.uint8)
    if 'compressedDepth' in message.format:
        raise ValueError('a compressedDepth image holds depths, not intensities')
    flags = cv2.IMREAD_ANYCOLOR | cv2.IMREAD_IGNORE_ORIENTATION
    try:
        image = cv2.imdecode(data, flags) if data.size else None
    except cv2.error:
        image = None
    if image is None:
        raise ValueError(
            f"{data.size} bytes of format '{message.format}' are not an image that OpenCV can read"
        )
    if image.ndim == 3:
        image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
    return np.asarray(image, np.uint8)


def image_decoder() -> tuple[Decoder, str]:
    """What decodes sensor_msgs/Image here, and a sentence that says which it is and why."""
    try:
        from cv_bridge import CvBridge

        bridge = CvBridge()
        decoder = bridge_decoder(bridge)
        _probe(decoder)
    except ImportError:
        return decode, 'cv_bridge is not installed: decoding with numpy and OpenCV'
    except Exception as error:  # it is built for other versions of OpenCV or NumPy
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        return decode, f'cv_bridge does not work ({reason[0]}): decoding with numpy and OpenCV'
    return decoder, 'decoding with cv_bridge'


def bridge_decoder(bridge: Any) -> Decoder:
    """`decode`, but by cv_bridge for the encodings that it converts."""

    def convert(message: Any) -> Image:
        encoding = message.encoding
        if encoding not in _BRIDGED or message.width < 1 or message.height < 1:
            return decode(message)
        channels, depth, _ = _PACKED[encoding]
        _rows(message, message.height, message.width * channels * depth)  # it checks less itself
        try:
            return np.asarray(bridge.imgmsg_to_cv2(message, _BRIDGED[encoding]), np.uint8)
        except Exception as error:
            raise ValueError(f'cv_bridge cannot convert {encoding}: {error}') from None

    return convert


_BRIDGED = {
    'mono8': 'mono8', 'mono16': 'mono8',
    **{name: 'rgb8' for name in _PACKED if name.startswith(('rgb', 'bgr', 'bayer'))},
}  # fmt: skip


def _probe(decoder: Decoder) -> None:
    """Raise unless a small padded image comes out as it should."""
    from sensor_msgs.msg import Image as ImageMessage

    rows = np.arange(2 * 8, dtype=np.uint8).reshape(2, 8)
    message = ImageMessage(height=2, width=2, encoding='bgr8', step=8)
    message.is_bigendian = int(sys.byteorder == 'big')
    message.data = rows.tobytes()
    if not np.array_equal(decoder(message), rows[:, :6].reshape(2, 2, 3)[..., ::-1]):
        raise ValueError('it gives wrong pixels')
