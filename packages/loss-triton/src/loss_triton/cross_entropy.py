"""Cross-entropy in Triton: the kernels of the plain case, and the launches of every case.

The floor is memory: the logits are read once and their gradient is written once. A program takes a row in blocks. The
first sweep keeps a running maximum and sum; the second runs backwards over the row and writes the gradient, so that
what it reads again was read last and comes from the registers (the last block) or from L2. A row that fits one block is
read once in every sense.

Options of the loss (class weights, smoothing, z-loss, softcap, statistics) are in ``cross_entropy_options``; the
schedule that goes with a width is in ``schedules``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from loss_core.backend import CrossEntropyForward, CrossEntropyOptions, UnsupportedInput
from torch import Tensor

from loss_triton.cross_entropy_options import (
    cross_entropy_bwd_kernel,
    cross_entropy_options_fwd_kernel,
    cross_entropy_rescale_kernel,
)
from loss_triton.denominator import Denominator, reduce_rows
from loss_triton.rows import LOG2_E, body_span, body_start, edge_columns, finite_or_zero, online_sum, zero_row
from loss_triton.schedules import alignment, backward_schedule, forward_schedule, gradient_schedule, programs


@triton.jit(do_not_specialize=["ignore_index"])
def cross_entropy_fwd_kernel(
    logits_ptr, target_ptr, loss_ptr, lse_ptr,
    classes, logits_stride, ignore_index, logit_scale,
    VECTOR: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """loss = lse - x[target], x = logit_scale * logits, logit_scale > 0. One program per row.

    logits_ptr: (rows, classes), float; row stride logits_stride, unit stride along classes.
    target_ptr: (rows,), int32, int64 or uint8. loss_ptr, lse_ptr: (rows,), float32.
    """
    row = tl.program_id(0)
    target = tl.load(target_ptr + row).to(tl.int64)
    loss = 0.0
    lse = 0.0
    if target != ignore_index:
        head, body = body_span(row, logits_stride, classes, VECTOR, EDGES)
        body_ptr = logits_ptr + body_start(row, logits_stride, VECTOR, EDGES)
        row_ptr = logits_ptr + tl.cast(row, tl.int64) * logits_stride
        offsets = tl.arange(0, BLOCK)
        log2_scale = logit_scale * LOG2_E
        maximum = float("-inf")
        total = 0.0
        whole = body // BLOCK * BLOCK
        for start in range(0, whole, BLOCK):
            x = tl.load(body_ptr + start + offsets, eviction_policy="evict_first").to(tl.float32)
            maximum, total = online_sum(x, maximum, total, log2_scale)
        if whole < body:
            x = tl.load(body_ptr + whole + offsets, mask=whole + offsets < body, other=float("-inf")).to(tl.float32)
            maximum, total = online_sum(x, maximum, total, log2_scale)
        if EDGES:
            columns, inside = edge_columns(head, body, classes, VECTOR)
            x = tl.load(row_ptr + columns, mask=inside, other=float("-inf")).to(tl.float32)
            maximum, total = online_sum(x, maximum, total, log2_scale)
        finite = finite_or_zero(maximum)
        valid = (target >= 0) & (target < classes)
        # A target out of range reads nothing and makes its row NaN.
        x_target = tl.load(row_ptr + target, mask=valid, other=float("nan")).to(tl.float32)
        lse = finite * logit_scale + tl.log(total)
        loss = tl.log(total) - (x_target - finite) * logit_scale
    tl.store(loss_ptr + row, loss)
    tl.store(lse_ptr + row, lse)


@triton.jit(do_not_specialize=["ignore_index", "rows"])
def cross_entropy_fwd_grad_kernel(
    logits_ptr, target_ptr, denominator_ptr, finished_ptr, row_loss_ptr, lse_ptr, grad_ptr, loss_ptr,
    rows, classes, logits_stride, grad_stride, ignore_index, logit_scale,
    VECTOR: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """grad = logit_scale * (softmax(x) - onehot(target)) / denominator, and loss as in the forward kernel.

    One program per row; the last one to finish adds up the rows' losses, in their order.

    logits_ptr, grad_ptr: (rows, classes), float, may be the same memory. target_ptr: (rows,).
    denominator_ptr: (1,) float32. finished_ptr: (1,) int32, 0. row_loss_ptr, lse_ptr: (rows,) float32.
    loss_ptr: () float32.
    """
    row = tl.program_id(0)
    target = tl.load(target_ptr + row).to(tl.int64)
    denominator = tl.load(denominator_ptr)
    head, body = body_span(row, logits_stride, classes, VECTOR, EDGES)
    body_ptr = logits_ptr + body_start(row, logits_stride, VECTOR, EDGES)
    row_ptr = logits_ptr + tl.cast(row, tl.int64) * logits_stride
    grad_body_ptr = grad_ptr + body_start(row, grad_stride, VECTOR, EDGES)
    grad_row_ptr = grad_ptr + tl.cast(row, tl.int64) * grad_stride
    offsets = tl.arange(0, BLOCK)
    # The last block, 1 to BLOCK wide, stays in registers between the sweeps.
    last = (tl.maximum(body, 1) - 1) // BLOCK * BLOCK
    in_last = last + offsets < body
    loss = 0.0
    lse = 0.0
    if target != ignore_index:
        log2_scale = logit_scale * LOG2_E
        maximum = float("-inf")
        total = 0.0
        for start in tl.range(0, last, BLOCK, num_stages=STAGES):
            x = tl.load(body_ptr + start + offsets, eviction_policy="evict_last").to(tl.float32)
            maximum, total = online_sum(x, maximum, total, log2_scale)
        x_last = tl.load(body_ptr + last + offsets, mask=in_last, other=float("-inf")).to(tl.float32)
        maximum, total = online_sum(x_last, maximum, total, log2_scale)
        if EDGES:
            columns, in_edge = edge_columns(head, body, classes, VECTOR)
            x_edge = tl.load(row_ptr + columns, mask=in_edge, other=float("-inf")).to(tl.float32)
            maximum, total = online_sum(x_edge, maximum, total, log2_scale)
        finite = finite_or_zero(maximum)
        valid = (target >= 0) & (target < classes)
        # A target out of range reads nothing and makes its row NaN, the gradient too.
        x_target = tl.load(row_ptr + target, mask=valid, other=float("nan")).to(tl.float32)
        lse = finite * logit_scale + tl.log(total)
        loss = tl.log(total) - (x_target - finite) * logit_scale
        of_target = logit_scale / denominator
        of_softmax = tl.where(valid, of_target / total, float("nan"))

        grad = tl.exp2((x_last - finite) * log2_scale) * of_softmax
        tl.store(grad_body_ptr + last + offsets, grad.to(grad_ptr.dtype.element_ty), mask=in_last)
        for back in tl.range(0, last, BLOCK, num_stages=STAGES):
            start = last - BLOCK - back
            x = tl.load(body_ptr + start + offsets, eviction_policy="evict_first").to(tl.float32)
            grad = tl.exp2((x - finite) * log2_scale) * of_softmax
            tl.store(grad_body_ptr + start + offsets, grad.to(grad_ptr.dtype.element_ty))
        if EDGES:
            grad = tl.exp2((x_edge - finite) * log2_scale) * of_softmax
            tl.store(grad_row_ptr + columns, grad.to(grad_ptr.dtype.element_ty), mask=in_edge)
        # The target's element once more, which spares every other one the comparison.
        tl.debug_barrier()
        grad = tl.exp2((x_target - finite) * log2_scale) * of_softmax - of_target
        tl.store(grad_row_ptr + target, grad.to(grad_ptr.dtype.element_ty), mask=valid)
    else:
        zero_row(grad_ptr, row, classes, grad_stride, head, body, VECTOR, EDGES, BLOCK)
    tl.store(row_loss_ptr + row, loss)
    tl.store(lse_ptr + row, lse)
    # Released with the row losses, acquired before they are read.
    if tl.atomic_add(finished_ptr, 1, sem="acq_rel") == rows - 1:
        tl.store(loss_ptr, reduce_rows(row_loss_ptr, rows) / denominator)


class _Results(NamedTuple):
    """What a forward fills; see ``CrossEntropyForward``. For the scalar reductions the rows' losses are in between."""

    row_loss: Tensor
    lse: Tensor
    loss: Tensor
    row_z_loss: Tensor | None
    z_loss: Tensor | None
    prediction: Tensor | None
    correct: Tensor | None


