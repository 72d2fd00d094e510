"""From frame to result, without ROS: features, tracks, rays, and when tracks restart."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from kp2d_core.camera import Camera
from kp2d_core.detector import KeypointDetector
from kp2d_core.features import Features, Float
from kp2d_core.images import Image, Size, size_of
from kp2d_core.tracking import Tracker, Tracks
from kp2d_ros.settings import Settings


@dataclass(frozen=True)
class Frame:
    """An image with what ROS says about it."""

    image: Image
    stamp: int  # nanoseconds
    frame_id: str = ''
    camera: Camera | None = None


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


class Pipeline:
    """Detects and tracks in one stream of frames. One thread at a time."""

    def __init__(self, detector: KeypointDetector, mask: Image | None = None) -> None:
        self.detector = detector
        self.mask = mask
        self.resets: dict[str, int] = {}  # reason -> how often tracks began anew
        self._tracker = Tracker()
        self._previous: Result | None = None

    def process(self, frame: Frame, settings: Settings) -> Result:
        """ValueError if the image cannot be used; the tracks are then as they were."""
        began = time.perf_counter()
        features = self.detector.detect(
            frame.image,
            working_size=settings.working_size or None,
            scales=settings.scales,
            max_keypoints=settings.max_keypoints,
            score_threshold=settings.score_threshold,
            nms_radius=settings.nms_radius,
            mask=self.mask,
        )
        inference_time = time.perf_counter() - began

        reason = self._break_before(frame, settings)
        if reason is not None:
            self.reset(reason)
        camera = frame.camera.of(features.image_size) if frame.camera is not None else None
        tracks, verified_by = None, 'none'
        if settings.track:
            tracks, verified_by = self._track(features, camera, settings)
        result = Result(
            frame=frame,
            features=features,
            tracks=tracks,
            previous=self._previous,
            rays=(camera or nominal_camera(features.image_size))
            .rays(features.keypoints)
            .astype('f4'),
            calibrated=camera is not None,
            verified_by=verified_by,
            inference_time=inference_time,
            total_time=time.perf_counter() - began,
        )
        self._previous = replace(result, previous=None)
        return result

    def reset(self, reason: str) -> None:
        """Forget the tracks; their ids are never given again."""
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
        if frame.camera != before.camera:
            return 'calibration changed'
        if frame.stamp < before.stamp:
            return 'time went backwards'
        if frame.stamp - before.stamp > settings.max_gap * 1e9:
            return 'gap between frames'
        if settings.track and self._previous.tracks is None:
            return 'tracking switched on'
        return None

    def _track(
        self, features: Features, camera: Camera | None, settings: Settings
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
        return self._tracker.update(features), method


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


def nominal_camera(size: Size) -> Camera:
    """Of images without a calibration: a pinhole, its focal length the image's longer side."""
    width, height = size
    focal = float(max(size))
    return Camera.create(size, [focal, 0, (width - 1) / 2, 0, focal, (height - 1) / 2, 0, 0, 1])
