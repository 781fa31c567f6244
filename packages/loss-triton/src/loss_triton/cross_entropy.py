"""Cross-entropy in Triton: the kernels of the plain case, and the launches of every case.

The floor is memory: the logits are read once and their gradient is written once. A program takes a row in blocks. The
first sweep keeps each lane's running maximum and sum; the second runs backwards over the row and writes the gradient,
so that what it reads again was read last. The end of the row stays in registers between the sweeps and is not read
again; a row that fits there is read once in every sense, another once from memory and in part from L2.

Options of the loss (class weights, smoothing, z-loss, softcap, statistics) are in ``cross_entropy_options``; the
schedule that goes with a width is in ``schedules``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from loss_core.backend import CrossEntropyForward, CrossEntropyOptions
from torch import Tensor

from loss_triton.cross_entropy_options import (
    cross_entropy_bwd_kernel,
    cross_entropy_options_fwd_kernel,
    cross_entropy_rescale_kernel,
)
from loss_triton.denominator import launch_denominator
from loss_triton.launch import kernel, refuse_float64
from loss_triton.rows import (
    LOG2_E,
    block_columns,
    body_of,
    edge_columns,
    finite_or_zero,
    lane_max,
    lane_sum,
    online_sum,
    row_is_known,
    sum_of_rows,
    vectors,
    wait_for_rows,
    zero_row,
)
from loss_triton.schedules import (
    alignment,
    backward_schedule,
    forward_schedule,
    gradient_schedule,
    options_schedule,
    programs,
)


@kernel
def cross_entropy_fwd_kernel(
    logits_ptr, target_ptr, denominator_ptr, finished_ptr, row_loss_ptr, lse_ptr, loss_ptr,
    rows, classes, logits_stride, ignore_index, logit_scale,
    REDUCE: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    """row_loss = lse - x[target], x = logit_scale * logits, logit_scale > 0. One program per row.

    With REDUCE, loss = sum(row_loss) / denominator; the program of the last row adds the rows up, in their order.

    logits_ptr: (rows, classes), float; row stride logits_stride, unit stride along classes.
    target_ptr: (rows,), int32, int64 or uint8. row_loss_ptr, lse_ptr: (rows,), float32.
    denominator_ptr: (1,) float32, finished_ptr: (1,) int32 at 0, loss_ptr: () float32; None without REDUCE.
    """
    row = tl.program_id(0)
    target = tl.load(target_ptr + row).to(tl.int64)
    row_ptr = logits_ptr + tl.cast(row, tl.int64) * logits_stride
    head, body = body_of(row_ptr, classes, VECTOR, EDGES)
    # The row's end is asked for before the target has come, and used last.
    # The blocks before the held part are read without a mask, so they may not reach beyond it.
    tl.static_assert(BLOCK <= HOLD)
    blocks = tl.cdiv(tl.maximum(body - HOLD, 0), BLOCK)
    held_columns = block_columns(blocks * BLOCK, HOLD, LANES * VECTOR)
    held = tl.load(
        vectors(row_ptr + head, held_columns, VECTOR), mask=held_columns < body, other=float("-inf"),
        eviction_policy="evict_first",
    )  # fmt: skip
    loss = 0.0
    lse = 0.0
    if target != ignore_index:
        valid = (target >= 0) & (target < classes)
        # A target out of range reads nothing and makes its row NaN.
        x_target = tl.load(row_ptr + target, mask=valid, other=float("nan")).to(tl.float32)
        log2_scale = logit_scale * LOG2_E
        peaks = tl.full((LANES,), float("-inf"), tl.float32)
        totals = tl.zeros((LANES,), tl.float32)
        for block in range(blocks):
            columns = block_columns(block * BLOCK, BLOCK, LANES * VECTOR)
            x = tl.load(vectors(row_ptr + head, columns, VECTOR), eviction_policy="evict_first").to(tl.float32)
            peaks, totals = online_sum(x, peaks, totals, log2_scale, LANES, VECTOR)
        peaks, totals = online_sum(held.to(tl.float32), peaks, totals, log2_scale, LANES, VECTOR)
        peak = tl.max(peaks, 0)
        if EDGES:
            columns, in_edge = edge_columns(head, body, classes, VECTOR)
            x_edge = tl.load(row_ptr + columns, mask=in_edge, other=float("-inf")).to(tl.float32)
            peak = tl.maximum(peak, tl.max(tl.max(x_edge, 1), 0))
        peak = finite_or_zero(peak)
        total = tl.sum(totals * tl.exp2((peaks - peak) * log2_scale), 0)
        if EDGES:
            total += tl.sum(tl.sum(tl.exp2((x_edge - peak) * log2_scale), 1), 0)
        lse = peak * logit_scale + tl.log(total)
        loss = tl.log(total) - (x_target - peak) * logit_scale
    tl.store(row_loss_ptr + row, loss)
    tl.store(lse_ptr + row, lse)
    if REDUCE:
        row_is_known(finished_ptr)
        if row == rows - 1:
            wait_for_rows(finished_ptr, rows)
            tl.store(loss_ptr, sum_of_rows(row_loss_ptr, rows) / tl.load(denominator_ptr))


@kernel
def cross_entropy_fwd_grad_kernel(
    logits_ptr, target_ptr, denominator_ptr, finished_ptr, row_loss_ptr, lse_ptr, grad_ptr, loss_ptr,
    rows, classes, logits_stride, grad_stride, ignore_index, logit_scale,
    VECTOR: tl.constexpr, EDGES: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    """grad = logit_scale * (softmax(x) - onehot(target)) / denominator, and loss as in the forward kernel.

    One program per row; that of the last row adds the losses up, in their order.

    logits_ptr, grad_ptr: (rows, classes), float, may be the same memory. Others as in the forward kernel.
    """
    row = tl.program_id(0)
    target = tl.load(target_ptr + row).to(tl.int64)
    denominator = tl.load(denominator_ptr)
    row_ptr = logits_ptr + tl.cast(row, tl.int64) * logits_stride
    grad_row_ptr = grad_ptr + tl.cast(row, tl.int64) * grad_stride
    head, body = body_of(row_ptr, classes, VECTOR, EDGES)
    # The row's end is asked for before the target has come, and stays in registers between the sweeps.
    # The blocks before the held part are read without a mask, so they may not reach beyond it.
    tl.static_assert(BLOCK <= HOLD)
    blocks = tl.cdiv(tl.maximum(body - HOLD, 0), BLOCK)
    held_columns = block_columns(blocks * BLOCK, HOLD, LANES * VECTOR)
    in_held = held_columns < body
    held = tl.load(vectors(row_ptr + head, held_columns, VECTOR), mask=in_held, other=float("-inf"))
    loss = 0.0
    lse = 0.0
    peak = 0.0
    total = 1.0
    x_target = 0.0
    live = target != ignore_index
    valid = (target >= 0) & (target < classes)
    log2_scale = logit_scale * LOG2_E
    if EDGES:
        edges, in_edge = edge_columns(head, body, classes, VECTOR)
        x_edge = tl.load(row_ptr + edges, mask=in_edge, other=float("-inf")).to(tl.float32)
    if live:
        # A target out of range reads nothing and makes its row NaN, the gradient too.
        x_target = tl.load(row_ptr + target, mask=valid, other=float("nan")).to(tl.float32)
        peaks = tl.full((LANES,), float("-inf"), tl.float32)
        totals = tl.zeros((LANES,), tl.float32)
        for block in range(blocks):
            columns = block_columns(block * BLOCK, BLOCK, LANES * VECTOR)
            x = tl.load(vectors(row_ptr + head, columns, VECTOR), eviction_policy="evict_last").to(tl.float32)
            peaks, totals = online_sum(x, peaks, totals, log2_scale, LANES, VECTOR)
        x_held = held.to(tl.float32)
        peak = tl.max(tl.maximum(peaks, lane_max(x_held, LANES)), 0)
        if EDGES:
            peak = tl.maximum(peak, tl.max(tl.max(x_edge, 1), 0))
        peak = finite_or_zero(peak)
        total = tl.sum(
            totals * tl.exp2((peaks - peak) * log2_scale)
            + lane_sum(tl.exp2((x_held - peak) * log2_scale), LANES), 0
        )  # fmt: skip
        if EDGES:
            total += tl.sum(tl.sum(tl.exp2((x_edge - peak) * log2_scale), 1), 0)
        lse = peak * logit_scale + tl.log(total)
        loss = tl.log(total) - (x_target - peak) * logit_scale
    tl.store(row_loss_ptr + row, loss)
    tl.store(lse_ptr + row, lse)
    # Before the gradient, whose stores it would wait for.
    row_is_known(finished_ptr)
    if live:
        of_target = logit_scale / denominator
        of_softmax = tl.where(valid, of_target / total, float("nan"))
        held_grad = (tl.exp2((held.to(tl.float32) - peak) * log2_scale) * of_softmax).to(grad_ptr.dtype.element_ty)
        tl.store(vectors(grad_row_ptr + head, held_columns, VECTOR), held_grad, mask=in_held, cache_modifier=".cs")
        for block in range(blocks):
            columns = block_columns((blocks - 1 - block) * BLOCK, BLOCK, LANES * VECTOR)
            x = tl.load(vectors(row_ptr + head, columns, VECTOR), eviction_policy="evict_first").to(tl.float32)
            grad = (tl.exp2((x - peak) * log2_scale) * of_softmax).to(grad_ptr.dtype.element_ty)
            tl.store(vectors(grad_row_ptr + head, columns, VECTOR), grad, cache_modifier=".cs")
        if EDGES:
            edge_grad = (tl.exp2((x_edge - peak) * log2_scale) * of_softmax).to(grad_ptr.dtype.element_ty)
            tl.store(grad_row_ptr + edges, edge_grad, mask=in_edge)
        # The target's element once more, which spares every other one the comparison.
        tl.debug_barrier()
        target_grad = tl.exp2((x_target - peak) * log2_scale) * of_softmax - of_target
        tl.store(grad_row_ptr + target, target_grad.to(grad_ptr.dtype.element_ty), mask=valid)
    else:
        zero_row(grad_row_ptr, classes, head, body, VECTOR, EDGES, LANES, BLOCK)
    if row == rows - 1:
        wait_for_rows(finished_ptr, rows)
        tl.store(loss_ptr, sum_of_rows(row_loss_ptr, rows) / denominator)


class _Results(NamedTuple):
    """What a forward fills; see ``CrossEntropyForward``. For the scalar reductions the rows' losses are in between."""

    row_loss: Tensor
    lse: Tensor
    loss: Tensor | None
    row_z_loss: Tensor | None
    z_loss: Tensor | None
    prediction: Tensor | None
    correct: Tensor | None


