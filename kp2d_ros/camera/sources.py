"""Sources of the camera node: a folder, a video, a webcam, a bag, a scene."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import cv2
import numpy as np

from kp2d_core.bags import decode_image, image_connections, is_bag, modern_info, open_bag
from kp2d_core.camera import names_rectified, rectified
from kp2d_core.errors import FileError
from kp2d_core.images import IMAGE_SUFFIXES, Size, find_images, read_image
from kp2d_ros.camera.moving_view import MovingCamera, MovingView, Picture

FASTEST = 240.0  # Hz that are believed of a recording
TIMED = 100  # images whose times give the rate of a bag: all may be many gigabytes


class Damage(str):
    """Replaces a picture that cannot be read; the sentence explains why."""


class Source(Protocol):
    description: str
    rate: float  # pictures a second, as it was recorded; 0: it has no rate of its own

    def pictures(self) -> Iterator[Picture | Damage]:
        """From the first to the last; a second call starts again."""
        ...


def open_source(text: str, *, size: Size | None = None, topic: str = '') -> Source:
    """Open a source by name: '' or 'scene' is a rendered room, '0' or 'webcam' a webcam.

    Raise FileError or ValueError if there is no such source.
    """
    if text in ('', 'scene'):
        return MovingCamera(size or (640, 480))
    if text == 'webcam' or text.isdecimal() or text.startswith('/dev/video'):
        return Webcam(text, size)
    path = Path(text).expanduser()
    if not path.exists():
        raise FileError(
            f"there is no '{text}': give a folder, image, video or bag, 'webcam' or 'scene'"
        )
    if is_bag(path):
        return Bag(path, topic)
    if path.is_dir():
        return Folder(path)
    if path.suffix.lower() in IMAGE_SUFFIXES:
        return MovingView(read_image(path), size or (640, 480), path.name)
    return Video(path)


class Folder:
    rate = 0.0

    def __init__(self, path: Path) -> None:
        self.description = f'folder {path}'
        self._files = find_images([path])
        if not self._files:
            raise FileError(f'there is no image in {path}')

    def pictures(self) -> Iterator[Picture | Damage]:
        for file in self._files:
            try:
                yield Picture(read_image(file))
            except FileError as error:
                yield Damage(error)


class Video:
    def __init__(self, path: Path) -> None:
        self.description = f'video {path}'
        self._path = path
        capture = _open_capture(str(path))
        self.rate = float(np.clip(capture.get(cv2.CAP_PROP_FPS), 0.0, FASTEST))
        capture.release()

    def pictures(self) -> Iterator[Picture]:
        yield from _captured(_open_capture(str(self._path)))


class Webcam:
    rate = 0.0

    def __init__(self, name: str, size: Size | None = None) -> None:
        self.description = f'webcam {name}'
        number = '0' if name == 'webcam' else name
        self._device: str | int = int(number) if number.isdecimal() else number
        self._size = size
        _open_capture(self._device).release()

    def pictures(self) -> Iterator[Picture]:
        capture = _open_capture(self._device)
        if self._size is not None:
            capture.set(cv2.CAP_PROP_FRAME_WIDTH, self._size[0])
            capture.set(cv2.CAP_PROP_FRAME_HEIGHT, self._size[1])
        yield from _captured(capture)


def _open_capture(source: str | int) -> cv2.VideoCapture:
    capture = cv2.VideoCapture(source)
    if not capture.isOpened():
        kind = 'webcam' if isinstance(source, int) else 'video'
        raise FileError(f"'{source}' is not a {kind} that OpenCV can open")
    return capture


def _captured(capture: cv2.VideoCapture) -> Iterator[Picture]:
    try:
        while True:
            there, image = capture.read()
            if not there:
                return
            yield Picture(np.asarray(cv2.cvtColor(image, cv2.COLOR_BGR2RGB), np.uint8))
    finally:
        capture.release()


class Bag:
    """Images of a bag (MCAP, sqlite3 or ROS 1), with the camera_info recorded beside them."""

    def __init__(self, path: Path, topic: str = '') -> None:
        self.description = f'bag {path}'
        self._path = path
        with open_bag(self._path) as reader:
            images = image_connections(reader, path, topic or None)
            self.topic = images[0].topic
            self.rate = _rate(reader, [c for c in images if c.topic == self.topic])

    def pictures(self) -> Iterator[Picture | Damage]:
        beside = self.topic.removesuffix('/compressed').rpartition('/')[0] + '/camera_info'
        info = None
        with open_bag(self._path) as reader:
            wanted = [c for c in reader.connections if c.topic in (self.topic, beside)]
            try:
                for connection, _, data in reader.messages(wanted):
                    try:
                        if connection.topic == beside:
                            info = modern_info(reader.deserialize(data, connection.msgtype))
                            if names_rectified(self.topic):  # which its new name will not say
                                info = rectified(info)
                            continue
                        picture = Picture(decode_image(reader, connection, data), info)
                    except Exception as error:  # a damaged message makes the reader throw anything
                        yield Damage(error)
                        continue
                    yield picture
            except Exception as error:  # each storage has errors of its own
                yield Damage(f'{self._path} is damaged, only its first part is used: {error}')


def _rate(reader: Any, connections: list[Any]) -> float:
    """Return the rate of the first messages in Hz; 0 if their times do not determine it."""
    times: list[int] = []
    with suppress(Exception):  # damage is reported where the pictures are read
        for _, time, _ in islice(reader.messages(connections), TIMED):
            times.append(time)
    span = max(times, default=0) - min(times, default=0)
    return min((len(times) - 1) * 1e9 / span, FASTEST) if span else 0.0
