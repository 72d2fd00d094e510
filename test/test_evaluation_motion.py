"""The motion test: exact points give the exact motion in both layouts; bad folders are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import cv2
import numpy as np
import pytest

from kp2d_core.cli import main
from kp2d_core.errors import FileError
from kp2d_core.evaluation.camera_paths import load_camera_path
from kp2d_core.evaluation.motion import choose_pairs, motion_test
from kp2d_core.features import Features

INTRINSICS = np.array([[300.0, 0, 160], [0, 310.0, 120], [0, 0, 1]])
LENS = np.array([0.2, -0.5, -0.004, 0.002, 0.3])
FRAMES = 6
BESIDE = 0.5  # m from KITTI's camera 0 to the other


def pose(time: float) -> np.ndarray:
    """Camera to world: forward, to the side, and turning."""
    matrix = np.eye(4)
    matrix[:3, :3] = cv2.Rodrigues(np.array([0.02, 0.05, -0.03]) * time)[0]
    matrix[:3, 3] = np.array([0.2, -0.1, 0.5]) * time
    return matrix


def scene(lens: np.ndarray, beside: float = 0.0):
    """An extractor that projects 300 known points; the first pixel is the number of the frame."""
    random = np.random.default_rng(0)
    things = random.uniform((-3, -2, 10), (3, 2, 25), (300, 3))
    descriptors = random.normal(size=(300, 32)).astype(np.float32)
    descriptors /= np.linalg.norm(descriptors, axis=1, keepdims=True)
    scores = np.linspace(1, 0.1, 300, dtype=np.float32)

    def extract(image, speed=1.0):
        camera = pose(float(image[0, 0, 0]))
        camera[:3, 3] *= speed
        camera[:3, 3] += beside * camera[:3, 0]
        seen = (things - camera[:3, 3]) @ camera[:3, :3]
        points = cv2.projectPoints(seen, np.zeros(3), np.zeros(3), INTRINSICS, lens)[0]
        points = points.reshape(-1, 2).astype(np.float32)
        return Features(points, scores, descriptors, (320, 240))

    return extract


def write_frames(folder) -> list[str]:
    folder.mkdir(parents=True)
    names = [f'{number:06}.png' for number in range(FRAMES)]
    for number, name in enumerate(names):
        cv2.imwrite(str(folder / name), np.full((240, 320, 3), number, np.uint8))
    return names


def write_table(path, rows, before=''):
    path.write_text(''.join(before + ' '.join(f'{v:.9g}' for v in row) + '\n' for row in rows))


@pytest.fixture
def kitti(tmp_path):
    folder = tmp_path / 'kitti'
    write_frames(folder / 'image_2')
    write_table(folder / 'poses.txt', [pose(i)[:3].ravel() for i in range(FRAMES)])
    moved = np.column_stack([INTRINSICS, [-BESIDE * INTRINSICS[0, 0], 0, 0]])
    rows = [moved.ravel() if i == 2 else np.ones(12) for i in range(4)]
    lines = [f'P{i}: ' + ' '.join(map(repr, map(float, row))) for i, row in enumerate(rows)]
    (folder / 'calib.txt').write_text('\n'.join(lines) + '\n')
    return folder


@pytest.fixture
def tum(tmp_path):
    folder = tmp_path / 'tum'
    names = write_frames(folder / 'rgb')
    frames = [f'{100 + number} rgb/{name}' for number, name in enumerate(names)]
    (folder / 'rgb.txt').write_text('# time file\n' + '\n'.join([*frames, '300 rgb/late.png']))
    rows = []
    for i in range(-60, 60 * FRAMES):  # poses at other times than those of the frames
        time = (i + 0.4) / 60
        vector = cv2.Rodrigues(pose(time)[:3, :3])[0].ravel()
        angle = np.linalg.norm(vector)
        turn = [*np.sin(angle / 2) * vector / angle, np.cos(angle / 2)]
        sign = -1 if i % 7 == 0 else 1  # q and -q are one turn
        rows.append([100 + time, *pose(time)[:3, 3], *(sign * part for part in turn)])
    write_table(folder / 'groundtruth.txt', rows)
    write_table(folder / 'intrinsics.txt', [[300, 310, 160, 120, *LENS]])
    return folder


@pytest.mark.parametrize('layout', ['kitti', 'tum'])
def test_exact_points_give_the_exact_motion(layout, request):
    path = load_camera_path(request.getfixturevalue(layout))
    assert path.name == layout and len(path.images) == len(path.poses) == FRAMES
    extract = scene(LENS) if layout == 'tum' else scene(np.zeros(5), BESIDE)
    results = motion_test(extract, path, gaps=(3, 1, 50))
    assert [(row.gap, row.pairs) for row in results] == [(1, 5), (3, 3)]
    for row in results:
        assert row.rotation < 0.02 and row.direction < 0.2 and row.auc5 > 0.95
        assert row.matches == 300 and row.inliers > 295


def test_it_sees_a_wrong_motion_and_a_wrong_lens(kitti, tum):
    path = load_camera_path(kitti)
    path.poses[:, :3, 3] *= [1, 1, -1]  # backwards
    assert motion_test(scene(np.zeros(5), BESIDE), path, [1])[0].direction > 90
    assert motion_test(scene(np.zeros(5)), load_camera_path(tum), [1])[0].auc5 < 0.9


def test_points_that_cannot_be_matched_fail(tum):
    path = load_camera_path(tum)

    def nothing(image):
        return scene(LENS)(image)[:0]

    (row,) = motion_test(nothing, path, [1])
    assert (row.pairs, row.rotation, row.direction, row.auc5) == (5, 180, 180, 0)
    assert row.matches == row.inliers == 0


def test_far_things_count_too(kitti):
    """By default OpenCV ignores points farther away than 50 times the translation."""
    path = load_camera_path(kitti)
    slowly = path.poses.copy()
    slowly[:, :3, 3] = [pose(i)[:3, 3] * 0.2 + BESIDE * pose(i)[:3, 0] for i in range(FRAMES)]
    extract = partial(scene(np.zeros(5), BESIDE), speed=0.2)
    (row,) = motion_test(extract, replace(path, poses=slowly), [1])
    assert row.inliers > 295 and row.rotation < 0.02 and row.direction < 2


def test_pairs_are_spread_and_frames_at_rest_left_out(kitti):
    path = load_camera_path(kitti)
    at_rest = replace(path, poses=path.poses[[0, 0, 0, 3, 4, 4]])
    assert choose_pairs(at_rest, [1, 4]) == {1: [2, 3], 4: [0, 1]}
    with pytest.raises(ValueError, match='no frames 1 apart with a translation of 0.05 m'):
        choose_pairs(replace(path, poses=path.poses[[0] * FRAMES]), [1])
    with pytest.raises(ValueError, match='no frames 6 or 9 apart'):
        choose_pairs(path, [6, 9])
    long = replace(path, poses=np.stack([pose(i) for i in range(300)]))
    starts = choose_pairs(long, [1])[1]
    assert len(starts) == 100 and starts[0] == 0 and starts[-1] > 290


def test_bad_folders_are_told(kitti, tum, tmp_path):
    with pytest.raises(FileError, match='there is no folder'):
        load_camera_path(tmp_path / 'nothing')
    with pytest.raises(FileError, match='holds no camera path'):
        load_camera_path(tmp_path)
    (kitti / 'image_2' / '000000.png').unlink()
    with pytest.raises(FileError, match='has 5 frames, but 6 poses'):
        load_camera_path(kitti)
    (kitti / 'image_2' / '000000.png').write_bytes(b'')
    poses = (kitti / 'poses.txt').read_text()
    (kitti / 'poses.txt').write_text('0 ' * 12 + poses[poses.index('\n') :])
    with pytest.raises(FileError, match='rotations are not orthogonal'):
        load_camera_path(kitti)
    (kitti / 'calib.txt').write_text(('P: ' + '0 ' * 12 + '\n') * 3)
    with pytest.raises(FileError, match='focal lengths must be above 0'):
        load_camera_path(kitti)
    (kitti / 'calib.txt').write_text('P0: 1 2 3\n')
    with pytest.raises(FileError, match='must hold 12 numbers per line'):
        load_camera_path(kitti)
    (tum / 'rgb' / '000003.png').unlink()
    with pytest.raises(FileError, match='000003.png is missing'):
        load_camera_path(tum)
    (tum / 'intrinsics.txt').write_text('wide angle\n')
    with pytest.raises(FileError, match='is not a table of numbers'):
        load_camera_path(tum)
    (tum / 'intrinsics.txt').unlink()
    with pytest.raises(FileError, match='cannot read'):
        load_camera_path(tum)


def test_the_command_prints_plots_and_writes_them(tmp_path, shared_data, capsys):
    report, figures = tmp_path / 'report', tmp_path / 'figures.json'
    command = ['evaluate', '--model', 'none', '--baselines', 'orb', '--gaps', '25']
    kitti = str(shared_data / 'vo' / 'kitti_51')
    command += ['--motion', kitti, '--html', str(report), '--json', str(figures)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert 'kitti_51: frames apart' in printed and 'orb: AUC@5' in printed
    (row,) = json.loads(figures.read_text())['methods']['orb']['motion']['kitti_51']
    assert row['gap'] == 25 and row['pairs'] == 26 and row['matches'] > 50
    page = (report / 'index.html').read_text()
    assert 'Motion of the camera, kitti_51' in page and '320x240' not in page
    assert main([*command, '--motion', kitti, kitti]) == 2
    assert 'two camera paths have the same name' in capsys.readouterr().err
    assert main(['evaluate', '--motion', str(tmp_path)]) == 2
    assert 'holds no camera path' in capsys.readouterr().err
