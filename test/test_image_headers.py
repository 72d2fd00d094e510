"""Files that claim more pixels than memory holds are refused before anything is decoded."""

from __future__ import annotations

import struct
import zlib
from types import SimpleNamespace

import cv2
import numpy as np
import pytest

from kp2d_core.errors import FileError
from kp2d_core.image_headers import HeaderError, declared_size
from kp2d_core.images import LIMIT, decode, decode_compressed, read_image

FORMATS = (
    '.png', '.jpg', '.gif', '.bmp', '.tiff', '.webp', '.jp2', '.avif', '.pgm', '.ppm', '.pam',
    '.pfm', '.hdr', '.ras',
)  # fmt: skip


def encoded(image: np.ndarray, suffix: str) -> bytes:
    if suffix in ('.pfm', '.hdr'):
        image = image.astype(np.float32) / 255
    if suffix == '.pgm':
        image = image[..., 0]
    try:
        found, data = cv2.imencode(suffix, image)
    except cv2.error:
        found = False
    if not found:
        pytest.skip(f'this OpenCV does not write {suffix}')
    return data.tobytes()


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))


def png(width: int, height: int, *more: bytes) -> bytes:
    """A black image, which compresses to a thousandth."""
    header = struct.pack('>IIBBBBB', width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(bytes((width + 1) * height), 9)
    chunks = [png_chunk(b'IHDR', header), *more, png_chunk(b'IDAT', rows), png_chunk(b'IEND', b'')]
    return b'\x89PNG\r\n\x1a\n' + b''.join(chunks)


def gif(width: int, height: int) -> bytes:
    screen = b'GIF89a' + struct.pack('<HHBBB', width, height, 0x80, 0, 0) + bytes(6)
    return screen + b',' + struct.pack('<HHHHB', 0, 0, 1, 1, 0) + b'\x02\x02D\x01\0;'


def jpeg(width: int, height: int) -> bytes:
    data = bytearray(encoded(np.zeros((40, 50, 3), np.uint8), '.jpg'))
    frame = data.index(b'\xff\xc0')
    data[frame + 5 : frame + 9] = struct.pack('>HH', height, width)
    return bytes(data)


def bmp(width: int, height: int) -> bytes:
    """Run-length encoded: without a single run, all of it is black."""
    header = struct.pack('<IiiHHIIiiII', 40, width, height, 1, 8, 1, 0, 0, 0, 256, 0)
    return b'BM' + struct.pack('<IHHI', 1080, 0, 0, 1078) + header + bytes(1024) + b'\0\1'


def tiff(width: int, height: int, tile: int) -> bytes:
    tags = [(256, width), (257, height), (258, 8), (259, 1), (262, 1), (277, 1), (322, tile),
            (323, tile), (324, 8), (325, 16)]  # fmt: skip
    entries = b''.join(struct.pack('<HHII', tag, 4, 1, value) for tag, value in tags)
    head = b'II*\0' + struct.pack('<I', 24) + bytes(16)
    return head + struct.pack('<H', len(tags)) + entries + bytes(4)


def compressed(data: bytes) -> SimpleNamespace:
    return SimpleNamespace(format='jpeg', data=data)


@pytest.mark.parametrize('suffix', FORMATS)
def test_the_size_is_the_one_that_opencv_decodes(suffix, photographs):
    for size in ((64, 48), (601, 37), (300, 1021)):
        data = encoded(cv2.resize(photographs['coffee'], size), suffix)
        assert declared_size(data) == size
        for length in (0, 5, 30, 100):
            try:
                assert declared_size(data[:length]) == size
            except HeaderError:
                continue


BOMBS = {
    'png': lambda: png(10000, 9000),
    'gif': lambda: gif(30000, 30000),
    'jpeg': lambda: jpeg(30000, 30000),
    'bmp': lambda: bmp(30000, 30000),
    'bmp from the top': lambda: bmp(30000, -30000),
    'tiff': lambda: tiff(30000, 30000, 64),
    'a tile of a tiff': lambda: tiff(64, 64, 30000),
    'pgm': lambda: b'P5 # 64 64\n30000 30000 255\n',
    'hdr': lambda: b'#?RADIANCE\n# -Y 8 +X 8\n\n-Y 30000 +X 30000\n',
}


@pytest.mark.parametrize('name', BOMBS)
def test_a_small_file_with_a_vast_image_is_refused(name, tmp_path):
    data = BOMBS[name]()
    assert len(data) < 2_000_000
    path = tmp_path / 'bomb'
    path.write_bytes(data)
    with pytest.raises(FileError, match=f'bomb has .* more than the 64 megapixels that {LIMIT}'):
        read_image(path)
    with pytest.raises(ValueError, match='megapixels'):
        decode_compressed(compressed(data))


def test_the_limit_can_be_raised_and_lowered(tmp_path, monkeypatch):
    path = tmp_path / 'wide.png'
    path.write_bytes(png(8200, 8200))
    with pytest.raises(FileError, match='8200x8200'):
        read_image(path)
    monkeypatch.setenv(LIMIT, '70')
    assert read_image(path).shape == (8200, 8200, 3)
    monkeypatch.setenv(LIMIT, '0.25')
    path.write_bytes(png(640, 480))
    with pytest.raises(FileError, match='640x480 pixels, more than the 0.25 megapixels'):
        read_image(path)
    for bad in ('many', 'nan', '-1', '1e400'):
        monkeypatch.setenv(LIMIT, bad)
        with pytest.raises(FileError, match=f'{LIMIT} must be a number above 0'):
            read_image(path)


def test_a_part_longer_than_the_file_is_refused():
    """OpenCV allocates the size that a chunk of a PNG claims: 2 GB for 91 bytes."""
    for kind in (b'IDAT', b'tEXt'):
        claim = png(64, 48)[:33] + struct.pack('>I', 0x7FFFFFFF) + kind + bytes(50)
        with pytest.raises(ValueError, match='cut short'):
            decode_compressed(compressed(claim))


def test_texts_that_unfold_in_a_png_are_refused():
    text = b'key\0\1\0\0\0' + zlib.compress(bytes(7_900_000), 9)
    texts = [png_chunk(b'iTXt', text)] * 100  # 0.8 GB out of 0.8 MB
    with pytest.raises(ValueError, match='too many parts'):
        decode_compressed(compressed(png(64, 48, *texts)))
    assert decode_compressed(compressed(png(64, 48, texts[0]))).shape[:2] == (48, 64)


def test_a_progressive_jpeg_of_a_thousand_scans_is_refused(photographs):
    options = [cv2.IMWRITE_JPEG_PROGRESSIVE, 1]
    data = cv2.imencode('.jpg', photographs['coffee'], options)[1].tobytes()
    assert decode_compressed(compressed(data)).shape == photographs['coffee'].shape
    last = data.rindex(b'\xff\xda')
    many = data[:-2] + data[last:-2] * 1000 + data[-2:]
    with pytest.raises(ValueError, match='more than 100 scans'):
        decode_compressed(compressed(many))


def test_a_flipped_byte_does_not_cost_gigabytes(photographs):
    """In the height of a JPEG: 480 becomes 33248, and the lower rows are gray."""
    image = cv2.resize(photographs['coffee'], (2048, 480))
    data = bytearray(encoded(image, '.jpg'))
    data[data.index(b'\xff\xc0') + 5] ^= 0x80
    with pytest.raises(ValueError, match='2048x33248 pixels, more than the 64 megapixels'):
        decode_compressed(compressed(bytes(data)))


def test_a_raw_message_of_too_many_pixels_is_refused():
    message = SimpleNamespace(
        width=1 << 16, height=1 << 16, step=1 << 16, encoding='mono8', is_bigendian=0, data=b''
    )
    with pytest.raises(ValueError, match='65536x65536 pixels, more than'):
        decode(message)


def test_a_file_without_end_is_refused():
    with pytest.raises(FileError, match='/dev/zero is too large'):
        read_image('/dev/zero')