def _results(rows: int, device: torch.device, stats: bool) -> _Results:
    row_loss = torch.empty(rows, dtype=torch.float32, device=device)
    loss = torch.empty((), dtype=torch.float32, device=device)
    extra: tuple[Tensor | None, ...] = (None,) * 4
    if stats:
        prediction = torch.empty(rows, dtype=torch.int64, device=device)
        correct = torch.empty(rows, dtype=torch.bool, device=device)
        extra = (torch.empty_like(row_loss), torch.empty_like(loss), prediction, correct)
    return _Results(row_loss, torch.empty_like(row_loss), loss, *extra)


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
    """See ``loss_core.backend``. One launch over the rows; before or after it one for the denominator."""
    refuse_float64(logits)
    rows, classes = logits.shape
    results = _results(rows, logits.device, stats)
    row_loss, lse, loss, row_z_loss, z_loss, prediction, correct = results
    plain = (
        weight is None and not stats
        and not options.label_smoothing and not options.z_loss and options.softcap is None
        and options.logit_scale > 0
    )  # fmt: skip
    launch = _launch_plain if plain else _launch_options
    if options.reduction == "none":
        if rows:
            launch(logits, target, weight, options, None, None, grad, results)
        return CrossEntropyForward(row_loss, lse, None, row_z_loss, prediction, correct)
    denominator = Denominator(target, weight, byte_lengths, num_items, options, classes)
    if grad is not None and rows:
        launch(logits, target, weight, options, denominator.value, denominator.before(), grad, results)
    else:
        if rows:
            launch(logits, target, weight, options, None, None, None, results)
        denominator.after(row_loss, loss)
        if row_z_loss is not None and z_loss is not None:
            denominator.after(row_z_loss, z_loss)
    value = None if options.reduction == "sum" else denominator.value
    return CrossEntropyForward(loss, lse, value, z_loss, prediction, correct)


