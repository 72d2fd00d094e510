"""Validation during training: made pairs, photographs, HPatches sequences, pictures."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from models import random_checkpoint

from kp2d_core.errors import FileError
from kp2d_core.geometry import warp_points
from kp2d_core.training.validation import make_validation, quality

METRICS = {'quality', 'repeatability', 'localization', 'cor1', 'cor3', 'cor5', 'mscore', 'auc3'}


@pytest.fixture(scope='module')
def sequences(tmp_path_factory, photographs):
    """Two sequences of two images, the second a shifted copy of the first."""
    folder = tmp_path_factory.mktemp('sequences')
    for name in ('coffee', 'chelsea'):
        (folder / f'v_{name}').mkdir()
        image = cv2.resize(photographs[name], (328, 248))[..., ::-1]
        cv2.imwrite(str(folder / f'v_{name}' / '1.png'), image[:240, :320])
        cv2.imwrite(str(folder / f'v_{name}' / '2.png'), image[8:, 8:])
        matrix = np.array([[1, 0, -8], [0, 1, -8], [0, 0, 1.0]])
        np.savetxt(folder / f'v_{name}' / 'H_1_2', matrix)
    return folder


def test_held_out_photographs_become_pairs_that_fit(photographs):
    entries = [photographs[name] for name in ('coffee', 'chelsea', 'astronaut', 'rocket')]
    validation = make_validation(None, entries)
    again = make_validation(None, entries)
    assert len(validation.pairs) == 4
    for one, other in zip(validation.pairs, again.pairs, strict=True):
        np.testing.assert_array_equal(one.first, other.first)  # the same for every run
        assert one.first.shape == (240, 320, 3)
        assert np.isfinite(warp_points(np.array([[160.0, 120.0]]), one.first_to_second)).all()
    figures = validation.measure(random_checkpoint('half'), 'cpu')
    assert set(figures) == METRICS | {'shift4'}
    assert all(np.isfinite(value) for value in figures.values())


def test_nothing_held_out_is_no_validation():
    assert make_validation(None, []) is None


def test_sequences_are_measured_as_the_evaluation_does(sequences):
    from functools import partial

    from kp2d_core.detector import KeypointDetector
    from kp2d_core.evaluation.hpatches import load_sequences
    from kp2d_core.evaluation.protocol import evaluate
    from kp2d_core.runtimes.torch import TorchRuntime

    checkpoint = random_checkpoint('half')
    figures = make_validation(sequences, []).measure(checkpoint, 'cpu')
    detector = KeypointDetector(TorchRuntime(checkpoint))
    expected = evaluate(partial(detector.detect, scales=(1,)), load_sequences(sequences)).mean()
    assert figures['mscore'] == expected['mscore'] > 0
    assert figures['repeatability'] == expected['repeatability'] > 0.5  # shifted by a cell
    assert figures['quality'] == pytest.approx(quality(expected))


def test_pictures_show_the_pair(sequences):
    validation = make_validation(sequences, [])
    drawn = validation.draw(random_checkpoint('half'), 'cpu', 1)
    assert set(drawn) == {'pair 0/keypoints', 'pair 0/scores', 'pair 0/matches'}
    for picture in drawn.values():
        assert picture.shape == (240, 640, 3) and picture.dtype == np.uint8
    assert not np.array_equal(drawn['pair 0/keypoints'], drawn['pair 0/matches'])


def test_a_folder_of_photographs_can_be_validated_on(tmp_path, photographs):
    cv2.imwrite(str(tmp_path / 'coffee.png'), photographs['coffee'])
    assert len(make_validation(tmp_path, []).pairs) == 1


def test_unreadable_photographs_held_out_do_not_stop_a_run(tmp_path, capsys):
    (tmp_path / 'broken.png').write_bytes(b'no image')
    assert make_validation(None, [tmp_path / 'broken.png']) is None
    assert 'nothing is validated' in capsys.readouterr().err
    with pytest.raises(FileError, match='none of the 1 images'):
        make_validation(tmp_path, [])
