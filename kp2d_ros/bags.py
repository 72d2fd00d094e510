"""Add keypoints and matches to a bag, as the node would publish them, without ROS."""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kp2d_core.bags import RAW_IMAGE, image_connections, is_bag, open_bag
from kp2d_core.camera import Camera, camera_from_info, names_rectified
from kp2d_core.detector import KeypointDetector
from kp2d_core.errors import FileError
from kp2d_core.files import atomic_folder
from kp2d_core.images import Image, decode, decode_compressed
from kp2d_core.runtimes.base import Runtime
from kp2d_core.threads import one_blas_thread
from kp2d_ros.outputs import (
    MATCH_DTYPE,
    Points,
    description,
    fill_keypoints,
    fill_matches,
    keypoint_dtype,
    match_rows,
    point_fields,
)
from kp2d_ros.pipeline import Frame, Pipeline, Result
from kp2d_ros.settings import Settings

CLOUD, STRING = 'sensor_msgs/msg/PointCloud2', 'std_msgs/msg/String'
CAMERA_INFO = 'sensor_msgs/msg/CameraInfo'
STORAGES = {'.mcap': 'mcap', '.db3': 'sqlite3'}
AHEAD = 4  # images that are decoded in advance
NO_HASH = 'RIHS01_' + 64 * '0'  # of a type whose definition an old bag does not have


@dataclass(frozen=True)
class BagJob:
    source: Path
    target: Path  # a folder, or a file that ends in .mcap or .db3
    settings: Settings
    topic: str = ''  # of the images; '': the only one
    camera_info: str = ''  # '': next to the images
    namespace: str = '/kp2d'
    storage: str | None = None  # 'mcap' or 'sqlite3'; None: that of the source

    def check(self) -> None:
        """Raise FileError or ValueError before anything is loaded or written."""
        if not self.source.exists():
            raise FileError(f'there is no {self.source}')
        if not is_bag(self.source):
            raise FileError(f'{self.source} is not a bag: give a .mcap or .db3 file or its folder')
        if self.target.exists():
            raise FileError(f'{self.target} exists already: give another name to -o')
        wanted = STORAGES.get(self.target.suffix)
        if wanted is not None and self.storage not in (None, wanted):
            raise ValueError(f'{self.target} is not a file of {self.storage}')
        with open_bag(self.source) as reader:
            plan_of(self, reader)


@dataclass
class Done:
    """Counts of what was written."""

    frames: int = 0
    keypoints: int = 0
    matches: int = 0
    refused: int = 0  # images or parts of the bag that cannot be read
    calibrated: bool = False


@dataclass(frozen=True)
class Plan:
    """The connections of a bag and their purpose."""

    images: list[Any]  # connections
    infos: list[Any]
    rectified: bool
    total: int  # images
    topics: dict[str, str]  # keypoints, matches, info -> its full name


def plan_of(job: BagJob, reader: Any) -> Plan:
    path = job.source
    if not reader.is2:
        raise FileError(
            f'{path} is a bag of ROS 1: convert it first, '
            f'rosbags-convert --src {path} --dst {path.stem}'
        )
    images = image_connections(reader, path, job.topic or None)
    found = sorted({connection.topic for connection in images})
    if len(found) > 1:
        raise FileError(
            f'{path} has images on {", ".join(found)}: choose one of them with --topic'
        )
    topic = found[0]
    beside = topic.removesuffix('/compressed').rpartition('/')[0] + '/camera_info'
    infos = [
        c
        for c in reader.connections
        if c.topic == (job.camera_info or beside) and c.msgtype == CAMERA_INFO
    ]
    if job.camera_info and not infos:
        raise FileError(f'{path} has no CameraInfo on {job.camera_info}')
    namespace = '/' + job.namespace.strip('/')
    topics = {name: f'{namespace.rstrip("/")}/{name}' for name in ('keypoints', 'matches', 'info')}
    taken = sorted({c.topic for c in reader.connections} & set(topics.values()))
    if taken:
        raise FileError(f'{path} has {", ".join(taken)} already: give another --namespace')
    total = sum(connection.msgcount for connection in images)
    return Plan(images, infos, names_rectified(topic), total, topics)


def write_bag(
    job: BagJob,
    detector: KeypointDetector,
    advance: Callable[[int], object] = lambda total: None,
    complain: Callable[[str], object] = print,
) -> Done:
    """Write the bag with our topics. The output gets its name only when it is complete.

    advance(total) is called after every image, complain(sentence) for everything unusable.
    """
    with (
        open_bag(job.source) as reader,
        atomic_folder(job.target) as path,
        ThreadPoolExecutor(1) as decoder,
        one_blas_thread(),  # beside the network, more of them only wait for each other
    ):
        plan = plan_of(job, reader)
        with _writer(job, path) as writer:
            output = Output(writer, reader, plan)
            done = _process(job, reader, plan, detector, output, decoder, advance, complain)
        if job.target.suffix in STORAGES:
            _only_file(path)
    return done


