"""The protocol from folders to figures, with OpenCV's methods as extractors."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from sequences import write_sequences

from kp2d_core.errors import FileError
from kp2d_core.evaluation.hpatches import load_sequences, select_split
from kp2d_core.evaluation.methods import BASELINES, baseline
from kp2d_core.evaluation.metrics import descriptor_distances
from kp2d_core.evaluation.protocol import METRICS, evaluate, once, split_evaluation
from kp2d_core.evaluation.study import Study, paper_rows, rows_beside, to_json
from kp2d_core.evaluation.tables import format_study
from kp2d_core.features import Features, join_features, unit_descriptors


@pytest.fixture(scope='module')
def sequences(tmp_path_factory, photographs):
    return load_sequences(write_sequences(tmp_path_factory.mktemp('data'), photographs))


@pytest.fixture(scope='module')
def sift(sequences):
    return evaluate(baseline('sift'), sequences, seeds=3, name='sift')


def nothing(image):
    return Features(np.empty((0, 2), np.float32), np.empty(0, np.float32), np.empty((0, 8)))


def test_identical_images_are_perfect(sift):
    same = sift.only(['i_same']).mean()
    assert same['repeatability'] == same['mscore'] == same['precision'] == 1
    assert same['localization'] == 0
    assert same['cor1'] == same['cor3'] == same['cor5'] == 1
    assert max(sift.only(['i_same']).pairs[0].corner_errors) < 1e-3


def test_figures_are_plausible_and_means_of_the_pairs(sift):
    mean = sift.mean()
    assert len(sift.pairs) == 5
    assert 0.4 < mean['mscore'] < 1 and 0.4 < mean['repeatability'] < 1
    assert 0 < mean['localization'] < 2
    for name in METRICS:
        assert mean[name] == pytest.approx(np.mean([pair.metrics()[name] for pair in sift.pairs]))
    assert sift.failures() == 0
    moved = sift.only(['v_astronaut']).mean()  # its homographies are scaled with the images
    assert moved['mscore'] > 0.4 and moved['cor3'] == 1
    assert len(sift.milliseconds) == 8 and sift.time() > 0


def test_two_evaluations_agree(sequences, sift):
    assert evaluate(baseline('sift'), sequences, seeds=3).pairs == sift.pairs


def test_splits_share_the_pairs(sequences, sift):
    parts = split_evaluation(sift, sequences, ['all', 'illumination', 'viewpoint', 'coffee', 'x'])
    assert {split: len(part.pairs) for split, part in parts.items()} == {
        'all': 5, 'illumination': 3, 'viewpoint': 2, 'coffee': 2,
    }  # fmt: skip


def test_every_image_is_extracted_once_at_the_size_asked_for(sequences):
    extract, shapes = baseline('orb'), []

    def watched(image):
        shapes.append(image.shape)
        return extract(image)

    pairs = []
    evaluate(watched, sequences, size=(160, 120), watch=lambda *pair: pairs.append(pair))
    assert shapes == [(120, 160, 3)] * 8
    assert [(pair.sequence, pair.target) for pair, _ in pairs][:3] == [
        ('i_coffee', 2), ('i_coffee', 3), ('i_same', 2),
    ]  # fmt: skip


def test_order_of_the_features_does_not_matter(sequences, sift):
    extract = baseline('sift')

    def backwards(image):
        return extract(image)[::-1]

    shuffled = evaluate(backwards, sequences, seeds=1).mean()
    for name in ('repeatability', 'localization', 'mscore'):
        assert shuffled[name] == pytest.approx(sift.mean()[name], abs=0.02)


def test_an_extractor_that_finds_nothing_fails_every_pair(sequences):
    evaluation = evaluate(nothing, sequences, seeds=2)
    assert evaluation.failures() == len(evaluation.pairs) == 5
    mean = evaluation.mean()
    assert all(math.isfinite(value) and value >= 0 for value in mean.values())
    assert mean['localization'] == mean['error'] == 3
    assert not any(mean[name] for name in mean if name not in ('localization', 'error'))
    study = Study('data', (320, 240), 300, 2, ['all'], sequences=sequences,
                  methods={'nothing': ''}, evaluations={'nothing': evaluation})  # fmt: skip
    written = json.dumps(to_json(study), allow_nan=False)
    assert json.loads(written)['methods']['nothing']['pairs'][0]['corner_errors'] == [None, None]
    assert ' nan' not in format_study(study)


def test_a_damaged_image_is_named(tmp_path, photographs):
    folder = write_sequences(tmp_path, photographs)
    (folder / 'i_same' / '2.png').write_bytes(b'not an image')
    with pytest.raises(FileError, match='2.png is not an image'):
        evaluate(nothing, load_sequences(folder))


@pytest.mark.parametrize('wrong', [{'top_k': 0}, {'seeds': 0}, {'size': (0, 240)}])
def test_settings_are_checked(sequences, wrong):
    with pytest.raises(ValueError, match='must be 1 or more'):
        evaluate(nothing, sequences, **wrong)
    with pytest.raises(ValueError, match='no sequence'):
        evaluate(nothing, [])
    with pytest.raises(ValueError, match='nms_radius must be 0 or more'):
        evaluate(nothing, sequences, nms_radius=-1)


def test_copies_gain_nothing_unless_they_count(sequences, sift):
    """With every point three times, half a pixel apart, the figures stay the same."""
    extract, random = baseline('sift'), np.random.default_rng(0)

    def copying(image):
        best = extract(image)[:300]
        found = once(best, 3)
        copies = [found] + [
            replace(found, keypoints=found.keypoints + random.normal(0, 0.4, (len(found), 2)))
            for _ in range(2)
        ]
        joined = join_features(copies)
        rank = np.arange(len(found))  # copies stand right behind what they are of
        return joined[np.argsort(np.concatenate([rank, rank + 0.3, rank + 0.6]))]

    def honest(image):
        return once(extract(image)[:300], 3)

    once_each = evaluate(honest, sequences, nms_radius=3).mean()
    suppressed = evaluate(copying, sequences, nms_radius=3).mean()
    counted = evaluate(copying, sequences, nms_radius=0).mean()
    for name in ('repeatability', 'localization', 'mscore', 'right', 'error'):
        assert suppressed[name] == pytest.approx(once_each[name], abs=0.02), name
    assert counted['copies'] == suppressed['copies'] > 0.5 > once_each['copies'] == 0
    assert counted['right'] < 0.7 * once_each['right']


def test_the_error_is_pooled_over_all_right_matches(sift):
    errors = np.concatenate([pair.errors for pair in sift.pairs])
    mean = sift.mean()
    assert mean['error'] == pytest.approx(np.median(errors))
    assert mean['right'] == pytest.approx(len(errors) / len(sift.pairs))
    assert 0 < errors.max() < 3
    own = sift.only(['v_astronaut'])
    assert own.mean()['error'] == pytest.approx(np.median(np.concatenate(
        [pair.errors for pair in own.pairs])))  # fmt: skip


@pytest.mark.parametrize('name', BASELINES)
def test_baselines(name, photographs):
    features = baseline(name)(photographs['astronaut'])
    assert len(features) > 200 and len(features.descriptors) == len(features)
    assert (np.diff(features.scores) <= 0).all()
    assert np.linalg.norm(features.descriptors, axis=1) == pytest.approx(1, abs=1e-4)
    assert features.image_size == (512, 512)
    assert len(baseline(name)(np.zeros((120, 160, 3), np.uint8))) == 0


def test_unknown_baseline():
    with pytest.raises(ValueError, match="no baseline 'surf': choose from sift, orb"):
        baseline('surf')


def test_unit_vectors_of_bits_keep_the_hamming_order():
    bits = np.random.default_rng(0).integers(0, 256, (40, 61), np.uint8)
    hamming = np.unpackbits(bits[:, None] ^ bits[None], axis=2).sum(axis=2)
    unit = unit_descriptors(bits)
    points = np.zeros((40, 2), np.float32)
    features = Features(points, points[:, 0], unit)
    distances = descriptor_distances(features, features)
    assert distances == pytest.approx(hamming * 4 / (61 * 8), abs=1e-5)


def test_the_papers_tables_are_whole():
    rows = paper_rows((320, 240), 300, 'all')
    methods = [row.method for row in rows]
    assert {f'KP2D V{number}' for number in range(5)} <= set(methods)
    assert {'ORB', 'SURF', 'BRISK', 'SIFT', 'SuperPoint', 'UnsuperPoint', 'KP2D'} <= set(methods)
    for size, top_k in (((320, 240), 300), ((640, 480), 1000)):
        for split in ('all', 'illumination', 'viewpoint', 'bark', 'v_boat', 'graffiti'):
            for row in paper_rows(size, top_k, split):
                assert set(row.metrics) == set(METRICS), row
                shares = [value for name, value in row.metrics.items() if name != 'localization']
                assert all(0 <= share <= 1 for share in shares)
                assert row.metrics['cor1'] <= row.metrics['cor3'] <= row.metrics['cor5']
    assert len(paper_rows((640, 480), 1000, 'all')) == 11
    assert paper_rows((640, 480), 300, 'all') == ()
    sift = next(row for row in paper_rows((320, 240), 300, 'v_graffiti') if row.method == 'SIFT')
    assert (sift.metrics['repeatability'], sift.metrics['mscore']) == (0.515, 0.237)


def test_which_rows_stand_beside_ours():
    def methods(which):
        rows = rows_beside(['sift', 'mine'], (320, 240), 300, 'bark', which)
        return [row.method for row in rows]

    assert methods('same') == ['KP2D', 'SIFT']
    assert methods('all') == ['KP2D', 'ORB', 'SIFT']
    assert methods('none') == []


def test_agreement_with_the_paper(shared_data):
    sequences = load_sequences(shared_data / 'hpatches_mini', ['graffiti', 'bark'])
    for name in ('sift', 'orb'):
        evaluation = evaluate(baseline(name), sequences, nms_radius=0, truth='paper')
        for sequence in ('graffiti', 'bark'):
            ours = evaluation.only([f'v_{sequence}']).mean()
            [paper] = [
                row.metrics
                for row in paper_rows((320, 240), 300, sequence)
                if row.method == name.upper()
            ]
            for metric in ('repeatability', 'mscore'):
                assert ours[metric] == pytest.approx(paper[metric], abs=0.03), (name, sequence)


def test_refined_matches_are_more_exact(sequences):
    def coarse(image):
        """SIFT's points, rounded to whole pixels."""
        found = baseline('sift')(image)
        return replace(found, keypoints=np.rint(found.keypoints))

    moved = select_split(sequences, 'viewpoint')  # else rounded points match exactly
    evaluation = evaluate(coarse, moved, seeds=2, refine=True, name='coarse')
    before, after = evaluation.mean(), evaluation.refined.mean()
    assert after['error'] < 0.5 * before['error']
    assert after['right'] > 0.8 * before['right']
    assert after['precision'] > before['precision']
    assert after['auc1'] > before['auc1']
    for name in ('repeatability', 'localization', 'mscore', 'copies'):
        assert after[name] == before[name]
    assert evaluate(coarse, moved).refined is None
