"""Training data: unreadable photographs, changes of light, frames of bags."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

from kp2d_core.bags import is_bag
from kp2d_core.errors import FileError
from kp2d_core.training.photographs import (
    Photographs,
    find_entries,
    find_photographs,
    read_frames,
    split,
)
from kp2d_core.views.photometric import (
    LUMA,
    PhotometricConfig,
    change_light,
    rotate_hue,
    sample_jitter,
    sample_shared_colour,
    uneven_light,
)

PAPER = PhotometricConfig()
CALM = PhotometricConfig((0, 0), (1,), (1, 1), (1, 1), (1, 1), 0.0, 0.0, 0.0)


def test_nothing_changes_when_nothing_may(photographs):
    random = np.random.default_rng(0)
    shared = sample_shared_colour(random, CALM)
    coffee = photographs['coffee']
    np.testing.assert_array_equal(change_light(random, coffee, shared, CALM), coffee)


def test_hue_keeps_grays_and_returns_after_a_turn():
    np.testing.assert_allclose(rotate_hue(0.37) @ [80, 80, 80], [80, 80, 80])
    np.testing.assert_allclose(rotate_hue(1.0), np.eye(3), atol=1e-12)
    # A third of the circle takes red to another pure colour.
    turned = rotate_hue(1 / 3) @ [255, 0, 0]
    assert sorted(turned.round(6)) == [0, 0, 255]


@pytest.mark.parametrize(
    'name',
    ['brightness', 'contrast', 'saturation', 'hue', 'noise', 'blur', 'sharpen', 'gamma', 'shade'],
)
def test_each_change_really_happens(photographs, name):
    """The authors' code draws the colour jitter but never applies it."""
    values = {'hue': 0.2, 'noise': (0.05, 0.05), 'blur': (5,), 'sharpen': 1.5, 'gamma': 2}
    value = {**values, 'shade': 1.0}.get(name, (0.5, 0.6))
    config = PhotometricConfig(**{**vars(CALM), name: value})
    random = np.random.default_rng(1)
    image = photographs['coffee']
    changed = change_light(random, image, sample_shared_colour(random, config), config)
    before, after = image.astype(float), changed.astype(float)
    assert np.abs(before - after).mean() > 0.5
    if name == 'brightness':
        assert after.mean() == pytest.approx(0.55 * before.mean(), rel=0.1)
    if name == 'contrast':
        assert after.std() < 0.65 * before.std()
        assert (after @ LUMA).mean() == pytest.approx((before @ LUMA).mean(), abs=2)
    if name == 'saturation':
        assert np.ptp(after, axis=2).mean() < 0.7 * np.ptp(before, axis=2).mean()
    if name == 'noise':  # clipped at black and white, and rounded
        assert (after - before)[40:60, 40:60].std() == pytest.approx(255 * 0.05, rel=0.15)
    if name == 'blur':
        assert cv2.Laplacian(after, cv2.CV_64F).std() < cv2.Laplacian(before, cv2.CV_64F).std()
    if name == 'sharpen':
        assert cv2.Laplacian(after, cv2.CV_64F).std() > cv2.Laplacian(before, cv2.CV_64F).std()
        assert after.mean() == pytest.approx(before.mean(), abs=1)


def test_uneven_light_is_smooth_positive_and_differs_between_the_views():
    random = np.random.default_rng(0)
    fields = [uneven_light(random, (120, 160), 1.0) for _ in range(20)]
    assert all(field.shape == (120, 160) and field.min() > 0 for field in fields)
    assert max(np.ptp(np.log(field)) for field in fields) > 1.5
    steps = [
        np.abs(np.diff(np.log(field), axis=axis)).max() for field in fields for axis in (0, 1)
    ]
    assert max(steps) < 0.1  # of a pixel to the next: no edge that looks like an object's
    assert len({float(field[0, 0]) for field in fields}) == 20


