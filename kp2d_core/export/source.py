"""A model to run, and the profile (sizes, precision) of its graph."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kp2d_core.architecture import CELL, INPUT_MEAN, INPUT_SCALE, Architecture
from kp2d_core.checkpoint import Checkpoint, find_checkpoint, load_checkpoint
from kp2d_core.checks import parse_json, shown, whole
from kp2d_core.errors import FileError
from kp2d_core.export.quantization import Ranges, calibration_path, load_calibration
from kp2d_core.files import read_file
from kp2d_core.images import MINIMUM_SIDE, MOST_RUN, check_pixels
from kp2d_core.version import __version__

PRECISIONS = ('fp32', 'fp16', 'int8')
TENSORRT_TOP_K = 3840  # the limit of TensorRT's TopK layer
MOST_BATCH = 1024
LARGEST_GRAPH = 1 << 30  # bytes of an exported file
FORMAT = 'kp2d-graph-1'  # changes with the inputs or outputs of the graph


@dataclass(frozen=True)
class Profile:
    """The shapes and the precision of one graph."""

    height: int
    width: int
    top_k: int  # number of keypoints
    batch: int | None = 1  # None: dynamic
    mono: bool = False  # one gray channel instead of RGB
    precision: str = 'fp32'
    cell: int = CELL  # pixels along a cell of the model

    def __post_init__(self) -> None:
        check_precision(self.precision)
        whole(self.cell, 'cell', least=1)
        for name in ('width', 'height'):
            value = whole(getattr(self, name), name)
            if value % CELL or value < MINIMUM_SIDE:
                raise ValueError(
                    f'{name} must be a multiple of {CELL} and at least {MINIMUM_SIDE}, got {value}'
                )
        if not 1 <= whole(self.top_k, 'top_k') <= self.cells:
            raise ValueError(
                f'top_k must be from 1 to {self.cells}, the cells of a {self.width}x{self.height} '
                f'image, got {self.top_k}'
            )
        if self.batch is not None:
            whole(self.batch, 'batch', least=1, most=MOST_BATCH)

    @property
    def sizes(self) -> tuple[Any, ...]:
        """Everything except the number of keypoints."""
        return self.height, self.width, self.batch, self.mono, self.precision, self.cell

    @property
    def cells(self) -> int:
        return (self.height // self.cell) * (self.width // self.cell)

    @property
    def channels(self) -> int:
        return 1 if self.mono else 3

    def __str__(self) -> str:
        colour = 'mono' if self.mono else 'rgb'
        batch = 'any batch' if self.batch is None else f'batch {self.batch}'
        return (
            f'{self.width}x{self.height} {colour}, {self.top_k} keypoints, {batch}, '
            f'{self.precision}'
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def output_names(architecture: Architecture) -> tuple[str, ...]:
    names = ('keypoints', 'scores', 'descriptors')
    return (*names, 'sigmas') if architecture.has_sigma else names


def check_precision(precision: str) -> str:
    if precision not in PRECISIONS:
        known = ', '.join(PRECISIONS)
        raise ValueError(f"there is no precision '{precision}': choose from {known}")
    return precision


@dataclass(frozen=True)
class ModelSource:
    """The input of a runtime: weights, or one exported graph."""

    architecture: Architecture
    precision: str
    checkpoint: Checkpoint | None = None
    ranges: Ranges | None = None  # with a checkpoint and int8
    graph: bytes | None = None  # with an exported file
    fixed: Profile | None = None  # likewise
    exported_digest: str = ''  # of the weights in the graph

    @property
    def digest(self) -> str:
        """The digest of the weights; '' if it is not known."""
        return self.checkpoint.digest() if self.checkpoint is not None else self.exported_digest

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs of the graph."""
        return output_names(self.architecture)

    def profile(self, shape: tuple[int, ...], top_k: int, most: int | None = None) -> Profile:
        """Return the profile for images of shape (B, H, W, C) with at most `most` keypoints."""
        batch, height, width, channels = shape
        if self.fixed is not None:
            if (width, height) != (self.fixed.width, self.fixed.height):
                raise ValueError(
                    f'this model was exported for {self.fixed.width}x{self.fixed.height} images, '
                    f'got {width}x{height}'
                )
            return self.fixed
        profile = Profile(
            height, width, 1, batch, channels == 1, self.precision, self.architecture.cell
        )
        return replace(profile, top_k=min(top_k, profile.cells, most or profile.cells))

    def graph_for(self, profile: Profile) -> bytes:
        """Return the ONNX file for a profile."""
        if self.graph is not None:
            return self.graph
        from kp2d_core.export.graph import build_graph

        assert self.checkpoint is not None
        return build_graph(self.checkpoint, profile, self.ranges).SerializeToString()

    def parts_for(self, profile: Profile, described: int) -> tuple[bytes, bytes]:
        """Return the ONNX files of the two parts of the network, see `build_parts`."""
        from kp2d_core.export.graph import build_parts

        assert self.checkpoint is not None
        parts = build_parts(self.checkpoint, profile, self.ranges, described)
        return parts[0].SerializeToString(), parts[1].SerializeToString()


