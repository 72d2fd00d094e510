"""Rigid motions, the adjustment of frames and points, trajectories and their errors."""

import numpy as np
import pytest

from kp2d_core.odometry.adjustment import Problem, adjust, unexplained
from kp2d_core.odometry.geometry import (
    exp_rotation,
    invert,
    log_rotation,
    moved,
    parallax,
    project,
    quaternion,
    rigid,
    triangulate,
)
from kp2d_core.odometry.pose import Sight, find, refine
from kp2d_core.odometry.trajectory import align, errors, write_tum

FOCAL = 500.0


@pytest.fixture
def random():
    return np.random.default_rng(0)


@pytest.fixture
def views(random):
    """Eight frames that pass by 300 points."""
    points = random.uniform([-4, -3, 4], [4, 3, 10], (300, 3))
    turns = exp_rotation(random.normal(0, 0.03, (8, 3)))
    poses = np.array([rigid(turn, [-0.3 * i, 0, 0.1 * i]) for i, turn in enumerate(turns)])
    return poses, points


def test_rotation_vector_and_back(random):
    for angle in (1e-9, 1e-3, 1.0, 3.1):
        axis = random.normal(size=3)
        vector = axis / np.linalg.norm(axis) * angle
        rotation = exp_rotation(vector)
        assert np.allclose(rotation @ rotation.T, np.eye(3))
        assert np.allclose(log_rotation(rotation), vector, atol=1e-9)
        assert np.isclose(np.linalg.norm(quaternion(rotation)), 1)


def test_poses_stay_rigid_however_often_they_are_moved(random):
    pose = np.eye(4)[None]
    for _ in range(2000):
        # As the odometry predicts: rounding errors must not double with each frame.
        pose = moved((pose[0] @ invert(pose[0]) @ pose[0])[None], random.normal(0, 0.1, (1, 6)))
    assert np.allclose(pose[0, :3, :3] @ pose[0, :3, :3].T, np.eye(3), atol=1e-12)


def test_triangulated_points_are_where_they_were(views):
    poses, points = views
    seen = [project(poses[i], points)[0] for i in (0, 7)]
    assert np.allclose(triangulate(poses[0], poses[7], *seen), points, atol=1e-6)
    centres = [invert(poses[i])[:3, 3] for i in (0, 7)]
    rays = [(points[0] - c) / np.linalg.norm(points[0] - c) for c in centres]
    expected = np.arccos(rays[0] @ rays[1])
    assert np.isclose(parallax(poses[0], poses[7], points)[0], expected)


def observed(poses, points, random, noise, outliers=0.0, share=0.7):
    frame, point = np.nonzero(random.random((len(poses), len(points))) < share)
    seen = np.empty((len(frame), 2))
    for number, pose in enumerate(poses):
        seen[frame == number] = project(pose, points[point[frame == number]])[0]
    seen += random.normal(0, noise / FOCAL, seen.shape)
    wrong = random.random(len(seen)) < outliers
    seen[wrong] += random.normal(0, 40 / FOCAL, (int(wrong.sum()), 2))
    return frame, point, seen


def test_adjustment_finds_the_truth_again(views, random):
    poses, points = views
    frame, point, seen = observed(poses, points, random, noise=0.0)
    fixed = np.arange(8) < 2
    start = moved(poses, np.where(fixed[:, None], 0, random.normal(0, 0.02, (8, 6))))
    problem = Problem(
        start, points + random.normal(0, 0.2, points.shape), frame, point, seen,
        np.full(len(seen), FOCAL), fixed,
    )  # fmt: skip
    assert adjust(problem, steps=30) < 1e-9
    assert np.allclose(problem.poses, poses, atol=1e-6)
    twice = np.bincount(point, minlength=len(points)) >= 2
    assert np.allclose(problem.points[twice], points[twice], atol=1e-4)


def test_adjustment_does_not_follow_outliers(views, random):
    poses, points = views
    frame, point, seen = observed(poses, points, random, noise=0.5, outliers=0.1)
    fixed = np.arange(8) < 2
    start = moved(poses, np.where(fixed[:, None], 0, random.normal(0, 0.01, (8, 6))))
    problem = Problem(start, points.copy(), frame, point, seen, np.full(len(seen), FOCAL), fixed)
    adjust(problem, steps=20, threshold=1.5)
    before, after = (np.abs(p - poses)[2:].max() for p in (start, problem.poses))
    assert after < 0.015 < before


