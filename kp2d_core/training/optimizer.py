"""Adam, as in the paper; Muon, which needs half the steps; budget and learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kp2d_core.checks import number
from kp2d_core.training.config import OptimizerConfig

MOMENTUM = 0.95
# x -> ax + bx^3 + cx^5, applied five times, brings singular values above 0.01 to 0.7 to 1.2.
POLYNOMIAL = 3.4445, -4.7750, 2.0315
ROUNDS = 5


def make_optimizers(
    model: nn.Module, config: OptimizerConfig, kind: torch.dtype = torch.float32
) -> list[torch.optim.Optimizer]:
    """Make Adam for all trainable parameters, or Adam and Muon. `factor` scales the rate.

    `kind` is the data type of Muon's products, which must be the same in all processes.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if config.kind == 'adam':
        return [torch.optim.Adam(parameters, lr=config.learning_rate)]
    kernels = [p for p in parameters if is_kernel(p)]
    others = [p for p in parameters if not is_kernel(p)]
    factor = config.kernel_rate / config.learning_rate
    return [
        torch.optim.Adam(others, lr=config.learning_rate),
        Muon([{'params': kernels, 'factor': factor}], config.kernel_rate, kind),
    ]


def is_kernel(parameter: Tensor) -> bool:
    """Whether this is the kernel of a hidden convolution, not of the first or a last layer."""
    if parameter.ndim != 4:
        return False
    outputs, inputs = parameter.shape[:2]
    return outputs > 4 and inputs > 3


class Muon(torch.optim.Optimizer):
    """An optimizer for convolution kernels whose steps are orthogonal matrices.

    The gradient of a kernel, as a matrix of outputs by inputs, has a few large singular values and
    many small ones, and Adam follows the large ones. Muon moves equally in all directions (Jordan
    2024), by the step size that Adam would have at this rate (Liu 2025). torch.optim.Muon takes
    only matrices, and multiplies in bfloat16, which is slow on a CPU that emulates it.
    """

    def __init__(
        self, kernels: Iterable[Any], lr: float, kind: torch.dtype = torch.float32
    ) -> None:
        super().__init__(kernels, {'lr': lr})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for kernel in group['params']:
                if kernel.grad is not None:
                    self._move(kernel, group['lr'])

    def _move(self, kernel: Tensor, rate: float) -> None:
        assert kernel.grad is not None
        state = self.state[kernel]
        if not state:
            state['momentum'] = torch.zeros_like(kernel)
        state['momentum'].lerp_(kernel.grad, 1 - MOMENTUM)
        ahead = kernel.grad.lerp(state['momentum'], MOMENTUM)  # Nesterov's
        # Five iterations are only an approximation, so low precision will do.
        step = orthogonal(ahead.flatten(1).to(self.kind))
        size = rate * 0.2 * max(step.shape) ** 0.5
        kernel.sub_(step.reshape(kernel.shape).to(kernel.dtype), alpha=size)


def orthogonal(matrix: Tensor) -> Tensor:
    """Approximate the nearest orthogonal matrix by the Newton-Schulz iteration."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonal(matrix.T).T
    a, b, c = POLYNOMIAL
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(ROUNDS):
        gram = x @ x.T
        x = a * x + torch.addmm(gram, gram, gram, beta=b, alpha=c) @ x
    return x


@dataclass(frozen=True)
class Budget:
    """Limits of steps and minutes; the run stops at the first one."""

    steps: float = math.inf
    minutes: float = math.inf

    def spent(self, step: int, seconds: float) -> float:
        """Return the used share of the budget; 1 or more at the end."""
        return max(step / self.steps, seconds / 60 / self.minutes)


def make_budget(
    config: OptimizerConfig, photographs: int, steps: int | None, minutes: float | None
) -> Budget:
    """Return the budget of the command line, else that of the recipe: steps or epochs."""
    if steps is None and minutes is None:
        steps = config.steps or math.ceil(config.epochs * photographs / config.batch)
    return Budget(
        math.inf if steps is None else max(number(steps, 'steps'), 1e-9),
        math.inf if minutes is None else max(number(minutes, 'minutes'), 1e-9),
    )


def learning_rate(config: OptimizerConfig, step: int, spent: float) -> float:
    rate = config.learning_rate
    if config.reference_batch:  # square root rule for Adam (Malladi 2022)
        rate *= math.sqrt(config.batch / config.reference_batch)
    if config.schedule == 'halve' and spent >= config.halve_at:
        rate /= 2
    if config.schedule == 'cosine':
        fall = (1 + math.cos(math.pi * min(spent, 1.0))) / 2
        rate *= config.final_share + (1 - config.final_share) * fall
    if step < config.warmup_steps:
        rate *= (step + 1) / config.warmup_steps
    return rate
