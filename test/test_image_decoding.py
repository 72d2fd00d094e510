"""Every encoding, with padding and both byte orders, compared with known pixels."""

import sys

import cv2
import numpy as np
import pytest

pytest.importorskip('sensor_msgs')

from sensor_msgs.msg import CompressedImage, Image

from kp2d_core.images import ENCODINGS, decode, decode_compressed
from kp2d_ros.bridge import image_decoder
from kp2d_ros.clouds import bytes_of

BAYER = {'rggb': ((0, 1), (1, 2)), 'bggr': ((2, 1), (1, 0)),
         'gbrg': ((1, 2), (0, 1)), 'grbg': ((1, 0), (2, 1))}  # fmt: skip


@pytest.fixture(scope='module')
def rgb(photographs) -> np.ndarray:
    return np.ascontiguousarray(photographs['coffee'][:96, :128])


def encode(rgb: np.ndarray, encoding: str) -> np.ndarray:
    """Encode the photograph like a camera: rows of bytes or of uint16."""
    gray = cv2.cvtColor(rgb, cv2.COLOR_RGB2GRAY)
    if encoding in ('8UC1', 'mono8'):
        return gray
    if encoding in ('16UC1', 'mono16'):
        return gray.astype(np.uint16) * 257
    if encoding.startswith('bayer'):
        pattern = BAYER[encoding[6:10]]
        mosaic = np.empty(rgb.shape[:2], np.uint8)
        for row in range(2):
            for column in range(2):
                mosaic[row::2, column::2] = rgb[row::2, column::2, pattern[row][column]]
        return mosaic.astype(np.uint16) * 257 if encoding.endswith('16') else mosaic
    if encoding in ('yuv422', 'uyvy', 'yuyv', 'yuv422_yuy2', 'nv12', 'nv21'):
        return encode_yuv(rgb, encoding)
    base = {'8UC3': 'bgr8', '8UC4': 'bgra8'}.get(encoding, encoding)
    channels = {'r': 0, 'g': 1, 'b': 2, 'a': 3}
    opaque = np.concatenate([rgb, np.full((*rgb.shape[:2], 1), 255, np.uint8)], axis=2)
    picked = opaque[..., [channels[letter] for letter in base.rstrip('1680')]]
    return picked.astype(np.uint16) * 257 if base.endswith('16') else picked


