"""What a KeyPointNet is, in a few numbers. No torch here: runtimes and exporters need this too."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

CELL = 8  # one keypoint per CELL x CELL pixels
LEAKY_SLOPE = 0.01  # of every LeakyReLU
BATCH_NORM_EPSILON = 1e-5

# Images in [0, 1] are shifted by INPUT_MEAN and *multiplied* by INPUT_SCALE, as the authors did.
INPUT_MEAN = 0.5
INPUT_SCALE = 0.225


def inner_cells(rows: int, columns: int) -> NDArray[np.bool_]:
    """(rows, columns): all but the outermost ring of cells, which has no keypoints."""
    inner = np.zeros((rows, columns), bool)
    inner[1:-1, 1:-1] = True
    return inner


@dataclass(frozen=True)
class Architecture:
    """The choices that fix a KeyPointNet's weights and what they mean."""

    variant: str = 'v4'  # its name in tables and file metadata
    width: int = 32  # channels of the first block; the next ones double it
    descriptor_size: int = 256  # length of a descriptor
    cross_border: bool = True  # keypoints may leave their cell: offsets of +-7 px, else +-3.5
    upsample: bool = True  # descriptors at 1/4 of the resolution, else 1/8

    def __post_init__(self) -> None:
        for name in ('width', 'descriptor_size'):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 4096:
                raise ValueError(f'{name} must be an integer from 1 to 4096, got {value!r}')

    @property
    def channels(self) -> tuple[int, int, int, int]:
        """Channels of the four encoder blocks."""
        return (self.width, 2 * self.width, 4 * self.width, 8 * self.width)

    @property
    def offset_range(self) -> float:
        """How far from its cell's centre a keypoint can lie, in pixels."""
        return (2.0 if self.cross_border else 1.0) * (CELL - 1) / 2

    @property
    def descriptor_stride(self) -> int:
        """Pixels per texel of the descriptor map."""
        return CELL // 2 if self.upsample else CELL

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every entry of the state dict, in the authors' names and order."""
        c1, c2, c3, c4 = self.channels
        # As in the authors' files, convFb is there without upsampling too, though unused then.
        convolutions = {
            'conv1a': (3, c1), 'conv1b': (c1, c1),
            'conv2a': (c1, c2), 'conv2b': (c2, c2),
            'conv3a': (c2, c3), 'conv3b': (c3, c3),
            'conv4a': (c3, c4), 'conv4b': (c4, c4),
            'convDa': (c4, c4), 'convDb': (c4, 1),
            'convPa': (c4, c4), 'convPb': (c4, 2),
            'convFa': (c4, c4), 'convFb': (c4, 2 * c4), 'convFaa': (c4, c4),
            'convFbb': (c4, self.descriptor_size),
        }  # fmt: skip
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (inputs, outputs) in convolutions.items():
            if name in PLAIN_CONVOLUTIONS:
                shapes[f'{name}.weight'] = (outputs, inputs, 3, 3)
                shapes[f'{name}.bias'] = (outputs,)
            else:
                shapes[f'{name}.0.weight'] = (outputs, inputs, 3, 3)
                for entry in ('weight', 'bias', 'running_mean', 'running_var'):
                    shapes[f'{name}.1.{entry}'] = (outputs,)
                shapes[f'{name}.1.num_batches_tracked'] = ()
        return shapes

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Architecture:
        """The inverse of `to_dict`; unknown names are an error, so that none is ignored."""
        unknown = set(values) - set(cls.__dataclass_fields__)
        if unknown:
            raise ValueError(f'unknown architecture settings: {", ".join(sorted(unknown))}')
        return cls(**values)


# The last layer of each head: a bias, no batch norm. All others are convolution + batch norm.
PLAIN_CONVOLUTIONS = frozenset({'convDb', 'convPb', 'convFbb'})

# V2, V3 and V4 are one network trained with different losses (config/train/).
VARIANTS: dict[str, Architecture] = {
    'v0': Architecture('v0', cross_border=False, upsample=False),
    'v1': Architecture('v1', upsample=False),
    'v2': Architecture('v2'),
    'v3': Architecture('v3'),
    'v4': Architecture('v4'),
    'small': Architecture('small', width=16, descriptor_size=128),
}
