"""kp2d bag: everything of the input, and what the node would have published of its images."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from full_disk import run_on_full_disk

pytest.importorskip('rosbags')

from rosbags.highlevel import AnyReader
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

from kp2d_core.checkpoint import load_checkpoint
from kp2d_core.cli import main
from kp2d_core.detector import KeypointDetector
from kp2d_core.files import atomic_folder
from kp2d_ros.bags import BagJob, keypoints_message, matches_message, write_bag
from kp2d_ros.pipeline import Frame, Pipeline
from kp2d_ros.settings import Settings

STORE = get_typestore(Stores.ROS2_JAZZY)
IMAGE, JPEG = 'sensor_msgs/msg/Image', 'sensor_msgs/msg/CompressedImage'
INFO, TEXT = 'sensor_msgs/msg/CameraInfo', 'std_msgs/msg/String'
MATRIX = np.array([[150.0, 0, 80], [0, 150, 60], [0, 0, 1]])
OURS = ('/kp2d/info', '/kp2d/keypoints', '/kp2d/matches')


def header_at(seconds: float) -> Any:
    stamp = STORE.types['builtin_interfaces/msg/Time'](*divmod(round(seconds * 1e9), 10**9))
    return STORE.types['std_msgs/msg/Header'](stamp, 'front')


def make_bag(
    path: Path,
    pictures: list[np.ndarray],
    storage: str = 'sqlite3',
    jpeg: bool = False,
    damaged: int = -1,
    second: bool = False,
    matrix: np.ndarray = MATRIX,
) -> Path:
    """Ten images a second, a calibration after the first, and words that have to be kept."""
    types = STORE.types
    plugin = StoragePlugin.MCAP if storage == 'mcap' else StoragePlugin.SQLITE3
    with Writer(path, version=9, storage_plugin=plugin) as writer:
        kind = JPEG if jpeg else IMAGE
        topic = '/front/image_raw' + '/compressed' * jpeg
        images = writer.add_connection(topic, kind, typestore=STORE)
        infos = writer.add_connection('/front/camera_info', INFO, typestore=STORE)
        words = writer.add_connection('/words', TEXT, typestore=STORE)
        if second:
            writer.add_connection('/back/image_raw', IMAGE, typestore=STORE)
        for number, picture in enumerate(pictures):
            time, header = 10**9 + number * 10**8, header_at(100 + number / 10)
            height, width = picture.shape[:2]
            if jpeg:
                data = cv2.imencode('.jpg', picture[..., ::-1])[1].ravel()
                image = types[JPEG](header, 'jpeg', data[: 20 if number == damaged else None])
            else:
                data = picture.ravel()[: 100 if number == damaged else None]
                image = types[IMAGE](header, height, width, 'rgb8', 0, 3 * width, data)
            writer.write(images, time, STORE.serialize_cdr(image, kind))
            roi = types['sensor_msgs/msg/RegionOfInterest'](0, 0, 0, 0, False)
            k = matrix.ravel()
            p = np.insert(matrix, 3, 0, axis=1).ravel()
            info = types[INFO](
                header, height, width, 'plumb_bob', np.zeros(5), k, np.eye(3).ravel(), p, 0, 0, roi
            )
            writer.write(infos, time + 1000, STORE.serialize_cdr(info, INFO))
            word = types[TEXT](f'word {number}')
            writer.write(words, time + 2000, STORE.serialize_cdr(word, TEXT))
    return path


def contents(path: Path) -> list[tuple[str, int, bytes]]:
    with AnyReader([path]) as reader:
        return [(c.topic, time, bytes(data)) for c, time, data in reader.messages()]


@pytest.fixture
def pictures(photographs) -> list[np.ndarray]:
    coffee = photographs['coffee']
    return [np.ascontiguousarray(coffee[i : i + 120, 2 * i : 2 * i + 160]) for i in range(6)]


def command(model: Path, *arguments: object) -> int:
    return main(['bag', *map(str, arguments), '--model', str(model), '--runtime', 'onnxruntime'])


@pytest.mark.parametrize('storage', ['sqlite3', 'mcap'])
def test_a_full_disk(tmp_path, pictures, model, storage):
    given, full = make_bag(tmp_path / 'in', pictures[:2], storage), tmp_path / 'full'
    arguments = ['bag', given, '-o', full / 'out', '--model', model, '--runtime', 'onnxruntime']
    result = run_on_full_disk(
        [sys.executable, '-m', 'kp2d_core.cli', *map(str, arguments)], full, '16k'
    )
    told = [line for line in result.stderr.splitlines() if line.startswith('kp2d')]
    assert result.returncode == 2 and len(told) == 1, result.stderr
    assert f'cannot write {full}/out: ' in told[0]


@pytest.mark.parametrize('storage', ['sqlite3', 'mcap'])
def test_all_of_the_input_and_ours(tmp_path, pictures, model, storage, capsys):
    given = make_bag(tmp_path / 'in', pictures, storage)
    assert command(model, given, '-o', tmp_path / 'out', '--max-keypoints', 50) == 0
    assert '6 frames, ' in capsys.readouterr().out
    assert len(list((tmp_path / 'out').glob('out*.mcap'))) == (storage == 'mcap')
    written = contents(tmp_path / 'out')
    assert [each for each in written if each[0] not in OURS] == contents(given)
    times = [1_000_000_000 + i * 10**8 for i in range(6)]
    assert [time for topic, time, _ in written if topic == '/kp2d/keypoints'] == times
    assert [time for topic, time, _ in written if topic == '/kp2d/matches'] == times[1:]
    (described,) = [data for topic, _, data in written if topic == '/kp2d/info']
    facts = json.loads(STORE.deserialize_cdr(described, TEXT).data)
    assert facts['weights'] == load_checkpoint(model).digest()[:16]
    assert facts['calibrated'] and (facts['image_width'], facts['image_height']) == (160, 120)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['in', 'out']


def test_one_file_from_compressed_images(tmp_path, pictures, model):
    given = make_bag(tmp_path / 'in', pictures, jpeg=True)
    assert command(model, given, '-o', tmp_path / 'drive.mcap', '--namespace', 'front/kp') == 0
    written = contents(tmp_path / 'drive.mcap')
    assert (tmp_path / 'drive.mcap').is_file()
    assert sum(topic == '/front/kp/keypoints' for topic, _, _ in written) == 6


def assert_same(message: Any, sent: bytes) -> None:
    """Byte for byte, but for the padding between fields, which Fast DDS leaves as it finds it."""
    kind = message.__msgtype__
    ours = bytes(STORE.serialize_cdr(message, kind))
    assert len(ours) == len(sent)
    assert bytes(STORE.serialize_cdr(STORE.deserialize_cdr(sent, kind), kind)) == ours
    differ = np.flatnonzero(np.frombuffer(ours, np.uint8) != np.frombuffer(sent, np.uint8))
    assert all(ours[at] == 0 for at in differ)


def test_the_bytes_are_those_of_the_node(tmp_path, pictures, model):
    """Of each message: what rclpy would have sent, for all formats, byte for byte."""
    pytest.importorskip('sensor_msgs')
    from rclpy.serialization import serialize_message
    from std_msgs.msg import Header

    from kp2d_ros.messages import keypoints_to_cloud, matches_to_cloud

    pipeline = Pipeline(KeypointDetector.load(model, runtime='onnxruntime'))
    for number, kind in enumerate(('int8', 'float32', 'float16', 'none', 'int8')):
        settings = Settings(max_keypoints=40, descriptor_format=kind)
        image = pictures[number] if number < 4 else np.zeros_like(pictures[0])
        if number == 4:  # no matches
            settings = Settings(max_keypoints=40, score_threshold=1.0)
        result = pipeline.process(Frame(image, number * 10**8, 'front'), settings)
        header = Header(frame_id='front')
        header.stamp.nanosec = number * 10**8
        theirs = keypoints_to_cloud(
            header, result.features, result.rays, result.tracks,
            descriptor_format=settings.descriptor_format,
        )  # fmt: skip
        ours = keypoints_message(STORE, header, result, settings)
        assert_same(ours, serialize_message(theirs))
        if result.previous is None:
            continue
        theirs = matches_to_cloud(
            header, result.previous.features, result.features, result.rays, result.tracks,
            result.previous.frame.stamp,
        )  # fmt: skip
        ours = matches_message(STORE, header, result)
        assert_same(ours, serialize_message(theirs))


def test_parameters_of_the_node(tmp_path, pictures, model, capsys):
    given = make_bag(tmp_path / 'in', pictures[:2])
    out = tmp_path / 'out'
    for text, complaint in (
        ('track', 'is not NAME:=VALUE'),
        ('tracks:=true', "'tracks' is not a parameter that the node can change while it runs: "),
        ('model:=v4', "'model' is not a parameter that the node can change"),
        ('track:=3', "track must be a bool, got '3'"),
        ('max_missed:=1000', 'max_missed must be'),
        ('scales:=[1.0, 1.0]', 'scales'),
    ):
        assert command(model, given, '-o', out, '-p', text) == 2
        assert complaint in capsys.readouterr().err
    assert command(model, given, '-o', out, '-p', 'track:=false', '-p', 'max_gap:=1') == 0
    assert not any(topic == '/kp2d/matches' for topic, _, _ in contents(out))


def test_damage_is_named_and_the_rest_is_used(tmp_path, pictures, model, capsys):
    given = make_bag(tmp_path / 'in', pictures, damaged=2)
    assert command(model, given, '-o', tmp_path / 'out') == 1
    told = capsys.readouterr()
    assert 'skipped an image on /front/image_raw at 1200000000 ns' in told.err
    assert '5 frames' in told.out
    kept = [each for each in contents(tmp_path / 'out') if each[0] not in OURS]
    assert kept == contents(given)


def test_mistakes_leave_nothing(tmp_path, pictures, model, capsys):
    given = make_bag(tmp_path / 'in', pictures[:2], second=True)
    only = make_bag(tmp_path / 'only', pictures[:2], damaged=0)
    (tmp_path / 'there').mkdir()
    (tmp_path / 'broken.mcap').write_bytes(b'no bag')
    before = sorted(tmp_path.iterdir())
    for arguments, complaint in (
        ((tmp_path / 'none', '-o', tmp_path / 'out'), 'there is no'),
        ((tmp_path / 'there', '-o', tmp_path / 'out'), 'is not a bag'),
        ((tmp_path / 'broken.mcap', '-o', tmp_path / 'out'), 'is not a readable bag'),
        ((given, '-o', tmp_path / 'there'), 'exists already'),
        ((given, '-o', tmp_path / 'out'), '/back/image_raw, /front/image_raw: choose one'),
        ((given, '-o', tmp_path / 'out', '--topic', '/up'), 'has no images on /up'),
        ((only, '-o', tmp_path / 'out', '--camera-info', '/up'), 'has no CameraInfo on /up'),
        ((only, '-o', tmp_path / 'a.db3', '--storage', 'mcap'), 'not a file of mcap'),
        ((given, '-o', tmp_path / 'out', '--topic', '/back/image_raw'), 'no image of'),
    ):
        assert command(model, *arguments) == 2
        assert complaint in capsys.readouterr().err
        assert sorted(tmp_path.iterdir()) == before
    assert command(model, only, '-o', tmp_path / 'out') == 1
    assert command(model, tmp_path / 'out', '-o', tmp_path / 'twice') == 2
    assert 'already: give another --namespace' in capsys.readouterr().err


@pytest.mark.parametrize('how', [signal.SIGINT, signal.SIGKILL])
def test_interrupted_it_leaves_no_broken_bag(tmp_path, pictures, model, how):
    given = make_bag(tmp_path / 'in', pictures * 200)
    with (tmp_path / 'log').open('wb') as log:
        process = subprocess.Popen(
            [sys.executable, '-m', 'kp2d_core.cli', 'bag', str(given), '-o',
             str(tmp_path / 'out'), '--model', str(model), '--runtime', 'onnxruntime'],
            stderr=log, stdout=log,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # not so behind &
        )  # fmt: skip
        end = time.monotonic() + 60
        while not list(tmp_path.glob('.out*/out/*')):
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.02)
        process.send_signal(how)
        assert process.wait(30) != 0
    assert not (tmp_path / 'out').exists()
    if how == signal.SIGINT:
        assert 'interrupted' in (tmp_path / 'log').read_text()
        assert not list(tmp_path.glob('.out*'))
    else:  # the next that writes there cleans up
        assert list(tmp_path.glob('.out*'))
        with atomic_folder(tmp_path / 'other') as path:
            path.mkdir()
        assert not list(tmp_path.glob('.*'))


def test_without_ros(tmp_path, pictures, model):
    """rosbags alone: no rclpy, no sensor_msgs."""
    given = make_bag(tmp_path / 'in', pictures[:2])
    code = (
        'import sys\n'
        "for name in ('rclpy', 'sensor_msgs', 'std_msgs'): sys.modules[name] = None\n"
        'from kp2d_core.cli import main\n'
        'sys.exit(main(sys.argv[1:]))'
    )
    done = subprocess.run(
        [sys.executable, '-c', code, 'bag', str(given), '-o', str(tmp_path / 'out'),
         '--model', str(model), '--runtime', 'onnxruntime'],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_as_a_function(tmp_path, pictures, model):
    given = make_bag(tmp_path / 'in', pictures)
    advanced: list[int] = []
    job = BagJob(given, tmp_path / 'out', Settings(max_keypoints=30))
    done = write_bag(job, KeypointDetector.load(model, runtime='onnxruntime'), advanced.append)
    assert advanced == [6] * 6 and done.frames == 6
    assert done.calibrated and not done.refused and done.keypoints <= 180
