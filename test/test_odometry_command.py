"""kp2d odometry, from a recording to its files."""

import json

import cv2
import numpy as np
import pytest

from kp2d_core.cli import main
from kp2d_core.odometry import recordings
from kp2d_core.odometry.geometry import exp_rotation, rigid
from kp2d_core.odometry.recordings import open_recording
from kp2d_core.odometry.runs import baseline_method, run_all, score
from kp2d_core.odometry.spoiling import HARDSHIPS
from kp2d_core.odometry.trajectory import write_tum
from kp2d_core.views.worlds import photographs, room, room_path, view_camera

FRAMES, SIZE = 30, (320, 240)


@pytest.fixture(scope='module')
def scene():
    return room(photographs())


@pytest.fixture(scope='module')
def poses():
    return room_path(300)[:FRAMES]


@pytest.fixture(scope='module')
def kitti(scene, poses, tmp_path_factory):
    """A recording of the room in KITTI's layout, with two cameras 0.3 m apart."""
    folder = tmp_path_factory.mktemp('kitti')
    camera = view_camera(SIZE)
    for number, shift in enumerate((0.0, 0.3)):
        (folder / f'image_{number}').mkdir()
        for i, pose in enumerate(poses):
            view = scene.view(camera, pose @ rigid(np.eye(3), np.array([shift, 0, 0])))
            cv2.imwrite(str(folder / f'image_{number}' / f'{i:06}.png'), view[..., ::-1])
    projections = [
        np.column_stack([camera.matrix, [-camera.matrix[0, 0] * shift, 0, 0]])
        for shift in (0.0, 0.3)
    ]
    np.savetxt(folder / 'calib.txt', [projection.ravel() for projection in projections])
    np.savetxt(folder / 'poses.txt', poses[:, :3].reshape(-1, 12))
    return folder


