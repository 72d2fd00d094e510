"""Matches of the pairs drawn side by side: correct ones green, wrong ones red."""

from __future__ import annotations

from dataclasses import dataclass, field

import cv2
import numpy as np

from kp2d_core.evaluation.metrics import correct_matches, mutual_matches
from kp2d_core.evaluation.protocol import Pair, PairResult
from kp2d_core.features import Features
from kp2d_core.images import size_of
from kp2d_core.matching import Matches
from kp2d_core.visualize import draw_matches

WIDTH = 1100  # px of a drawing


@dataclass(frozen=True)
class Drawing:
    method: str
    webp: bytes
    correct: int
    result: PairResult


@dataclass
class Gallery:
    """Watches evaluations and draws the pairs of each sequence with these targets."""

    targets: dict[str, set[int]]  # sequence -> numbers of the second images
    top_k: int
    drawings: dict[tuple[str, int], list[Drawing]] = field(default_factory=dict)

    def add(self, method: str, pair: Pair, result: PairResult) -> None:
        if pair.target not in self.targets.get(pair.sequence, ()):
            return
        drawing = draw_pair(method, pair, result, self.top_k)
        self.drawings.setdefault((pair.sequence, pair.target), []).append(drawing)


def draw_pair(method: str, pair: Pair, result: PairResult, top_k: int) -> Drawing:
    """The mutual matches that the homography is estimated from."""
    size = size_of(pair.first.image)
    first, second = mutual_matches(
        pair.first.features, pair.second.features, pair.first_to_second, size, top_k
    )
    correct = correct_matches(first, second, pair.first_to_second)
    scale = WIDTH / (2 * size[0])
    enlarged = [
        np.asarray(
            cv2.resize(view.image, None, fx=scale, fy=scale, interpolation=cv2.INTER_CUBIC),
            np.uint8,
        )
        for view in (pair.first, pair.second)
    ]
    points = [
        Features(
            ((each + 0.5) * scale - 0.5).astype(np.float32),
            np.ones(len(each), np.float32),
            np.empty((len(each), 0), np.float32),
        )
        for each in (first, second)
    ]
    rows = np.arange(len(first))
    matches = Matches(np.stack([rows, rows], axis=1), np.zeros(len(first), np.float32), correct)
    canvas = draw_matches(enlarged[0], enlarged[1], points[0], points[1], matches, len(first) or 1)
    _, encoded = cv2.imencode(
        '.webp', cv2.cvtColor(canvas, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_WEBP_QUALITY, 80]
    )
    return Drawing(method, encoded.tobytes(), int(correct.sum()), result)
