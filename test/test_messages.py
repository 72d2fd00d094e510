"""Clouds to and from numpy: the same values, the same memory."""

import os
import subprocess
import sys
from dataclasses import replace
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
    keypoints_from_cloud,
    keypoints_to_cloud,
    matches_from_cloud,
    matches_to_cloud,
)
from kp2d_ros.outputs import MATCH_DTYPE, NO_INDEX, NO_TRACK, keypoint_dtype


def some_features(count: int = 7, size: int = 16, seed: int = 0) -> Features:
    random = np.random.default_rng(seed)
    descriptors = random.normal(size=(count, size)).astype(np.float32)
    descriptors /= np.linalg.norm(descriptors, axis=1, keepdims=True)
    return Features(
        random.uniform(0, 100, (count, 2)).astype(np.float32),
        np.sort(random.random(count).astype(np.float32))[::-1],
        descriptors,
        (100, 100),
        random.choice([1.0, 0.5], count).astype(np.float32),
        random.uniform(0.3, 3, count).astype(np.float32),
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


def some_rays(count: int = 7) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(count, 2)).astype(np.float32)


def keypoints_cloud(features: Features | None = None, *args, **options) -> PointCloud2:
    features = some_features() if features is None else features
    return keypoints_to_cloud(header(), features, some_rays(len(features)), *args, **options)


def test_keypoints_come_back_as_they_went():
    features, tracks = some_features(), some_tracks()
    cloud = over_the_wire(keypoints_cloud(features, tracks))
    assert cloud.header == header() and cloud.is_dense
    back = keypoints_from_cloud(cloud, (100, 100))
    assert back.features.image_size == (100, 100)
    np.testing.assert_array_equal(back.features.keypoints, features.keypoints)
    np.testing.assert_array_equal(back.features.scores, features.scores)
    np.testing.assert_array_equal(back.features.descriptors, features.descriptors)
    np.testing.assert_array_equal(back.rays, some_rays())
    np.testing.assert_array_equal(back.track_ids, tracks.ids)
    np.testing.assert_array_equal(back.track_ages, tracks.ages)
    np.testing.assert_array_equal(back.features.scales, features.scales)
    np.testing.assert_array_equal(back.features.sigma, features.sigma)


def test_bytes_are_as_documented():
    features, tracks = some_features(), some_tracks()
    cloud = keypoints_cloud(features, tracks)
    assert (cloud.height, cloud.width, cloud.point_step) == (1, 7, 40 + 4 * 16)
    assert cloud.row_step == 7 * cloud.point_step == len(cloud.data)
    fields = {f.name: (f.offset, f.datatype, f.count) for f in cloud.fields}
    assert fields == {
        'x': (0, PointField.FLOAT32, 1),
        'y': (4, PointField.FLOAT32, 1),
        'z': (8, PointField.FLOAT32, 1),
        'u': (12, PointField.FLOAT32, 1),
        'v': (16, PointField.FLOAT32, 1),
        'score': (20, PointField.FLOAT32, 1),
        'sigma': (24, PointField.FLOAT32, 1),
        'scale': (28, PointField.FLOAT32, 1),
        'track_id': (32, PointField.UINT32, 1),
        'track_age': (36, PointField.UINT32, 1),
        'descriptor': (40, PointField.FLOAT32, 16),
    }
    third = bytes(cloud.data)[2 * cloud.point_step :]
    assert np.frombuffer(third, '<f4', 6).tolist() == [
        *some_rays()[2].tolist(), 1.0, *features.keypoints[2].tolist(), features.scores[2],
    ]  # fmt: skip
    assert np.frombuffer(third, '<u4', 2, 32).tolist() == [42, 2]
    np.testing.assert_array_equal(np.frombuffer(third, '<f4', 16, 40), features.descriptors[2])


@pytest.mark.parametrize(('kind', 'size', 'least'), [('int8', 1, 0.999), ('float16', 2, 0.999999)])
def test_short_descriptors_are_close(kind, size, least):
    features = some_features(size=128)
    cloud = keypoints_cloud(features, descriptor_format=kind)
    assert cloud.point_step == 40 + size * 128
    back = keypoints_from_cloud(over_the_wire(cloud)).features
    np.testing.assert_allclose(np.linalg.norm(back.descriptors, axis=1), 1, atol=1e-6)
    assert (back.descriptors * features.descriptors).sum(axis=1).min() > least


