"""Folders in HPatches layout: complete, incomplete and invalid ones."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from kp2d_core.errors import FileError
from kp2d_core.evaluation.hpatches import load_sequences, rescale, select_split
from kp2d_core.geometry import warp_points

H = '1 0 5\n0 1 -3\n0 0 1\n'


def write_sequence(folder, numbers=(1, 2, 3), suffix='.png', size=(60, 40)):
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for number in numbers:
        image = random.integers(0, 255, (size[1], size[0], 3), np.uint8)
        cv2.imwrite(str(folder / f'{number}{suffix}'), image)
        if number != 1:
            (folder / f'H_1_{number}').write_text(H)
    return folder


@pytest.fixture
def data(tmp_path):
    write_sequence(tmp_path / 'v_wall', suffix='.ppm')
    write_sequence(tmp_path / 'i_lamp', suffix='.jpg')
    write_sequence(tmp_path / 'v_bark', (1, 2, 3, 4, 5, 6, 10))
    return tmp_path


def test_any_format_and_number(data):
    sequences = load_sequences(data)
    assert [s.name for s in sequences] == ['i_lamp', 'v_bark', 'v_wall']
    assert list(sequences[1].images) == [1, 2, 3, 4, 5, 6, 10]
    assert list(sequences[1].homographies) == [2, 3, 4, 5, 6, 10]
    assert sequences[0].homographies[2].tolist() == [[1, 0, 5], [0, 1, -3], [0, 0, 1]]


def test_a_folder_that_is_one_sequence(data):
    assert [s.name for s in load_sequences(data / 'v_wall')] == ['v_wall']


def test_names_with_and_without_prefix(data):
    assert [s.name for s in load_sequences(data, ['bark', 'i_lamp'])] == ['i_lamp', 'v_bark']
    with pytest.raises(ValueError, match="no sequence 'boat'.*i_lamp, v_bark, v_wall"):
        load_sequences(data, ['boat'])


def test_splits(data):
    sequences = load_sequences(data)
    names = {
        split: [s.name for s in select_split(sequences, split)]
        for split in ('all', 'illumination', 'viewpoint', 'bark', 'v_wall', 'boat')
    }
    assert names == {
        'all': ['i_lamp', 'v_bark', 'v_wall'],
        'illumination': ['i_lamp'],
        'viewpoint': ['v_bark', 'v_wall'],
        'bark': ['v_bark'],
        'v_wall': ['v_wall'],
        'boat': [],
    }


def test_what_is_missing_is_named_and_skipped(data):
    (data / 'v_bark' / 'H_1_3').unlink()
    (data / 'v_bark' / '4.png').unlink()
    (data / 'v_wall' / '1.ppm').unlink()
    (data / 'notes').mkdir()
    skipped = []
    sequences = load_sequences(data, skipped=skipped.append)
    assert [s.name for s in sequences] == ['i_lamp', 'v_bark']
    assert list(sequences[1].homographies) == [2, 5, 6, 10]
    for fragment in ('H_1_3 is missing', 'image 4 is missing', 'v_wall: image 1', 'notes'):
        assert sum(fragment in sentence for sentence in skipped) == 1, (fragment, skipped)


def test_skipping_warns_unless_told_otherwise(data):
    (data / 'v_bark' / 'H_1_3').unlink()
    with pytest.warns(UserWarning, match='H_1_3 is missing'):
        load_sequences(data)


@pytest.mark.parametrize(
    'content', ['1 0 0\n0 1 0\n', 'not a matrix', '1 0 0 0 1 0 0 0 nan', '1 0 0 2 0 0 0 0 1', '']
)
def test_odd_homographies_are_refused(data, content):
    (data / 'i_lamp' / 'H_1_2').write_text(content)
    with pytest.raises(FileError, match='H_1_2 is not a'):
        load_sequences(data)


def test_odd_images_are_refused(data):
    (data / 'i_lamp' / '2.png').write_bytes(b'x')
    with pytest.raises(FileError, match='are both image 2'):
        load_sequences(data)
    (data / 'i_lamp' / '2.png').unlink()
    (data / 'i_lamp' / '2.jpg').write_bytes(b'')
    with pytest.raises(FileError, match='2.jpg is empty'):
        load_sequences(data)


def test_folders_without_sequences(tmp_path):
    with pytest.raises(FileError, match='there is no folder'):
        load_sequences(tmp_path / 'nowhere')
    with pytest.raises(FileError, match='holds no sequence'):
        load_sequences(tmp_path)
    (tmp_path / 'v_patches').mkdir()
    cv2.imwrite(str(tmp_path / 'v_patches' / 'ref.png'), np.zeros((8, 8), np.uint8))
    skipped = []
    with pytest.raises(FileError, match='holds no sequence'):
        load_sequences(tmp_path, skipped=skipped.append)
    assert 'its sequences are needed' in skipped[0]


def test_rescaling_by_hand():
    # 100x100 to 50x20 and 200x50 to 50x20: the point (40, 60) becomes (20, 12); it maps to
    # (45, 57), which becomes (11.25, 22.8).
    truth = np.array([[1.0, 0, 5], [0, 1, -3], [0, 0, 1]])
    scaled = rescale(truth, (100, 100), (200, 50), (50, 20), 'paper')
    assert warp_points(np.array([[20, 12]]), scaled)[0] == pytest.approx([11.25, 22.8])
    assert rescale(-truth, (100, 100), (200, 50), (50, 20), 'paper') == pytest.approx(scaled)
    with pytest.raises(ValueError, match="exact, paper, got 'other'"):
        rescale(truth, (100, 100), (200, 50), (50, 20), 'other')


def spot(size, centre):
    """An image with one soft round spot."""
    y, x = np.mgrid[: size[1], : size[0]]
    distance = (x - centre[0]) ** 2 + (y - centre[1]) ** 2
    return np.exp(-distance / 200).astype(np.float32)


def middle(image):
    """The centre of the bright pixels."""
    y, x = np.mgrid[: image.shape[0], : image.shape[1]]
    return np.array([(x * image).sum(), (y * image).sum()]) / image.sum()


def test_the_exact_truth_is_where_resized_pixels_are():
    first, second, size = (1000, 800), (640, 900), (320, 240)
    truth = np.array([[0.6, 0.05, 20], [-0.04, 0.9, 60], [0, 0, 1]])
    here = np.array([420.0, 380])
    there = warp_points(here[None], truth)[0]
    spots = [spot(first, here), spot(second, there)]
    seen, seen_there = (middle(cv2.resize(image, size)) for image in spots)
    exact = warp_points(seen[None], rescale(truth, first, second, size))[0]
    papers = warp_points(seen[None], rescale(truth, first, second, size, 'paper'))[0]
    assert exact == pytest.approx(seen_there, abs=0.02)
    assert np.linalg.norm(papers - seen_there) > 0.1
