"""From frames to results, without ROS: features, tracks, rays, and when tracks restart."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import cv2
import numpy as np

from kp2d_core.camera import Camera
from kp2d_core.detector import KeypointDetector
from kp2d_core.features import Features, Float, select
from kp2d_core.images import Image, Size, check_image, check_mask, size_of
from kp2d_core.tracking import Tracker, Tracks
from kp2d_ros.settings import Settings

THREAD_NAME = 'kp2d compiler'
AT_ONCE = 0.05  # seconds: what takes no longer is waited for
PAUSE = 5.0  # seconds before something that could not be compiled is tried again
DRIFT = 0.02  # of the image's diagonal that a calibration may move from one frame to the next


@dataclass(frozen=True)
class Frame:
    """An image with what ROS says about it."""

    image: Image
    stamp: int  # nanoseconds
    frame_id: str = ''
    camera: Camera | None = None
    mask: Image | None = None  # keypoints are kept where it is not 0; of any size
    baseline: float = 0.0  # metres to the right of the first camera of a stereo pair


@dataclass(frozen=True)
class Result:
    """What came of a frame."""

    frame: Frame
    features: Features
    tracks: Tracks | None  # None: tracking is off
    previous: Result | None  # the frame that the matches are with, without its own previous
    rays: Float  # (N, 2): (x / z, y / z) of each keypoint; NaN where the lens has none
    calibrated: bool  # else the rays are those of a camera with a nominal focal length
    verified_by: str  # 'essential', 'fundamental', 'homography' or 'none'
    inference_time: float  # seconds
    total_time: float


@dataclass(frozen=True)
class Work:
    """What compiled networks depend on."""

    sizes: tuple[Size, ...]  # of the images that are detected in at once
    working_size: int
    scales: tuple[float, ...]
    limit: int | None  # keypoints to ask of the network; None: one for each cell

    def __str__(self) -> str:
        width, height = self.sizes[0]
        limit = 'all' if self.limit is None else self.limit
        return f'{width}x{height} images and {limit} keypoints'


class Pipeline:
    """Detects and tracks in the frames of one camera or several. One thread at a time."""

    def __init__(
        self,
        detector: KeypointDetector,
        mask: Image | None = None,
        *,
        cameras: int = 1,
        in_background: bool = False,
    ) -> None:
        """in_background: old settings stay in use while the network is compiled for new ones."""
        self.detector = detector
        self.mask = mask
        self._in_background = in_background
        self.streams = [Stream() for _ in range(cameras)]
        self.preparing = ''  # what the network is compiled for at present, for people
        self.problem = ''  # why it could not be compiled for the settings
        self._ready: Work | None = None  # the last that was compiled
        self._failed: Work | None = None
        self._again_at = 0.0  # time.monotonic()
        self._compiler: threading.Thread | None = None

    @property
    def resets(self) -> dict[str, int]:
        """Reason -> how often tracks restarted."""
        total: dict[str, int] = {}
        for stream in self.streams:
            for reason, count in [*stream.resets.items()]:
                total[reason] = total.get(reason, 0) + count
        return total

    def check(self, frame: Frame, settings: Settings) -> None:
        """ValueError in a sentence if the frame cannot be used with these settings."""
        check_image(frame.image)
        if self.mask is not None:
            check_mask(self.mask, size_of(frame.image))
        self.detector.check_size(
            size_of(frame.image), settings.working_size or None, settings.scales
        )

    def process(self, frame: Frame, settings: Settings) -> Result:
        """A frame of the only camera; ValueError if it cannot be used, tracks are as before."""
        self.check(frame, settings)
        return self.process_all([frame], settings)[0]

    def process_all(self, frames: Sequence[Frame], settings: Settings) -> list[Result]:
        """One frame of each camera, detected in at once; they must be checked."""
        work = self._prepared(frames, settings)
        began = time.perf_counter()
        found = self.detector.detect(
            [frame.image for frame in frames],
            working_size=work.working_size or None,
            scales=work.scales,
            max_keypoints=work.limit,
            nms_radius=0.0,
        )
        features = [
            select(
                each,
                max_keypoints=settings.max_keypoints,
                score_threshold=settings.score_threshold,
                nms_radius=settings.nms_radius,
                mask=self._mask(frame),
            )
            for each, frame in zip(found, frames, strict=True)
        ]
        spent = time.perf_counter() - began
        return [
            stream.follow(frame, each, settings, spent)
            for stream, frame, each in zip(self.streams, frames, features, strict=True)
        ]

    def prepare(self, sizes: Sequence[Size], settings: Settings, masked: bool = False) -> None:
        """Compile and warm up for images of these sizes, before any comes."""
        blank = [Frame(np.zeros((height, width, 3), np.uint8), 0) for width, height in sizes]
        if masked:
            blank = [replace(frame, mask=frame.image[..., 0]) for frame in blank]
        self._prepared(blank, settings)
        self.detector.detect(
            [frame.image for frame in blank],
            working_size=settings.working_size or None,
            scales=settings.scales,
            max_keypoints=self._work(blank, settings).limit,
            nms_radius=0.0,
        )

    def reset(self, reason: str) -> None:
        """Forget the tracks; their ids are never given again."""
        for stream in self.streams:
            stream.reset(reason)

    def _mask(self, frame: Frame) -> Image | None:
        if frame.mask is None:
            return self.mask
        mask = frame.mask
        if size_of(mask) != size_of(frame.image):
            nearest = cv2.resize(mask, size_of(frame.image), interpolation=cv2.INTER_NEAREST)
            mask = np.asarray(nearest, np.uint8)
        return mask if self.mask is None else np.minimum(self.mask, mask)

    def _work(self, frames: Sequence[Frame], settings: Settings) -> Work:
        masked = self.mask is not None or any(frame.mask is not None for frame in frames)
        limit = self.detector.limit(settings.max_keypoints, settings.nms_radius, masked)
        sizes = tuple(size_of(frame.image) for frame in frames)
        return Work(sizes, settings.working_size, settings.scales, limit)

    def _prepared(self, frames: Sequence[Frame], settings: Settings) -> Work:
        """What is asked for or, while the network is compiled for it, what was before.

        Only the first frame of a size waits for the compiler.
        """
        work, ready = self._work(frames, settings), self._ready
        if work == ready:
            return work
        refused = work == self._failed and time.monotonic() < self._again_at
        if not self._in_background or ready is None or ready.sizes != work.sizes:
            if not refused:
                self._compile(work)
            if self.problem:
                raise RuntimeError(self.problem)
            return work
        compiling = self._compiler is not None and self._compiler.is_alive()
        if not compiling and not refused:
            self._compiler = threading.Thread(
                target=self._compile, args=(work,), name=THREAD_NAME, daemon=True
            )
            self._compiler.start()
            self._compiler.join(AT_ONCE)
        return work if self._ready == work else ready

    def _compile(self, work: Work) -> None:
        self.preparing = str(work)
        try:
            for size in dict.fromkeys(work.sizes):
                self.detector.prepare(
                    size,
                    count=work.sizes.count(size),
                    working_size=work.working_size or None,
                    scales=work.scales,
                    limit=work.limit,
                )
            self._ready, self._failed, self.problem = work, None, ''
        except Exception as error:  # whatever a runtime raises: keep the old network
            self._failed, self._again_at = work, time.monotonic() + PAUSE
            self.problem = f'the network cannot be compiled for {work}: {error}'
        finally:
            self.preparing = ''


class Stream:
    """The tracks of one camera."""

    def __init__(self) -> None:
        self.resets: dict[str, int] = {}  # reason -> how often
        self._tracker = Tracker()
        self._previous: Result | None = None

    def follow(
        self, frame: Frame, features: Features, settings: Settings, inference_time: float
    ) -> Result:
        began = time.perf_counter()
        reason = self._break_before(frame, settings)
        if reason is not None:
            self.reset(reason)
        camera = frame.camera.of(features.image_size) if frame.camera is not None else None
        tracks, verified_by = None, 'none'
        if settings.track:
            image = frame.image if settings.refine_matches else None
            tracks, verified_by = self._track(features, image, camera, settings)
            features = tracks.refined or features
        seen_by = camera if camera is not None else nominal_camera(features.image_size)
        result = Result(
            frame=frame,
            features=features,
            tracks=tracks,
            previous=self._previous,
            rays=np.asarray(seen_by.rays(features.keypoints), np.float32),
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

    def _break_before(self, frame: Frame, settings: Settings) -> str | None:
        """Why this frame does not continue the sequence, None if it does."""
        if self._previous is None:
            return None
        before = self._previous.frame
        if size_of(frame.image) != size_of(before.image):
            return 'image size changed'
        if frame.frame_id != before.frame_id:
            return 'frame_id changed'
        if differ(frame.camera, before.camera):
            return 'calibration changed'
        if frame.stamp < before.stamp:
            return 'time went backwards'
        if frame.stamp - before.stamp > settings.max_gap * 1e9:
            return 'gap between frames'
        if settings.track and self._previous.tracks is None:
            return 'tracking switched on'
        return None

    def _track(
        self, features: Features, image: Image | None, camera: Camera | None, settings: Settings
    ) -> tuple[Tracks, str]:
        method, options = _verification(settings, camera)
        self._tracker.max_missed = settings.max_missed
        self._tracker.match_options = {
            'mutual': True,
            'max_ratio': settings.match_ratio or None,
            'max_distance': settings.match_distance or None,
            'radius': settings.search_radius or None,
            **options,
        }
        return self._tracker.update(features, image), method


def differ(first: Camera | None, second: Camera | None) -> bool:
    """Whether a calibration changed by more than a drift between frames, as from autofocus."""
    if first is None or second is None or first.size != second.size:
        return first is not second
    return first != second and first.shift(second) > DRIFT * np.hypot(*first.size)


def _verification(settings: Settings, camera: Camera | None) -> tuple[str, dict[str, Any]]:
    """The method, and `match`'s arguments for it."""
    method = settings.verification
    if method == 'auto' or (method == 'essential' and camera is None):
        method = 'essential' if camera is not None else 'fundamental'
    options = {'verification': method, 'threshold': settings.verification_threshold}
    if method == 'essential' and camera is not None:
        # One camera matrix describes undistorted pixels only.
        options |= {'intrinsics': camera.matrix, 'undistort': camera.undistort}
    return method, options


@lru_cache(8)
def nominal_camera(size: Size) -> Camera:
    """Of images without a calibration: a pinhole, its focal length the image's longer side."""
    width, height = size
    focal = float(max(size))
    return Camera.create(size, [focal, 0, (width - 1) / 2, 0, focal, (height - 1) / 2, 0, 0, 1])
