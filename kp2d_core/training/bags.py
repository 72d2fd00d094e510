"""Frames of ROS bags to train on, thinned by time: neighbouring frames teach the same thing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from kp2d_core.errors import FileError
from kp2d_core.image_messages import decode, decode_compressed
from kp2d_core.images import Image
from kp2d_core.training.photographs import shrink_to

BAG_SUFFIXES = frozenset({'.bag', '.db3', '.mcap'})
IMAGE_TYPES = ('sensor_msgs/msg/Image', 'sensor_msgs/msg/CompressedImage')
SHORT_SIDE = 720  # pixels; larger frames are shrunk, as all of them are kept in memory


def is_bag(path: Path) -> bool:
    """A file such as drive.mcap, or a folder that rosbag2 wrote."""
    if path.is_dir():
        return (path / 'metadata.yaml').is_file()
    return path.suffix.lower() in BAG_SUFFIXES


def read_frames(path: Path, topic: str | None = None, seconds: float = 0.5) -> list[Image]:
    """RGB frames of a topic (None: every image topic), at least `seconds` apart."""
    frames: list[Image] = []
    damaged: list[str] = []
    with open_bag(path) as reader:
        connections = _image_connections(reader, path, topic)
        due = dict.fromkeys((connection.topic for connection in connections), 0)
        for connection, time, data in _whole_messages(reader, connections, path):
            if time < due[connection.topic]:
                continue
            try:
                frames.append(_decode(reader.deserialize(data, connection.msgtype)))
            except Exception as error:  # a damaged message makes the reader throw anything
                damaged.append(str(error) or type(error).__name__)
                continue
            due[connection.topic] = time + int(seconds * 1e9)
    if damaged:
        print(f'skipped {len(damaged)} frames of {path}: {damaged[0]}', file=sys.stderr)
    if not frames:
        raise FileError(f'no frame of {path} can be used')
    return frames


def open_bag(path: Path) -> closing[Any]:
    """A reader of rosbags to be used with `with`; FileError if the file is none of its kinds."""
    try:
        from rosbags.highlevel import AnyReader
        from rosbags.typesys import Stores, get_typestore
    except ImportError:
        raise FileError('to read bags, install rosbags: pip install rosbags') from None
    try:
        reader = AnyReader([path], default_typestore=get_typestore(Stores.ROS2_JAZZY))
        reader.open()
    except Exception as error:  # each storage has errors of its own
        raise FileError(f'{path} is not a readable bag: {error}') from error
    return closing(reader)


def _whole_messages(reader: Any, connections: list[Any], path: Path) -> Iterator[Any]:
    """The messages up to where the file is damaged, as where a robot lost its power."""
    try:
        yield from reader.messages(connections)
    except Exception as error:  # each storage has errors of its own
        print(f'{path} is damaged, used up to there: {error}', file=sys.stderr)


def _image_connections(reader: Any, path: Path, topic: str | None) -> list[Any]:
    found = [c for c in reader.connections if c.msgtype in IMAGE_TYPES]
    topics = sorted({connection.topic for connection in found})
    if not found:
        raise FileError(f'there are no images in {path}')
    if topic is not None and topic not in topics:
        raise FileError(f'{path} has no images on {topic}, only on {", ".join(topics)}')
    return [connection for connection in found if topic in (None, connection.topic)]


def _decode(message: Any) -> Image:
    image = decode_compressed(message) if hasattr(message, 'format') else decode(message)
    if image.ndim == 2:
        image = np.asarray(cv2.cvtColor(image, cv2.COLOR_GRAY2RGB), np.uint8)
    return shrink_to(np.array(image), SHORT_SIDE)  # a copy: it may be a view of the message
