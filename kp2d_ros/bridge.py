"""What decodes images in the node: cv_bridge where it is installed and proves to work, else ours.

Both give the same pixels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from kp2d_core.image_messages import PACKED, decode, rows_of
from kp2d_core.images import Image

Decoder = Callable[[Any], Image]

_BIG = int(sys.byteorder == 'big')


def image_decoder() -> tuple[Decoder, str]:
    """What decodes sensor_msgs/Image here, and a sentence that says which it is and why."""
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
    """`decode`, but by cv_bridge for the encodings that it converts."""

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
    """Raise unless a small padded image comes out as it should."""
    from sensor_msgs.msg import Image as ImageMessage

    rows = np.arange(2 * 9, dtype=np.uint8).reshape(2, 9)
    message = ImageMessage(height=2, width=2, encoding='bgr8', step=9)
    message.is_bigendian = _BIG
    message.data = rows.tobytes()
    wanted = rows[:, :6].reshape(2, 2, 3)[..., ::-1]
    if not np.array_equal(bridge.imgmsg_to_cv2(message, 'rgb8'), wanted):
        raise ValueError('it gives wrong pixels')
