"""Checks of numbers and documents: finite, in range, limited in size; else a ValueError."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from kp2d_core.checks import number, parse_json, parse_yaml, shown, whole

HUGE = 10**400


@pytest.mark.parametrize('value', [3, np.int64(3), np.uint8(3)])
def test_whole_numbers_of_python_and_numpy(value):
    result = whole(value, 'n', least=1, most=3)
    assert result == 3 and type(result) is int


@pytest.mark.parametrize(
    ('value', 'message'),
    [
        (3.0, 'n must be a whole number, got 3.0'),
        ('3', "n must be a whole number, got '3'"),
        (True, 'n must be a whole number, got True'),
        (np.array([1, 2]), 'n must be a whole number'),
        (None, 'n must be a whole number, got None'),
        (0, 'n must be 1 or more, got 0'),
        (HUGE, 'n must be at most 2147483647, got 1000.*000'),
        (10**5000, 'n must be at most 2147483647, got a number of 16610 bits'),
    ],
    ids=map(str, count()),  # some of them are too long
)
def test_what_is_no_whole_number_is_named(value, message):
    with pytest.raises(ValueError, match=f'^{message}') as error:
        whole(value, 'n', least=1)
    assert len(str(error.value)) < 150


@pytest.mark.parametrize(
    ('value', 'message'),
    [
        (float('nan'), 'x must be a finite number, got nan'),
        (float('-inf'), 'x must be a finite number'),
        (np.float32('inf'), 'x must be a finite number'),
        (HUGE, 'x must be a finite number'),
        ('1', "x must be a number, got '1'"),
        (True, 'x must be a number'),
        ([1], 'x must be a number'),
        (-0.5, 'x must be 0 or more, got -0.5'),
        (1e300, r'x must be at most 1e\+09, got 1e\+300'),
    ],
    ids=map(str, count()),  # some of them are too long
)
def test_what_is_no_number_is_named(value, message):
    with pytest.raises(ValueError, match=f'^{message}'):
        number(value, 'x', least=0, most=1e9)
    assert number(np.float32(0.5), 'x', above=0) == 0.5 and number(2, 'x') == 2.0


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('{"a": Infinity}', 'Infinity is not a JSON number'),
        ('{"a": [NaN]}', 'NaN is not a JSON number'),
        ('{"a": 1e400}', 'inf is not a finite number'),
        (f'[{HUGE}]', 'too large a number'),
        ('[' * 100_000, 'nested too deep'),
        ('[' * 50 + ']' * 50, 'nested too deep'),
        ('[' + '0,' * 200_000 + '0]', 'more than 100000 values'),
        ('"' + 'x' * (1 << 20) + '"', 'too large'),
        ('{', 'Expecting'),
        ('', 'Expecting'),
    ],
    ids=map(str, count()),  # some of them are too long
)
def test_wild_json_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_json(text)


LAUGHS = 'a: &a [1,1,1,1,1,1,1,1,1]\n' + ''.join(
    f'{chr(98 + i)}: &{chr(98 + i)} [{",".join([f"*{chr(97 + i)}"] * 9)}]\n' for i in range(9)
)


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('a: .nan', 'nan is not a finite number'),
        ('a: -.inf', '-inf is not a finite number'),
        (f'a: {HUGE}', 'too large a number'),
        ('a: ' + '[' * 5000, 'nested too deep'),
        ('&a [*a]', 'nested too deep'),
        (LAUGHS, 'more than 100000 values'),  # 600 bytes, 3 GB if written out
        ('? [a]\n: b', 'not YAML'),
        ('a: !!python/object/apply:os.system [ls]', 'not YAML'),
        ('a: 0000-00-00', '.'),
        ('\x00', 'not YAML'),
    ],
    ids=map(str, count()),  # some of them are too long
)
def test_wild_yaml_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_yaml(text)


def test_plain_documents_are_read():
    assert parse_json('{"a": [1, 2.5, null, "x"]}') == {'a': [1, 2.5, None, 'x']}
    assert parse_yaml('a: [1, 2.5, ~, x]\nb: &b {c: 1}\nd: *b') == {
        'a': [1, 2.5, None, 'x'], 'b': {'c': 1}, 'd': {'c': 1},
    }  # fmt: skip


def test_a_value_is_told_in_a_line():
    assert shown('a\nb\x1b[31m') == r"'a\nb\x1b[31m'"
    for value in ('x' * 10_000, list(range(10_000)), {i: i for i in range(100)}, 10**4000):
        assert len(shown(value)) < 150
