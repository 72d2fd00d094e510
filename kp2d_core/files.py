"""Writing files so that a crash, a full disk or a second process never leaves half of one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kp2d_core.errors import FileError


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path in the same folder; it replaces `path` on success, else it goes.

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
        handle, name = tempfile.mkstemp(
            prefix=f'.{path.name}.', suffix=path.suffix, dir=path.parent
        )
        os.close(handle)
    except (OSError, RuntimeError) as error:  # RuntimeError: a link that leads to itself
        reason = getattr(error, 'strerror', None) or error
        raise FileError(f'cannot write {path}: {reason}') from error
    temporary = Path(name)
    try:
        yield temporary
        _flush_to_disk(temporary)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        raise FileError(f'cannot write {path}: {error.strerror or error}') from error
    finally:
        temporary.unlink(missing_ok=True)


def _flush_to_disk(path: Path) -> None:
    with path.open('rb') as file:
        os.fsync(file.fileno())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
