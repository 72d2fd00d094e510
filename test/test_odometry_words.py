"""Visual words: those that ship, those that a user trains, and those that must not be used."""

import json
from dataclasses import replace

import cv2
import numpy as np
import pytest
from models import random_checkpoint, write_random_model, write_responsive_model
from safetensors.numpy import save_file

from kp2d_core import FileError, KeypointDetector
from kp2d_core.checkpoint import (
    WEIGHTS_FOLDER,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
    shipped_models,
)
from kp2d_core.cli import main
from kp2d_core.odometry import Odometry, reconstruction
from kp2d_core.odometry.reconstruction import choose_map_pairs
from kp2d_core.odometry.retrieval import LEARN_FROM, Retrieval, summary
from kp2d_core.odometry.words import SUFFIX, Words, find_words, load_words, save_words
from kp2d_core.views.worlds import photographs as scene_photographs
from kp2d_core.views.worlds import ring, ring_path, view_camera

WITH_WORDS = ('fast', 'half', 'small')
DIGEST = 'ab' * 32


@pytest.fixture
def random():
    return np.random.default_rng(0)


def unit(random, *shape):
    rows = random.normal(size=shape).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def test_models_with_words():
    files = {path.name.removesuffix(SUFFIX) for path in WEIGHTS_FOLDER.glob(f'*{SUFFIX}')}
    assert files == set(WITH_WORDS)
    assert not any('words' in name for name in shipped_models())
    assert sum(path.stat().st_size for path in WEIGHTS_FOLDER.glob(f'*{SUFFIX}')) < 200_000


@pytest.mark.parametrize('name', WITH_WORDS)
def test_the_shipped_words_belong_to_the_shipped_weights(name):
    path = WEIGHTS_FOLDER / f'{name}{SUFFIX}'
    words, checkpoint = load_words(path), load_checkpoint(find_checkpoint(name))
    assert words.belong_to(checkpoint.digest()), (
        f'the weights of {name} have changed: learn its words anew with `kp2d train-words '
        f'--model {name} --data PHOTOGRAPHS -o kp2d_core/weights/{path.name}`'
    )
    assert words.values.shape == (128, checkpoint.architecture.descriptor_size)
    assert words.origin['model'] == name and words.origin['photographs'] == 842
    assert words.origin['descriptors'] > 100_000


def test_words_survive_a_file(tmp_path, random):
    words = Words(unit(random, 5, 16), DIGEST, {'photographs': 3})
    save_words(tmp_path / 'w.safetensors', words)
    found = load_words(tmp_path / 'w.safetensors')
    assert np.allclose(found.values, words.values, atol=1e-3)
    assert np.allclose(np.linalg.norm(found.values, axis=1), 1, atol=1e-6)
    assert (found.digest, found.origin) == (words.digest, words.origin)
    assert found.belong_to(DIGEST) and found.belong_to(DIGEST[:16])
    assert not found.belong_to('ab') and not found.belong_to('') and not found.belong_to('cd' * 32)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda words: words * np.nan, 'NaN or infinity'),
        (lambda words: words * 1.1, 'unit length, one is off by 0.1'),
        (lambda words: words * 0, 'unit length'),
        (lambda words: words[0], 'their shape is'),
        (lambda words: words[:1], '2 to 1024 rows'),
        (lambda words: words[:, :0], 'their shape is'),
    ],
)
def test_bad_words_are_refused(tmp_path, random, change, message):
    path, rows = tmp_path / 'w.safetensors', change(unit(random, 5, 16))
    with pytest.raises(ValueError, match=message):
        Words(rows, DIGEST)
    metadata = {'format': 'kp2d-words-1', 'checkpoint': DIGEST, 'origin': '{}'}
    save_file({'words': np.ascontiguousarray(rows)}, path, metadata)
    with pytest.raises(FileError, match=f'w.safetensors .* words of a model: .*{message}'):
        load_words(path)


@pytest.mark.parametrize(
    'metadata',
    [
        None,
        {'format': 'kp2d', 'checkpoint': DIGEST, 'origin': '{}'},
        {'format': 'kp2d-words-1', 'origin': '{}'},
        {'format': 'kp2d-words-1', 'checkpoint': 'ab', 'origin': '{}'},
        {'format': 'kp2d-words-1', 'checkpoint': DIGEST, 'origin': '[1]'},
        {'format': 'kp2d-words-1', 'checkpoint': DIGEST, 'origin': '{'},
    ],
)
def test_files_that_say_nothing_of_their_words_are_refused(tmp_path, random, metadata):
    path = tmp_path / 'w.safetensors'
    save_file({'words': unit(random, 5, 16)}, path, metadata)
    with pytest.raises(FileError, match='does not hold the words of a model'):
        load_words(path)
    with pytest.raises(FileError, match='does not hold the words'):
        load_words(write_random_model(tmp_path))
    with pytest.raises(FileError, match='there is no file'):
        load_words(tmp_path / 'none')


