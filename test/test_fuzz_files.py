"""Damaged files and documents give a result or one sentence, never a crash."""

from __future__ import annotations

import io
import json
import warnings
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest

pytest.importorskip('hypothesis')

import skimage.data
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from models import random_checkpoint
from safetensors.numpy import save
from wild import damage, damaged, examples, values

from kp2d_core.camera import Camera, read_calibration
from kp2d_core.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from kp2d_core.checks import parse_json, parse_yaml
from kp2d_core.errors import FileError
from kp2d_core.evaluation.camera_paths import load_camera_path
from kp2d_core.evaluation.hpatches import load_sequences
from kp2d_core.evaluation.onnx_extractor import read_description
from kp2d_core.export.cache import CacheKey, CompiledCache
from kp2d_core.export.graph import build_graph
from kp2d_core.export.quantization import load_calibration
from kp2d_core.export.source import Profile, read_exported
from kp2d_core.image_headers import declared_size
from kp2d_core.images import ENCODINGS, decode, decode_compressed, read_image
from kp2d_core.odometry.words import load_words
from kp2d_core.reference_checkpoint import read_reference_checkpoint
from kp2d_core.training.config import TrainingConfig
from kp2d_core.training.recipes import config_from_dict, override

FORMATS = ('.png', '.jpg', '.webp', '.gif', '.bmp', '.tiff', '.jp2', '.pgm', '.ppm', '.pam',
           '.hdr', '.ras', '.avif')  # fmt: skip


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp('fuzz')


@pytest.fixture(autouse=True)
def quiet():
    """Silence OpenCV, which logs every damaged file."""
    before = cv2.utils.logging.getLogLevel()
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    yield
    cv2.utils.logging.setLogLevel(before)


@cache
def picture(suffix: str) -> bytes:
    photograph = cv2.imread(str(Path(skimage.data.__file__).parent / 'coffee.png'))
    image = cv2.resize(photograph, (48, 40))
    if suffix == '.hdr':
        image = image.astype(np.float32) / 255
    options = [cv2.IMWRITE_JPEG_PROGRESSIVE, 1] if suffix == '.jpg' else []
    try:
        written, data = cv2.imencode(suffix, image[..., 0] if suffix == '.pgm' else image, options)
    except cv2.error:
        written = False
    return data.tobytes() if written else picture('.png')  # not every OpenCV writes all


@examples(120)
@given(st.sampled_from(FORMATS).flatmap(lambda suffix: damaged(picture(suffix), 64)))
def test_image_files(data):
    try:
        image = decode_compressed(SimpleNamespace(format='jpeg', data=data))
    except ValueError as error:
        assert len(str(error)) < 400
        return
    width, height = declared_size(data)
    assert image.dtype == np.uint8
    assert image.shape[0] <= height and image.shape[1] <= width


@examples(60)
@given(
    encoding=st.one_of(st.sampled_from(ENCODINGS), st.text(max_size=8)),
    width=st.one_of(st.integers(0, 40), st.integers(0, 2**32 - 1)),
    height=st.one_of(st.integers(0, 40), st.integers(0, 2**32 - 1)),
    step=st.one_of(st.none(), st.integers(0, 400), st.integers(0, 2**32 - 1)),
    big=st.integers(0, 255),
    size=st.integers(0, 20_000),
)
def test_raw_messages(encoding, width, height, step, big, size):
    message = SimpleNamespace(
        encoding=encoding, width=width, height=height, is_bigendian=big, data=bytes(size),
        step=width * 3 if step is None else step,
    )  # fmt: skip
    try:
        image = decode(message)
    except ValueError as error:
        assert len(str(error)) < 800 and '\n' not in str(error)
        return
    assert image.dtype == np.uint8 and image.shape[:2] == (height, width)


@cache
def small() -> Checkpoint:
    return random_checkpoint('small', 0)


@cache
def model_file() -> bytes:
    metadata = {
        'format': 'kp2d', 'architecture': json.dumps(small().architecture.to_dict()), 'step': '5',
        'evaluation': '{"cor1": 0.5}', 'notes': 'none',
    }  # fmt: skip
    return save(small().weights, metadata)


