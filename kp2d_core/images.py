"""Convert files, arrays, tensors and ROS messages to uint8 images, RGB or gray.

ROS is not needed: any object with the fields of sensor_msgs/Image will do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from numpy.typing import NDArray

from kp2d_core.architecture import CELL
from kp2d_core.checks import number, shown, whole
from kp2d_core.errors import FileError
from kp2d_core.files import read_file
from kp2d_core.geometry import Size as Size
from kp2d_core.image_headers import HeaderError, declared_size

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage
    from torch import Tensor

    ImageLike = str | os.PathLike[str] | NDArray[Any] | PILImage | Tensor

Image = NDArray[np.uint8]
CHANNELS = (1, 3, 4)

MINIMUM_SIDE = 3 * CELL  # a smaller image has only border cells, which have no keypoints
IMAGE_SUFFIXES = frozenset(
    {'.bmp', '.jpeg', '.jpg', '.pgm', '.png', '.pnm', '.ppm', '.tif', '.tiff', '.webp'}
)
MEGAPIXEL = 1 << 20
MOST_READ, MOST_RUN = 64, 16  # limits in megapixels: of decoding, of the network
LIMIT = 'KP2D_MAX_MEGAPIXELS'  # the environment variable that raises both
LARGEST_FILE = 1 << 29  # bytes
MAXIMUM_BYTES = 1 << 30  # a larger frame must be damaged

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
    '8UC3': (3, 1, cv2.COLOR_BGR2RGB),  # OpenCV's order of channels, as in cv_bridge
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
    # Two bytes per pixel: U Y V Y and Y U Y V.
    'yuv422': (2, 1, cv2.COLOR_YUV2RGB_UYVY),
    'uyvy': (2, 1, cv2.COLOR_YUV2RGB_UYVY),
    'yuv422_yuy2': (2, 1, cv2.COLOR_YUV2RGB_YUYV),
    'yuyv': (2, 1, cv2.COLOR_YUV2RGB_YUYV),
}
# Planes one below the other: full-resolution Y, then half-resolution U and V side by side.
_PLANAR = {'nv12': cv2.COLOR_YUV2RGB_NV12, 'nv21': cv2.COLOR_YUV2RGB_NV21}

ENCODINGS = (*PACKED, *_PLANAR)


def to_image(given: Any, name: str = 'image') -> Image:
    """Convert to HxW or HxWx3 uint8; raise FileError or ValueError if it is not an image.

    path          a file that OpenCV reads
    PIL image     gray if its mode is L, else RGB
    array         HxW, HxWx1, HxWx3 (RGB) or HxWx4 (RGBA); uint8, or floats in 0..1
    torch tensor  the same, or with channels first, as usual in torch
    """
    if isinstance(given, str | os.PathLike):
        return check_image(read_image(Path(given)), str(given))
    library = type(given).__module__.partition('.')[0]
    if library == 'torch':
        pixels = _from_tensor(given)
    elif library == 'PIL':
        pixels = np.asarray(given if given.mode == 'L' else given.convert('RGB'))
    else:
        pixels = given
    if isinstance(pixels, np.ndarray):
        if np.issubdtype(pixels.dtype, np.floating) and pixels.size:
            pixels = _from_floats(pixels, name)
        if pixels.ndim == 3 and pixels.shape[2] == 4:
            pixels = pixels[..., :3]
    return check_image(pixels, name)


def _from_tensor(tensor: Any) -> NDArray[Any]:
    """Move channels to the end. No image has a side of 1, 3 or 4, so the axis is unambiguous."""
    tensor = tensor.detach()
    pixels: NDArray[Any] = (tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy()
    if pixels.ndim == 3 and pixels.shape[0] in CHANNELS and pixels.shape[2] not in CHANNELS:
        pixels = pixels.transpose(1, 2, 0)
    return pixels


def _from_floats(pixels: NDArray[Any], name: str) -> Image:
    low, high = float(pixels.min()), float(pixels.max())
    if not (low >= 0 and high <= 1):  # NaN is in no range
        raise ValueError(
            f'{name} of floats must lie in 0..1, got {low:g} to {high:g}: divide it by 255, or '
            'convert it to uint8'
        )
    return np.asarray(np.rint(255 * pixels), np.uint8)


def check_image(image: Any, name: str = 'image') -> Image:
    """Return the image if it is HxW or HxWx3 uint8 and large enough; else raise ValueError."""
    if not isinstance(image, np.ndarray):
        raise ValueError(
            f'{name} must be a path, an array, a PIL image or a torch tensor, '
            f'got {type(image).__name__}'
        )
    if image.size == 0:
        raise ValueError(f'{name} is empty: shape {image.shape}')
    if image.dtype != np.uint8:
        raise ValueError(f'{name} must be uint8 in 0..255, got {image.dtype}')
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (1, 3)):
        batch = ': give a batch as a list' if image.ndim == 4 else ''
        raise ValueError(f'{name} must be HxW or HxWx3, got shape {image.shape}{batch}')
    if min(image.shape[:2]) < MINIMUM_SIDE:
        height, width = image.shape[:2]
        raise ValueError(
            f'{name} is too small: {width}x{height}, at least {MINIMUM_SIDE}x{MINIMUM_SIDE} needed'
        )
    return image


def to_gray(image: Image) -> Image:
    """Convert an RGB or gray image to HxW."""
    if image.ndim == 2 or image.shape[2] == 1:
        return image.reshape(image.shape[:2])
    return np.asarray(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), np.uint8)


def check_mask(mask: Any, image_size: Size) -> Image:
    """Return the mask as uint8 if it is HxW, bool or uint8, with the size of the image."""
    if not isinstance(mask, np.ndarray) or mask.dtype not in (np.uint8, np.bool_):
        raise ValueError('mask must be a numpy array of bool or uint8')
    if mask.shape != (image_size[1], image_size[0]):
        raise ValueError(
            f'mask must be HxW of the image, {image_size[1]}x{image_size[0]}, '
            f'got shape {mask.shape}'
        )
    return mask.astype(np.uint8, copy=False)


def size_of(image: Image) -> Size:
    return image.shape[1], image.shape[0]


def most_pixels(megapixels: int) -> int:
    """Return the limit in pixels; the environment variable KP2D_MAX_MEGAPIXELS overrides it."""
    wanted = os.environ.get(LIMIT)
    if not wanted:
        return megapixels * MEGAPIXEL
    try:
        return int(number(float(wanted), LIMIT, above=0, most=2**20) * MEGAPIXEL)
    except ValueError:
        raise ValueError(f'{LIMIT} must be a number above 0, got {shown(wanted)}') from None


def check_pixels(size: Size, megapixels: int, what: str) -> None:
    """Raise ValueError if the size has too many pixels; `what` starts the sentence."""
    most = most_pixels(megapixels)
    if size[0] * size[1] > most:
        raise ValueError(
            f'{what} {size[0]}x{size[1]} pixels, more than the {most / MEGAPIXEL:g} megapixels '
            f'that {LIMIT} allows'
        )


def decode_image(data: bytes, flags: int, name: str) -> Image:
    """Decode an image file to RGB, or gray if OpenCV's `flags` allow it; raise ValueError.

    The size is checked before decoding: a file of 35 bytes can claim gigabytes.
    """
    try:
        check_pixels(declared_size(data), MOST_READ, f'{name} has')
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except HeaderError as error:
        raise ValueError(f'{name} is not an image that can be read: {error}') from None
    except cv2.error as error:
        raise ValueError(f'{name} is not an image that can be read: {error.err}') from None
    if image is None:
        raise ValueError(f'{name} is not an image that can be read: it is damaged')
    if image.ndim == 3:
        image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
    return np.asarray(image, np.uint8)


def read_image(path: str | Path) -> Image:
    """Read an image as RGB uint8; raise FileError if it is missing, too large or not an image."""
    data = read_file(path, LARGEST_FILE)
    try:
        return decode_image(data, cv2.IMREAD_COLOR, str(path))
    except ValueError as error:
        raise FileError(str(error)) from error


def find_images(paths: list[Path]) -> list[Path]:
    """List the given files and the images in the given folders, sorted; links are followed."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(p for p in _files(path) if p.suffix.lower() in IMAGE_SUFFIXES)
        else:
            found.append(path)
    return found


