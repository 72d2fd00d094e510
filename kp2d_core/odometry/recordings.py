"""Recordings to run the odometry on: KITTI, TUM, bags, videos, rendered scenes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import cv2
import numpy as np

from kp2d_core.bags import is_bag
from kp2d_core.camera import Camera, camera_from_info, read_calibration
from kp2d_core.errors import FileError
from kp2d_core.evaluation.camera_paths import load_camera_path, numbers, poses_at
from kp2d_core.images import IMAGE_SUFFIXES, Size, read_image, size_of
from kp2d_core.odometry.bag_frames import Shot, open_frames
from kp2d_core.odometry.frames import Rig
from kp2d_core.odometry.geometry import Matrix, rigid
from kp2d_core.views.worlds import photographs, ring, ring_path, room, room_path, view_camera

SCENES = ('scene:room', 'scene:ring')
BASELINE = 0.3  # m between the cameras of a scene's rig
ROOM_FRAMES, RING_STEP, RING_LENGTH = 300, 0.15, 110.0
SCENE_RATE = 15.0  # Hz


@dataclass(frozen=True)
class Recording:
    """Frames in order of time, with the ground truth if there is one."""

    name: str
    rig: Rig
    shots: Callable[[], Iterator[Shot]]  # each call starts from the first shot
    count: int | None = None  # frames, if it is known
    truth: Matrix | None = None  # (N, 4, 4) camera to world, a row a frame; NaN: not known
    note: str = ''  # what a user should know of it

    @property
    def stereo(self) -> bool:
        return len(self.rig.cameras) > 1

    def every(self, step: int) -> Recording:
        """Keep only every n-th frame."""
        if step == 1:
            return self
        return replace(
            self,
            shots=lambda: islice(self.shots(), 0, None, step),
            count=None if self.count is None else -(-self.count // step),
            truth=None if self.truth is None else self.truth[::step],
        )


def open_recording(
    text: str,
    *,
    stereo: bool = False,
    calibration: Path | None = None,
    topics: Sequence[str] = (),
    truth: Path | None = None,
    size: Size = (640, 480),
) -> Recording:
    """Open the recording that `text` names; FileError or ValueError if it cannot be used.

    A folder in the layout of KITTI (image_0/, calib.txt) or TUM (rgb.txt, intrinsics.txt), a
    folder of images or a film with a calibration, a bag with camera_info, or one of SCENES.
    truth  a file of poses, time x y z qx qy qz qw, where the recording has none beside it
    size   of the images of a scene
    """
    path = Path(text).expanduser()
    if text in SCENES:
        found = _scene(text, size, stereo)
    elif not path.exists():
        raise FileError(f"there is no '{text}': give a folder, bag, film, or {', '.join(SCENES)}")
    elif is_bag(path):
        found = Recording(path.resolve().stem, *open_frames(path, topics, stereo))
    elif (path / 'calib.txt').is_file():
        found = _kitti(path, stereo)
    elif stereo:
        raise ValueError(f'{text} has one camera: stereo is for KITTI folders, bags and scenes')
    elif (path / 'rgb.txt').is_file():
        found = _tum(path)
    elif calibration is None:
        raise ValueError(f'{text} needs the calibration of its camera: give --calibration FILE')
    else:
        found = _images(path, calibration) if path.is_dir() else _film(path, calibration)
    if truth is not None:
        stamps = [stamp for stamp, _ in found.shots()]
        found = replace(found, truth=poses_at(truth, np.array(stamps)), count=len(stamps))
    return found


def single(camera: Camera) -> Rig:
    return Rig((camera,), np.eye(4)[None])


def _files(paths: list[list[Path]], stamps: Sequence[float]) -> Callable[[], Iterator[Shot]]:
    def shots() -> Iterator[Shot]:
        for stamp, files in zip(stamps, zip(*paths, strict=True), strict=True):
            yield stamp, [read_image(file) for file in files]

    return shots


def _kitti(folder: Path, stereo: bool) -> Recording:
    path = load_camera_path(folder, truth_needed=False)
    rig, files = single(path.camera), [path.images]
    if stereo:
        beside = path.images[0].parent.with_name('image_1')
        if path.images[0].parent.name != 'image_0' or not beside.is_dir():
            raise FileError(f'{folder} has no second camera: image_1/ is missing')
        projections = numbers(folder / 'calib.txt', (12,)).reshape(-1, 3, 4)
        right = Camera.create(path.camera.size, projections[1][:, :3])
        shift = np.linalg.solve(projections[1][:, :3], projections[1][:, 3])
        rig = Rig((path.camera, right), np.array([np.eye(4), rigid(np.eye(3), shift)]))
        files.append([beside / image.name for image in path.images])
        for file in files[1]:
            if not file.is_file():
                raise FileError(f'{file} is missing')
    shots = _files(files, path.stamps.tolist())
    return Recording(path.name, rig, shots, len(path.images), _known(path.poses))


def _tum(folder: Path) -> Recording:
    path = load_camera_path(folder, truth_needed=False)
    shots = _files([path.images], path.stamps.tolist())
    rig = single(path.camera)
    return Recording(path.name, rig, shots, len(path.images), _known(path.poses))


def _known(poses: Matrix) -> Matrix | None:
    return poses if np.isfinite(poses).any() else None


def _images(folder: Path, calibration: Path) -> Recording:
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
    if not files:
        raise FileError(f'there is no image in {folder}')
    camera = _calibrated(calibration, size_of(read_image(files[0])))
    stamps = [number / SCENE_RATE for number in range(len(files))]
    note = f'the images have no times: {SCENE_RATE:g} a second are taken'
    return Recording(
        folder.resolve().name, single(camera), _files([files], stamps), len(files), None, note
    )


def _film(path: Path, calibration: Path) -> Recording:
    def open_film() -> cv2.VideoCapture:
        film = cv2.VideoCapture(str(path))
        if not film.isOpened():
            raise FileError(f"'{path}' is not a film that OpenCV can open")
        return film

    film = open_film()
    size = int(film.get(cv2.CAP_PROP_FRAME_WIDTH)), int(film.get(cv2.CAP_PROP_FRAME_HEIGHT))
    rate = float(film.get(cv2.CAP_PROP_FPS))
    count = int(film.get(cv2.CAP_PROP_FRAME_COUNT))
    film.release()
    rate = rate if 0 < rate < 1000 else SCENE_RATE

    def shots() -> Iterator[Shot]:
        film = open_film()
        try:
            number = 0
            while True:
                there, image = film.read()
                if not there:
                    return
                rgb = np.asarray(cv2.cvtColor(image, cv2.COLOR_BGR2RGB), np.uint8)
                yield number / rate, [rgb]
                number += 1
        finally:
            film.release()

    camera = _calibrated(calibration, size)
    return Recording(path.stem, single(camera), shots, count if count > 0 else None)


def _calibrated(calibration: Path, size: Size) -> Camera:
    camera = camera_from_info(read_calibration(calibration))
    if camera is None:
        raise FileError(f'{calibration} says that the camera is not calibrated')
    if camera.size != size:
        raise ValueError(
            f'{calibration} is of images of {camera.width}x{camera.height}, '
            f'these are {size[0]}x{size[1]}'
        )
    return camera


def _scene(name: str, size: Size, stereo: bool) -> Recording:
    inside = name == 'scene:room'
    scene = (room if inside else ring)(photographs())
    poses = room_path(ROOM_FRAMES) if inside else ring_path(RING_STEP, RING_LENGTH)
    camera = view_camera(size)
    mounts = np.array([np.eye(4), rigid(np.eye(3), np.array([-BASELINE, 0, 0]))])
    rig = Rig((camera, camera), mounts) if stereo else single(camera)

    def shots() -> Iterator[Shot]:
        for number, pose in enumerate(poses):
            views = [pose @ np.linalg.inv(mount) for mount in rig.mounts]
            yield number / SCENE_RATE, [scene.view(camera, view) for view in views]

    return Recording(name.removeprefix('scene:'), rig, shots, len(poses), poses)
