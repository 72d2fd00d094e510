"""Where graphs come from: weights give one for any profile, an exported file gives its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from kp2d_core.architecture import Architecture
from kp2d_core.checkpoint import Checkpoint, find_checkpoint, load_checkpoint
from kp2d_core.errors import FileError
from kp2d_core.export.profile import Profile, check_precision
from kp2d_core.export.quantization import Ranges, calibration_path, load_calibration


@dataclass(frozen=True)
class ModelSource:
    """A model that a runtime can be given: weights, or one exported graph."""

    architecture: Architecture
    precision: str
    checkpoint: Checkpoint | None = None
    ranges: Ranges | None = None  # with a checkpoint and int8
    graph: bytes | None = None  # with an exported file
    fixed: Profile | None = None  # likewise

    def profile(self, shape: tuple[int, ...], top_k: int, most: int | None = None) -> Profile:
        """What to run images of shape (B, H, W, C) with; at most `most` keypoints, if given."""
        batch, height, width, channels = shape
        if self.fixed is not None:
            if (width, height) != (self.fixed.width, self.fixed.height):
                raise ValueError(
                    f'this model was exported for {self.fixed.width}x{self.fixed.height} images, '
                    f'got {width}x{height}'
                )
            return self.fixed
        profile = Profile(height, width, 1, batch, channels == 1, self.precision)
        return replace(profile, top_k=min(top_k, profile.cells, most or profile.cells))

    def graph_for(self, profile: Profile) -> bytes:
        """The ONNX file for a profile."""
        if self.graph is not None:
            return self.graph
        from kp2d_core.export.graph import build_graph

        assert self.checkpoint is not None
        return build_graph(self.checkpoint, profile, self.ranges).SerializeToString()


def open_source(model: str | Path, precision: str = 'auto') -> ModelSource:
    """A shipped model by name, a .safetensors file, or an exported .onnx file.

    `precision` 'auto' means fp32, or what the exported file has.
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
                f'{path.name} has no int8 ranges ({ranges_path.name} beside it): make them with '
                f'`kp2d export {model} --precision int8 --calibrate FOLDER_OF_IMAGES`'
            )
        ranges = load_calibration(ranges_path, checkpoint).ranges
    return ModelSource(checkpoint.architecture, precision, checkpoint, ranges)


def _exported(path: Path, precision: str) -> ModelSource:
    try:
        from kp2d_core.export.metadata import read_exported
    except ModuleNotFoundError as error:
        raise missing_onnx() from error
    exported = read_exported(path)
    profile = exported.profile
    if precision not in ('auto', profile.precision):
        raise ValueError(f'{path} was exported as {profile.precision}, not as {precision}')
    return ModelSource(
        exported.architecture, profile.precision, graph=exported.graph, fixed=profile
    )


def missing_onnx() -> ValueError:
    return ValueError('the onnx package is not installed: pip install onnx')