def test_descriptors_may_be_absent():
    bare = keypoints_cloud(descriptor_format='none')
    assert bare.point_step == 40
    assert keypoints_from_cloud(bare).features.descriptors.shape == (7, 0)
    with pytest.raises(ValueError, match='float32, float16, int8, none'):
        keypoints_cloud(descriptor_format='float64')


def test_without_tracking_no_track_has_an_id():
    points = read_points(keypoints_cloud())
    assert (points['track_id'] == NO_TRACK).all() and (points['track_age'] == 0).all()


def test_a_keypoint_without_a_ray_makes_the_cloud_sparse():
    rays = some_rays()
    rays[3] = np.nan
    assert not keypoints_to_cloud(header(), some_features(), rays).is_dense


def test_nothing_found_is_a_cloud_of_nothing():
    cloud = over_the_wire(keypoints_cloud(some_features()[:0]))
    assert cloud.width == 0 and len(cloud.data) == 0 and len(cloud.fields) == 11
    assert keypoints_from_cloud(cloud).features.descriptors.shape == (0, 16)


def some_matches(tracks: Tracks, stamp: int = 5 * 10**9 + 6) -> PointCloud2:
    previous, current = some_features(seed=1), some_features(seed=2)
    return matches_to_cloud(header(), previous, current, some_rays(), tracks, stamp)


def test_matches_say_where_and_when():
    previous, current = some_features(seed=1), some_features(seed=2)
    matches = matches_from_cloud(over_the_wire(some_matches(some_tracks())))
    points = matches.points
    assert points.dtype.names == MATCH_DTYPE.names
    np.testing.assert_array_equal(points['index'], [0, 2, 6])
    np.testing.assert_array_equal(points['previous_index'], [3, 1, 0])
    np.testing.assert_array_equal(points['x'], some_rays()[[0, 2, 6], 0])
    np.testing.assert_array_equal(points['u'], current.keypoints[[0, 2, 6], 0])
    np.testing.assert_array_equal(points['previous_v'], previous.keypoints[[3, 1, 0], 1])
    np.testing.assert_array_equal(points['track_id'], [40, 42, 46])
    np.testing.assert_array_equal(points['inlier'], [1, 0, 1])
    assert matches.previous_stamp == 5 * 10**9 + 6


def test_no_matches_carry_the_previous_stamp_too():
    none = Matches(np.empty((0, 2), np.intp), np.empty(0, np.float32), np.empty(0, bool))
    cloud = over_the_wire(some_matches(replace(some_tracks(), matches=none)))
    matches = matches_from_cloud(cloud)
    assert len(matches.points) == 0 and matches.previous_stamp == 5 * 10**9 + 6
    (row,) = read_points(cloud)
    assert row['inlier'] == 0 and row['index'] == NO_INDEX and np.isnan(row['x'])
    assert not cloud.is_dense
    with pytest.raises(ValueError, match='not one of matches'):
        matches_from_cloud(keypoints_cloud())


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
    cloud = keypoints_cloud()
    cloud.width = 8
    with pytest.raises(ValueError, match='rows of 8 points'):
        read_points(cloud)
    cloud.width = 7
    cloud.fields[5].datatype = 99
    with pytest.raises(ValueError, match="'score' has datatype 99"):
        read_points(cloud)
    with pytest.raises(ValueError, match='not one of keypoints'):
        keypoints_from_cloud(new_cloud(header(), np.dtype([('x', '<f4')]), 2)[0])


def test_track_ids_wrap_before_the_reserved_one():
    tracks = some_tracks()
    tracks = Tracks(np.array([NO_TRACK - 1, NO_TRACK, NO_TRACK + 1, 0, 1, 2, 3]), tracks.ages,
                    tracks.matches)  # fmt: skip
    points = read_points(keypoints_cloud(some_features(), tracks))
    assert points['track_id'].tolist() == [NO_TRACK - 1, 0, 1, 0, 1, 2, 3]


def test_field_checks_of_rclpy_pass():
    """ROS_PYTHON_CHECK_FIELDS verifies every value that is set."""
    code = (
        'from test_messages import *\n'
        'c = keypoints_cloud(some_features(), some_tracks())\n'
        'm = some_matches(some_tracks())\n'
        'assert read_points(c)["track_id"][0] == 40 and read_points(m)["index"][1] == 2\n'
    )
    done = subprocess.run(
        [sys.executable, '-c', f'import sys; sys.path[:0] = {sys.path!r}\n{code}'],
        env={**os.environ, 'ROS_PYTHON_CHECK_FIELDS': '1'},
        capture_output=True, text=True, timeout=60, cwd=Path(__file__).parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
