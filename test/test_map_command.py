"""kp2d map: photographs in, a model that COLMAP's own library opens out."""

import shutil

import pytest

from kp2d_core.cli import main


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
