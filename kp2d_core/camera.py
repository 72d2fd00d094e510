"""Calibrated cameras: pixels to rays and back, and calibrations in files and messages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import ArrayLike, NDArray

from kp2d_core.checks import finite_array, number, parse_yaml, shown, whole
from kp2d_core.errors import FileError
from kp2d_core.files import read_text
from kp2d_core.geometry import Matrix, resize_matrix, scale_matrix, shift_matrix
from kp2d_core.images import Size

Float = NDArray[np.float32]

# Distortion models by their names in ROS, with the numbers of coefficients they may have.
MODELS = {
    '': (0, 4, 5, 8, 12, 14),
    'none': (0,),
    'plumb_bob': (0, 4, 5),
    'rational_polynomial': (8, 12, 14),
    'equidistant': (4,),
}
NO_ROTATION = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
WIDEST = np.deg2rad(89)  # from the axis; x / z is useless beyond
FOCAL_RANGE = 50.0  # largest ratio of focal length and longer side, either way; else a mistake
FAITHFUL = 0.1  # px, largest error of a point that is undistorted and distorted again
_STOP = (cv2.TERM_CRITERIA_EPS | cv2.TERM_CRITERIA_COUNT, 100, 1e-4)  # 5 steps are pixels off


@dataclass(frozen=True)
class Camera:
    """A pinhole camera with lens distortion, for images of one size. Compares by value."""

    width: int
    height: int
    intrinsics: tuple[float, ...]  # K, row by row
    distortion: tuple[float, ...] = ()  # D: OpenCV's k1 k2 p1 p2 ..., or k1 k2 k3 k4 of a fisheye
    model: str = 'plumb_bob'  # a key of MODELS
    rotation: tuple[float, ...] = NO_ROTATION  # R, to the rectified frame
    literal: Camera | None = None  # the same camera with binning and region ignored, if different

    def __post_init__(self) -> None:
        if not np.isfinite([*self.intrinsics, *self.distortion, *self.rotation]).all():
            raise ValueError('the calibration holds NaN or infinity')
        k = self.intrinsics
        if len(k) != 9 or k[0] <= 0 or k[4] <= 0 or any(k[i] for i in (3, 6, 7)) or k[8] != 1.0:
            raise ValueError(f'the K of the calibration is not a camera matrix: {list(k)}')
        side = max(self.width, self.height, 1)
        if not all(side / FOCAL_RANGE < k[i] < side * FOCAL_RANGE for i in (0, 4)):
            raise ValueError(
                f'the focal length {k[0]:g}, {k[4]:g} of the calibration cannot be that of '
                f'{self.width}x{self.height} images'
            )
        if max(abs(k[1]), abs(k[2]), abs(k[5])) > FOCAL_RANGE * side:
            raise ValueError(f'the K of the calibration has its centre far outside: {list(k)}')
        turn = np.reshape(self.rotation, (3, 3))
        if np.abs(turn @ turn.T - np.eye(3)).max() > 0.01:
            raise ValueError(f'the R of the calibration is not a rotation: {list(self.rotation)}')
        if self.model not in MODELS:
            names = ', '.join(name for name in MODELS if name)
            raise ValueError(f'the distortion model {shown(self.model)} is not one of {names}')
        if len(self.distortion) not in MODELS[self.model]:
            raise ValueError(
                f"the calibration has {len(self.distortion)} coefficients for '{self.model}'"
            )

    @classmethod
    def create(
        cls, size: Size, matrix: ArrayLike, distortion: ArrayLike = (), model: str | None = None
    ) -> Camera:
        """Make a camera from arrays. Without a model, the number of coefficients selects it."""
        coefficients = finite_array(distortion, 'the calibration').ravel().tolist()
        if model is None:
            model = 'plumb_bob' if len(coefficients) <= 5 else 'rational_polynomial'
        k = finite_array(matrix, 'the calibration').ravel().tolist()
        return cls(*size, tuple(k), tuple(coefficients), model)

    @property
    def size(self) -> Size:
        return self.width, self.height

    @property
    def matrix(self) -> Matrix:
        return np.array(self.intrinsics, np.float64).reshape(3, 3)

    @property
    def fisheye(self) -> bool:
        return self.model == 'equidistant'

    def shift(self, other: Camera) -> float:
        """The largest distance between the pixels of the same ray in both cameras."""
        x, y = np.meshgrid(
            [0, self.width / 2, self.width - 1], [0, self.height / 2, self.height - 1]
        )
        grid = np.column_stack([x.ravel(), y.ravel()])
        apart = np.linalg.norm(other.pixels(self.rays(grid)) - grid, axis=1)
        return float(max(apart[np.isfinite(apart)], default=0.0))

    def of(self, size: Size) -> Camera | None:
        """Return the camera for images of this size, or None if it is unknown."""
        return next((c for c in (self, self.literal) if c is not None and c.size == size), None)

    def rays(self, points: NDArray[np.floating]) -> Matrix:
        """Convert pixels (N, 2) to normalised (x / z, y / z): the ray of a point is (x, y, 1).

        NaN for rays beside or behind the camera (wide lenses), and where the distortion cannot be
        inverted.
        """
        pixels = np.asarray(points, np.float64).reshape(-1, 2)
        if not len(pixels):
            return np.empty((0, 2))
        if self.fisheye:
            return self._fisheye_rays(pixels)
        inverse = np.linalg.inv(self.matrix)
        if not any(self.distortion):
            return np.asarray(pixels @ inverse[:2, :2].T + inverse[:2, 2])
        given, coefficients = pixels[:, None], np.array(self.distortion)
        if hasattr(cv2, 'undistortPointsIter'):  # OpenCV 4
            flat = cv2.undistortPointsIter(given, self.matrix, coefficients, None, None, _STOP)
        else:
            flat = cv2.undistortPoints(given, self.matrix, coefficients, criteria=_STOP)
        flat = np.asarray(flat, np.float64).reshape(-1, 2)
        off = np.linalg.norm(self.pixels(flat) - pixels, axis=1)
        flat[~(off < FAITHFUL)] = np.nan  # beyond the range where the polynomial increases
        return flat

    def pixels(self, rays: NDArray[np.floating]) -> Matrix:
        """Convert normalised (x / z, y / z) (N, 2) or rays (N, 3) to distorted pixels (N, 2).

        NaN for rays behind the camera (z not positive).
        """
        given = np.asarray(rays, np.float64)
        if given.shape[1] == 3:
            front = np.where(given[:, 2:] > 0, given[:, 2:], np.nan)
            given = given[:, :2] / front
        if not len(given):
            return np.empty((0, 2))
        if self.fisheye:
            coefficients = np.array(self.distortion or (0.0,) * 4)
            found = cv2.fisheye.distortPoints(given[:, None], self.matrix, coefficients)
            return np.asarray(found, np.float64).reshape(-1, 2)
        homogeneous = np.column_stack([given, np.ones(len(given))])
        if not any(self.distortion):
            return np.asarray(homogeneous @ self.matrix[:2].T)
        coefficients = np.array(self.distortion)
        none = np.zeros(3)
        found, _ = cv2.projectPoints(homogeneous, none, none, self.matrix, coefficients)
        return np.asarray(found, np.float64).reshape(-1, 2)

    def bearings(self, points: NDArray[np.floating]) -> Float:
        """Like `rays`, rotated into the rectified frame."""
        return self._through(points, np.array(self.rotation).reshape(3, 3))

    def undistort(self, points: NDArray[np.floating]) -> Float:
        """Convert pixels (N, 2) to those of a camera with the same K and no distortion.

        NaN as in `rays`. An equidistant lens has distortion even if all coefficients are 0.
        """
        if not self.fisheye and not any(self.distortion):
            return np.asarray(points, np.float32)
        return self._through(points, self.matrix)

    def _through(self, points: NDArray[np.floating], matrix: Matrix) -> Float:
        """Multiply the rays of the points by a matrix; return (x / z, y / z)."""
        flat = self.rays(points)
        turned = np.column_stack([flat, np.ones(len(flat))]) @ matrix.T
        return np.asarray(turned[:, :2] / turned[:, 2:], np.float32)

    def _fisheye_rays(self, pixels: Matrix) -> Matrix:
        coefficients = np.array(self.distortion or (0.0,) * 4)
        flat = cv2.fisheye.undistortPoints(pixels[:, None], self.matrix, coefficients)
        flat = np.asarray(flat, np.float64).reshape(-1, 2)
        fx, _, cx, _, fy, cy, *_ = self.intrinsics
        angle = np.hypot((pixels[:, 0] - cx) / fx, (pixels[:, 1] - cy) / fy)  # distorted
        theta = np.linspace(0, WIDEST, 512)
        powers = np.array([theta**2, theta**4, theta**6, theta**8])
        bent = theta * (1 + coefficients @ powers)
        # OpenCV accepts no angle beyond 90 degrees, nor one where the polynomial decreases.
        flat[angle >= min(bent.max(), np.pi / 2)] = np.nan
        return flat


@dataclass(frozen=True)
class Region:
    """The region of a sensor that is read out; a size of 0 means all of it."""

    x_offset: int = 0
    y_offset: int = 0
    width: int = 0
    height: int = 0


@dataclass(frozen=True)
class Info:
    """The fields of a sensor_msgs/CameraInfo, without ROS. The functions also take the message."""

    width: int
    height: int
    k: tuple[float, ...]
    d: tuple[float, ...] = ()
    r: tuple[float, ...] = NO_ROTATION
    p: tuple[float, ...] = (0.0,) * 12
    distortion_model: str = 'plumb_bob'
    binning_x: int = 0
    binning_y: int = 0
    roi: Region = Region()


def camera_from_info(info: Any, is_rectified: bool = False) -> Camera | None:
    """Return the camera of a CameraInfo, or None if it is marked as uncalibrated.

    P describes rectified images; K, D and R describe the images that the camera took. Raise
    ValueError if the message is damaged.
    """
    if info.k[0] == 0.0:  # marks an uncalibrated camera
        return None
    change = rectified if is_rectified else read_out
    camera = _camera(change(info))
    if info.binning_x > 1 or info.binning_y > 1 or info.roi.width:
        # Some drivers publish them although the calibration already includes them.
        whole = Info(
            info.width, info.height, info.k, info.d, info.r, info.p, info.distortion_model
        )
        return replace(camera, literal=_camera(change(whole)))
    return camera


def _camera(info: Info) -> Camera:
    k, d, r = (tuple(float(value) for value in values) for values in (info.k, info.d, info.r))
    rotation = r if any(r) else NO_ROTATION
    return Camera(info.width, info.height, k, d, info.distortion_model, rotation)


def pinhole_info(size: Size, intrinsics: Matrix) -> Info:
    projection = np.column_stack([intrinsics, np.zeros(3)])
    return Info(
        *size, tuple(intrinsics.ravel().tolist()), (0.0,) * 5, p=tuple(projection.ravel().tolist())
    )


def uncalibrated_info(size: Size) -> Info:
    """Return an info whose K is 0: the message definition asks this of uncalibrated cameras."""
    return Info(*size, (0.0,) * 9, r=(0.0,) * 9, distortion_model='')


def scaled(info: Any, size: Size) -> Info:
    """Return the calibration of the images after resizing."""
    return _moved(info, size, resize_matrix((info.width, info.height), size))


def read_out(info: Any) -> Info:
    """Return the calibration of the region that is read out, in binned pixels."""
    by_x, by_y = max(1, info.binning_x), max(1, info.binning_y)
    width, height = info.roi.width or info.width, info.roi.height or info.height
    cut = shift_matrix(-info.roi.x_offset, -info.roi.y_offset)
    binned = scale_matrix(1 / by_x, 1 / by_y)
    return _moved(info, (width // by_x, height // by_y), binned @ cut)


def rectified(info: Any) -> Info:
    """Return the calibration of rectified images, from P; unchanged if P is not given."""
    if not info.p[0]:
        return read_out(info)
    straight = replace(read_out(info), d=(), r=NO_ROTATION, distortion_model='none')
    return replace(straight, k=tuple(np.reshape(straight.p, (3, 4))[:, :3].ravel().tolist()))


def names_rectified(topic: str) -> bool:
    """Whether image_proc would publish rectified images there: image_rect, image_rect_color."""
    return 'rect' in topic.removesuffix('/compressed').rpartition('/')[2].split('_')


def _moved(info: Any, size: Size, pixels: Matrix) -> Info:
    """Return the calibration after a 3x3 matrix has moved the pixels."""
    k, p = (pixels @ np.reshape(matrix, (3, -1)) for matrix in (info.k, info.p))
    return Info(
        *size, tuple(k.ravel().tolist()), tuple(info.d), tuple(info.r), tuple(p.ravel().tolist()),
        info.distortion_model,
    )  # fmt: skip


def read_calibration(path: str | Path) -> Info:
    """Read a file of ROS's camera_calibration; raise FileError if it is something else."""
    try:
        values = parse_yaml(read_text(Path(path).expanduser()))

        def numbers(name: str, count: int | None = None) -> tuple[float, ...]:
            found = tuple(number(value, name) for value in values[name]['data'])
            if count is not None and len(found) != count:
                raise ValueError(f'{name} has {len(found)} values, not {count}')
            return found

        return Info(
            whole(values['image_width'], 'image_width', least=1),
            whole(values['image_height'], 'image_height', least=1),
            numbers('camera_matrix', 9),
            numbers('distortion_coefficients'),
            numbers('rectification_matrix', 9),
            numbers('projection_matrix', 12),
            str(values['distortion_model']),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f'{path} is not a camera calibration: {shown(error)}') from None
