"""Cross-entropy in Triton: the kernels of the plain case, and the launches of every case.

The floor is memory: the logits are read once and their gradient is written once. A program takes a row in blocks. The
first sweep keeps each lane's running maximum and sum; the second runs backwards over the row and writes the gradient,
so that what it reads again was read last. The end of the row stays in registers between the sweeps and is not read
again; a row that fits there is read once in every sense, another once from memory and in part from L2.

Options of the loss (class weights, smoothing, z-loss, softcap, statistics) are in ``cross_entropy_options``; the
schedule that goes with a width is in ``schedules``.
"""

from __future__ import annotations

import functools

import torch
import triton.language as tl
from loss_core.backend import CrossEntropyForward, CrossEntropyOptions, refuse_shard
from loss_core.memory import empty, zeroed_words
from torch import Tensor

from loss_triton.cross_entropy_options import (
    cross_entropy_bwd_kernel,
    cross_entropy_options_fwd_kernel,
    cross_entropy_rescale_kernel,
    numbers_of,
)
from loss_triton.denominator import (
    NUMBER,
    Denominator,
    denominator_of_gradient,
    denominator_of_loss,
    find_denominator,
    patience,
    start_counting,
)
from loss_triton.launch import Launch, kernel, prepared, refuse_float64
from loss_triton.rows import (
    COUNTERS,
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
    logits_ptr, target_ptr, counters_ptr, of_row_ptr, denominator_ptr, row_loss_ptr, lse_ptr, loss_ptr,
    rows, classes, logits_stride: tl.int64, ignore_index: tl.int64, logit_scale: tl.float32, number: tl.float32,
    REDUCE: tl.constexpr, KIND: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    """row_loss = lse - x[target], x = logit_scale * logits, logit_scale > 0. One program per row.

    With REDUCE, loss = sum(row_loss) / denominator; the program of the last row adds the rows up, in their order.

    logits_ptr: (rows, classes), float; row stride logits_stride, unit stride along classes.
    target_ptr: (rows,), int32, int64 or uint8. row_loss_ptr, lse_ptr: (rows,), float32. With REDUCE counters_ptr:
    (COUNTERS,) int64 at 0; loss_ptr: () float32; KIND, of_row_ptr, number and denominator_ptr as in ``Denominator``.
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
        row_is_known(counters_ptr, target != ignore_index)
        if row == rows - 1:
            live_rows = wait_for_rows(counters_ptr, rows)
            denominator = denominator_of_loss(
                live_rows, target_ptr, of_row_ptr, number, rows, classes, ignore_index, KIND, LANES
            )
            tl.store(loss_ptr, sum_of_rows(row_loss_ptr, rows, LANES) / denominator)
            if denominator_ptr is not None:
                tl.store(denominator_ptr, denominator)


@kernel
def cross_entropy_fwd_grad_kernel(
    logits_ptr, target_ptr, counters_ptr, of_row_ptr, denominator_ptr, row_loss_ptr, lse_ptr, grad_ptr, loss_ptr,
    rows, classes, logits_stride: tl.int64, grad_stride: tl.int64, ignore_index: tl.int64,
    logit_scale: tl.float32, number: tl.float32,
    KIND: tl.constexpr, PATIENCE: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    """grad = logit_scale * (softmax(x) - onehot(target)) / denominator, and loss as in the forward kernel.

    One program per row; that of the last row adds the losses up, in their order.

    logits_ptr, grad_ptr: (rows, classes), float, may be the same memory. Others as in the forward kernel.
    """
    row = tl.program_id(0)
    target = tl.load(target_ptr + row).to(tl.int64)
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
    words = start_counting(counters_ptr, target_ptr, rows, ignore_index, KIND, LANES)
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
    denominator = denominator_of_gradient(
        words, counters_ptr, target_ptr, of_row_ptr, number, rows, ignore_index, KIND, PATIENCE, LANES
    )
    # Before the gradient, whose stores it would wait for; after the counters were read, which are set back when all
    # rows are known.
    row_is_known(counters_ptr, live)
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
        wait_for_rows(counters_ptr, rows)
        tl.store(loss_ptr, sum_of_rows(row_loss_ptr, rows, LANES) / denominator)
        if denominator_ptr is not None:
            tl.store(denominator_ptr, denominator)


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
    """See ``loss_core.backend``. One launch; two where class weights or bytes have to be summed before a gradient."""
    if not _does(options, logits.dtype):
        refuse_float64(logits)
        refuse_shard(weight, options, stats=stats, forward=True)
    rows, classes = logits.shape
    denominator = find_denominator(target, weight, byte_lengths, num_items, options, classes, gradient=grad is not None)
    if not rows:
        return _of_no_rows(logits, denominator, options, stats)
    if weight is None and not stats and _is_plain(options):
        return _forward_plain(logits, target, denominator, options, grad)
    return _forward_options(logits, target, weight, denominator, options, grad, stats)


@functools.lru_cache
def _does(options: CrossEntropyOptions, dtype: torch.dtype) -> bool:
    """Whether there is nothing to refuse; one look where the checks would be several calls."""
    return dtype != torch.float64 and options.total_classes is None


@functools.lru_cache
def _is_plain(options: CrossEntropyOptions) -> bool:
    """Whether the plain kernels do these options."""
    _, _, label_smoothing, z_loss, softcap, logit_scale, _, total_classes = options
    return logit_scale > 0 and not label_smoothing and not z_loss and softcap is None and total_classes is None


def _of_no_rows(
    logits: Tensor, denominator: Denominator, options: CrossEntropyOptions, stats: bool
) -> CrossEntropyForward:
    none = torch.empty(0, dtype=torch.float32, device=logits.device)
    loss, result = none, denominator.result
    if result is not None and result is not denominator.of_row:
        result.fill_(denominator.number if denominator.kind == NUMBER.value else 0.0)
    if options.reduction != "none":
        loss = torch.zeros((), device=logits.device) if result is None else (0.0 / result).reshape(())
    if not stats:
        return CrossEntropyForward(loss, none, result)
    return CrossEntropyForward(loss, none, result, loss.clone(), none.to(torch.int64), none.to(torch.bool))


def _forward_plain(
    logits: Tensor,
    target: Tensor,
    denominator: Denominator,
    options: CrossEntropyOptions,
    grad: Tensor | None,
) -> CrossEntropyForward:
    rows, classes = logits.shape
    device, dtype = logits.device, logits.dtype
    kind, of_row, number, result = denominator
    row_loss, lse = empty((rows,), torch.float32, device), empty((rows,), torch.float32, device)
    counters = loss = None
    if options.reduction != "none":
        counters, loss = zeroed_words(COUNTERS, device), empty((), torch.float32, device)
    vector, edges = alignment(logits, grad)
    dtypes = dtype, target.dtype, None if of_row is None else of_row.dtype
    if grad is None:
        launch = _forward_launch(device.index, dtypes, classes, vector, edges, kind, loss is not None)
        launch(
            rows, logits, target, counters, of_row, result, row_loss, lse, loss,
            rows, classes, logits.stride(0), options.ignore_index, options.logit_scale, number,
        )  # fmt: skip
    else:
        launch = _gradient_launch(device.index, dtypes, classes, vector, edges, kind)
        launch(
            rows, logits, target, counters, of_row, result, row_loss, lse, grad, loss,
            rows, classes, logits.stride(0), grad.stride(0), options.ignore_index, options.logit_scale, number,
        )  # fmt: skip
    return CrossEntropyForward(row_loss if loss is None else loss, lse, result)


@functools.cache
def _forward_launch(
    device: int | None, dtypes: tuple[torch.dtype | None, ...], classes: int, vector: int, edges: bool, kind: int,
    reduce: bool,
) -> Launch:  # fmt: skip
    lanes, block, hold = forward_schedule(classes, dtypes[0].itemsize, vector)  # type: ignore[union-attr]
    constants = reduce, kind, vector, edges, lanes, block, hold
    return prepared(cross_entropy_fwd_kernel, (device, dtypes), constants, lanes)


@functools.cache
def _gradient_launch(
    device: int | None, dtypes: tuple[torch.dtype | None, ...], classes: int, vector: int, edges: bool, kind: int
) -> Launch:
    lanes, block, hold = gradient_schedule(classes, dtypes[0].itemsize, vector)  # type: ignore[union-attr]
    constants = kind, patience(device), vector, edges, lanes, block, hold
    return prepared(cross_entropy_fwd_grad_kernel, (device, dtypes), constants, lanes)


def _forward_options(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    denominator: Denominator,
    options: CrossEntropyOptions,
    grad: Tensor | None,
    stats: bool,
) -> CrossEntropyForward:
    rows, classes = logits.shape
    device = logits.device
    kind, of_row, number, result = denominator
    reduce = options.reduction != "none"
    row_loss, lse = empty((rows,), torch.float32, device), empty((rows,), torch.float32, device)
    counters = loss = row_z_loss = z_loss = prediction = correct = None
    if reduce:
        counters, loss = zeroed_words(COUNTERS, device), empty((), torch.float32, device)
    if stats:
        row_z_loss = empty((rows,), torch.float32, device)
        z_loss = empty((), torch.float32, device) if reduce else None
        prediction, correct = empty((rows,), torch.int64, device), empty((rows,), torch.bool, device)
    vector, edges = alignment(logits, grad)
    lanes, block, hold = options_schedule(classes, vector)
    launch = prepared(
        cross_entropy_options_fwd_kernel,
        (device.index, logits.dtype, target.dtype, None if of_row is None else of_row.dtype),
        (reduce, kind, patience(device.index), weight is not None, options.label_smoothing > 0,
         options.softcap is not None, options.total_classes is not None, stats, grad is not None,
         vector, edges, lanes, block, hold),
        lanes,
    )  # fmt: skip
    launch(
        rows, logits, target, weight, counters, of_row, result, row_loss, lse, grad, loss, row_z_loss, z_loss,
        prediction, correct, rows, classes, logits.stride(0), 0 if grad is None else grad.stride(0),
        *numbers_of(options, classes), number,
    )  # fmt: skip
    if loss is None:
        return CrossEntropyForward(row_loss, lse, None, row_z_loss, prediction, correct)
    return CrossEntropyForward(loss, lse, result, z_loss, prediction, correct)


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
    if not _does(options, logits.dtype):
        refuse_float64(logits)
        refuse_shard(weight, options, stats=False, forward=False)
    rows, classes = logits.shape
    if not rows:
        return
    vector, edges = alignment(logits, grad)
    device = logits.device
    launch = _backward_launch(
        device.index, (logits.dtype, target.dtype, grad_loss.dtype), classes, vector, edges, weight is not None,
        denominator is None, options, skip_if_one,
    )  # fmt: skip
    launch(
        programs(rows, device), grad_loss, logits, target, weight, lse, denominator, grad,
        rows, classes, grad_loss.stride(0) if options.reduction == "none" else 0, logits.stride(0), grad.stride(0),
        *numbers_of(options, classes),
    )  # fmt: skip


@functools.lru_cache(4096)
def _backward_launch(
    device: int | None, dtypes: tuple[torch.dtype, ...], classes: int, vector: int, edges: bool, weighted: bool,
    whole: bool, options: CrossEntropyOptions, skip_if_one: bool,
) -> Launch:  # fmt: skip
    lanes, block = backward_schedule(classes, vector)
    constants = (
        weighted, options.label_smoothing > 0, options.softcap is not None, options.total_classes is not None,
        skip_if_one, vector, edges, lanes, block,
    )  # fmt: skip
    return prepared(cross_entropy_bwd_kernel, (device, dtypes, whole), constants, lanes)


def cross_entropy_rescale(grad_loss: Tensor, grad: Tensor) -> None:
    """See ``loss_core.backend``. One launch."""
    refuse_float64(grad)
    rows, classes = grad.shape
    if not rows:
        return
    vector, edges = alignment(grad, None)
    lanes, block = backward_schedule(classes, vector)
    key = grad.device.index, grad.dtype, grad_loss.dtype
    launch = prepared(cross_entropy_rescale_kernel, key, (vector, edges, lanes, block), lanes)
    launch(programs(rows, grad.device), grad_loss, grad, rows, classes, grad.stride(0))
