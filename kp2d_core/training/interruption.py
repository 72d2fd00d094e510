"""SIGTERM and Ctrl-C, noted and acted on when it is safe."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class Interruption:
    """While in use, a signal is noted, not acted on; a second Ctrl-C raises KeyboardInterrupt.

    >>> with Interruption() as interruption:
    ...     while not interruption.signal:
    ...         step()
    """

    def __init__(self) -> None:
        self.signal = 0  # the one that came, or 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number
