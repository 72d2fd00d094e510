"""Persistent track ids over a stream of features: what visual odometry consumes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kp2d_core.features import Features
from kp2d_core.matching import Matches, match

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Tracks:
    """The tracks of one frame's features, row by row."""

    ids: Ints  # (N,) the same number for the same point of the scene, never used again
    ages: Ints  # (N,) in how many earlier frames the track was seen; 0 = born here
    matches: Matches  # previous frame -> this frame

    def __len__(self) -> int:
        return len(self.ids)


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
        self._live: Features | None = None  # each live track's feature where it was last seen
        self._ids: Ints = np.empty(0, np.int64)
        self._ages: Ints = np.empty(0, np.int64)
        self._missed: Ints = np.empty(0, np.int64)
        self._rows: Ints = np.empty(0, np.int64)  # in the previous frame, -1 if missed there

    def update(self, features: Features) -> Tracks:
        """The tracks of the next frame's features."""
        live = self._live if self._live is not None else features[:0]
        found = match(live, features, **self.match_options)
        before, now = found.indices[found.inliers].T

        ids = np.full(len(features), -1, np.int64)
        ages = np.zeros(len(features), np.int64)
        ids[now] = self._ids[before]
        ages[now] = self._ages[before] + 1
        newborn = np.flatnonzero(ids < 0)
        ids[newborn] = self._next_id + np.arange(len(newborn))
        self._next_id += len(newborn)

        tracks = Tracks(ids, ages, self._previous_frame_matches(found))
        self._remember(features, ids, ages, continued=before)
        return tracks

    def _previous_frame_matches(self, found: Matches) -> Matches:
        rows = self._rows[found.indices[:, 0]]
        seen = rows >= 0
        indices = np.stack([rows[seen], found.indices[seen, 1]], axis=1)
        return Matches(indices, found.distances[seen], found.inliers[seen], found.model)

    def _remember(self, features: Features, ids: Ints, ages: Ints, continued: Ints) -> None:
        """This frame's tracks, and those missed in it that may still come back."""
        waiting = np.ones(len(self._ids), bool)
        waiting[continued] = False
        waiting &= self._missed < self.max_missed
        count = len(features)
        if self._live is not None and waiting.any():
            lost = self._live[waiting]
            self._live = Features(
                np.concatenate([features.keypoints, lost.keypoints]),
                np.concatenate([features.scores, lost.scores]),
                np.concatenate([features.descriptors, lost.descriptors]),
                features.image_size,
            )
        else:
            self._live = features
        self._ids = np.concatenate([ids, self._ids[waiting]])
        self._ages = np.concatenate([ages, self._ages[waiting]])
        self._missed = np.concatenate([np.zeros(count, np.int64), self._missed[waiting] + 1])
        self._rows = np.concatenate([np.arange(count), np.full(int(waiting.sum()), -1, np.int64)])
