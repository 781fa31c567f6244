"""Cross-entropy's plain case, for rows that registers hold: of one program, or in parts of several.

A row that one program reads in two sweeps comes from memory once and from L2 again, which sets the pace where much is
read again. Here all of it is asked for at once and kept; where programs share a row, each asks the others for their
maximum and sum, see ``parts``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loss_triton.denominator import (
    denominator_of_gradient,
    end_counting,
    start_counting,
    sum_and_count,
)
from loss_triton.launch import kernel
from loss_triton.parts import (
    BESIDE_A_RESULT,
    clear,
    edges_of_part,
    load_edges,
    load_part,
    load_part_if,
    message_of,
    peak_and_total,
    peak_of_part,
    store_chunk,
    tell,
    total_of_edges,
    totals_of_part,
    words_of_row,
)
from loss_triton.reduction import store_loss, store_row
from loss_triton.rows import (
    LOG2_E,
    argument_of,
    finite_or_zero,
    foresee,
    fused,
    opaque,
    row_of,
)
from loss_triton.total import publish, sum_slice, words_of


@triton.jit
def _write_part(
    grad_row_ptr, held, x_edge, peak, total, valid, log2_scale, of_target, head, body, classes, part,
    VECTOR: tl.constexpr, EDGES: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Write of_target * softmax(x)."""
    of_softmax = tl.where(valid, of_target / total, float("nan"))
    power, bias, factor = argument_of(peak, log2_scale)
    of_power = of_softmax * factor
    for chunk in tl.static_range(CHUNKS):
        grad = tl.exp2(fused(opaque(held[chunk]).to(tl.float32), power, bias)) * of_power
        store_chunk(grad_row_ptr, grad, head, body, part, chunk, VECTOR, WIDTH, CHUNKS)
    if EDGES:
        edges, in_edge = edges_of_part(head, body, classes, part, VECTOR)
        edge_grad = (tl.exp2(fused(x_edge, power, bias)) * of_power).to(grad_row_ptr.dtype.element_ty)
        tl.store(grad_row_ptr + edges, edge_grad, mask=in_edge)


