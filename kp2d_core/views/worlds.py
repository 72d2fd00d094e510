"""3D scenes of photographs, and camera paths through them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np

from kp2d_core.camera import Camera
from kp2d_core.errors import FileError
from kp2d_core.geometry import Matrix, Size
from kp2d_core.images import Image, read_image
from kp2d_core.views.scene import Piece, Scene, Texture

PHOTOGRAPHS = (
    'astronaut', 'brick', 'camera', 'chelsea', 'coffee', 'coins', 'grass', 'gravel',
    'hubble_deep_field', 'motorcycle_left', 'rocket',
)  # fmt: skip
FLOOR, CEILING = 1.3, -1.4  # m below and above the camera
DENSITY = 160.0  # photograph pixels per metre
SIDE = 2.0  # m, of one piece of a wall


def photographs() -> list[Image]:
    """Load the photographs of scikit-image; raise FileError if it is not installed."""
    spec = find_spec('skimage')
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    found = [
        read_image(path)
        for folder in folders
        for path in sorted((Path(folder) / 'data').glob('*'))
        if path.stem in PHOTOGRAPHS
    ]
    if not found:
        raise FileError('scenes are made of the photographs of scikit-image: install scikit-image')
    return found


def view_camera(size: Size = (640, 480)) -> Camera:
    """Return a pinhole camera with a horizontal field of view of 65 degrees."""
    width, height = size
    focal = 0.78 * width
    matrix = np.array([[focal, 0, (width - 1) / 2], [0, focal, (height - 1) / 2], [0, 0, 1.0]])
    return Camera.create(size, matrix)


def room(images: Sequence[Image], seed: int = 0, pieces_of_furniture: int = 14) -> Scene:
    """Build a room of 9 m by 8 m with boxes; (0, 0, 0) is its centre, at hand height."""
    random = np.random.default_rng(seed)
    builder = Builder(images, random)
    builder.walls([(-4.5, -4.0), (4.5, -4.0), (4.5, 4.0), (-4.5, 4.0)])
    builder.ground(-4.5, 4.5, -4.0, 4.0)
    placed = 0
    while placed < pieces_of_furniture:
        middle = random.uniform([-4.0, -3.5], [4.0, 3.5])
        half = random.uniform(0.2, 0.5, 2)
        if np.linalg.norm(middle) > 2.2:  # the camera moves there
            builder.box(middle, half, random.uniform(0.5, 2.0))
            placed += 1
    return Scene(builder.pieces)


def ring(
    images: Sequence[Image], seed: int = 0, width: float = 28.0, depth: float = 22.0
) -> Scene:
    """Build a ring corridor, 3 m wide and 100 m long; `ring_path` follows its centre line."""
    random = np.random.default_rng(seed)
    builder = Builder(images, random)
    for outward in (1.5, -1.5):
        x, z = width / 2 + outward, depth / 2 + outward
        builder.walls([(-x, -z), (x, -z), (x, z), (-x, z)])
    x, z = width / 2, depth / 2
    builder.ground(-x - 1.5, x + 1.5, -z - 1.5, -z + 1.5)
    builder.ground(-x - 1.5, x + 1.5, z - 1.5, z + 1.5)
    builder.ground(-x - 1.5, -x + 1.5, -z + 1.5, z - 1.5)
    builder.ground(x - 1.5, x + 1.5, -z + 1.5, z - 1.5)
    # Cupboards along the walls add relief.
    line = _line(width, depth)
    for along in np.arange(4.0, 2 * (width + depth), 5.0):
        place, heading = _on_line(line, along)
        aside = np.array([heading[1], -heading[0]]) * random.choice([-1.2, 1.2])
        builder.box(place + aside, random.uniform(0.15, 0.3, 2), random.uniform(0.6, 2.2))
    return Scene(builder.pieces)


class Builder:
    """Collects pieces; each shows a different part of a photograph."""

    def __init__(self, images: Sequence[Image], random: np.random.Generator) -> None:
        self.textures = [Texture(image) for image in images]
        self.random = random
        self.pieces: list[Piece] = []

    def walls(self, corners: Sequence[tuple[float, float]]) -> None:
        """Add walls from floor to ceiling along a polygon of (x, z)."""
        for start, end in pairwise([*corners, corners[0]]):
            a, b = (np.array([x, CEILING, z]) for x, z in (start, end))
            self.surface(a, b - a, np.array([0, FLOOR - CEILING, 0]))

    def ground(self, x0: float, x1: float, z0: float, z1: float) -> None:
        """Add floor and ceiling."""
        for height, light in ((FLOOR, 0.9), (CEILING, 0.7)):
            across, down = np.array([x1 - x0, 0, 0]), np.array([0, 0, z1 - z0])
            self.surface(np.array([x0, height, z0]), across, down, light)

    def box(self, middle: Matrix, half: Matrix, height: float) -> None:
        """Add a box on the floor, centred at (x, z); `half` is half its width and depth."""
        (x0, z0), (x1, z1) = middle - half, middle + half
        top = FLOOR - height
        corners = [(x0, z0), (x1, z0), (x1, z1), (x0, z1)]
        for i, (start, end) in enumerate(pairwise([*corners, corners[0]])):
            a, b = (np.array([x, top, z]) for x, z in (start, end))
            self.piece(a, b - a, np.array([0, height, 0.0]), 1.0 - 0.12 * (i % 2))
        across, down = np.array([x1 - x0, 0, 0]), np.array([0, 0, z1 - z0])
        self.piece(np.array([x0, top, z0]), across, down, 1.05)

    def surface(self, corner: Matrix, across: Matrix, down: Matrix, light: float = 1.0) -> None:
        """Add a large surface, made of pieces of about SIDE."""
        columns, rows = (
            max(1, round(float(np.linalg.norm(edge)) / SIDE)) for edge in (across, down)
        )
        for i in range(columns):
            for j in range(rows):
                at = corner + across * (i / columns) + down * (j / rows)
                self.piece(at, across / columns, down / rows, light)

    def piece(self, corner: Matrix, across: Matrix, down: Matrix, light: float) -> None:
        random = self.random
        texture = self.textures[random.integers(len(self.textures))]
        height, width = texture.photograph.shape[:2]
        wide, high = (float(np.linalg.norm(edge)) * DENSITY for edge in (across, down))
        turn = random.uniform(0, 2 * np.pi)
        zoom = random.uniform(0.6, 1.2)
        # As large as fits: beyond the edge, the photograph is mirrored.
        fit = min(1.0, 0.9 * min(width, height) / np.hypot(wide, high) / zoom)
        a = np.array([np.cos(turn), np.sin(turn)]) * wide * zoom * fit
        d = np.array([-np.sin(turn), np.cos(turn)]) * high * zoom * fit
        room_left = np.array([width, height]) - np.abs(a) - np.abs(d)
        middle = np.array([width, height]) / 2 + random.uniform(-0.5, 0.5, 2) * room_left
        origin = middle - (a + d) / 2
        on_texture = np.array([[a[0], d[0], origin[0]], [a[1], d[1], origin[1]], [0, 0, 1]])
        self.pieces.append(Piece(corner, across, down, texture, on_texture, light))


def room_path(count: int, turns: float = 1.0) -> Matrix:
    """Poses (count, 4, 4), camera to world: around the centre of the room, looking out and in."""
    phase = np.linspace(0, 2 * np.pi * turns, count)
    places = np.stack(
        [1.4 * np.sin(phase), 0.25 * np.sin(2 * phase), 1.1 * np.sin(phase) * np.cos(phase)],
        axis=1,
    )
    headings = 0.5 * np.sin(phase)
    pitches = 0.1 * np.sin(3 * phase)
    rolls = 0.06 * np.sin(2 * phase + 0.5)
    return np.array(list(_poses(places, headings, pitches, rolls)))


def ring_path(
    step: float, length: float = 100.0, width: float = 28.0, depth: float = 22.0
) -> Matrix:
    """Poses (N, 4, 4) along the corridor of `ring`, a step (m) apart, over a length (m).

    The ring is 100 m long: beyond that, the camera sees the same places again.
    """
    line = _line(width, depth)
    around = 2 * (width + depth)
    along = np.arange(0, length + step / 2, step) + 3.0
    places, headings = [], []
    for way in along:
        ahead = [_on_line(line, (way + d) % around)[0] for d in np.linspace(-1.2, 1.2, 9)]
        place = np.mean(ahead, axis=0)  # rounds off the corners
        front = np.mean([_on_line(line, (way + d) % around)[1] for d in np.linspace(0, 2, 9)], 0)
        places.append([place[0], 0.05 * np.sin(2 * way), place[1]])
        headings.append(np.arctan2(front[0], front[1]))
    sway = np.unwrap(headings) + 0.06 * np.sin(0.9 * along)
    pitches, rolls = 0.03 * np.sin(1.3 * along), 0.02 * np.sin(1.7 * along)
    return np.array(list(_poses(np.array(places), sway, pitches, rolls)))


def _poses(places: Matrix, headings: Matrix, pitches: Matrix, rolls: Matrix) -> Iterator[Matrix]:
    for place, heading, pitch, roll in zip(places, headings, pitches, rolls, strict=True):
        (sh, ch), (sp, cp), (sr, cr) = (
            (np.sin(angle), np.cos(angle)) for angle in (heading, pitch, roll)
        )
        yaw = np.array([[ch, 0, sh], [0, 1, 0], [-sh, 0, ch]])
        tilt = np.array([[1, 0, 0], [0, cp, -sp], [0, sp, cp]])
        lean = np.array([[cr, -sr, 0], [sr, cr, 0], [0, 0, 1]])
        pose = np.eye(4)
        pose[:3, :3], pose[:3, 3] = yaw @ tilt @ lean, place
        yield pose


def _line(width: float, depth: float) -> Matrix:
    """The corners (5, 2) of the centre line of the ring, in (x, z), starting at the front left."""
    x, z = width / 2, depth / 2
    return np.array([[-x, -z], [-x, z], [x, z], [x, -z], [-x, -z]])


def _on_line(line: Matrix, along: float) -> tuple[Matrix, Matrix]:
    """Return the position (x, z) after this many metres, and the direction there."""
    steps = np.diff(line, axis=0)
    lengths = np.abs(steps).sum(axis=1)
    along = along % lengths.sum()
    edge = int(np.searchsorted(np.cumsum(lengths), along, 'right'))
    edge = min(edge, len(lengths) - 1)
    before = along - lengths[:edge].sum()
    heading = steps[edge] / lengths[edge]
    return line[edge] + before * heading, heading