def test_words_are_found_by_the_weights(tmp_path):
    """By name, in a copy of the model, in an exported model; never by the name alone."""
    small = load_checkpoint(find_checkpoint('small'))
    shipped = find_words('small', small.digest())
    assert shipped is not None and shipped.values.shape == (128, 128)
    copy = tmp_path / 'copy.safetensors'
    save_checkpoint(copy, small)
    assert main(['export', str(copy), '--size', '64x48', '-o', str(tmp_path / 'm.onnx')]) == 0
    for model in (copy, tmp_path / 'm.onnx'):
        runtime = KeypointDetector.load(model).runtime
        assert runtime.digest == small.digest()
        found = find_words(runtime.model, runtime.digest)
        assert found is not None and (found.values == shipped.values).all()
    stranger = random_checkpoint('small')  # descriptors of the same length
    assert stranger.architecture.descriptor_size == 128
    assert find_words('mine.safetensors', stranger.digest()) is None
    assert find_words('small', '') is None
    with pytest.raises(
        FileError, match='words of other weights: .*`kp2d train-words --model small '
    ):
        find_words('small', stranger.digest())


@pytest.fixture
def folder(photographs, tmp_path):
    """Photographs, and a file that is none."""
    (tmp_path / 'photos').mkdir()
    for name, image in photographs.items():
        cv2.imwrite(str(tmp_path / 'photos' / f'{name}.png'), image)
    (tmp_path / 'photos' / 'broken.png').write_bytes(b'no image')
    return tmp_path


