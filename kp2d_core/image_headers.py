"""Read the size of an image from the header of its file, before decoding.

A header of a few bytes can claim gigabytes, and OpenCV would allocate them. A file whose header is
not understood here is not decoded.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

Size = tuple[int, int]  # width, height

MOST_PARTS = 100_000  # per file; a photograph of 64 megapixels has 20,000
MOST_SCANS = 100  # of a progressive JPEG; each takes a pass over all pixels, 10 are usual
MOST_TEXTS = 16  # compressed texts in a PNG; each takes up to 8 MB


class HeaderError(ValueError):
    """The size cannot be read; the message explains why."""


def declared_size(data: bytes) -> Size:
    """Return width and height, or more if decoding needs more; raise HeaderError if unreadable."""
    for signature, offset, read in _READERS:
        if data.startswith(signature, offset):
            try:
                width, height = read(data)
            except HeaderError:
                raise
            except (struct.error, IndexError, ValueError):
                raise HeaderError('its header is cut short') from None
            if width < 1 or height < 1:
                raise HeaderError(f'its header claims {width}x{height} pixels')
            return width, height
    raise HeaderError('it does not begin like an image of a known format')


def _png(data: bytes) -> Size:
    """Read the header chunk. No chunk may be longer than the file: memory is allocated for it."""
    if data[12:16] != b'IHDR':
        raise HeaderError('it does not begin with a header')
    width, height = struct.unpack_from('>II', data, 16)
    at, texts = 8, 0
    for _ in range(MOST_PARTS):
        if at + 12 > len(data):
            return width, height
        length, kind = struct.unpack_from('>I4s', data, at)
        at += 12 + length
        texts += kind in (b'iTXt', b'zTXt')
        if at > len(data) or texts > MOST_TEXTS or kind == b'IEND':
            break
    if at > len(data):
        raise HeaderError('it is cut short')
    if kind != b'IEND':
        raise HeaderError('it has too many parts')
    return width, height


def _jpeg(data: bytes) -> Size:
    at = 2
    for _ in range(MOST_PARTS):
        at = data.index(b'\xff', at)  # skips unknown bytes, like libjpeg
        while data[at] == 0xFF:
            at += 1
        marker = data[at]
        at += 1
        if marker in _JPEG_ALONE:
            continue
        (length,) = struct.unpack_from('>H', data, at)
        if marker in _JPEG_FRAMES:
            height, width = struct.unpack_from('>HH', data, at + 3)
            if marker in _JPEG_PROGRESSIVE and data.count(b'\xff\xda') > MOST_SCANS:
                raise HeaderError(f'it has more than {MOST_SCANS} scans')
            return width, height
        if marker in (0xD9, 0xDA) or length < 2:
            break
        at += length
    raise HeaderError('it has no frame header')


def _gif(data: bytes) -> Size:
    width, height = struct.unpack_from('<HH', data, 6)
    return width, height


def _bmp(data: bytes) -> Size:
    (header,) = struct.unpack_from('<I', data, 14)
    if header == 12:
        width, height = struct.unpack_from('<HH', data, 18)
    else:
        width, height = struct.unpack_from('<ii', data, 18)
    return abs(width), abs(height)  # a negative height means that rows start at the top


def _webp(data: bytes) -> Size:
    """Read the size of the canvas, or of the picture if that is larger."""
    at, width, height = 12, 0, 0
    for _ in range(MOST_PARTS):
        kind, length = struct.unpack_from('<4sI', data, at)
        at += 8
        if kind == b'VP8X':
            width, height = _uint24(data, at + 4) + 1, _uint24(data, at + 7) + 1
        elif kind == b'VP8 ':
            w, h = struct.unpack_from('<HH', data, at + 6)
            return max(width, w & 0x3FFF), max(height, h & 0x3FFF)
        elif kind == b'VP8L':
            (bits,) = struct.unpack_from('<I', data, at + 1)
            return max(width, (bits & 0x3FFF) + 1), max(height, (bits >> 14 & 0x3FFF) + 1)
        elif kind == b'ANIM':
            return width, height
        at += length + length % 2
    raise HeaderError('it has too many parts')


def _tiff(data: bytes) -> Size:
    """Read the size of the first page, or of a tile if larger: tiles are decoded as a whole."""
    order = '<' if data[:2] == b'II' else '>'
    (version,) = struct.unpack_from(f'{order}H', data, 2)
    if version == 43:  # BigTIFF
        (at,) = struct.unpack_from(f'{order}Q', data, 8)
        (count,) = struct.unpack_from(f'{order}Q', data, at)
        first, step, field = at + 8, 20, 12
    else:
        (at,) = struct.unpack_from(f'{order}I', data, 4)
        (count,) = struct.unpack_from(f'{order}H', data, at)
        first, step, field = at + 2, 12, 8
    if count > MOST_PARTS or first + count * step > len(data):
        raise HeaderError('its header is cut short')
    values = {256: 0, 257: 0, 322: 0, 323: 0}  # width, height, tile width, tile height
    for entry in range(first, first + count * step, step):
        tag, kind = struct.unpack_from(f'{order}HH', data, entry)
        if tag in values and kind in _TIFF_NUMBERS:
            (value,) = struct.unpack_from(f'{order}{_TIFF_NUMBERS[kind]}', data, entry + field)
            values[tag] = max(values[tag], value)
    return max(values[256], values[322]), max(values[257], values[323])


def _netpbm(data: bytes) -> Size:
    """Read PBM, PGM, PPM (numbers with comments between them) and PFM (without comments)."""
    found = _NETPBM.match(data[:4096])
    if found is None:
        raise HeaderError('its header is cut short')
    return int(found[1]), int(found[2])


def _pam(data: bytes) -> Size:
    return _largest(rb'WIDTH\s+(\d{1,9})', data), _largest(rb'HEIGHT\s+(\d{1,9})', data)


def _radiance(data: bytes) -> Size:
    return _largest(rb'[-+]X\s+(\d{1,9})', data), _largest(rb'[-+]Y\s+(\d{1,9})', data)


def _sun_raster(data: bytes) -> Size:
    width, height = struct.unpack_from('>II', data, 4)
    return width, height


def _jpeg2000(data: bytes) -> Size:
    """Read the size from the code stream, like the decoder: the grid, or a tile if larger."""
    starts = [found.end() for found in re.finditer(rb'\xff\x4f\xff\x51', data)]
    sides = [struct.unpack_from('>IIIIII', data, at + 4) for at in starts]
    return max(max(s[0], s[4]) for s in sides), max(max(s[1], s[5]) for s in sides)


def _avif(data: bytes) -> Size:
    """Return the largest of all images in the file, including thumbnails and tiles of a grid."""
    starts = [found.end() for found in re.finditer(b'ispe', data)]
    sides = [struct.unpack_from('>II', data, at + 4) for at in starts]
    return max(width for width, _ in sides), max(height for _, height in sides)


def _largest(pattern: bytes, data: bytes) -> int:
    """Return the largest number that matches anywhere: the end of the header is unknown."""
    return max((int(found[1]) for found in re.finditer(pattern, data)), default=0)


def _uint24(data: bytes, at: int) -> int:
    return data[at] | data[at + 1] << 8 | data[at + 2] << 16


_JPEG_ALONE = frozenset({0x00, 0x01, 0xD8, *range(0xD0, 0xD8)})  # without a length
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_PROGRESSIVE = frozenset({0xC2, 0xC6, 0xCA, 0xCE})
_TIFF_NUMBERS = {1: 'B', 3: 'H', 4: 'I', 16: 'Q'}
_SPACE = rb'(?:\s|#[^\r\n]*[\r\n])+'
_NETPBM = re.compile(rb'P[1-6Ff]' + _SPACE + rb'(\d{1,9})' + _SPACE + rb'(\d{1,9})(?!\d)')

# Signature, its position, and the function that reads the size.
_READERS: tuple[tuple[bytes, int, Callable[[bytes], Size]], ...] = (
    (b'\xff\xd8\xff', 0, _jpeg),
    (b'\x89PNG\r\n\x1a\n', 0, _png),
    (b'GIF8', 0, _gif),
    (b'BM', 0, _bmp),
    (b'WEBP', 8, _webp),
    (b'II*\0', 0, _tiff),
    (b'MM\0*', 0, _tiff),
    (b'II+\0', 0, _tiff),
    (b'MM\0+', 0, _tiff),
    (b'P7', 0, _pam),
    *((f'P{kind}'.encode(), 0, _netpbm) for kind in '123456Ff'),
    (b'#?', 0, _radiance),
    (b'\x59\xa6\x6a\x95', 0, _sun_raster),
    (b'jP  ', 4, _jpeg2000),
    (b'\xff\x4f\xff\x51', 0, _jpeg2000),
    (b'ftyp', 4, _avif),
)
