"""The recipes that come with the package, by name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kp2d_core.errors import FileError


def find_recipe(name_or_path: str | Path) -> Path:
    """The file of a name such as 'small', or the path itself."""
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path
    known = shipped_recipes()
    if str(name_or_path) in known:
        return known[str(name_or_path)]
    if path.suffix or len(path.parts) > 1:
        raise FileError(f'there is no file {path}')
    raise FileError(
        f"there is no recipe '{name_or_path}': give a YAML file, or one of "
        f'{", ".join(known) or "none"}'
    )


def shipped_recipes() -> dict[str, Path]:
    """By name: those of the source tree, or where colcon or pip installed them."""
    prefixes = [*os.environ.get('AMENT_PREFIX_PATH', '').split(os.pathsep), sys.prefix]
    folders = [Path(__file__).parents[2] / 'config' / 'train']
    folders += [Path(p) / 'share' / 'kp2d_ros' / 'config' / 'train' for p in prefixes if p]
    for folder in folders:
        found = {path.stem: path for path in sorted(folder.glob('*.yaml'))}
        if found:
            return found
    return {}
