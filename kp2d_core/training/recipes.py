"""Recipes: YAML files with the differences from the paper or from another recipe, the `base`.

`--set a.b=c` changes single values; `format_config` writes all of them with their meaning.
"""

from __future__ import annotations

import json
import os
import sys
import types
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kp2d_core.checks import MOST, number, parse_yaml, shown, whole
from kp2d_core.errors import FileError
from kp2d_core.files import read_text
from kp2d_core.training.config import TrainingConfig

LARGEST = 1e9  # limit of any number in a recipe
MOST_BASES = 10  # limit of the chain of bases


def load_config(path: str | Path) -> TrainingConfig:
    """Read a recipe; values that neither it nor its base gives are those of the paper."""
    try:
        return config_from_dict(_read(Path(path), MOST_BASES))
    except ValueError as error:
        raise FileError(f'{path} cannot be used: {error}') from error


def _read(path: Path, bases: int) -> Any:
    """Read the values of a file and its base: the name of a recipe, or a file next to it."""
    values = _modernised(parse_yaml(read_text(path)) or {})
    if not isinstance(values, dict) or 'base' not in values:
        return values
    base = values.pop('base')
    if not isinstance(base, str):
        raise ValueError(f'base must be the name of a recipe or a file, got {shown(base)}')
    if not bases:
        raise ValueError(f'more than {MOST_BASES} recipes are based on each other')
    beside = path.parent / base
    return _merged(_read(beside if beside.is_file() else find_recipe(base), bases - 1), values)


def _merged(base: Any, values: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(values, dict)):
        return values
    return base | {name: _merged(base.get(name), value) for name, value in values.items()}


def _modernised(values: Any) -> Any:
    """Convert older recipes and states, whose noise was one number, the upper end of a range.

    Their perspective was relative to the crop.
    """
    try:
        most = number(values['photometric']['noise'], 'noise')
        photometric = values['photometric'] | {'noise': [0.0, most]}
        pairs = dict(values.get('pairs', {}))
        for kind in pairs.keys() & {'strong', 'mild'}:
            crop, perspective = (pairs[kind].get(name) for name in ('crop', 'perspective'))
            if crop is not None and perspective is not None:
                share = number(crop, 'crop') * number(perspective, 'perspective')
                pairs[kind] = pairs[kind] | {'perspective': share}
    except (AttributeError, LookupError, TypeError, ValueError):
        return values  # current, or wrong, which `_build` reports
    return values | {'photometric': photometric, 'pairs': pairs}


def config_from_dict(values: Any) -> TrainingConfig:
    config: TrainingConfig = _build(TrainingConfig, _modernised(values), '', TrainingConfig())
    return config


def format_config(config: TrainingConfig) -> str:
    """Format all settings as a recipe: each value, its meaning, and the paper's if it differs.

    The result is YAML that `load_config` reads.
    """
    return '\n'.join(_lines(config, TrainingConfig(), '')) + '\n'


def _lines(config: Any, paper: Any, indent: str) -> list[str]:
    lines: list[str] = []
    for item in fields(config):
        value, usual = getattr(config, item.name), getattr(paper, item.name)
        notes = [item.metadata['meaning']] if item.metadata['meaning'] else []
        if is_dataclass(value):
            comment = f'  # {notes[0]}' if notes else ''
            if not indent and lines:
                lines.append('')
            lines += [f'{indent}{item.name}:{comment}', *_lines(value, usual, f'{indent}  ')]
            continue
        if value != usual:
            notes.append(f'[paper: {json.dumps(usual)}]')
        comment = f'  # {" ".join(notes)}' if notes else ''
        if not indent:
            lines.append('')
        lines.append(f'{indent}{item.name}: {json.dumps(value)}{comment}')
    return lines