def _results(rows: int, device: torch.device, reduce: bool, stats: bool) -> _Results:
    row_loss = torch.empty(rows, dtype=torch.float32, device=device)
    lse = torch.empty(rows, dtype=torch.float32, device=device)
    loss = torch.empty((), dtype=torch.float32, device=device) if reduce else None
    if not stats:
        return _Results(row_loss, lse, loss, None, None, None, None)
    z_loss = torch.empty((), dtype=torch.float32, device=device) if reduce else None
    prediction = torch.empty(rows, dtype=torch.int64, device=device)
    correct = torch.empty(rows, dtype=torch.bool, device=device)
    return _Results(row_loss, lse, loss, torch.empty_like(row_loss), z_loss, prediction, correct)


def cross_entropy_forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    byte_lengths: Tensor | None,
    num_items: Tensor | float | None,
    options: CrossEntropyOptions,
    *,
    grad: Tensor | None,
    stats: bool,
) -> CrossEntropyForward:
    """See ``loss_core.backend``. One launch over the rows, and one before it for the denominator of a reduction."""
    refuse_float64(logits)
    rows, classes = logits.shape
    reduce = options.reduction != "none"
    results = _results(rows, logits.device, reduce, stats)
    denominator = finished = None
    if reduce:
        denominator, finished = launch_denominator(target, weight, byte_lengths, num_items, options, classes)
    if rows:
        plain = (
            weight is None and not stats and options.logit_scale > 0
            and not options.label_smoothing and not options.z_loss and options.softcap is None
        )  # fmt: skip
        launch = _launch_plain if plain else _launch_options
        launch(logits, target, weight, options, denominator, finished, grad, results)
    row_loss, lse, loss, row_z_loss, z_loss, prediction, correct = results
    if not reduce:
        return CrossEntropyForward(row_loss, lse, None, row_z_loss, prediction, correct)
    if not rows:
        loss = (0.0 / denominator).reshape(())  # type: ignore[operator,union-attr]
        z_loss = loss.clone() if stats else None
    if options.reduction == "sum":
        denominator = None
    return CrossEntropyForward(loss, lse, denominator, z_loss, prediction, correct)  # type: ignore[arg-type]


