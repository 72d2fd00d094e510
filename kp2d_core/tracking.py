"""Persistent track ids over a stream of features: what visual odometry consumes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kp2d_core.features import Features
from kp2d_core.matching import Matches, match

Ints = NDArray[np.int64]

CLEAR_RATIO = 0.8  # of descriptor distances: what a track that was missed must pass to come back


@dataclass(frozen=True)
class Tracks:
    """The tracks of one frame's features, row by row."""

    ids: Ints  # (N,) the same number for the same point of the scene, never used again
    ages: Ints  # (N,) in how many earlier frames the track was seen; 0 = born here
    matches: Matches  # previous frame -> this frame

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Generation:
    """The tracks that were last seen in one frame, as they were there."""

    features: Features
    ids: Ints
    ages: Ints

    def without(self, rows: NDArray[np.intp]) -> Generation:
        rest = np.ones(len(self.ids), bool)
        rest[rows] = False
        return Generation(self.features[rest], self.ids[rest], self.ages[rest])


class Tracker:
    """Gives features of successive frames their track ids.

    A track is born with an unmatched feature, goes on while it is matched, and ends after it was
    missed in more than `max_missed` successive frames. Other keyword arguments are `match`'s.
    Outliers of its verification do not continue a track.
    """

    def __init__(self, max_missed: int = 2, **match_options: Any) -> None:
        if max_missed < 0:
            raise ValueError(f'max_missed must be 0 or more, got {max_missed}')
        self.max_missed = max_missed
        self.match_options: dict[str, Any] = {'mutual': True, **match_options}
        self._next_id = 0
        self.reset()

    def reset(self) -> None:
        """Forget all tracks. Ids go on: one is never given twice."""
        self._generations: list[Generation] = []  # the previous frame's first

    def update(self, features: Features) -> Tracks:
        """The tracks of the next frame's features."""
        ids = np.full(len(features), -1, np.int64)
        ages = np.zeros(len(features), np.int64)
        matches = match(features[:0], features)
        waiting: list[Generation] = []
        # The previous frame first; then what was missed in it, with the features that are still
        # without a track: too few for a geometry, but they must be clear.
        for number, generation in enumerate(self._generations):
            free = np.flatnonzero(ids < 0)
            options = self.match_options if number == 0 else self._options_for_missed()
            found = match(generation.features, features[free], **options)
            if number == 0:
                matches = found
            before, now = found.indices[found.inliers].T
            ids[free[now]] = generation.ids[before]
            ages[free[now]] = generation.ages[before] + 1
            waiting.append(generation.without(before))

        newborn = np.flatnonzero(ids < 0)
        ids[newborn] = self._next_id + np.arange(len(newborn))
        self._next_id += len(newborn)
        self._generations = [Generation(features, ids, ages), *waiting[: self.max_missed]]
        return Tracks(ids, ages, matches)

    def _options_for_missed(self) -> dict[str, Any]:
        ratio = min(self.match_options.get('max_ratio') or 1.0, CLEAR_RATIO)
        return {**self.match_options, 'verification': 'none', 'max_ratio': ratio}
