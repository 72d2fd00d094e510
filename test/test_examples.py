"""Run the scripts of examples/ without changes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import cpp
import cv2
import numpy as np
import pytest
from conftest import ROOT

from kp2d_core import KeypointDetector

EXAMPLES = ROOT / 'examples'
TIMEOUT = 150


def run(name: str, *arguments: object, folder: Path) -> str:
    paths = [str(ROOT), os.environ.get('PYTHONPATH', '')]
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *map(str, arguments)],
        cwd=folder, capture_output=True, text=True, timeout=TIMEOUT,
        env={**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, paths))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def write(path: Path, image: np.ndarray) -> Path:
    cv2.imwrite(str(path), image[..., ::-1])
    return path


@pytest.fixture(scope='module')
def film(tmp_path_factory, photographs) -> Path:
    """A camera that pans over a photograph."""
    path = tmp_path_factory.mktemp('film') / 'film.avi'
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*'MJPG'), 10, (160, 120))
    for number in range(6):
        view = photographs['coffee'][60:180, 100 + 4 * number : 260 + 4 * number]
        writer.write(np.ascontiguousarray(view[..., ::-1]))
    writer.release()
    return path


def test_every_example_is_listed_and_named_here():
    listed = set(re.findall(r'^\| `([\w./]+)', (EXAMPLES / 'README.md').read_text(), re.MULTILINE))
    there = {path.name + '/' * path.is_dir() for path in EXAMPLES.iterdir()} - {'README.md'}
    assert {name for name in there if not name.startswith('__')} == listed


def test_two_images(photographs, tmp_path):
    paths = [
        write(tmp_path / f'{side}.png', photographs[f'motorcycle_{side}'])
        for side in ('left', 'right')
    ]
    output = run('two_images.py', *paths, folder=tmp_path)
    inliers, matches = map(int, re.search(r'(\d+) of (\d+) matches agree', output).groups())
    assert 100 < inliers <= matches and output.count('Features(') == 2
    left = photographs['motorcycle_left']
    assert cv2.imread(str(tmp_path / 'matches.png')).shape == (
        left.shape[0], left.shape[1] + photographs['motorcycle_right'].shape[1], 3,
    )  # fmt: skip


def test_video(film, tmp_path):
    lines = run('video.py', film, folder=tmp_path).splitlines()
    seen = [int(re.search(r'(\d+) seen before', line)[1]) for line in lines]
    assert len(seen) == 6 and seen[0] == 0 and min(seen[1:]) > 30
    assert lines[-1].endswith('oldest 5')


def test_bag(photographs, tmp_path):
    rosbags = pytest.importorskip('rosbags.rosbag2')
    from rosbags.typesys import Stores, get_typestore

    store = get_typestore(Stores.ROS2_JAZZY)
    kinds = store.types
    image = np.ascontiguousarray(photographs['coffee'][:120, :160])
    with rosbags.Writer(tmp_path / 'drive', version=9) as writer:
        topic = writer.add_connection('/image', 'sensor_msgs/msg/Image', typestore=store)
        for second in range(2):
            stamp = kinds['builtin_interfaces/msg/Time'](second, 0)
            message = kinds['sensor_msgs/msg/Image'](
                kinds['std_msgs/msg/Header'](stamp, 'camera'), 120, 160, 'rgb8', 0, 480,
                image.reshape(-1),
            )  # fmt: skip
            data = store.serialize_cdr(message, 'sensor_msgs/msg/Image')
            writer.write(topic, second * 10**9, data)
    lines = run('bag.py', tmp_path / 'drive', folder=tmp_path).splitlines()
    assert [line.split()[0] for line in lines] == ['0.000', '1.000']
    assert all('/image: Features(' in line for line in lines)


def test_training_of_your_own(tmp_path):
    pytest.importorskip('skimage')
    output = run('train_your_own.py', folder=tmp_path)
    losses = [float(value) for value in re.findall(r'step \d: ([\d.]+)', output)]
    assert len(losses) == 8 and losses[-1] < 0.98 * losses[0]
    detector = KeypointDetector.load(tmp_path / 'mine.safetensors')
    assert len(detector.detect(np.zeros((64, 64), np.uint8), score_threshold=0.0)) > 0


def test_reconstruction(photographs, tmp_path):
    """Two images are too few for a model; test_exchange.py reconstructs a real scene."""
    pycolmap = pytest.importorskip('pycolmap')
    (tmp_path / 'photographs').mkdir()
    for side in ('left', 'right'):
        image = cv2.resize(photographs[f'motorcycle_{side}'], None, fx=0.5, fy=0.5)
        write(tmp_path / 'photographs' / f'{side}.png', image)
    output = run('colmap.py', tmp_path / 'photographs', folder=tmp_path)
    assert '1 pairs verified' in output
    database = pycolmap.Database.open(tmp_path / 'scene.db')
    assert len(database.read_all_images()) == 2
    database.close()


def test_camera_node_and_subscriber(film, model, robot, domain, tmp_path):
    """Three processes: a camera, the node, a subscriber."""
    from robot import Process, keypoint_node

    with (
        Process(tmp_path / 'camera', str(EXAMPLES / 'camera.py'), str(film), domain=domain),
        keypoint_node(
            tmp_path / 'node', domain, model, '-r', '__ns:=/kp2d', '-r',
            'image:=/camera/image_raw',
        ),
        Process(tmp_path / 'heard', str(EXAMPLES / 'subscriber.py'), domain=domain) as heard,
    ):  # fmt: skip
        heard.wait_for('of them seen before')
        heard.wait_for('inliers, moved by')
        assert heard.stop()[0] == 0


PRINT = """
#include "keypoints.hpp"
void on_keypoints(const sensor_msgs::msg::PointCloud2 & cloud)
{
  for (const auto & k : read_keypoints(cloud)) {
    std::printf("%.9g %.9g %.9g %u %u\\n", k.u, k.v, k.score, k.track_id, k.track_age);
  }
}
void on_matches(const sensor_msgs::msg::PointCloud2 & cloud)
{
  for (const auto & m : read_inliers(cloud)) {
    std::printf("%.9g %.9g %.9g %.9g\\n", m.u, m.v, m.previous_u, m.previous_v);
  }
}
"""


@cpp.needs_compiler
def test_the_reader_in_cpp(tmp_path):
    """Only the reading of messages, because the wheels do not contain rclcpp."""
    pytest.importorskip('sensor_msgs')
    from test_messages import header, keypoints_cloud, some_features, some_rays, some_tracks

    from kp2d_ros.messages import matches_to_cloud

    program = cpp.build(PRINT, tmp_path, EXAMPLES / 'subscriber_cpp')
    features, tracks = some_features(), some_tracks()
    found = cpp.run(program, 'keypoints', keypoints_cloud(features, tracks), tmp_path)
    expected = np.column_stack([features.keypoints, features.scores, tracks.ids, tracks.ages])
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    previous = some_features(seed=1)
    cloud = matches_to_cloud(header(), previous, features, some_rays(), tracks, 0)
    before, now = tracks.matches.indices[tracks.matches.inliers].T
    expected = np.column_stack([features.keypoints[now], previous.keypoints[before]])
    found = cpp.run(program, 'matches', cloud, tmp_path)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
