"""Cross-entropy with the options that the plain kernels leave out: weights, smoothing, z-loss, cap, statistics.

With x = softcap * tanh(logit_scale * logits / softcap), e the smoothing, w the class
weights, V the classes and y the target,

    loss = (1 - e) w[y] (lse - x[y]) + (e / V) sum_c w[c] (lse - x[c]) + z lse**2
    d loss / d x[c] = A softmax(x)[c] - (1 - e) w[y] [c == y] - (e / V) w[c]
    A = (1 - e) w[y] + (e / V) sum(w) + 2 z lse
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from loss_core.backend import CrossEntropyOptions

from loss_triton.denominator import (
    count_alone,
    denominator_of_gradient,
    end_counting,
    start_counting,
)
from loss_triton.launch import kernel
from loss_triton.reduction import store_loss
from loss_triton.rows import (
    LOG2_E,
    block_columns,
    body_of,
    edge_columns,
    finite_or_zero,
    online_sum,
    row_of,
    softcapped,
    vectors,
    zero_row,
)
from loss_triton.total import publish, sum_of_slices, sum_slice, words_of


@triton.jit
def _all_max(x):
    return tl.max(tl.max(x, 1), 0)


@triton.jit
def _all_sum(x):
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def _order(x):
    """Integers in the order of x, NaN above all as in torch.argmax."""
    # The sum makes -0.0 the 0.0 that it equals.
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x != x, 2147483647, tl.where(bits < 0, bits ^ 2147483647, bits))


@triton.jit
def _place(target, classes, first_class, total_classes, SHARD: tl.constexpr):
    """The target's column, whether it is one of this row's, and whether there is such a class."""
    if SHARD:
        column = target - first_class
        here = (column >= 0) & (column < classes)
        valid = (target >= 0) & (target < total_classes)
    else:
        column = target
        here = (target >= 0) & (target < classes)
        valid = here
    return column, here, valid


@triton.jit
def _take(
    scaled, columns, inside, state, weight_ptr, softcap,
    HAS_WEIGHT: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    """Take a block into the running state, and return x with -inf where not `inside`.

    The state: maximum; sum of exp(x - maximum); sum of w (x - maximum) and of w; order of the largest scaled logit
    and its column.
    """
    maximum, total, deviation, mass, best, best_column = state
    x = softcapped(scaled, softcap) if CAPPED else scaled
    x = tl.where(inside, x, float("-inf"))
    larger = tl.maximum(maximum, _all_max(x))
    finite = finite_or_zero(larger)
    total = total * tl.exp2((maximum - finite) * LOG2_E) + _all_sum(tl.exp2((x - finite) * LOG2_E))
    if SMOOTH:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0) if HAS_WEIGHT else 1.0
        deviation += mass * (finite_or_zero(maximum) - finite) + _all_sum(tl.where(inside, weight * (x - finite), 0.0))
        mass += _all_sum(tl.where(inside, weight, 0.0))
    if STATS:
        key = tl.where(inside, _order(scaled), -2147483648)
        block_best = _all_max(key)
        column = tl.min(tl.min(tl.where(inside & (key == block_best), columns, 2147483647), 1), 0)
        better = (block_best > best) | ((block_best == best) & (column < best_column))
        best = tl.where(better, block_best, best)
        best_column = tl.where(better, column, best_column)
    return x, (larger, total, deviation, mass, best, best_column)


@triton.jit
def _gradient(
    x, columns, inside, peak, column, of_softmax, of_target, of_each, factor, weight_ptr, softcap,
    HAS_WEIGHT: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """factor * d loss / d (logit_scale * logits) of a block of x; column: where the target is.

    of_softmax: of exp(x - peak).
    """
    grad = tl.exp2((x - peak) * LOG2_E) * of_softmax - tl.where(columns == column, of_target, 0.0)
    if SMOOTH:
        grad -= of_each * tl.load(weight_ptr + columns, mask=inside, other=0.0) if HAS_WEIGHT else of_each
    if CAPPED:
        capped = x / softcap
        grad *= 1.0 - capped * capped
    return grad * factor


@kernel
def cross_entropy_options_fwd_kernel(
    logits_ptr, target_ptr, weight_ptr, workspace_ptr, of_row_ptr, denominator_ptr,
    lse_ptr, grad_ptr, loss_ptr, z_loss_ptr, prediction_ptr, correct_ptr,
    rows, classes, logits_stride: tl.int64, grad_stride: tl.int64, ignore_index: tl.int64,
    first_class: tl.int64, total_classes: tl.int64,
    label_smoothing: tl.float32, z_loss: tl.float32, softcap: tl.float32, logit_scale: tl.float32, number: tl.float32,
    REDUCE: tl.constexpr, KIND: tl.constexpr, PATIENCE: tl.constexpr, HAS_WEIGHT: tl.constexpr, SMOOTH: tl.constexpr,
    CAPPED: tl.constexpr, SHARD: tl.constexpr, STATS: tl.constexpr, GRAD: tl.constexpr,
    VECTOR: tl.constexpr, EDGES: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    """The loss of this module's docstring, one program per row; with GRAD also its gradient / denominator.

    Pointers as in the plain kernels, and weight_ptr: (classes,) float32. With STATS z_loss_ptr: as loss_ptr,
    prediction_ptr: (rows,) int64, correct_ptr: (rows,) bool. With SHARD the classes are those from first_class on of
    total_classes.
    """
    row = tl.program_id(0)
    target, live, row_ptr, head, body = row_of(
        logits_ptr, target_ptr, row, classes, logits_stride, ignore_index, VECTOR, EDGES
    )
    # The blocks before the held part are read without a mask, so they may not reach beyond it.
    tl.static_assert(BLOCK <= HOLD)
    blocks = tl.cdiv(tl.maximum(body - HOLD, 0), BLOCK)
    held_columns = block_columns(blocks * BLOCK, HOLD, LANES * VECTOR)
    in_held = held_columns < body
    loss = 0.0
    lse = 0.0
    row_z_loss = 0.0
    if GRAD:
        words = start_counting(workspace_ptr, target_ptr, rows, ignore_index, KIND, LANES)
        counted = count_alone(words, rows, KIND)
        denominator = denominator_of_gradient(
            counted, workspace_ptr, target_ptr, of_row_ptr, number, rows, ignore_index, KIND, PATIENCE, LANES
        )
    if live or STATS:
        state = (float("-inf"), 0.0, 0.0, 0.0, -2147483648, 2147483647)
        for block in range(blocks):
            columns = block_columns(block * BLOCK, BLOCK, LANES * VECTOR)
            scaled = tl.load(vectors(row_ptr + head, columns, VECTOR)).to(tl.float32) * logit_scale
            _, state = _take(
                scaled, head + columns, columns < body, state, weight_ptr, softcap, HAS_WEIGHT, SMOOTH, CAPPED, STATS
            )
        held = tl.load(vectors(row_ptr + head, held_columns, VECTOR), mask=in_held, other=0.0)
        x_held, state = _take(
            held.to(tl.float32) * logit_scale, head + held_columns, in_held, state, weight_ptr, softcap,
            HAS_WEIGHT, SMOOTH, CAPPED, STATS,
        )  # fmt: skip
        if EDGES:
            edges, in_edge = edge_columns(head, body, classes, VECTOR)
            edge = tl.load(row_ptr + edges, mask=in_edge, other=0.0).to(tl.float32) * logit_scale
            x_edge, state = _take(edge, edges, in_edge, state, weight_ptr, softcap, HAS_WEIGHT, SMOOTH, CAPPED, STATS)
        maximum, total, deviation, mass, best, best_column = state
        # Differences are taken to the maximum: an lse far from zero has lost the digits of log(total).
        peak = finite_or_zero(maximum)
        lse = peak + tl.log(total)
        if STATS:
            tl.store(prediction_ptr + row, best_column.to(tl.int64))
            tl.store(correct_ptr + row, live & (best_column == target))
        if live:
            column, here, valid = _place(target, classes, first_class, total_classes, SHARD)
            # A target out of range reads nothing and makes its row NaN; one of another shard is left to it.
            x_target = tl.load(row_ptr + column, mask=here, other=0.0).to(tl.float32) * logit_scale
            if CAPPED:
                x_target = softcapped(x_target, softcap)
            x_target = tl.where(valid, x_target, float("nan"))
            weight = tl.load(weight_ptr + target, mask=valid, other=0.0) if HAS_WEIGHT else 1.0
            of_target = (1.0 - label_smoothing) * weight
            row_z_loss = z_loss * lse * lse
            loss = -x_target if SHARD else of_target * (tl.log(total) - (x_target - peak)) + row_z_loss
            of_softmax = of_target + 2.0 * z_loss * lse
            of_each = label_smoothing / classes
            if SMOOTH:
                loss += of_each * (mass * tl.log(total) - deviation)
                of_softmax += of_each * mass
            of_softmax = of_softmax / total
            if GRAD:
                factor = tl.where(valid, logit_scale / denominator, float("nan"))
                grad_row_ptr = grad_ptr + tl.cast(row, tl.int64) * grad_stride
                held_grad = _gradient(
                    x_held, head + held_columns, in_held, peak, column, of_softmax, of_target, of_each, factor,
                    weight_ptr, softcap, HAS_WEIGHT, SMOOTH, CAPPED,
                ).to(grad_ptr.dtype.element_ty)  # fmt: skip
                tl.store(vectors(grad_row_ptr + head, held_columns, VECTOR), held_grad, mask=in_held)
                for block in range(blocks):
                    columns = block_columns((blocks - 1 - block) * BLOCK, BLOCK, LANES * VECTOR)
                    x = tl.load(vectors(row_ptr + head, columns, VECTOR)).to(tl.float32) * logit_scale
                    if CAPPED:
                        x = softcapped(x, softcap)
                    grad = _gradient(
                        x, head + columns, columns < body, peak, column, of_softmax, of_target, of_each, factor,
                        weight_ptr, softcap, HAS_WEIGHT, SMOOTH, CAPPED,
                    ).to(grad_ptr.dtype.element_ty)  # fmt: skip
                    tl.store(vectors(grad_row_ptr + head, columns, VECTOR), grad)
                if EDGES:
                    edge_grad = _gradient(
                        x_edge, edges, in_edge, peak, column, of_softmax, of_target, of_each, factor,
                        weight_ptr, softcap, HAS_WEIGHT, SMOOTH, CAPPED,
                    ).to(grad_ptr.dtype.element_ty)  # fmt: skip
                    tl.store(grad_row_ptr + edges, edge_grad, mask=in_edge)
    if GRAD and not live:
        zero_row(grad_ptr + tl.cast(row, tl.int64) * grad_stride, classes, head, body, VECTOR, EDGES, LANES, BLOCK)
    tl.store(lse_ptr + row, lse)
    if REDUCE:
        losses_ptr = words_of(workspace_ptr, rows, 0)
        publish(losses_ptr, row, loss, live)
        if STATS:
            publish(words_of(workspace_ptr, rows, 1), row, row_z_loss, live)
            sum_slice(words_of(workspace_ptr, rows, 1), row, rows, LANES)
        sum_slice(losses_ptr, row, rows, LANES)
        if row == rows - 1:
            live_rows, divisor = store_loss(
                losses_ptr, target_ptr, of_row_ptr, denominator_ptr, 0, loss_ptr,
                number, rows, classes, ignore_index, KIND, LANES,
            )  # fmt: skip
            if STATS:
                sum_of_z_losses, _ = sum_of_slices(words_of(workspace_ptr, rows, 1), rows)
                tl.store(z_loss_ptr, sum_of_z_losses / divisor)
            if GRAD:
                end_counting(workspace_ptr, live_rows, rows, KIND)
    else:
        tl.store(loss_ptr + row, loss)
        if STATS:
            tl.store(z_loss_ptr + row, row_z_loss)


@triton.jit
def _peak_and_total(
    row_ptr, head, body, classes, logit_scale, softcap,
    CAPPED: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The maximum of a row's x, 0 where there is none, and the sum of exp(x - maximum)."""
    # Small, for a kernel that seldom comes here should not have more registers for it.
    BLOCK: tl.constexpr = LANES * VECTOR
    peaks = tl.full((LANES,), float("-inf"), tl.float32)
    totals = tl.zeros((LANES,), tl.float32)
    for start in range(0, body, BLOCK):
        columns = block_columns(start, BLOCK, BLOCK)
        inside = columns < body
        x = tl.load(vectors(row_ptr + head, columns, VECTOR), mask=inside, other=0.0).to(tl.float32) * logit_scale
        if CAPPED:
            x = softcapped(x, softcap)
        peaks, totals = online_sum(tl.where(inside, x, float("-inf")), peaks, totals, LOG2_E, LANES, VECTOR)
    peak = tl.max(peaks, 0)
    if EDGES:
        edges, in_edge = edge_columns(head, body, classes, VECTOR)
        x_edge = tl.load(row_ptr + edges, mask=in_edge, other=0.0).to(tl.float32) * logit_scale
        if CAPPED:
            x_edge = softcapped(x_edge, softcap)
        x_edge = tl.where(in_edge, x_edge, float("-inf"))
        peak = tl.maximum(peak, _all_max(x_edge))
    peak = finite_or_zero(peak)
    total = tl.sum(totals * tl.exp2((peaks - peak) * LOG2_E), 0)
    if EDGES:
        total += _all_sum(tl.exp2((x_edge - peak) * LOG2_E))
    return peak, total


