"""Persistent track ids over a stream of features: what visual odometry consumes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kp2d_core.features import Features, join_features
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
class Known:
    """Tracks as they were when they were last seen, row by row."""

    features: Features
    ids: Ints
    ages: Ints
    missed: Ints  # in how many frames they were not found since

    def __getitem__(self, which: NDArray[Any]) -> Known:
        return Known(self.features[which], self.ids[which], self.ages[which], self.missed[which])

    def without(self, rows: NDArray[np.intp]) -> Known:
        rest = np.ones(len(self.ids), bool)
        rest[rows] = False
        return self[rest]


def join(first: Known, second: Known) -> Known:
    """Both, one after the other."""
    return Known(
        join_features(first.features, second.features),
        np.concatenate([first.ids, second.ids]),
        np.concatenate([first.ages, second.ages]),
        np.concatenate([first.missed, second.missed]),
    )


class Tracker:
    """Gives features of successive frames their track ids.

    A track is born with an unmatched feature, goes on while it is matched, and ends after it was
    missed in more than `max_missed` successive frames; at once if it was seen only once, as most
    that are never seen again. Other keyword arguments are `match`'s. Outliers of its verification
    do not continue a track.
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
        self._previous: Known | None = None  # what the previous frame had
        self._missed: Known | None = None  # what it had not

    def update(self, features: Features) -> Tracks:
        """The tracks of the next frame's features."""
        ids = np.full(len(features), -1, np.int64)
        ages = np.zeros(len(features), np.int64)

        def go_on(tracks: Known, found: Matches, rows: NDArray[np.intp]) -> Known:
            """Give the features in `rows` the tracks they were matched with; what is left."""
            before, now = found.indices[found.inliers].T
            ids[rows[now]] = tracks.ids[before]
            ages[rows[now]] = tracks.ages[before] + 1
            left = tracks.without(before)
            return replace(left, missed=left.missed + 1)

        matches = match(features[:0], features)
        missed = self._missed
        if self._previous is not None:
            matches = match(self._previous.features, features, **self.match_options)
            lost = go_on(self._previous, matches, np.arange(len(features)))
            if missed is not None:
                # With the features that are still without a track: too few for a geometry, but
                # they must be clear.
                free = np.flatnonzero(ids < 0)
                found = match(missed.features, features[free], **self._options_for_missed())
                lost = join(lost, go_on(missed, found, free))
            missed = lost[(lost.ages > 0) & (lost.missed <= self.max_missed)]

        newborn = np.flatnonzero(ids < 0)
        ids[newborn] = self._next_id + np.arange(len(newborn))
        self._next_id += len(newborn)
        self._previous = Known(features, ids, ages, np.zeros_like(ids))
        self._missed = missed
        return Tracks(ids, ages, matches)

    def _options_for_missed(self) -> dict[str, Any]:
        ratio = min(self.match_options.get('max_ratio') or 1.0, CLEAR_RATIO)
        return {**self.match_options, 'verification': 'none', 'max_ratio': ratio}
