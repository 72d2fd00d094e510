"""Sequences in HPatches layout: images 1.png to 6.png (any format and number), H_1_2 to H_1_6."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from kp2d_core.errors import FileError
from kp2d_core.files import atomic_write
from kp2d_core.geometry import resize_matrix
from kp2d_core.images import IMAGE_SUFFIXES, Size
from kp2d_core.views.pairs import ViewSequence
from kp2d_core.visualize import write_image

Truth = Literal['exact', 'paper']
TRUTHS: tuple[str, ...] = get_args(Truth)
_HOMOGRAPHY_NAME = re.compile(r'H_1_(\d+)')


@dataclass(frozen=True)
class Sequence:
    """Photographs of one plane, or taken from one place; number 1 is the reference."""

    name: str
    images: dict[int, Path]  # by number
    homographies: dict[int, NDArray[np.float64]]  # from image 1 to image `number`, in their pixels


def load_sequences(
    folder: str | Path,
    names: Iterable[str] = (),
    skipped: Callable[[str], object] = warnings.warn,
) -> list[Sequence]:
    """Find the sequences of a folder, sorted by name; the folder may itself be a sequence.

    names    only these, with or without the prefix i_ or v_
    skipped  called with a sentence for each pair that is left out because a file is missing

    Raise FileError for an invalid file, such as two images with number 1 or a homography that is
    not a 3x3 matrix. Skipping it would silently change the figures.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise FileError(f'there is no folder {folder}')
    inner = sorted(path for path in folder.iterdir() if path.is_dir())
    folders = [folder] if _numbered_images(folder) else inner
    if names:
        folders = _choose(folders, list(names), folder)
    loaded = [_load_sequence(path, skipped) for path in folders]
    sequences = [sequence for sequence in loaded if sequence is not None]
    if not sequences:
        raise FileError(
            f'{folder} holds no sequence in HPatches layout: folders with 1.png, 2.png, H_1_2 ...'
        )
    return sequences


def select_split(sequences: list[Sequence], split: str) -> list[Sequence]:
    """Select 'all', 'illumination' (i_*), 'viewpoint' (v_*), or one sequence by name."""
    if split == 'all':
        return sequences
    if split in ('illumination', 'viewpoint'):
        return [sequence for sequence in sequences if sequence.name.startswith(f'{split[0]}_')]
    return [sequence for sequence in sequences if _is_named(sequence.name, split)]


def rescale(
    homography: NDArray[np.float64],
    source: Size,
    target: Size,
    size: Size,
    truth: Truth = 'exact',
) -> NDArray[np.float64]:
    """Return the homography between two images after both are resized to `size`.

    'exact' follows the pixel centres. 'paper' only scales coordinates, as for the figures of the
    paper, and ignores that resizing moves the pixel centres. Its error is up to 0.7 px at the
    corners of HPatches images.
    """
    if truth not in TRUTHS:
        raise ValueError(f"truth must be one of {', '.join(TRUTHS)}, got '{truth}'")
    shrink_target, shrink_source = resize_matrix(target, size), resize_matrix(source, size)
    if truth == 'paper':
        shrink_target[:2, 2] = shrink_source[:2, 2] = 0
    scaled: NDArray[np.float64] = shrink_target @ homography @ np.linalg.inv(shrink_source)
    # The sign of a homography is arbitrary: put the image centre in front of the camera.
    centre = np.array([size[0] / 2, size[1] / 2, 1])
    return scaled if scaled[2] @ centre > 0 else -scaled


def write_sequence(folder: Path, sequence: ViewSequence) -> None:
    """Write 1.png, 2.png, ..., H_1_2, ... to a folder with the name of the sequence."""
    folder = folder / sequence.name
    write_image(folder / '1.png', sequence.reference)
    for number, (image, homography) in enumerate(sequence.others, 2):
        write_image(folder / f'{number}.png', image)
        with atomic_write(folder / f'H_1_{number}') as temporary:
            np.savetxt(temporary, homography / homography[2, 2], '%.12g')


def _load_sequence(folder: Path, skipped: Callable[[str], object]) -> Sequence | None:
    images = _numbered_images(folder)
    matrices = {
        int(found[1]): path
        for path in sorted(folder.iterdir())
        if (found := _HOMOGRAPHY_NAME.fullmatch(path.name))
    }
    if not images and not matrices:
        patches = any(path.stem == 'ref' for path in folder.iterdir())
        hint = ' (these are the patches of HPatches; its sequences are needed)' if patches else ''
        skipped(f'skipped {folder}: no image 1 to n and no homography in it{hint}')
        return None
    if 1 not in images:
        skipped(f'skipped {folder}: image 1, the reference, is missing')
        return None
    for number in sorted((set(images) | set(matrices)) - {1}):
        if number not in matrices:
            skipped(f'skipped {images[number]}: its homography H_1_{number} is missing')
        if number not in images:
            skipped(f'skipped {matrices[number]}: image {number} is missing')
    numbers = sorted(set(images) & set(matrices) - {1})
    if not numbers:
        skipped(f'skipped {folder}: it holds no pair')
        return None
    return Sequence(
        folder.name,
        {number: images[number] for number in [1, *numbers]},
        {number: _read_homography(matrices[number]) for number in numbers},
    )


def _numbered_images(folder: Path) -> dict[int, Path]:
    images: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() not in IMAGE_SUFFIXES or not path.stem.isdecimal():
            continue
        number = int(path.stem)
        if number in images:
            raise FileError(f'{path} and {images[number].name} are both image {number}')
        if path.stat().st_size == 0:
            raise FileError(f'{path} is empty')
        images[number] = path
    return images


def _read_homography(path: Path) -> NDArray[np.float64]:
    try:
        matrix = np.array(path.read_text().split(), np.float64).reshape(3, 3)
    except (OSError, ValueError) as error:
        raise FileError(f'{path} is not a 3x3 matrix of numbers: {error}') from error
    if not np.isfinite(matrix).all() or np.linalg.matrix_rank(matrix) < 3:
        raise FileError(f'{path} is not a homography: it cannot be inverted')
    return matrix


def _choose(folders: list[Path], names: list[str], parent: Path) -> list[Path]:
    for name in names:
        if not any(_is_named(path.name, name) for path in folders):
            there = ', '.join(path.name for path in folders)
            raise ValueError(f"there is no sequence '{name}' in {parent}: it has {there}")
    return [path for path in folders if any(_is_named(path.name, name) for name in names)]


def _is_named(sequence: str, name: str) -> bool:
    return sequence == name or (sequence[:2] in ('i_', 'v_') and sequence[2:] == name)