def refuse_float64(logits: Tensor) -> None:
    """The kernels compute in float32."""
    if logits.dtype == torch.float64:
        raise UnsupportedInput("the Triton kernels take float16, bfloat16 and float32, got float64")


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
    vector, edges = alignment(logits, grad)
    if grad is None:
        schedule = forward_schedule(classes, logits.element_size())
        cross_entropy_fwd_kernel[(rows,)](
            logits, target, results.row_loss, results.lse,
            classes, logits.stride(0), options.ignore_index, options.logit_scale,
            vector, edges, schedule.block, num_warps=schedule.warps,
        )  # fmt: skip
        return
    schedule = gradient_schedule(classes, logits.element_size())
    cross_entropy_fwd_grad_kernel[(rows,)](
        logits, target, denominator, finished, results.row_loss, results.lse, grad, results.loss,
        rows, classes, logits.stride(0), grad.stride(0), options.ignore_index, options.logit_scale,
        vector, edges, schedule.block, schedule.stages, num_warps=schedule.warps,
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
    choose = forward_schedule if grad is None else gradient_schedule
    schedule = choose(classes, logits.element_size())
    cross_entropy_options_fwd_kernel[(rows,)](
        logits, target, weight, denominator, finished,
        results.row_loss, results.lse, grad, results.loss,
        results.row_z_loss, results.z_loss, results.prediction, results.correct,
        rows, classes, logits.stride(0), 0 if grad is None else grad.stride(0),
        options.ignore_index, options.label_smoothing, options.z_loss, options.softcap or 0.0, options.logit_scale,
        weight is not None, options.label_smoothing > 0, options.softcap is not None,
        results.prediction is not None, grad is not None,
        vector, edges, schedule.block, num_warps=schedule.warps,
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
    schedule = backward_schedule(classes, logits.element_size())
    cross_entropy_bwd_kernel[(programs(rows, logits.device, schedule),)](
        grad_loss, logits, target, weight, lse, denominator, grad,
        rows, classes, grad_loss.stride(0) if options.reduction == "none" else 0, logits.stride(0), grad.stride(0),
        options.ignore_index, options.label_smoothing, options.z_loss, options.softcap or 0.0, options.logit_scale,
        weight is not None, options.label_smoothing > 0, options.softcap is not None, skip_if_one,
        vector, edges, schedule.block, num_warps=schedule.warps,
    )  # fmt: skip


def cross_entropy_rescale(grad_loss: Tensor, grad: Tensor) -> None:
    """See ``loss_core.backend``. One launch."""
    rows, classes = grad.shape
    if not rows:
        return
    schedule = backward_schedule(classes, grad.element_size())
    cross_entropy_rescale_kernel[(programs(rows, grad.device, schedule),)](
        grad_loss, grad, rows, classes, grad.stride(0), schedule.block, num_warps=schedule.warps
    )
