"""Cross-entropy with the options that the plain kernels leave out: weights, smoothing, z-loss, cap, statistics.

With x = softcap * tanh(logit_scale * logits / softcap), e the smoothing, w the class
weights, V the classes and y the target,

    loss = (1 - e) w[y] (lse - x[y]) + (e / V) sum_c w[c] (lse - x[c]) + z lse**2
    d loss / d x[c] = A softmax(x)[c] - (1 - e) w[y] [c == y] - (e / V) w[c],  A = (1 - e) w[y] + (e / V) sum(w) + 2 z lse
"""

from __future__ import annotations

import triton
import triton.language as tl

from loss_triton.denominator import reduce_rows
from loss_triton.rows import LOG2_E, body_span, body_start, edge_columns, finite_or_zero, softcapped, zero_row


@triton.jit
def _take(
    scaled, columns, inside, state, weight_ptr, softcap,
    HAS_WEIGHT: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    """Take a block into the running state, and return x with -inf where not `inside`.

    The state: maximum; sum of exp(x - maximum); sum of w (x - maximum) and of w; largest scaled logit and its column.
    """
    maximum, total, deviation, mass, best, best_column = state
    x = softcapped(scaled, softcap) if CAPPED else scaled
    x = tl.where(inside, x, float("-inf"))
    larger = tl.maximum(maximum, tl.max(x, 0))
    finite = finite_or_zero(larger)
    total = total * tl.exp2((maximum - finite) * LOG2_E) + tl.sum(tl.exp2((x - finite) * LOG2_E), 0)
    if SMOOTH:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0) if HAS_WEIGHT else 1.0
        deviation += mass * (finite_or_zero(maximum) - finite) + tl.sum(tl.where(inside, weight * (x - finite), 0.0), 0)
        mass += tl.sum(tl.where(inside, weight, 0.0), 0)
    if STATS:
        # NaN counts as the largest, as in torch.argmax.
        key = tl.where(inside, tl.where(scaled != scaled, float("inf"), scaled), float("-inf"))
        block_best = tl.max(key, 0)
        column = tl.min(tl.where(inside & (key == block_best), columns, 2147483647), 0)
        better = (block_best > best) | ((block_best == best) & (column < best_column))
        best = tl.where(better, block_best, best)
        best_column = tl.where(better, column, best_column)
    return x, (larger, total, deviation, mass, best, best_column)