def _files(folder: Path) -> Iterator[Path]:
    """List all files below a folder; enter each folder once, even if several links lead to it."""
    seen: set[str] = set()
    for where, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(where)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        # The same order on every file system; links come last, so folders keep their own names.
        folders.sort(key=lambda name: (Path(where, name).is_symlink(), name))
        yield from (Path(where, name) for name in names)


def resize(image: Image, size: Size) -> Image:
    """Resize: average where a side shrinks, interpolate where it grows.

    If one side shrinks and the other grows, resize in two steps: OpenCV's area method would then
    sample beside the pixel centres and shift keypoints.
    """
    shrunk = min(size[0], image.shape[1]), min(size[1], image.shape[0])
    if shrunk != size_of(image):
        image = np.asarray(cv2.resize(image, shrunk, interpolation=cv2.INTER_AREA), np.uint8)
    if shrunk != size:
        image = np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_LINEAR), np.uint8)
    return image


def resolve_size(given: Size, working_size: Size | int | None) -> Size:
    if working_size is None:
        return given
    if isinstance(working_size, tuple | list | np.ndarray):
        if len(working_size) != 2:
            raise ValueError(
                f'working_size is (width, height) or one number, got {shown(working_size)}'
            )
        width, height = (whole(side, 'a side of working_size') for side in working_size)
    else:
        scale = whole(working_size, 'working_size') / max(given)
        width, height = round(given[0] * scale), round(given[1] * scale)
    if min(width, height) < MINIMUM_SIDE:
        raise ValueError(
            f'working size {width}x{height} is too small: at least {MINIMUM_SIDE}x{MINIMUM_SIDE}'
        )
    return width, height


