"""Reading no more than is sensible, and writing so that nothing ever leaves half of a file."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kp2d_core.errors import FileError

LONGEST_TEXT = 1 << 20  # bytes
MARK = '.kp2d-part'  # in the names of files that are being written
_cleaned: set[Path] = set()


def read_file(path: str | os.PathLike[str], most: int) -> bytes:
    """All bytes of a file; FileError if it cannot be read or has more than `most` of them."""
    try:
        with Path(path).open('rb') as file:
            data = file.read(most + 1)
    except OSError as error:
        raise FileError(f'cannot read {path}: {error.strerror or error}') from error
    if len(data) > most:
        raise FileError(f'{path} is too large: at most {most} bytes are read')
    return data


def read_text(path: str | os.PathLike[str]) -> str:
    try:
        return read_file(path, LONGEST_TEXT).decode('utf-8')
    except UnicodeDecodeError as error:
        raise FileError(f'{path} is not a text file') from error


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path in the same folder; it replaces `path` on success, else it goes.

    What a killed process left behind in the folder goes with the first file that is written there.

    >>> with atomic_write('weights.safetensors') as temporary:
    ...     temporary.write_bytes(data)
    """
    path = Path(path)
    try:
        if path.is_symlink():  # what it leads to is to be written, not the link
            path = path.resolve()
        if path.exists() and not path.is_file():
            raise FileError(f'cannot write {path}: it is not a regular file')
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.parent not in _cleaned:
            remove_leftovers(path.parent)
            _cleaned.add(path.parent)
        handle, temporary = _locked_file(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: a link that leads to itself
        reason = getattr(error, 'strerror', None) or error
        raise FileError(f'cannot write {path}: {reason}') from error
    try:
        yield temporary
        _flush_to_disk(temporary)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        raise FileError(f'cannot write {path}: {error.strerror or error}') from error
    finally:
        temporary.unlink(missing_ok=True)
        os.close(handle)


@contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a path to make a file or folder at; it becomes `path` on success, else it goes.

    Nothing is replaced: a FileError if there is something at `path`, at the beginning or the end.
    """
    path = Path(path)
    try:
        if path.exists() or path.is_symlink():
            raise FileError(f'{path} exists already')
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent)
        handle, around = _locked_folder(path)
    except OSError as error:
        raise FileError(f'cannot write {path}: {error.strerror or error}') from error
    try:
        yield around / path.name
        for folder, _, names in os.walk(around):
            for name in names:
                _flush_to_disk(Path(folder) / name)
        if path.exists():
            raise FileError(f'{path} exists already: another process has made it meanwhile')
        (around / path.name).rename(path)
    except OSError as error:
        raise FileError(f'cannot write {path}: {error.strerror or error}') from error
    finally:
        shutil.rmtree(around, ignore_errors=True)
        os.close(handle)


@contextmanager
def sole_use(folder: Path) -> Iterator[None]:
    """While in use, no other process gets the same folder so: there it is a ValueError.

    The system releases it when the process ends, however it ends.
    """
    try:
        file = (folder / '.lock').open('w')
    except OSError as error:
        raise FileError(f'cannot write {folder}: {error.strerror or error}') from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f'another process is at work in {folder}') from None
        except OSError:  # not every file system has locks
            pass
        yield


def remove_leftovers(folder: Path) -> None:
    """Remove what was begun here by atomic_write or atomic_folder and killed, nothing in use."""
    with suppress(OSError):  # a folder that cannot be cleaned may still be written to
        for leftover in folder.glob(f'.*{MARK}*'):
            handle = os.open(leftover, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # or its writer is alive
                if leftover.is_dir():
                    shutil.rmtree(leftover, ignore_errors=True)
                else:
                    leftover.unlink(missing_ok=True)
            except BlockingIOError:
                pass
            finally:
                os.close(handle)


def _locked_folder(path: Path) -> tuple[int, Path]:
    """A new folder beside `path`, locked likewise."""
    while True:
        name = tempfile.mkdtemp(prefix=f'.{path.name[:100]}.', suffix=MARK, dir=path.parent)
        with suppress(FileNotFoundError):  # another process took it for a leftover
            handle = os.open(name, os.O_RDONLY)
            with suppress(OSError):  # not every file system has locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            if Path(name).exists():
                return handle, Path(name)
            os.close(handle)


def _locked_file(path: Path) -> tuple[int, Path]:
    """A new file beside `path`, locked for as long as the handle is open or the process lives."""
    while True:
        handle, name = tempfile.mkstemp(
            prefix=f'.{path.name[:100]}.', suffix=MARK + path.suffix, dir=path.parent
        )
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if Path(name).exists():  # or another process took it for a leftover before it was locked
            return handle, Path(name)
        os.close(handle)


def _flush_to_disk(path: Path) -> None:
    with path.open('rb') as file:
        os.fsync(file.fileno())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
