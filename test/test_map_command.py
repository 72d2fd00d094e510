"""kp2d map: from photographs to a model that pycolmap opens."""

import shutil
import sys

import pytest
from conftest import ROOT
from full_disk import run_on_full_disk

from kp2d_core.cli import main
from kp2d_core.views.worlds import photographs as scene_photographs
from kp2d_core.views.worlds import room, room_path, view_camera


def test_a_sequence_becomes_a_model(shared_data, tmp_path, capsys):
    pycolmap = pytest.importorskip('pycolmap')
    images = tmp_path / 'images'
    images.mkdir()
    for path in sorted((shared_data / 'vo' / 'tum_fr1_xyz_150' / 'rgb').iterdir())[:72:12]:
        shutil.copy(path, images)
    assert main(['map', str(images), '-o', str(tmp_path / 'model')]) == 0
    assert '6 of 6 images' in capsys.readouterr().out
    model = pycolmap.Reconstruction(str(tmp_path / 'model'))
    assert model.num_reg_images() == 6
    assert model.num_points3D() > 200
    assert model.compute_mean_reprojection_error() < 2


def test_a_folder_without_images_is_refused(tmp_path, capsys):
    pytest.importorskip('pycolmap')
    assert main(['map', str(tmp_path), '-o', str(tmp_path / 'model')]) == 2
    assert 'two images or more' in capsys.readouterr().err


def test_a_bag_becomes_a_model_with_its_loop(tmp_path, capsys):
    """The camera moves back and forth: the last frame is matched with the first."""
    pycolmap = pytest.importorskip('pycolmap')
    from test_bag_command import make_bag

    camera, scene = view_camera((320, 240)), room(scene_photographs())
    views = [scene.view(camera, pose) for pose in room_path(600)[:90:15]]
    bag = make_bag(tmp_path / 'bag', [*views, *views[::-1]], matrix=camera.matrix)
    output = tmp_path / 'model'
    arguments = ['map', str(bag), '-o', str(output), '--max-keypoints', '400']
    assert main(arguments) == 0
    assert '12 of 12 images' in capsys.readouterr().out
    model = pycolmap.Reconstruction(str(output))
    assert model.num_reg_images() == 12
    (lens,) = model.cameras.values()  # as calibrated, and left so
    assert lens.focal_length_x == pytest.approx(camera.matrix[0, 0])
    database = pycolmap.Database.open(output / 'database.db')
    ends = [database.read_image_with_name(f'{number:06}.png').image_id for number in (0, 11)]
    assert len(database.read_two_view_geometry(*ends).inlier_matches) > 100
    database.close()


def test_photographs_of_different_things_give_no_model(photographs, tmp_path, capfd):
    pytest.importorskip('pycolmap')
    from kp2d_core.visualize import write_image

    for name in ('astronaut', 'coffee', 'chelsea'):
        write_image(tmp_path / 'photos' / f'{name}.png', photographs[name])
    assert main(['map', str(tmp_path / 'photos'), '-o', str(tmp_path / 'model')]) == 2
    told = capfd.readouterr()
    assert '3 pairs, 0 of them verified' in told.out
    (sentence,) = [line for line in told.err.splitlines() if line and '%' not in line]
    assert 'no two of the images show one place' in sentence


def test_a_full_disk_cuts_no_model_short(tmp_path):
    """COLMAP itself would end the process or leave an unreadable model."""
    pytest.importorskip('pycolmap')
    full = tmp_path / 'full'
    script = (
        'import sys, pycolmap\nfrom pathlib import Path\n'
        'from kp2d_core.errors import FileError\n'
        'from kp2d_core.odometry.reconstruction import write_model\n'
        'model = pycolmap.synthesize_dataset(pycolmap.SyntheticDatasetOptions())\n'
        f'folder = Path({str(full)!r}, "model")\n'
        'try:\n    write_model(model, folder)\n'
        'except FileError as error:\n    print(error)\n'
        'print(sorted(p.name for p in folder.iterdir() if p.name == "points3D.bin"))\n'
    )
    result = run_on_full_disk([sys.executable, '-c', script], full, '16k', cwd=ROOT)
    told, left = result.stdout.splitlines()[-2:]
    assert told.startswith(f'cannot write {full}/model/'), result.stderr
    assert told.endswith(': No space left on device')
    assert left == '[]'
