"""Views of a photograph: rendered through a homography, in pairs and in sequences.

Everything that trains, validates or evaluates on photographs makes its views here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from kp2d_core.geometry import Matrix, resize_matrix, scale_matrix, shift_matrix
from kp2d_core.images import Image, Size, resize, size_of
from kp2d_core.views.homography import HomographyConfig, sample_source_to_target
from kp2d_core.views.photometric import PhotometricConfig, change_light, sample_shared_colour

Mask = NDArray[np.bool_]

# Objects in front of a pair.
MOST_OBJECTS = 5
NEARER = 0.12  # largest shift relative to what is behind them, as a share of the view
GROWN = 1.2  # and the largest change of their size

ALIASING = 1.2  # photograph pixels per view pixel above which the photograph is shrunk first

# Shifts are in pixels of a view of this width.
WIDTH = 320
MILD = HomographyConfig(1.0, (0.93, 1.07), 9.0, 0.0, 8.0, False)
VIEWPOINT = HomographyConfig(1.0, (0.7, 1.2), 30.0, 0.25, 30.0, False, 2.5)
TURNED = HomographyConfig(1.0, (0.5, 1.2), 180.0, 0.15, 20.0, False)
ZOOMED = HomographyConfig(1.0, (0.25, 0.5), 30.0, 0.1, 20.0, False)

STEADY_LIGHT = PhotometricConfig(
    (0, 0.01), (1,), (0.8, 1.2), (0.8, 1.2), (0.9, 1.1), 0.02, 0.0, 0.0
)
OTHER_LIGHT = PhotometricConfig(
    (0, 0.03), (1, 3), (0.3, 1.7), (0.4, 1.6), (0.6, 1.4), 0.05, 0.0, 0.0
)
LIGHTS = 2  # images of a photograph in another light


class Front(NamedTuple):
    """Objects in front of a pair, which move differently from what is behind them."""

    first: Mask  # (H, W) bool, where the first view shows them
    second: Mask
    first_to_second: Matrix


class ViewPair(NamedTuple):
    """Two views of one photograph and the homography between their pixels."""

    first: Image
    second: Image
    first_to_second: Matrix
    front: Front | None = None


class ViewSequence(NamedTuple):
    """Image 1, other images, and the homographies from image 1 to them, in pixels."""

    name: str
    reference: Image
    others: list[tuple[Image, Matrix]]


@dataclass(frozen=True)
class Framing:
    """The part of a photograph that a pair shows."""

    size: Size  # of both views
    whole: bool = True  # all of it, stretched to the size; else a part with its aspect ratio
    short_side: tuple[float, float] = (240.0, 240.0)  # of the photograph, when a part is cropped
    flip: float = 0.0  # share of pairs that are mirrored
    swap: float = 0.0  # share of pairs whose views are swapped


def make_pair(
    photograph: Image,
    random: np.random.Generator,
    framing: Framing,
    light: PhotometricConfig,
    homography: HomographyConfig,
    in_front: Image | None = None,
) -> ViewPair:
    """Make a pair with a homography sampled from `homography`; each view has its own light.

    Objects cut out of the photograph `in_front` hide parts of both views.
    """
    size = framing.size
    source_to_target = sample_source_to_target(random, size, homography)
    enlarged = max(1.0, 1 / pixels_per_view_pixel(source_to_target, size))
    target_to_photograph = sample_target_view(random, size_of(photograph), framing, enlarged)
    source = render(photograph, target_to_photograph @ source_to_target, size)
    target = render(photograph, target_to_photograph, size)
    front = None
    if in_front is not None:
        source, target, front = put_in_front(
            in_front, source, target, source_to_target, random, framing
        )
    if random.random() < framing.swap:
        source, target = target, source
        source_to_target = np.asarray(np.linalg.inv(source_to_target), np.float64)
        if front is not None:
            backwards = np.asarray(np.linalg.inv(front.first_to_second), np.float64)
            front = Front(front.second, front.first, backwards)

    shared = sample_shared_colour(random, light)
    source = change_light(random, source, shared, light)
    target = change_light(random, target, shared, light)
    if front is not None:
        matrix = front.first_to_second
        front = front._replace(first_to_second=matrix / depth_of_centre(matrix, size))
    return ViewPair(
        source, target, source_to_target / depth_of_centre(source_to_target, size), front
    )


def put_in_front(
    photograph: Image,
    source: Image,
    target: Image,
    source_to_target: Matrix,
    random: np.random.Generator,
    framing: Framing,
) -> tuple[Image, Image, Front]:
    """Cover parts of both views with objects that move with the scene, and by a parallax."""
    size = framing.size
    x, y = NEARER * np.array(size) * random.uniform(-1, 1, 2)
    middle = shift_matrix((size[0] - 1) / 2, (size[1] - 1) / 2)
    grow = random.uniform(1 / GROWN, GROWN)
    parallax = middle @ np.diag([grow, grow, 1.0]) @ np.linalg.inv(middle) @ shift_matrix(x, y)
    front_to_target = parallax @ source_to_target
    to_photograph = sample_target_view(random, size_of(photograph), framing)
    outline = draw_objects(random, size)
    views, masks = [], []
    for view, to_target in ((source, front_to_target), (target, np.eye(3))):
        shown = render(photograph, to_photograph @ to_target, size)
        flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
        alpha = cv2.warpPerspective(outline, to_target, size, flags=flags)
        share = (alpha.astype(np.float32) / 255)[..., None]
        views.append(
            np.asarray(np.rint(view + share * (shown.astype(np.float32) - view)), np.uint8)
        )
        masks.append(alpha > 127)
    return views[0], views[1], Front(masks[0], masks[1], front_to_target)


def draw_objects(random: np.random.Generator, size: Size) -> Image:
    """Draw the outlines of a few objects (255): round ones, polygons and poles."""
    drawn = np.zeros((size[1], size[0]), np.uint8)
    whole = np.array(size)
    for _ in range(random.integers(1, MOST_OBJECTS + 1)):
        place = random.uniform(0, 1, 2) * whole
        extent = random.uniform(0.06, 0.25, 2) * min(size)
        kind = random.integers(3)
        if kind == 0:
            angle = random.uniform(0, 180)
            box = tuple(map(float, place)), tuple(map(float, 2 * extent)), angle
            cv2.ellipse(drawn, box, 255, cv2.FILLED)
        elif kind == 1:
            corners = place + random.uniform(-1.5, 1.5, (random.integers(3, 7), 2)) * extent
            cv2.fillPoly(drawn, [np.rint(corners).astype(np.int32)], 255)
        else:
            end = place + random.uniform(-1, 1, 2) * whole
            points = np.rint([place, end]).astype(int).tolist()
            cv2.line(drawn, points[0], points[1], 255, int(random.integers(2, 10)))
    return drawn


def sample_target_view(
    random: np.random.Generator, photograph: Size, framing: Framing, enlarged: float = 1.0
) -> Matrix:
    """Return the matrix from pixels of the target view to pixels of the photograph.

    If the source is `enlarged`, the target shows more of the photograph, if there is more.
    Otherwise the source would be blurred, unlike the close view of a camera.
    """
    size = framing.size
    if framing.whole:
        to_photograph = resize_matrix(size, photograph)
    else:
        zoom = random.uniform(*framing.short_side) / min(photograph) / enlarged
        zoom = max(zoom, size[0] / photograph[0], size[1] / photograph[1])
        room = np.array(photograph) * zoom - size
        corner = random.uniform(0, np.maximum(room, 0))
        to_photograph = scale_matrix(1 / zoom, 1 / zoom) @ shift_matrix(*corner)
    if random.random() < framing.flip:
        to_photograph = to_photograph @ np.array([[-1, 0, size[0] - 1], [0, 1, 0], [0, 0, 1.0]])
    return to_photograph


def depth_of_centre(source_to_target: Matrix, size: Size) -> float:
    """The depth of the image centre: dividing the homography by it makes visible depths positive.

    Its last entry is the depth of a corner, which may lie behind the camera.
    """
    middle = np.array([(size[0] - 1) / 2, (size[1] - 1) / 2, 1.0])
    return float(source_to_target[2] @ middle)


def make_sequences(
    photograph: Image, name: str, size: Size, random: np.random.Generator
) -> Iterator[ViewSequence]:
    """Make v_NAME (shifted, oblique, rotated and zoomed views) and i_NAME (other light)."""
    if photograph.ndim == 2:
        photograph = np.asarray(cv2.cvtColor(photograph, cv2.COLOR_GRAY2RGB), np.uint8)
    to_photograph = middle_of(size_of(photograph), size)
    reference = render(photograph, to_photograph, size)

    moved = []
    for kind in (MILD, VIEWPOINT, TURNED, ZOOMED):
        scaled = replace(kind, shift=kind.shift * size[0] / WIDTH)
        reference_to_view = sample_source_to_target(random, size, scaled)
        if random.random() < 0.5:  # otherwise no view would be closer than the reference
            reference_to_view = np.asarray(np.linalg.inv(reference_to_view), np.float64)
        view = render(photograph, to_photograph @ np.linalg.inv(reference_to_view), size)
        moved.append((_in_light(view, STEADY_LIGHT, random), reference_to_view))
    yield ViewSequence(f'v_{name}', reference, moved)

    lit = [(_in_light(reference, OTHER_LIGHT, random), np.eye(3)) for _ in range(LIGHTS)]
    yield ViewSequence(f'i_{name}', reference, lit)


def middle_of(photograph: Size, size: Size) -> Matrix:
    """Matrix from pixels of the largest central crop with this aspect ratio to the photograph."""
    zoom = min(photograph[0] / size[0], photograph[1] / size[1])
    x, y = ((whole - zoom * side) / 2 for whole, side in zip(photograph, size, strict=True))
    return shift_matrix(x, y) @ scale_matrix(zoom, zoom)


def _in_light(view: Image, light: PhotometricConfig, random: np.random.Generator) -> Image:
    return change_light(random, view, sample_shared_colour(random, light), light)


def render(photograph: Image, view_to_photograph: Matrix, size: Size) -> Image:
    """Render the view of `size`, bilinear; mirror the photograph beyond its edge."""
    shrink = pixels_per_view_pixel(view_to_photograph, size)
    if shrink > ALIASING:
        given = size_of(photograph)
        reduced = max(1, round(given[0] / shrink)), max(1, round(given[1] / shrink))
        photograph = resize(photograph, reduced)
        view_to_photograph = resize_matrix(given, reduced) @ view_to_photograph
    view = cv2.warpPerspective(
        photograph,
        view_to_photograph,
        size,
        flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_REFLECT_101,
    )
    return np.asarray(view, np.uint8)


def pixels_per_view_pixel(view_to_photograph: Matrix, size: Size) -> float:
    """The distance in the photograph between neighbouring pixels at the centre of the view."""
    x, y = (size[0] - 1) / 2, (size[1] - 1) / 2
    u, v, w = view_to_photograph @ np.array([x, y, 1.0])
    jacobian = (
        view_to_photograph[:2, :2] * w - np.outer([u, v], view_to_photograph[2, :2])
    ) / w**2
    return float(np.sqrt(abs(np.linalg.det(jacobian))))
