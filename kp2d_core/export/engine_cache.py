"""Engines kept on disk: an engine fits one model, TensorRT, device and profile, and says which."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from kp2d_core.export.profile import Profile
from kp2d_core.files import atomic_write

MAGIC = b'kp2d-engine-1\n'


@dataclass(frozen=True)
class EngineKey:
    """All that an engine depends on; if any of it differs, it is another engine."""

    model: str  # SHA-256 of the ONNX graph
    library: str  # TensorRT's name and full version
    device: str  # GPU name and compute capability; for RTX the compute capability
    profile: str  # sizes, keypoints, batch, precision

    @classmethod
    def of(cls, graph: bytes, profile: Profile, library: str, device: str) -> EngineKey:
        return cls(hashlib.sha256(graph).hexdigest(), library, device, str(profile))

    def file_name(self) -> str:
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return f'{digest[:32]}.engine'


class EngineCache:
    """A folder of engines. Files are whole or absent, and checked whenever one is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: EngineKey) -> Path:
        return self.folder / key.file_name()

    def get(self, key: EngineKey) -> bytes | None:
        """The engine, or None if it is not there, damaged, or not the one it should be."""
        try:
            data = self.path(key).read_bytes()
        except OSError:
            return None
        header, separator, engine = data.removeprefix(MAGIC).partition(b'\n')
        if not data.startswith(MAGIC) or not separator:
            return None
        if header != _header(key, engine):
            return None
        return engine

    def put(self, key: EngineKey, engine: bytes) -> None:
        with atomic_write(self.path(key)) as temporary:
            temporary.write_bytes(MAGIC + _header(key, engine) + b'\n' + engine)

    def discard(self, key: EngineKey) -> None:
        self.path(key).unlink(missing_ok=True)

    def get_or_build(self, key: EngineKey, build: Callable[[], bytes]) -> tuple[bytes, bool]:
        """The engine, and whether it had to be built. Of several processes, one builds."""
        engine = self.get(key)
        if engine is not None:
            return engine, False
        with self._lock(key):
            engine = self.get(key)  # another process may have built it meanwhile
            if engine is not None:
                return engine, False
            engine = build()
            self.put(key, engine)
        return engine, True

    @contextmanager
    def _lock(self, key: EngineKey) -> Iterator[None]:
        """Held by one process at a time; the system releases it when that process ends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.path(key).with_suffix('.lock').open('w') as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _header(key: EngineKey, engine: bytes) -> bytes:
    values = {**asdict(key), 'sha256': hashlib.sha256(engine).hexdigest()}
    return json.dumps(values, sort_keys=True).encode()
