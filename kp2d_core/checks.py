"""Checks of input from outside: numbers are finite and in range, JSON and YAML limited in size."""

from __future__ import annotations

import json
import math
import operator
import reprlib
from dataclasses import field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kp2d_core.files import LONGEST_TEXT

MOST = 2**31 - 1  # default limit of a whole number, which OpenCV and the runtimes still accept
LARGEST_NUMBER = 2**64  # limit of a whole number in a document
MOST_THREADS = 1024
LINE = 100  # characters of a value in an error message
DEEPEST = 32  # limit of nesting in a document
MOST_VALUES = 100_000  # limit of values in a document; each use of a YAML alias counts


def whole(value: Any, name: str, *, least: int = 0, most: int = MOST) -> int:
    """Return the value as an int if it is a whole number (Python or NumPy) in range."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        result = operator.index(value)
    except TypeError:
        raise ValueError(f'{name} must be a whole number, got {shown(value)}') from None
    if result < least:
        raise ValueError(f'{name} must be {least} or more, got {shown(value)}')
    if result > most:
        raise ValueError(f'{name} must be at most {most}, got {shown(value)}')
    return result


def number(
    value: Any,
    name: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> float:
    """Return the value as a float if it is finite and in range."""
    try:
        if isinstance(value, bool | np.bool_ | str | bytes):
            raise TypeError
        result = float(value)
    except (TypeError, ValueError):
        raise ValueError(f'{name} must be a number, got {shown(value)}') from None
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise ValueError(f'{name} must be a finite number, got {shown(value)}')
    if least is not None and result < least:
        raise ValueError(f'{name} must be {least:g} or more, got {shown(value)}')
    if above is not None and result <= above:
        raise ValueError(f'{name} must be above {above:g}, got {shown(value)}')
    if most is not None and result > most:
        raise ValueError(f'{name} must be at most {most:g}, got {shown(value)}')
    return result


def finite_array(values: Any, name: str) -> NDArray[np.float64]:
    """Return the values as an array if all are finite numbers."""
    try:
        result = np.asarray(values, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f'{name} must hold numbers, got {shown(values)}') from None
    if not np.isfinite(result).all():
        raise ValueError(f'{name} holds NaN or infinity')
    return result


def parse_json(text: str | bytes) -> Any:
    """Parse a document without infinities; raise ValueError for anything else."""

    def refuse(constant: str) -> None:
        raise ValueError(f'{constant} is not a JSON number')

    _check_length(text)
    try:
        return _tame(json.loads(text, parse_constant=refuse))
    except RecursionError:
        raise ValueError('it is nested too deep') from None


def parse_yaml(text: str) -> Any:
    """Parse a document of plain values; raise ValueError for anything else."""
    import yaml

    _check_length(text)
    try:
        return _tame(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ValueError(f'it is not YAML: {" ".join(str(error).split())}') from error
    except (RecursionError, OverflowError, TypeError, AttributeError) as error:
        # For example a key that is a list, a date in the year 0, thousands of nested lists.
        reason = 'it is nested too deep' if isinstance(error, RecursionError) else error
        raise ValueError(f'it is not usable YAML: {reason}') from None


def shown(value: Any) -> str:
    """Format a value for an error message, in at most one line."""
    try:
        text = _SHORT.repr(value)
        return text if len(text) <= LINE else f'{text[:LINE]}...'
    except ValueError:  # an int of more digits than Python prints
        return f'a number of {value.bit_length()} bits'


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 60


_SHORT = _Short()


def _check_length(text: str | bytes) -> None:
    if len(text) > LONGEST_TEXT:
        raise ValueError(f'it is too large: at most {LONGEST_TEXT} characters are read')


def _tame(document: Any) -> Any:
    """Return the document; raise ValueError if it is too large or deep, or has extreme numbers."""
    left = MOST_VALUES
    level = [document]
    for _ in range(DEEPEST):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += [*value, *value.values()]
            elif isinstance(value, list | tuple | set):
                below += value
            elif isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f'{value} is not a finite number')
            elif isinstance(value, int) and abs(value) > LARGEST_NUMBER:
                raise ValueError(f'{shown(value)} is too large a number')
            if len(below) > left:
                raise ValueError(f'it holds more than {MOST_VALUES} values')
        left -= len(below)
        level = below
        if not level:
            return document
    raise ValueError('it is nested too deep')


T = TypeVar('T')


def setting(default: T, meaning: str) -> T:
    """Make a field of a settings dataclass, with its meaning for users in one sentence."""
    described: T = field(default=default, metadata={'meaning': meaning})
    return described
