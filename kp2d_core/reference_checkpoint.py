"""Read the authors' .ckpt files without running code that is pickled in them.

This was tested on files of the same structure; no file of the authors was at hand.

Such a file is a torch pickle of {'state_dict': tensors, 'config': yacs CfgNode}, either in the
zip format (torch >= 1.6) or in the older stream format. The unpickler knows the few names that
such a file needs and binds each to a harmless class of this file. It never imports a name, and
refuses files with other names. A file cannot exhaust the memory either: torch does not compress,
so all tensors together are smaller than the file, and the objects of a pickle are counted before
it is loaded.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from kp2d_core.architecture import VARIANTS, Architecture
from kp2d_core.checkpoint import Checkpoint
from kp2d_core.checks import shown, whole
from kp2d_core.errors import FileError
from kp2d_core.files import read_file

LARGEST_FILE = 1 << 30  # bytes; the authors' files have 22 MB
MOST_STEPS = 50_000  # of a pickle; the authors' files have a few thousand
LARGEST_TUPLE = 200  # values, including those of nested tuples
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
    """Read a file of the authors; `variant` ('v0' to 'v4') overrides the variant in the file."""
    path = Path(path)
    try:
        data = read_file(path, LARGEST_FILE)
        content = _read(data)
        weights = _weights(content, len(data))
        architecture = VARIANTS[variant] if variant else _architecture(content)
        return Checkpoint(architecture, weights, notes=f'imported from {path.name}')
    except FileError as error:
        raise FileError(f'{path} cannot be imported: {error}') from error
    except Exception as error:  # a damaged pickle can raise anything
        raise FileError(f'{path} cannot be imported: it is damaged ({shown(error)})') from error


class _Config(dict[str, Any]):
    """Replaces CfgNode of yacs: a dict, whose attributes are ignored."""


class _Storage:
    """The values of a tensor; in the stream format they follow after the pickle."""

    def __init__(self, dtype: np.dtype[Any], count: int) -> None:
        if not isinstance(dtype, np.dtype):
            raise FileError('a tensor has no type')
        self.dtype, self.count = dtype, whole(count, 'the size of a tensor', most=LARGEST_FILE)
        self.values: NDArray[Any] | None = None

    @property
    def size(self) -> int:
        """In bytes."""
        return self.count * self.dtype.itemsize

    def fill(self, data: bytes) -> None:
        if len(data) != self.size:
            raise FileError('a tensor is truncated')
        self.values = np.frombuffer(data, self.dtype)


class _Tensor:
    """A tensor that is cut from its storage once that is filled."""

    def __init__(
        self, storage: _Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...],
        *_: Any,
    ) -> None:  # fmt: skip
        if not isinstance(storage, _Storage):
            raise FileError('a tensor has no storage')
        self.storage, self.offset, self.shape, self.stride = storage, offset, shape, stride

    @property
    def count(self) -> int:
        return math.prod(whole(side, 'a side of a tensor') for side in self.shape)

    def to_numpy(self) -> NDArray[Any]:
        count = self.count
        contiguous = tuple(int(np.prod(self.shape[i + 1 :])) for i in range(len(self.shape)))
        if self.stride != contiguous:
            raise FileError('a tensor is not stored row by row')
        values = self.storage.values
        if values is None or self.offset < 0 or self.offset + count > len(values):
            raise FileError('a tensor reaches beyond its storage')
        return values[self.offset : self.offset + count].reshape(self.shape).copy()


def _parameter(tensor: _Tensor, *_: Any) -> _Tensor:
    if not isinstance(tensor, _Tensor):
        raise FileError('a parameter has no tensor')
    return tensor


_KNOWN_NAMES: dict[tuple[str, str], Any] = {
    ('collections', 'OrderedDict'): OrderedDict,
    ('__builtin__', 'set'): set,  # CfgNode has a set of deprecated names
    ('builtins', 'set'): set,
    ('yacs.config', 'CfgNode'): _Config,
    ('torch._utils', '_rebuild_tensor_v2'): _Tensor,
    ('torch._utils', '_rebuild_parameter'): _parameter,
    **{('torch', name): np.dtype(code) for name, code in _STORAGE_TYPES.items()},
}


class _Unpickler(pickle.Unpickler):
    """Knows only the names above."""

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


# The opcodes that torch writes, and the strings of Python 2. PUT and GET have three forms each.
_STEPS = frozenset(
    'PROTO FRAME MARK STOP GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD BINPERSID NONE NEWTRUE '
    'NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 FLOAT BINFLOAT STRING BINSTRING '
    'SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINBYTES SHORT_BINBYTES '
    'EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS '
    'EMPTY_DICT DICT SETITEM SETITEMS EMPTY_SET ADDITEMS '
    'PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET'.split()
)
_IN_PLACE = frozenset('APPEND APPENDS SETITEM SETITEMS ADDITEMS BUILD'.split())
_NAME = 0  # the size of a name on the stack: it holds no values and cannot be changed


def _load(file: io.BytesIO, load_storage: Callable[[Any], _Storage]) -> Any:
    """Load the next pickle in the file."""
    begin = file.tell()
    _check_steps(file)
    file.seek(begin)
    return _Unpickler(file, load_storage).load()


def _check_steps(file: io.BytesIO) -> None:
    """Refuse a pickle that takes more memory or time than a checkpoint, without loading it.

    Python allocates memory for the memo index in a pickle, however large: 12 bytes can take
    gigabytes. A key is hashed with all its values: a tuple that holds another tuple twice, which
    holds another twice, takes years at 40 levels. This function therefore tracks the sizes of the
    objects on the stack.
    """
    stack: list[int | None] = []  # None is a mark
    memo: dict[int, int | None] = {}
    for count, (opcode, value, _) in enumerate(pickletools.genops(file)):
        name = opcode.name
        if name not in _STEPS:
            raise FileError(f'it has a {name}, which no checkpoint needs: refused as unsafe')
        if count == MOST_STEPS:
            raise FileError(f'it takes more than {MOST_STEPS} steps to read')
        if name == 'MEMOIZE' or name.endswith('PUT'):
            number = len(memo) if name == 'MEMOIZE' else int(value or 0)
            if not 0 <= number <= count:
                raise FileError('its objects are not numbered consecutively')
            memo[number] = stack[-1]
        elif name.endswith('GET'):
            stack.append(memo[int(value or 0)])
        elif name == 'MARK':
            stack.append(None)
        else:
            _step(stack, opcode)


def _step(stack: list[int | None], opcode: pickletools.OpcodeInfo) -> None:
    """Replace the sizes of the objects that a step pops by the size of the object it pushes."""
    before = len(opcode.stack_before)
    taken: list[int | None] = []
    if pickletools.markobject in opcode.stack_before:
        while (size := stack.pop()) is not None:
            taken.append(size)
        before -= 2  # the mark and the objects above it
    taken += [stack.pop() for _ in range(before)]
    if not opcode.stack_after:
        return
    size = 1
    if opcode.name.startswith('TUPLE'):
        size += sum(each or 1 for each in taken)
        if size > LARGEST_TUPLE:
            raise FileError(f'it has a tuple of more than {LARGEST_TUPLE} values')
    elif opcode.name.endswith('GLOBAL'):
        size = _NAME
    elif opcode.name in _IN_PLACE:  # changes the last object that it pops
        size = taken[-1] or 0
        if size == _NAME:
            raise FileError('it changes a name, which no checkpoint needs: refused as unsafe')
    stack.append(size)


def _read(data: bytes) -> Any:
    if zipfile.is_zipfile(io.BytesIO(data)):
        return _read_zip(data)
    return _read_stream(data)


def _read_zip(data: bytes) -> Any:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = [name for name in archive.namelist() if name.endswith('/data.pkl')]
        if len(names) != 1:
            raise FileError('it is a zip file, but not one that torch wrote')
        if any(each.compress_type != zipfile.ZIP_STORED for each in archive.infolist()):
            raise FileError('it is compressed, which torch does not do')
        folder = names[0].removesuffix('data.pkl')
        storages: dict[str, _Storage] = {}

        def load_storage(pid: Any) -> _Storage:
            _, dtype, key, _, count = pid
            if key not in storages:
                storage = storages[key] = _Storage(dtype, count)
                name = f'{folder}data/{key}'
                if archive.getinfo(name).file_size != storage.size:
                    raise FileError('a tensor does not have its stated size')
                if sum(each.size for each in storages.values()) > len(data):
                    raise FileError('its tensors are larger than the file')
                storage.fill(archive.read(name))
            return storages[key]

        return _load(io.BytesIO(archive.read(names[0])), load_storage)


def _read_stream(data: bytes) -> Any:
    file = io.BytesIO(data)
    storages: dict[str, _Storage] = {}

    def load_storage(pid: Any) -> _Storage:
        _, dtype, key, _, count = pid[:5]
        return storages.setdefault(key, _Storage(dtype, count))

    if _load(file, _no_storage) != _STREAM_MAGIC:
        raise FileError('torch did not write it')
    if _load(file, _no_storage) != _STREAM_PROTOCOL:
        raise FileError('it is in an unknown format of torch')
    _load(file, _no_storage)  # the writing machine's word sizes
    content = _load(file, load_storage)
    for key in _load(file, _no_storage):
        storage = storages[key]
        if int.from_bytes(file.read(8), 'little') != storage.count:
            raise FileError('a tensor is truncated')
        storage.fill(file.read(storage.size))
    return content


def _weights(content: Any, most: int) -> dict[str, NDArray[Any]]:
    """Return the tensors by name, at most `most` bytes in total: many may share one storage."""
    tensors = content.get('state_dict') if isinstance(content, dict) else None
    if not isinstance(tensors, dict) or not all(isinstance(t, _Tensor) for t in tensors.values()):
        raise FileError("there is no 'state_dict' of tensors in it")
    if sum(t.count * t.storage.dtype.itemsize for t in tensors.values()) > most:
        raise FileError('its tensors are larger than the file')
    return {name.removeprefix('module.'): t.to_numpy() for name, t in tensors.items()}


def _architecture(content: dict[str, Any]) -> Architecture:
    try:
        params = content['config']['model']['params']
    except (KeyError, TypeError):
        raise FileError('it has no configuration: give --variant v0 ... v4') from None
    net_type = params.get('keypoint_net_type', 'KeypointNet')
    if net_type != 'KeypointNet':
        raise FileError(f'its network is a {shown(net_type)}, only KeypointNet can be imported')
    if not params.get('use_color', True):
        raise FileError('its network takes gray images, only colour can be imported')
    cross, upsample = bool(params.get('do_cross', True)), bool(params.get('do_upsample', True))
    for name in ('v4', 'v1', 'v0'):
        known = VARIANTS[name]
        if (known.cross_border, known.upsample) == (cross, upsample):
            return known
    return Architecture('custom', cross_border=cross, upsample=upsample)
