"""Visual words: learn them from descriptors, write them, and find those of a model.

The words of a model are in MODEL.words.safetensors next to it. They belong to its weights: each
file names the digest of them, and words of other weights are never used.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from kp2d_core.checkpoint import SHORT_DIGEST, WEIGHTS_FOLDER, shipped_models
from kp2d_core.checks import parse_json, shown
from kp2d_core.errors import FileError
from kp2d_core.features import Float
from kp2d_core.files import atomic_write

FORMAT = 'kp2d-words-1'
SUFFIX = '.words.safetensors'
MOST_WORDS = 1024
ROUNDS = 10  # of k-means
UNIT = 0.01  # largest error of the length of a word; float16 has less


@dataclass(frozen=True)
class Words:
    """Visual words, the weights that their descriptors come from, and what they were made of."""

    values: Float  # (K, D) of unit length
    digest: str  # of the weights
    origin: dict[str, Any] = field(default_factory=dict)  # model, photographs, descriptors, ...

    def __post_init__(self) -> None:
        check_words(self.values)
        if len(self.digest) < SHORT_DIGEST:
            raise ValueError(f'the words name no weights: the digest is {shown(self.digest)}')

    def belong_to(self, digest: str) -> bool:
        """Whether they are the words of these weights; the start of a digest suffices."""
        return len(digest) >= SHORT_DIGEST and self.digest.startswith(digest)


def check_words(words: Float) -> None:
    """Raise ValueError unless the words are finite rows of unit length."""
    if words.ndim != 2 or not 2 <= len(words) <= MOST_WORDS or not words.shape[1]:
        raise ValueError(
            f'words must be 2 to {MOST_WORDS} rows of numbers, their shape is {words.shape}'
        )
    if not np.isfinite(words).all():
        raise ValueError('the words hold NaN or infinity')
    worst = float(np.abs(np.linalg.norm(words, axis=1) - 1).max())
    if worst > UNIT:
        raise ValueError(f'the words must have unit length, one is off by {worst:.2g}')


def k_means(rows: Float, count: int, random: np.random.Generator, rounds: int = ROUNDS) -> Float:
    """Unit vectors (count, D) among unit vectors (N, D), the nearest by angle."""
    centres = rows[random.permutation(len(rows))[:count]].copy()
    for _ in range(rounds):
        nearest = (rows @ centres.T).argmax(axis=1)
        member = np.zeros((count, len(rows)), np.float32)
        member[nearest, np.arange(len(rows))] = 1
        sums = member @ rows
        empty = member.sum(axis=1) == 0
        sums[empty] = rows[random.integers(0, len(rows), int(empty.sum()))]
        centres = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-9)
    return np.asarray(centres, np.float32)


def save_words(path: str | Path, words: Words) -> None:
    """Write a file of words atomically, as float16."""
    metadata = {'format': FORMAT, 'checkpoint': words.digest, 'origin': json.dumps(words.origin)}
    with atomic_write(path) as temporary:
        temporary.write_bytes(save({'words': words.values.astype(np.float16)}, metadata))


def load_words(path: str | Path) -> Words:
    """Read and check a file of words."""
    if not Path(path).is_file():
        raise FileError(f'there is no file {path}')
    try:
        with safe_open(path, framework='np') as file:
            metadata = file.metadata() or {}
            if metadata.get('format') != FORMAT:
                raise ValueError(f'its format is {shown(metadata.get("format"))}, not {FORMAT!r}')
            values = file.get_tensor('words').astype(np.float32)
        origin = parse_json(metadata['origin'])
        if not isinstance(origin, dict):
            raise ValueError(f'its origin must hold values by name, got {shown(origin)}')
        check_words(values)
        values /= np.linalg.norm(values, axis=1, keepdims=True)
        return Words(values, metadata['checkpoint'], origin)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise FileError(f'{path} does not hold the words of a model: {error}') from error


def words_path(model: str | Path) -> Path:
    """Return the file of the words of a model: model.safetensors -> model.words.safetensors."""
    if str(model) in shipped_models():
        return WEIGHTS_FOLDER / f'{model}{SUFFIX}'
    return Path(model).expanduser().with_suffix(SUFFIX)


def find_words(model: str | Path, digest: str) -> Words | None:
    """Return the words of a model by its name or file and the digest of its weights.

    A copy or an exported model has those of the shipped model with the same weights. None if there
    are none. FileError if a damaged file, or the words of other weights, take their place.
    """
    if not digest:
        return None
    path = words_path(model)
    beside = load_words(path) if path.is_file() else None
    shipped = (load_words(each) for each in sorted(WEIGHTS_FOLDER.glob(f'*{SUFFIX}')))
    found = _belonging([beside] if beside else [], digest) or _belonging(shipped, digest)
    if found is None and beside is not None:
        raise FileError(
            f'{path} holds the words of other weights: learn them anew with `kp2d train-words '
            f'--model {model} --data PHOTOGRAPHS -o {path}`'
        )
    return found


def _belonging(candidates: Iterable[Words], digest: str) -> Words | None:
    return next((words for words in candidates if words.belong_to(digest)), None)
