"""Make a COLMAP model from our features: choose image pairs, run the mapping."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from kp2d_core.errors import FileError
from kp2d_core.exchange import Pair
from kp2d_core.features import Features, Float
from kp2d_core.files import atomic_write
from kp2d_core.odometry.retrieval import Retrieval

FEW = 60  # up to this many images, all pairs are matched
ALIKE = 20  # with more images, each is matched with this many similar ones
AFTER = 8  # in a sequence, each image is matched with this many following ones
LOOPS = 5  # and with this many similar ones
ROOM = 1 << 20  # bytes; with less free space, a file may be incomplete
SHIPPED = ('cameras.bin', 'images.bin', 'points3D.bin')  # of a model; others may be beside them


@dataclass(frozen=True)
class Model:
    """Figures of the largest reconstructed model."""

    folder: Path
    images: int
    points: int
    track: float  # images that see a point, in the mean
    error: float  # px
    models: int  # that there are: places between which no image leads


def choose_map_pairs(
    features: Sequence[Features], sequence: bool, words: Float | None = None
) -> list[Pair]:
    """Choose the pairs of images to match.

    Few images: all pairs. A sequence: each image with the following ones, and with similar ones,
    which closes loops. Many images: each with the most similar ones.
    words  visual words of the descriptors; None: learn them from the first images
    """
    count = len(features)
    if count <= FEW and not sequence:
        return list(combinations(range(count), 2))
    pairs: set[Pair] = set()
    if sequence:
        pairs |= {(i, j) for i in range(count) for j in range(i + 1, min(i + AFTER + 1, count))}
    retrieval = Retrieval(words)
    for number, found in enumerate(features):
        retrieval.add(number, found.descriptors)
    wanted = LOOPS if sequence else ALIKE
    for number, found in enumerate(features):
        others = [
            other
            for other, _ in retrieval.query(found.descriptors, count)
            if other != number and not (sequence and abs(other - number) <= AFTER)
        ]
        pairs |= {(min(number, other), max(number, other)) for other in others[:wanted]}
    return sorted(pairs)


def reconstruct(
    database: Path,
    images: Path,
    output: Path,
    *,
    calibrated: bool,
    seed: int = 0,
    on_image: Callable[[], None] = lambda: None,
) -> Model:
    """Run COLMAP's incremental mapping on a database; FileError if there is no model.

    The largest model is written to `output`, further ones to folders 1, 2, ... in it.
    calibrated  the cameras are known: do not change them
    on_image    called for each registered image
    """
    import pycolmap

    options = pycolmap.IncrementalPipelineOptions()
    options.random_seed = seed
    options.min_model_size = 3
    opened = pycolmap.Database.open(database)
    if opened.num_images() <= FEW:
        options.num_threads = 1  # with more, the same six images gave a model of two, four or six
    opened.close()
    if calibrated:
        # Otherwise COLMAP changes the focal length by up to half; the model still looks plausible.
        options.ba_refine_focal_length = False
        options.ba_refine_extra_params = False
    level = pycolmap.logging.minloglevel
    pycolmap.logging.minloglevel = pycolmap.logging.FATAL.value  # we tell what went wrong
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = pycolmap.incremental_mapping(
                database, images, folder, options, next_image_callback=on_image
            )
            models = sorted(found.values(), key=lambda model: -model.num_reg_images())
            if not models:
                raise FileError(
                    'no two of the images show one place from two sides, or too few of their '
                    'points agree: there is no model'
                )
            models = apart(models)
            for number, model in enumerate(models):
                write_model(model, output if number == 0 else output / str(number))
    finally:
        pycolmap.logging.minloglevel = level
    best = models[0]
    return Model(
        output,
        best.num_reg_images(),
        best.num_points3D(),
        float(best.compute_mean_track_length()),
        float(best.compute_mean_reprojection_error()),
        len(models),
    )


def apart(models: Sequence[Any]) -> list[Any]:
    """Return the first model, and the others that have images of their own."""
    kept: list[Any] = []
    known: set[str] = set()
    for model in models:
        names = {model.image(number).name for number in model.reg_image_ids()}
        if not names <= known:
            kept.append(model)
            known |= names
    return kept


def write_model(model: Any, folder: Path) -> None:
    """Write COLMAP's files and points3D.ply; FileError if it cannot.

    COLMAP does not notice a full disk. Hence it writes elsewhere first, and we copy.
    """
    with tempfile.TemporaryDirectory() as temporary:
        model.write(temporary)
        model.export_PLY(f'{temporary}/points3D.ply')
        if shutil.disk_usage(temporary).free < ROOM:
            raise FileError(f'cannot write {temporary}: the disk is full')
        for path in sorted(Path(temporary).iterdir()):
            with atomic_write(folder / path.name) as copy:
                shutil.copyfile(path, copy)


def is_model(folder: Path) -> bool:
    return all((folder / name).is_file() for name in SHIPPED)


def keep_others(folder: Path, ours: Iterable[str]) -> None:
    """Raise FileError if a folder contains files of others."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FileError(f'{folder} is not a folder')
    known = {*ours, *SHIPPED, 'frames.bin', 'rigs.bin', 'points3D.ply'}
    strange = [path.name for path in folder.iterdir() if path.name not in known]
    if strange and not is_model(folder):
        raise FileError(f'{folder} holds other files, such as {strange[0]}: give a new folder')