@examples(30)
@given(damage(model_file(), 12_000))
def test_model_files(folder, data):
    path = folder / 'm.safetensors'
    path.write_bytes(data())
    try:
        found = load_checkpoint(path)
    except FileError:
        return
    assert found.weights.keys() == small().weights.keys()
    assert all(np.isfinite(value).all() for value in found.weights.values())


@cache
def words_file() -> bytes:
    rows = np.eye(4, 8, dtype=np.float32)
    metadata = {'format': 'kp2d-words-1', 'checkpoint': small().digest(), 'origin': '{"seed": 0}'}
    return save({'words': rows}, metadata)


@examples(60)
@given(damage(words_file(), 400))
def test_files_of_visual_words(folder, data):
    path = folder / 'm.words.safetensors'
    path.write_bytes(data())
    try:
        found = load_words(path)
    except FileError as error:
        assert len(str(error)) < 600
        return
    assert np.allclose(np.linalg.norm(found.values, axis=1), 1, atol=1e-5)


@cache
def authors_file(zipped: bool) -> bytes:
    file = io.BytesIO()
    state = {
        name: torch.from_numpy(value) for name, value in random_checkpoint('v0').weights.items()
    }
    config = {'model': {'params': {'do_cross': False, 'do_upsample': False}}}
    content = {'state_dict': state, 'config': config}
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


@examples(20)
@given(st.booleans().flatmap(lambda zipped: damage(authors_file(zipped), 14_000)))
def test_authors_files(folder, data):
    path = folder / 'a.ckpt'
    path.write_bytes(data())
    try:
        read_reference_checkpoint(path)
    except FileError as error:
        assert len(str(error)) < 600


@cache
def exported_file() -> bytes:
    return build_graph(small(), Profile(48, 64, 20)).SerializeToString()


@examples(20)
@given(damage(exported_file()))
def test_exported_files(folder, data):
    path = folder / 'm.onnx'
    path.write_bytes(data())
    try:
        read_exported(path)
    except FileError:
        return


@examples(40)
@given(
    st.one_of(
        st.binary(max_size=200),
        values.map(lambda value: json.dumps(value, default=str).encode()),
        st.fixed_dictionaries({'format': st.just('kp2d-int8-1'), 'ranges': values}).map(
            lambda value: json.dumps(value, default=str).encode()
        ),
    )
)
def test_int8_ranges(folder, data):
    path = folder / 'm.int8.json'
    path.write_bytes(data)
    with pytest.raises(FileError):
        load_calibration(path, small())


@examples(120)
@given(st.one_of(st.text(max_size=200), values.map(lambda v: json.dumps(v, default=str))))
def test_documents(text):
    for parse in (parse_json, parse_yaml):
        try:
            document = parse(text)
        except ValueError as error:
            assert len(str(error)) < 1000
        else:
            json.dumps(document, default=str, allow_nan=False, skipkeys=True)


def names_of(values, path=()) -> list[tuple[str, ...]]:
    found = []
    for name, value in values.items():
        found += names_of(value, (*path, name)) if isinstance(value, dict) else [(*path, name)]
    return found


SETTINGS = names_of(TrainingConfig().to_dict())


@examples(120)
@given(st.lists(st.tuples(st.sampled_from(SETTINGS), values), max_size=3), values)
def test_recipes(changes, nonsense):
    document: dict = {}
    for path, value in changes:
        inner = document
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = value
    for attempt in (document, nonsense):
        try:
            config = config_from_dict(attempt)
        except ValueError as error:
            assert len(str(error)) < 600
        else:
            assert config_from_dict(json.loads(json.dumps(config.to_dict()))) == config


@examples(40)
@given(st.sampled_from(SETTINGS), st.text(max_size=40))
def test_settings_of_the_command_line(path, text):
    try:
        override(TrainingConfig(), [f'{".".join(path)}={text}'])
    except ValueError as error:
        assert len(str(error)) < 600


CALIBRATION = {
    'image_width': 64, 'image_height': 48, 'distortion_model': 'plumb_bob',
    'camera_matrix': {'data': [50.0, 0, 32, 0, 50, 24, 0, 0, 1]},
    'distortion_coefficients': {'data': [0.1, 0, 0, 0, 0]},
    'rectification_matrix': {'data': [1.0, 0, 0, 0, 1, 0, 0, 0, 1]},
    'projection_matrix': {'data': [50.0, 0, 32, 0, 0, 50, 24, 0, 0, 0, 1, 0]},
}  # fmt: skip


