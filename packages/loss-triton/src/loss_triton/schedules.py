"""Launch-time choices: how wide a block is, how many warps share it, how many programs run. Data, with its reason."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Schedule(NamedTuple):
    """How a kernel is launched.

    Attributes:
        block: elements of a row that a program holds at a time, a power of two.
        warps: warps per program.
        stages: depth of the software pipeline of the sweeps; 1 for none.
        per_processor: programs per multiprocessor of a kernel whose programs take several rows; 0 for one per row.
    """

    block: int
    warps: int
    stages: int = 1
    per_processor: int = 0


def _power_of_two(classes: int) -> int:
    return max(16, 1 << (classes - 1).bit_length())


def forward_schedule(classes: int, element_size: int) -> Schedule:
    """For a kernel that reads a row once. Small blocks and few warps: many programs hide each other's latency."""
    block = min(4096, _power_of_two(classes))
    return Schedule(block, 4 if block > 1024 else 1)


def gradient_schedule(classes: int, element_size: int) -> Schedule:
    """For a kernel that reads a row and writes its gradient."""
    block = _power_of_two(classes)
    if block <= 1024:
        return Schedule(block, 1)
    if block <= 16384:
        return Schedule(block, max(4, block // 2048))
    return Schedule(16384, 8)


def backward_schedule(classes: int, element_size: int) -> Schedule:
    """For kernels that take no sum over the row. Few programs, since most calls leave at once."""
    block = min(4096, _power_of_two(classes))
    return Schedule(block, 4 if block > 1024 else 1, per_processor=8)


def programs(rows: int, device: torch.device, schedule: Schedule) -> int:
    """How many programs take `rows` rows."""
    return min(rows, schedule.per_processor * _processors(device)) if schedule.per_processor else rows


@lru_cache
def _processors(device: torch.device) -> int:
    # The interpreter runs the programs of a CPU tensor one after the other.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def alignment(logits: Tensor, grad: Tensor | None) -> tuple[int, bool]:
    """Elements in 16 bytes, and whether the rows of both tensors have edges (see ``rows``) at the same columns."""
    vector = 16 // logits.element_size()
    classes, stride = logits.shape[1], logits.stride(0)
    grad_stride = stride if grad is None else grad.stride(0)
    # The compiler takes a stride for aligned if 16 divides it, whatever the dtype.
    if classes % 16 == 0 and stride % 16 == 0 and grad_stride % 16 == 0:
        return vector, False
    aligned = logits.data_ptr() % 16 == 0 and (grad is None or grad.data_ptr() % 16 == 0)
    return vector, aligned and (stride - grad_stride) % vector == 0 and classes >= 2 * vector
