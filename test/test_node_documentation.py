"""The documentation says what the code does."""

import re

import pytest
from conftest import ROOT

pytest.importorskip('rclpy')

from kp2d_core.image_messages import ENCODINGS
from kp2d_ros import messages, parameters
from kp2d_ros.camera import camera_node

NODE = (ROOT / 'docs' / 'node.md').read_text()
MESSAGES = (ROOT / 'docs' / 'messages.md').read_text()


def test_parameters():
    assert parameters.table() in NODE


def test_topics_and_encodings():
    section = NODE.split('## Topics')[1].split('\n## ')[0]
    for topic in messages.TOPICS:
        assert f'`{topic}`' in section
    for encoding in ENCODINGS:
        name = re.sub(r'^bayer_.*', 'bayer_', encoding).removesuffix('16') or encoding
        assert name in section, encoding


def test_camera_parameters():
    section = NODE.split('## The camera node')[1].split('\n## ')[0]
    source = (ROOT / 'kp2d_ros' / 'camera' / 'camera_node.py').read_text()
    for name in re.findall(r"_declare\(\s*'(\w+)'", source):
        assert f'`{name}`' in section, name
    assert all(encoding in section for encoding in camera_node.ENCODINGS)


def rows(section: str) -> list[list[str]]:
    lines = [line for line in section.splitlines() if line.startswith('| ')]
    return [[cell.strip(' `') for cell in line.strip('|').split('|')] for line in lines[1:]]


def test_bytes_of_matches():
    section = MESSAGES.split('## `matches`')[1].split('\n## ')[0]
    kinds = {'f': 'FLOAT32', 'u': 'UINT32', 'i': 'INT32'}
    expected = [
        [str(offset), str(kind.itemsize), name, kinds[kind.kind]]
        for name, (kind, offset) in messages.MATCH_DTYPE.fields.items()
    ]
    assert [row[:4] for row in rows(section)] == expected
    assert f'`point_step` is {messages.MATCH_DTYPE.itemsize}' in section


def test_bytes_of_keypoints():
    section = MESSAGES.split('## `keypoints`')[1].split('\n## ')[0]
    fields = messages.keypoint_dtype(128, bearings=True).fields
    written = {row[2]: row for row in rows(section)}
    for name in ('x', 'y', 'z', 'score', 'track_id', 'track_age'):
        kind, offset = fields[name]
        assert written[name][:2] == [str(offset), str(kind.itemsize)]
    assert fields['bearing_x'][1] == 24 and fields['bearing_y'][1] == 28
    assert fields['descriptor'][1] == 32
    assert messages.keypoint_dtype(128).fields['descriptor'][1] == 24
    assert 1000 * messages.keypoint_dtype(128).itemsize == 536_000
    assert 1000 * messages.keypoint_dtype(128, 'int8').itemsize == 152_000
