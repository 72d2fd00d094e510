"""What the odometry keeps does not grow with the way gone."""

import numpy as np

from kp2d_core.benchmarks.odometry_memory import stored_bytes
from kp2d_core.features import Features
from kp2d_core.odometry import Odometry, Settings, State
from kp2d_core.odometry.trajectory import errors
from kp2d_core.views.cloud import tube
from kp2d_core.views.worlds import ring_path, view_camera

SIZE = 320, 240
EMPTY = Features(*(np.zeros(shape, np.float32) for shape in ((0, 2), 0, (0, 16))), SIZE)


def frames(poses, seed=0):
    random = np.random.default_rng(seed)
    beyond = np.tile(poses[-1], (40, 1, 1))
    beyond[:, :3, 3] += np.arange(40)[:, None] * 0.2 * poses[-1][:3, 2]
    cloud = tube(np.concatenate([poses, beyond]), 20 * len(poses), random, dimensions=16)
    camera = view_camera(SIZE)
    return camera, [cloud.view(camera, pose, random, count=150, noise=0.2) for pose in poses]


def test_memory_stays_the_same_over_a_long_way(monkeypatch):
    monkeypatch.setattr('kp2d_core.odometry.odometry.SETTLED_AFTER', 20)
    monkeypatch.setattr('kp2d_core.odometry.thinning.KEPT', 60)
    poses = ring_path(0.2, 40.0)
    camera, seen = frames(poses)
    odometry = Odometry(camera, Settings(max_keyframes=30))
    stored, points = [], []
    for number, features in enumerate(seen):
        odometry.update(features, number / 15)
        assert sum(len(world.keyframes) for world in odometry.maps) <= 30
        if number % 10 == 0:
            stored.append(stored_bytes(odometry) - 128 * len(odometry.placed))
            points.append(sum(len(world.alive) for world in odometry.maps))
    third = len(stored) // 3
    # Of frames that are no keyframes any more only the pose is left.
    assert max(stored[2 * third :]) < 1.1 * max(stored[third : 2 * third])
    assert max(points) < 10_000
    older = [len(world.keyframes[0]) for world in odometry.maps]
    assert max(older) <= 60
    assert len(odometry._retrieval) <= 30
    odometry.finish(loops=False)
    stamps, found = odometry.trajectory()
    rows = np.round(stamps * 15).astype(int)
    assert len(rows) == len(seen)
    assert errors(found, poses[rows]).ate < 0.02 * 40


def test_places_of_long_ago_are_still_known():
    """Thinned out, not cut off: back at the beginning the camera finds its place."""
    poses = ring_path(0.2, 40.0)
    camera, seen = frames(poses)
    odometry = Odometry(camera, Settings(max_keyframes=40))
    for number, features in enumerate(seen):
        odometry.update(features, number / 15)
    for number in range(3):
        assert odometry.update(EMPTY, 20 + number).state == State.LOST
    estimate = odometry.update(seen[12], 30.0)
    assert estimate.state == State.RELOCALISED
    stamps, found = odometry.trajectory()
    true = errors(found[:12], poses[:12]).scale
    way = np.linalg.norm(estimate.pose[:3, 3] - found[np.argmin(abs(stamps - 12 / 15))][:3, 3])
    assert way * true < 0.05


def test_maps_that_were_left_are_forgotten():
    """A camera that is lost again and again begins a map each time."""
    odometry = None
    for turn in range(6):
        camera, seen = frames(ring_path(0.25, 2.5), seed=turn)
        if odometry is None:
            odometry = Odometry(camera, Settings(max_keyframes=30))
        for number, features in enumerate(seen):
            odometry.update(features, 10 * turn + number / 15)
    assert len(odometry.maps) > 3
    assert sum(len(world.keyframes) for world in odometry.maps) <= 30
    # Their trajectories are still there.
    assert all(len(odometry.trajectory(world.number)[0]) for world in odometry.maps)
    assert odometry.finish() == 0
