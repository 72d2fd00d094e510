"""From paths on the command line to photographs: folders, files and bags, in any mixture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kp2d_core.bags import is_bag
from kp2d_core.errors import FileError
from kp2d_core.training.bag_frames import read_frames
from kp2d_core.training.photographs import Entry, find_photographs


def find_entries(
    paths: Sequence[Path], *, topic: str | None = None, seconds: float = 0.5
) -> list[Entry]:
    """Image files of folders, and frames of bags that are at least `seconds` apart."""
    bags = [path for path in paths if is_bag(path)]
    if topic is not None and not bags:
        raise ValueError(f'--topic {topic} is for bags, and --data has none')
    entries: list[Entry] = []
    for path in paths:
        if path in bags:
            entries += read_frames(path, topic, seconds)
        else:
            entries += find_photographs([path])
    if not entries:
        raise FileError('there is no image in the data')
    return entries
