"""The architecture of a KeyPointNet. Without torch, because runtimes and exporters use it too."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kp2d_core.checks import number, setting, shown, whole

CELL = 8  # pixels, the stride of the encoder; image sides are padded to a multiple of it
LEAKY_SLOPE = 0.01  # of every LeakyReLU
BATCH_NORM_EPSILON = 1e-5

# Refinement (mean shift): a point moves to the weighted mean of the pixels around it. The weights
# are exp(saliency) times a Gaussian centred on the point. Repeated, so the start hardly matters.
REFINE_STEPS = 4
REFINE_RADIUS = 3  # px in each direction
REFINE_SPREAD = 1.6  # px, sigma of the Gaussian
LOG_SIGMA_RANGE = (-3.0, 2.0)

# Images in [0, 1] are shifted by INPUT_MEAN and *multiplied* by INPUT_SCALE, as the authors did.
INPUT_MEAN = 0.5
INPUT_SCALE = 0.225


def inner_cells(rows: int, columns: int) -> NDArray[np.bool_]:
    """Mark all cells except the outermost ring, which has no keypoints: (rows, columns)."""
    inner = np.zeros((rows, columns), bool)
    inner[1:-1, 1:-1] = True
    return inner


CHECKED_TYPES = {'bool': bool, 'str': str}

BEYOND_THE_PAPER = ('cell', 'context', 'saliency', 'stem', 'score_slope', 'score_offset')

# What int8 quantizes: weights and output, only the weights, or nothing.
Int8 = Literal['output', 'weights', 'none']


@dataclass(frozen=True)
class Layer:
    """One convolution with its batch norm and activation."""

    name: str
    inputs: tuple[int, ...]  # channels of each input map; several maps are concatenated
    outputs: int
    kernel: int = 3  # pixels wide and high; padding keeps the size of the map
    stride: int = 1  # 2 halves the map
    norm: bool = True  # followed by a batch norm; otherwise it has a bias
    active: bool = True  # followed by a LeakyReLU
    int8: Int8 = 'output'
    joins: tuple[str, ...] = ()  # names of the layers that are concatenated, if several

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        return self.outputs, sum(self.inputs), self.kernel, self.kernel

    @property
    def padding(self) -> int:
        return (self.kernel - self.stride) // 2


@dataclass(frozen=True)
class Architecture:
    """The settings that determine the weights of a KeyPointNet and their meaning."""

    variant: str = setting('v4', 'name of the network')
    width: int = setting(32, 'channels of the first block; each further block doubles them')
    descriptor_size: int = setting(256, 'numbers in a descriptor')
    cross_border: bool = setting(
        True, 'true: keypoints up to 7 px from the centre of their cell; false: 3.5 px'
    )
    upsample: bool = setting(True, 'true: descriptors at 1/4 of the resolution; false: 1/8')
    # Not in the paper, whose networks have one keypoint per 8x8 pixels and separate heads:
    cell: int = setting(CELL, 'one keypoint per 8x8 pixels; 4: smaller cells, one decoder')
    context: bool = setting(False, 'true: a fifth block at 1/16 of the resolution')
    saliency: int = setting(
        0, 'channels of the stage that refines locations at full resolution; 0: no refinement'
    )
    stem: int = setting(1, '2: the first block runs at half the resolution')
    score_slope: float = setting(
        1.0, 'with cells of 4 px: the score of a place is sigmoid(slope * logit + offset)'
    )
    score_offset: float = setting(0.0, 'both are fitted at the end of a run')

    def __post_init__(self) -> None:
        for name in ('width', 'descriptor_size'):
            whole(getattr(self, name), name, least=1, most=4096)
        for item in fields(Architecture):
            kind, value = CHECKED_TYPES.get(str(item.type)), getattr(self, item.name)
            if kind is not None and not isinstance(value, kind):
                raise ValueError(f'{item.name} must be a {kind.__name__}, got {shown(value)}')
        whole(self.saliency, 'saliency', least=0, most=256)
        number(self.score_slope, 'score_slope', above=0)
        number(self.score_offset, 'score_offset')
        if whole(self.cell, 'cell') not in (4, CELL):
            raise ValueError(f'cell must be 4 or {CELL}, got {shown(self.cell)}')
        if whole(self.stem, 'stem') not in (1, 2):
            raise ValueError(f'stem must be 1 or 2, got {shown(self.stem)}')
        if self.cell < CELL and not self.upsample:
            raise ValueError('cells of 4 px need upsample: their heads are at 1/4')

    @property
    def channels(self) -> tuple[int, int, int, int]:
        """Channels of the four encoder blocks."""
        return (self.width, 2 * self.width, 4 * self.width, 8 * self.width)

    @property
    def offset_range(self) -> float:
        """The largest offset of a keypoint from the centre of its cell, in pixels."""
        return (2.0 if self.cross_border else 1.0) * (self.cell - 1) / 2

    @property
    def descriptor_stride(self) -> int:
        """Pixels per texel of the descriptor map."""
        return CELL // 2 if self.upsample else CELL

    @property
    def pinned(self) -> bool:
        """Whether the corner texels of the descriptor map lie on the corner pixels.

        The authors' networks work so, which shifts the map by up to 1.5 px. In the others, a texel
        lies in the middle of its pixels.
        """
        return self.cell == CELL

    @property
    def score_line(self) -> tuple[float, float]:
        """Slope and offset from the logit of a place to that of its calibrated score."""
        return self.score_slope, self.score_offset

    @property
    def has_sigma(self) -> bool:
        """Whether the network estimates the precision of each keypoint."""
        return self.cell < CELL

    def layers(self) -> dict[str, Layer]:
        """Every convolution by name, in the order and with the names of the authors.

        Weights, folding, int8 and growth follow from this table. Two files connect the layers:
        networks/keypoint_net.py and export/graph.py.
        """
        c1, c2, c3, c4 = self.channels
        # With stride 2, a kernel of 4 is symmetric about the two pixels of each texel.
        first = Layer('conv1a', (3,), c1, kernel=2 + self.stem, stride=self.stem)
        encoder = (
            first, Layer('conv1b', (c1,), c1),
            Layer('conv2a', (c1,), c2), Layer('conv2b', (c2,), c2),
            Layer('conv3a', (c2,), c3), Layer('conv3b', (c3,), c3),
            Layer('conv4a', (c3,), c4), Layer('conv4b', (c4,), c4),
        )  # fmt: skip
        heads = self._paper_heads() if self.cell == CELL else self._shared_heads()
        table = (*encoder, *heads, *self._refinement())
        return {layer.name: layer for layer in table}

    def _paper_heads(self) -> tuple[Layer, ...]:
        """The heads of the paper: score (D), location (P), descriptor (F), all on the encoder."""
        _, _, c3, c4 = self.channels
        # The authors' files contain convFb even without upsampling, where it is not used.
        joined = Layer('convFaa', (c4,), c4)
        if self.upsample:
            joined = Layer('convFaa', (c4 // 2, c3), c4, joins=('convFb', 'conv3b'))
        return (
            # Scores and coordinates lose too much in int8: their last layers stay float.
            Layer('convDa', (c4,), c4, int8='weights'), _last('convDb', c4, 1, int8='none'),
            Layer('convPa', (c4,), c4, int8='weights'), _last('convPb', c4, 2, int8='none'),
            Layer('convFa', (c4,), c4), Layer('convFb', (c4,), 2 * c4, active=False),
            joined, _last('convFbb', c4, self.descriptor_size, int8='weights'),
        )  # fmt: skip

    def _shared_heads(self) -> tuple[Layer, ...]:
        """Heads on a shared decoder, which joins coarse levels to finer ones by pixel shuffle."""
        _, _, c3, c4 = self.channels
        context: tuple[Layer, ...] = ()
        first = Layer('convFa', (c4,), c4)
        if self.context:
            context = (Layer('conv5a', (c4,), c4), Layer('conv5b', (c4,), c4, active=False))
            first = Layer('convFa', (c4 // 4, c4), c4, joins=('conv5b', 'conv4b'))
        return (
            *context, first, Layer('convFb', (c4,), c4, active=False),
            Layer('convFaa', (c4 // 4, c3), c4, joins=('convFb', 'conv3b')),
            _last('convFbb', c4, self.descriptor_size, int8='weights'),
            # Score, x, y and the logarithm of sigma.
            Layer('convDa', (c4,), c4 // 4, kernel=1, int8='weights'),
            _last('convDb', c4 // 4, 4, int8='none'),
        )  # fmt: skip

    def _refinement(self) -> tuple[Layer, ...]:
        """The layers of the saliency map at full resolution, on the first two blocks."""
        c1, c2, _, _ = self.channels
        if not self.saliency:
            return ()
        return (
            # At half the resolution: 4 values per texel, one for each of its pixels.
            Layer('convSa', (c1,), self.saliency),
            _last('convSb', self.saliency, self.stem**2, 'weights'),
            _last('convSc', c2, 4, 'weights'),
        )  # fmt: skip

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The name and shape of every entry of the state dict, in the order of the layers."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, layer in self.layers().items():
            if layer.norm:
                shapes[f'{name}.0.weight'] = layer.weight_shape
                for entry in ('weight', 'bias', 'running_mean', 'running_var'):
                    shapes[f'{name}.1.{entry}'] = (layer.outputs,)
                shapes[f'{name}.1.num_batches_tracked'] = ()
            else:
                shapes[f'{name}.weight'] = layer.weight_shape
                shapes[f'{name}.bias'] = (layer.outputs,)
        return shapes

    def to_dict(self) -> dict[str, Any]:
        """Return the settings. Fields that are not in the paper are left out at their default."""
        plain = Architecture()
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in BEYOND_THE_PAPER or value != getattr(plain, name)
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Architecture:
        """The inverse of `to_dict`; raise ValueError for unknown names."""
        if not isinstance(values, dict):
            raise ValueError(f'an architecture must be settings by name, got {shown(values)}')
        unknown = set(values) - set(cls.__dataclass_fields__)
        if unknown:
            raise ValueError(f'unknown architecture settings: {", ".join(sorted(unknown))}')
        return cls(**values)


def _last(name: str, inputs: int, outputs: int, int8: Int8) -> Layer:
    """The last layer of a head: with a bias, without batch norm and activation."""
    return Layer(name, (inputs,), outputs, norm=False, active=False, int8=int8)


# V2, V3 and V4 are the same network trained with different losses (config/train/).
VARIANTS: dict[str, Architecture] = {
    'v0': Architecture('v0', cross_border=False, upsample=False),
    'v1': Architecture('v1', upsample=False),
    'v2': Architecture('v2'),
    'v3': Architecture('v3'),
    'v4': Architecture('v4'),
    'half': Architecture('half', width=16, descriptor_size=128),
    # Distinct places, located to a fraction of a pixel (docs/training.md).
    'small': Architecture(
        'small', width=16, descriptor_size=128, cell=4, context=True, saliency=8
    ),
    'fast': Architecture(
        'fast', width=8, descriptor_size=64, cell=4, context=True, saliency=8, stem=2
    ),
}