def decode(message: Any) -> Image:
    """Decode a sensor_msgs/Image to HxWx3 RGB or HxW gray; the result may be a view of its data.

    16-bit values are scaled to 8 bits (65535 -> 255). Raise ValueError if it is damaged.
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
    """Return the used part of each row, as a view that skips the padding."""
    check_pixels((message.width, message.height), MOST_READ, 'the image has')
    step = message.step
    if step < used:
        raise ValueError(
            f'the step of a {message.encoding} image of {message.width} pixels must be at least '
            f'{used} bytes, got {step}'
        )
    if count * step > MAXIMUM_BYTES:
        raise ValueError(f'the image claims {count} rows of {step} bytes: too large')
    data = np.frombuffer(message.data, np.uint8)
    # The last row may end before its padding.
    needed = (count - 1) * step + used
    if len(data) < needed:
        raise ValueError(f'the image has {len(data)} bytes of data but needs {needed}')
    return np.ndarray((count, used), np.uint8, data, 0, (step, 1))


def _native(rows: Image, big_endian: bool) -> NDArray[np.uint16]:
    kind = '>u2' if big_endian else '<u2'
    return np.ascontiguousarray(rows).view(kind).astype(np.uint16, copy=False)


def decode_compressed(message: Any) -> Image:
    """Decode a sensor_msgs/CompressedImage (JPEG, PNG, ...) to RGB, or gray if stored so."""
    if 'compressedDepth' in message.format:
        raise ValueError('a compressedDepth image holds depths, not intensities')
    data = bytes(message.data)
    flags = cv2.IMREAD_ANYCOLOR | cv2.IMREAD_IGNORE_ORIENTATION
    return decode_image(data, flags, f'a message of format {shown(message.format)}')
