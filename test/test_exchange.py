"""Files for other tools: .npz, HDF5 of hloc, COLMAP databases; a scene reconstructed from one."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import yaml

from kp2d_core import FileError, KeypointDetector, match
from kp2d_core.camera import Camera
from kp2d_core.cli import main
from kp2d_core.evaluation.camera_paths import load_camera_path
from kp2d_core.exchange import (
    Named,
    choose_pairs,
    colmap_camera,
    match_all,
    names_below,
    save_colmap,
)

h5py = pytest.importorskip('h5py')

OPTIONS = ('--model', 'small', '--max-keypoints', '300', '--scales', '1', '--size', '320x216')


@pytest.fixture(scope='module')
def folder(tmp_path_factory, photographs):
    """A stereo pair and something else, in folders."""
    folder = tmp_path_factory.mktemp('images')
    for name in ('motorcycle_left', 'motorcycle_right', 'coffee'):
        path = folder / ('stereo' if 'cycle' in name else 'other') / f'{name}.png'
        path.parent.mkdir(exist_ok=True)
        cv2.imwrite(str(path), photographs[name][..., ::-1])
    return folder


LEFT, RIGHT, OTHER = (
    'stereo/motorcycle_left.png',
    'stereo/motorcycle_right.png',
    'other/coffee.png',
)


@pytest.fixture(scope='module')
def features(folder):
    detector = KeypointDetector.load('small')
    found = detector.detect(
        [folder / name for name in (LEFT, RIGHT, OTHER)],
        max_keypoints=300, scales=(1,), working_size=(320, 216),
    )  # fmt: skip
    return dict(zip((LEFT, RIGHT, OTHER), found, strict=True))


def test_hloc_finds_features_by_name(folder, features, tmp_path, capsys):
    out = tmp_path / 'features.h5'
    assert main(['extract', str(folder), '-o', str(out), '--format', 'hloc', *OPTIONS]) == 0
    assert '3 of 3 images' in capsys.readouterr().out
    with h5py.File(out) as file:
        group, expected = file[LEFT], features[LEFT]
        np.testing.assert_allclose(group['keypoints'][()], expected.keypoints, atol=0.05)
        assert group['descriptors'].shape == (expected.descriptors.shape[1], len(expected))
        assert group['scores'].shape == (len(expected),)
        assert group['image_size'][()].tolist() == list(expected.image_size)
        assert set(file) == {'stereo', 'other'}


def test_hloc_finds_matches_of_a_list_of_pairs(folder, features, tmp_path):
    pairs = tmp_path / 'pairs.txt'
    pairs.write_text(f'# a comment\n{LEFT} {RIGHT}\n\n')
    out = tmp_path / 'out'
    arguments = ['match', str(folder), '-o', str(out), '--format', 'hloc', '--pairs', str(pairs)]
    assert main([*arguments, *OPTIONS]) == 0
    assert (out / 'pairs.txt').read_text() == f'{LEFT} {RIGHT}\n'
    with h5py.File(out / 'matches.h5') as file, h5py.File(out / 'features.h5') as points:
        group = file[LEFT.replace('/', '-')][RIGHT.replace('/', '-')]
        partners = group['matches0'][()]
        kept = np.flatnonzero(partners >= 0)
        expected = match(features[LEFT], features[RIGHT])
        assert len(kept) == pytest.approx(len(expected), abs=3)
        assert (group['matching_scores0'][()][kept] > 0).all()
        # Rectified: a point and its partner are in one line, for most.
        rows = (
            points[LEFT]['keypoints'][()][kept, 1],
            points[RIGHT]['keypoints'][()][partners[kept], 1],
        )
        assert np.median(np.abs(rows[0] - rows[1])) < 2


def test_a_file_a_pair(folder, tmp_path, capsys):
    out = tmp_path / 'matches'
    arguments = ['match', str(folder), '-o', str(out), '--format', 'npz', '--window', '1']
    assert main([*arguments, *OPTIONS]) == 0
    assert '2 pairs' in capsys.readouterr().out
    names = sorted(path.name for path in out.iterdir())
    assert names == [
        'other_coffee.png--stereo_motorcycle_left.png.npz',
        'stereo_motorcycle_left.png--stereo_motorcycle_right.png.npz',
    ]
    with np.load(out / names[1]) as values:
        first, second = values['keypoints0'], values['keypoints1']
        assert len(first) == len(second) == len(values['indices']) == len(values['inliers'])
        good = values['inliers']
        assert good.sum() > 50 and np.abs(first[good, 1] - second[good, 1]).max() < 6


def test_colmap_opens_the_database(folder, features, tmp_path, capsys):
    pycolmap = pytest.importorskip('pycolmap')
    calibration = tmp_path / 'camera.yaml'
    size = features[LEFT].image_size
    matrix = [700.0, 0, size[0] / 2, 0, 701.0, size[1] / 2, 0, 0, 1]
    calibration.write_text(
        yaml.safe_dump(
            {
                'image_width': size[0],
                'image_height': size[1],
                'camera_matrix': {'data': matrix},
                'distortion_model': 'plumb_bob',
                'distortion_coefficients': {'data': [0.1, -0.05, 0.001, 0.002, 0.0]},
                'rectification_matrix': {'data': [1.0, 0, 0, 0, 1, 0, 0, 0, 1]},
                'projection_matrix': {'data': [0.0] * 12},
            }
        )
    )
    out = tmp_path / 'scene.db'
    images = [str(folder / name) for name in (LEFT, RIGHT)]
    arguments = ['extract', *images, '-o', str(out), '--format', 'colmap']
    assert main([*arguments, '--calibration', str(calibration), *OPTIONS]) == 0
    assert '1 of them verified' in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir() if path.suffix == '.db'] == ['scene.db']
    database = pycolmap.Database.open(out)
    (camera,) = database.read_all_cameras()
    assert camera.model.name == 'OPENCV' and camera.has_prior_focal_length
    assert camera.params[:5].tolist() == [700, 701, size[0] / 2 + 0.5, size[1] / 2 + 0.5, 0.1]
    left, right = (database.read_image_with_name(name.split('/')[1]) for name in (LEFT, RIGHT))
    points = database.read_keypoints(left.image_id)
    np.testing.assert_allclose(points[:, :2], features[LEFT].keypoints + 0.5, atol=0.05)
    matches = database.read_matches(left.image_id, right.image_id)
    geometry = database.read_two_view_geometry(left.image_id, right.image_id)
    assert 50 < len(geometry.inlier_matches) <= len(matches)
    database.close()


def test_a_real_scene_is_reconstructed(shared_data, tmp_path):
    """Sixteen frames of a hand-held camera become one model; its path is the recorded one."""
    pycolmap = pytest.importorskip('pycolmap')
    recording = shared_data / 'vo' / 'tum_fr1_xyz_150'
    if not recording.is_dir():
        pytest.skip(f'no recording in {recording}')
    path = load_camera_path(recording)
    chosen = list(range(0, len(path.images), 10))
    root, names = names_below([path.images[i] for i in chosen])
    found = KeypointDetector.load('small').detect(
        [root / name for name in names], max_keypoints=600, scales=(1,)
    )
    named = Named(root, names, found)
    pairs = choose_pairs(names, window=5)
    database = tmp_path / 'scene.db'
    verified = save_colmap(database, named, match_all(named, pairs), path.camera)
    assert verified > 0.9 * len(pairs)

    options = pycolmap.IncrementalPipelineOptions()
    options.random_seed, options.num_threads = 0, 2
    options.ba_refine_focal_length = options.ba_refine_extra_params = False
    # Beyond 1 COLMAP takes a coefficient for nonsense; the k3 of this lens is 1.16.
    options.max_extra_param = options.mapper.max_extra_param = 2
    models = pycolmap.incremental_mapping(database, root, tmp_path, options)
    model = max(models.values(), key=lambda each: each.num_reg_images())
    assert model.num_reg_images() == len(names)
    images = [model.image(number) for number in model.reg_image_ids()]
    truth = np.array([path.poses[chosen[names.index(each.name)], :3, 3] for each in images])
    places = np.array([each.projection_center() for each in images])
    # Metres, of a path of half a metre. The mapper has found 0.010 and 0.023 for the same input.
    assert rms_after_alignment(places, truth) < 0.03
    assert np.ptp(truth, axis=0).max() > 0.3


def rms_after_alignment(places, truth):
    a, b = places - places.mean(axis=0), truth - truth.mean(axis=0)
    u, s, vt = np.linalg.svd(b.T @ a)
    mirror = np.diag([1, 1, np.sign(np.linalg.det(u @ vt))])
    scale = (s * np.diag(mirror)).sum() / (a**2).sum()
    return np.sqrt(((scale * a @ (u @ mirror @ vt).T - b) ** 2).sum(axis=1).mean())


@pytest.mark.parametrize(
    ('distortion', 'model', 'expected'),
    [
        ((), None, ('PINHOLE', 0)),
        ((0.1, 0.2, 0.01, 0.02), None, ('OPENCV', 4)),
        ((0.1, 0.2, 0.01, 0.02, 0.3), None, ('FULL_OPENCV', 8)),
        ((0.1, 0.2, 0.01, 0.02, 0.3, 0.4, 0.5, 0.6), None, ('FULL_OPENCV', 8)),
        ((0.1, 0.2, 0.01, 0.02), 'equidistant', ('OPENCV_FISHEYE', 4)),
    ],
)
def test_colmap_knows_our_lenses(distortion, model, expected):
    """COLMAP projects the same rays to the same pixels, except for the half pixel."""
    pycolmap = pytest.importorskip('pycolmap')
    ours = Camera.create((640, 480), [[300, 0, 320], [0, 310, 240], [0, 0, 1]], distortion, model)
    name, parameters = colmap_camera(ours)
    assert (name, len(parameters) - 4) == expected
    theirs = pycolmap.Camera(model=name, width=640, height=480, params=parameters)
    rays = np.random.default_rng(0).uniform(-0.4, 0.4, (50, 2))
    pixels = theirs.img_from_cam(np.column_stack([rays, np.ones(50)]))
    np.testing.assert_allclose(pixels - 0.5, ours.pixels(rays), atol=1e-6)


@pytest.mark.parametrize(
    ('text', 'message'),
    [('one.png\n', 'line 1 .* two names'), ('a.png nowhere.png\n', 'nowhere.png is not one of')],
)
def test_damaged_lists_of_pairs_are_named(tmp_path, text, message):
    path = tmp_path / 'pairs.txt'
    path.write_text(text)
    with pytest.raises(FileError, match=message):
        choose_pairs(['a.png', 'b.png'], path)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['match', '{0}'], 'give two images, or --format'),
        (['match', '{0}/a', '{0}/b', '--window', '2'], 'go with --format'),
        (['match', '{0}', '--format', 'npz'], 'needs -o'),
        (['match', '{0}', '--format', 'npz', '-o', 'x', '--calibration', 'c'], 'format colmap'),
        (['extract', '{0}', '-o', 'x', '--window', '2'], 'with --format colmap'),
        (['extract', '{0}', '-o', 'x', '--format', 'hloc', '--overlay'], 'with --format npz'),
    ],
)  # fmt: skip
def test_arguments_that_do_not_go_together(folder, capsys, arguments, message):
    assert main([argument.format(folder) for argument in arguments]) == 2
    assert message in capsys.readouterr().err