def test_words_of_your_own_model(folder, capsys):
    model = write_responsive_model(folder)
    train = ['train-words', '--model', str(model), '--data', str(folder / 'photos')]
    train += ['--words', '8', '--runtime', 'onnxruntime']
    assert main(train) == 0
    told = capsys.readouterr()
    assert 'responsive.words.safetensors: 8 words of 7 photographs' in told.out
    assert 'skipped' in told.err and 'broken.png' in told.err
    digest = load_checkpoint(model).digest()
    words = find_words(model, digest)
    assert words is not None and words.values.shape == (8, 128)
    assert words.origin['photographs'] == 7 and words.origin['model'] == 'responsive'
    assert main([*train, '-o', str(folder / 'again.words.safetensors')]) == 0
    first, again = (folder / f'{name}.words.safetensors' for name in ('responsive', 'again'))
    assert (load_words(first).values == load_words(again).values).all()
    assert main([*train, '--seed', '1', '-o', str(again)]) == 0
    assert (load_words(first).values != load_words(again).values).any()
    capsys.readouterr()
    assert main(['info', str(model)]) == 0
    assert '8, of 7 photographs' in capsys.readouterr().out
    # After more training they no longer belong to it, and it says so.
    save_checkpoint(model, random_checkpoint('half', seed=3))
    assert main(['info', str(model)]) == 0
    assert 'none: ' in (told := capsys.readouterr().out) and 'words of other weights' in told


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--model', 'small'], 'small is a shipped model: give the file to write with -o'),
        (['--model', 'small', '-o', 'w', '--words', '1'], 'must be 2 or more'),
        (['--model', 'small', '-o', 'w', '--words', '1024'], '1024 words need at least 20480'),
        (['--model', 'none', '-o', 'w'], "there is no model 'none'"),
        (['--data', 'nowhere', '-o', 'w'], 'nowhere'),
    ],
)
def test_mistakes_of_train_words(folder, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) if 'must be' in message else np.errstate():
        assert main(['train-words', '--data', 'photos', *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (folder / 'w').exists()


# Use


@pytest.fixture(scope='module')
def places():
    """Descriptors of `small` at 12 places of a corridor, and of the same in other light, aside."""
    scene, camera = ring(scene_photographs()), view_camera((320, 240))
    detector, way = KeypointDetector.load('small'), ring_path(2.0, 22.0)
    aside = np.eye(4)
    aside[0, 3] = 0.3
    found = []
    for pose in way:
        views = scene.view(camera, pose), scene.view(camera, pose @ aside) // 2
        found.append([detector.detect(view, max_keypoints=300) for view in views])
    return found


@pytest.fixture(scope='module')
def words():
    found = find_words('small', load_checkpoint(find_checkpoint('small')).digest())
    assert found is not None
    return found.values


def test_places_are_found_again_with_words_of_photographs(places, words):
    retrieval = Retrieval(words)
    for number, (first, _) in enumerate(places):
        retrieval.add(number, first.descriptors)
    for number, (_, second) in enumerate(places):
        (best, likeness), (_, next_one) = retrieval.query(second.descriptors, 2)
        assert best == number
        assert likeness > 1.5 * next_one


def test_the_first_place_is_known_at_once(places, words):
    """Words that are learned wait for more descriptors; how alike two images look needs words."""
    (first, again), (_, elsewhere) = places[0], places[6]
    assert len(first) < LEARN_FROM
    retrieval = Retrieval(words)
    retrieval.add(0, first.descriptors)
    ((_, likeness),) = retrieval.query(again.descriptors, 4)
    ((_, unlike),) = retrieval.query(elsewhere.descriptors, 4)
    assert likeness > 0.2 > 2 * unlike
    assert not summary(np.empty((0, 128), np.float32), words).any()
    assert retrieval.query(np.empty((0, 128), np.float32), 4) == [(0, 0.0)]


def test_words_that_become_known_late(places, words):
    """The frames that wait for words get these; words that were learned stay."""
    late, early = Retrieval(), Retrieval(words)
    for number, (first, _) in enumerate(places[:4]):
        late.add(number, first.descriptors)
        early.add(number, first.descriptors)
    assert late.words is None
    late.use(words)
    query = places[2][1].descriptors
    assert late.query(query, 4) == early.query(query, 4)
    odometry = Odometry(view_camera((320, 240)))
    odometry.use_words(words)
    assert odometry._retrieval.words is words
    odometry.reset()
    assert odometry._retrieval.words is words


def test_words_of_other_descriptors_are_refused(places, words):
    odometry = Odometry(view_camera((320, 240)), words=words)
    features = places[0][0]
    odometry.update(features, 0.0)
    half = features.descriptors[:, :64]
    half = half / np.linalg.norm(half, axis=1, keepdims=True)
    odometry = Odometry(view_camera((320, 240)), words=words)
    with pytest.raises(ValueError, match='descriptors have 64 values, the words 128'):
        odometry.update(replace(features, descriptors=half), 0.0)
    with pytest.raises(ValueError, match='unit length'):
        Odometry(view_camera(), words=2 * words)


def test_a_map_pairs_photographs_that_look_alike(places, words, monkeypatch):
    monkeypatch.setattr(reconstruction, 'FEW', 10)
    monkeypatch.setattr(reconstruction, 'ALIKE', 1)
    features = [view for pair in places for view in pair]
    pairs = choose_map_pairs(features, False, words)
    assert {(i, i + 1) for i in range(0, len(features), 2)} <= set(pairs)
    assert len(pairs) < 1.5 * len(features)
    monkeypatch.setattr(reconstruction, 'LOOPS', 1)
    there_and_back = [first for first, _ in places] + [second for _, second in places[::-1]]
    pairs = choose_map_pairs(there_and_back, True, words)
    assert {(i, 23 - i) for i in range(7)} <= set(pairs)


def test_the_commands_use_the_words_of_the_model(folder, capsys, monkeypatch):
    """And say why, if they do not."""
    from kp2d_core.commands.odometry import words_of

    monkeypatch.chdir(folder)
    small = words_of(KeypointDetector.load('small'))
    assert small is not None and small.shape == (128, 128)
    assert capsys.readouterr().err == ''
    model = write_random_model(folder)
    save_words(folder / f'half-0{SUFFIX}', Words(unit(np.random.default_rng(0), 4, 128), DIGEST))
    assert words_of(KeypointDetector.load(model)) is None
    assert 'learned from the images' in (told := capsys.readouterr().err)
    assert 'words of other weights' in told


def test_the_node_finds_the_words_by_the_message(places, words):
    pytest.importorskip('nav_msgs')
    from kp2d_ros.odometry.odometry_node import source_of

    digest = load_checkpoint(find_checkpoint('small')).digest()[:16]
    source, problem = source_of(json.dumps({'model': 'small', 'weights': digest}))
    assert not problem and (source.words == words).all()
    for facts in ({'model': 'small'}, {'model': '/robot/mine.safetensors', 'weights': '1' * 16}):
        source, problem = source_of(json.dumps(facts))
        assert source.words is None and not problem  # from an older node; or an own model
    source, problem = source_of(json.dumps({'model': 'small', 'weights': '1' * 16}))
    assert source.words is None and 'words of other weights' in problem
    assert source.digest == '1' * 16
    for text in ('', '[]', '{', '{"weights": "1111111111111111", "model": ""}'):
        source, problem = source_of(text)
        assert source.words is None and problem
