"""Persistent track ids over a stream of frames, as visual odometry needs them."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kp2d_core.camera import Camera
from kp2d_core.checks import whole
from kp2d_core.features import Features, Float
from kp2d_core.geometry import Size
from kp2d_core.images import Image, to_gray
from kp2d_core.matching import Matches, MatchOptions, match_in_turn, no_matches
from kp2d_core.refinement import match_refined
from kp2d_core.verification import Likely

Ints = NDArray[np.int64]

# Without geometry, a missed track returns only if its match is clear: largest ratio to the second
# nearest descriptor, and largest distance.
CLEAR_RATIO, CLEAR_DISTANCE = 0.8, 1.0
DRIFT = 0.02  # of the image diagonal: largest change of a calibration between two frames


@dataclass(frozen=True)
class Tracks:
    """The tracks of the features of one frame, row by row."""

    ids: Ints  # (N,) the same number for the same point of the scene, never reused
    ages: Ints  # (N,) number of earlier frames with the track; 0: it starts here
    matches: Matches  # previous frame -> this frame
    refined: Features | None = None  # of this frame, with refined positions, if requested

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Known:
    """Tracks as last seen, row by row."""

    features: Features
    ids: Ints
    ages: Ints
    missed: Ints  # number of frames since
    undistorted: Float | None = None  # (N, 2) pixels without distortion, if known

    def __getitem__(self, which: NDArray[Any]) -> Known:
        return Known(self.features[which], self.ids[which], self.ages[which], self.missed[which])


def missed_again(known: Known, found: Matches, max_missed: int) -> Known:
    """Return the tracks that were not found but may still return."""
    left = (known.ages > 0) & (known.missed < max_missed)
    left[found.indices[found.inliers, 0]] = False
    left_over = known[np.flatnonzero(left)]
    return replace(left_over, missed=left_over.missed + 1)


def join(first: Known, second: Known) -> Known:
    """Concatenate both."""
    return Known(
        first.features + second.features,
        np.concatenate([first.ids, second.ids]),
        np.concatenate([first.ages, second.ages]),
        np.concatenate([first.missed, second.missed]),
    )


class Tracker:
    """Assigns track ids to the features of successive frames.

    An unmatched feature starts a track. A track ends when it is missed in more than `max_missed`
    consecutive frames. A track seen in only one frame ends the first time it is missed, because
    most of these never return. Other keyword arguments are those of `match`. Outliers of its
    verification do not continue a track.

    Frames with an image are refined (`refine_matches`): matched features move to where their patch
    fits that of the previous frame. A match that does not align is an outlier.
    """

    def __init__(self, max_missed: int = 2, **match_options: Any) -> None:
        self.max_missed = whole(max_missed, 'max_missed')
        self.options = MatchOptions(**match_options)
        self._next_id = 0
        self.reset()

    @property
    def options(self) -> MatchOptions:
        return self._options

    @options.setter
    def options(self, options: MatchOptions) -> None:
        self._options = options
        self._likely: Likely | None = None  # that of another method or camera is of no use
        # Features without a track are too few for geometric verification, so matches with missed
        # tracks must be unambiguous.
        ratio = min(options.max_ratio or CLEAR_RATIO, CLEAR_RATIO)
        distance = min(options.max_distance or CLEAR_DISTANCE, CLEAR_DISTANCE)
        self._clear = replace(options, verification='none', max_ratio=ratio, max_distance=distance)

    def reset(self) -> None:
        """End all tracks. Ids are never reused."""
        self._previous: Known | None = None  # tracks seen in the previous frame
        self._missed: Known | None = None  # tracks missed in the previous frame
        self._image: Image | None = None  # the previous image, gray, if known
        self._likely = None

    def update(
        self, features: Features, image: Image | None = None, undistorted: Float | None = None
    ) -> Tracks:
        """Assign tracks to the features of the next frame; with its image, refine them.

        `undistorted` are the pixels of the features without distortion, if already known.
        """
        ids = np.full(len(features), -1, np.int64)
        ages = np.zeros(len(features), np.int64)
        previous, missed = self._previous, self._missed
        if previous is None:
            matches = no_matches()
        else:
            known = [previous] if missed is None or not len(missed.ids) else [previous, missed]
            found, features = self._match(known, features, image, undistorted)
            for tracks, pairs in zip(known, found, strict=True):
                before, now = pairs.indices[pairs.inliers].T
                ids[now] = tracks.ids[before]
                ages[now] = tracks.ages[before] + 1
            matches = found[0]
            lost = [
                missed_again(*each, self.max_missed) for each in zip(known, found, strict=True)
            ]
            missed = lost[0] if len(lost) == 1 else join(*lost)

        newborn = np.flatnonzero(ids < 0)
        ids[newborn] = self._next_id + np.arange(len(newborn))
        self._next_id += len(newborn)
        self._previous = Known(features, ids, ages, np.zeros_like(ids), undistorted)
        self._missed = missed
        self._image = to_gray(image) if image is not None else None
        return Tracks(ids, ages, matches, features if image is not None else None)

    def _match(
        self,
        known: list[Known],
        features: Features,
        image: Image | None,
        undistorted: Float | None,
    ) -> tuple[list[Matches], Features]:
        """Match each group of tracks; refine the features if both frames have an image."""
        groups = [
            (options, tracks.features, tracks.undistorted)
            for options, tracks in zip((self._options, self._clear), known, strict=False)
        ]
        if image is None or self._image is None or self._image.shape != image.shape[:2]:
            found = match_in_turn(groups, features, undistorted, self._likely)
            model, inliers = found[0].model, found[0].inliers
            self._likely = Likely(model, inliers.mean()) if model is not None else None
            return found, features
        options = {name: getattr(self._options, name) for name in MatchOptions.__annotations__}
        gray = to_gray(image)
        matches, refined = match_refined(self._image, gray, known[0].features, features, **options)
        features = refined.moved(features, matches)
        free = np.setdiff1d(np.arange(len(features)), matches.indices[matches.inliers, 1])
        others = match_in_turn(groups[1:], features[free])
        others = [
            replace(each, indices=np.stack([each.indices[:, 0], free[each.indices[:, 1]]], axis=1))
            for each in others
        ]
        return [matches, *others], features


@dataclass(frozen=True)
class Frame:
    """An image with its stamp, calibration and mask."""

    image: Image
    stamp: int  # nanoseconds
    frame_id: str = ''
    camera: Camera | None = None
    mask: Image | None = None  # of any size; keypoints are kept where it is not 0
    baseline: float = 0.0  # metres to the right of the first camera of a stereo pair

    @property
    def size(self) -> Size:
        return self.image.shape[1], self.image.shape[0]


@dataclass(frozen=True)
class Result:
    """The result of a frame."""

    frame: Frame
    features: Features
    tracks: Tracks | None  # None: tracking is off
    previous: Result | None  # the frame that the matches are with, without its own previous
    rays: Float  # (N, 2): (x / z, y / z) of each keypoint; NaN if it has no ray
    calibrated: bool  # otherwise the rays assume a nominal focal length
    verified_by: str  # 'essential', 'fundamental', 'homography' or 'none'
    inference_time: float  # seconds
    total_time: float


class StreamSettings(Protocol):
    """The settings that `Stream` reads; 0 is off."""

    @property
    def track(self) -> bool: ...
    @property
    def refine_matches(self) -> bool: ...
    @property
    def match_ratio(self) -> float: ...
    @property
    def match_distance(self) -> float: ...
    @property
    def search_radius(self) -> float: ...
    @property
    def verification(self) -> str: ...
    @property
    def verification_threshold(self) -> float: ...
    @property
    def max_missed(self) -> int: ...
    @property
    def max_gap(self) -> float: ...


class Stream:
    """Tracks the features of one camera and decides when tracks restart."""

    def __init__(self) -> None:
        self.resets: dict[str, int] = {}  # reason -> count
        self._tracker = Tracker()
        self._options_of: tuple[StreamSettings, Camera | None] | None = None
        self._previous: Result | None = None

    def follow(
        self, frame: Frame, features: Features, settings: StreamSettings, inference_time: float
    ) -> Result:
        began = time.perf_counter()
        reason = self._break_before(frame, settings)
        if reason is not None:
            self.reset(reason)
        camera = frame.camera.of(features.image_size) if frame.camera is not None else None
        seen_by = camera if camera is not None else nominal_camera(features.image_size)
        rays = seen_by.rays(features.keypoints)
        tracks, verified_by = None, 'none'
        if settings.track:
            verified_by = self._configure(settings, camera)
            flat = None
            if verified_by == 'essential':
                k = seen_by.matrix
                flat = np.asarray(rays @ k[:2, :2].T + k[:2, 2], np.float32)
            if settings.refine_matches:
                tracks = self._tracker.update(features, frame.image)
                features = tracks.refined or features
                rays = seen_by.rays(features.keypoints)
            else:
                tracks = self._tracker.update(features, undistorted=flat)
        result = Result(
            frame=frame,
            features=features,
            tracks=tracks,
            previous=self._previous,
            rays=np.asarray(rays, np.float32),
            calibrated=camera is not None,
            verified_by=verified_by,
            inference_time=inference_time,
            total_time=inference_time + time.perf_counter() - began,
        )
        self._previous = replace(result, previous=None)
        return result

    def reset(self, reason: str) -> None:
        self._tracker.reset()
        self._previous = None
        self.resets[reason] = self.resets.get(reason, 0) + 1

    def _break_before(self, frame: Frame, settings: StreamSettings) -> str | None:
        """Return why this frame does not continue the sequence; None if it does."""
        if self._previous is None:
            return None
        before = self._previous.frame
        if frame.size != before.size:
            return 'image size changed'
        if frame.frame_id != before.frame_id:
            return 'frame_id changed'
        if frame.camera is not before.camera and differ(frame.camera, before.camera):
            return 'calibration changed'
        if frame.stamp < before.stamp:
            return 'time went backwards'
        if frame.stamp - before.stamp > settings.max_gap * 1e9:
            return 'gap between frames'
        if settings.track and self._previous.tracks is None:
            return 'tracking switched on'
        return None

    def _configure(self, settings: StreamSettings, camera: Camera | None) -> str:
        """Update the options of the tracker; return the method of verification."""
        method: Any = settings.verification
        if method == 'auto' or (method == 'essential' and camera is None):
            method = 'essential' if camera is not None else 'fundamental'
        if self._options_of is None or self._options_of != (settings, camera):
            calibrated = camera if method == 'essential' else None
            self._tracker.max_missed = settings.max_missed
            self._tracker.options = MatchOptions(
                max_ratio=settings.match_ratio or None,
                max_distance=settings.match_distance or None,
                radius=settings.search_radius or None,
                verification=method,
                threshold=settings.verification_threshold,
                # One camera matrix describes undistorted pixels only.
                intrinsics=calibrated.matrix if calibrated is not None else None,
                undistort=calibrated.undistort if calibrated is not None else None,
            )
            self._options_of = settings, camera
        return str(method)


def differ(first: Camera | None, second: Camera | None) -> bool:
    """Whether a calibration changed by more than the drift of an autofocus."""
    if first is None or second is None or first.size != second.size:
        return first is not second
    return first != second and first.shift(second) > DRIFT * np.hypot(*first.size)


@lru_cache(8)
def nominal_camera(size: Size) -> Camera:
    """Return a pinhole camera whose focal length is the longer side of the image."""
    width, height = size
    focal = float(max(size))
    return Camera.create(size, [focal, 0, (width - 1) / 2, 0, focal, (height - 1) / 2, 0, 0, 1])
