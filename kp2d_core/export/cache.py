"""Cache of compiled graphs on disk: each belongs to one model, library, device and profile.

Every byte is verified on reading: a flipped bit in a compiled graph gives wrong keypoints, and no
library detects it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from kp2d_core.errors import FileError
from kp2d_core.export.source import Profile
from kp2d_core.files import atomic_write, read_file

MAGIC = b'kp2d-engine-1\n'
SUFFIX = '.engine'
MOST_BYTES = 1 << 30  # per folder; beyond it, the least recently used files are removed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheKey:
    """Everything that a compiled graph depends on."""

    model: str  # SHA-256 of the ONNX graph
    library: str  # name and full version
    device: str  # the target of the compilation
    profile: str  # sizes, keypoints, batch, precision

    @classmethod
    def of(cls, graph: bytes, profile: Profile, library: str, device: str) -> CacheKey:
        return cls(hashlib.sha256(graph).hexdigest(), library, device, str(profile))

    def file_name(self) -> str:
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return f'{digest[:32]}{SUFFIX}'


class CompiledCache:
    """A folder of compiled graphs, limited in size. A file is complete or absent."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.folder = folder
        self.most_bytes = most_bytes

    def path(self, key: CacheKey) -> Path:
        return self.folder / key.file_name()

    def get(self, key: CacheKey) -> bytes | None:
        """Return the compiled graph, or None if it is missing, damaged or of another key."""
        try:
            data = read_file(self.path(key), self.most_bytes)
        except FileError:
            return None
        header, separator, compiled = data.removeprefix(MAGIC).partition(b'\n')
        if not data.startswith(MAGIC) or not separator or header != _header(key, compiled):
            return None
        with suppress(OSError):
            os.utime(self.path(key))  # mark as used
        return compiled

    def put(self, key: CacheKey, compiled: bytes) -> None:
        with atomic_write(self.path(key)) as temporary:
            temporary.write_bytes(MAGIC + _header(key, compiled) + b'\n' + compiled)
        with suppress(OSError):
            self._remove_oldest(self.path(key))

    def discard(self, key: CacheKey) -> None:
        self.path(key).unlink(missing_ok=True)

    def get_or_build(
        self, key: CacheKey, build: Callable[[], bytes], *, must_keep: bool = False
    ) -> tuple[bytes, bool]:
        """Return the compiled graph, and whether it was built now. Only one process builds it.

        If the folder cannot be written, the graph is built but not kept; with `must_keep`, raise
        FileError instead.
        """
        compiled = self.get(key)
        if compiled is not None:
            return compiled, False
        with self._lock(key, must_keep):
            compiled = self.get(key)  # another process may have built it meanwhile
            if compiled is not None:
                return compiled, False
            compiled = build()
            try:
                self.put(key, compiled)
            except FileError as error:
                if must_keep:
                    raise
                log.warning('the next start compiles again: %s', error)
        return compiled, True

    @contextmanager
    def _lock(self, key: CacheKey, must_keep: bool) -> Iterator[None]:
        """Let one process at a time in; the system releases the lock when the process ends."""
        path = self.path(key).with_suffix('.lock')
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = path.open('w')
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if must_keep:
                raise FileError(f'cannot write {path}: {error.strerror or error}') from error
            yield
            return
        with file:
            try:
                yield
            finally:
                path.unlink(missing_ok=True)

    def _remove_oldest(self, kept: Path) -> None:
        """Remove the least recently used files above the limit, except the new one."""
        room = self.most_bytes - kept.stat().st_size
        others = [path for path in self.folder.iterdir() if path != kept and _is_ours(path)]
        for path in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True):
            room -= path.stat().st_size
            if room < 0:
                path.unlink(missing_ok=True)


def _is_ours(path: Path) -> bool:
    """Whether this is a complete file of the cache; .blob files are from earlier versions."""
    return not path.name.startswith('.') and path.suffix in (SUFFIX, '.blob')


def _header(key: CacheKey, compiled: bytes) -> bytes:
    values = {**asdict(key), 'sha256': hashlib.sha256(compiled).hexdigest()}
    return json.dumps(values, sort_keys=True).encode()
