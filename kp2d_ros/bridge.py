"""ROS images to arrays and back.

cv_bridge decodes if it is installed and works, otherwise our decoder: both give the same pixels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
from sensor_msgs.msg import CompressedImage
from sensor_msgs.msg import Image as ImageMessage
from std_msgs.msg import Header

from kp2d_core.images import PACKED, Image, decode, rows_of
from kp2d_ros.clouds import bytes_of
from kp2d_ros.overlay import to_jpeg

Decoder = Callable[[Any], Image]

_BIG = int(sys.byteorder == 'big')


def image_decoder() -> tuple[Decoder, str]:
    """Choose the decoder of sensor_msgs/Image; also return a sentence that explains the choice."""
    try:
        from cv_bridge import CvBridge

        bridge = CvBridge()
        _probe(bridge)
    except ImportError:
        return decode, 'cv_bridge is not installed: decoding with numpy and OpenCV'
    except Exception as error:  # it is built for other versions of OpenCV or NumPy
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        return decode, f'cv_bridge does not work ({reason[0]}): decoding with numpy and OpenCV'
    return bridge_decoder(bridge), 'decoding with cv_bridge'


def bridge_decoder(bridge: Any) -> Decoder:
    """Make a decoder that uses cv_bridge for the encodings that it converts."""

    def convert(message: Any) -> Image:
        encoding = message.encoding
        if encoding not in _BRIDGED or message.width < 1 or message.height < 1:
            return decode(message)
        channels, depth, _ = PACKED[encoding]
        # Rows that are no whole number of pixels, and bytes to be swapped, it gets wrong.
        if message.step % (channels * depth) or (depth > 1 and message.is_bigendian != _BIG):
            return decode(message)
        rows_of(message, message.height, message.width * channels * depth)  # it checks less itself
        try:
            return np.asarray(bridge.imgmsg_to_cv2(message, _BRIDGED[encoding]), np.uint8)
        except Exception:  # some versions fail on padding or byte order that does not matter
            return decode(message)

    return convert


_BRIDGED = {
    'mono8': 'mono8', 'mono16': 'mono8',
    **{name: 'rgb8' for name in PACKED if name.startswith(('rgb', 'bgr', 'bayer'))},
}  # fmt: skip


def _probe(bridge: Any) -> None:
    """Raise an error unless a small padded image is decoded correctly."""
    rows = np.arange(2 * 9, dtype=np.uint8).reshape(2, 9)
    message = ImageMessage(height=2, width=2, encoding='bgr8', step=9)
    message.is_bigendian = _BIG
    message.data = rows.tobytes()
    wanted = rows[:, :6].reshape(2, 2, 3)[..., ::-1]
    if not np.array_equal(bridge.imgmsg_to_cv2(message, 'rgb8'), wanted):
        raise ValueError('it gives wrong pixels')


def image_message(header: Header, image: Image, encoding: str) -> ImageMessage:
    """Convert an RGB or gray image to rgb8, bgr8 or mono8."""
    if encoding == 'mono8' and image.ndim == 3:
        image = np.asarray(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), np.uint8)
    elif encoding != 'mono8' and image.ndim == 2:
        image = np.asarray(cv2.cvtColor(image, cv2.COLOR_GRAY2RGB), np.uint8)
    if encoding == 'bgr8':
        image = np.asarray(cv2.cvtColor(image, cv2.COLOR_RGB2BGR), np.uint8)
    height, width = image.shape[:2]
    message = ImageMessage(header=header, height=height, width=width, encoding=encoding)
    message.step = width * (1 if encoding == 'mono8' else 3)
    message.data = bytes_of(image)
    return message


def jpeg_message(header: Header, image: Image, quality: int) -> CompressedImage:
    """Convert an RGB or gray image to JPEG."""
    given, kept = ('mono8', 'mono8') if image.ndim == 2 else ('rgb8', 'bgr8')
    message = CompressedImage(header=header, format=f'{given}; jpeg compressed {kept}')
    message.data = bytes_of(to_jpeg(image, quality))
    return message
