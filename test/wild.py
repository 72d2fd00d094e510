"""Shared by the fuzz tests: the number of examples, and strategies for bytes, values and arrays.

`make fuzz` searches for minutes (SEED=7 for other examples). The tests search for seconds, always
with the same examples.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

LONG = bool(os.environ.get('KP2D_FUZZ'))
TIMES = int(os.environ.get('KP2D_FUZZ') or 1)  # factor of the number of examples


def examples(count: int) -> Callable[[Any], Any]:
    """Limit a test to this many examples, more with `make fuzz`."""
    return settings(
        max_examples=count * TIMES,
        deadline=None,
        database=None,
        derandomize=not LONG,
        suppress_health_check=list(HealthCheck),
    )


def damaged(original: bytes, beginning: int | None = None) -> st.SearchStrategy[bytes]:
    """The bytes with some changed, removed, repeated or inserted, mostly near the beginning."""
    return damage(original, beginning).map(lambda apply: apply())


def damage(
    original: bytes, beginning: int | None = None
) -> st.SearchStrategy[Callable[[], bytes]]:
    """Functions that make them: Hypothesis keeps every example, and large ones take gigabytes."""
    near = min(beginning or len(original), len(original)) - 1
    places = st.one_of(st.integers(0, near), st.integers(0, len(original) - 1))
    edit = st.one_of(
        st.tuples(st.just('flip'), places, st.integers(0, 7)),
        st.tuples(st.just('set'), places, st.sampled_from([0, 1, 0x7F, 0x80, 0xFF])),
        st.tuples(st.just('cut'), places, st.integers(1, 64)),
        st.tuples(st.just('end'), places, st.just(0)),
        st.tuples(st.just('insert'), places, st.binary(min_size=1, max_size=8)),
        st.tuples(st.just('repeat'), places, st.integers(1, 64)),
    )

    def apply(edits: list[tuple[str, int, Any]]) -> bytes:
        data = bytearray(original)
        for kind, place, value in edits:
            if not data:
                break
            place %= len(data)
            if kind == 'flip':
                data[place] ^= 1 << value
            elif kind == 'set':
                data[place] = value
            elif kind == 'cut':
                del data[place : place + value]
            elif kind == 'end':
                del data[place:]
            elif kind == 'insert':
                data[place:place] = value
            else:
                data[place:place] = data[place : place + value]
        return bytes(data)

    return st.lists(edit, min_size=1, max_size=6).map(lambda edits: partial(apply, edits))


# Numbers, and values that are not numbers.
numbers = st.one_of(
    st.integers(-5, 5),
    st.integers(),
    st.floats(),
    st.sampled_from([10**400, -(10**30), 2**31, 2**63, 1e308, 5e-324, float('nan'), True, False]),
    st.sampled_from([np.int64(3), np.uint8(200), np.float32('inf'), np.bool_(True)]),
)
values = st.recursive(
    st.one_of(st.none(), numbers, st.text(max_size=20), st.binary(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


def arrays(shape: tuple[int, ...]) -> st.SearchStrategy[np.ndarray]:
    """Arrays of this shape and any type, with usual and large numbers, NaN and infinity."""

    def make(kind: str, seed: int, odd: list[tuple[int, float]]) -> np.ndarray:
        random = np.random.default_rng(seed)
        array = random.normal(0, 100, shape)
        for place, value in odd:
            if array.size:
                array.flat[place % array.size] = value
        with np.errstate(all='ignore'):
            return array.astype(kind)

    wild = st.sampled_from([np.nan, np.inf, -np.inf, 0.0, 1e30, -1e30, 1e-40])
    return st.builds(
        make,
        st.sampled_from(['f4', 'f4', 'f4', 'f8', 'f2', 'i1', 'u1', 'i8']),
        st.integers(0, 1000),
        st.lists(st.tuples(st.integers(0, 10_000), wild), max_size=4),
    )
