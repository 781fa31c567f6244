"""What the sum of the losses is divided by. One program, so that the order of the sum is fixed."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from loss_core.backend import CrossEntropyOptions
from torch import Tensor

from loss_triton.launch import kernel

# What the denominator is; a constant of the kernel.
ONE, ROWS, WEIGHTS, BYTES, NUMBER, TENSOR = map(tl.constexpr, range(6))


@kernel
def cross_entropy_denominator_kernel(
    target_ptr, of_row_ptr, number, denominator_ptr, finished_ptr, rows, classes, ignore_index,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What has to be known before the rows are: denominator_ptr (1,) float32; and finished_ptr (1,) int32 is set to 0.

    One program. target_ptr: (rows,). of_row_ptr: for WEIGHTS the (classes,) float32 weights; for BYTES the (rows,)
    integer byte lengths; for TENSOR the (1,) denominator; else None. number: for NUMBER the denominator.
    """
    denominator = 1.0
    if KIND == NUMBER:
        denominator = number
    elif KIND == TENSOR:
        denominator = tl.load(of_row_ptr).to(tl.float32)
    elif KIND != ONE:
        offsets = tl.arange(0, BLOCK)
        # Counts are exact in integers; in float32 they would end at 2**24.
        counted = tl.zeros((BLOCK,), tl.float32 if KIND == WEIGHTS else tl.int64)
        for start in range(0, rows, BLOCK):
            inside = start + offsets < rows
            target = tl.load(target_ptr + start + offsets, mask=inside, other=0).to(tl.int64)
            live = inside & (target != ignore_index)
            if KIND == ROWS:
                counted += live.to(tl.int64)
            elif KIND == WEIGHTS:
                live = live & (target >= 0) & (target < classes)
                counted += tl.load(of_row_ptr + target, mask=live, other=0.0)
            else:
                counted += tl.load(of_row_ptr + start + offsets, mask=live, other=0).to(tl.int64)
        denominator = tl.sum(counted, 0).to(tl.float32)
    tl.store(denominator_ptr, denominator)
    tl.store(finished_ptr, 0)


def launch_denominator(
    target: Tensor,
    weight: Tensor | None,
    byte_lengths: Tensor | None,
    num_items: Tensor | float | None,
    options: CrossEntropyOptions,
    classes: int,
) -> tuple[Tensor, Tensor]:
    """The (1,) float32 denominator of a scalar reduction, and the (1,) int32 counter of finished programs, at 0."""
    device = target.device
    denominator = torch.empty(1, dtype=torch.float32, device=device)
    finished = torch.empty(1, dtype=torch.int32, device=device)
    kind, of_row, number = _kind(weight, byte_lengths, num_items, options)
    rows = target.shape[0]
    cross_entropy_denominator_kernel(
        1,
        (device.index, target.dtype, None if of_row is None else of_row.dtype),
        (target, of_row, number, denominator, finished, rows, classes, options.ignore_index),
        (kind, 1024 if rows <= 1024 else 8192),
        threads=128 if rows <= 1024 else 1024,
    )
    return denominator, finished


def _kind(
    weight: Tensor | None,
    byte_lengths: Tensor | None,
    num_items: Tensor | float | None,
    options: CrossEntropyOptions,
) -> tuple[Any, Tensor | None, float]:
    if options.reduction == "sum":
        return ONE, None, 1.0
    if byte_lengths is not None:
        return BYTES, byte_lengths, 1.0
    if isinstance(num_items, Tensor):
        return TENSOR, num_items, 1.0
    if num_items is not None:
        return NUMBER, None, num_items
    return (ROWS, None, 1.0) if weight is None else (WEIGHTS, weight, 1.0)
