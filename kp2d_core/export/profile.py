"""What a graph is made for: sizes are fixed in it, so that every runtime is at its best."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kp2d_core.architecture import CELL
from kp2d_core.images import MINIMUM_SIDE

PRECISIONS = ('fp32', 'fp16', 'int8')
TENSORRT_TOP_K = 3840  # more than this, TensorRT's TopK layer cannot keep


@dataclass(frozen=True)
class Profile:
    """The shapes and the precision of one graph."""

    height: int
    width: int
    top_k: int  # keypoints that it gives
    batch: int | None = 1  # None: any, decided at each call
    mono: bool = False  # one gray channel in, else RGB
    precision: str = 'fp32'

    def __post_init__(self) -> None:
        check_precision(self.precision)
        for name in ('width', 'height'):
            value = getattr(self, name)
            if value % CELL or value < MINIMUM_SIDE:
                raise ValueError(
                    f'{name} must be a multiple of {CELL} and at least {MINIMUM_SIDE}, got {value}'
                )
        if not 1 <= self.top_k <= self.cells:
            raise ValueError(
                f'top_k must be from 1 to {self.cells}, the cells of a {self.width}x{self.height} '
                f'image, got {self.top_k}'
            )
        if self.batch is not None and self.batch < 1:
            raise ValueError(f'batch must be 1 or more, got {self.batch}')

    @property
    def cells(self) -> int:
        return (self.height // CELL) * (self.width // CELL)

    @property
    def channels(self) -> int:
        return 1 if self.mono else 3

    def __str__(self) -> str:
        colour = 'mono' if self.mono else 'rgb'
        batch = 'any batch' if self.batch is None else f'batch {self.batch}'
        return (
            f'{self.width}x{self.height} {colour}, {self.top_k} keypoints, {batch}, '
            f'{self.precision}'
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_precision(precision: str) -> str:
    if precision not in PRECISIONS:
        known = ', '.join(PRECISIONS)
        raise ValueError(f"there is no precision '{precision}': it is one of {known}")
    return precision