def _process(
    job: BagJob,
    reader: Any,
    plan: Plan,
    detector: KeypointDetector,
    output: Output,
    decoder: ThreadPoolExecutor,
    advance: Callable[[int], object],
    complain: Callable[[str], object],
) -> Done:
    done = Done()
    pipeline = Pipeline(detector)
    camera = _first_camera(reader, plan)
    damaged: list[str] = []
    for connection, time, data, decoded in _decoded_ahead(reader, plan, decoder, damaged):
        output.copy(connection, time, data)
        if connection in plan.infos:
            with suppress(Exception):  # keep the previous one, like the node
                message = reader.deserialize(data, connection.msgtype)
                camera = camera_from_info(message, plan.rectified)
        if decoded is None:
            continue
        try:
            header, image = decoded.result()
            stamp = header.stamp.sec * 10**9 + header.stamp.nanosec
            result = pipeline.process(Frame(image, stamp, header.frame_id, camera), job.settings)
        except Exception as error:  # a damaged message makes reader or decoder throw anything
            done.refused += 1
            complain(f'skipped an image on {connection.topic} at {time} ns: {error}')
        else:
            output.add(result, header, time, job.settings, detector.runtime)
            done.frames += 1
            done.keypoints += len(result.features)
            done.matches += len(result.tracks.matches) if result.tracks is not None else 0
            done.calibrated |= result.calibrated
        advance(plan.total)
    if damaged:
        done.refused += 1
        complain(f'{job.source} is damaged, only its first part is used: {damaged[0]}')
    if not done.frames:
        raise FileError(f'no image of {job.source} could be used')
    return done


def _decoded_ahead(
    reader: Any, plan: Plan, decoder: ThreadPoolExecutor, damaged: list[str]
) -> Iterator[tuple[Any, int, bytes, Future[tuple[Any, Image]] | None]]:
    """Yield all messages in order; another thread decodes images in advance."""

    def decoded(connection: Any, data: bytes) -> tuple[Any, Image]:
        message = reader.deserialize(data, connection.msgtype)
        raw = connection.msgtype == RAW_IMAGE
        return message.header, decode(message) if raw else decode_compressed(message)

    waiting: deque[tuple[Any, int, bytes, Future[tuple[Any, Image]] | None]] = deque()
    images = 0
    messages = reader.messages()
    while True:
        try:
            connection, time, data = next(messages)
        except StopIteration:
            break
        except Exception as error:  # each storage has errors of its own
            damaged.append(str(error))
            break
        is_image = connection in plan.images
        future = decoder.submit(decoded, connection, data) if is_image else None
        waiting.append((connection, time, data, future))
        images += is_image
        while images > AHEAD:
            images -= waiting[0][3] is not None
            yield waiting.popleft()
    yield from waiting


def _first_camera(reader: Any, plan: Plan) -> Camera | None:
    """Read the first camera_info, so that the images before it are calibrated too."""
    with suppress(Exception):
        for connection, _, data in reader.messages(plan.infos) if plan.infos else ():
            message = reader.deserialize(data, connection.msgtype)
            return camera_from_info(message, plan.rectified)
    return None


@contextmanager
def _writer(job: BagJob, path: Path) -> Iterator[Any]:
    """Open the writer of rosbags; partial output is removed with its folder after a failure."""
    from rosbags.rosbag2 import StoragePlugin, Writer

    storage = job.storage or STORAGES.get(job.target.suffix) or _storage_of(job.source)
    plugin = StoragePlugin.MCAP if storage == 'mcap' else StoragePlugin.SQLITE3
    writer = Writer(path, version=Writer.VERSION_LATEST, storage_plugin=plugin)
    try:
        writer.open()
        try:
            yield writer
        except BaseException:
            getattr(writer, 'abort', writer.close)()
            raise
        writer.close()
    except sqlite3.Error as error:  # such as a full disk
        raise FileError(f'cannot write {job.target}: {error}') from error


def _storage_of(path: Path) -> str:
    names = [path.name] if path.is_file() else [file.name for file in path.iterdir()]
    return 'mcap' if any('.mcap' in name for name in names) else 'sqlite3'


def _only_file(folder: Path) -> None:
    """Replace the folder of a bag by its only file."""
    file = next(file for file in folder.iterdir() if file.suffix in STORAGES)
    aside = file.rename(folder.with_name(f'{folder.name}.alone'))
    (folder / 'metadata.yaml').unlink()
    folder.rmdir()
    aside.rename(folder)


