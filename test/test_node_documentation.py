"""The documentation says what the code does."""

import json
import re

import pytest
from conftest import ROOT

pytest.importorskip('rclpy')

from kp2d_core.images import ENCODINGS
from kp2d_ros import parameters
from kp2d_ros.camera import camera_node
from kp2d_ros.outputs import (
    KEYPOINT_FIELDS,
    LAYOUT,
    MATCH_DTYPE,
    STEREO_DTYPE,
    TOPICS,
    keypoint_dtype,
)

NODE = (ROOT / 'docs' / 'node.md').read_text()
MESSAGES = (ROOT / 'docs' / 'messages.md').read_text()


def test_parameters():
    assert parameters.table() in NODE


def test_topics_and_encodings():
    section = NODE.split('## Topics')[1].split('\n## ')[0]
    for topic in TOPICS:
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


@pytest.mark.parametrize(
    ('topic', 'dtype'),
    [('matches', MATCH_DTYPE), ('stereo_matches', STEREO_DTYPE)],
)
def test_bytes_of_matches(topic, dtype):
    section = MESSAGES.split(f'## `{topic}`')[1].split('\n## ')[0]
    kinds = {'f': 'FLOAT32', 'u': 'UINT32', 'i': 'INT32'}
    expected = [
        [str(offset), str(kind.itemsize), name, kinds[kind.kind]]
        for name, (kind, offset) in dtype.fields.items()
    ]
    assert [row[:4] for row in rows(section)] == expected
    assert f'`point_step` is {dtype.itemsize}' in section


def test_bytes_of_keypoints():
    section = MESSAGES.split('## `keypoints`')[1].split('\n## ')[0]
    kinds = {'f': 'FLOAT32', 'u': 'UINT32'}
    fields = keypoint_dtype(128).fields
    expected = [
        [str(fields[name][1]), str(fields[name][0].itemsize), name, kinds[fields[name][0].kind]]
        for name, *_ in KEYPOINT_FIELDS
    ]
    written = [row[:4] for row in rows(section.split('**Which format.**')[0])]
    assert written[: len(expected)] == expected
    start = fields['descriptor'][1]
    assert [row[:2] for row in written[len(expected) :]] == [
        [str(start), size] for size in ('4 D', '2 D', 'D')
    ]


def test_the_layout_has_its_number():
    assert f'**layout {LAYOUT}**' in MESSAGES
    example = json.loads(MESSAGES.split('```json')[1].split('```')[0])
    assert example['layout'] == LAYOUT
