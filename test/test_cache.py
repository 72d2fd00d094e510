"""The cache of compiled graphs: complete files, found again, limited in size."""

from __future__ import annotations

import os

import pytest

from kp2d_core.errors import FileError
from kp2d_core.export.cache import CacheKey, CompiledCache
from kp2d_core.export.source import Profile

PROFILE = Profile(48, 64, 20)


def key(number: int) -> CacheKey:
    return CacheKey.of(b'graph %d' % number, PROFILE, 'library 1', 'a device')


def test_what_was_not_used_for_longest_goes(tmp_path):
    cache = CompiledCache(tmp_path, most_bytes=10_000)
    for number in range(3):
        cache.put(key(number), bytes(3000))
        os.utime(cache.path(key(number)), (number, number))
    assert cache.get(key(0)) is not None  # used now: number 1 is the oldest
    cache.put(key(3), bytes(3000))
    assert [cache.get(key(number)) is not None for number in range(4)] == [True, False, True, True]
    cache.put(key(4), bytes(50_000))  # more than the bound: it alone stays
    assert list(tmp_path.iterdir()) == [cache.path(key(4))]


def test_what_earlier_versions_left_goes_too_but_nothing_foreign(tmp_path):
    (tmp_path / 'old.blob').write_bytes(bytes(9000))
    os.utime(tmp_path / 'old.blob', (1, 1))
    (tmp_path / 'notes.txt').write_bytes(bytes(9000))
    CompiledCache(tmp_path, most_bytes=10_000).put(key(0), bytes(3000))
    assert {path.suffix for path in tmp_path.iterdir()} == {'.engine', '.txt'}


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def build() -> bytes:
        raise ValueError('not this one')

    with pytest.raises(ValueError, match='not this one'):
        CompiledCache(tmp_path).get_or_build(key(0), build)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path, caplog):
    (tmp_path / 'file').write_text('')
    cache = CompiledCache(tmp_path / 'file' / 'engines')
    assert cache.get_or_build(key(0), lambda: b'compiled') == (b'compiled', True)
    assert 'the next start compiles again' in caplog.text
    with pytest.raises(FileError, match='cannot write .*Not a directory'):
        cache.get_or_build(key(0), lambda: b'compiled', must_keep=True)
