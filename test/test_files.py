"""Files are complete or absent, even if a process is killed; folders are locked."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from kp2d_core import files
from kp2d_core.errors import FileError
from kp2d_core.files import MARK, atomic_write, read_file, read_text, remove_leftovers, sole_use

WRITER = """
import sys, time
from kp2d_core.files import atomic_write
with atomic_write(sys.argv[1]) as temporary:
    temporary.write_bytes(b'half of it')
    print('writing', flush=True)
    time.sleep(60)
"""


def start_writer(path) -> subprocess.Popen:
    """A process in the middle of writing."""
    process = subprocess.Popen(
        [sys.executable, '-c', WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == 'writing\n'
    return process


def parts(folder) -> list[str]:
    return [path.name for path in folder.iterdir() if MARK in path.name]


@pytest.fixture
def next_start(monkeypatch):
    """Like a process that has written nothing yet."""
    monkeypatch.setattr(files, '_cleaned', set())


def test_what_a_killed_process_left_goes_at_the_next_start(tmp_path, next_start):
    writer = start_writer(tmp_path / 'state.safetensors')
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    (left,) = parts(tmp_path)
    assert left.startswith('.state.safetensors.') and left.endswith('.safetensors')
    (tmp_path / '.other.txt').write_text('not ours')
    with atomic_write(tmp_path / 'another.txt') as temporary:
        temporary.write_text('whole')
    assert {path.name for path in tmp_path.iterdir()} == {'another.txt', '.other.txt'}


def test_what_another_process_is_writing_stays(tmp_path, next_start):
    writer = start_writer(tmp_path / 'a.bin')
    try:
        remove_leftovers(tmp_path)
        with atomic_write(tmp_path / 'b.bin') as temporary:
            temporary.write_bytes(b'b')
        assert len(parts(tmp_path)) == 1
    finally:
        writer.kill()
        writer.wait()
    remove_leftovers(tmp_path)
    assert parts(tmp_path) == []


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / 'a.txt'
    path.write_text('old')
    with pytest.raises(KeyError), atomic_write(path) as temporary:
        temporary.write_text('new')
        raise KeyError
    assert path.read_text() == 'old' and parts(tmp_path) == []


def test_a_name_of_the_greatest_length_can_be_written(tmp_path):
    path = tmp_path / ('n' * 250 + '.txt')
    with atomic_write(path) as temporary:
        temporary.write_text('whole')
    assert path.read_text() == 'whole'


def test_a_folder_is_for_one_process(tmp_path):
    script = (
        'import sys, time\nfrom pathlib import Path\nfrom kp2d_core.files import sole_use\n'
        'with sole_use(Path(sys.argv[1])):\n    print("in", flush=True)\n    time.sleep(60)\n'
    )
    process = subprocess.Popen(
        [sys.executable, '-c', script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == 'in\n'
        with (
            pytest.raises(ValueError, match=f'another process is using {tmp_path}'),
            sole_use(tmp_path),
        ):
            pass
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:  # the system releases it
        try:
            with sole_use(tmp_path):
                return
        except ValueError:
            time.sleep(0.05)
    pytest.fail('the lock outlived its process')


def test_files_have_a_largest_size(tmp_path):
    path = tmp_path / 'a.txt'
    path.write_bytes(b'x' * 100)
    assert read_file(path, 100) == b'x' * 100
    with pytest.raises(FileError, match='is too large: at most 99 bytes'):
        read_file(path, 99)
    with pytest.raises(FileError, match='too large'):
        read_text('/dev/zero')
    path.write_bytes(b'\xff\xfe')
    with pytest.raises(FileError, match='is not a text file'):
        read_text(path)
    with pytest.raises(FileError, match='Is a directory'):
        read_file(tmp_path, 1)
