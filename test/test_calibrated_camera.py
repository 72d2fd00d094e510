"""A calibrated camera: rays, distortion, binning, rectification, damaged calibrations."""

from dataclasses import replace

import cv2
import numpy as np
import pytest

from kp2d_core.camera import Camera, Info, Region, camera_from_info, pinhole_info

SIZE = (160, 120)
DISTORTED = [
    ('plumb_bob', (-0.25, 0.08, 0.001, -0.002, 0.01)),
    ('rational_polynomial', (0.1, -0.05, 0.001, 0.002, 0.01, 0.2, -0.03, 0.01)),
    ('equidistant', (0.02, -0.01, 0.005, -0.001)),
]


@pytest.mark.parametrize(('model', 'coefficients'), DISTORTED)
def test_bearings_invert_the_projection(model, coefficients):
    """Rays are projected here by the models' own formulas; bearings must give them back."""
    reach = np.array([0.9, 0.65])  # a lens of 84 degrees, to its corners
    rays = np.random.default_rng(0).uniform(-reach, reach, (200, 2))
    x, y = rays.T
    r2 = x**2 + y**2
    if model == 'equidistant':
        theta = np.arctan(np.sqrt(r2))
        bent = theta * (1 + sum(k * theta ** (2 * n + 2) for n, k in enumerate(coefficients)))
        xd, yd = x * bent / np.sqrt(r2), y * bent / np.sqrt(r2)
    else:
        k1, k2, p1, p2, k3, k4, k5, k6 = (*coefficients, 0, 0, 0)[:8]
        factor = 1 + k1 * r2 + k2 * r2**2 + k3 * r2**3
        factor /= 1 + k4 * r2 + k5 * r2**2 + k6 * r2**3
        xd = x * factor + 2 * p1 * x * y + p2 * (r2 + 2 * x**2)
        yd = y * factor + p1 * (r2 + 2 * y**2) + 2 * p2 * x * y
    pixels = np.stack([300 * xd + 320, 310 * yd + 240], axis=1).astype(np.float32)
    k = (300.0, 0, 320, 0, 310, 240, 0, 0, 1)
    camera = camera_from_info(Info(640, 480, k, coefficients, distortion_model=model))
    np.testing.assert_allclose(camera.bearings(pixels), rays, atol=2e-4)
    plain = np.stack([300 * x + 320, 310 * y + 240], axis=1)
    np.testing.assert_allclose(camera.undistort(pixels), plain, atol=0.05)


def test_where_a_distortion_cannot_be_undone_there_is_no_bearing():
    """At 500 px from the middle this polynomial has turned back: no ray comes there."""
    k = (300.0, 0, 320, 0, 300, 240, 0, 0, 1)
    camera = camera_from_info(Info(2000, 480, k, (-0.3, 0.0, 0.0, 0.0, 0.0)))
    points = np.array([[400, 240], [900, 240]], np.float32)
    for found in (camera.bearings(points), camera.undistort(points)):
        assert np.isfinite(found[0]).all() and np.isnan(found[1]).all()


def test_rectified_images_are_described_by_p():
    k, p = (300.0, 0, 320, 0, 300, 240, 0, 0, 1), (280.0, 0, 310, 0, 0, 285, 250, 0, 0, 0, 1, 0)
    turn = tuple(cv2.Rodrigues(np.array([0, 0.1, 0]))[0].ravel())
    info = Info(640, 480, k, (-0.3, 0.1, 0.0, 0.0, 0.0), r=turn, p=p)
    point = np.array([[310 + 28, 250 + 57]], np.float32)
    np.testing.assert_allclose(
        camera_from_info(info, True).bearings(point), [[0.1, 0.2]], atol=1e-6
    )
    assert abs(camera_from_info(info).bearings(point)[0, 0] - 0.1) > 0.05
    assert camera_from_info(replace(info, p=(0.0,) * 12), True) == camera_from_info(
        info
    )  # P is not given


def test_a_calibration_follows_binning_and_region():
    """Two by two pixels are one, of a part of the sensor; the ray of a place stays the same."""
    k = (900.0, 0, 640, 0, 900, 480, 0, 0, 1)
    full = camera_from_info(Info(1280, 960, k))
    binned = camera_from_info(Info(1280, 960, k, binning_x=2, binning_y=2))
    part = camera_from_info(
        Info(1280, 960, k, binning_x=2, binning_y=2, roi=Region(200, 100, 640, 480))
    )
    assert (binned.size, part.size) == ((640, 480), (320, 240))
    assert binned.of((1280, 960)) == full  # calibrated as it is read out, whatever is beside it
    assert binned.of((640, 480)) is binned and binned.of((320, 240)) is None
    place = np.array([[400.5, 300.5]], np.float32)  # between four pixels, which become one
    ray = full.bearings(place)
    np.testing.assert_allclose(binned.bearings((place - 0.5) / 2), ray, atol=1e-6)
    np.testing.assert_allclose(part.bearings((place - 0.5 - (200, 100)) / 2), ray, atol=1e-6)