@triton.jit
def _gradient(
    x, columns, inside, lse, target, of_softmax, of_target, of_each, weight_ptr, softcap,
    HAS_WEIGHT: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """d loss / d (logit_scale * logits) of a block of x."""
    grad = tl.exp2((x - lse) * LOG2_E) * of_softmax - tl.where(columns == target, of_target, 0.0)
    if SMOOTH:
        grad -= of_each * tl.load(weight_ptr + columns, mask=inside, other=0.0) if HAS_WEIGHT else of_each
    if CAPPED:
        capped = x / softcap
        grad *= 1.0 - capped * capped
    return grad


@triton.jit(do_not_specialize=["ignore_index", "rows"])
def cross_entropy_options_fwd_kernel(
    logits_ptr, target_ptr, weight_ptr, denominator_ptr, finished_ptr,
    row_loss_ptr, lse_ptr, grad_ptr, loss_ptr, row_z_loss_ptr, z_loss_ptr, prediction_ptr, correct_ptr,
    rows, classes, logits_stride, grad_stride, ignore_index, label_smoothing, z_loss, softcap, logit_scale,
    HAS_WEIGHT: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr, STATS: tl.constexpr, GRAD: tl.constexpr,
    VECTOR: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss of this module's docstring, one program per row; with GRAD also its gradient / denominator.

    Pointers as in the plain kernels, and weight_ptr: (classes,) float32. With STATS row_z_loss_ptr: (rows,) float32,
    z_loss_ptr: () float32 (with GRAD), prediction_ptr: (rows,) int64, correct_ptr: (rows,) bool.
    """
    row = tl.program_id(0)
    target = tl.load(target_ptr + row).to(tl.int64)
    live = target != ignore_index
    head, body = body_span(row, logits_stride, classes, VECTOR, EDGES)
    body_ptr = logits_ptr + body_start(row, logits_stride, VECTOR, EDGES)
    row_ptr = logits_ptr + tl.cast(row, tl.int64) * logits_stride
    offsets = tl.arange(0, BLOCK)
    last = (tl.maximum(body, 1) - 1) // BLOCK * BLOCK
    loss = 0.0
    lse = 0.0
    row_z_loss = 0.0
    if live or STATS:
        state = (float("-inf"), 0.0, 0.0, 0.0, float("-inf"), 2147483647)
        for start in range(0, last, BLOCK):
            scaled = tl.load(body_ptr + start + offsets, eviction_policy="evict_last").to(tl.float32) * logit_scale
            _, state = _take(
                scaled, head + start + offsets, offsets < BLOCK, state, weight_ptr, softcap,
                HAS_WEIGHT, SMOOTH, CAPPED, STATS,
            )  # fmt: skip
        in_last = last + offsets < body
        scaled = tl.load(body_ptr + last + offsets, mask=in_last, other=0.0).to(tl.float32) * logit_scale
        x_last, state = _take(
            scaled, head + last + offsets, in_last, state, weight_ptr, softcap, HAS_WEIGHT, SMOOTH, CAPPED, STATS
        )
        if EDGES:
            columns, in_edge = edge_columns(head, body, classes, VECTOR)
            scaled = tl.load(row_ptr + columns, mask=in_edge, other=0.0).to(tl.float32) * logit_scale
            x_edge, state = _take(
                scaled, columns, in_edge, state, weight_ptr, softcap, HAS_WEIGHT, SMOOTH, CAPPED, STATS
            )
        maximum, total, deviation, mass, best, best_column = state
        lse = finite_or_zero(maximum) + tl.log(total)
        if STATS:
            tl.store(prediction_ptr + row, best_column.to(tl.int64))
            tl.store(correct_ptr + row, live & (best_column == target))
        if live:
            valid = (target >= 0) & (target < classes)
            # A target out of range reads nothing and makes its row NaN.
            x_target = tl.load(row_ptr + target, mask=valid, other=float("nan")).to(tl.float32) * logit_scale
            if CAPPED:
                x_target = softcapped(x_target, softcap)
            weight = tl.load(weight_ptr + target, mask=valid, other=0.0) if HAS_WEIGHT else 1.0
            of_target = (1.0 - label_smoothing) * weight
            row_z_loss = z_loss * lse * lse
            loss = of_target * (lse - x_target) + row_z_loss
            of_softmax = of_target + 2.0 * z_loss * lse
            of_each = label_smoothing / classes
            if SMOOTH:
                loss += of_each * (mass * tl.log(total) - deviation)
                of_softmax += of_each * mass
            if GRAD:
                factor = logit_scale / tl.load(denominator_ptr)
                factor = tl.where(valid, factor, float("nan"))
                grad_body_ptr = grad_ptr + body_start(row, grad_stride, VECTOR, EDGES)
                grad = _gradient(
                    x_last, head + last + offsets, in_last, lse, target, of_softmax, of_target, of_each,
                    weight_ptr, softcap, HAS_WEIGHT, SMOOTH, CAPPED,
                )  # fmt: skip
                tl.store(grad_body_ptr + last + offsets, (grad * factor).to(grad_ptr.dtype.element_ty), mask=in_last)
                for back in range(0, last, BLOCK):
                    start = last - BLOCK - back
                    x = tl.load(body_ptr + start + offsets, eviction_policy="evict_first").to(tl.float32) * logit_scale
                    if CAPPED:
                        x = softcapped(x, softcap)
                    grad = _gradient(
                        x, head + start + offsets, offsets < BLOCK, lse, target, of_softmax, of_target, of_each,
                        weight_ptr, softcap, HAS_WEIGHT, SMOOTH, CAPPED,
                    )  # fmt: skip
                    tl.store(grad_body_ptr + start + offsets, (grad * factor).to(grad_ptr.dtype.element_ty))
                if EDGES:
                    grad = _gradient(
                        x_edge, columns, in_edge, lse, target, of_softmax, of_target, of_each,
                        weight_ptr, softcap, HAS_WEIGHT, SMOOTH, CAPPED,
                    )  # fmt: skip
                    tl.store(
                        grad_ptr + tl.cast(row, tl.int64) * grad_stride + columns,
                        (grad * factor).to(grad_ptr.dtype.element_ty), mask=in_edge,
                    )  # fmt: skip
    if GRAD:
        if not live:
            zero_row(grad_ptr, row, classes, grad_stride, head, body, VECTOR, EDGES, BLOCK)
    tl.store(row_loss_ptr + row, loss)
    tl.store(lse_ptr + row, lse)
    if STATS:
        tl.store(row_z_loss_ptr + row, row_z_loss)
    if GRAD:
        # Released with the row losses, acquired before they are read.
        if tl.atomic_add(finished_ptr, 1, sem="acq_rel") == rows - 1:
            denominator = tl.load(denominator_ptr)
            tl.store(loss_ptr, reduce_rows(row_loss_ptr, rows) / denominator)
            if STATS:
                tl.store(z_loss_ptr, reduce_rows(row_z_loss_ptr, rows) / denominator)


@triton.jit(do_not_specialize=["ignore_index", "rows"])
def cross_entropy_bwd_kernel(
    grad_loss_ptr, logits_ptr, target_ptr, weight_ptr, lse_ptr, denominator_ptr, grad_ptr,
    rows, classes, grad_loss_stride, logits_stride, grad_stride,
    ignore_index, label_smoothing, z_loss, softcap, logit_scale,
    HAS_WEIGHT: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr, SKIP_IF_ONE: tl.constexpr,
    VECTOR: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grad = grad_loss * d loss / d logits, from the logits and their saved lse; the plain case is one of its options.

    One program takes every num_programs-th row. With SKIP_IF_ONE grad_ptr holds the result for a grad_loss of 1.

    grad_loss_ptr: one element, or with grad_loss_stride one per row; float. lse_ptr: (rows,) float32.
    denominator_ptr: None or (1,) float32. Others as above.
    """
    if SKIP_IF_ONE:
        if tl.load(grad_loss_ptr).to(tl.float32) == 1.0:
            return
    denominator = 1.0 if denominator_ptr is None else tl.load(denominator_ptr)
    offsets = tl.arange(0, BLOCK)
    mass = tl.cast(classes, tl.float32) if SMOOTH else 0.0
    if HAS_WEIGHT and SMOOTH:
        partial = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, classes, BLOCK):
            partial += tl.load(weight_ptr + start + offsets, mask=start + offsets < classes, other=0.0)
        mass = tl.sum(partial, 0)
    of_each = label_smoothing / classes
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        target = tl.load(target_ptr + row).to(tl.int64)
        head, body = body_span(row, logits_stride, classes, VECTOR, EDGES)
        if target != ignore_index:
            lse = tl.load(lse_ptr + row)
            valid = (target >= 0) & (target < classes)
            upstream = tl.load(grad_loss_ptr + tl.cast(row, tl.int64) * grad_loss_stride).to(tl.float32)
            factor = tl.where(valid, logit_scale * upstream / denominator, float("nan"))
            weight = tl.load(weight_ptr + target, mask=valid, other=0.0) if HAS_WEIGHT else 1.0
            of_target = (1.0 - label_smoothing) * weight
            of_softmax = of_target + of_each * mass + 2.0 * z_loss * lse
            body_ptr = logits_ptr + body_start(row, logits_stride, VECTOR, EDGES)
            grad_body_ptr = grad_ptr + body_start(row, grad_stride, VECTOR, EDGES)
            for start in range(0, body, BLOCK):
                inside = start + offsets < body
                x = tl.load(body_ptr + start + offsets, mask=inside, other=0.0).to(tl.float32) * logit_scale
                if CAPPED:
                    x = softcapped(x, softcap)
                grad = _gradient(
                    x, head + start + offsets, inside, lse, target, of_softmax, of_target, of_each,
                    weight_ptr, softcap, HAS_WEIGHT, SMOOTH, CAPPED,
                )  # fmt: skip
                tl.store(grad_body_ptr + start + offsets, (grad * factor).to(grad_ptr.dtype.element_ty), mask=inside)
            if EDGES:
                columns, in_edge = edge_columns(head, body, classes, VECTOR)
                x = tl.load(logits_ptr + tl.cast(row, tl.int64) * logits_stride + columns, mask=in_edge, other=0.0)
                x = x.to(tl.float32) * logit_scale
                if CAPPED:
                    x = softcapped(x, softcap)
                grad = _gradient(
                    x, columns, in_edge, lse, target, of_softmax, of_target, of_each,
                    weight_ptr, softcap, HAS_WEIGHT, SMOOTH, CAPPED,
                )  # fmt: skip
                tl.store(
                    grad_ptr + tl.cast(row, tl.int64) * grad_stride + columns,
                    (grad * factor).to(grad_ptr.dtype.element_ty), mask=in_edge,
                )  # fmt: skip
        else:
            zero_row(grad_ptr, row, classes, grad_stride, head, body, VECTOR, EDGES, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def cross_entropy_rescale_kernel(grad_loss_ptr, grad_ptr, rows, classes, grad_stride, BLOCK: tl.constexpr):
    """grad *= grad_loss, unless that is 1. One program takes every num_programs-th row.

    grad_loss_ptr: one element, float. grad_ptr: (rows, classes), float.
    """
    grad_loss = tl.load(grad_loss_ptr).to(tl.float32)
    if grad_loss == 1.0:
        return
    offsets = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        row_ptr = grad_ptr + tl.cast(row, tl.int64) * grad_stride
        for start in range(0, classes, BLOCK):
            inside = start + offsets < classes
            grad = tl.load(row_ptr + start + offsets, mask=inside).to(tl.float32) * grad_loss
            tl.store(row_ptr + start + offsets, grad.to(grad_ptr.dtype.element_ty), mask=inside)