class Output:
    """Copies messages and adds ours."""

    def __init__(self, writer: Any, reader: Any, plan: Plan) -> None:
        from rosbags.typesys import Stores, get_typestore

        self._writer = writer
        self._types = get_typestore(Stores.ROS2_JAZZY)
        self._connections: dict[Any, Any] = {}
        for connection in reader.connections:
            self._connections[_key(connection)] = self._copied(connection, reader)
        self._ours = {
            name: writer.add_connection(
                topic,
                STRING if name == 'info' else CLOUD,
                typestore=self._types,
                offered_qos_profiles=[_latched()] if name == 'info' else [],
            )
            for name, topic in plan.topics.items()
        }
        self._described = ''

    def _copied(self, connection: Any, reader: Any) -> Any:
        if _key(connection) in self._connections:  # the same, in another file of the bag
            return self._connections[_key(connection)]
        definition, digest = connection.msgdef.data, connection.digest
        if definition and not digest:  # MCAP has no place for it
            with suppress(Exception):
                digest = reader.typestore.hash_rihs01(connection.msgtype)
        if not definition:
            with suppress(Exception):
                definition, _ = self._types.generate_msgdef(connection.msgtype, ros_version=2)
                digest = self._types.hash_rihs01(connection.msgtype)
        return self._writer.add_connection(
            connection.topic,
            connection.msgtype,
            msgdef=definition,
            rihs01=digest or NO_HASH,
            serialization_format=connection.ext.serialization_format,
            offered_qos_profiles=connection.ext.offered_qos_profiles,
        )

    def copy(self, connection: Any, time: int, data: bytes) -> None:
        self._writer.write(self._connections[_key(connection)], time, data)

    def add(
        self, result: Result, header: Any, time: int, settings: Settings, runtime: Runtime
    ) -> None:
        """Write what the node would publish for the image, at its time, after it."""
        described = description(result, settings, runtime)
        if described != self._described:
            self._described = described
            self._write('info', time, self._types.types[STRING](described), STRING)
        self._write(
            'keypoints', time, keypoints_message(self._types, header, result, settings), CLOUD
        )
        if result.tracks is not None and result.previous is not None:
            self._write('matches', time, matches_message(self._types, header, result), CLOUD)

    def _write(self, name: str, time: int, message: Any, kind: str) -> None:
        self._writer.write(self._ours[name], time, self._types.serialize_cdr(message, kind))


def keypoints_message(types: Any, header: Any, result: Result, settings: Settings) -> Any:
    features, kind = result.features, settings.descriptor_format
    points = np.zeros(len(features), keypoint_dtype(features.descriptors.shape[1], kind))
    dense = fill_keypoints(points, features, result.rays, result.tracks, kind)
    return cloud_message(types, header, points, dense)


def matches_message(types: Any, header: Any, result: Result) -> Any:
    """Make the message of a result with tracks and a previous frame."""
    assert result.tracks is not None and result.previous is not None
    points = np.zeros(match_rows(result.tracks), MATCH_DTYPE)
    before = result.previous
    dense = fill_matches(
        points, before.features, result.features, result.rays, result.tracks, before.frame.stamp
    )
    return cloud_message(types, header, points, dense)


def cloud_message(types: Any, header: Any, points: Points, dense: bool) -> Any:
    """Make a PointCloud2 of rosbags; kp2d_ros.outputs makes the same with ROS."""
    known = types.types
    stamp = known['builtin_interfaces/msg/Time'](header.stamp.sec, header.stamp.nanosec)
    step = points.dtype.itemsize
    return known[CLOUD](
        header=known['std_msgs/msg/Header'](stamp, header.frame_id),
        height=1,
        width=len(points),
        fields=point_fields(points.dtype, known['sensor_msgs/msg/PointField']),
        is_bigendian=False,
        point_step=step,
        row_step=step * len(points),
        data=points.view(np.uint8).reshape(-1),
        is_dense=dense,
    )


def _key(connection: Any) -> Any:
    ext = connection.ext
    return connection.topic, connection.msgtype, ext.serialization_format, str(ext)


def _latched() -> Any:
    from rosbags.interfaces import (
        Qos,
        QosDurability,
        QosHistory,
        QosLiveliness,
        QosReliability,
        QosTime,
    )

    never = QosTime(9223372036, 854775807)
    return Qos(
        QosHistory.KEEP_LAST, 1, QosReliability.RELIABLE, QosDurability.TRANSIENT_LOCAL,
        never, never, QosLiveliness.AUTOMATIC, never, False,
    )  # fmt: skip