def test_a_wide_lens_is_no_pinhole_and_sees_what_has_no_bearing():
    k = (180.0, 0, 320, 0, 180, 320, 0, 0, 1)
    camera = camera_from_info(Info(640, 640, k, (0.0,) * 4, distortion_model='equidistant'))
    angles = np.deg2rad([10, 60, 85, 95, 100])
    pixels = np.stack([320 + 180 * angles, np.full(5, 320)], axis=1).astype(np.float32)
    bearings = camera.bearings(pixels)
    np.testing.assert_allclose(bearings[:3, 0], np.tan(angles[:3]), rtol=1e-3)
    assert np.isnan(bearings[3:]).all()
    plain = camera.undistort(pixels)
    np.testing.assert_allclose(plain[:3, 0], 320 + 180 * np.tan(angles[:3]), rtol=1e-3)
    assert np.isnan(plain[3:]).all()


def test_bearings_are_rectified():
    """R of camera_info turns them into the rectified frame."""
    turn = np.array([[0, -1, 0], [1, 0, 0], [0, 0, 1.0]])  # a quarter turn about the axis
    k = (100.0, 0, 50, 0, 100, 50, 0, 0, 1)
    camera = camera_from_info(Info(100, 100, k, (0.0,) * 5, r=tuple(turn.ravel())))
    bearing = camera.bearings(np.array([[60, 50]], np.float32))
    np.testing.assert_allclose(bearing, [[0, 0.1]], atol=1e-6)


@pytest.mark.parametrize(
    ('change', 'sentence'),
    [
        ({'k': (np.nan, 0, 0, 0, 1, 0, 0, 0, 1)}, 'NaN'),
        ({'k': (-5.0, 0, 0, 0, 1, 0, 0, 0, 1)}, 'not a camera matrix'),
        ({'k': (100.0, 100, 0, 100, 100, 0, 0, 0, 1)}, 'not a camera matrix'),  # singular
        ({'k': (100.0, 0, 80, 0, 100, 60, 0.1, 0, 1)}, 'not a camera matrix'),
        ({'k': (1e-5, 0, 80, 0, 1e-5, 60, 0, 0, 1)}, 'cannot be that of 160x120 images'),
        ({'k': (1e9, 0, 80, 0, 1e9, 60, 0, 0, 1)}, 'cannot be that of'),
        ({'k': (100.0, 0, 1e9, 0, 100, 60, 0, 0, 1)}, 'far outside'),
        ({'r': (1.0,) * 9}, 'not a rotation'),
        ({'d': (0.1, np.inf, 0, 0, 0)}, 'infinity'),
        ({'d': (0.1, 0.2)}, '2 coefficients'),
        ({'distortion_model': 'magic'}, "'magic' is not one of none, plumb_bob"),
    ],
)
def test_damaged_calibrations_are_refused(change, sentence):
    info = replace(pinhole_info(SIZE, np.diag([100.0, 100, 1])), **change)
    with pytest.raises(ValueError, match=sentence):
        camera_from_info(info)


@pytest.mark.parametrize(
    ('distortion', 'model'),
    [
        ((), 'none'),
        ((-0.28, 0.07, 1e-4, -2e-4, 0.0), 'plumb_bob'),
        ((0.2, 0.05, 1e-4, -2e-4, 0.01, 0.5, 0.1, 0.02), 'rational_polynomial'),
        ((0.05, -0.01, 2e-3, -1e-3), 'equidistant'),
    ],
)
def test_pixels_undo_rays(distortion, model):
    camera = Camera.create(
        (640, 480), [[300, 0, 320], [0, 310, 240], [0, 0, 1]], distortion, model
    )
    points = np.random.default_rng(0).uniform((40, 40), (600, 440), (200, 2))
    rays = camera.rays(points)
    assert rays.shape == points.shape and np.isfinite(rays).all()
    np.testing.assert_allclose(camera.pixels(rays), points, atol=0.01)
    in_space = np.column_stack([rays, np.ones(len(rays))]) * 7.5
    np.testing.assert_allclose(camera.pixels(in_space), points, atol=0.01)


def test_what_is_behind_the_camera_has_no_pixel():
    camera = Camera.create((640, 480), [[300, 0, 320], [0, 300, 240], [0, 0, 1]])
    found = camera.pixels(np.array([[0.1, 0.2, 1.0], [0.1, 0.2, -1.0], [1.0, 0.0, 0.0]]))
    np.testing.assert_allclose(found[0], [350, 300])
    assert np.isnan(found[1:]).all()


def test_no_points_are_no_rays():
    camera = Camera.create((640, 480), np.diag([300.0, 300, 1]), (0.1, 0, 0, 0))
    for found in (camera.rays, camera.pixels, camera.undistort, camera.bearings):
        assert found(np.empty((0, 2))).shape == (0, 2)
