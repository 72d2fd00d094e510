"""Decode random images with cv_bridge and with our decoder, and print the differences as JSON.

test_cv_bridge.py runs this in a Python that has cv_bridge. The output says whether the node would
use cv_bridge. For each encoding it has the largest differences of cv_bridge, and of the node with
cv_bridge, from our decoder, or the reason why cv_bridge refuses it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np


def messages(encoding: str, channels: int, depth: int, random: np.random.Generator):
    """Smooth colour and noise; with and without padding, sides even and odd."""
    from sensor_msgs.msg import Image

    for width, height, padding in ((64, 48, 0), (40, 30, 16), (37, 23, 0), (24, 24, 24)):
        if (width % 2 or height % 2) and (
            'yu' in encoding or 'yv' in encoding or 'nv' in encoding
        ):
            continue
        rows = height * 3 // 2 if encoding.startswith('nv') else height
        pixels = random.integers(0, 256, (rows, width * channels * depth), np.uint8)
        padded = np.pad(pixels, ((0, 0), (0, padding)), constant_values=99)
        message = Image()
        message.height, message.width, message.encoding = height, width, encoding
        message.step, message.is_bigendian = padded.shape[1], int(sys.byteorder == 'big')
        message.data = padded.tobytes()
        yield message


def compare() -> dict[str, Any]:
    from cv_bridge import CvBridge

    from kp2d_core.images import ENCODINGS, PACKED, decode
    from kp2d_ros.bridge import image_decoder

    bridge = CvBridge()
    through, sentence = image_decoder()
    random = np.random.default_rng(0)
    results: dict[str, Any] = {}
    for encoding in ENCODINGS:
        channels, depth, _ = PACKED.get(encoding, (1, 1, None))
        gray = encoding in ('mono8', 'mono16', '8UC1', '16UC1')
        off = node = 0
        reason = ''
        for message in messages(encoding, channels, depth, random):
            ours = decode(message).astype(int)
            node = max(node, int(np.abs(through(message).astype(int) - ours).max()))
            if message.step % (channels * depth):
                continue  # cv_bridge takes padding for pixels, and the node does not ask it
            try:
                theirs = bridge.imgmsg_to_cv2(message, 'mono8' if gray else 'rgb8')
            except Exception as error:
                reason = ' '.join(str(error).split())[:120] or type(error).__name__
                continue
            off = max(off, int(np.abs(np.asarray(theirs).astype(int) - ours).max()))
        results[encoding] = {'cv_bridge': off, 'node': node, 'refused': reason}
    return {'sentence': sentence, 'used': through is not decode, 'encodings': results}


if __name__ == '__main__':
    print(json.dumps(compare()))
