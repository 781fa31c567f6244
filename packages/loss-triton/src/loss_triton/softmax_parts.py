"""Softmax and log-softmax over rows that registers hold: of one program, or in parts of several; see ``parts``."""

from __future__ import annotations

import triton
import triton.language as tl

from loss_triton.launch import kernel
from loss_triton.parts import (
    BESIDE_A_RESULT,
    chunks_of,
    clear,
    edges_of_part,
    learnt,
    load_chunk,
    load_edges,
    load_part,
    message_of,
    numbers_of,
    peak_and_total,
    peak_of_part,
    store_chunk,
    tell,
    total_of_edges,
    totals_of_part,
    words_of_row,
)
from loss_triton.rows import LOG2_E, body_of, lane_sum, opaque, opaque_until
from loss_triton.softmax_math import input_gradient, normalization, normalized_row, summand


@triton.jit
def _store_edges(row_ptr, values, head, body, classes, part, VECTOR: tl.constexpr, EDGES: tl.constexpr):
    if EDGES:
        edges, in_edge = edges_of_part(head, body, classes, part, VECTOR)
        tl.store(row_ptr + edges, values.to(row_ptr.dtype.element_ty), mask=in_edge)


@triton.jit
def _again(x, total, LATE: tl.constexpr):
    """A chunk in float32, for the second time; LATE: not before the sum is known."""
    if LATE:
        return opaque_until(x, total).to(tl.float32)
    else:
        return opaque(x).to(tl.float32)


