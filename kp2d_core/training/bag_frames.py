"""Frames of ROS bags to train on, thinned by time: neighbouring frames teach the same thing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from kp2d_core.bags import decode_image, image_connections, open_bag
from kp2d_core.errors import FileError
from kp2d_core.images import Image
from kp2d_core.training.photographs import shrink_to

SHORT_SIDE = 720  # pixels; larger frames are shrunk, as all of them are kept in memory


def read_frames(path: Path, topic: str | None = None, seconds: float = 0.5) -> list[Image]:
    """RGB frames of a topic (None: every image topic), at least `seconds` apart."""
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
            except Exception as error:  # a damaged message makes the reader throw anything
                damaged.append(str(error) or type(error).__name__)
                continue
            due[connection.topic] = time + int(seconds * 1e9)
    if damaged:
        print(f'skipped {len(damaged)} frames of {path}: {damaged[0]}', file=sys.stderr)
    if not frames:
        raise FileError(f'no frame of {path} can be used')
    return frames


def _whole_messages(reader: Any, connections: list[Any], path: Path) -> Iterator[Any]:
    """The messages up to where the file is damaged, as where a robot lost its power."""
    try:
        yield from reader.messages(connections)
    except Exception as error:  # each storage has errors of its own
        print(f'{path} is damaged, used up to there: {error}', file=sys.stderr)


def _prepare(image: Image) -> Image:
    if image.ndim == 2:
        image = np.asarray(cv2.cvtColor(image, cv2.COLOR_GRAY2RGB), np.uint8)
    return shrink_to(np.array(image), SHORT_SIDE)  # a copy: it may be a view of the message
