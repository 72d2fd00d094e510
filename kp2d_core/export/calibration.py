"""Measure on images which ranges the activations take, for int8."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx
from numpy.typing import NDArray

from kp2d_core.checkpoint import Checkpoint
from kp2d_core.export.graph import build_graph
from kp2d_core.export.profile import Profile
from kp2d_core.export.quantization import LEVELS, QUANTIZED_LAYERS, Calibration, Ranges
from kp2d_core.images import Image, prepare

BINS = 2048
CALIBRATION_SIZE = (320, 240)


def calibrate(
    checkpoint: Checkpoint, images: Sequence[Image], *, progress: bool = False
) -> Calibration:
    """The ranges that lose least on these images: a few dozen, like those that will come."""
    if not images:
        raise ValueError('calibration needs at least one image')
    inputs = [prepare(image, CALIBRATION_SIZE)[0][None] for image in images]
    watch = Watch(checkpoint)
    largest = dict.fromkeys(watch.layers, 0.0)
    for values in watch.run(inputs, 'calibrating, 1 of 2' if progress else None):
        for layer, value in values.items():
            largest[layer] = max(largest[layer], float(np.abs(value).max()))
    largest = {layer: max(value, 1e-6) for layer, value in largest.items()}
    histograms = {layer: np.zeros(BINS) for layer in watch.layers}
    for values in watch.run(inputs, 'calibrating, 2 of 2' if progress else None):
        for layer, value in values.items():
            counts, _ = np.histogram(np.abs(value), BINS, (0, largest[layer]))
            histograms[layer] += counts
    ranges: Ranges = dict.fromkeys(QUANTIZED_LAYERS, 1.0)  # those of layers that V0 has not
    for layer in watch.layers:
        ranges[layer] = largest[layer] * best_fraction(histograms[layer])
    return Calibration(ranges, checkpoint.digest(), len(images))


def best_fraction(histogram: NDArray[np.float64]) -> float:
    """Where to clip magnitudes, as a fraction of the largest, for the least squared error."""
    centres = (np.arange(BINS) + 0.5) / BINS
    candidates = np.linspace(0.2, 1.0, 81)
    errors = []
    for candidate in candidates:
        step = candidate / LEVELS
        clipped = np.maximum(centres - candidate, 0)
        rounded = np.where(centres < candidate, step / np.sqrt(12), 0)
        errors.append(float((histogram * (clipped**2 + rounded**2)).sum()))
    return float(candidates[int(np.argmin(errors))])


class Watch:
    """Runs the fp32 graph and gives the outputs of the layers that int8 quantizes."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        try:
            import onnxruntime
        except ModuleNotFoundError as error:
            raise ValueError('calibration needs ONNX Runtime: pip install onnxruntime') from error

        width, height = CALIBRATION_SIZE
        model = build_graph(checkpoint, Profile(height, width, top_k=1), dense=True)
        written = {name for node in model.graph.node for name in node.output}
        self.layers = [layer for layer in QUANTIZED_LAYERS if layer in written]
        self.names = [
            f'{layer}.active' if f'{layer}.active' in written else layer for layer in self.layers
        ]
        for name in self.names:
            model.graph.output.append(onnx.ValueInfoProto(name=name))
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=['CPUExecutionProvider']
        )

    def run(
        self, inputs: Sequence[NDArray[np.uint8]], description: str | None
    ) -> Iterable[dict[str, NDArray[np.float32]]]:
        from tqdm import tqdm

        for image in tqdm(inputs, description, disable=description is None, unit='image'):
            values = self.session.run(self.names, {'image': image})
            yield dict(zip(self.layers, values, strict=True))
