"""Estimate poses of the robot's base from the keypoints of successive frames.

This module adds four things to the odometry of kp2d_core. It chooses the calibration, resets when
the input changes, sets the scale, and places each map in the odometry frame.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kp2d_core.camera import Camera, camera_from_info
from kp2d_core.features import Features, Float
from kp2d_core.files import atomic_write
from kp2d_core.geometry import Matrix
from kp2d_core.odometry import Estimate, Odometry, Rig, Settings, State
from kp2d_core.odometry.trajectory import write_tum
from kp2d_ros.messages import Keypoints
from kp2d_ros.odometry.ground import GroundScale
from kp2d_ros.odometry.poses import Anchor, Twist, anchored, mounting, twist
from kp2d_ros.odometry.settings import OdometrySettings

SAME_RAY = 0.5  # pixels; largest median difference between rays of the same calibration
TWIST_GAP = 1.0  # seconds; no velocity is computed if two poses are further apart


@dataclass(frozen=True)
class Step:
    """The result of one frame."""

    stamp: int  # nanoseconds
    estimate: Estimate
    base: Matrix | None  # (4, 4) in the odometry frame; None: unknown
    twist: Twist | None
    way: float  # length of the path of the base since the start, m
    scale_known: bool


@dataclass(frozen=True)
class Source:
    """The network that the descriptors come from, as far as it is known."""

    digest: str = ''  # of its weights; '': not known
    words: Float | None = None  # visual words of its descriptors; None: they are learned


class Follower:
    """Runs the odometry. Thread-safe: other threads may read while `update` runs."""

    def __init__(self, settings: OdometrySettings) -> None:
        self._settings = settings
        self._mount = mounting(settings.camera_pose)
        self._lock = threading.Lock()
        self.resets: Counter[str] = Counter()
        self._odometry: Odometry | None = None
        self._length = 0  # of the descriptors
        self._source = Source()
        self._forget()

    def _forget(self) -> None:
        self._anchors: dict[int, Anchor] = {}  # by the number of the map
        self._starts: dict[int, tuple[Matrix, Matrix]] = {}  # camera in the map, base in odom
        self._grounds: dict[int, GroundScale] = {}
        self._scales: dict[int, float] = {}  # of maps whose scale is known
        self._base = np.eye(4)  # last known pose of the base
        self._last: int | None = None  # stamp of the last frame
        self._placed: int | None = None  # stamp of the last frame with a pose
        self._way = 0.0
        self._path: list[tuple[int, int, Matrix]] = []  # stamp, map, camera in the map
        self._path_version = getattr(self, '_path_version', -1) + 1

    def reset(self, why: str) -> None:
        """Delete map and path; the next frame becomes the first one."""
        with self._lock:
            self._reset(why)

    def _reset(self, why: str) -> None:
        if self._odometry is not None:
            self.resets[why] += 1
        self._odometry = None
        self._forget()

    # Frames

    def update(
        self,
        keypoints: list[Keypoints],
        infos: list[Any],
        stamp: int,
        source: Source = Source(),  # noqa: B008  it never changes
    ) -> Step | None:
        """Process the keypoints of one camera, or of left and right; None for a repeated stamp.

        Raises ValueError if the keypoints do not fit the calibration.
        """
        parts, cameras = [], []
        for found, info in zip(keypoints, infos, strict=True):
            if not found.features.descriptors.shape[1]:
                raise ValueError(
                    'the keypoints have no descriptors: set descriptor_format of the keypoint '
                    'node to int8'
                )
            camera = fitting_camera(found, info)
            cameras.append(camera)
            parts.append(replace(found.features, image_size=camera.size))
        with self._lock:
            if self._last is not None and stamp == self._last:
                return None
            self._begin_if_needed(parts, self._rig(cameras, infos), stamp, source)
            assert self._odometry is not None
            self._last = stamp
            given = parts if len(parts) > 1 else parts[0]
            estimate = self._odometry.update(given, stamp * 1e-9)
            # Bound the memory: old frames are not needed. max_keyframes bounds the map itself.
            placed = self._odometry.placed
            del placed[: max(0, len(placed) - 20 * self._settings.path_length)]
            return self._step(estimate, stamp)

    def _rig(self, cameras: list[Camera], infos: list[Any]) -> Rig:
        mounts = [np.eye(4) for _ in cameras]
        if len(cameras) > 1:
            mounts[1][0, 3] = -stereo_baseline(infos[1], self._settings.stereo_baseline)
        return Rig(tuple(cameras), np.array(mounts))

    def _begin_if_needed(
        self, parts: list[Features], rig: Rig, stamp: int, source: Source
    ) -> None:
        length = parts[0].descriptors.shape[1]
        words = source.words
        if words is not None and words.shape[1] != length:  # a message that came too early
            words = None
        if self._odometry is not None:
            before = self._odometry.rig
            if before.cameras != rig.cameras or not np.array_equal(before.mounts, rig.mounts):
                self._reset('another calibration')
            elif length != self._length or _differ(source, self._source):
                self._reset('descriptors of another model')
            elif self._last is not None and stamp < self._last:
                self._reset('time went backwards')
        if self._odometry is None:
            settings = Settings(max_keyframes=self._settings.max_keyframes)
            self._odometry = Odometry(rig, settings, words=words)
            self._length, self._source = length, source
        elif source.digest and not self._source.digest:  # known late
            self._source = source
            if words is not None:
                self._odometry.use_words(words)

    def _step(self, estimate: Estimate, stamp: int) -> Step:
        number, pose = estimate.map_number, estimate.pose
        if pose is None:
            return Step(stamp, estimate, None, None, self._way, number in self._scales)
        if number not in self._anchors:
            # Place a new map at the last pose of the base, so that the pose does not jump.
            first = pose if self._anchors else self._first_pose(number, pose)
            self._starts[number] = first, self._base
            self._place_map(number, self._first_scale(number))
        rescaled = self._look_at_ground(estimate)
        base = self._anchors[number].base(pose, self._mount)
        seconds = (stamp - self._placed) * 1e-9 if self._placed is not None else 0.0
        velocity = None
        if estimate.state == State.TRACKING and 0 < seconds < TWIST_GAP and not rescaled:
            velocity = twist(self._base, base, seconds)
            self._way += float(np.linalg.norm(base[:3, 3] - self._base[:3, 3]))
        self._base, self._placed = base, stamp
        self._path.append((stamp, number, pose))
        if len(self._path) > self._settings.path_length:
            self._path = self._path[::2]
            self._path_version += 1
        return Step(stamp, estimate, base, velocity, self._way, number in self._scales)

    def _place_map(self, number: int, scale: float) -> None:
        first, base = self._starts[number]
        self._anchors[number] = anchored(first, base, self._mount, scale)

    def _first_pose(self, number: int, otherwise: Matrix) -> Matrix:
        """Return the pose of the first frame of a map. It precedes the frame that completed it."""
        assert self._odometry is not None
        _, poses = self._odometry.trajectory(number)
        return np.asarray(poses[0]) if len(poses) else otherwise

    # Scale

    def _first_scale(self, number: int) -> float:
        settings = self._settings
        assert self._odometry is not None
        if len(self._odometry.rig.cameras) > 1:
            self._scales[number] = 1.0
        elif settings.scale:
            self._scales[number] = settings.scale
        elif settings.camera_height:
            self._grounds[number] = GroundScale(settings.camera_height)
        return self._scales.get(number, 1.0)

    def _look_at_ground(self, estimate: Estimate) -> bool:
        """Estimate the scale from the ground; return True if this frame made it known.

        The scale of a map is then fixed, because the pose must not jump again.
        """
        number = estimate.map_number
        ground = self._grounds.get(number)
        if ground is None or not estimate.keyframe or number in self._scales:
            return False
        assert self._odometry is not None and estimate.pose is not None
        points = self._odometry.points()
        about = points - estimate.pose[:3, 3]
        # Rotate to the axes of the base; the origin is the camera.
        upright = self._mount[:3, :3] @ estimate.pose[:3, :3].T
        ground.add(about @ upright.T)
        if ground.scale is None:
            return False
        self._scales[number] = ground.scale
        self._way *= ground.scale / self._anchors[number].scale
        self._place_map(number, ground.scale)
        self._path_version += 1
        return True

    @property
    def scale(self) -> str:
        """The scale in words, for the diagnostics."""
        if self._settings.stereo:
            return 'metres, by the stereo baseline'
        if self._settings.scale:
            return 'metres, as given'
        if not self._settings.camera_height:
            return 'arbitrary'
        with self._lock:
            known = self._odometry is not None and self._odometry.world is not None
            number = self._odometry.world.number if known else -1  # type: ignore[union-attr]
            if number in self._scales:
                return f'metres, by the camera height: {self._scales[number]:.4g} per unit'
            ground = self._grounds.get(number)
        return f'not known yet: {ground.estimates if ground else 0} views of the ground'

    # Results

    def path(self, version: int, known: int) -> tuple[int, list[int], Matrix]:
        """Return the version of the path, and the stamps and base poses (N, 4, 4) to append.

        A new version means that earlier poses changed. In that case, all poses are returned.
        """
        with self._lock:
            new = self._path[known if version == self._path_version else 0 :]
            bases = [self._anchors[number].base(pose, self._mount) for _, number, pose in new]
            stamps = [stamp for stamp, _, _ in new]
            return self._path_version, stamps, np.array(bases).reshape(-1, 4, 4)

    def map_points(self, radius: float = 0.0) -> Matrix:
        """Return the points (N, 3) of the current map in the odometry frame, within a radius."""
        with self._lock:
            anchor = self._anchor()
            if anchor is None or self._odometry is None:
                return np.empty((0, 3))
            points = anchor.points(self._odometry.points())
            centre = self._base[:3, 3]
        if radius > 0:
            points = points[np.linalg.norm(points - centre, axis=1) < radius]
        return points

    def _anchor(self) -> Anchor | None:
        if self._odometry is None or self._odometry.world is None:
            return None
        return self._anchors.get(self._odometry.world.number)

    def save(self, folder: Path, name: str) -> list[Path]:
        """Write the current map and its trajectory; raise ValueError if there is no map."""
        with self._lock:
            anchor = self._anchor()
            if anchor is None or self._odometry is None:
                raise ValueError('there is no map yet')
            stamps, poses = self._odometry.trajectory()
            points = anchor.points(self._odometry.points())
        bases = anchor.base(poses, self._mount)
        paths = [folder / f'{name}.ply', folder / f'{name}.tum']
        write_ply(paths[0], points)
        write_tum(paths[1], stamps, bases)
        return paths


def _differ(first: Source, second: Source) -> bool:
    """Whether descriptors of two sources cannot be compared, as far as is known."""
    return bool(first.digest and second.digest and first.digest != second.digest)


def fitting_camera(keypoints: Keypoints, info: Any) -> Camera:
    """Find the calibration that fits the rays of the keypoints: for raw or for rectified images.

    Raises ValueError if neither fits.
    """
    candidates = [camera_from_info(info, rectified) for rectified in (False, True)]
    if candidates[0] is None:
        raise ValueError('camera_info is not calibrated: calibrate the camera')
    pixels = keypoints.features.keypoints
    chosen = slice(None, None, max(1, len(pixels) // 50))
    for camera in candidates:
        for each in (camera, camera.literal if camera is not None else None):
            if each is None:
                continue
            off = np.linalg.norm(each.rays(pixels[chosen]) - keypoints.rays[chosen], axis=1)
            off = off[np.isfinite(off)] * each.matrix[0, 0]
            if not len(off) or np.median(off) < SAME_RAY:
                return each
    raise ValueError(
        'the rays of the keypoints are not those of camera_info: check that the keypoint node '
        'receives the same camera_info'
    )


def stereo_baseline(right: Any, given: float) -> float:
    """Return the baseline in metres: `given`, or the one in P of the right camera if it is 0."""
    if given:
        return given
    focal, shift = float(right.p[0]), float(right.p[3])
    if focal <= 0 or shift >= 0:
        raise ValueError(
            'P of right/camera_info has no baseline: set stereo_baseline, or calibrate the pair'
        )
    return -shift / focal


def write_ply(path: Path, points: Matrix) -> None:
    """Write a binary PLY file with x y z as float32."""
    header = (
        'ply\nformat binary_little_endian 1.0\ncomment kp2d map\n'
        f'element vertex {len(points)}\n'
        'property float x\nproperty float y\nproperty float z\nend_header\n'
    )
    with atomic_write(path) as temporary:
        temporary.write_bytes(header.encode() + points.astype('<f4').tobytes())
