"""int8 calibration: measure the ranges of the activations, and the loss of quality."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from kp2d_core.checkpoint import Checkpoint
from kp2d_core.detector import KeypointDetector
from kp2d_core.export.graph import build_graph
from kp2d_core.export.quantization import LEVELS, Calibration, Ranges, quantized_layers
from kp2d_core.export.source import Profile
from kp2d_core.features import prepare
from kp2d_core.images import Image

BINS = 2048
CALIBRATION_SIZE = (320, 240)
METRICS = ('repeatability', 'localization', 'cor1', 'cor3', 'cor5', 'mscore')
MOST_IMAGES = 6  # sequences are made of at most this many, six pairs each


def calibrate(
    checkpoint: Checkpoint, images: Sequence[Image], *, progress: bool = False
) -> Calibration:
    """Measure the ranges with the least loss on these images. A few dozen typical ones suffice."""
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
    ranges: Ranges = dict.fromkeys(quantized_layers(checkpoint.architecture), 1.0)
    for layer in watch.layers:  # an unused layer of the file keeps a range of 1
        ranges[layer] = largest[layer] * best_fraction(histograms[layer])
    return Calibration(ranges, checkpoint.digest(), len(images))


def best_fraction(histogram: NDArray[np.float64]) -> float:
    """Find where to clip magnitudes, as a fraction of the largest, for the least squared error."""
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
    """Runs the fp32 graph and returns the outputs of the layers that int8 quantizes."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        try:
            import onnxruntime
        except ModuleNotFoundError as error:
            raise ValueError('calibration needs ONNX Runtime: pip install onnxruntime') from error

        width, height = CALIBRATION_SIZE
        model = build_graph(
            checkpoint,
            Profile(height, width, top_k=1, cell=checkpoint.architecture.cell),
            dense=True,
        )
        written = {name for node in model.graph.node for name in node.output}
        self.layers = [
            layer for layer in quantized_layers(checkpoint.architecture) if layer in written
        ]
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


def compare(
    reference: KeypointDetector,
    exported: KeypointDetector,
    profile: Profile,
    *,
    sequences: Path | None = None,
    images: list[Image] | None = None,
) -> dict[str, dict[str, float]]:
    """Measure the metrics of 'fp32' and of the exported precision.

    The data are `sequences`, a folder in HPatches layout, or pairs made of `images`.
    """
    with tempfile.TemporaryDirectory() as folder:
        if sequences is None:
            sequences = Path(folder)
            write_pairs(sequences, images or [], profile)
        return {
            'fp32': _metrics(reference, sequences, profile),
            profile.precision: _metrics(exported, sequences, profile),
        }


def _metrics(detector: KeypointDetector, folder: Path, profile: Profile) -> dict[str, float]:
    from kp2d_core.detector import SPARE
    from kp2d_core.evaluation.hpatches import load_sequences
    from kp2d_core.evaluation.protocol import evaluate

    # An exported model returns at most its top_k points, copies included.
    places = max(1, round(profile.top_k / SPARE[profile.cell]))

    def extract(image: Image):  # type: ignore[no-untyped-def]
        return detector.detect(image, scales=(1,), max_keypoints=places)

    size = (profile.width, profile.height)
    sequences = load_sequences(folder)
    result = evaluate(extract, sequences, size=size, top_k=places, seeds=5, nms_radius=0)
    mean = result.mean()
    return {name: mean[name] for name in METRICS}


def write_pairs(folder: Path, images: list[Image], profile: Profile) -> None:
    """Write sequences in HPatches layout made from the images; the same at each call."""
    from kp2d_core.evaluation.hpatches import write_sequence
    from kp2d_core.views.pairs import make_sequences

    random = np.random.default_rng(0)
    for number, image in enumerate(images[:MOST_IMAGES]):
        size = (profile.width, profile.height)
        for sequence in make_sequences(image, f'{number:03}', size, random):
            write_sequence(folder, sequence)


def format_comparison(metrics: dict[str, dict[str, float]]) -> str:
    """Format a small table with the differences in the last row."""
    (_, reference), (_, exported) = metrics.items()
    rows = [['', *METRICS]]
    rows += [[name, *(f'{row[m]:.3f}' for m in METRICS)] for name, row in metrics.items()]
    rows.append(['difference', *(f'{exported[m] - reference[m]:+.3f}' for m in METRICS)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ['  '.join(map(str.rjust, row, widths)) for row in rows]
    return '\n'.join(lines)
