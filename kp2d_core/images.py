"""What counts as an image, and how it becomes what the network takes, with the way back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
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
from kp2d_core.geometry import resize_matrix
from kp2d_core.image_headers import HeaderError, declared_size

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage
    from torch import Tensor

    ImageLike = str | os.PathLike[str] | NDArray[Any] | PILImage | Tensor

Image = NDArray[np.uint8]
CHANNELS = (1, 3, 4)

MINIMUM_SIDE = 3 * CELL  # below it, every cell belongs to the border ring, which has no keypoints
IMAGE_SUFFIXES = frozenset(
    {'.bmp', '.jpeg', '.jpg', '.pgm', '.png', '.pnm', '.ppm', '.tif', '.tiff', '.webp'}
)
MEGAPIXEL = 1 << 20
MOST_READ, MOST_RUN = 64, 16  # megapixels that are decoded, and that the network runs at
LIMIT = 'KP2D_MAX_MEGAPIXELS'  # the environment variable that raises both
LARGEST_FILE = 1 << 29  # bytes


def to_image(given: Any, name: str = 'image') -> Image:
    """Anything that is an image, as HxW or HxWx3 uint8; FileError or ValueError if it is none.

    path          a file that OpenCV reads
    PIL image     gray if its mode is L, else RGB
    array         HxW, HxWx1, HxWx3 (RGB) or HxWx4 (RGBA); uint8, or floats in 0..1
    torch tensor  the same, or with the channels first, which is what torch's own functions give
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
    """Channels last: no image is so small that 1, 3 or 4 could be its height or width."""
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
    """The image itself if it is HxW or HxWx3 uint8 and large enough, else a ValueError."""
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
    """HxW of an RGB or gray image."""
    if image.ndim == 2 or image.shape[2] == 1:
        return image.reshape(image.shape[:2])
    return np.asarray(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), np.uint8)


def check_mask(mask: Any, image_size: Size) -> Image:
    """The mask as uint8 if it is HxW, bool or uint8, and of the image's size."""
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
    """The limit in pixels; the environment variable KP2D_MAX_MEGAPIXELS overrides it."""
    wanted = os.environ.get(LIMIT)
    if not wanted:
        return megapixels * MEGAPIXEL
    try:
        return int(number(float(wanted), LIMIT, above=0, most=2**20) * MEGAPIXEL)
    except ValueError:
        raise ValueError(f'{LIMIT} must be a number above 0, got {shown(wanted)}') from None


def check_pixels(size: Size, megapixels: int, what: str) -> None:
    """ValueError if the size has more pixels than the limit; `what` has them, or would."""
    most = most_pixels(megapixels)
    if size[0] * size[1] > most:
        raise ValueError(
            f'{what} {size[0]}x{size[1]} pixels, more than the {most / MEGAPIXEL:g} megapixels '
            f'that {LIMIT} allows'
        )


def decode_image(data: bytes, flags: int, name: str) -> Image:
    """The content of an image file as RGB, or gray if `flags` of OpenCV let it; else ValueError.

    The size is checked before anything is decoded: a file of 35 bytes can claim gigabytes.
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
    """An image file as RGB uint8; FileError if it is not there, too large or not an image."""
    data = read_file(path, LARGEST_FILE)
    try:
        return decode_image(data, cv2.IMREAD_COLOR, str(path))
    except ValueError as error:
        raise FileError(str(error)) from error


def find_images(paths: list[Path]) -> list[Path]:
    """Files as they are given, folders searched for images, links followed, sorted."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(p for p in _files(path) if p.suffix.lower() in IMAGE_SUFFIXES)
        else:
            found.append(path)
    return found


def _files(folder: Path) -> Iterator[Path]:
    """All files below, each folder once, however many links lead to it."""
    seen: set[str] = set()
    for where, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(where)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        # The same order on every file system, and links last: a folder goes by its own name.
        folders.sort(key=lambda name: (Path(where, name).is_symlink(), name))
        yield from (Path(where, name) for name in names)


@dataclass(frozen=True)
class Placement:
    """Where the given image lies in the network's input, to map keypoints back."""

    given: Size  # of the caller's image
    working: Size  # it was resized to this, then padded right and below to whole cells

    def to_given(self, points: NDArray[np.float32]) -> NDArray[np.float32]:
        """Network pixels -> pixels of the given image. Pixel centres count: half-pixel correct."""
        if self.working == self.given:
            return points
        matrix = resize_matrix(self.working, self.given)
        return (points * np.diag(matrix)[:2] + matrix[:2, 2]).astype(np.float32, copy=False)


def prepare(image: Image, working_size: Size | int | None = None) -> tuple[Image, Placement]:
    """The network's input (RGB, whole cells, contiguous) of a checked image.

    `working_size` is (width, height), or the length of the longer side, or None to keep it.
    """
    given = size_of(image)
    working = resolve_size(given, working_size)
    if working != given:
        image = resize(image, working)
    if image.ndim == 2 or image.shape[2] == 1:
        image = np.asarray(cv2.cvtColor(image, cv2.COLOR_GRAY2RGB), np.uint8)
    right, below = -working[0] % CELL, -working[1] % CELL
    if right or below:
        image = np.asarray(
            cv2.copyMakeBorder(image, 0, below, 0, right, cv2.BORDER_REPLICATE), np.uint8
        )
    return np.ascontiguousarray(image), Placement(given, working)


def resize(image: Image, size: Size) -> Image:
    """Averaged where a side shrinks, interpolated where it grows.

    In two steps where one does this and the other that: OpenCV's area method then samples pixels
    off their centres, and keypoints would be off by as much.
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