def open_source(model: str | Path, precision: str = 'auto') -> ModelSource:
    """Open a shipped model by name, a .safetensors file, or an exported .onnx file.

    `precision` 'auto' is fp32, or the precision of the exported file.
    """
    if precision != 'auto':
        check_precision(precision)
    path = find_checkpoint(model)
    if path.suffix.lower() == '.onnx':
        return _exported(path, precision)
    checkpoint = load_checkpoint(path)
    precision = 'fp32' if precision == 'auto' else precision
    ranges = None
    if precision == 'int8':
        ranges_path = calibration_path(path)
        if not ranges_path.is_file():
            raise FileError(
                f'{path.name} has no int8 ranges ({ranges_path.name} next to it): make them with '
                f'`kp2d export {model} --precision int8 --calibrate FOLDER_OF_IMAGES`'
            )
        ranges = load_calibration(ranges_path, checkpoint).ranges
    return ModelSource(checkpoint.architecture, precision, checkpoint, ranges)


def _exported(path: Path, precision: str) -> ModelSource:
    exported = read_exported(path)
    profile = exported.profile
    if precision not in ('auto', profile.precision):
        raise ValueError(f'{path} was exported as {profile.precision}, not as {precision}')
    return ModelSource(
        exported.architecture,
        profile.precision,
        graph=exported.graph,
        fixed=profile,
        exported_digest=exported.checkpoint_digest,
    )


def missing_onnx() -> ValueError:
    return ValueError('the onnx package is not installed: pip install onnx')


@dataclass(frozen=True)
class ExportedModel:
    """An exported graph, read from its file."""

    architecture: Architecture
    profile: Profile
    checkpoint_digest: str  # of the weights
    graph: bytes  # the whole ONNX file


def metadata_of(checkpoint: Checkpoint, profile: Profile) -> dict[str, str]:
    return {
        'format': FORMAT,
        'architecture': json.dumps(checkpoint.architecture.to_dict()),
        'profile': json.dumps(profile.to_dict()),
        'normalisation': json.dumps({'mean': INPUT_MEAN, 'scale': INPUT_SCALE}),
        'descriptor_size': str(checkpoint.architecture.descriptor_size),
        'checkpoint': checkpoint.digest(),
        'step': str(checkpoint.step),
        'notes': checkpoint.notes,
        'package_version': __version__,
    }


def read_exported(path: str | Path) -> ExportedModel:
    """Read an exported model; raise FileError if it is damaged or was not written by kp2d."""
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ModuleNotFoundError as error:
        raise missing_onnx() from error
    path = Path(path)
    data = read_file(path, LARGEST_GRAPH)
    try:
        model = onnx.load_model_from_string(data)
    except DecodeError as error:
        raise FileError(f'{path} is not a readable ONNX file: {error}') from error
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    if metadata.get('format') != FORMAT:
        found = shown(metadata.get('format', 'none'))
        raise FileError(
            f'{path} is an ONNX file, but not one that `kp2d export` of this version wrote '
            f'(format {found}, needed {FORMAT})'
        )
    try:
        profile = Profile(**parse_json(metadata['profile']))
        check_pixels((profile.width, profile.height), MOST_RUN, 'its network runs at')
        return ExportedModel(
            architecture=Architecture.from_dict(parse_json(metadata['architecture'])),
            profile=profile,
            checkpoint_digest=metadata['checkpoint'],
            graph=data,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f'{path} has damaged metadata: {error}') from error