@kernel
def softmax_fwd_parts_kernel(
    input_ptr, output_ptr, workspace_ptr,
    classes, input_stride: tl.int64, output_stride: tl.int64, parts,
    LOG: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr,
    PATIENCE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """y = exp(x - max(x)) / sum(exp(x - max(x))), or its logarithm. One program per part of a row.

    input_ptr, output_ptr: (rows, classes), floating point. workspace_ptr: with SHARED int64 zeros, left so.
    parts: of a row, CHUNKS vectors of each of LANES lanes; less than LANES, and without SHARED one, of no fewer chunks.
    """
    WIDTH: tl.constexpr = LANES * VECTOR
    # Log-softmax's results could be had before the sum is known, but for the registers that they would take.
    LATE: tl.constexpr = LOG and not SHARED
    FULL: tl.constexpr = CHUNKS - 1 - EDGES if LATE else 0
    row = (tl.program_id(0) // parts if SHARED else tl.program_id(0)).to(tl.int64)
    part = tl.program_id(0) % parts if SHARED else 0
    x_row = input_ptr + row * input_stride
    head, body = body_of(x_row, classes, VECTOR, EDGES)
    held = load_part(x_row, head, body, part, float("-inf"), VECTOR, WIDTH, CHUNKS, BESIDE_A_RESULT, FULL)
    x_edge = load_edges(x_row, head, body, classes, part, float("-inf"), VECTOR, EDGES)

    peak = peak_of_part(held, x_edge, EDGES, LANES)
    total = tl.sum(totals_of_part(held, peak, LOG2_E, LANES), 0)
    total += total_of_edges(x_edge, peak, LOG2_E, EDGES)
    if SHARED:
        words_ptr = words_of_row(workspace_ptr, row, parts)
        tell(words_ptr, part, message_of(peak, total))
        peak, total, left = peak_and_total(
            words_ptr, x_row, head, body, classes, parts, LOG2_E, PATIENCE, VECTOR, EDGES, LANES, CHUNKS
        )  # fmt: skip

    # Rounded to float32 a probability of 1 would show the approximation.
    FUSED: tl.constexpr = not LOG and output_ptr.dtype.element_ty.primitive_bitwidth == 16
    # A row of -inf has -inf - -inf = NaN here, as it should.
    power, bias, normalizer = normalization(peak, total, LOG, FUSED)
    y_row = output_ptr + row * output_stride
    for chunk in tl.static_range(CHUNKS):
        x = _again(held[chunk], total, LATE)
        y = normalized_row(x, power, bias, normalizer, LOG, FUSED)
        store_chunk(y_row, y, head, body, part, chunk, VECTOR, WIDTH, CHUNKS, FULL)
    y_edge = normalized_row(x_edge, power, bias, normalizer, LOG, FUSED)
    _store_edges(y_row, y_edge, head, body, classes, part, VECTOR, EDGES)
    if SHARED:
        clear(words_ptr, parts, left, LANES)


@triton.jit
def _sums_of_chunk(g, y, LOG: tl.constexpr, LANES: tl.constexpr):
    return lane_sum(summand(g.to(tl.float32), y.to(tl.float32), LOG), LANES)


@triton.jit
def _sum_of_part(totals, g_edge, y_edge, LOG: tl.constexpr, EDGES: tl.constexpr):
    total = tl.sum(totals, 0)
    if EDGES:
        total += tl.sum(tl.sum(summand(g_edge, y_edge, LOG), 1), 0)
    return total


@triton.jit
def _message_of(total):
    # Beside the sum, which may be 0.0, what makes the word another.
    return message_of(tl.full((), 1.0, tl.float32), total)


@triton.jit
def _message_of_other(
    row_ptrs, head, body, classes, part, LOG: tl.constexpr,
    VECTOR: tl.constexpr, EDGES: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """For ``learnt``."""
    g_row, y_row = row_ptrs
    WIDTH: tl.constexpr = LANES * VECTOR
    totals = tl.zeros((LANES,), tl.float32)
    for chunk in range(chunks_of(body, part, WIDTH, CHUNKS)):
        g = load_chunk(g_row, head, body, part, chunk, 0.0, VECTOR, WIDTH, CHUNKS, BESIDE_A_RESULT)
        y = load_chunk(y_row, head, body, part, chunk, 0.0, VECTOR, WIDTH, CHUNKS, BESIDE_A_RESULT)
        totals += _sums_of_chunk(g, y, LOG, LANES)
    g_edge = load_edges(g_row, head, body, classes, part, 0.0, VECTOR, EDGES)
    y_edge = load_edges(y_row, head, body, classes, part, 0.0, VECTOR, EDGES)
    return _message_of(_sum_of_part(totals, g_edge, y_edge, LOG, EDGES))


@kernel
def softmax_bwd_parts_kernel(
    grad_output_ptr, output_ptr, grad_input_ptr, workspace_ptr,
    classes, grad_output_stride: tl.int64, output_stride: tl.int64, grad_input_stride: tl.int64, parts,
    LOG: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr,
    PATIENCE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """dx = y * (g - sum(g * y)), or for the logarithm g - exp(y) * sum(g). One program per part of a row.

    grad_output_ptr, output_ptr, grad_input_ptr: (rows, classes), floating point.
    workspace_ptr and parts as in softmax_fwd_parts_kernel.
    """
    WIDTH: tl.constexpr = LANES * VECTOR
    FULL: tl.constexpr = 0 if SHARED else CHUNKS - 1 - EDGES
    row = (tl.program_id(0) // parts if SHARED else tl.program_id(0)).to(tl.int64)
    part = tl.program_id(0) % parts if SHARED else 0
    g_row = grad_output_ptr + row * grad_output_stride
    y_row = output_ptr + row * output_stride
    head, body = body_of(y_row, classes, VECTOR, EDGES)
    g = load_part(g_row, head, body, part, 0.0, VECTOR, WIDTH, CHUNKS, BESIDE_A_RESULT, FULL)
    y = load_part(y_row, head, body, part, 0.0, VECTOR, WIDTH, CHUNKS, BESIDE_A_RESULT, FULL)
    g_edge = load_edges(g_row, head, body, classes, part, 0.0, VECTOR, EDGES)
    y_edge = load_edges(y_row, head, body, classes, part, 0.0, VECTOR, EDGES)

    totals = tl.zeros((LANES,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        totals += _sums_of_chunk(g[chunk], y[chunk], LOG, LANES)
    total = _sum_of_part(totals, g_edge, y_edge, LOG, EDGES)
    if SHARED:
        words_ptr = words_of_row(workspace_ptr, row, parts)
        tell(words_ptr, part, _message_of(total))
        words, left = learnt(
            words_ptr, (g_row, y_row), head, body, classes, parts, LOG, _message_of_other,
            PATIENCE, VECTOR, EDGES, LANES, CHUNKS,
        )  # fmt: skip
        _, totals = numbers_of(words)
        total = tl.sum(totals, 0)

    dx_row = grad_input_ptr + row * grad_input_stride
    for chunk in tl.static_range(CHUNKS):
        dx = input_gradient(_again(g[chunk], total, not SHARED), _again(y[chunk], total, not SHARED), total, LOG)
        store_chunk(dx_row, dx, head, body, part, chunk, VECTOR, WIDTH, CHUNKS, FULL)
    dx_edge = input_gradient(g_edge, y_edge, total, LOG)
    _store_edges(dx_row, dx_edge, head, body, classes, part, VECTOR, EDGES)
    if SHARED:
        clear(words_ptr, parts, left, LANES)