def encode_yuv(rgb: np.ndarray, encoding: str) -> np.ndarray:
    """Encode as BT.601 in studio range, computed from its definition."""
    r, g, b = np.moveaxis(rgb.astype(np.float64), 2, 0)
    y = 16 + 0.257 * r + 0.504 * g + 0.098 * b
    u = 128 - 0.148 * r - 0.291 * g + 0.439 * b
    v = 128 + 0.439 * r - 0.368 * g - 0.071 * b
    height, width = y.shape
    if encoding.startswith('nv'):
        small = [c.reshape(height // 2, 2, width // 2, 2).mean(axis=(1, 3)) for c in (u, v)]
        pair = np.stack(small if encoding == 'nv12' else small[::-1], axis=2)
        planes = np.concatenate([y, pair.reshape(height // 2, width)])
        return np.rint(planes).astype(np.uint8)
    u, v = (c.reshape(height, width // 2, 2).mean(axis=2) for c in (u, v))
    packed = np.empty((height, width, 2))
    luma = 1 if encoding in ('yuv422', 'uyvy') else 0
    packed[..., luma] = y
    packed[:, 0::2, 1 - luma] = u
    packed[:, 1::2, 1 - luma] = v
    return np.rint(packed).astype(np.uint8)


def message_of(
    pixels: np.ndarray, encoding: str, padding: int = 0, big_endian: bool = False
) -> Image:
    height = pixels.shape[0] * 2 // 3 if encoding.startswith('nv') else pixels.shape[0]
    if pixels.dtype == np.uint16:
        pixels = pixels.astype('>u2' if big_endian else '<u2')
    rows = np.ascontiguousarray(pixels).view(np.uint8).reshape(pixels.shape[0], -1)
    rows = np.pad(rows, ((0, 0), (0, padding)), constant_values=99)
    message = Image(height=height, width=pixels.shape[1], encoding=encoding, step=rows.shape[1])
    message.is_bigendian = int(big_endian)
    message.data = bytes_of(rows)
    return message


@pytest.mark.parametrize('padding', [0, 7, 64])
@pytest.mark.parametrize('encoding', ENCODINGS)
def test_every_encoding(rgb, encoding, padding):
    decoded = decode(message_of(encode(rgb, encoding), encoding, padding))
    assert decoded.dtype == np.uint8 and decoded.shape[:2] == rgb.shape[:2]
    gray = encoding in ('mono8', 'mono16', '8UC1', '16UC1')
    expected = cv2.cvtColor(rgb, cv2.COLOR_RGB2GRAY) if gray else rgb
    assert decoded.shape == expected.shape
    error = np.abs(decoded.astype(int) - expected)
    if encoding.startswith('bayer'):
        # Red, green and blue are where they were measured; between, they are interpolated.
        pattern = BAYER[encoding[6:10]]
        for row in range(2):
            for column in range(2):
                there = np.s_[row::2, column::2, pattern[row][column]]
                assert error[there][2:-2, 2:-2].max() == 0
        assert error[2:-2, 2:-2].mean() < 8
    elif 'yu' in encoding or 'yv' in encoding or encoding.startswith('nv'):
        assert error.mean() < 4  # half of the colour resolution is gone
        luma = cv2.cvtColor(decoded, cv2.COLOR_RGB2GRAY).astype(int)
        assert np.abs(luma - cv2.cvtColor(rgb, cv2.COLOR_RGB2GRAY)).mean() < 2
    else:
        assert error.max() == 0


@pytest.mark.parametrize('encoding', [name for name in ENCODINGS if '16' in name])
def test_big_endian_is_little_endian_swapped(rgb, encoding):
    pixels = encode(rgb, encoding)
    little = decode(message_of(pixels, encoding, 6))
    np.testing.assert_array_equal(decode(message_of(pixels, encoding, 6, True)), little)


def test_16_bits_become_8_by_scaling():
    values = np.array([[0, 128, 129, 257, 32768, 65535]], np.uint16)
    np.testing.assert_array_equal(decode(message_of(values, 'mono16')), [[0, 0, 1, 1, 128, 255]])


def test_plain_encodings_are_views_not_copies(rgb):
    message = message_of(rgb, 'rgb8', 7)
    assert np.shares_memory(decode(message), np.frombuffer(message.data, np.uint8))


def test_the_last_row_may_lack_its_padding(rgb):
    message = message_of(rgb, 'rgb8', 9)
    message.data = message.data[:-9]
    np.testing.assert_array_equal(decode(message), rgb)


@pytest.mark.parametrize(
    ('change', 'sentence'),
    [
        ({'height': 0}, 'is empty: 128x0'),
        ({'width': 0}, 'is empty: 0x96'),
        ({'step': 100}, 'at least 384 bytes, got 100'),
        ({'height': 97}, 'has 36864 bytes of data but needs 37248'),
        ({'encoding': '32FC1'}, "'32FC1' is not one of rgb8"),
        ({'encoding': ''}, "'' is not one of"),
        ({'encoding': 'rgba8'}, 'at least 512 bytes'),
        ({'height': 2**15, 'step': 2**31}, 'too large'),
    ],
)
def test_damaged_messages_are_refused_in_a_sentence(rgb, change, sentence):
    message = message_of(rgb, 'rgb8')
    for name, value in change.items():
        setattr(message, name, value)
    with pytest.raises(ValueError, match=sentence):
        decode(message)


def test_odd_sizes_of_halved_colours():
    with pytest.raises(ValueError, match='even sides'):
        decode(Image(height=3, width=5, encoding='nv12', step=5, data=bytes(100)))
    with pytest.raises(ValueError, match='5x3 yuyv is refused'):
        decode(Image(height=3, width=5, encoding='yuyv', step=10, data=bytes(30)))


@pytest.mark.parametrize('suffix', ['.png', '.jpg'])
def test_compressed(rgb, suffix):
    data = cv2.imencode(suffix, rgb[..., ::-1])[1].tobytes()
    decoded = decode_compressed(CompressedImage(format=f'rgb8; {suffix[1:]}', data=data))
    assert decoded.shape == rgb.shape
    assert np.abs(decoded.astype(int) - rgb).mean() < (0.01 if suffix == '.png' else 4)
    gray = cv2.cvtColor(rgb, cv2.COLOR_RGB2GRAY)
    data = cv2.imencode(suffix, gray)[1].tobytes()
    assert decode_compressed(CompressedImage(format='mono8', data=data)).shape == gray.shape


@pytest.mark.parametrize('data', [b'', b'not an image', b'\xff\xd8\xff\xe0 half a jpeg'])
def test_compressed_garbage_is_refused(data):
    with pytest.raises(ValueError, match="format 'jpeg' is not an image that can be read"):
        decode_compressed(CompressedImage(format='jpeg', data=data))


def test_compressed_depth_is_refused():
    with pytest.raises(ValueError, match='depths'):
        decode_compressed(CompressedImage(format='16UC1; compressedDepth', data=b'1234'))


def test_a_broken_cv_bridge_is_noticed_and_left_alone(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, 'cv_bridge', None)  # to be as it was afterwards
    del sys.modules['cv_bridge']
    (tmp_path / 'cv_bridge.py').write_text(
        'class CvBridge:\n'
        '    def imgmsg_to_cv2(self, message, encoding):\n'
        '        raise RuntimeError("module compiled against ABI version 0x1000009")\n'
    )
    decoder, sentence = image_decoder()
    assert decoder is decode
    assert 'does not work' in sentence and 'ABI version' in sentence
