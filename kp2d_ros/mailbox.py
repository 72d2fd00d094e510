"""One slot between two threads: the newest item wins, what it replaces is dropped."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

Item = TypeVar('Item')


class Mailbox(Generic[Item]):
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._item: Item | None = None
        self._closed = False

    def put(self, item: Item) -> bool:
        """Leave an item; True if an older one, not yet taken, had to go."""
        with self._changed:
            replaced = self._item is not None
            self._item = item
            self._changed.notify()
            return replaced

    def take(self) -> Item | None:
        """Wait for an item and take it; None once the box is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._item is not None)
            item, self._item = self._item, None
            return None if self._closed else item

    def close(self) -> bool:
        """Wake whoever waits; True if an item was left that nobody will take."""
        with self._changed:
            self._closed = True
            left = self._item is not None
            self._item = None
            self._changed.notify_all()
            return left
