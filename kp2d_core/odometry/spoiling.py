"""Degrade recordings: black or blurred frames, or a jump to another place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import cv2
import numpy as np

from kp2d_core.images import Image
from kp2d_core.odometry.bag_frames import Shot
from kp2d_core.odometry.recordings import Recording

SPOILED = 1.0  # s of black or blurred frames
BLUR = 0.02  # of the image's width that a blurred frame is smeared


def black(recording: Recording) -> Recording:
    """Replace a second in the middle by black frames."""
    return _changed(recording, lambda image: np.zeros_like(image))


def blur(recording: Recording) -> Recording:
    """Blur a second of frames in the middle along the rows."""

    def smeared(image: Image) -> Image:
        length = max(3, round(BLUR * image.shape[1]))
        kernel = np.full((1, length), 1 / length, np.float32)
        return np.asarray(cv2.filter2D(image, -1, kernel), np.uint8)

    return _changed(recording, smeared)


def jump(recording: Recording) -> Recording:
    """Jump from the first third to the last, then back."""
    count = recording.count
    if count is None or count < 9:
        raise ValueError('to jump, a recording must have a known number of frames, 9 or more')
    a, b = count // 3, 2 * count // 3
    order = [*range(a), *range(b, count), *range(a, b)]

    def shots() -> Iterator[Shot]:
        kept = list(recording.shots())
        stamps = [stamp for stamp, _ in kept]
        for stamp, number in zip(stamps, order, strict=False):
            yield stamp, kept[number][1]

    truth = None if recording.truth is None else recording.truth[order]
    return replace(recording, shots=shots, truth=truth)


SPOILS: dict[str, Callable[[Recording], Recording]] = {
    'black': black,
    'blur': blur,
    'jump': jump,
}


# What one table shows beside the recording as it is.
HARDSHIPS: dict[str, Callable[[Recording], Recording]] = {
    'every 2nd frame': lambda recording: recording.every(2),
    'every 3rd frame': lambda recording: recording.every(3),
    **SPOILS,
}


def _changed(recording: Recording, change: Callable[[Image], Image]) -> Recording:
    count = recording.count
    if count is None:
        raise ValueError('to spoil its middle, a recording must have a known number of frames')
    middle = count // 2

    def shots() -> Iterator[Shot]:
        begun: float | None = None
        for number, (stamp, images) in enumerate(recording.shots()):
            if number >= middle and begun is None:
                begun = stamp
            if begun is not None and stamp < begun + SPOILED:
                images = [change(image) for image in images]
            yield stamp, images

    return replace(recording, shots=shots)