@kernel
def cross_entropy_bwd_kernel(
    grad_loss_ptr, logits_ptr, target_ptr, weight_ptr, lse_ptr, denominator_ptr, grad_ptr,
    rows, classes, grad_loss_stride: tl.int64, logits_stride: tl.int64, grad_stride: tl.int64, denominator_at,
    ignore_index: tl.int64, first_class: tl.int64, total_classes: tl.int64,
    label_smoothing: tl.float32, z_loss: tl.float32, softcap: tl.float32, logit_scale: tl.float32,
    HAS_WEIGHT: tl.constexpr, SMOOTH: tl.constexpr, CAPPED: tl.constexpr, SHARD: tl.constexpr,
    SKIP_IF_ONE: tl.constexpr,
    VECTOR: tl.constexpr, EDGES: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """grad = grad_loss * d loss / d logits, from the logits and their saved lse; the plain case is one of its options.

    One program takes every num_programs-th row. With SKIP_IF_ONE grad_ptr holds the result for a grad_loss of 1.

    grad_loss_ptr: one element, or with grad_loss_stride one per row; float. lse_ptr: (rows,) float32.
    denominator_ptr: None or float32, of which it is the element denominator_at. Others as above.
    """
    # Usually it follows the fill of grad_loss and leaves at once: most of its time is that of being launched.
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    if SKIP_IF_ONE:
        if tl.load(grad_loss_ptr).to(tl.float32) == 1.0:
            return
    denominator = 1.0 if denominator_ptr is None else tl.load(denominator_ptr + denominator_at)
    mass = tl.cast(classes, tl.float32) if SMOOTH else 0.0
    if HAS_WEIGHT and SMOOTH:
        partial = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, classes, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            partial += tl.load(weight_ptr + columns, mask=columns < classes, other=0.0)
        mass = tl.sum(partial, 0)
    of_each = label_smoothing / classes
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        target = tl.load(target_ptr + row).to(tl.int64)
        row_ptr = logits_ptr + tl.cast(row, tl.int64) * logits_stride
        grad_row_ptr = grad_ptr + tl.cast(row, tl.int64) * grad_stride
        head, body = body_of(row_ptr, classes, VECTOR, EDGES)
        if target != ignore_index:
            lse = tl.load(lse_ptr + row)
            column, _, valid = _place(target, classes, first_class, total_classes, SHARD)
            upstream = tl.load(grad_loss_ptr + tl.cast(row, tl.int64) * grad_loss_stride).to(tl.float32)
            factor = tl.where(valid, logit_scale * upstream / denominator, float("nan"))
            weight = tl.load(weight_ptr + target, mask=valid, other=0.0) if HAS_WEIGHT else 1.0
            of_target = (1.0 - label_smoothing) * weight
            of_softmax = of_target + of_each * mass + 2.0 * z_loss * lse
            peak = lse
            # The rounding of an lse is one of every exp(x - lse); where it would show, the row is summed again. The lse
            # of a shard is that of all shards, which this one cannot sum.
            LARGE_LSE: tl.constexpr = 64.0 if grad_ptr.dtype.element_ty.primitive_bitwidth == 32 else 1024.0
            if not SHARD:
                if tl.abs(lse) > LARGE_LSE:
                    peak, total = _peak_and_total(
                        row_ptr, head, body, classes, logit_scale, softcap, CAPPED, VECTOR, EDGES, LANES
                    )
                    of_softmax = of_softmax / total
            for start in range(0, body, BLOCK):
                columns = block_columns(start, BLOCK, LANES * VECTOR)
                inside = columns < body
                x = tl.load(vectors(row_ptr + head, columns, VECTOR), mask=inside, other=0.0)
                x = x.to(tl.float32) * logit_scale
                if CAPPED:
                    x = softcapped(x, softcap)
                grad = _gradient(
                    x, head + columns, inside, peak, column, of_softmax, of_target, of_each, factor,
                    weight_ptr, softcap, HAS_WEIGHT, SMOOTH, CAPPED,
                ).to(grad_ptr.dtype.element_ty)  # fmt: skip
                tl.store(vectors(grad_row_ptr + head, columns, VECTOR), grad, mask=inside)
            if EDGES:
                edges, in_edge = edge_columns(head, body, classes, VECTOR)
                x = tl.load(row_ptr + edges, mask=in_edge, other=0.0).to(tl.float32) * logit_scale
                if CAPPED:
                    x = softcapped(x, softcap)
                edge_grad = _gradient(
                    x, edges, in_edge, peak, column, of_softmax, of_target, of_each, factor,
                    weight_ptr, softcap, HAS_WEIGHT, SMOOTH, CAPPED,
                ).to(grad_ptr.dtype.element_ty)  # fmt: skip
                tl.store(grad_row_ptr + edges, edge_grad, mask=in_edge)
        else:
            zero_row(grad_row_ptr, classes, head, body, VECTOR, EDGES, LANES, BLOCK)


@kernel
def cross_entropy_rescale_live_kernel(
    grad_loss_ptr, grad_ptr, target_ptr, rows, classes, grad_stride: tl.int64, ignore_index: tl.int64,
    VECTOR: tl.constexpr, EDGES: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """grad *= grad_loss in rows that are not ignored, unless that is 1. One program takes every num_programs-th row.

    grad_loss_ptr: one element, float. grad_ptr: (rows, classes), float. target_ptr: (rows,), int32, int64 or uint8.
    """
    # As in the backward kernel.
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    grad_loss = tl.load(grad_loss_ptr).to(tl.float32)
    if grad_loss == 1.0:
        return
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        # The zeros of an ignored row would become NaN if grad_loss is not finite.
        if tl.load(target_ptr + row).to(tl.int64) != ignore_index:
            row_ptr = grad_ptr + tl.cast(row, tl.int64) * grad_stride
            head, body = body_of(row_ptr, classes, VECTOR, EDGES)
            for start in range(0, body, BLOCK):
                columns = block_columns(start, BLOCK, LANES * VECTOR)
                pointers = vectors(row_ptr + head, columns, VECTOR)
                grad = tl.load(pointers, mask=columns < body).to(tl.float32) * grad_loss
                tl.store(pointers, grad.to(grad_ptr.dtype.element_ty), mask=columns < body)
            if EDGES:
                edges, in_edge = edge_columns(head, body, classes, VECTOR)
                edge_grad = tl.load(row_ptr + edges, mask=in_edge).to(tl.float32) * grad_loss
                tl.store(row_ptr + edges, edge_grad.to(grad_ptr.dtype.element_ty), mask=in_edge)


@functools.lru_cache(4096)
def numbers_of(options: CrossEntropyOptions, classes: int) -> tuple[float, ...]:
    """The kernels' arguments from ignore_index to logit_scale."""
    ignore_index, _, label_smoothing, z_loss, softcap, logit_scale, first_class, total_classes = options
    return ignore_index, first_class, total_classes or classes, label_smoothing, z_loss, softcap or 0.0, logit_scale
