"""What the sum of the losses is divided by, and the sum itself; one program each, so that the order is fixed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from loss_core.backend import CrossEntropyOptions
from torch import Tensor

# What the denominator is; constexpr of the kernels here.
ONE, ROWS, WEIGHTS, BYTES, NUMBER, TENSOR = (tl.constexpr(kind) for kind in range(6))


@triton.jit
def denominator_of(
    target_ptr, of_row_ptr, number, rows, classes, ignore_index, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """The denominator in float32.

    of_row_ptr: for WEIGHTS the (classes,) weights; for BYTES the (rows,) byte lengths; for TENSOR the (1,) denominator.
    """
    if KIND == ONE:
        denominator = 1.0
    elif KIND == NUMBER:
        denominator = number
    elif KIND == TENSOR:
        denominator = tl.load(of_row_ptr).to(tl.float32)
    else:
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
    return denominator


@triton.jit
def reduce_rows(row_loss_ptr, rows):
    """Sum of row_loss_ptr (rows,), past the L1 cache since other programs wrote it."""
    offsets = tl.arange(0, 1024)
    partial = tl.zeros((1024,), tl.float32)
    for start in range(0, rows, 1024):
        inside = start + offsets < rows
        partial += tl.load(row_loss_ptr + start + offsets, mask=inside, other=0.0, cache_modifier=".cg")
    return tl.sum(partial, 0)


@triton.jit(do_not_specialize=["rows", "ignore_index"])
def cross_entropy_denominator_kernel(
    target_ptr, of_row_ptr, number, denominator_ptr, finished_ptr,
    rows, classes, ignore_index, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What has to be known before a gradient is written: denominator_ptr (1,) float32; and finished_ptr (1,) int32 = 0.

    One program. target_ptr: (rows,).
    """
    denominator = denominator_of(target_ptr, of_row_ptr, number, rows, classes, ignore_index, KIND, BLOCK)
    tl.store(denominator_ptr, denominator)
    tl.store(finished_ptr, 0)


@triton.jit(do_not_specialize=["rows", "ignore_index"])
def cross_entropy_reduce_kernel(
    target_ptr, of_row_ptr, number, row_loss_ptr, denominator_ptr, loss_ptr,
    rows, classes, ignore_index, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """loss = sum(row losses) / denominator. One program.

    row_loss_ptr: (rows,) float32. denominator_ptr: (1,), loss_ptr: (), float32, written.
    """
    denominator = denominator_of(target_ptr, of_row_ptr, number, rows, classes, ignore_index, KIND, BLOCK)
    tl.store(denominator_ptr, denominator)
    tl.store(loss_ptr, reduce_rows(row_loss_ptr, rows) / denominator)


class Denominator:
    """The denominator of one call: its one-element float32 tensor ``value``, and the launches that fill it."""

    def __init__(
        self,
        target: Tensor,
        weight: Tensor | None,
        byte_lengths: Tensor | None,
        num_items: Tensor | float | None,
        options: CrossEntropyOptions,
        classes: int,
    ) -> None:
        self.value = torch.empty(1, dtype=torch.float32, device=target.device)
        self._target, self._options, self._classes = target, options, classes
        self._number = num_items if isinstance(num_items, float) else 0.0
        if options.reduction == "sum":
            self._kind, self._of_row = ONE, None
        elif byte_lengths is not None:
            self._kind, self._of_row = BYTES, byte_lengths
        elif isinstance(num_items, Tensor):
            self._kind, self._of_row = TENSOR, num_items
        elif num_items is not None:
            self._kind, self._of_row = NUMBER, None
        else:
            self._kind, self._of_row = (ROWS, None) if weight is None else (WEIGHTS, weight)

    def before(self) -> Tensor:
        """Compute ``value``, for a kernel that divides by it; returns the (1,) int32 counter of finished programs."""
        finished = torch.empty(1, dtype=torch.int32, device=self.value.device)
        cross_entropy_denominator_kernel[(1,)](
            self._target, self._of_row, self._number, self.value, finished,
            self._target.shape[0], self._classes, self._options.ignore_index, self._kind, BLOCK=4096, num_warps=8,
        )  # fmt: skip
        return finished

    def after(self, row_loss: Tensor, loss: Tensor) -> None:
        """Compute ``value``, and `loss` () from `row_loss` (rows,)."""
        cross_entropy_reduce_kernel[(1,)](
            self._target, self._of_row, self._number, row_loss, self.value, loss,
            self._target.shape[0], self._classes, self._options.ignore_index, self._kind, BLOCK=4096, num_warps=8,
        )  # fmt: skip
