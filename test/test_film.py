"""The moving picture of the README: all its frames, with tracks drawn on them."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kp2d_ros.demo.film import main

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize('name', ['tracks.webp', 'tracks.gif'])
def test_it_moves_and_shows_tracks(tmp_path, model, name, capsys):
    out = tmp_path / name
    arguments = ['-o', str(out), '--frames', '3', '--size', '160x120', '--width', '200']
    assert main([*arguments, '--model', str(model), '--runtime', 'onnxruntime']) == 0
    assert '3 frames' in capsys.readouterr().out
    with Image.open(out) as film:
        assert film.n_frames == 3 and film.size == (200, 150)
        frames = []
        for number in range(3):
            film.seek(number)
            frames.append(np.asarray(film.convert('RGB')).astype(int))
    assert (frames[0] != frames[2]).mean() > 0.05


def test_what_cannot_be_written(tmp_path, model):
    with pytest.raises(ValueError, match=r'must end in .webp or .gif'):
        main(['-o', str(tmp_path / 'tracks.mp4')])


def test_the_one_in_the_readme():
    path = ROOT / 'docs' / 'images' / 'tracks.webp'
    assert 'docs/images/tracks.webp' in (ROOT / 'README.md').read_text()
    assert path.stat().st_size < 2e6
    with Image.open(path) as film:
        assert film.n_frames >= 40 and film.width >= 400
