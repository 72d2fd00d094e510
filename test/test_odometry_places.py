"""Places that are seen twice: retrieval, relocalisation, loops, maps that meet."""

from copy import deepcopy

import numpy as np
import pytest

from kp2d_core.odometry import Odometry, State
from kp2d_core.odometry.retrieval import Retrieval
from kp2d_core.odometry.trajectory import errors
from kp2d_core.views.cloud import tube
from kp2d_core.views.worlds import ring_path, view_camera

CAMERA = view_camera((320, 240))
WAY = ring_path(0.2, 30.0)
LAP = 2 * (5.0 + 4.0)  # m around a small ring


def seen(cloud, poses, random, noise=0.3, count=150):
    return [cloud.view(CAMERA, pose, random, count=count, noise=noise) for pose in poses]


@pytest.fixture
def random():
    return np.random.default_rng(0)


@pytest.fixture
def cloud(random):
    return tube(WAY, 20 * len(WAY), random, dimensions=16)


def test_retrieval_names_the_place(cloud, random):
    retrieval = Retrieval()
    for number, features in enumerate(seen(cloud, WAY[:120:4], random)):
        retrieval.add(number, features.descriptors)
    for number, features in enumerate(seen(cloud, WAY[1:120:4], random)):
        (best, likeness), *others = retrieval.query(features.descriptors, 3)
        assert abs(best - number) <= 1
        assert all(likeness >= other for _, other in others)
    retrieval.remove(10)
    assert len(retrieval) == 29
    features = cloud.view(CAMERA, WAY[40], random)
    found = [number for number, _ in retrieval.query(features.descriptors, 29)]
    assert sorted(found) == [number for number in range(30) if number != 10]
    assert set(found[:2]) == {9, 11}


def test_lost_camera_finds_its_place_and_only_its_place(cloud, random):
    odometry = Odometry(CAMERA)
    for number, features in enumerate(seen(cloud, WAY[:50], random)):
        odometry.update(features, number)
    known = dict(zip(*odometry.trajectory(), strict=True))
    elsewhere = tube(WAY, 20 * len(WAY), random, dimensions=16)
    for number, features in enumerate(seen(elsewhere, WAY[20:24], random)):
        estimate = odometry.update(features, 100 + number)
        assert estimate.state == State.LOST
        assert estimate.pose is None
    estimate = odometry.update(cloud.view(CAMERA, WAY[20], random, count=150, noise=0.3), 110)
    assert estimate.state == State.RELOCALISED
    scale = np.linalg.norm(known[40.0][:3, 3] - known[0.0][:3, 3]) / 8.0
    assert np.linalg.norm(estimate.pose[:3, 3] - known[20.0][:3, 3]) < 0.05 * scale
    assert odometry.update(seen(cloud, [WAY[21]], random)[0], 111).state == State.TRACKING


def test_loop_is_closed(random):
    """Noisy points, so that the path drifts; once around and a little further."""
    way = ring_path(0.15, LAP + 2.0, width=5.0, depth=4.0)
    cloud = tube(way, 1500, random, dimensions=16)
    odometry = Odometry(CAMERA)
    for number, features in enumerate(seen(cloud, way, random, noise=0.8, count=120)):
        assert odometry.update(features, number).state != State.LOST
    open_ends = deepcopy(odometry)
    assert open_ends.finish(loops=False) == 0
    assert odometry.finish() > 0
    drift = []
    for each in (odometry, open_ends):
        stamps, poses = each.trajectory()
        drift.append(errors(poses, way[stamps.astype(int)]).ate)
    assert drift[0] < 0.7 * drift[1]


def test_maps_that_meet_become_one(cloud, random):
    """Carried away and set down further on, the camera comes back the way it went."""
    order = [*range(35), *range(75, 15, -1)]
    odometry = Odometry(CAMERA)
    for number, features in enumerate(seen(cloud, WAY[order], random)):
        odometry.update(features, number)
    assert len(odometry.maps) == 2
    odometry.finish()
    (world,) = odometry.maps
    stamps, poses = odometry.trajectory(world.number)
    assert len(stamps) > 80
    assert errors(poses, WAY[np.array(order)[stamps.astype(int)]]).worst < 0.3