def _launch_plain(
    logits: Tensor,
    target: Tensor,
    weight: None,
    options: CrossEntropyOptions,
    denominator: Tensor | None,
    finished: Tensor | None,
    grad: Tensor | None,
    results: _Results,
) -> None:
    rows, classes = logits.shape
    row_loss, lse, loss, *_ = results
    vector, edges = alignment(logits, grad)
    key = logits.device.index, logits.dtype, target.dtype
    stride, scalars = logits.stride(0), (options.ignore_index, options.logit_scale)
    if grad is None:
        lanes, block, hold = forward_schedule(classes, logits.element_size(), vector)
        cross_entropy_fwd_kernel(
            rows, key,
            (logits, target, denominator, finished, row_loss, lse, loss, rows, classes, stride, *scalars),
            (loss is not None, vector, edges, lanes, block, hold), lanes,
        )  # fmt: skip
    else:
        lanes, block, hold = gradient_schedule(classes, logits.element_size(), vector)
        cross_entropy_fwd_grad_kernel(
            rows, key,
            (logits, target, denominator, finished, row_loss, lse, grad, loss,
             rows, classes, stride, grad.stride(0), *scalars),
            (vector, edges, lanes, block, hold), lanes,
        )  # fmt: skip


def _launch_options(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: CrossEntropyOptions,
    denominator: Tensor | None,
    finished: Tensor | None,
    grad: Tensor | None,
    results: _Results,
) -> None:
    rows, classes = logits.shape
    vector, edges = alignment(logits, grad)
    lanes, block, hold = options_schedule(classes, vector)
    cross_entropy_options_fwd_kernel(
        rows,
        (logits.device.index, logits.dtype, target.dtype),
        (logits, target, weight, denominator, finished, *results[:2], grad, *results[2:],
         rows, classes, logits.stride(0), 0 if grad is None else grad.stride(0),
         options.ignore_index, options.label_smoothing, options.z_loss, options.softcap or 0.0, options.logit_scale),
        (results.loss is not None, weight is not None, options.label_smoothing > 0, options.softcap is not None,
         results.prediction is not None, grad is not None, vector, edges, lanes, block, hold),
        lanes,
    )  # fmt: skip


