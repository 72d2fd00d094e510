"""Sequences made of photographs: exact homographies, HPatches layout, mistakes."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from kp2d_core.cli import main
from kp2d_core.evaluation.hpatches import load_sequences, select_split
from kp2d_core.evaluation.methods import baseline
from kp2d_core.evaluation.protocol import evaluate
from kp2d_core.geometry import warp_points
from kp2d_core.views.pairs import make_sequences, middle_of

SIZE = (320, 240)


def made(photograph, seed=0, size=SIZE):
    return list(make_sequences(photograph, 'x', size, np.random.default_rng(seed)))


def test_each_view_shows_what_its_homography_says(photographs):
    """Warping the reference gives the view, except for light and sharpness."""
    moved, lit = made(photographs['motorcycle_left'])
    assert (moved.name, lit.name) == ('v_x', 'i_x')
    for view, homography in moved.others + lit.others:
        warped = cv2.warpPerspective(moved.reference, homography, SIZE)
        seen = cv2.warpPerspective(np.full(SIZE[::-1], 255, np.uint8), homography, SIZE) == 255
        assert seen.sum() > 1000
        blurred = [
            cv2.GaussianBlur(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), (0, 0), 3)[seen]
            for image in (warped, view)
        ]
        assert np.corrcoef(*blurred)[0, 1] > 0.95


def test_views_are_as_different_as_they_should_be(photographs):
    zooms, turns = [], []
    for seed in range(8):
        moved, lit = made(photographs['coffee'], seed)
        corners = np.array([[0, 0], [SIZE[0], 0], [SIZE[0], SIZE[1]], [0, SIZE[1]]], float)
        for _, homography in moved.others:
            area = cv2.contourArea(warp_points(corners, homography).astype(np.float32))
            zooms.append(np.sqrt(area / (SIZE[0] * SIZE[1])))
        turned = moved.others[2][1]
        turns.append(abs(np.degrees(np.arctan2(turned[1, 0], turned[0, 0]))))
        for view, homography in lit.others:
            assert (homography == np.eye(3)).all()
            assert np.abs(np.subtract(view, lit.reference, dtype=float)).mean() > 2
    assert min(zooms) < 0.5 and max(zooms) > 2  # farther, and nearer
    assert max(turns) > 90


def test_the_reference_is_the_middle_of_the_photograph():
    view_to_photograph = middle_of((1000, 480), (320, 240))
    edges = warp_points(np.array([[-0.5, -0.5], [319.5, 239.5]]), view_to_photograph)
    assert edges == pytest.approx(np.array([[179.5, -0.5], [819.5, 479.5]]))


def test_the_command_writes_what_evaluate_reads(photographs, tmp_path, capsys):
    photos, out = tmp_path / 'photos', tmp_path / 'sequences'
    photos.mkdir()
    cv2.imwrite(str(photos / 'coffee.png'), photographs['coffee'][..., ::-1])
    cv2.imwrite(str(photos / 'gray.png'), cv2.cvtColor(photographs['rocket'], cv2.COLOR_RGB2GRAY))
    cv2.imwrite(str(photos / 'small.png'), photographs['coffee'][:100, :100])
    assert main(['make-sequences', str(photos), '-o', str(out), '--size', '320x240']) == 0
    captured = capsys.readouterr()
    assert '4 sequences of 2 photographs' in captured.out
    assert 'skipped' in captured.err and '100x100' in captured.err
    sequences = load_sequences(out, skipped=pytest.fail)
    assert [s.name for s in sequences] == ['i_coffee', 'i_gray', 'v_coffee', 'v_gray']
    light = select_split(sequences, 'illumination')
    figures = evaluate(baseline('sift'), light, size=SIZE, top_k=300).mean()
    assert figures['cor3'] == 1.0 and figures['repeatability'] > 0.4


def test_the_views_of_a_photograph_do_not_depend_on_the_others(photographs, tmp_path):
    photos = tmp_path / 'photos'
    photos.mkdir()
    for name in ('coffee', 'rocket'):
        cv2.imwrite(str(photos / f'{name}.png'), photographs[name][..., ::-1])
    for out, given in (('both', photos), ('one', photos / 'rocket.png')):
        main(['make-sequences', str(given), '-o', str(tmp_path / out), '--size', '160x120'])
    for file in (tmp_path / 'one' / 'v_rocket').iterdir():
        assert file.read_bytes() == (tmp_path / 'both' / 'v_rocket' / file.name).read_bytes()


def test_mistakes_are_named(photographs, tmp_path, capsys):
    photo = tmp_path / 'coffee.png'
    cv2.imwrite(str(photo), photographs['coffee'][:100, :100])
    assert main(['make-sequences', str(photo), '-o', str(tmp_path / 'out')]) == 2
    assert 'none of the photographs' in capsys.readouterr().err
    assert main(['make-sequences', str(photo), '-o', str(tmp_path)]) == 2
    assert 'is not empty' in capsys.readouterr().err
    assert main(['make-sequences', str(photo), '-o', str(photo)]) == 2
    assert 'is a file' in capsys.readouterr().err
