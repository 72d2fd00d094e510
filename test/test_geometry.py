"""How pixels move: one rule for points behind the camera, in NumPy and torch; half pixels."""

import cv2
import numpy as np
import pytest

from kp2d_core.geometry import (
    FAR_AWAY,
    in_front,
    resize_matrix,
    shift_matrix,
    warp_points,
    warp_tensor,
)


def test_numpy_and_torch_agree_and_have_one_rule_behind_the_camera():
    torch = pytest.importorskip('torch')
    random = np.random.default_rng(0)
    matrices = np.eye(3) + random.normal(0, 0.3, (8, 3, 3)) * [
        [1, 1, 9],
        [1, 1, 9],
        [0.05, 0.05, 1],
    ]
    points = random.uniform(-50, 300, (8, 100, 2))
    there = warp_tensor(torch.from_numpy(points), torch.from_numpy(matrices)).numpy()
    behind = 0
    for ours, matrix, given in zip(there, matrices, points, strict=True):
        expected = warp_points(given, matrix)
        hidden = np.isinf(expected).all(axis=1)
        np.testing.assert_allclose(ours[~hidden], expected[~hidden])
        assert (ours[hidden] == FAR_AWAY).all() and np.isfinite(expected[~hidden]).all()
        behind += hidden.sum()
    assert 0 < behind < 800


def test_gradients_stay_finite_behind_the_camera():
    torch = pytest.importorskip('torch')
    points = torch.tensor([[[0.0, 0.0], [200.0, 0.0], [100.0, 0.0]]], requires_grad=True)
    horizon = torch.tensor([[[1.0, 0, 0], [0, 1, 0], [-0.01, 0, 1]]])
    warp_tensor(points, horizon).square().sum().backward()
    assert torch.isfinite(points.grad).all()


def test_resized_pixels_are_where_opencv_puts_them():
    image = np.zeros((40, 60), np.float32)
    image[20:24, 30:34] = 1  # its middle is (31.5, 21.5)
    small = cv2.resize(image, (30, 20), interpolation=cv2.INTER_AREA)
    y, x = np.mgrid[:20, :30]
    centroid = np.array([[(x * small).sum(), (y * small).sum()]]) / small.sum()
    expected = warp_points(np.array([[31.5, 21.5]]), resize_matrix((60, 40), (30, 20)))
    np.testing.assert_allclose(centroid, expected, atol=1e-6)


def test_the_sign_of_a_homography_does_not_matter():
    points = np.random.default_rng(0).uniform(0, 100, (20, 2))
    expected = warp_points(points, shift_matrix(3, 4))
    np.testing.assert_allclose(expected, points + np.array([3, 4]))
    np.testing.assert_allclose(
        warp_points(points, in_front(-shift_matrix(3, 4), points)), expected
    )
