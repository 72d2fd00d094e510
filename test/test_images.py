"""Images in any form, their conversion to the input of the network, and keypoints back."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import torch
from PIL import Image as PILImage

from kp2d_core.errors import FileError
from kp2d_core.features import prepare
from kp2d_core.images import check_mask, find_images, read_image, resize, to_image


@pytest.mark.parametrize(
    ('image', 'message'),
    [
        ('nowhere.png', 'cannot read nowhere.png'),
        (np.zeros((0, 0, 3), np.uint8), 'empty'),
        (np.zeros((1, 1, 3), np.uint8), 'too small: 1x1'),
        (np.zeros((23, 640), np.uint8), 'too small: 640x23'),
        (np.zeros((64, 64, 2), np.uint8), r'HxW or HxWx3.*\(64, 64, 2\)'),
        (np.zeros((64, 64, 5), np.uint8), 'HxW or HxWx3'),
        (np.zeros((2, 64, 64, 3), np.uint8), 'give a batch as a list'),
        (torch.zeros(2, 3, 64, 64), 'give a batch as a list'),
        (np.zeros(64, np.uint8), 'HxW or HxWx3'),
        (np.full((64, 64, 3), 254, np.float32), 'must lie in 0..1, got 254 to 254: divide it by'),
        (np.full((64, 64), np.nan, np.float32), 'must lie in 0..1, got nan'),
        (np.full((64, 64), -0.1), 'must lie in 0..1, got -0.1'),
        (np.zeros((64, 64), bool), 'got bool'),
        (np.zeros((64, 64), np.uint16), 'got uint16'),
        (None, 'got NoneType'),
    ],
)
def test_bad_images_are_named(image, message):
    with pytest.raises((ValueError, FileError), match=message):
        to_image(image)


def test_the_same_picture_in_any_form(photographs, tmp_path):
    """Every form gives the same pixels; an array that fits is not copied."""
    rgb = photographs['coffee']
    assert to_image(rgb) is rgb
    path = tmp_path / 'coffee.png'
    PILImage.fromarray(rgb).save(path)
    alpha = np.full((*rgb.shape[:2], 1), 7, np.uint8)
    forms = {
        'path': path,
        'text': str(path),
        'PIL': PILImage.open(path),
        'PIL RGBA': PILImage.open(path).convert('RGBA'),
        'RGBA': np.concatenate([rgb, alpha], axis=2),
        'float': rgb / 255,
        'float32': (rgb / 255).astype(np.float32),
        'HWC tensor': torch.from_numpy(rgb),
        'CHW tensor': torch.from_numpy(rgb).permute(2, 0, 1),
        'CHW float tensor': torch.from_numpy(rgb).permute(2, 0, 1) / 255,
        'learning tensor': (torch.from_numpy(rgb) / 255).requires_grad_(),
        'RGBA tensor': torch.cat([torch.from_numpy(rgb), torch.from_numpy(alpha)], 2),
    }
    for name, form in forms.items():
        np.testing.assert_array_equal(to_image(form), rgb, err_msg=name)


def test_gray_in_any_form(photographs):
    gray = photographs['coffee'][..., 1]
    forms = (
        gray, gray[..., None], PILImage.fromarray(gray), gray / 255, torch.from_numpy(gray),
        torch.from_numpy(gray)[None],
    )  # fmt: skip
    for form in forms:
        np.testing.assert_array_equal(to_image(form).reshape(gray.shape), gray)


def test_bad_masks_are_named():
    with pytest.raises(ValueError, match='bool or uint8'):
        check_mask(np.zeros((4, 4)), (4, 4))
    with pytest.raises(ValueError, match=r'480x640, got shape \(640, 480\)'):
        check_mask(np.zeros((640, 480), bool), (640, 480))


def test_whole_cells_are_passed_on_without_a_copy(photographs):
    image = photographs['astronaut']
    prepared, placement = prepare(image)
    assert np.shares_memory(prepared, image)
    points = np.array([[1.5, 2.5]], np.float32)
    assert placement.to_given(points) is points


def test_padding_repeats_the_edge_on_the_right_and_below():
    image = np.random.default_rng(0).integers(0, 255, (30, 41, 3), np.uint8)
    prepared, _ = prepare(image)
    assert prepared.shape == (32, 48, 3)
    assert np.array_equal(prepared[:30, :41], image)
    assert (prepared[:30, 41:] == image[:, 40:41]).all()
    assert (prepared[30:, :41] == image[29]).all()


def test_gray_becomes_three_equal_channels():
    image = np.random.default_rng(0).integers(0, 255, (32, 40), np.uint8)
    for gray in (image, image[..., None]):
        prepared, _ = prepare(gray)
        assert prepared.shape == (32, 40, 3)
        assert (prepared == image[..., None]).all()


@pytest.mark.parametrize('working', [(320, 240), (200, 160), (1280, 960), 400])
def test_the_way_back_is_half_pixel_correct(working):
    """A bright blob is found in the resized image and mapped back to where it was drawn."""
    image = np.zeros((480, 640), np.uint8)
    centre = np.array([403.0, 121.0])
    y, x = np.mgrid[:480, :640]
    image[:] = 255 * np.exp(-((x - centre[0]) ** 2 + (y - centre[1]) ** 2) / (2 * 12**2))
    prepared, placement = prepare(image, working)
    gray = prepared[: placement.working[1], : placement.working[0], 0].astype(float)
    gray[gray < 3] = 0
    v, u = np.mgrid[: gray.shape[0], : gray.shape[1]]
    found = np.array([[(gray * u).sum(), (gray * v).sum()]]) / gray.sum()
    assert placement.to_given(found.astype(np.float32))[0] == pytest.approx(centre, abs=0.05)


@pytest.mark.parametrize('given', [(1920, 400), (400, 1920), (300, 200), (1920, 1200)])
def test_resizing_moves_nothing_even_if_only_one_side_shrinks(given):
    """A ramp along each side, sampled at pixel centres, stays where it is."""
    size = (640, 480)
    for axis in (0, 1):
        ramp = np.linspace(20, 235, given[axis])
        image = np.zeros((given[1], given[0]), np.uint8)
        image[:] = np.rint(ramp if axis == 0 else ramp[:, None])
        found = resize(image, size).astype(float).mean(axis=axis)
        centres = (np.arange(size[axis]) + 0.5) * given[axis] / size[axis] - 0.5
        wanted = np.interp(centres, np.arange(given[axis]), ramp)
        per_pixel = (ramp[-1] - ramp[0]) / given[axis]
        inside = slice(5, -5)
        assert abs((found - wanted)[inside].mean()) < 0.1 * per_pixel + 0.02


def test_the_longer_side_keeps_the_aspect():
    _, placement = prepare(np.zeros((480, 640, 3), np.uint8), 320)
    assert placement.working == (320, 240)
    with pytest.raises(ValueError, match='too small'):
        prepare(np.zeros((480, 640, 3), np.uint8), 16)


def test_reading_files(tmp_path, photographs):
    image = photographs['chelsea']
    path = tmp_path / 'chelsea.png'
    cv2.imwrite(str(path), image[..., ::-1])
    assert np.array_equal(read_image(path), image)
    (tmp_path / 'sub').mkdir()
    (tmp_path / 'sub' / 'b.JPG').write_bytes(b'not an image')
    (tmp_path / 'empty.png').write_bytes(b'')
    (tmp_path / 'notes.txt').write_text('no image')
    assert find_images([tmp_path]) == [path, tmp_path / 'empty.png', tmp_path / 'sub' / 'b.JPG']
    for bad in (tmp_path / 'sub' / 'b.JPG', tmp_path / 'empty.png'):
        with pytest.raises(FileError, match='not an image'):
            read_image(bad)
    with pytest.raises(FileError, match='cannot read'):
        read_image(tmp_path / 'none.png')


def test_linked_folders_are_searched_once(tmp_path):
    data, links = tmp_path / 'data', tmp_path / 'links'
    (data / 'deep').mkdir(parents=True)
    links.mkdir()
    (data / 'deep' / 'a.png').touch()
    (links / 'b').symlink_to(data)
    (data / 'deep' / 'back').symlink_to(links)  # a loop
    assert find_images([links]) == [links / 'b' / 'deep' / 'a.png']