def test_adjustment_of_a_rig_knows_the_scale(views, random):
    poses, points = views
    mounts = np.array([np.eye(4), rigid(np.eye(3), [-0.5, 0, 0])])
    frame, point, seen = observed(poses, points, random, noise=0.0)
    eye = np.einsum('nij,nj->ni', poses[frame][:, :3, :3], points[point]) + poses[frame][:, :3, 3]
    right = (eye + mounts[1][:3, 3])[:, :2] / eye[:, 2:]
    fixed = np.arange(8) < 1
    larger = poses.copy()
    larger[:, :3, 3] *= 1.1
    problem = Problem(
        larger, points * 1.1, np.repeat(frame, 2), np.repeat(point, 2),
        np.stack([seen, right], axis=1).reshape(-1, 2), np.full(2 * len(seen), FOCAL), fixed,
        np.tile([0, 1], len(seen)), mounts,
    )  # fmt: skip
    adjust(problem, steps=40)
    assert np.allclose(problem.poses, poses, atol=1e-4)


def test_what_poses_and_points_can_follow_is_explained(views, random):
    poses, points = views
    frame, point, seen = observed(poses, points, random, noise=0.0)
    fixed = np.arange(8) < 1
    problem = Problem(
        poses, points, frame, point, seen, np.full(len(seen), FOCAL), fixed
    )  # fmt: skip
    step = np.where(np.arange(8)[:, None] == 5, 1e-6 * random.normal(size=6), 0)
    turned, shifted = moved(poses, step), points + 1e-6 * random.normal(size=points.shape)
    place = np.einsum('nij,nj->ni', turned[frame][:, :3, :3], shifted[point])
    place += turned[frame][:, :3, 3]
    slope = (place[:, :2] / place[:, 2:] - seen) / 1e-6
    _, left = unexplained(problem, slope, 2.0)
    assert np.abs(left).max() < 0.01 * np.abs(FOCAL * slope).max()
    slope = random.normal(size=seen.shape)  # nobody can follow that
    off, left = unexplained(problem, slope, 2.0)
    assert np.abs(off).max() < 1e-6
    assert (left**2).sum() > 0.3 * ((FOCAL * slope) ** 2).sum()


def test_pose_from_scratch_and_refined(views, random):
    poses, points = views
    seen = project(poses[5], points)[0] + random.normal(0, 0.5 / FOCAL, (len(points), 2))
    seen[:90] = random.uniform(-0.5, 0.5, (90, 2))
    sight = Sight(points, seen, np.full(len(points), FOCAL), np.empty((0, 4, 4)))
    pose = find(sight, 4.0, random)
    assert pose is not None
    assert np.allclose(refine(sight, pose), poses[5], atol=0.01)
    assert find(sight[np.arange(len(points)) < 5], 4.0, random) is None


def test_alignment_gives_back_a_similarity(random):
    points = random.normal(size=(20, 3))
    rotation, shift = exp_rotation(np.array([0.3, -1, 2])), np.array([1.0, 2, 3])
    found = align(points, 2.5 * points @ rotation.T + shift)
    assert np.isclose(found.scale, 2.5)
    assert np.allclose(found.rotation, rotation)
    assert np.allclose(found.translation, shift)
    assert align(points, points * 2, with_scale=False).scale == 1
    with pytest.raises(ValueError, match='too few'):
        align(points[:2], points[:2])


def test_errors_are_those_of_evo(random, tmp_path):
    metrics = pytest.importorskip('evo.core.metrics')
    files = pytest.importorskip('evo.tools.file_interface')
    truth = np.tile(np.eye(4), (50, 1, 1))
    truth[:, :3, :3] = exp_rotation(np.cumsum(random.normal(0, 0.05, (50, 3)), axis=0))
    truth[:, :3, 3] = np.cumsum(random.normal(0, 0.2, (50, 3)), axis=0)
    poses = moved(truth, random.normal(0, 0.02, (50, 6)))
    poses[:, :3, 3] *= 0.4
    write_tum(tmp_path / 'truth.txt', np.arange(50.0), truth)
    write_tum(tmp_path / 'poses.txt', np.arange(50.0), poses)
    reference = files.read_tum_trajectory_file(tmp_path / 'truth.txt')
    estimate = files.read_tum_trajectory_file(tmp_path / 'poses.txt')
    estimate.align(reference, correct_scale=True)
    ate = metrics.APE(metrics.PoseRelation.translation_part)
    ate.process_data((reference, estimate))
    rpe = metrics.RPE(metrics.PoseRelation.translation_part)
    rpe.process_data((reference, estimate))
    ours = errors(poses, truth)
    rms = metrics.StatisticsType.rmse
    assert np.isclose(ours.ate, ate.get_statistic(rms), rtol=1e-5)
    assert np.isclose(ours.rpe, rpe.get_statistic(rms), rtol=1e-5)