@kernel
def cross_entropy_fwd_whole_kernel(
    logits_ptr, target_ptr, workspace_ptr, of_row_ptr, denominator_ptr, lse_ptr, loss_ptr,
    rows, classes, logits_stride: tl.int64, denominator_at, ignore_index: tl.int64,
    logit_scale: tl.float32, number: tl.float32,
    REDUCE: tl.constexpr, KIND: tl.constexpr, EVICT: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr,
    LANES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """loss = lse - x[target], as ``cross_entropy_fwd_kernel``, whose arguments it has. One program holds a row.

    CHUNKS: vectors of each of LANES lanes that a row is, and no fewer.
    """
    row = tl.program_id(0)
    target, live, row_ptr, head, body = row_of(
        logits_ptr, target_ptr, row, classes, logits_stride, ignore_index, VECTOR, EDGES
    )
    # All of the row, though it may be ignored: to wait for the target costs 3 to 8 points where nothing is written. No
    # branch on it either, into which the compiler would move what is asked for.
    held = load_part(
        row_ptr, head, body, 0, float("-inf"), VECTOR, LANES * VECTOR, CHUNKS, "evict_first" if EVICT else "",
        CHUNKS - 1 - EDGES,
    )  # fmt: skip
    x_edge = load_edges(row_ptr, head, body, classes, 0, float("-inf"), VECTOR, EDGES)
    # A target out of range reads nothing and makes its row NaN.
    valid = (target >= 0) & (target < classes)
    x_target = tl.load(row_ptr + target, mask=valid, other=float("nan")).to(tl.float32)
    log2_scale = logit_scale * LOG2_E
    peak = peak_of_part(held, x_edge, EDGES, LANES)
    total = tl.sum(totals_of_part(held, peak, log2_scale, LANES), 0)
    total += total_of_edges(x_edge, peak, log2_scale, EDGES)
    peak = finite_or_zero(peak)
    lse = tl.where(live, peak * logit_scale + tl.log(total), 0.0)
    loss = tl.where(live, tl.log(total) - (x_target - peak) * logit_scale, 0.0)
    tl.store(lse_ptr + row, lse)
    store_row(
        row, loss, live, workspace_ptr, target_ptr, of_row_ptr, denominator_ptr, denominator_at, loss_ptr,
        number, rows, classes, ignore_index, REDUCE, KIND, LANES,
    )  # fmt: skip


@kernel
def cross_entropy_fwd_grad_parts_kernel(
    logits_ptr, target_ptr, workspace_ptr, of_row_ptr, denominator_ptr, lse_ptr, grad_ptr, loss_ptr,
    rows, classes, logits_stride: tl.int64, grad_stride: tl.int64, denominator_at,
    ignore_index: tl.int64, logit_scale: tl.float32, number: tl.float32, parts, parts_at,
    KIND: tl.constexpr, PATIENCE: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr,
    LANES: tl.constexpr, CHUNKS: tl.constexpr, EARLY: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """grad = logit_scale * (softmax(x) - onehot(target)) / denominator, and loss. One program per part of a row.

    Arguments as those of ``cross_entropy_fwd_grad_kernel``, and in the workspace at parts_at the words of ``parts``.
    parts: of a row, CHUNKS vectors of each of LANES lanes; less than LANES, and without SHARED one.
    EARLY: of a row that is ignored one chunk in so many is read nevertheless.
    """
    WIDTH: tl.constexpr = LANES * VECTOR
    row = tl.program_id(0) // parts if SHARED else tl.program_id(0)
    part = tl.program_id(0) % parts if SHARED else 0
    target, live, row_ptr, head, body = row_of(
        logits_ptr, target_ptr, row, classes, logits_stride, ignore_index, VECTOR, EDGES
    )
    grad_row_ptr = grad_ptr + tl.cast(row, tl.int64) * grad_stride
    held = load_part_if(live, row_ptr, head, body, part, float("-inf"), VECTOR, WIDTH, CHUNKS, EARLY, BESIDE_A_RESULT)
    x_edge = load_edges(row_ptr, head, body, classes, part, float("-inf"), VECTOR, EDGES)
    if EARLY > 1:
        foresee(target_ptr, row, rows, LANES)
    words = start_counting(workspace_ptr, target_ptr, rows, ignore_index, KIND, LANES)

    valid = (target >= 0) & (target < classes)
    # Who has the target's column writes its gradient and tells the loss; of a row without one, the first part.
    place = target - head
    in_part = (place >= 0) & (place < body) & (place // (WIDTH * CHUNKS) == part)
    in_edge = (place < 0) | (place >= body)
    tells = tl.where(valid & live, in_part | (in_edge & (part == 0)), part == 0)
    losses_ptr = words_of(workspace_ptr, rows, 0)
    if live:
        # A target out of range reads nothing and makes its row NaN, the gradient too.
        x_target = tl.load(row_ptr + target, mask=valid & tells, other=float("nan")).to(tl.float32)
        log2_scale = logit_scale * LOG2_E
        peak = peak_of_part(held, x_edge, EDGES, LANES)
        total, counted = sum_and_count(totals_of_part(held, peak, log2_scale, LANES), words, rows, KIND)
        total += total_of_edges(x_edge, peak, log2_scale, EDGES)
        of_target = logit_scale / denominator_of_gradient(
            counted, workspace_ptr, target_ptr, of_row_ptr, number, rows, ignore_index, KIND, PATIENCE, LANES
        )
        # What follows tells that this program has read the count, which is taken back once all rows are known.
        if SHARED:
            row_words_ptr = words_of_row(workspace_ptr + parts_at, row, parts)
            tell(row_words_ptr, part, message_of(peak, total))
            peak, total, left = peak_and_total(
                row_words_ptr, row_ptr, head, body, classes, parts, log2_scale, PATIENCE, VECTOR, EDGES, LANES, CHUNKS
            )  # fmt: skip
        peak = finite_or_zero(peak)
        if tells:
            tl.store(lse_ptr + row, peak * logit_scale + tl.log(total))
            publish(losses_ptr, row, tl.log(total) - (x_target - peak) * logit_scale, live)
        _write_part(
            grad_row_ptr, held, x_edge, peak, total, valid, log2_scale, of_target, head, body, classes, part,
            VECTOR, EDGES, WIDTH, CHUNKS,
        )  # fmt: skip
        if tells:
            # The target's element once more, which spares every other one the comparison.
            tl.debug_barrier()
            target_grad = tl.exp2((x_target - peak) * log2_scale) * (of_target / total) - of_target
            tl.store(grad_row_ptr + target, target_grad.to(grad_ptr.dtype.element_ty), mask=valid)
        if SHARED:
            clear(row_words_ptr, parts, left, LANES)
    else:
        for chunk in tl.static_range(CHUNKS):
            store_chunk(
                grad_row_ptr, tl.zeros((1, WIDTH), tl.float32), head, body, part, chunk, VECTOR, WIDTH, CHUNKS
            )  # fmt: skip
        if EDGES:
            edges, at_edge = edges_of_part(head, body, classes, part, VECTOR)
            edge_zeros = tl.zeros(edges.shape, grad_ptr.dtype.element_ty)
            tl.store(grad_row_ptr + edges, edge_zeros, mask=at_edge)
        if tells:
            tl.store(lse_ptr + row, 0.0)
            publish(losses_ptr, row, tl.zeros((), tl.float32), live)
    if part == parts - 1:
        sum_slice(losses_ptr, row, rows, LANES)
        if row == rows - 1:
            live_rows, _ = store_loss(
                losses_ptr, target_ptr, of_row_ptr, denominator_ptr, denominator_at, loss_ptr,
                number, rows, classes, ignore_index, KIND, LANES,
            )  # fmt: skip
            end_counting(workspace_ptr, live_rows, rows, KIND)
