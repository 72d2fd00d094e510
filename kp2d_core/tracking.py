"""Persistent track ids over a stream of features: what visual odometry consumes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kp2d_core.checks import whole
from kp2d_core.features import Features, join_features
from kp2d_core.images import Image, to_gray
from kp2d_core.matching import Matches, match
from kp2d_core.refinement import match_refined

Ints = NDArray[np.int64]

# How clear a track that was missed must be to come back, having no geometry to agree with: so much
# nearer than the second nearest descriptor, and so near.
CLEAR_RATIO, CLEAR_DISTANCE = 0.8, 1.0


@dataclass(frozen=True)
class Tracks:
    """The tracks of one frame's features, row by row."""

    ids: Ints  # (N,) the same number for the same point of the scene, never used again
    ages: Ints  # (N,) in how many earlier frames the track was seen; 0 = born here
    matches: Matches  # previous frame -> this frame
    refined: Features | None = None  # this frame's, matched ones at refined places; if asked for

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


def missed_again(known: Known, found: Matches, max_missed: int) -> Known:
    """Those that were not found but may still come back."""
    left = (known.ages > 0) & (known.missed < max_missed)
    left[found.indices[found.inliers, 0]] = False
    left_over = known[np.flatnonzero(left)]
    return replace(left_over, missed=left_over.missed + 1)


def join(first: Known, second: Known) -> Known:
    """Both, one after the other."""
    return Known(
        join_features([first.features, second.features]),
        np.concatenate([first.ids, second.ids]),
        np.concatenate([first.ages, second.ages]),
        np.concatenate([first.missed, second.missed]),
    )


class Tracker:
    """Assigns track ids to the features of successive frames.

    An unmatched feature starts a track. A track ends after it was missed in more than
    `max_missed` frames in a row. A track seen in only one frame ends the first time it is missed,
    because most of these never return. Other keyword arguments are passed to `match`. Outliers of
    its verification do not continue a track.

    Frames that come with their image are refined: matched features move to where the patch around
    them fits that of the previous frame (`refine_matches`), and what does not align is an outlier.
    """

    def __init__(self, max_missed: int = 2, **match_options: Any) -> None:
        self.max_missed = whole(max_missed, 'max_missed')
        self.match_options: dict[str, Any] = {'mutual': True, **match_options}
        self._next_id = 0
        self.reset()

    def reset(self) -> None:
        """End all tracks. Ids are never reused."""
        self._previous: Known | None = None  # tracks seen in the previous frame
        self._missed: Known | None = None  # tracks that were missed in it
        self._image: Image | None = None  # its image, gray, if it came with one

    def update(self, features: Features, image: Image | None = None) -> Tracks:
        """Assign tracks to the features of the next frame; with its image, refine them."""
        ids = np.full(len(features), -1, np.int64)
        ages = np.zeros(len(features), np.int64)

        def go_on(tracks: Known, found: Matches, rows: NDArray[np.intp]) -> None:
            """Give the features in `rows` the tracks they were matched with."""
            before, now = found.indices[found.inliers].T
            ids[rows[now]] = tracks.ids[before]
            ages[rows[now]] = tracks.ages[before] + 1

        matches = match(features[:0], features)
        missed = self._missed
        if self._previous is not None:
            matches, features = self._match(self._previous.features, features, image)
            go_on(self._previous, matches, np.arange(len(features)))
            lost = missed_again(self._previous, matches, self.max_missed)
            if missed is not None and len(missed.ids):
                # Features still without a track are too few to verify geometrically, so their
                # matches must be unambiguous.
                free = np.flatnonzero(ids < 0)
                found = match(missed.features, features[free], **self._options_for_missed())
                go_on(missed, found, free)
                lost = join(lost, missed_again(missed, found, self.max_missed))
            missed = lost

        newborn = np.flatnonzero(ids < 0)
        ids[newborn] = self._next_id + np.arange(len(newborn))
        self._next_id += len(newborn)
        self._previous = Known(features, ids, ages, np.zeros_like(ids))
        self._missed = missed
        self._image = to_gray(image) if image is not None else None
        return Tracks(ids, ages, matches, features if image is not None else None)

    def _match(
        self, previous: Features, features: Features, image: Image | None
    ) -> tuple[Matches, Features]:
        """Matches, and the features at their refined places where both frames have an image."""
        if image is None or self._image is None or self._image.shape != image.shape[:2]:
            return match(previous, features, **self.match_options), features
        options = self.match_options
        matches, refined = match_refined(
            self._image, to_gray(image), previous, features, **options
        )
        return matches, refined.moved(features, matches)

    def _options_for_missed(self) -> dict[str, Any]:
        options = self.match_options
        ratio = min(options.get('max_ratio') or CLEAR_RATIO, CLEAR_RATIO)
        distance = min(options.get('max_distance') or CLEAR_DISTANCE, CLEAR_DISTANCE)
        return {**options, 'verification': 'none', 'max_ratio': ratio, 'max_distance': distance}
