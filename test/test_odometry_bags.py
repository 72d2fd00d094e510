"""kp2d odometry on bags: one camera, a rectified pair, damaged images, no calibration."""

import json

import numpy as np
import pytest

from kp2d_core.cli import main
from kp2d_core.odometry.geometry import rigid
from kp2d_core.odometry.recordings import open_recording
from kp2d_core.odometry.runs import baseline_method, run_all, score
from kp2d_core.odometry.trajectory import write_tum
from kp2d_core.views.worlds import photographs, room, room_path, view_camera

rosbag2 = pytest.importorskip('rosbags.rosbag2')
from rosbags.typesys import Stores, get_typestore  # noqa: E402

STORE = get_typestore(Stores.ROS2_JAZZY)
IMAGE, INFO = 'sensor_msgs/msg/Image', 'sensor_msgs/msg/CameraInfo'
SIZE, BASELINE, DAMAGED = (320, 240), 0.3, 14
POSES = room_path(300)[:20]


def camera_info(header, camera, shift):
    k, roi = camera.matrix, STORE.types['sensor_msgs/msg/RegionOfInterest'](0, 0, 0, 0, False)
    p = np.column_stack([k, [-k[0, 0] * shift, 0, 0]])
    return STORE.types[INFO](
        header, SIZE[1], SIZE[0], 'plumb_bob', np.zeros(5), k.ravel(), np.eye(3).ravel(),
        p.ravel(), 0, 0, roi,
    )  # fmt: skip


@pytest.fixture(scope='module')
def bag(tmp_path_factory):
    """A camera pair in the room; one image of the left camera is cut short."""
    path = tmp_path_factory.mktemp('bags') / 'drive'
    scene, camera = room(photographs()), view_camera(SIZE)
    with rosbag2.Writer(path, version=9) as writer:
        topics = {
            side: [
                writer.add_connection(f'/{side}/{name}', kind, typestore=STORE)
                for name, kind in (('image_rect', IMAGE), ('camera_info', INFO))
            ]
            for side in ('left', 'right')
        }
        for number, pose in enumerate(POSES):
            time = (100 + number) * 10**8
            stamp = STORE.types['builtin_interfaces/msg/Time'](*divmod(time, 10**9))
            header = STORE.types['std_msgs/msg/Header'](stamp, 'camera')
            for side, shift in (('left', 0.0), ('right', BASELINE)):
                view = scene.view(camera, pose @ rigid(np.eye(3), np.array([shift, 0, 0])))
                data = view.ravel()[: 100 if (side, number) == ('left', DAMAGED) else None]
                image = STORE.types[IMAGE](header, SIZE[1], SIZE[0], 'rgb8', 0, 3 * SIZE[0], data)
                info = camera_info(header, camera, shift)
                for connection, message, kind in zip(
                    topics[side], (image, info), (IMAGE, INFO), strict=True
                ):
                    writer.write(connection, time, STORE.serialize_cdr(message, kind))
    return path


def test_bag_of_one_camera(bag, tmp_path, capsys):
    truth, output = tmp_path / 'truth.tum', tmp_path / 'out.tum'
    write_tum(truth, 10 + np.arange(len(POSES)) / 10, POSES)
    figures = tmp_path / 'out.json'
    arguments = ['odometry', str(bag), '--topic', '/left/image_rect', '-o', str(output)]
    arguments += ['--truth', str(truth), '--json', str(figures), '--max-keypoints', '400']
    assert main(arguments) == 0
    told = capsys.readouterr()
    assert 'skipped: an image of /left/image_rect' in told.err
    rows = np.loadtxt(output)
    assert len(rows) == len(POSES) - 1
    assert 10 + DAMAGED / 10 not in rows[:, 0]
    assert rows[0, 0] == 10
    assert rows[-1, 0] == pytest.approx(10 + (len(POSES) - 1) / 10)
    (run,) = json.loads(figures.read_text())['runs']
    assert run['errors']['final']['frames'] == len(POSES) - 1
    assert run['errors']['final']['ate'] < 0.01


def test_bag_of_two_cameras_is_metric(bag, tmp_path):
    truth = tmp_path / 'truth.tum'
    write_tum(truth, 10 + np.arange(len(POSES)) / 10, POSES)
    recording = open_recording(
        str(bag), stereo=True, topics=['/left/image_rect', '/right/image_rect'], truth=truth
    )
    assert recording.count == len(POSES) - 1
    (run,) = run_all(recording, [baseline_method('sift', 500)], progress=False)
    found = score(run, recording)
    assert found.final.ate < 0.01
    assert found.true_scale == pytest.approx(1, abs=0.01)


def test_bag_without_calibration(tmp_path, capsys):
    with rosbag2.Writer(tmp_path / 'bag', version=9) as writer:
        connection = writer.add_connection('/front/image_raw', IMAGE, typestore=STORE)
        stamp = STORE.types['builtin_interfaces/msg/Time'](1, 0)
        header = STORE.types['std_msgs/msg/Header'](stamp, 'camera')
        image = STORE.types[IMAGE](header, 8, 8, 'mono8', 0, 8, np.zeros(64, np.uint8))
        writer.write(connection, 10**9, STORE.serialize_cdr(image, IMAGE))
    assert main(['odometry', str(tmp_path / 'bag')]) == 2
    assert 'has no /front/camera_info' in capsys.readouterr().err
