"""Read files up to a size limit; write files and folders atomically."""

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
    """Read a file; raise FileError if that fails or it has more than `most` bytes."""
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
    """Yield a temporary path in the same folder. On success it replaces `path`.

    The first write to a folder also removes the partial files of killed processes there.

    >>> with atomic_write('weights.safetensors') as temporary:
    ...     temporary.write_bytes(data)
    """
    path = Path(path)
    try:
        if path.is_symlink():  # write the target, not the link
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
    """Yield a temporary path for a file or folder. On success it is renamed to `path`.

    Nothing is replaced: raise FileError if `path` exists, at the start or at the end.
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
    """Lock the folder: raise ValueError if another process holds the lock.

    The system releases the lock when the process ends, even if it is killed.
    """
    try:
        file = (folder / '.lock').open('w')
    except OSError as error:
        raise FileError(f'cannot write {folder}: {error.strerror or error}') from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f'another process is using {folder}') from None
        except OSError:  # not every file system has locks
            pass
        yield


def remove_leftovers(folder: Path) -> None:
    """Remove partial files of killed processes, but none that is still being written."""
    with suppress(OSError):  # a folder that cannot be cleaned may still be writable
        for leftover in folder.glob(f'.*{MARK}*'):
            handle = os.open(leftover, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if its writer is alive
                if leftover.is_dir():
                    shutil.rmtree(leftover, ignore_errors=True)
                else:
                    leftover.unlink(missing_ok=True)
            except BlockingIOError:
                pass
            finally:
                os.close(handle)


def _locked_folder(path: Path) -> tuple[int, Path]:
    """Make a new folder next to `path`, locked like `_locked_file`."""
    while True:
        name = tempfile.mkdtemp(prefix=f'.{path.name[:100]}.', suffix=MARK, dir=path.parent)
        with suppress(FileNotFoundError):  # another process removed it as a leftover
            handle = os.open(name, os.O_RDONLY)
            with suppress(OSError):  # not every file system has locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            if Path(name).exists():
                return handle, Path(name)
            os.close(handle)


def _locked_file(path: Path) -> tuple[int, Path]:
    """Make a new file next to `path`, locked until the handle is closed or the process ends."""
    while True:
        handle, name = tempfile.mkstemp(
            prefix=f'.{path.name[:100]}.', suffix=MARK + path.suffix, dir=path.parent
        )
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if Path(name).exists():  # else another process removed it before it was locked
            return handle, Path(name)
        os.close(handle)


def _flush_to_disk(path: Path) -> None:
    with path.open('rb') as file:
        os.fsync(file.fileno())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
