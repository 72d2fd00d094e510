"""Recorded camera paths in KITTI's or TUM's layout: frames, poses, calibration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from kp2d_core.camera import Camera
from kp2d_core.errors import FileError
from kp2d_core.geometry import Matrix
from kp2d_core.images import IMAGE_SUFFIXES, read_image, size_of

KITTI_RATE = 10.0  # Hz, where there is no times.txt
EXACT = 1e-3  # s, within which a pose and a frame have the same time
FURTHEST = 0.05  # s between a frame and the nearest poses of TUM; otherwise it is skipped


@dataclass(frozen=True)
class CameraPath:
    """Frames in temporal order, each with the pose of the camera."""

    name: str
    images: list[Path]
    poses: Matrix  # (N, 4, 4): camera to world; x right, y down, z forward
    intrinsics: Matrix  # 3x3
    distortion: Matrix  # OpenCV's k1 k2 p1 p2 k3, or empty
    stamps: Matrix  # (N,) s

    @cached_property
    def camera(self) -> Camera:
        return Camera.create(size_of(read_image(self.images[0])), self.intrinsics, self.distortion)

    def motion(self, first: int, second: int) -> Matrix:
        """4x4: from points in the first camera frame to points in the second."""
        return np.asarray(np.linalg.inv(self.poses[second]) @ self.poses[first])


def load_camera_path(folder: str | Path, *, truth_needed: bool = True) -> CameraPath:
    """Load a folder in one of two layouts; raise FileError if it is neither, or damaged.

    KITTI odometry  image_0/ (or image_1/ to image_3/), calib.txt, poses.txt; times.txt if there
    TUM RGB-D       rgb.txt, groundtruth.txt, and intrinsics.txt: fx fy cx cy [k1 k2 p1 p2 [k3]]

    If the truth is not needed, unknown poses are NaN and no frame is skipped.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise FileError(f'there is no folder {folder}')
    if (folder / ('poses.txt' if truth_needed else 'calib.txt')).is_file():
        path = _kitti(folder)
    elif (folder / ('groundtruth.txt' if truth_needed else 'rgb.txt')).is_file():
        path = _tum(folder, truth_needed)
    else:
        raise FileError(
            f'{folder} holds no camera path: neither poses.txt (KITTI) nor groundtruth.txt (TUM)'
        )
    turns = path.poses[np.isfinite(path.poses).all(axis=(1, 2)), :3, :3]
    if not np.allclose(turns @ turns.transpose(0, 2, 1), np.eye(3), atol=1e-3):
        raise FileError(f'{folder} has invalid poses: their rotations are not orthogonal')
    for image in path.images:
        if not image.is_file():
            raise FileError(f'{image} is missing')
    return path