def cross_entropy_backward(
    grad_loss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    denominator: Tensor | None,
    options: CrossEntropyOptions,
    *,
    grad: Tensor,
    skip_if_one: bool,
) -> None:
    """See ``loss_core.backend``. One launch."""
    refuse_float64(logits)
    rows, classes = logits.shape
    if not rows:
        return
    vector, edges = alignment(logits, grad)
    lanes, block = backward_schedule(classes, vector)
    cross_entropy_bwd_kernel(
        programs(rows, logits.device),
        (logits.device.index, logits.dtype, target.dtype, grad_loss.dtype, denominator is None),
        (grad_loss, logits, target, weight, lse, denominator, grad,
         rows, classes, grad_loss.stride(0) if options.reduction == "none" else 0, logits.stride(0), grad.stride(0),
         options.ignore_index, options.label_smoothing, options.z_loss, options.softcap or 0.0, options.logit_scale),
        (weight is not None, options.label_smoothing > 0, options.softcap is not None, skip_if_one,
         vector, edges, lanes, block),
        lanes,
    )  # fmt: skip


def cross_entropy_rescale(grad_loss: Tensor, grad: Tensor) -> None:
    """See ``loss_core.backend``. One launch."""
    rows, classes = grad.shape
    if not rows:
        return
    vector, edges = alignment(grad, None)
    lanes, block = backward_schedule(classes, vector)
    cross_entropy_rescale_kernel(
        programs(rows, grad.device),
        (grad.device.index, grad.dtype, grad_loss.dtype),
        (grad_loss, grad, rows, classes, grad.stride(0)),
        (vector, edges, lanes, block),
        lanes,
    )
