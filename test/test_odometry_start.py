"""The start of a map where two solutions explain the first frames almost equally well."""

import numpy as np
import pytest

from kp2d_core.odometry import Odometry, State
from kp2d_core.odometry import start as starting
from kp2d_core.odometry.geometry import exp_rotation, rigid
from kp2d_core.odometry.trajectory import errors
from kp2d_core.views.cloud import Cloud
from kp2d_core.views.worlds import view_camera

CAMERA = view_camera((640, 480))
FRAMES = 30


def nearly_a_plane(random) -> Cloud:
    """A tilted wall, 3 m away, with 10 cm of relief."""
    points = random.uniform([-4, -3, 0], [4, 3, 0.1], (2500, 3)) @ exp_rotation(
        np.array([0.3, 0.4, 0.0])
    )
    descriptors = random.normal(size=(len(points), 32)).astype(np.float32)
    descriptors /= np.linalg.norm(descriptors, axis=1, keepdims=True)
    return Cloud(points + np.array([0.0, 0.0, 3.0]), descriptors)


def way() -> np.ndarray:
    """Sideways, while the camera turns a little."""
    return np.array([
        rigid(exp_rotation(np.array([0.02 * np.sin(i / 3), 0.004 * i, 0.0])), [0.03 * i, 0, 0])
        for i in range(FRAMES)
    ])  # fmt: skip


@pytest.mark.parametrize('seed', range(4))
def test_the_right_one_of_two_solutions_is_taken(seed, monkeypatch):
    random = np.random.default_rng(seed)
    cloud, poses = nearly_a_plane(random), way()
    judged = []
    clear = starting.Starter._clear

    def watched(starter, solutions):
        judged.append([solution.rows for solution in solutions])
        return clear(starter, solutions)

    monkeypatch.setattr(starting.Starter, '_clear', watched)
    odometry = Odometry(CAMERA, seed=seed)
    found = [
        odometry.update(cloud.view(CAMERA, pose, random, count=500, noise=0.7), number / 30)
        for number, pose in enumerate(poses)
    ]
    known = [number for number, estimate in enumerate(found) if estimate.pose is not None]
    assert len(known) > FRAMES // 2
    assert found[known[0]].state == State.NEW_MAP
    assert errors(np.array([found[i].pose for i in known]), poses[known]).ate < 0.02
    # Nobody may choose the points that suit it.
    assert all(np.array_equal(rows[0], other) for rows in judged for other in rows)
    assert max(len(rows) for rows in judged) > 1
