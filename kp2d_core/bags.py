"""Open ROS bags (MCAP, sqlite3, ROS 1) and find the images in them, without ROS."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from kp2d_core.errors import FileError
from kp2d_core.images import Image, decode, decode_compressed

BAG_SUFFIXES = frozenset({'.bag', '.db3', '.mcap'})
RAW_IMAGE = 'sensor_msgs/msg/Image'
COMPRESSED_IMAGE = 'sensor_msgs/msg/CompressedImage'


def is_bag(path: Path) -> bool:
    """Whether this is a bag: a file such as drive.mcap, or a folder that rosbag2 wrote."""
    if path.is_dir():
        return (path / 'metadata.yaml').is_file()
    return path.suffix.lower() in BAG_SUFFIXES


def open_bag(path: Path) -> closing[Any]:
    """Open a bag, to be used with `with`; raise FileError if rosbags cannot read the file."""
    try:
        from rosbags.highlevel import AnyReader
        from rosbags.typesys import Stores, get_typestore
    except ImportError:
        raise FileError('to read bags, install rosbags: pip install rosbags') from None
    try:
        reader = AnyReader([path], default_typestore=get_typestore(Stores.ROS2_JAZZY))
        reader.open()
    except Exception as error:  # each storage raises its own errors
        raise FileError(f'{path} is not a readable bag: {error}') from error
    return closing(reader)


def image_connections(reader: Any, path: Path, topic: str | None = None) -> list[Any]:
    """Find the connections with images, on one topic or all; raise FileError if there are none."""
    found = [c for c in reader.connections if c.msgtype in (RAW_IMAGE, COMPRESSED_IMAGE)]
    topics = sorted({connection.topic for connection in found})
    if not found:
        raise FileError(f'there are no images in {path}')
    if topic is not None and topic not in topics:
        raise FileError(f'{path} has no images on {topic}, only on {", ".join(topics)}')
    return [connection for connection in found if topic in (None, connection.topic)]


def decode_image(reader: Any, connection: Any, data: bytes) -> Image:
    """Decode the image of a message; reader and decoder may raise anything for a damaged one."""
    return image_of(reader.deserialize(data, connection.msgtype), connection.msgtype)


def image_of(message: Any, kind: str) -> Image:
    return decode(message) if kind == RAW_IMAGE else decode_compressed(message)


def modern_info(message: Any) -> Any:
    """Convert a camera_info of ROS 1, whose fields K, D, R and P have capital names."""
    for name in 'kdrp':
        if not hasattr(message, name):
            object.__setattr__(message, name, getattr(message, name.upper()))
    return message
