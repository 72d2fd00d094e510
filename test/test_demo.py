"""The demo: the shipped weights match two views of a photograph."""

from __future__ import annotations

import re
import sys

import numpy as np

from kp2d_core import demo


def test_demo_draws_and_most_matches_agree(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['demo', '-o', str(tmp_path)])
    assert demo.main() == 0
    said = capsys.readouterr().out
    counts = re.findall(r'(\d+) matches, (\d+) inliers', said)
    assert len(counts) == len(demo.PHOTOGRAPHS)
    for matches, inliers in counts:
        assert int(inliers) > 60 and int(inliers) > 0.6 * int(matches)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f'{name}-{kind}.png' for name in demo.PHOTOGRAPHS for kind in ('keypoints', 'matches')
    )


def test_the_hard_views_are_drawn_and_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['demo', '--hard', '-o', str(tmp_path)])
    assert demo.main() == 0
    said = capsys.readouterr().out
    counts = re.findall(r'(\d+) matches, (\d+) right', said)
    assert len(counts) == len(demo.HARD) == len(list(tmp_path.glob('*-hard.png')))
    assert all(int(right) <= int(matches) for matches, right in counts)


def test_where_the_pixels_of_a_hard_view_are():
    image = demo.photograph('coffee')
    view, there = demo.hard_view(image, 90, 1.0, 2.0)
    x, y = 320, 150
    u, v, w = there @ [x, y, 1]
    assert np.abs(view[round(v / w), round(u / w)].astype(int) - image[y, x]).max() < 12