def test_gamma_brightens_and_darkens_but_keeps_black_and_white():
    image = np.tile(np.uint8([0, 128, 255])[None, :, None], (8, 1, 3))
    config = PhotometricConfig(**{**vars(CALM), 'gamma': 2})
    middle = set()
    for seed in range(20):
        random = np.random.default_rng(seed)
        changed = change_light(random, image, sample_shared_colour(random, config), config)
        assert changed[0, 0, 0] == 0 and changed[0, 2, 0] == 255
        middle.add(int(changed[0, 1, 0]))
    assert 60 < min(middle) < 100 and 150 < max(middle) < 185


def test_jitter_covers_its_range_and_differs_between_the_views():
    drawn = [sample_jitter(np.random.default_rng(seed), PAPER) for seed in range(200)]
    brightness = [matrix.sum(axis=1).mean() for matrix, _ in drawn]  # of white
    contrasts = [contrast for _, contrast in drawn]
    for values in (brightness, contrasts):
        assert min(values) < 0.55 and max(values) > 1.45
    assert len(set(contrasts)) == 200


def test_gray_and_shuffle_are_shared_by_both_views(photographs):
    image = photographs['coffee']
    gray = PhotometricConfig(**{**vars(CALM), 'gray': 1.0})
    random = np.random.default_rng(0)
    changed = change_light(random, image, sample_shared_colour(random, gray), gray)
    assert np.ptp(changed, axis=2).max() == 0
    shuffle = PhotometricConfig(**{**vars(CALM), 'shuffle': 1.0})
    seen = set()
    for seed in range(20):
        matrix = sample_shared_colour(np.random.default_rng(seed), shuffle).matrix
        seen.add(tuple(matrix.argmax(axis=1)))
    assert len(seen) == 6


def test_unreadable_files_are_named_once_and_replaced(tmp_path, photographs, capsys):
    cv2.imwrite(str(tmp_path / 'a.png'), photographs['coffee'])
    (tmp_path / 'b.png').write_bytes(b'broken')
    cv2.imwrite(str(tmp_path / 'c.png'), photographs['coffee'][:10, :10])
    (tmp_path / 'notes.txt').write_text('not an image')
    found = Photographs(find_photographs([tmp_path]))
    assert len(found) == 3
    for _ in range(2):
        for number in range(3):
            np.testing.assert_array_equal(found[number], found[0])
    said = capsys.readouterr().err
    assert said.count('b.png') == 1 and said.count('c.png') == 1
    assert found.unreadable == {1, 2}


def test_photographs_are_shrunk_and_kept_within_the_memory(photographs):
    images = list(photographs.values())
    small = Photographs(images, short_side=100)
    assert {min(small[i].shape[:2]) for i in range(len(images))} == {100}
    assert small[0] is small[0]
    uncached = Photographs(images, short_side=100, cache_gb=0)
    assert uncached[0] is not uncached[0]


def test_held_out_photographs_are_not_trained_on():
    entries = [Path(f'{i}.png') for i in range(100)]
    train, held_out = split(entries, 10, seed=1)
    assert len(held_out) == 10 and set(train) | set(held_out) == set(entries)
    assert not set(train) & set(held_out)
    assert split(entries, 10, seed=1)[1] == held_out
    assert split(entries[:4], 10, seed=1)[1] == []


