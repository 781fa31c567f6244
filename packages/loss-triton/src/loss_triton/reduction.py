"""What a launch of cross-entropy stores of its rows' losses: each, or their sum over the denominator."""

from __future__ import annotations

import triton
import triton.language as tl

from loss_triton.denominator import denominator_of_loss
from loss_triton.total import publish, sum_of_slices, sum_slice, words_of


@triton.jit
def store_loss(
    losses_ptr, target_ptr, of_row_ptr, denominator_ptr, denominator_at, loss_ptr,
    number, rows, classes, ignore_index, KIND: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """For the program of the last row: the sum of the losses over the denominator. Returns rows not ignored, and that.

    losses_ptr: words of the losses, see ``total``. denominator_ptr: where the denominator goes too, or None.
    """
    sum_of_losses, live = sum_of_slices(losses_ptr, rows)
    denominator = denominator_of_loss(live, target_ptr, of_row_ptr, number, rows, classes, ignore_index, KIND, LANES)
    tl.store(loss_ptr, sum_of_losses / denominator)
    if denominator_ptr is not None:
        tl.store(denominator_ptr + denominator_at, denominator)
    return live, denominator


@triton.jit
def store_row(
    row, loss, live, workspace_ptr, target_ptr, of_row_ptr, denominator_ptr, denominator_at, loss_ptr,
    number, rows, classes, ignore_index, REDUCE: tl.constexpr, KIND: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """For the program of a row that knows its loss: store it in loss_ptr[row], or with REDUCE take it into the sum."""
    if REDUCE:
        losses_ptr = words_of(workspace_ptr, rows, 0)
        publish(losses_ptr, row, loss, live)
        sum_slice(losses_ptr, row, rows, LANES)
        if row == rows - 1:
            store_loss(
                losses_ptr, target_ptr, of_row_ptr, denominator_ptr, denominator_at, loss_ptr,
                number, rows, classes, ignore_index, KIND, LANES,
            )  # fmt: skip
    else:
        tl.store(loss_ptr + row, loss)
