"""Image retrieval: find keyframes that show the same place, by any kind of descriptor.

Each frame becomes one VLAD vector (Jegou et al. 2010): the residuals of its descriptors to their
nearest visual words, summed for each word. The words are learned from the first frames of the run.
Hence no vocabulary has to be shipped, and new weights, or SIFT, need no new one.
"""

from __future__ import annotations

import numpy as np

from kp2d_core.features import Float

WORDS = 32
LEARN_FROM = 6000  # descriptors
ROUNDS = 10  # of k-means


class Retrieval:
    """A database of frames that can be searched for similar ones."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._words: Float | None = None
        self._waiting: list[tuple[int, Float]] = []  # until there are words
        self._numbers: list[int] = []
        self._vectors = np.empty((0, 0), np.float32)

    def __len__(self) -> int:
        return len(self._numbers) + len(self._waiting)

    def add(self, number: int, descriptors: Float) -> None:
        if self._words is None:
            self._waiting.append((number, descriptors))
            if sum(len(rows) for _, rows in self._waiting) < LEARN_FROM:
                return
            self._learn()
            return
        self._keep(number, summary(descriptors, self._words))

    def query(self, descriptors: Float, count: int) -> list[tuple[int, float]]:
        """Return the most similar frames and their similarity (-1 to 1), best first."""
        if self._words is None:
            self._learn()
        if self._words is None or not self._numbers:
            return []
        vectors = self._vectors[: len(self._numbers)]
        similarity = vectors @ summary(descriptors, self._words)
        order = np.argsort(-similarity, kind='stable')[:count]
        return [(self._numbers[i], float(similarity[i])) for i in order]

    def remove(self, number: int) -> None:
        self._waiting = [entry for entry in self._waiting if entry[0] != number]
        if number in self._numbers:
            row = self._numbers.index(number)
            count = len(self._numbers)
            self._vectors[row : count - 1] = self._vectors[row + 1 : count]
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
        self._words = k_means(pool, WORDS, self._random)
        for number, descriptors in self._waiting:
            self._keep(number, summary(descriptors, self._words))
        self._waiting = []

    def _keep(self, number: int, vector: Float) -> None:
        if len(self._numbers) == len(self._vectors):
            grown = np.zeros((max(64, 2 * len(self._numbers)), len(vector)), np.float32)
            if len(self._numbers):
                grown[: len(self._numbers)] = self._vectors[: len(self._numbers)]
            self._vectors = grown
        self._vectors[len(self._numbers)] = vector
        self._numbers.append(number)


def summary(descriptors: Float, words: Float) -> Float:
    """Compute the VLAD vector (WORDS * D,) of descriptors (N, D)."""
    if not len(descriptors):
        return np.zeros(words.size, np.float32)
    nearest = (descriptors @ words.T).argmax(axis=1)
    member = np.zeros((len(words), len(descriptors)), np.float32)
    member[nearest, np.arange(len(descriptors))] = 1
    left = member @ descriptors - member.sum(axis=1, keepdims=True) * words
    # Each word counts alike, however many descriptors are its own (Arandjelovic, Zisserman 2013).
    left /= np.maximum(np.linalg.norm(left, axis=1, keepdims=True), 1e-9)
    flat = left.ravel()
    return np.asarray(flat / max(float(np.linalg.norm(flat)), 1e-9), np.float32)


def k_means(rows: Float, count: int, random: np.random.Generator) -> Float:
    """Unit vectors (count, D) among unit vectors (N, D), the nearest by angle."""
    centres = rows[random.permutation(len(rows))[:count]].copy()
    for _ in range(ROUNDS):
        nearest = (rows @ centres.T).argmax(axis=1)
        member = np.zeros((count, len(rows)), np.float32)
        member[nearest, np.arange(len(rows))] = 1
        sums = member @ rows
        empty = member.sum(axis=1) == 0
        sums[empty] = rows[random.integers(0, len(rows), int(empty.sum()))]
        centres = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-9)
    return np.asarray(centres, np.float32)
