"""What a training run is made of: dataclasses, read from YAML, changed by `--set a.b=c`.

The defaults are the paper's. What each value means stands in config/train/*.yaml, which give all.
"""

from __future__ import annotations

import os
import sys
import types
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kp2d_core.architecture import CELL, Architecture
from kp2d_core.checks import MOST, number, parse_yaml, shown, whole
from kp2d_core.errors import FileError
from kp2d_core.files import read_text
from kp2d_core.views.homography import HomographyConfig
from kp2d_core.views.pairs import MILD, Framing
from kp2d_core.views.photometric import PhotometricConfig

Range = tuple[float, float]
LARGEST = 1e9  # of any number in a recipe
Schedule = tuple[tuple[int, float], ...]  # [step, value] points, straight lines between


@dataclass(frozen=True)
class NetworkConfig:
    variant: str = 'v4'
    width: int = 32
    descriptor_size: int = 256
    cross_border: bool = True
    upsample: bool = True
    cell: int = CELL
    context: bool = False
    saliency: int = 0
    stem: int = 1
    dropout: float = 0.2

    def architecture(self) -> Architecture:
        values = asdict(self)
        del values['dropout']
        return Architecture.from_dict(values)


@dataclass(frozen=True)
class PairsConfig:
    width: int = 320
    height: int = 240
    framing: Literal['whole', 'crop'] = 'whole'
    short_side: Range = (240.0, 240.0)
    flip: float = 0.0
    swap: float = 0.0
    strong: HomographyConfig = field(default_factory=HomographyConfig)
    mild: HomographyConfig = MILD
    mild_share: Schedule = ((0, 0.0),)
    strength: Schedule = ((0, 1.0),)

    def __post_init__(self) -> None:
        if self.width % CELL or self.height % CELL or min(self.width, self.height) < 4 * CELL:
            raise ValueError(
                f'pairs.width and pairs.height must be multiples of {CELL} and at least '
                f'{4 * CELL}, got {self.width}x{self.height}'
            )
        for name in ('mild_share', 'strength'):
            steps = [step for step, _ in getattr(self, name)]
            if not steps or steps != sorted(set(steps)):
                raise ValueError(f'pairs.{name} needs [step, share] points, the steps rising')

    def view_framing(self) -> Framing:
        whole = self.framing == 'whole'
        return Framing((self.width, self.height), whole, self.short_side, self.flip, self.swap)


@dataclass(frozen=True)
class LossConfig:
    kind: Literal['paper', 'places'] = 'paper'
    location: float = 1.0
    location_score_power: float = 0.0
    descriptor: Literal['triplet', 'infonce', 'none'] = 'triplet'
    descriptor_weight: float = 2.0
    infonce_steps: int = 0
    score: float = 1.0
    score_of: Literal['map', 'partner'] = 'map'
    reliability: float = 0.0
    io: float = 1.0
    match_distance: float = 4.0
    margin: float = 0.2
    relaxation: float = 8.0
    temperature: float = 0.07
    io_points: int = 300
    # Of kind places:
    coarse: float = 0.5
    found_distance: float = 1.5
    own_margin: float = 1.0
    agreement: float = 1.0
    sigma: float = 0.1
    teacher: str = ''
    teaching: float = 1.0

    def __post_init__(self) -> None:
        if self.teacher and self.kind != 'places':
            raise ValueError('loss.teacher needs loss.kind places')
        if not self.temperature > 0:
            raise ValueError(f'loss.temperature must be above 0, got {self.temperature}')
        if self.io_points < 2:
            raise ValueError(f'loss.io_points must be 2 or more, got {self.io_points}')


@dataclass(frozen=True)
class OptimizerConfig:
    kind: Literal['adam', 'muon'] = 'adam'
    batch: int = 8
    learning_rate: float = 1e-3
    kernel_rate: float = 8e-3
    schedule: Literal['constant', 'halve', 'cosine'] = 'halve'
    halve_at: float = 0.8
    final_share: float = 0.01
    warmup_steps: int = 0
    gradient_clip: float = 0.0
    epochs: float = 50.0
    steps: int = 0
    ema: float = 0.0

    def __post_init__(self) -> None:
        for name in ('batch', 'learning_rate', 'kernel_rate'):
            if not getattr(self, name) > 0:
                raise ValueError(f'optimizer.{name} must be above 0, got {getattr(self, name)}')


@dataclass(frozen=True)
class ComputeConfig:
    device: str = 'auto'
    threads: int = 0
    workers: int = 1
    cache_gb: float = 2.0
    channels_last: bool = True
    precision: Literal['auto', 'float32', 'bfloat16', 'float16'] = 'float32'
    compile: bool = False

    def __post_init__(self) -> None:
        for name in ('threads', 'workers'):
            if getattr(self, name) < 0:
                raise ValueError(f'compute.{name} must be 0 or more, got {getattr(self, name)}')


@dataclass(frozen=True)
class ReportConfig:
    log_every: int = 20
    validate_every: int = 500
    validation_photographs: int = 64
    pictures: int = 2
    checkpoint_minutes: float = 5.0

    def __post_init__(self) -> None:
        leasts = {'log_every': 1, 'validate_every': 1, 'validation_photographs': 0}
        for name, least in leasts.items():
            if getattr(self, name) < least:
                raise ValueError(
                    f'report.{name} must be {least} or more, got {getattr(self, name)}'
                )


@dataclass(frozen=True)
class TrainingConfig:
    network: NetworkConfig = field(default_factory=NetworkConfig)
    pairs: PairsConfig = field(default_factory=PairsConfig)
    photometric: PhotometricConfig = field(default_factory=PhotometricConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    seed: int = 42

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f'seed must be 0 or more, got {self.seed}')

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def load_config(path: str | Path) -> TrainingConfig:
    """Read a YAML file; a value that it does not give is the paper's."""
    try:
        return config_from_dict(parse_yaml(read_text(path)) or {})
    except ValueError as error:
        raise FileError(f'{path} cannot be used: {error}') from error


def config_from_dict(values: Any) -> TrainingConfig:
    config: TrainingConfig = _build(TrainingConfig, values, '')
    return config


def override(config: TrainingConfig, assignments: list[str]) -> TrainingConfig:
    """Apply assignments such as 'loss.descriptor=infonce', in order."""
    for assignment in assignments:
        name, equals, text = assignment.partition('=')
        if not equals:
            raise ValueError(f"'{assignment}' is not like loss.descriptor=infonce")
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
    return replace(config, **{first: _build(hints[first], value, path)})


def _build(wanted: Any, value: Any, path: str) -> Any:
    """`value` as the wanted type, or a ValueError that names the setting."""
    if is_dataclass(wanted):
        if not isinstance(value, dict):
            raise ValueError(f'{path or "the configuration"} must be a group of settings')
        hints = get_type_hints(wanted)
        prefix = f'{path}.' if path else ''
        for name in value:
            if name not in hints:
                raise ValueError(_unknown(f'{prefix}{name}', list(hints)))
        built = {name: _build(hints[name], v, f'{prefix}{name}') for name, v in value.items()}
        return wanted(**built)  # type: ignore[operator]
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
        value = _number(value)  # YAML 1.1 reads 1e-3 as text
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
