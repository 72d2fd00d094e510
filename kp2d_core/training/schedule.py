"""How far a run is, and the learning rate that follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kp2d_core.training.config import OptimizerConfig


@dataclass(frozen=True)
class Budget:
    """Whichever ends first ends the run."""

    steps: float = math.inf
    minutes: float = math.inf

    def spent(self, step: int, seconds: float) -> float:
        """The share of the budget that is used up; 1 or more at the end."""
        return max(step / self.steps, seconds / 60 / self.minutes)


def make_budget(
    config: OptimizerConfig, photographs: int, steps: int | None, minutes: float | None
) -> Budget:
    """From the command line; else from the configuration: steps, or else epochs."""
    if steps is None and minutes is None:
        steps = config.steps or math.ceil(config.epochs * photographs / config.batch)
    return Budget(
        math.inf if steps is None else max(steps, 1e-9),
        math.inf if minutes is None else max(minutes, 1e-9),
    )


def learning_rate(config: OptimizerConfig, step: int, spent: float) -> float:
    rate = config.learning_rate
    if config.schedule == 'halve' and spent >= config.halve_at:
        rate /= 2
    if config.schedule == 'cosine':
        fall = (1 + math.cos(math.pi * min(spent, 1.0))) / 2
        rate *= config.final_share + (1 - config.final_share) * fall
    if step < config.warmup_steps:
        rate *= (step + 1) / config.warmup_steps
    return rate
