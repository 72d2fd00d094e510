"""Any ONNX model that returns keypoints and descriptors, as an extractor for the protocol.

A small YAML file describes its inputs and outputs:

    model: superpoint.onnx    # next to the YAML file
    runtime: onnxruntime      # or openvino, which takes its own .xml too
    scale: 1/255              # pixel values are (value * scale - mean) / std
    mean: 0
    std: 1
    multiple_of: 8            # of both sides; images are resized to the nearest such size
    coordinates: pixels       # or normalised: -1 to 1 between the centres of the corner pixels
    image: image              # names in the model; `scores: null` if points are sorted, best first
    keypoints: keypoints
    scores: scores
    descriptors: descriptors

The input of the model determines colour or gray, NCHW or NHWC, the data type and a fixed size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from kp2d_core.checks import number, parse_yaml, shown, whole
from kp2d_core.errors import FileError
from kp2d_core.evaluation.foreign_network import RUNTIMES, Port, open_network
from kp2d_core.evaluation.protocol import Extract
from kp2d_core.features import Features, Float, Placement, unit_descriptors
from kp2d_core.files import read_text
from kp2d_core.images import Image, Size, size_of

COORDINATES = ('pixels', 'normalised')


@dataclass(frozen=True)
class OnnxDescription:
    """The content of the YAML file."""

    model: Path
    runtime: str = 'onnxruntime'
    scale: float = 1 / 255
    mean: float | list[float] = 0.0
    std: float | list[float] = 1.0
    multiple_of: int = 1
    coordinates: str = 'pixels'
    image: str | None = None  # None: the only input of the model
    keypoints: str = 'keypoints'
    scores: str | None = 'scores'
    descriptors: str = 'descriptors'


@dataclass(frozen=True)
class InputLayout:
    """The layout of the model's input."""

    gray: bool
    channels_last: bool
    dtype: type
    fixed_size: Size | None  # None: any


def read_description(path: str | Path) -> OnnxDescription:
    path = Path(path).expanduser()
    try:
        content = parse_yaml(read_text(path))
    except ValueError as error:
        raise FileError(f'cannot read {path}: {error}') from error
    known = [field.name for field in fields(OnnxDescription)]
    if not isinstance(content, dict) or 'model' not in content:
        raise FileError(f'{path} does not describe an ONNX extractor: it needs at least `model`')
    unknown = sorted(map(str, set(content) - set(known)))
    if unknown:
        raise FileError(f'{path}: unknown key {shown(unknown[0])}; it may have {", ".join(known)}')
    try:
        content['model'] = path.parent / content['model']
        over, _, under = str(content.get('scale', '1/255')).partition('/')
        content['scale'] = number(float(over) / float(under or 1), 'scale')
        description = OnnxDescription(**content)
        _check_values(description)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise FileError(f'{path} has a value that cannot be used: {error}') from error
    if description.runtime not in RUNTIMES:
        raise FileError(f'{path}: runtime must be one of {", ".join(RUNTIMES)}')
    if description.coordinates not in COORDINATES:
        raise FileError(f'{path}: coordinates must be one of {", ".join(COORDINATES)}')
    return description


def _check_values(description: OnnxDescription) -> None:
    for name in ('mean', 'std'):
        given = getattr(description, name)
        values = given if isinstance(given, list | tuple) else [given]
        if len(values) not in (1, 3):
            raise ValueError(f'{name} must be one number or three, got {shown(given)}')
        for value in values:
            number(value, name, above=0 if name == 'std' else None)
    whole(description.multiple_of, 'multiple_of', least=1, most=1024)
    for name in ('image', 'keypoints', 'scores', 'descriptors'):
        if not isinstance(getattr(description, name), str | None):
            raise ValueError(f'{name} must be the name of an input or output')


def onnx_extractor(path: str | Path, threads: int | None = None) -> Extract:
    """Open the extractor that a YAML file describes, on the CPU."""
    description = read_description(path)
    network = open_network(description.model, description.runtime, threads)
    inputs = {port.name: port for port in network.inputs}
    name = description.image or next(iter(inputs))
    outputs = [description.keypoints, description.descriptors]
    outputs += [description.scores] if description.scores else []
    _check_names(description.model, [name], list(inputs))
    _check_names(description.model, outputs, network.outputs)
    layout = _input_layout(description.model, inputs[name])

    def extract(image: Image) -> Features:
        working = layout.fixed_size or _nearest_size(size_of(image), description.multiple_of)
        tensor = _tensor(cv2.resize(image, working), layout, description)
        try:
            values = dict(zip(outputs, network.run({name: tensor}, outputs), strict=True))
        except Exception as error:  # the exceptions of the runtimes have no common base
            raise ValueError(
                f'{description.model} failed on an input of {tensor.shape}: {error}'
            ) from error
        points: Float = values[description.keypoints].reshape(-1, 2).astype(np.float32)
        if description.coordinates == 'normalised':
            points = ((points + 1) / 2 * np.subtract(working, 1)).astype(np.float32)
        if description.scores:
            scores = values[description.scores].reshape(-1).astype(np.float32)
        else:
            scores = np.arange(len(points), 0, -1, dtype=np.float32)
        vectors = _rows(values[description.descriptors], len(points))
        order = np.argsort(-scores, kind='stable')
        given = Placement(size_of(image), working).to_given(points)
        return Features(
            given[order], scores[order], unit_descriptors(vectors)[order], size_of(image)
        )

    return extract


def _check_names(model: Path, wanted: list[str], there: list[str]) -> None:
    for name in wanted:
        if name not in there:
            raise FileError(f"{model} has no '{name}': it has {', '.join(there)}")


def _input_layout(model: Path, port: Port) -> InputLayout:
    shape, channel_axis = port.shape, 1
    if len(shape) == 4 and shape[1] not in (1, 3) and shape[3] in (1, 3):
        channel_axis = 3
    if len(shape) != 4 or shape[channel_axis] not in (1, 3) or port.dtype is None:
        raise FileError(f'{model} does not take images, such as float32 1x3x?x?, but {port}')
    height, width = shape[2:] if channel_axis == 1 else shape[1:3]
    fixed = None if width is None or height is None else (width, height)
    return InputLayout(shape[channel_axis] == 1, channel_axis == 3, port.dtype, fixed)


def _nearest_size(given: Size, multiple: int) -> Size:
    width, height = (max(round(side / multiple), 1) * multiple for side in given)
    return width, height


def _tensor(
    image: NDArray[Any], layout: InputLayout, description: OnnxDescription
) -> NDArray[Any]:
    """Convert pixels to the input of the model; a uint8 input gets them unchanged."""
    values = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[..., None] if layout.gray else image
    if layout.dtype is not np.uint8:
        values = values.astype(np.float32) * description.scale
        values = (values - np.asarray(description.mean)) / np.asarray(description.std)
    values = values if layout.channels_last else values.transpose(2, 0, 1)
    return np.ascontiguousarray(values[None], layout.dtype)


def _rows(descriptors: NDArray[Any], count: int) -> NDArray[Any]:
    """Return descriptors as (N, D), from (N, D) or (D, N)."""
    matrix = descriptors[0] if descriptors.ndim == 3 else descriptors
    if matrix.ndim != 2 or count not in matrix.shape:
        raise ValueError(f'the model gave {count} keypoints but descriptors {descriptors.shape}')
    return matrix if matrix.shape[0] == count else matrix.T
