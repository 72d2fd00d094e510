"""What an exported file says of itself, and the refusal of files that are not ours."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from kp2d_core.architecture import INPUT_MEAN, INPUT_SCALE, Architecture
from kp2d_core.checkpoint import Checkpoint
from kp2d_core.errors import FileError
from kp2d_core.export.profile import Profile
from kp2d_core.version import __version__

FORMAT = 'kp2d-graph-1'  # changes with what goes in or comes out of the graph


@dataclass(frozen=True)
class ExportedModel:
    """An exported graph read back."""

    architecture: Architecture
    profile: Profile
    checkpoint_digest: str  # of the weights that it was written from
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
    """The exported model in a file; FileError unless it is a whole file of ours."""
    path = Path(path)
    try:
        data = path.read_bytes()
        model = onnx.load_model_from_string(data)
    except OSError as error:
        raise FileError(f'cannot read {path}: {error.strerror or error}') from error
    except DecodeError as error:
        raise FileError(f'{path} is not a readable ONNX file: {error}') from error
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    if metadata.get('format') != FORMAT:
        found = metadata.get('format', 'none')
        raise FileError(
            f'{path} is an ONNX file, but not one that `kp2d export` of this version wrote '
            f'(format {found}, needed {FORMAT})'
        )
    try:
        return ExportedModel(
            architecture=Architecture.from_dict(json.loads(metadata['architecture'])),
            profile=Profile(**json.loads(metadata['profile'])),
            checkpoint_digest=metadata['checkpoint'],
            graph=data,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f'{path} has damaged metadata: {error}') from error
