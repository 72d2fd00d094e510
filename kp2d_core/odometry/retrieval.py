"""Image retrieval: find keyframes that show the same place, by any kind of descriptor.

Each frame becomes one VLAD vector (Jegou et al. 2010): the residuals of its descriptors to their
nearest visual words, summed for each word. The shipped models have words of their own (words.py).
Those of other descriptors, such as SIFT, are learned from the first frames of the run.
"""

from __future__ import annotations

import numpy as np

from kp2d_core.features import Float
from kp2d_core.odometry.words import k_means

WORDS = 64  # that are learned
LEARN_FROM = 6000  # descriptors
LEVELS = 127  # vectors are kept in bytes, from -LEVELS to LEVELS
NOTHING = 1e-3  # shorter residuals are errors of rounding
AT_ONCE = 64  # vectors that are compared at once: they fit in the processor's cache


class Retrieval:
    """A database of frames that can be searched for similar ones."""

    def __init__(self, words: Float | None = None, seed: int = 0) -> None:
        """words  (K, D) of these descriptors; None: learn them from the first frames"""
        self._random = np.random.default_rng(seed)
        self.words = words
        self._waiting: list[tuple[int, Float]] = []  # until there are words
        self._numbers: list[int] = []
        self._vectors = np.empty((0, 0), np.int8)
        self._scales = np.empty(0, np.float32)

    def __len__(self) -> int:
        return len(self._numbers) + len(self._waiting)

    def add(self, number: int, descriptors: Float) -> None:
        if self.words is None:
            self._waiting.append((number, descriptors))
            if sum(len(rows) for _, rows in self._waiting) < LEARN_FROM:
                return
            self._learn()
            return
        self._keep(number, summary(descriptors, self.words))

    def query(self, descriptors: Float, count: int) -> list[tuple[int, float]]:
        """Return the most similar frames and their similarity (-1 to 1), best first."""
        if self.words is None:
            self._learn()
        if self.words is None or not self._numbers:
            return []
        vector = summary(descriptors, self.words)
        similarity = np.concatenate(
            [
                self._vectors[i : i + AT_ONCE].astype(np.float32) @ vector
                for i in range(0, len(self._numbers), AT_ONCE)
            ]
        )
        similarity = similarity[: len(self._numbers)] * self._scales[: len(self._numbers)]
        order = np.argsort(-similarity, kind='stable')[:count]
        return [(self._numbers[i], float(similarity[i])) for i in order]

    def remove(self, number: int) -> None:
        self._waiting = [entry for entry in self._waiting if entry[0] != number]
        if number in self._numbers:
            row = self._numbers.index(number)
            count = len(self._numbers)
            for kept in (self._vectors, self._scales):
                kept[row : count - 1] = kept[row + 1 : count]
            del self._numbers[row]

    def _learn(self) -> None:
        """Learn the words from the frames so far."""
        rows = [rows for _, rows in self._waiting if len(rows)]
        if not rows:
            return
        pool = np.concatenate(rows)
        if len(pool) < WORDS:
            return
        pool = pool[self._random.permutation(len(pool))[:LEARN_FROM]]
        self.use(k_means(pool, WORDS, self._random))

    def use(self, words: Float) -> None:
        """Use these words from now on; nothing must have been learned yet."""
        self.words = words
        for number, descriptors in self._waiting:
            self._keep(number, summary(descriptors, words))
        self._waiting = []

    def _keep(self, number: int, vector: Float) -> None:
        if len(self._numbers) == len(self._vectors):
            more = max(64, len(self._numbers))
            empty = np.zeros((more, len(vector)), np.int8)
            old = self._vectors.reshape(-1, len(vector))
            self._vectors = np.concatenate([old, empty])
            self._scales = np.concatenate([self._scales, np.zeros(more, np.float32)])
        scale = max(float(np.abs(vector).max()), 1e-9) / LEVELS
        self._vectors[len(self._numbers)] = np.rint(vector / scale)
        self._scales[len(self._numbers)] = scale
        self._numbers.append(number)


def summary(descriptors: Float, words: Float) -> Float:
    """Compute the VLAD vector (words * D,) of descriptors (N, D)."""
    if not len(descriptors):
        return np.zeros(words.size, np.float32)
    nearest = (descriptors @ words.T).argmax(axis=1)
    member = np.zeros((len(words), len(descriptors)), np.float32)
    member[nearest, np.arange(len(descriptors))] = 1
    left = member @ descriptors
    # Residuals of unit vectors along their word say only how far these scatter, which is much the
    # same in every image. What tells images apart lies across it.
    left -= (left * words).sum(axis=1, keepdims=True) * words
    # Each word counts alike, however many descriptors are its own (Arandjelovic, Zisserman 2013).
    left /= np.maximum(np.linalg.norm(left, axis=1, keepdims=True), NOTHING)
    flat = left.ravel()
    return np.asarray(flat / max(float(np.linalg.norm(flat)), 1e-9), np.float32)