def write_bag(path: Path, frames: list[np.ndarray], plugin: StoragePlugin, rate: int = 10) -> Path:
    """Raw frames on /raw, the same as JPEG on /small/compressed; two of them damaged."""
    store = get_typestore(Stores.ROS2_JAZZY)
    types = store.types
    with Writer(path, version=9, storage_plugin=plugin) as writer:
        raw = writer.add_connection('/raw', 'sensor_msgs/msg/Image', typestore=store)
        small = writer.add_connection(
            '/small/compressed', 'sensor_msgs/msg/CompressedImage', typestore=store
        )
        for number, frame in enumerate(frames):
            time = (10**9 // rate) * number
            stamp = types['builtin_interfaces/msg/Time'](sec=0, nanosec=time % 10**9)
            header = types['std_msgs/msg/Header'](stamp=stamp, frame_id='camera')
            height, width = frame.shape[:2]
            message = types['sensor_msgs/msg/Image'](
                header, height, width, 'bgr8', 0, 3 * width, frame[..., ::-1].reshape(-1)
            )
            data = store.serialize_cdr(message, 'sensor_msgs/msg/Image')
            writer.write(raw, time, data)
            _, jpeg = cv2.imencode('.jpg', frame[..., ::-1])
            if number == 0:
                jpeg = jpeg[:20]
            message = types['sensor_msgs/msg/CompressedImage'](header, 'jpeg', jpeg.reshape(-1))
            data = store.serialize_cdr(message, 'sensor_msgs/msg/CompressedImage')
            writer.write(small, time, data[:30] if number == 1 else data)
    return path


@pytest.fixture(scope='module', params=[StoragePlugin.MCAP, StoragePlugin.SQLITE3])
def bag(request, tmp_path_factory, photographs) -> tuple[Path, list[np.ndarray]]:
    frames = [
        np.ascontiguousarray(photographs['coffee'][i : i + 120, i : i + 160]) for i in range(20)
    ]
    path = tmp_path_factory.mktemp('bags') / 'drive'
    return write_bag(path, frames, request.param), frames


def test_a_bag_gives_frames_thinned_by_time(bag, capsys):
    path, frames = bag
    assert is_bag(path) and not is_bag(path.parent)
    found = read_frames(path, '/raw', seconds=0.5)
    assert len(found) == 4  # 2 seconds
    np.testing.assert_array_equal(found[1], frames[5])
    assert len(read_frames(path, '/raw', seconds=0)) == 20
    assert len(read_frames(path, seconds=0)) == 38
    assert 'skipped 2 frames' in capsys.readouterr().err
    file = next(f for f in path.iterdir() if f.suffix in ('.mcap', '.db3'))
    assert is_bag(file)
    assert len(read_frames(file, '/raw', seconds=0.5)) == 4


def test_bags_that_cannot_be_used_are_named(bag, tmp_path):
    with pytest.raises(FileError, match='no images on /other, only on /raw, /small/compressed'):
        read_frames(bag[0], '/other')
    broken = tmp_path / 'broken.mcap'
    broken.write_bytes(b'not a bag')
    with pytest.raises(FileError, match='not a readable bag'):
        read_frames(broken)
    with pytest.raises(FileError, match='not a readable bag'):
        read_frames(tmp_path / 'absent.mcap')


def test_of_a_damaged_bag_the_rest_is_used(bag, tmp_path, capsys):
    """As after a power failure of a robot. An MCAP file has its index at the end."""
    file = next(f for f in bag[0].iterdir() if f.suffix in ('.mcap', '.db3'))
    damaged = tmp_path / file.name
    data = np.fromfile(file, np.uint8)
    if file.suffix == '.mcap':
        data[: len(data) // 2].tofile(damaged)
        with pytest.raises(FileError, match='not a readable bag'):
            read_frames(damaged, '/raw')
    else:
        data[len(data) // 2 :][:20000] ^= 255
        data.tofile(damaged)
        assert 0 < len(read_frames(damaged, '/raw', seconds=0)) < 20
        assert 'is damaged, only its first frames are used' in capsys.readouterr().err


def test_folders_and_bags_mix(bag, tmp_path, photographs):
    cv2.imwrite(str(tmp_path / 'a.png'), photographs['coffee'])
    entries = find_entries([tmp_path, bag[0]], topic='/raw', seconds=0.5)
    assert len(entries) == 5
    assert {Photographs(entries)[i].shape[2] for i in range(5)} == {3}
    with pytest.raises(ValueError, match='is for bags'):
        find_entries([tmp_path], topic='/raw')
