"""Read the frames of one or two cameras, with camera_info, from a ROS bag."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kp2d_core.bags import image_connections, image_of, modern_info, open_bag
from kp2d_core.camera import Camera, camera_from_info, names_rectified
from kp2d_core.errors import FileError
from kp2d_core.images import Image
from kp2d_core.odometry.frames import Rig
from kp2d_core.odometry.geometry import rigid

Shot = tuple[float, list[Image]]  # a time in s, and an image of each camera

TOGETHER = 0.005  # s within which images of two cameras are of one moment


def open_frames(
    path: Path, topics: Sequence[str], stereo: bool
) -> tuple[Rig, Callable[[], Iterator[Shot]], int]:
    """Open the given image topics, or the only ones; return rig, frames and their number."""
    wanted = 2 if stereo else 1
    with open_bag(path) as reader:
        there = sorted({connection.topic for connection in image_connections(reader, path)})
        for topic in topics:
            image_connections(reader, path, topic)
        chosen = list(topics) or there
        if len(chosen) != wanted:
            raise ValueError(
                f'{path} has images on {", ".join(there)}: choose '
                f'{"two, left and right," if stereo else "one"} with --topic'
            )
        infos = [_info(reader, topic, path) for topic in chosen]
        count = sum(c.msgcount for c in reader.connections if c.topic == chosen[0])
    cameras = [_camera(info, topic) for info, topic in zip(infos, chosen, strict=True)]
    mounts = [np.eye(4)]
    for info, topic in zip(infos[1:], chosen[1:], strict=True):
        projection = np.reshape(np.array(info.p, np.float64), (3, 4))
        if not projection[0, 0] or not projection[0, 3]:
            raise FileError(
                f'the camera_info of {topic} does not say how far its camera is from the other: '
                'its P must be that of a stereo calibration'
            )
        mounts.append(rigid(np.eye(3), np.array([projection[0, 3] / projection[0, 0], 0, 0])))
    rig = Rig(tuple(cameras), np.array(mounts))

    def shots() -> Iterator[Shot]:
        waiting: dict[str, tuple[float, Image]] = {}
        with open_bag(path) as reader:
            connections = [c for c in reader.connections if c.topic in chosen]
            for connection, time, data in reader.messages(connections):
                try:
                    message = reader.deserialize(data, connection.msgtype)
                    shot = _stamp(message, time), image_of(message, connection.msgtype)
                except Exception as error:  # a damaged message makes the reader throw anything
                    print(f'skipped: an image of {connection.topic}: {error}', file=sys.stderr)
                    continue
                waiting[connection.topic] = shot
                if len(waiting) < wanted:
                    continue
                times = [waiting[topic][0] for topic in chosen]
                if max(times) - min(times) > TOGETHER:
                    earliest = min(chosen, key=lambda topic: waiting[topic][0])
                    del waiting[earliest]
                    continue
                yield times[0], [waiting[topic][1] for topic in chosen]
                waiting.clear()

    return rig, shots, count


def _stamp(message: Any, time: int) -> float:
    """Return the header's time in s, or the recording's if the header has none."""
    stamp = message.header.stamp
    seconds = float(stamp.sec) + stamp.nanosec * 1e-9
    return seconds if seconds > 0 else time * 1e-9


def _info(reader: Any, topic: str, path: Path) -> Any:
    beside = topic.removesuffix('/compressed').rpartition('/')[0] + '/camera_info'
    connections = [c for c in reader.connections if c.topic == beside]
    for connection, _, data in reader.messages(connections) if connections else ():
        return modern_info(reader.deserialize(data, connection.msgtype))
    raise FileError(f'{path} has no {beside}: the odometry needs a calibrated camera')


def _camera(info: Any, topic: str) -> Camera:
    camera = camera_from_info(info, names_rectified(topic))
    if camera is None:
        raise FileError(f'the camera_info of {topic} says that the camera is not calibrated')
    return camera
