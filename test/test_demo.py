"""The first look, and with it the weights that ship: they match two views of a photograph."""

from __future__ import annotations

import re
import sys

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
