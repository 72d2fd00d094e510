"""Sequences in HPatches layout made of single photographs: a test on your own kind of images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import numpy as np

from kp2d_core.files import atomic_write
from kp2d_core.images import Image, Size, size_of
from kp2d_core.views.homography import HomographyConfig, Matrix, sample_source_to_target
from kp2d_core.views.photometric import PhotometricConfig, change_light, sample_shared_colour
from kp2d_core.views.rendering import render
from kp2d_core.visualize import write_image

# Shifts are in pixels of a view that is so wide.
WIDTH = 320
MILD = HomographyConfig(1.0, (0.93, 1.07), 9.0, 0.0, 8.0, False)
VIEWPOINT = HomographyConfig(1.0, (0.7, 1.2), 30.0, 0.25, 30.0, False, 2.5)
TURNED = HomographyConfig(1.0, (0.5, 1.2), 180.0, 0.15, 20.0, False)
ZOOMED = HomographyConfig(1.0, (0.25, 0.5), 30.0, 0.1, 20.0, False)

STEADY_LIGHT = PhotometricConfig(0.01, (1,), (0.8, 1.2), (0.8, 1.2), (0.9, 1.1), 0.02, 0.0, 0.0)
OTHER_LIGHT = PhotometricConfig(0.03, (1, 3), (0.3, 1.7), (0.4, 1.6), (0.6, 1.4), 0.05, 0.0, 0.0)
LIGHTS = 2  # images of a photograph in another light


@dataclass(frozen=True)
class MadeSequence:
    """Image 1 and others with the homography from image 1 to them, in pixels."""

    name: str
    reference: Image
    others: list[tuple[Image, Matrix]]


def make_sequences(
    photograph: Image, name: str, size: Size, random: np.random.Generator
) -> Iterator[MadeSequence]:
    """v_NAME: mildly moved, from another viewpoint, turned, zoomed; i_NAME: in another light."""
    if photograph.ndim == 2:
        photograph = np.asarray(cv2.cvtColor(photograph, cv2.COLOR_GRAY2RGB), np.uint8)
    to_photograph = middle_of(size_of(photograph), size)
    reference = render(photograph, to_photograph, size)

    moved = []
    for kind in (MILD, VIEWPOINT, TURNED, ZOOMED):
        scaled = replace(kind, shift=kind.shift * size[0] / WIDTH)
        reference_to_view = sample_source_to_target(random, size, scaled)
        if random.random() < 0.5:  # else no view would be nearer than the reference
            reference_to_view = np.asarray(np.linalg.inv(reference_to_view), np.float64)
        view = render(photograph, to_photograph @ np.linalg.inv(reference_to_view), size)
        moved.append((_in_light(view, STEADY_LIGHT, random), reference_to_view))
    yield MadeSequence(f'v_{name}', reference, moved)

    lit = [(_in_light(reference, OTHER_LIGHT, random), np.eye(3)) for _ in range(LIGHTS)]
    yield MadeSequence(f'i_{name}', reference, lit)


def write_sequence(folder: Path, sequence: MadeSequence) -> None:
    """1.png, 2.png, ..., H_1_2, ... in a folder of the sequence's name."""
    folder = folder / sequence.name
    write_image(folder / '1.png', sequence.reference)
    for number, (image, homography) in enumerate(sequence.others, 2):
        write_image(folder / f'{number}.png', image)
        with atomic_write(folder / f'H_1_{number}') as temporary:
            np.savetxt(temporary, homography / homography[2, 2], '%.12g')


def middle_of(photograph: Size, size: Size) -> Matrix:
    """From pixels of the largest view of these proportions, cut out of the middle."""
    zoom = min(photograph[0] / size[0], photograph[1] / size[1])
    x, y = ((whole - zoom * side) / 2 for whole, side in zip(photograph, size, strict=True))
    centre = (zoom - 1) / 2  # of a view's pixel beside that of the photograph's at its corner
    return np.array([[zoom, 0, x + centre], [0, zoom, y + centre], [0, 0, 1.0]])


def _in_light(view: Image, light: PhotometricConfig, random: np.random.Generator) -> Image:
    return change_light(random, view, sample_shared_colour(random, light), light)