def _kitti(folder: Path) -> CameraPath:
    for camera in range(4):
        images = folder / f'image_{camera}'
        if images.is_dir():
            break
    else:
        raise FileError(f'{folder} has no frames: image_0/ is missing')
    frames = sorted(path for path in images.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
    if not frames:
        raise FileError(f'there is no image in {images}')
    rows = np.full((len(frames), 12), np.nan)
    if (folder / 'poses.txt').is_file():
        rows = numbers(folder / 'poses.txt', (12,))
    projections = numbers(folder / 'calib.txt', (12,))
    if camera >= len(projections):
        raise FileError(f'{folder / "calib.txt"} has no row for camera {camera}')
    if len(frames) != len(rows):
        raise FileError(f'{folder} has {len(frames)} frames, but {len(rows)} poses')
    projection = projections[camera].reshape(3, 4)
    intrinsics = _intrinsics(projection[:, :3], folder / 'calib.txt')
    poses = np.array([_square(row.reshape(3, 4)) for row in rows])
    # The poses are those of camera 0; the other cameras are next to it.
    beside = np.eye(4)
    beside[:3, 3] = -np.linalg.solve(intrinsics, projection[:, 3])
    stamps = np.arange(len(frames)) / KITTI_RATE
    if (folder / 'times.txt').is_file():
        stamps = numbers(folder / 'times.txt', (1,)).ravel()
        if len(stamps) != len(frames):
            raise FileError(f'{folder} has {len(frames)} frames, but {len(stamps)} times')
    name = folder.resolve().name
    return CameraPath(name, frames, poses @ beside, intrinsics, np.empty(0), stamps)


def _tum(folder: Path, truth_needed: bool) -> CameraPath:
    lens = numbers(folder / 'intrinsics.txt', (4, 8, 9))[0]
    listed = _lines(folder / 'rgb.txt')
    try:
        frames = sorted((float(line.split()[0]), folder / line.split()[1]) for line in listed)
    except (IndexError, ValueError) as error:
        raise FileError(f'{folder / "rgb.txt"} must hold a time and a file per line') from error
    if not frames:
        raise FileError(f'{folder / "rgb.txt"} lists no frame')
    times = np.array([time for time, _ in frames])
    poses = np.full((len(frames), 4, 4), np.nan)
    if truth_needed or (folder / 'groundtruth.txt').is_file():
        poses = poses_at(folder / 'groundtruth.txt', times)
    if truth_needed:
        known = np.flatnonzero(np.isfinite(poses).all(axis=(1, 2)))
        if not len(known):
            raise FileError(
                f'{folder}: groundtruth.txt has no pose at the time of any frame of rgb.txt'
            )
        times, poses = times[known], poses[known]
        frames = [frames[i] for i in known]
    fx, fy, cx, cy = lens[:4]
    return CameraPath(
        folder.resolve().name,
        [path for _, path in frames],
        poses,
        _intrinsics(np.array([[fx, 0, cx], [0, fy, cy], [0, 0, 1]]), folder / 'intrinsics.txt'),
        lens[4:],
        times,
    )


def poses_at(path: Path, times: Matrix) -> Matrix:
    """Interpolate the poses (N, 4, 4) at these times from a file of rows t x y z qx qy qz qw.

    NaN where no pose is near. Raise FileError if the file has another format.
    """
    truth = numbers(path, (8,))
    if len(truth) < 2 or not truth[:, 4:].any(axis=1).all():
        raise FileError(f'{path} must hold poses, with quaternions')
    truth = truth[np.argsort(truth[:, 0])]
    after = np.clip(np.searchsorted(truth[:, 0], times), 1, len(truth) - 1)
    low, high = truth[after - 1, 0], truth[after, 0]
    near = (times - FURTHEST <= low) & (low <= times) & (times <= high)
    near &= high <= times + FURTHEST
    # A pose at exactly this time needs no neighbours, for example with one pose per frame.
    near |= np.minimum(np.abs(times - low), np.abs(times - high)) < EXACT
    poses = _interpolate(truth, times)
    poses[~near] = np.nan
    return poses


def _interpolate(truth: Matrix, times: Matrix) -> Matrix:
    turns = truth[:, 4:] / np.linalg.norm(truth[:, 4:], axis=1, keepdims=True)
    # q and -q are the same rotation: give neighbours the same sign before interpolating.
    flips = np.where((turns[1:] * turns[:-1]).sum(axis=1) < 0, -1.0, 1.0)
    turns[1:] *= np.cumprod(flips)[:, None]
    columns = np.hstack([truth[:, 1:4], turns]).T
    rows = np.array([np.interp(times, truth[:, 0], column) for column in columns]).T
    return np.array([_square(np.column_stack([_rotation(row[3:]), row[:3]])) for row in rows])


def _intrinsics(matrix: Matrix, path: Path) -> Matrix:
    if not (matrix[0, 0] > 0 and matrix[1, 1] > 0 and np.array_equal(matrix[2], [0, 0, 1])):
        raise FileError(f'{path} has no valid camera: its focal lengths must be above 0')
    return matrix


def _rotation(quaternion: Matrix) -> Matrix:
    x, y, z, w = quaternion / np.linalg.norm(quaternion)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )


def _square(pose: Matrix) -> Matrix:
    return np.vstack([pose, [0, 0, 0, 1]])


def _lines(path: Path) -> list[str]:
    """Return the lines that are neither empty nor a comment."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise FileError(f'cannot read {path}: {error}') from error
    return [line for line in lines if line and not line.startswith('#')]


def numbers(path: Path, widths: tuple[int, ...]) -> Matrix:
    """Read a table with one of these numbers of columns; skip KITTI's labels, such as 'P0:'."""
    rows = [line.split(':')[-1].split() for line in _lines(path)]
    try:
        values = np.array(rows, np.float64)
    except ValueError as error:
        raise FileError(f'{path} is not a table of numbers: {error}') from error
    if values.ndim != 2 or values.shape[1] not in widths or not np.isfinite(values).all():
        wanted = ' or '.join(map(str, widths))
        raise FileError(f'{path} must hold {wanted} numbers per line')
    return values