@pytest.fixture(scope='module')
def few_frames():
    """The scenes as short as the tests need them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recordings, 'room_path', lambda count: room_path(count)[:FRAMES])
        yield


def test_recording_of_one_camera(kitti, tmp_path, capsys):
    output = tmp_path / 'out.tum'
    report, figures = tmp_path / 'report', tmp_path / 'out.json'
    arguments = ['odometry', str(kitti), '-o', str(output), '--html', str(report)]
    arguments += ['--json', str(figures), '--max-keypoints', '500', '--baselines', 'sift']
    assert main(arguments) == 0
    told = capsys.readouterr().out
    assert 'the scale of trajectory and map is arbitrary' in told
    header, ours = (line.split() for line in told.splitlines()[1:3])
    assert header[-1] == 'Hz'
    assert float(ours[-1]) > 0
    assert float(ours[5].rstrip('%')) < 0.5  # ATE / path
    rows = np.loadtxt(output)
    assert rows.shape == (FRAMES, 8)
    assert np.allclose(np.diff(rows[:, 0]), 0.1)
    assert np.allclose(np.linalg.norm(rows[:, 4:], axis=1), 1)
    assert 5 < len(np.loadtxt(output.with_suffix('.causal.tum'))) < FRAMES
    assert (tmp_path / 'out.svg').read_text().startswith('<?xml')
    header, _, body = (tmp_path / 'out.ply').read_bytes().partition(b'end_header\n')
    count = int(header.split(b'element vertex ')[1].split()[0])
    assert count > 100
    assert len(body) == 12 * count
    page = (report / 'index.html').read_text()
    assert 'data:image/svg+xml;base64,' in page
    assert 'tracking, ' in page
    runs = json.loads(figures.read_text())['runs']
    assert [run['method'] for run in runs] == ['small', 'sift']
    assert all(run['errors']['final']['ate'] < 0.02 for run in runs)


def test_recording_of_two_cameras_is_metric(kitti):
    recording = open_recording(str(kitti), stereo=True)
    (run,) = run_all(recording, [baseline_method('sift', 500)], progress=False)
    found = score(run, recording)
    assert found.final.ate < 0.01
    assert found.true_scale == pytest.approx(1, abs=0.01)
    assert len(run.chosen()) == FRAMES


def test_scene_needs_no_files(few_frames):
    recording = open_recording('scene:room', size=SIZE).every(2)
    assert recording.count == FRAMES // 2
    (run,) = run_all(recording, [baseline_method('sift', 500)], progress=False)
    assert score(run, recording).final.ate < 0.01


def test_hard_recordings_are_never_silently_wrong(few_frames, tmp_path, capsys):
    """Frames left out, blur, black, a jump: a pose is right, or there is none."""
    figures = tmp_path / 'figures.json'
    arguments = ['odometry', 'scene:room', '--scene-size', '320x240', '--hardships']
    assert main([*arguments, '--json', str(figures), '--max-keypoints', '400']) == 0
    content = json.loads(figures.read_text())
    table = content['hardships']
    assert [row.removeprefix('small, ') for row in table] == list(HARDSHIPS)
    assert 'small, every 2nd frame' in capsys.readouterr().out
    assert content['runs'][0]['errors']['worst'] < 0.05
    # The jump comes six frames after the start, when the depths are still rough.
    limits = {how: 0.15 if how == 'jump' else 0.05 for how in HARDSHIPS}
    worst = {how: float(table[f'small, {how}']['worst']) for how in HARDSHIPS}
    assert all(worst[how] < limits[how] for how in HARDSHIPS), worst
    assert table['small, every 2nd frame']['frames'] == f'{FRAMES // 2}/{FRAMES // 2}'
    assert int(table['small, black']['lost']) > 5


def test_film_needs_a_calibration(scene, poses, tmp_path, capsys):
    camera = view_camera(SIZE)
    film = cv2.VideoWriter(str(tmp_path / 'film.avi'), cv2.VideoWriter_fourcc(*'MJPG'), 20, SIZE)
    for pose in poses:
        film.write(scene.view(camera, pose)[..., ::-1])
    film.release()
    assert main(['odometry', str(tmp_path / 'film.avi')]) == 2
    assert 'give --calibration FILE' in capsys.readouterr().err
    matrix, projection = camera.matrix, np.column_stack([camera.matrix, np.zeros(3)])
    calibration = tmp_path / 'camera.yaml'
    calibration.write_text(
        f'image_width: {SIZE[0]}\nimage_height: {SIZE[1]}\ndistortion_model: plumb_bob\n'
        f'camera_matrix: {{data: {matrix.ravel().tolist()}}}\n'
        'distortion_coefficients: {data: [0, 0, 0, 0, 0]}\n'
        f'rectification_matrix: {{data: {np.eye(3).ravel().tolist()}}}\n'
        f'projection_matrix: {{data: {projection.ravel().tolist()}}}\n'
    )
    truth = tmp_path / 'truth.tum'
    write_tum(truth, np.arange(FRAMES) / 20, poses)
    recording = open_recording(str(tmp_path / 'film.avi'), calibration=calibration, truth=truth)
    (run,) = run_all(recording, [baseline_method('sift', 500)], progress=False)
    assert np.allclose(run.stamps, np.arange(FRAMES) / 20)
    assert score(run, recording).final.ate < 0.02


def test_tum_layout_without_truth(scene, poses, tmp_path):
    camera = view_camera(SIZE)
    (tmp_path / 'rgb').mkdir()
    lines = []
    for i, pose in enumerate(poses[:4]):
        cv2.imwrite(str(tmp_path / 'rgb' / f'{i}.png'), scene.view(camera, pose)[..., ::-1])
        lines.append(f'{100 + i / 30:.6f} rgb/{i}.png\n')
    (tmp_path / 'rgb.txt').write_text('# time file\n' + ''.join(lines))
    k = camera.matrix
    (tmp_path / 'intrinsics.txt').write_text(f'{k[0, 0]} {k[1, 1]} {k[0, 2]} {k[1, 2]}\n')
    recording = open_recording(str(tmp_path))
    assert recording.truth is None
    assert [stamp for stamp, _ in recording.shots()] == pytest.approx(
        [100 + i / 30 for i in range(4)], abs=1e-5
    )


@pytest.mark.parametrize(
    ('arguments', 'sentence'),
    [
        (['nowhere'], "there is no 'nowhere'"),
        (['scene:room', '--baselines', 'surf'], "no baseline 'surf'"),
        (['scene:moon'], "there is no 'scene:moon'"),
    ],
)
def test_mistakes_are_told_in_a_sentence(arguments, sentence, capsys):
    assert main(['odometry', *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_rotation_alone_does_not_start_a_map(scene):
    """A camera that only turns says nothing of depth: better no pose than a wrong one."""
    camera = view_camera(SIZE)
    turning = [rigid(exp_rotation(np.array([0, 0.02 * i, 0])), np.zeros(3)) for i in range(12)]
    views = [(i / 10, [scene.view(camera, pose)]) for i, pose in enumerate(turning)]
    recording = recordings.Recording(
        'turning', recordings.single(camera), lambda: iter(views), len(views)
    )
    (run,) = run_all(recording, [baseline_method('sift', 500)], progress=False)
    assert (run.maps < 0).all()