@examples(60)
@given(
    st.one_of(
        damaged(yaml.safe_dump(CALIBRATION).encode()),
        st.tuples(st.sampled_from(sorted(CALIBRATION)), values).map(
            lambda change: yaml.safe_dump(
                CALIBRATION | {change[0]: json.loads(json.dumps(change[1], default=str))}
            ).encode()
        ),
    )
)
def test_calibrations(folder, data):
    path = folder / 'camera.yaml'
    path.write_bytes(data)
    try:
        info = read_calibration(path)
    except FileError:
        return
    assert np.isfinite([*info.k, *info.d, *info.r, *info.p]).all()
    try:
        Camera.create((info.width, info.height), info.k, info.d, info.distortion_model)
    except ValueError:
        return


DESCRIPTION = b'model: m.onnx\nscale: 1/255\nmean: [0, 0, 0]\nstd: 1\nmultiple_of: 8\n'


@examples(60)
@given(damaged(DESCRIPTION))
def test_descriptions_of_extractors(folder, data):
    path = folder / 'extractor.yaml'
    path.write_bytes(data)
    try:
        read_description(path)
    except FileError:
        return


@examples(30)
@given(damaged(b'1.0 0.1 3\n0 1 2\n0.0001 0 1\n'))
def test_homographies(folder, data):
    sequence = folder / 'sequences' / 'v_one'
    sequence.mkdir(parents=True, exist_ok=True)
    for number in (1, 2):
        (sequence / f'{number}.png').write_bytes(picture('.png'))
    (sequence / 'H_1_2').write_bytes(data)
    try:
        (found,) = load_sequences(folder / 'sequences')
    except FileError:
        return
    assert np.isfinite(found.homographies[2]).all()


PATHS = {
    'rgb.txt': b'# time file\n1.00 a.png\n1.04 a.png\n',
    'groundtruth.txt': b'0.99 0 0 0 0 0 0 1\n1.01 0 0 1 0 0 0 1\n1.05 0 0 2 0 0 0.1 1\n',
    'intrinsics.txt': b'50 50 32 24 0 0 0 0 0\n',
}


@examples(40)
@given(st.sampled_from(sorted(PATHS)).flatmap(lambda n: st.tuples(st.just(n), damaged(PATHS[n]))))
def test_camera_paths(folder, change):
    path = folder / 'path'
    path.mkdir(exist_ok=True)
    (path / 'a.png').write_bytes(picture('.png'))
    for name, data in (PATHS | dict([change])).items():
        (path / name).write_bytes(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            found = load_camera_path(path)
    except FileError:
        return
    assert np.isfinite(found.poses).all()


@examples(30)
@given(st.data())
def test_compiled_graphs(folder, data):
    cache_ = CompiledCache(folder / 'engines')
    key = CacheKey.of(b'graph', Profile(48, 64, 20), 'library', 'device')
    good = bytes(range(256)) * 8
    cache_.put(key, good)
    whole = cache_.path(key).read_bytes()
    cache_.path(key).write_bytes(data.draw(damaged(whole, 400)))
    assert cache_.get(key) in (None, good)
    assert cache_.get_or_build(key, lambda: good)[0] == good


def test_the_undamaged_ones_are_read(folder):
    """Otherwise the tests above would pass if everything were refused."""
    for suffix in FORMATS:
        assert decode_compressed(SimpleNamespace(format='', data=picture(suffix))).size
    (folder / 'a.png').write_bytes(picture('.png'))
    assert read_image(folder / 'a.png').shape == (40, 48, 3)
    save_checkpoint(folder / 'good.safetensors', small())
    (folder / 'made.safetensors').write_bytes(model_file())
    assert load_checkpoint(folder / 'made.safetensors').digest() == small().digest()
    for zipped in (True, False):
        (folder / 'good.ckpt').write_bytes(authors_file(zipped))
        assert read_reference_checkpoint(folder / 'good.ckpt').architecture.variant == 'v0'
    (folder / 'good.onnx').write_bytes(exported_file())
    assert read_exported(folder / 'good.onnx').profile == Profile(48, 64, 20)
    (folder / 'camera.yaml').write_text(yaml.safe_dump(CALIBRATION))
    assert read_calibration(folder / 'camera.yaml').width == 64
