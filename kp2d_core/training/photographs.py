"""The training images: photographs in folders and frames of ROS bags, kept in memory."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from kp2d_core.bags import decode_image, image_connections, is_bag, open_bag
from kp2d_core.errors import FileError
from kp2d_core.images import MINIMUM_SIDE, Image, find_images, read_image, size_of

Entry = Path | Image  # a file, or a frame that is already in memory
SHORT_SIDE = 720  # pixels; larger frames are shrunk because all stay in memory


class Photographs(Sequence[Image]):
    """RGB images by number, with a shorter side of at most `short_side` pixels.

    An unreadable image is reported once and replaced by the next readable one.
    """

    def __init__(
        self, entries: Sequence[Entry], *, short_side: float = np.inf, cache_gb: float = 2.0
    ) -> None:
        if not entries:
            raise FileError('there is no image in the data')
        self.entries = list(entries)
        self.unreadable: set[int] = set()
        self._short_side = short_side
        self._kept: dict[int, Image] = {}
        self._room = cache_gb * 1e9
        self._lock = threading.Lock()
        self[0]  # raises an error if no image is usable

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, number: int) -> Image:  # type: ignore[override]
        for candidate in range(number, number + len(self.entries)):
            image = self._get(candidate % len(self.entries))
            if image is not None:
                return image
        raise FileError(f'none of the {len(self.entries)} images in the data can be used')

    def _get(self, number: int) -> Image | None:
        if number in self.unreadable:
            return None
        image = self._kept.get(number)
        if image is not None:
            return image
        try:
            image = shrink_to(load(self.entries[number]), self._short_side)
        except FileError as error:
            with self._lock:
                if number not in self.unreadable:
                    self.unreadable.add(number)
                    print(f'skipped: {error}', file=sys.stderr)
            return None
        with self._lock:
            if self._room >= image.nbytes and number not in self._kept:
                self._kept[number] = image
                self._room -= image.nbytes
        return image


def load(entry: Entry) -> Image:
    image = read_image(entry) if isinstance(entry, Path) else entry
    if min(image.shape[:2]) < MINIMUM_SIDE:
        width, height = size_of(image)
        name = entry if isinstance(entry, Path) else 'a frame'
        raise FileError(f'{name} is too small to train on: {width}x{height}')
    return image


def shrink_to(image: Image, short_side: float) -> Image:
    scale = short_side / min(image.shape[:2])
    if scale >= 1:
        return image
    width, height = (max(MINIMUM_SIDE, round(side * scale)) for side in size_of(image))
    return np.asarray(cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA), np.uint8)


def find_photographs(paths: Sequence[Path]) -> list[Path]:
    """Find the images in folders; raise FileError if a path is missing or there are no images."""
    for path in paths:
        if not path.exists():
            raise FileError(f'there is no folder or file {path}')
    found = find_images(list(paths))
    if not found:
        raise FileError(f'there is no image in {", ".join(map(str, paths))}')
    return found


def split(entries: Sequence[Entry], held_out: int, seed: int) -> tuple[list[Entry], list[Entry]]:
    """Split entries: those to train on, and `held_out` (at most a fifth) to validate on."""
    held_out = min(held_out, len(entries) // 5)
    order = np.random.default_rng([seed, 2]).permutation(len(entries))
    chosen = set(order[:held_out].tolist())
    train = [entry for i, entry in enumerate(entries) if i not in chosen]
    return train, [entries[i] for i in sorted(chosen)]


def digest(entries: Sequence[Entry]) -> str:
    """Hash a list of photographs: names of files, sizes of frames, their order."""
    names = [e.name if isinstance(e, Path) else f'frame {e.shape}' for e in entries]
    return hashlib.sha256('\n'.join(names).encode()).hexdigest()


def find_entries(
    paths: Sequence[Path], *, topic: str | None = None, seconds: float = 0.5
) -> list[Entry]:
    """Find the images in folders and the frames in bags, at least `seconds` apart."""
    bags = [path for path in paths if is_bag(path)]
    if topic is not None and not bags:
        raise ValueError(f'--topic {topic} is for bags, and --data has none')
    entries: list[Entry] = []
    for path in paths:
        if path in bags:
            entries += read_frames(path, topic, seconds)
        else:
            entries += find_photographs([path])
    if not entries:
        raise FileError('there is no image in the data')
    return entries


def read_frames(path: Path, topic: str | None = None, seconds: float = 0.5) -> list[Image]:
    """Read the RGB frames of a topic (None: every image topic), at least `seconds` apart."""
    frames: list[Image] = []
    damaged: list[str] = []
    with open_bag(path) as reader:
        connections = image_connections(reader, path, topic)
        due = dict.fromkeys((connection.topic for connection in connections), 0)
        for connection, time, data in _whole_messages(reader, connections, path):
            if time < due[connection.topic]:
                continue
            try:
                frames.append(_prepare(decode_image(reader, connection, data)))
            except Exception as error:  # the reader may raise anything for a damaged message
                damaged.append(str(error) or type(error).__name__)
                continue
            due[connection.topic] = time + int(seconds * 1e9)
    if damaged:
        print(f'skipped {len(damaged)} frames of {path}: {damaged[0]}', file=sys.stderr)
    if not frames:
        raise FileError(f'no frame of {path} can be used')
    return frames


def _whole_messages(reader: Any, connections: list[Any], path: Path) -> Iterator[Any]:
    """Yield the messages up to the damage in the file, such as after a power failure."""
    try:
        yield from reader.messages(connections)
    except Exception as error:  # each storage raises its own errors
        print(f'{path} is damaged, only its first frames are used: {error}', file=sys.stderr)


def _prepare(image: Image) -> Image:
    if image.ndim == 2:
        image = np.asarray(cv2.cvtColor(image, cv2.COLOR_GRAY2RGB), np.uint8)
    return shrink_to(np.array(image), SHORT_SIDE)  # a copy: it may be a view of the message
