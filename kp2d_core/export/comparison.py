"""What a precision costs: the paper's metrics of an exported graph beside those of fp32."""

from __future__ import annotations

import tempfile
from pathlib import Path

import cv2
import numpy as np

from kp2d_core.detector import KeypointDetector
from kp2d_core.export.profile import Profile
from kp2d_core.images import Image, prepare

METRICS = ('repeatability', 'localization', 'cor1', 'cor3', 'cor5', 'mscore')
MOST_PAIRS = 16  # made of single images


def compare(
    reference: KeypointDetector,
    exported: KeypointDetector,
    profile: Profile,
    *,
    sequences: Path | None = None,
    images: list[Image] | None = None,
) -> dict[str, dict[str, float]]:
    """Metrics of 'fp32' and of the exported precision.

    On `sequences`, a folder in HPatches layout, or on pairs made of `images` by homographies.
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
    from kp2d_core.evaluation.hpatches import load_sequences
    from kp2d_core.evaluation.protocol import evaluate

    def extract(image: Image):  # type: ignore[no-untyped-def]
        return detector.detect(image, scales=(1,), max_keypoints=profile.top_k)

    size = (profile.width, profile.height)
    sequences = load_sequences(folder)
    mean = evaluate(extract, sequences, size=size, top_k=profile.top_k, seeds=5).mean()
    return {name: mean[name] for name in METRICS}


def write_pairs(folder: Path, images: list[Image], profile: Profile) -> None:
    """Each image, and the same seen from aside, in HPatches layout; the same at each call."""
    random = np.random.default_rng(0)
    for number, image in enumerate(images[:MOST_PAIRS]):
        size = (profile.width, profile.height)
        first = np.asarray(cv2.resize(prepare(image)[0], size, interpolation=cv2.INTER_AREA))
        corners = np.array([(0, 0), (1, 0), (1, 1), (0, 1)]) * (np.array(size) - 1)
        moved = corners + random.uniform(-0.12, 0.12, (4, 2)) * size
        first_to_second = cv2.getPerspectiveTransform(
            corners.astype(np.float32), moved.astype(np.float32)
        )
        second = cv2.warpPerspective(first, first_to_second, size)
        sequence = folder / f'v_{number:03}'
        sequence.mkdir()
        for name, view in (('1.png', first), ('2.png', second)):
            cv2.imwrite(str(sequence / name), cv2.cvtColor(view, cv2.COLOR_RGB2BGR))
        np.savetxt(sequence / 'H_1_2', first_to_second)


def format_comparison(metrics: dict[str, dict[str, float]]) -> str:
    """A small table with the differences in the last row."""
    (_, reference), (_, exported) = metrics.items()
    rows = [['', *METRICS]]
    rows += [[name, *(f'{row[m]:.3f}' for m in METRICS)] for name, row in metrics.items()]
    rows.append(['difference', *(f'{exported[m] - reference[m]:+.3f}' for m in METRICS)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ['  '.join(map(str.rjust, row, widths)) for row in rows]
    return '\n'.join(lines)
