"""The settings of a training run: type, meaning, and the paper's value as the default.

Recipes (config/train/*.yaml) give only the changes; `kp2d train --print-config` prints all values.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from kp2d_core.architecture import CELL, Architecture
from kp2d_core.checks import setting
from kp2d_core.views.homography import HomographyConfig
from kp2d_core.views.pairs import MILD, Framing
from kp2d_core.views.photometric import PhotometricConfig

Range = tuple[float, float]
Schedule = tuple[tuple[int, float], ...]  # [step, value] points, interpolated linearly


@dataclass(frozen=True)
class NetworkConfig(Architecture):
    """The network, and settings that matter only in training."""

    dropout: float = setting(0.2, 'share of dropped channels')
    dropout_from: int = setting(0, 'first step with dropout')

    def architecture(self) -> Architecture:
        return Architecture(**{f.name: getattr(self, f.name) for f in fields(Architecture)})


@dataclass(frozen=True)
class PairsConfig:
    width: int = setting(320, 'size of the views in pixels')
    height: int = setting(240, '')
    framing: Literal['whole', 'crop'] = setting(
        'whole', 'whole: resize the photograph to the view; crop: cut views out at random scales'
    )
    short_side: Range = setting(
        (240.0, 240.0), 'for crop: shorter side of the photograph in the finer view, in pixels'
    )
    flip: float = setting(0.0, 'share of mirrored photographs')
    swap: float = setting(0.0, 'share of pairs with source and target exchanged')
    strong: HomographyConfig = setting(HomographyConfig(), 'homographies from source to target')
    mild: HomographyConfig = setting(MILD, 'small homographies, mixed in')
    mild_share: Schedule = setting(((0, 0.0),), 'share of mild pairs as [step, share] points')
    front_share: float = setting(
        0.0, 'share of pairs with objects of another photograph in front, which move differently'
    )
    strength: Schedule = setting(
        ((0, 1.0),), 'share of the rotation and stretch of strong, as [step, share] points'
    )

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
    location: float = setting(1.0, "weight, the paper's alpha")
    location_score_power: float = setting(
        0.0, 'weight points by their (detached) score to this power; 0: equal weights'
    )
    descriptor: Literal['triplet', 'infonce', 'none'] = setting(
        'triplet', 'triplet: hardest negative, the paper; infonce: softmax cross-entropy; none'
    )
    descriptor_weight: float = setting(2.0, "weight, the paper's beta")
    infonce_steps: int = setting(0, 'use infonce for this many steps before the triplet loss')
    score: float = setting(1.0, "weight, the paper's lambda")
    score_of: Literal['pair', 'map', 'partner'] = setting(
        'pair',
        'compare a score with: pair: that of the paired point (equation 4); map: the score map '
        "there (the authors' code); partner: as pair, and points without a pair lose score",
    )
    reliability: float = setting(0.0, 'weight: points with distinctive descriptors gain score')
    io: float = setting(1.0, 'weight of the loss of IO-Net; 0: off')
    match_distance: float = setting(
        4.0, "two points within this many pixels are a pair: the paper's epsilon"
    )
    margin: float = setting(0.2, 'margin of the triplet loss')
    relaxation: float = setting(8.0, 'no negatives within this many pixels of a point')
    temperature: float = setting(0.07, 'temperature of InfoNCE')
    io_points: int = setting(300, 'points per view that IO-Net sees, those with the lowest scores')
    sigma: float = setting(
        0.1, 'weight, with cells of 4 px: sigma predicts the error of the location'
    )
    teacher: str = setting('', 'model whose descriptors teach these, such as small')
    teaching: float = setting(
        1.0, 'weight: similarities of descriptors follow those of the teacher'
    )

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f'loss.temperature must be above 0, got {self.temperature}')
        if self.io_points < 2:
            raise ValueError(f'loss.io_points must be 2 or more, got {self.io_points}')


@dataclass(frozen=True)
class OptimizerConfig:
    kind: Literal['adam', 'muon'] = setting(
        'adam', 'adam, the paper; muon: orthogonal steps for convolution kernels'
    )
    batch: int = setting(8, 'pairs per step, over all processes')
    learning_rate: float = setting(1e-3, 'learning rate of Adam')
    reference_batch: int = setting(
        0, 'batch that the rate is for; it scales with the square root of batch; 0: no scaling'
    )
    kernel_rate: float = setting(8e-3, 'for muon: learning rate of the convolution kernels')
    schedule: Literal['constant', 'halve', 'cosine'] = setting(
        'halve', 'halve: once, at halve_at; cosine: down to final_share; constant'
    )
    halve_at: float = setting(0.8, 'share of the run before the rate is halved: epoch 40 of 50')
    final_share: float = setting(0.01, 'share of the learning rate at the end of a cosine')
    warmup_steps: int = setting(0, 'the learning rate rises during these steps')
    gradient_clip: float = setting(0.0, 'clip the gradient to this norm; 0: off')
    epochs: float = setting(50.0, 'used without steps, --steps and --minutes')
    steps: int = setting(0, 'used without --steps and --minutes; 0: epochs')
    ema: float = setting(
        0.0, 'decay of the moving average of the weights, which is validated and saved; 0: off'
    )

    def __post_init__(self) -> None:
        for name in ('batch', 'learning_rate', 'kernel_rate'):
            if not getattr(self, name) > 0:
                raise ValueError(f'optimizer.{name} must be above 0, got {getattr(self, name)}')
        if self.reference_batch < 0:
            raise ValueError(
                f'optimizer.reference_batch must be 0 or more, got {self.reference_batch}'
            )


@dataclass(frozen=True)
class ComputeConfig:
    device: str = setting('auto', 'auto: cuda if available; or cpu, cuda, cuda:1')
    threads: int = setting(0, 'CPU threads; 0: all cores')
    workers: int = setting(2, 'threads that make pairs')
    cache_gb: float = setting(2.0, 'cache of decoded photographs')
    channels_last: bool = setting(True, 'memory order of images and weights')
    precision: Literal['auto', 'float32', 'bfloat16', 'float16'] = setting(
        'float32', 'auto: bfloat16 if the processor or GPU supports it, else float32'
    )
    compile: bool = setting(False, 'torch.compile: takes minutes at the start')

    def __post_init__(self) -> None:
        for name in ('threads', 'workers'):
            if getattr(self, name) < 0:
                raise ValueError(f'compute.{name} must be 0 or more, got {getattr(self, name)}')


@dataclass(frozen=True)
class ReportConfig:
    log_every: int = setting(20, 'steps')
    validate_every: int = setting(2000, 'steps')
    validation_photographs: int = setting(64, 'photographs held out for validation without --val')
    pictures: int = setting(2, 'pairs drawn for TensorBoard at each validation')
    checkpoint_minutes: float = setting(5.0, 'minutes from one saved state to the next')

    def __post_init__(self) -> None:
        leasts = {'log_every': 1, 'validate_every': 1, 'validation_photographs': 0}
        for name, least in leasts.items():
            if getattr(self, name) < least:
                raise ValueError(
                    f'report.{name} must be {least} or more, got {getattr(self, name)}'
                )


@dataclass(frozen=True)
class TrainingConfig:
    network: NetworkConfig = setting(NetworkConfig(), '')
    pairs: PairsConfig = setting(PairsConfig(), '')
    photometric: PhotometricConfig = setting(
        PhotometricConfig(), 'drawn separately for each view, except shuffle and gray'
    )
    loss: LossConfig = setting(LossConfig(), '')
    optimizer: OptimizerConfig = setting(OptimizerConfig(), '')
    compute: ComputeConfig = setting(ComputeConfig(), '')
    report: ReportConfig = setting(ReportConfig(), '')
    seed: int = setting(42, 'of weights, pairs and their order')

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f'seed must be 0 or more, got {self.seed}')

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
