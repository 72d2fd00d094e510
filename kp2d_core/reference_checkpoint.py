"""Reading the authors' .ckpt files without running anything that is pickled in them.

Such a file is a torch pickle of {'state_dict': tensors, 'config': yacs CfgNode}, either in the
zip format (torch >= 1.6) or in the older stream format. The pickle machine runs here with a table
of the few names such a file needs, each bound to something inert of ours: no name is ever
imported, and any other name refuses the file.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from kp2d_core.architecture import VARIANTS, Architecture
from kp2d_core.checkpoint import Checkpoint
from kp2d_core.errors import FileError

_STREAM_MAGIC = 0x1950A86A20F9469CFC6C
_STREAM_PROTOCOL = 1001
_STORAGE_TYPES: dict[str, str] = {
    'FloatStorage': '<f4',
    'DoubleStorage': '<f8',
    'HalfStorage': '<f2',
    'LongStorage': '<i8',
    'IntStorage': '<i4',
    'ByteStorage': 'u1',
    'BoolStorage': '?',
}


def read_reference_checkpoint(path: str | Path, variant: str | None = None) -> Checkpoint:
    """The authors' file as a Checkpoint; `variant` ('v0' ... 'v4') overrides its own word."""
    path = Path(path)
    try:
        content = _read(path)
        weights = _weights(content)
        architecture = VARIANTS[variant] if variant else _architecture(content)
        return Checkpoint(architecture, weights, notes=f'imported from {path.name}')
    except FileError as error:
        raise FileError(f'{path} cannot be imported: {error}') from error
    except OSError as error:
        raise FileError(f'cannot read {path}: {error.strerror or error}') from error
    except Exception as error:  # a damaged pickle can fail in any way at all
        raise FileError(f'{path} cannot be imported: it is damaged ({error!r})') from error


class _Config(dict[str, Any]):
    """Stands in for yacs' CfgNode: a dict whose attributes nobody looks at."""


class _Storage:
    """The numbers behind a tensor; in the stream format they follow after the pickle."""

    def __init__(self, dtype: np.dtype[Any], count: int) -> None:
        self.dtype, self.count = dtype, count
        self.values: NDArray[Any] | None = None

    def fill(self, data: bytes) -> None:
        if len(data) != self.count * self.dtype.itemsize:
            raise FileError('a tensor is truncated')
        self.values = np.frombuffer(data, self.dtype)


class _Tensor:
    """A tensor to be cut from its storage once that is filled."""

    def __init__(
        self, storage: _Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...],
        *_: Any,
    ) -> None:  # fmt: skip
        if not isinstance(storage, _Storage):
            raise FileError('a tensor has no storage')
        self.storage, self.offset, self.shape, self.stride = storage, offset, shape, stride

    def to_numpy(self) -> NDArray[Any]:
        count = int(np.prod(self.shape, dtype=np.int64))
        contiguous = tuple(int(np.prod(self.shape[i + 1 :])) for i in range(len(self.shape)))
        if self.stride != contiguous:
            raise FileError('a tensor is not stored row by row')
        values = self.storage.values
        if values is None or self.offset < 0 or self.offset + count > len(values):
            raise FileError('a tensor reaches beyond its storage')
        return values[self.offset : self.offset + count].reshape(self.shape).copy()


def _parameter(tensor: _Tensor, *_: Any) -> _Tensor:
    return tensor


_KNOWN_NAMES: dict[tuple[str, str], Any] = {
    ('collections', 'OrderedDict'): OrderedDict,
    ('__builtin__', 'set'): set,  # CfgNode keeps its deprecated names in one
    ('builtins', 'set'): set,
    ('yacs.config', 'CfgNode'): _Config,
    ('torch._utils', '_rebuild_tensor_v2'): _Tensor,
    ('torch._utils', '_rebuild_parameter'): _parameter,
    **{('torch', name): np.dtype(code) for name, code in _STORAGE_TYPES.items()},
}


class _Unpickler(pickle.Unpickler):
    """Knows the names above and no others."""

    def __init__(self, file: io.BytesIO, load_storage: Callable[[Any], _Storage]) -> None:
        super().__init__(file, encoding='latin1')
        self._load_storage = load_storage

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _KNOWN_NAMES[module, name]
        except KeyError:
            raise FileError(
                f'it asks for {module}.{name}, which no checkpoint needs: refused as unsafe'
            ) from None

    def persistent_load(self, pid: Any) -> _Storage:
        return self._load_storage(pid)


def _no_storage(_: Any) -> NoReturn:
    raise FileError('there is a tensor where none belongs')


def _read(path: Path) -> Any:
    data = path.read_bytes()
    if zipfile.is_zipfile(io.BytesIO(data)):
        return _read_zip(data)
    return _read_stream(data)


def _read_zip(data: bytes) -> Any:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = [name for name in archive.namelist() if name.endswith('/data.pkl')]
        if len(names) != 1:
            raise FileError('it is a zip file, but not one that torch wrote')
        folder = names[0].removesuffix('data.pkl')
        storages: dict[str, _Storage] = {}

        def load_storage(pid: Any) -> _Storage:
            _, dtype, key, _, count = pid
            if key not in storages:
                storages[key] = _Storage(dtype, count)
                storages[key].fill(archive.read(f'{folder}data/{key}'))
            return storages[key]

        return _Unpickler(io.BytesIO(archive.read(names[0])), load_storage).load()


def _read_stream(data: bytes) -> Any:
    file = io.BytesIO(data)
    storages: dict[str, _Storage] = {}

    def load_storage(pid: Any) -> _Storage:
        _, dtype, key, _, count = pid[:5]
        return storages.setdefault(key, _Storage(dtype, count))

    if _Unpickler(file, _no_storage).load() != _STREAM_MAGIC:
        raise FileError('torch did not write it')
    if _Unpickler(file, _no_storage).load() != _STREAM_PROTOCOL:
        raise FileError('it is in a format of torch that is not known')
    _Unpickler(file, _no_storage).load()  # the writing machine's word sizes
    content = _Unpickler(file, load_storage).load()
    for key in _Unpickler(file, _no_storage).load():
        storage = storages[key]
        if int.from_bytes(file.read(8), 'little') != storage.count:
            raise FileError('a tensor is truncated')
        storage.fill(file.read(storage.count * storage.dtype.itemsize))
    return content


def _weights(content: Any) -> dict[str, NDArray[Any]]:
    tensors = content.get('state_dict') if isinstance(content, dict) else None
    if not isinstance(tensors, dict) or not all(isinstance(t, _Tensor) for t in tensors.values()):
        raise FileError("there is no 'state_dict' of tensors in it")
    return {name.removeprefix('module.'): t.to_numpy() for name, t in tensors.items()}


def _architecture(content: dict[str, Any]) -> Architecture:
    try:
        params = content['config']['model']['params']
    except (KeyError, TypeError):
        raise FileError('it has no configuration: say which with --variant v0 ... v4') from None
    net_type = params.get('keypoint_net_type', 'KeypointNet')
    if net_type != 'KeypointNet':
        raise FileError(f'its network is a {net_type}, only KeypointNet can be imported')
    if not params.get('use_color', True):
        raise FileError('its network takes gray images, only colour can be imported')
    cross, upsample = bool(params.get('do_cross', True)), bool(params.get('do_upsample', True))
    for name in ('v4', 'v1', 'v0'):
        known = VARIANTS[name]
        if (known.cross_border, known.upsample) == (cross, upsample):
            return known
    return Architecture('custom', cross_border=cross, upsample=upsample)
