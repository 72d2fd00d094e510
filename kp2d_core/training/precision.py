"""In which numbers the network computes: bfloat16 where the hardware multiplies it faster."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache
def computing_type(precision: str, device: torch.device) -> torch.dtype:
    """Of `compute.precision`; auto is bfloat16 where the device has instructions for it."""
    if precision != 'auto':
        return getattr(torch, precision)
    return torch.bfloat16 if multiplies_bfloat16(device) else torch.float32


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 is faster there than float32, not merely emulated."""
    if device.type == 'cuda':
        return torch.cuda.get_device_capability(device) >= (8, 0)
    # Only x86 says what it has; torch before 2.10 says nothing.
    capabilities: dict[str, object] = getattr(torch.cpu, 'get_capabilities', dict)()
    return any(capabilities.get(name) for name in ('avx512_bf16', 'amx_bf16'))
