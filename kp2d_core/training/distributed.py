"""Training in one process, or in several started by `torchrun`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

TIMEOUT = timedelta(minutes=5)  # a process that is silent for longer is dead; validation is faster


@dataclass(frozen=True)
class Processes:
    rank: int
    count: int
    device: torch.device

    def agree(self, seconds: float, stop: bool) -> tuple[float, bool]:
        """Return the time of the first process, and whether any process wants to stop."""
        if self.count == 1:
            return seconds, stop
        # On the CPU, so that nothing waits for the GPU.
        message = torch.tensor(
            [seconds if self.rank == 0 else 0.0, float(stop)], dtype=torch.float64
        )
        dist.all_reduce(message)
        return message[0].item(), message[1].item() > 0

    def all(self, flag: bool) -> bool:
        """Whether the condition holds in every process."""
        if self.count == 1:
            return flag
        message = torch.tensor([float(not flag)])
        dist.all_reduce(message)
        return message.item() == 0

    @torch.no_grad()
    def share(self, module: nn.Module) -> None:
        """Give all processes the weights and buffers of the first."""
        if self.count == 1:
            return
        for tensor in (*module.parameters(), *module.buffers()):
            whole = tensor.contiguous()
            dist.broadcast(whole, 0)
            tensor.copy_(whole)

    def parallel(self, module: nn.Module) -> nn.Module:
        """Return the module to call in training: DistributedDataParallel on GPUs.

        On CPUs (gloo), `average_gradients` averages instead. In torch 2.13 the threads of gloo
        outlive the group once DistributedDataParallel has used it, and can abort the process at
        exit, even if the wrapper is deleted first.
        """
        if self.count == 1 or self.device.type != 'cuda':
            return module
        return nn.parallel.DistributedDataParallel(
            module,
            device_ids=[self.device.index],
            find_unused_parameters=True,  # V0 to V2 train no IO-Net
        )

    @torch.no_grad()
    def average_gradients(self, module: nn.Module) -> None:
        """On CPUs, make each gradient the mean over all processes, in one message."""
        if self.count == 1 or self.device.type == 'cuda':
            return
        gradients = []
        for parameter in module.parameters():
            if parameter.grad is None:  # no loss reaches it
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        message = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(message)
        message /= self.count
        parts = message.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def lost(self, error: RuntimeError) -> bool:
        """Whether the error means that another process no longer answers."""
        gloo = any(word in str(error) for word in ('closed by peer', 'reset by peer', 'Timed out'))
        return self.count > 1 and (gloo or isinstance(error, dist.DistError))


@contextmanager
def join_processes(device: str) -> Iterator[Processes]:
    """Join the processes of torchrun; without its environment there is only one."""
    count = int(os.environ.get('WORLD_SIZE', '1'))
    rank = int(os.environ.get('RANK', '0'))
    where = choose_device(device, int(os.environ.get('LOCAL_RANK', '0')))
    if count == 1:
        yield Processes(0, 1, where)
        return
    backend = 'cpu:gloo,cuda:nccl' if where.type == 'cuda' else 'gloo'
    dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        yield Processes(rank, count, where)
    finally:
        dist.destroy_process_group()


def choose_device(name: str, local_rank: int) -> torch.device:
    if name == 'auto':
        name = 'cuda' if torch.cuda.is_available() else 'cpu'
    try:
        device = torch.device(name)
        if device.type not in ('cpu', 'cuda'):
            raise RuntimeError
    except RuntimeError:
        raise ValueError(f"there is no device '{name}': auto, cpu, or cuda") from None
    if device.type == 'cuda':
        if not torch.cuda.is_available():
            raise ValueError('this machine has no usable CUDA device: set compute.device=cpu')
        device = torch.device('cuda', local_rank if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device
