"""Features and matches for other tools: .npz files, HDF5 files of hloc, COLMAP databases."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from kp2d_core.camera import Camera
from kp2d_core.errors import FileError
from kp2d_core.features import Features
from kp2d_core.files import atomic_write, read_text
from kp2d_core.matching import Matches, match

Pair = tuple[int, int]  # indices of two images

# The geometry of two images must explain at least this share of their matches. For unrelated
# photographs it explains up to an eighth, and far more than COLMAP's minimum of 15 matches.
RELATED = 0.2
ROOM = 32 << 20  # bytes that must be free before each write to a database
CENTRE = 0.5  # COLMAP's coordinates of the centre of the top-left pixel are (0.5, 0.5)


@dataclass(frozen=True)
class Named:
    """Features of the images below a folder, by name."""

    root: Path
    names: list[str]  # paths below the root, with '/': the names of images in hloc and COLMAP
    features: list[Features]


def names_below(paths: Sequence[Path]) -> tuple[Path, list[str]]:
    """Return the common folder of all images, and their paths below it."""
    whole = [path.absolute() for path in paths]
    root = Path(os.path.commonpath([path.parent for path in whole]))
    return root, [path.relative_to(root).as_posix() for path in whole]


def match_all(
    named: Named, pairs: Iterable[Pair], **options: Any
) -> Iterator[tuple[Pair, Matches]]:
    """Match the pairs one after the other."""
    for i, j in pairs:
        yield (i, j), match(named.features[i], named.features[j], **options)


def choose_pairs(
    names: Sequence[str], listed: Path | None = None, window: int | None = None
) -> list[Pair]:
    """Return all pairs of images, each image with the next `window` images, or those of a file.

    The file has two names per line, like a pairs file of hloc. Raise FileError for a name that is
    not among `names`.
    """
    if listed is not None:
        return list(_read_pairs(listed, names))
    pairs = combinations(range(len(names)), 2)
    return [(i, j) for i, j in pairs if window is None or j - i <= window]


def _read_pairs(path: Path, names: Sequence[str]) -> Iterator[Pair]:
    indices = {name: index for index, name in enumerate(names)}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith('#'):
            continue
        if len(words) != 2:
            raise FileError(f'line {number} of {path} must hold two names of images')
        for word in words:
            if word not in indices:
                raise FileError(f'line {number} of {path}: {word} is not one of the images')
        yield indices[words[0]], indices[words[1]]


def save_npz(path: Path, features: Features) -> None:
    """Write keypoints, scores, descriptors, scales and image_size."""
    with atomic_write(path) as temporary:
        values: dict[str, Any] = features.rows() | {'image_size': np.array(features.image_size)}
        np.savez(temporary, **values)


def save_matches_npz(path: Path, first: Features, second: Features, matches: Matches) -> None:
    """Write keypoints0 and keypoints1 (M, 2) in pixels, indices (M, 2), distances and inliers."""
    a, b = matches.indices.T
    with atomic_write(path) as temporary:
        np.savez(
            temporary,
            keypoints0=first.keypoints[a],
            keypoints1=second.keypoints[b],
            indices=matches.indices,
            distances=matches.distances,
            inliers=matches.inliers,
        )


def save_hloc_features(path: Path, found: Iterable[tuple[str, Features]]) -> None:
    """Write one group per image, like the extractors of hloc."""
    with _hdf5(path) as file:
        for name, features in found:
            group = file.create_group(name)
            keypoints = group.create_dataset('keypoints', data=features.keypoints)
            keypoints.attrs['uncertainty'] = 1.0  # px, scales the thresholds of hloc
            group.create_dataset('descriptors', data=features.descriptors.T)  # one per column
            group.create_dataset('scores', data=features.scores)
            group.create_dataset('scales', data=features.scales)
            group.create_dataset('image_size', data=np.array(features.image_size))


def save_hloc_matches(path: Path, named: Named, matched: Iterable[tuple[Pair, Matches]]) -> None:
    """Write one group per pair, like the matchers of hloc: for each point its partner, or -1."""
    with _hdf5(path) as file:
        for (i, j), matches in matched:
            first, second = (named.names[index].replace('/', '-') for index in (i, j))
            group = file.create_group(f'{first}/{second}')
            partners = np.full(len(named.features[i]), -1, np.int32)
            scores = np.zeros(len(named.features[i]), np.float16)
            kept = matches.indices[matches.inliers]
            partners[kept[:, 0]] = kept[:, 1]
            scores[kept[:, 0]] = 1 - matches.distances[matches.inliers] / 2
            group.create_dataset('matches0', data=partners)
            group.create_dataset('matching_scores0', data=scores)


def save_colmap(
    path: Path,
    named: Named,
    matched: Iterable[tuple[Pair, Matches]],
    camera: Camera | None = None,
) -> int:
    """Write a COLMAP database: cameras, images, keypoints, matches and two-view geometries.

    camera  of all images; None: COLMAP reads the focal length from EXIF or guesses it

    Return the number of verified pairs. To reconstruct, run
    `pycolmap.incremental_mapping(path, root, output)` or `colmap mapper`.
    """
    import pycolmap

    verified = 0
    with atomic_write(path) as temporary, _quiet(pycolmap), _database(path, temporary):
        options, verify = pycolmap.ImageReaderOptions(), pycolmap.TwoViewGeometryOptions()
        verify.min_inlier_ratio, verify.ransac.random_seed = RELATED, 0
        degenerate = int(pycolmap.TwoViewGeometryConfiguration.DEGENERATE)
        mode = pycolmap.CameraMode.AUTO
        if camera is not None:
            mode = pycolmap.CameraMode.SINGLE
            options.camera_model, parameters = colmap_camera(camera)
            options.camera_params = ','.join(map(repr, parameters))
        pycolmap.import_images(temporary, named.root, mode, named.names, options)
        database = pycolmap.Database.open(temporary)
        images: list[Any] = [database.read_image_with_name(name) for name in named.names]
        for name, image in zip(named.names, images, strict=True):
            if image is None:
                raise FileError(f'COLMAP cannot read {named.root / name}')
        cameras = {c.camera_id: c for c in database.read_all_cameras()}
        points = [features.keypoints.astype(np.float64) + CENTRE for features in named.features]
        for image, given in zip(images, points, strict=True):
            _need_room(path)
            database.write_keypoints(image.image_id, given.astype(np.float32))
        for (i, j), matches in matched:
            _need_room(path)
            kept = matches.indices[matches.inliers].astype(np.uint32)
            ids = images[i].image_id, images[j].image_id
            database.write_matches(*ids, kept)
            geometry = pycolmap.estimate_two_view_geometry(
                cameras[images[i].camera_id], points[i], cameras[images[j].camera_id], points[j],
                kept, verify,
            )  # fmt: skip
            if geometry.config == degenerate:  # COLMAP's mapper would use its matches anyway
                geometry.inlier_matches = np.empty((0, 2), np.uint32)
            database.write_two_view_geometry(*ids, geometry)
            verified += len(geometry.inlier_matches) > 0
        database.close()
    return verified


def colmap_camera(camera: Camera) -> tuple[str, list[float]]:
    """Return the name of COLMAP's camera model for this lens, and its parameters."""
    fx, fy = camera.intrinsics[0], camera.intrinsics[4]
    pinhole = [fx, fy, camera.intrinsics[2] + CENTRE, camera.intrinsics[5] + CENTRE]
    lens = list(camera.distortion)
    if camera.fisheye:
        return 'OPENCV_FISHEYE', [*pinhole, *(lens or [0.0] * 4)]
    if not any(lens):
        return 'PINHOLE', pinhole
    if any(lens[8:]):
        raise ValueError('COLMAP has no camera model with more than 8 distortion coefficients')
    if any(lens[4:]):
        return 'FULL_OPENCV', [*pinhole, *(lens + [0.0] * 8)[:8]]
    return 'OPENCV', [*pinhole, *lens[:4]]


