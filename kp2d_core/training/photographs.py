"""The photographs to train on: files and frames of bags; read when needed, then kept."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np

from kp2d_core.errors import FileError
from kp2d_core.images import MINIMUM_SIDE, Image, find_images, read_image, size_of

Entry = Path | Image  # a file, or a frame that is already in memory


class Photographs(Sequence[Image]):
    """RGB images by number, at most `short_side` pixels high or wide, whichever is less.

    One that cannot be read is named once and replaced by the next one that can.
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
        self[0]  # at least one is usable, or this says so

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
    """The image files in these folders; FileError for a path that is not there, or none at all."""
    for path in paths:
        if not path.exists():
            raise FileError(f'there is no folder or file {path}')
    found = find_images(list(paths))
    if not found:
        raise FileError(f'there is no image in {", ".join(map(str, paths))}')
    return found


def split(entries: Sequence[Entry], held_out: int, seed: int) -> tuple[list[Entry], list[Entry]]:
    """Entries to train on, and `held_out` others, at most a fifth of all, to validate on."""
    held_out = min(held_out, len(entries) // 5)
    order = np.random.default_rng([seed, 2]).permutation(len(entries))
    chosen = set(order[:held_out].tolist())
    train = [entry for i, entry in enumerate(entries) if i not in chosen]
    return train, [entries[i] for i in sorted(chosen)]


def digest(entries: Sequence[Entry]) -> str:
    """The identity of a list of photographs: names of files, sizes of frames, their order."""
    names = [e.name if isinstance(e, Path) else f'frame {e.shape}' for e in entries]
    return hashlib.sha256('\n'.join(names).encode()).hexdigest()
