"""Clouds to and from numpy: the same values, the same memory."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kp2d_core.features import Features
from kp2d_core.matching import Matches
from kp2d_core.tracking import Tracks

pytest.importorskip('sensor_msgs')

from rclpy.serialization import deserialize_message, serialize_message
from sensor_msgs.msg import PointCloud2, PointField
from std_msgs.msg import Header

from kp2d_ros.clouds import bytes_of, new_cloud, read_points
from kp2d_ros.messages import (
    MATCH_DTYPE,
    NO_TRACK,
    keypoint_dtype,
    keypoints_from_cloud,
    keypoints_to_cloud,
    matches_to_cloud,
)


def some_features(count: int = 7, size: int = 16, seed: int = 0) -> Features:
    random = np.random.default_rng(seed)
    descriptors = random.normal(size=(count, size)).astype(np.float32)
    descriptors /= np.linalg.norm(descriptors, axis=1, keepdims=True)
    return Features(
        random.uniform(0, 100, (count, 2)).astype(np.float32),
        np.sort(random.random(count).astype(np.float32))[::-1],
        descriptors,
        (100, 100),
    )


def some_tracks(count: int = 7) -> Tracks:
    indices = np.array([[3, 0], [1, 2], [0, 6]])
    matches = Matches(
        indices, np.array([0.1, 0.2, 0.3], np.float32), np.array([True, False, True])
    )
    return Tracks(np.arange(count) + 40, np.arange(count) % 3, matches)


def over_the_wire(cloud: PointCloud2) -> PointCloud2:
    return deserialize_message(serialize_message(cloud), PointCloud2)


def header() -> Header:
    result = Header(frame_id='camera')
    result.stamp.sec, result.stamp.nanosec = 12, 34
    return result


def test_keypoints_come_back_as_they_went():
    features, tracks = some_features(), some_tracks()
    bearings = np.random.default_rng(1).normal(size=(7, 2)).astype(np.float32)
    cloud = over_the_wire(keypoints_to_cloud(header(), features, tracks, bearings=bearings))
    assert cloud.header == header() and cloud.is_dense
    back = keypoints_from_cloud(cloud, (100, 100))
    np.testing.assert_array_equal(back.features.keypoints, features.keypoints)
    np.testing.assert_array_equal(back.features.scores, features.scores)
    np.testing.assert_array_equal(back.features.descriptors, features.descriptors)
    np.testing.assert_array_equal(back.track_ids, tracks.ids)
    np.testing.assert_array_equal(back.track_ages, tracks.ages)
    np.testing.assert_array_equal(back.bearings, bearings)


def test_bytes_are_as_documented():
    features, tracks = some_features(), some_tracks()
    cloud = keypoints_to_cloud(header(), features, tracks)
    assert (cloud.height, cloud.width, cloud.point_step) == (1, 7, 24 + 4 * 16)
    assert cloud.row_step == 7 * cloud.point_step == len(cloud.data)
    fields = {f.name: (f.offset, f.datatype, f.count) for f in cloud.fields}
    assert fields == {
        'x': (0, PointField.FLOAT32, 1),
        'y': (4, PointField.FLOAT32, 1),
        'z': (8, PointField.FLOAT32, 1),
        'score': (12, PointField.FLOAT32, 1),
        'track_id': (16, PointField.UINT32, 1),
        'track_age': (20, PointField.UINT32, 1),
        'descriptor': (24, PointField.FLOAT32, 16),
    }
    third = bytes(cloud.data)[2 * cloud.point_step :]
    assert np.frombuffer(third, '<f4', 4).tolist() == [
        *features.keypoints[2].tolist(),
        0.0,
        features.scores[2],
    ]
    assert np.frombuffer(third, '<u4', 2, 16).tolist() == [42, 2]
    np.testing.assert_array_equal(np.frombuffer(third, '<f4', 16, 24), features.descriptors[2])


def test_int8_descriptors_are_close_and_none_are_absent():
    features = some_features(size=128)
    cloud = keypoints_to_cloud(header(), features, descriptor_format='int8')
    assert cloud.point_step == 24 + 128
    back = keypoints_from_cloud(over_the_wire(cloud)).features
    np.testing.assert_allclose(np.linalg.norm(back.descriptors, axis=1), 1, atol=1e-6)
    assert (back.descriptors * features.descriptors).sum(axis=1).min() > 0.999
    bare = keypoints_to_cloud(header(), features, descriptor_format='none')
    assert bare.point_step == 24
    assert keypoints_from_cloud(bare).features.descriptors.shape == (7, 0)
    with pytest.raises(ValueError, match='float32, int8, none'):
        keypoints_to_cloud(header(), features, descriptor_format='float16')


def test_without_tracking_no_track_has_an_id():
    points = read_points(keypoints_to_cloud(header(), some_features()))
    assert (points['track_id'] == NO_TRACK).all() and (points['track_age'] == 0).all()


def test_nan_bearings_make_the_cloud_sparse():
    bearings = np.full((7, 2), np.nan, np.float32)
    assert not keypoints_to_cloud(header(), some_features(), bearings=bearings).is_dense


def test_nothing_found_is_a_cloud_of_nothing():
    cloud = over_the_wire(keypoints_to_cloud(header(), some_features()[:0]))
    assert cloud.width == 0 and len(cloud.data) == 0 and len(cloud.fields) == 7
    assert keypoints_from_cloud(cloud).features.descriptors.shape == (0, 16)


def test_matches_say_where_and_when():
    previous, current, tracks = some_features(seed=1), some_features(seed=2), some_tracks()
    stamp = 5 * 10**9 + 6
    points = read_points(
        over_the_wire(matches_to_cloud(header(), previous, current, tracks, stamp))
    )
    assert points.dtype.names == MATCH_DTYPE.names
    np.testing.assert_array_equal(points['index'], [0, 2, 6])
    np.testing.assert_array_equal(points['previous_index'], [3, 1, 0])
    np.testing.assert_array_equal(points['x'], current.keypoints[[0, 2, 6], 0])
    np.testing.assert_array_equal(points['previous_y'], previous.keypoints[[3, 1, 0], 1])
    np.testing.assert_array_equal(points['track_id'], [40, 42, 46])
    np.testing.assert_array_equal(points['inlier'], [1, 0, 1])
    assert set(points['previous_sec']) == {5} and set(points['previous_nanosec']) == {6}


def test_reading_and_filling_share_memory_with_the_message():
    cloud, points = new_cloud(header(), keypoint_dtype(4), 3)
    points['score'] = [1, 2, 3]
    assert np.shares_memory(points, np.frombuffer(cloud.data, np.uint8))
    view = read_points(cloud)
    assert np.shares_memory(view, points)
    assert view['score'].tolist() == [1, 2, 3]
    descriptors = keypoints_from_cloud(cloud).features.descriptors
    assert np.shares_memory(descriptors, points)


def test_foreign_clouds_are_read_too():
    """Big-endian, organised, with padding in points and rows."""
    rows = np.zeros((2, 40), np.uint8)
    cloud = PointCloud2(height=2, width=3, point_step=12, row_step=40, is_bigendian=True)
    cloud.fields = [
        PointField(name='x', offset=0, datatype=PointField.FLOAT32, count=1),
        PointField(name='ring', offset=6, datatype=PointField.UINT16, count=1),
    ]
    for row in range(2):
        for column in range(3):
            start = 12 * column
            rows[row, start : start + 4].view('>f4')[:] = 10 * row + column
            rows[row, start + 6 : start + 8].view('>u2')[:] = 300 + column
    cloud.data = bytes_of(rows)
    points = read_points(cloud)
    np.testing.assert_array_equal(points['x'], [[0, 1, 2], [10, 11, 12]])
    np.testing.assert_array_equal(points['ring'], [[300, 301, 302]] * 2)


def test_damaged_clouds_are_refused():
    cloud = keypoints_to_cloud(header(), some_features())
    cloud.width = 8
    with pytest.raises(ValueError, match='rows of 8 points'):
        read_points(cloud)
    cloud.width = 7
    cloud.fields[3].datatype = 99
    with pytest.raises(ValueError, match="'score' has datatype 99"):
        read_points(cloud)
    with pytest.raises(ValueError, match='not one of keypoints'):
        keypoints_from_cloud(new_cloud(header(), np.dtype([('x', '<f4')]), 2)[0])


def test_track_ids_wrap_before_the_reserved_one():
    tracks = some_tracks()
    tracks = Tracks(np.array([NO_TRACK - 1, NO_TRACK, NO_TRACK + 1, 0, 1, 2, 3]), tracks.ages,
                    tracks.matches)  # fmt: skip
    points = read_points(keypoints_to_cloud(header(), some_features(), tracks))
    assert points['track_id'].tolist() == [NO_TRACK - 1, 0, 1, 0, 1, 2, 3]


def test_field_checks_of_rclpy_pass():
    """ROS_PYTHON_CHECK_FIELDS verifies every value that is set."""
    code = (
        'from test_messages import *\n'
        'c = keypoints_to_cloud(header(), some_features(), some_tracks())\n'
        'm = matches_to_cloud(header(), some_features(), some_features(), some_tracks(), 7)\n'
        'assert read_points(c)["track_id"][0] == 40 and read_points(m)["index"][1] == 2\n'
    )
    done = subprocess.run(
        [sys.executable, '-c', f'import sys; sys.path[:0] = {sys.path!r}\n{code}'],
        env={**os.environ, 'ROS_PYTHON_CHECK_FIELDS': '1'},
        capture_output=True, text=True, timeout=60, cwd=Path(__file__).parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