def override(config: TrainingConfig, assignments: list[str]) -> TrainingConfig:
    """Apply assignments such as 'loss.descriptor=infonce', in order."""
    for assignment in assignments:
        name, equals, text = assignment.partition('=')
        if not equals:
            raise ValueError(f"'{assignment}' is not NAME=VALUE, such as loss.descriptor=infonce")
        try:
            value = parse_yaml(text)
        except ValueError as error:
            raise ValueError(f'{shown(text)} is not a value for {name}: {error}') from None
        config = _assign(config, name.strip().split('.'), value, '')
    return config


def _assign(config: Any, names: list[str], value: Any, prefix: str) -> Any:
    first, rest = names[0], names[1:]
    hints = get_type_hints(type(config))
    path = f'{prefix}{first}'
    if first not in hints:
        raise ValueError(_unknown(path, list(hints)))
    if rest:
        part = getattr(config, first)
        if not is_dataclass(part):
            raise ValueError(f'{path} is a value, it has no {".".join(rest)}')
        return replace(config, **{first: _assign(part, rest, value, f'{path}.')})
    return replace(config, **{first: _build(hints[first], value, path, getattr(config, first))})


def _build(wanted: Any, value: Any, path: str, given: Any = None) -> Any:
    """Convert `value` to the wanted type; raise a ValueError that names the setting.

    For a group, `given` holds the settings that the value does not name.
    """
    if is_dataclass(wanted):
        if not isinstance(value, dict):
            raise ValueError(f'{path or "the configuration"} must be a group of settings')
        hints = get_type_hints(wanted)
        prefix = f'{path}.' if path else ''
        for name in value:
            if name not in hints:
                raise ValueError(_unknown(f'{prefix}{name}', list(hints)))
        return replace(
            given,
            **{
                name: _build(hints[name], part, f'{prefix}{name}', getattr(given, name))
                for name, part in value.items()
            },
        )
    origin = get_origin(wanted)
    if origin is Literal:
        if value not in get_args(wanted):
            choices = ', '.join(map(str, get_args(wanted)))
            raise ValueError(f'{path} must be one of {choices}, got {shown(value)}')
        return value
    if origin is tuple:
        return _build_tuple(get_args(wanted), value, path)
    if origin in (Union, types.UnionType):
        return None if value is None else _build(get_args(wanted)[0], value, path)
    if wanted is float and isinstance(value, str):
        value = _number(value)  # YAML 1.1 reads 1e-3 as a string
    if wanted is float:
        return number(value, path, least=-LARGEST, most=LARGEST)
    if wanted is int:
        return whole(value, path, least=-MOST)
    if not isinstance(value, wanted) or (wanted is not bool and isinstance(value, bool)):
        raise ValueError(f'{path} must be {_NAMES[wanted]}, got {shown(value)}')
    return value


def _build_tuple(kinds: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f'{path} must be a list, got {shown(value)}')
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(_build(kinds[0], item, f'{path}[{i}]') for i, item in enumerate(value))
    if len(value) != len(kinds):
        raise ValueError(f'{path} must have {len(kinds)} values, got {shown(value)}')
    return tuple(
        _build(kind, item, f'{path}[{i}]')
        for i, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )


_NAMES = {bool: 'true or false', str: 'text'}


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _unknown(path: str, known: list[str]) -> str:
    return f"there is no setting '{path}', only {', '.join(known)}"


def find_recipe(name_or_path: str | Path) -> Path:
    """Return the file of a recipe such as 'small', or the path itself."""
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
    """Find the recipes by name, in the source tree or where colcon or pip installed them."""
    prefixes = [*os.environ.get('AMENT_PREFIX_PATH', '').split(os.pathsep), sys.prefix]
    folders = [Path(__file__).parents[2] / 'config' / 'train']
    folders += [Path(p) / 'share' / 'kp2d_ros' / 'config' / 'train' for p in prefixes if p]
    for folder in folders:
        found = {path.stem: path for path in sorted(folder.glob('*.yaml'))}
        if found:
            return found
    return {}
