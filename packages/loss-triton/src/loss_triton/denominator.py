"""What the sum of the losses is divided by.

A gradient is divided by it before it is written, so a kernel that writes one has to know it early. The number of rows
that are not ignored is counted by the first programs of that kernel, a slice of the targets each; other programs meet
the result long before they need it. Sums of class weights, whose order has to be fixed, and of byte lengths take a
launch of their own there. Without a gradient all of this has time until the last row is known.
"""

from __future__ import annotations

from types import NoneType
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from loss_core.memory import allocator
from torch import Tensor

from loss_triton.launch import Launch, kernel, prepared

# What the denominator is; a constant of the kernels, and its value for the host.
ONE, ROWS, NUMBER, TENSOR, WEIGHTS, BYTES = map(tl.constexpr, range(6))

# Programs that count; what each adds to the count when it is through; and the rows that are too many to be counted so.
# All in 32 bits, for every lane keeps a word while the row is summed, where registers are scarce.
_SLICES = tl.constexpr(64)
_SLICE = tl.constexpr(1 << 24)
TOO_MANY_ROWS = 1 << 24


@triton.jit
def sum_over_targets(
    target_ptr, of_row_ptr, start, end, classes, ignore_index, KIND: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Sum over the rows in [start, end) that are not ignored: of 1, of their target's weight or of their bytes."""
    offsets = tl.arange(0, WIDTH)
    # Counts are exact in integers; in float32 they would end at 2**24.
    counted = tl.zeros((WIDTH,), tl.float32 if KIND == WEIGHTS else tl.int64)
    for first in range(start, end, WIDTH):
        inside = first + offsets < end
        target = tl.load(target_ptr + first + offsets, mask=inside, other=0).to(tl.int64)
        live = inside & (target != ignore_index)
        if KIND == ROWS:
            counted += live.to(tl.int64)
        elif KIND == WEIGHTS:
            live = live & (target >= 0) & (target < classes)
            counted += tl.load(of_row_ptr + target, mask=live, other=0.0)
        else:
            counted += tl.load(of_row_ptr + first + offsets, mask=live, other=0).to(tl.int64)
    return tl.sum(counted, 0)


@triton.jit
def _count_word(workspace_ptr):
    return workspace_ptr.to(tl.pointer_type(tl.int32))


@triton.jit
def _complete(rows):
    """What the word is at least when all slices have been counted."""
    return tl.minimum(rows, _SLICES) * _SLICE


@triton.jit
def start_counting(workspace_ptr, target_ptr, rows, ignore_index, KIND: tl.constexpr, LANES: tl.constexpr):
    """For a program that has asked for its row: its share in counting, and the word as it is now, in the first lane."""
    words = tl.zeros((LANES,), tl.int32)
    if KIND == ROWS:
        count_ptr = _count_word(workspace_ptr)
        # Asked for now, it has come by the time that the row has. By one lane: so many programs want this one word that
        # a request of each warp would keep the others waiting.
        lane = tl.arange(0, LANES)
        words = tl.load(count_ptr + lane, mask=lane == 0, other=0, volatile=True)
        slices = tl.minimum(rows, _SLICES)
        mine = tl.program_id(0)
        if mine < slices:
            size = tl.cdiv(rows, slices)
            end = tl.minimum(mine * size + size, rows)
            live = sum_over_targets(target_ptr, None, mine * size, end, 0, ignore_index, ROWS, LANES)
            tl.atomic_add(count_ptr, live.to(tl.int32) + _SLICE, sem="relaxed")
    return words


@triton.jit
def _count_of(words, rows):
    """What ``start_counting`` found: live rows, or less than 0 where it was too early. In the first lane, else 0."""
    count = tl.where(words >= _complete(rows), words % _SLICE, -1).to(tl.float32)
    return tl.where(tl.arange(0, words.shape[0]) == 0, count, 0.0)


@triton.jit
def count_alone(words, rows, KIND: tl.constexpr):
    """What ``start_counting`` found, in all lanes."""
    if KIND == ROWS:
        return tl.sum(_count_of(words, rows), 0)
    else:
        return 0.0


@triton.jit
def sum_and_count(x, words, rows, KIND: tl.constexpr):
    """The sum of x over the lanes, and what ``start_counting`` found.

    Both through one barrier, which each row would have to pass once more otherwise.
    """
    if KIND == ROWS:
        total, live = tl.split(tl.sum(tl.join(x, _count_of(words, rows)), 0))
    else:
        total = tl.sum(x, 0)
        live = 0.0
    return total, live


@triton.jit
def denominator_of_gradient(
    live, workspace_ptr, target_ptr, of_row_ptr, number, rows, ignore_index,
    KIND: tl.constexpr, PATIENCE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The denominator, for a program that is about to write a gradient; KIND: ONE, ROWS, NUMBER or TENSOR.

    No program waits for good: which programs run first is not known, so one whose patience ends counts all targets.

    live: of ``sum_and_count`` or ``count_alone``.
    """
    if KIND == ROWS:
        denominator = live
        if live < 0:
            word = tl.atomic_add(_count_word(workspace_ptr), 0, sem="relaxed")
            tries = 1
            while (word < _complete(rows)) & (tries < PATIENCE):
                word = tl.atomic_add(_count_word(workspace_ptr), 0, sem="relaxed")
                tries += 1
            counted = word % _SLICE
            if word < _complete(rows):
                counted = sum_over_targets(target_ptr, None, 0, rows, 0, ignore_index, ROWS, LANES).to(tl.int32)
            denominator = counted.to(tl.float32)
    elif KIND == NUMBER:
        denominator = number
    elif KIND == TENSOR:
        denominator = tl.load(of_row_ptr).to(tl.float32)
    else:
        denominator = 1.0
    return denominator


@triton.jit
def end_counting(workspace_ptr, live, rows, KIND: tl.constexpr):
    """Once all rows are known, and so all programs have read the count: take back what was added, in whatever order."""
    if KIND == ROWS:
        tl.atomic_add(_count_word(workspace_ptr), -(live.to(tl.int32) + _complete(rows)), sem="relaxed")


@triton.jit
def denominator_of_loss(
    live, target_ptr, of_row_ptr, number, rows, classes, ignore_index, KIND: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """The denominator, for the program that adds the rows up; live: rows not ignored."""
    if KIND == ROWS:
        denominator = live.to(tl.float32)
    elif KIND == NUMBER:
        denominator = number
    elif KIND == TENSOR:
        denominator = tl.load(of_row_ptr).to(tl.float32)
    elif KIND == ONE:
        denominator = 1.0
    else:
        denominator = sum_over_targets(
            target_ptr, of_row_ptr, 0, rows, classes, ignore_index, KIND, 8 * LANES
        ).to(tl.float32)  # fmt: skip
    return denominator


@kernel
def cross_entropy_denominator_kernel(
    target_ptr, of_row_ptr, denominator_ptr, rows, classes, ignore_index: tl.int64,
    KIND: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """denominator_ptr (1,) float32 = the sum of KIND. One program, so that the order is fixed.

    target_ptr: (rows,). of_row_ptr: for WEIGHTS the (classes,) float32 weights; for BYTES the (rows,) integers.
    """
    total = sum_over_targets(target_ptr, of_row_ptr, 0, rows, classes, ignore_index, KIND, WIDTH)
    tl.store(denominator_ptr, total.to(tl.float32))


class Denominator(NamedTuple):
    """What the denominator of a case is.

    Attributes:
        kind: the value of ONE, ROWS, ... above, for the kernel.
        before: what has to be launched before the kernel, or None.
    """

    kind: int
    before: Launch | None = None


def denominator_of(
    reduction: str,
    weighted: bool,
    byte_dtype: torch.dtype | None,
    num_items: type,
    target_dtype: torch.dtype,
    rows_bits: int,
    device: int | None,
    *,
    gradient: bool,
) -> Denominator:
    """The denominator of a reduction, for a kernel that writes a `gradient` or none.

    Args:
        reduction: as in the options of the loss.
        weighted: whether there are class weights.
        byte_dtype: of the byte lengths, None without.
        num_items: its type.
        target_dtype: of the targets.
        rows_bits: the number of rows is less than 2**rows_bits.
        device: index of the GPU; None in the interpreter.
        gradient: whether it has to be known before the first row is written.
    """
    if reduction in ("none", "sum"):
        return Denominator(ONE.value)
    if num_items is not NoneType:
        return Denominator(TENSOR.value if issubclass(num_items, Tensor) else NUMBER.value)
    kind = BYTES if byte_dtype is not None else WEIGHTS if weighted else ROWS
    if not gradient or (kind is ROWS and 1 << rows_bits <= TOO_MANY_ROWS):
        return Denominator(kind.value)
    few = rows_bits <= 10
    key = device, target_dtype, torch.float32 if kind is WEIGHTS else byte_dtype
    before = prepared(cross_entropy_denominator_kernel, key, (kind.value, 1024 if few else 8192), 128 if few else 1024)
    return Denominator(TENSOR.value, before)


def supply(
    denominator: Denominator,
    target: Tensor,
    weight: Tensor | None,
    byte_lengths: Tensor | None,
    num_items: Tensor | float | None,
    classes: int,
    ignore_index: int,
) -> tuple[Tensor, float, Tensor | None, Tensor | None]:
    """The kernel's of_row, number and denominator, which it finds it in or stores it in; and what holds it at last.

    of_row: for WEIGHTS the weights, for BYTES the byte lengths, for TENSOR the denominator; else the target, to name
    a tensor. number: for NUMBER. denominator: (1,) float32; None for ONE, and for TENSOR, where nothing is to be
    stored. The last: (1,) float32; None for ONE.
    """
    if denominator.kind == ONE.value:
        return target, 1.0, None, None
    if isinstance(num_items, Tensor):
        return num_items, 1.0, None, num_items
    result = allocator(target.device)((1,), (1,), torch.float32)
    if num_items is not None:
        return target, num_items, result, result
    of_row = byte_lengths if byte_lengths is not None else weight if weight is not None else target
    if denominator.before is None:
        return of_row, 1.0, result, result
    denominator.before(1, (target, of_row, result), target.shape[0], classes, ignore_index)
    return result, 1.0, None, result
