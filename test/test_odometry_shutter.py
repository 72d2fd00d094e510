"""The readout time of a rolling shutter is found, and the path without its errors."""

import numpy as np
import pytest

from kp2d_core.features import join_features
from kp2d_core.odometry import Odometry, Settings
from kp2d_core.odometry.geometry import exp_rotation, rigid
from kp2d_core.odometry.shutter import twists_of
from kp2d_core.odometry.trajectory import errors
from kp2d_core.views.cloud import tube
from kp2d_core.views.worlds import ring_path, view_camera

SIZE, RATE, READOUT, COUNT = (640, 480), 30.0, 0.03, 120


def camera_at(seconds: float) -> np.ndarray:
    """Handheld: forwards, while it turns to and fro by up to 40 degrees a second."""
    pose = ring_path(0.2, 0.2)[0].copy()
    phase = 2 * np.pi * seconds
    pose[:3, 3] = pose[:3, :3] @ [0.1 * np.sin(0.7 * phase), 0.05 * np.sin(phase), 0.5 * seconds]
    pose[:3, :3] = pose[:3, :3] @ exp_rotation(
        np.array([0.08 * np.sin(phase), 0.11 * np.sin(0.8 * phase), 0.05 * np.sin(1.3 * phase)])
    )
    return pose


def path_of(readout: float, settings: Settings | None = None) -> tuple[Odometry, float]:
    """Every row sees the points from where the camera is when it is exposed."""
    random = np.random.default_rng(0)
    camera = view_camera(SIZE)
    stamps = np.arange(COUNT) / RATE
    way = np.array([camera_at(seconds) for seconds in np.arange(0, 14, 0.1)])
    cloud = tube(way, 3000, random)
    odometry = Odometry(camera, settings)
    for stamp in stamps:
        bands = []
        for band in range(48):
            late = ((band + 0.5) / 48 - 0.5) * readout
            seed = np.random.default_rng(round(stamp * RATE))  # one noise for the whole frame
            view = cloud.view(camera, camera_at(stamp + late), seed, count=3000, noise=0.3)
            rows = np.flatnonzero(view.keypoints[:, 1] // 10 == band)
            bands.append(view[rows])
        odometry.update(join_features(bands), float(stamp))
    odometry.finish()
    times, poses = odometry.trajectory()
    assert len(times) > 0.8 * COUNT
    return odometry, errors(poses, np.array([camera_at(seconds) for seconds in times])).ate


@pytest.mark.timeout(300)
def test_the_readout_is_learned_and_its_error_goes():
    odometry, off = path_of(READOUT)
    assert odometry.shutter.readout == pytest.approx(READOUT, rel=0.3)
    _, uncorrected = path_of(READOUT, Settings(readout=0.0))
    assert off < 0.5 * uncorrected


def test_a_global_shutter_is_left_alone():
    odometry, _ = path_of(0.0)
    assert odometry.shutter.readout == 0


def test_a_jump_is_no_motion():
    """30 degrees a second to the right and 0.5 m a second forward, but for a jump by 0.4 m."""
    turn = np.radians(30) / RATE
    poses = np.array([
        rigid(exp_rotation(np.array([0, turn * i, 0])), [0.4 * (i >= 10), 0, 0.5 * i / RATE])
        for i in range(20)
    ])  # fmt: skip
    twists = np.array(twists_of(np.arange(20) / RATE, poses))
    assert np.allclose(np.linalg.norm(twists[:, 3:], axis=1), np.radians(30), rtol=0.01)
    assert np.allclose(np.linalg.norm(twists[:, :3], axis=1), 0.5, rtol=0.02)