@contextmanager
def _hdf5(path: Path) -> Iterator[Any]:
    """Write a new HDF5 file atomically."""
    import h5py

    with atomic_write(path) as temporary, _Sink(temporary, 'w+') as sink:
        with h5py.File(sink, 'w') as file:
            yield file
        if sink.failure is not None:
            raise sink.failure


class _Sink(io.FileIO):
    """A file that stores errors instead of raising them: HDF5 crashes on a full disk."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        if self.failure is None:
            try:
                written = 0
                while written < len(data):  # a call may write only a part
                    written += super().write(memoryview(data)[written:]) or 0
            except OSError as error:
                self.failure = error
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size)
        except OSError as error:
            self.failure = self.failure or error
            return size or 0


@contextmanager
def _database(path: Path, temporary: Path) -> Iterator[None]:
    """Convert COLMAP's errors to FileError, and remove the auxiliary files of SQLite."""
    _need_room(path)
    try:
        yield
    except RuntimeError as error:
        raise FileError(f'cannot write {path}: {" ".join(str(error).split())}') from error
    finally:
        for suffix in ('-wal', '-shm', '-journal'):
            temporary.with_name(temporary.name + suffix).unlink(missing_ok=True)


def _need_room(path: Path) -> None:
    """Raise an error before the disk is full, where COLMAP would end the process."""
    if shutil.disk_usage(path.parent).free < ROOM:
        raise FileError(f'cannot write {path}: less than {ROOM >> 20} MB are left on the disk')


class _quiet:
    """Make COLMAP log warnings only, not every image that it reads."""

    def __init__(self, pycolmap: Any) -> None:
        self.logging = pycolmap.logging

    def __enter__(self) -> None:
        self.level = self.logging.minloglevel
        self.logging.minloglevel = self.logging.WARNING.value

    def __exit__(self, *_: object) -> None:
        self.logging.minloglevel = self.level
