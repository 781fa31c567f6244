"""Softmax and log-softmax over (rows, classes), forward and backward.

Three kernels each way, chosen by width: whole rows in registers as float32, many narrow ones or a wide one per program;
a loop over the blocks of one long row; and, in ``softmax_parts``, rows in registers as they are, which one program has
or several share. ``LOG`` makes softmax's kernels log-softmax's. ``rows`` says what VECTOR, EDGES and LANES mean. The
schedules are at the end of the kernels, the launchers at the end of the file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from loss_core.backend import PreparedSoftmax
from loss_core.memory import zeroed_words
from torch import Tensor

from loss_triton.launch import Launch, had_better_hold, kernel, patience, prepared, refuse_float64
from loss_triton.parts import parts_words
from loss_triton.rows import (
    LOG2_E,
    block_columns,
    body_of,
    edge_columns,
    lane_sum,
    online_sum,
    vectors,
)
from loss_triton.schedules import Holding, PartsTable, parts_of
from loss_triton.softmax_math import (
    exp,
    input_gradient,
    normalization,
    normalized,
    normalized_row,
    normalizer_of,
    summand,
)
from loss_triton.softmax_parts import softmax_bwd_parts_kernel, softmax_fwd_parts_kernel


@kernel
def softmax_fwd_kernel(
    input_ptr, output_ptr,
    rows, classes, input_stride: tl.int64, output_stride: tl.int64,
    LOG: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """y = exp(x - max(x)) / sum(exp(x - max(x))), or its logarithm. One program does ROWS rows, held in registers.

    input_ptr: (rows, classes), floating point. output_ptr: (rows, classes), floating point.
    BLOCK is at least classes.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    x_row = input_ptr + row * input_stride
    y_row = output_ptr + row * output_stride
    head, body = body_of(x_row, classes, VECTOR, EDGES)
    inside = (row < rows) & (column < body)

    x_ptr = vectors(x_row + head, column, VECTOR)
    x = tl.load(x_ptr, mask=inside, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
    peak = tl.max(x, 1, keep_dims=True)
    if EDGES:
        edge, at_edge = edge_columns(head, body, classes, VECTOR)
        at_edge = at_edge & (row < rows)
        x_edge = tl.load(x_row + edge, mask=at_edge, other=float("-inf")).to(tl.float32)
        peak = tl.maximum(peak, tl.max(x_edge, 1, keep_dims=True))

    # A row of -inf has -inf - -inf = NaN here, as it should; so has one with +inf or NaN.
    total = tl.sum(exp(x - peak), 1, keep_dims=True)
    if EDGES:
        total += tl.sum(exp(x_edge - peak), 1, keep_dims=True)
    normalizer = normalizer_of(total, LOG)

    y = normalized(x - peak, normalizer, LOG).to(output_ptr.dtype.element_ty)
    tl.store(vectors(y_row + head, column, VECTOR), y, mask=inside)
    if EDGES:
        y_edge = normalized(x_edge - peak, normalizer, LOG).to(output_ptr.dtype.element_ty)
        tl.store(y_row + edge, y_edge, mask=at_edge)


@triton.jit
def _asked_for(body_ptr, column, there, EVICTION: tl.constexpr, VECTOR: tl.constexpr):
    """Columns of a body, -inf where it has none."""
    return tl.load(vectors(body_ptr, column, VECTOR), mask=there, other=float("-inf"), eviction_policy=EVICTION)


@kernel
def softmax_fwd_long_kernel(
    input_ptr, output_ptr,
    classes, input_stride: tl.int64, output_stride: tl.int64,
    LOG: tl.constexpr, BLOCK: tl.constexpr, HOLD: tl.constexpr,
    AHEAD: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """y = exp(x - max(x)) / sum(exp(x - max(x))), or its logarithm. One program does one row in two sweeps.

    The first sweep carries maximum and sum of exponentials per lane, so that no warp waits for another before the row
    is read. The last HOLD elements stay in registers; the second sweep reads the others again, latest first, while
    caches still have them.

    input_ptr: (rows, classes), floating point. output_ptr: (rows, classes), floating point.
    LANES * VECTOR divides BLOCK and HOLD, BLOCK is at most HOLD.
    AHEAD: in how many sweeps a block is asked for before the arithmetic of the one before; with any BLOCK is HOLD.
    """
    row = tl.program_id(0).to(tl.int64)
    x_row = input_ptr + row * input_stride
    y_row = output_ptr + row * output_stride
    head, body = body_of(x_row, classes, VECTOR, EDGES)
    # The blocks before the held part are read without a mask, so they may not reach beyond it.
    tl.static_assert(BLOCK <= HOLD)
    blocks = tl.cdiv(tl.maximum(body - HOLD, 0), BLOCK)
    held_column = block_columns(blocks * BLOCK, HOLD, LANES * VECTOR)
    inside = held_column < body

    lane_peak = tl.full((LANES,), float("-inf"), tl.float32)
    lane_total = tl.zeros((LANES,), tl.float32)
    if AHEAD:
        # What has been asked for last is the held part in the end.
        tl.static_assert(BLOCK == HOLD)
        column = block_columns(0, BLOCK, LANES * VECTOR)
        held = _asked_for(x_row + head, column, column < body, "evict_last", VECTOR)
    for block in range(blocks):
        column = block_columns((block + 1 if AHEAD else block) * BLOCK, BLOCK, LANES * VECTOR)
        if AHEAD:
            x = held.to(tl.float32)
            held = _asked_for(x_row + head, column, column < body, "evict_last", VECTOR)
        else:
            x = tl.load(vectors(x_row + head, column, VECTOR), eviction_policy="evict_last").to(tl.float32)
        lane_peak, lane_total = online_sum(x, lane_peak, lane_total, LOG2_E, LANES, VECTOR)
    if not AHEAD:
        held = _asked_for(x_row + head, held_column, inside, "evict_first", VECTOR)
    lane_peak, lane_total = online_sum(held.to(tl.float32), lane_peak, lane_total, LOG2_E, LANES, VECTOR)
    if AHEAD == 2:
        column = block_columns((blocks - 1) * BLOCK, BLOCK, LANES * VECTOR)
        ahead = _asked_for(x_row + head, column, column >= 0, "evict_first", VECTOR)
    peak = tl.max(lane_peak, 0)
    if EDGES:
        edge, at_edge = edge_columns(head, body, classes, VECTOR)
        x_edge = tl.load(x_row + edge, mask=at_edge, other=float("-inf")).to(tl.float32)
        peak = tl.maximum(peak, tl.max(tl.max(x_edge, 1), 0))
    total = tl.sum(lane_total * exp(lane_peak - peak), 0)
    if EDGES:
        total += tl.sum(tl.sum(exp(x_edge - peak), 1), 0)

    # Rounded to float32 a probability of 1 would show the approximation.
    FUSED: tl.constexpr = not LOG and output_ptr.dtype.element_ty.primitive_bitwidth == 16
    power, bias, normalizer = normalization(peak, total, LOG, FUSED)
    held_y = normalized_row(held.to(tl.float32), power, bias, normalizer, LOG, FUSED).to(output_ptr.dtype.element_ty)
    tl.store(vectors(y_row + head, held_column, VECTOR), held_y, mask=inside, eviction_policy="evict_first")
    if EDGES:
        y_edge = normalized_row(x_edge, power, bias, normalizer, LOG, FUSED).to(output_ptr.dtype.element_ty)
        tl.store(y_row + edge, y_edge, mask=at_edge)
    for block in range(blocks):
        column = block_columns((blocks - 1 - block) * BLOCK, BLOCK, LANES * VECTOR)
        if AHEAD == 2:
            x = ahead.to(tl.float32)
            before = block_columns((blocks - 2 - block) * BLOCK, BLOCK, LANES * VECTOR)
            ahead = _asked_for(x_row + head, before, before >= 0, "evict_first", VECTOR)
        else:
            x = tl.load(vectors(x_row + head, column, VECTOR), eviction_policy="evict_first").to(tl.float32)
        y = normalized_row(x, power, bias, normalizer, LOG, FUSED).to(output_ptr.dtype.element_ty)
        tl.store(vectors(y_row + head, column, VECTOR), y, eviction_policy="evict_first")


@kernel
def softmax_bwd_kernel(
    grad_output_ptr, output_ptr, grad_input_ptr,
    rows, classes, grad_output_stride: tl.int64, output_stride: tl.int64, grad_input_stride: tl.int64,
    LOG: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """dx = y * (g - sum(g * y)), or for the logarithm g - exp(y) * sum(g). One program does ROWS rows, in registers.

    grad_output_ptr, output_ptr, grad_input_ptr: (rows, classes), floating point.
    BLOCK as in softmax_fwd_kernel.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    g_row = grad_output_ptr + row * grad_output_stride
    y_row = output_ptr + row * output_stride
    dx_row = grad_input_ptr + row * grad_input_stride
    head, body = body_of(y_row, classes, VECTOR, EDGES)
    inside = (row < rows) & (column < body)

    g_ptr = vectors(g_row + head, column, VECTOR)
    y_ptr = vectors(y_row + head, column, VECTOR)
    g = tl.load(g_ptr, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    y = tl.load(y_ptr, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    total = tl.sum(summand(g, y, LOG), 1, keep_dims=True)
    if EDGES:
        edge, at_edge = edge_columns(head, body, classes, VECTOR)
        at_edge = at_edge & (row < rows)
        g_edge = tl.load(g_row + edge, mask=at_edge, other=0.0).to(tl.float32)
        y_edge = tl.load(y_row + edge, mask=at_edge, other=0.0).to(tl.float32)
        total += tl.sum(summand(g_edge, y_edge, LOG), 1, keep_dims=True)

    dx = input_gradient(g, y, total, LOG).to(grad_input_ptr.dtype.element_ty)
    tl.store(vectors(dx_row + head, column, VECTOR), dx, mask=inside)
    if EDGES:
        dx_edge = input_gradient(g_edge, y_edge, total, LOG).to(grad_input_ptr.dtype.element_ty)
        tl.store(dx_row + edge, dx_edge, mask=at_edge)


@kernel
def softmax_bwd_long_kernel(
    grad_output_ptr, output_ptr, grad_input_ptr,
    classes, grad_output_stride: tl.int64, output_stride: tl.int64, grad_input_stride: tl.int64,
    LOG: tl.constexpr, BLOCK: tl.constexpr, HOLD: tl.constexpr,
    LANES: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """dx = y * (g - sum(g * y)), or for the logarithm g - exp(y) * sum(g). One program does one row in two sweeps.

    The sweeps are those of softmax_fwd_long_kernel. The logarithm's first one reads g alone.

    grad_output_ptr, output_ptr, grad_input_ptr: (rows, classes), floating point.
    BLOCK, HOLD and LANES as in softmax_fwd_long_kernel.
    """
    row = tl.program_id(0).to(tl.int64)
    g_row = grad_output_ptr + row * grad_output_stride
    y_row = output_ptr + row * output_stride
    dx_row = grad_input_ptr + row * grad_input_stride
    head, body = body_of(y_row, classes, VECTOR, EDGES)
    # The blocks before the held part are read without a mask, so they may not reach beyond it.
    tl.static_assert(BLOCK <= HOLD)
    blocks = tl.cdiv(tl.maximum(body - HOLD, 0), BLOCK)
    held_column = block_columns(blocks * BLOCK, HOLD, LANES * VECTOR)
    inside = held_column < body

    lane_total = tl.zeros((LANES,), tl.float32)
    for block in range(blocks):
        column = block_columns(block * BLOCK, BLOCK, LANES * VECTOR)
        g = tl.load(vectors(g_row + head, column, VECTOR), eviction_policy="evict_last").to(tl.float32)
        if LOG:
            lane_total += lane_sum(g, LANES)
        else:
            y = tl.load(vectors(y_row + head, column, VECTOR), eviction_policy="evict_last").to(tl.float32)
            lane_total += lane_sum(g * y, LANES)

    held_g_ptr = vectors(g_row + head, held_column, VECTOR)
    held_y_ptr = vectors(y_row + head, held_column, VECTOR)
    held_g = tl.load(held_g_ptr, mask=inside, other=0.0, eviction_policy="evict_first")
    held_y = tl.load(held_y_ptr, mask=inside, other=0.0, eviction_policy="evict_first")
    lane_total += lane_sum(summand(held_g.to(tl.float32), held_y.to(tl.float32), LOG), LANES)
    total = tl.sum(lane_total, 0)
    if EDGES:
        edge, at_edge = edge_columns(head, body, classes, VECTOR)
        g_edge = tl.load(g_row + edge, mask=at_edge, other=0.0).to(tl.float32)
        y_edge = tl.load(y_row + edge, mask=at_edge, other=0.0).to(tl.float32)
        total += tl.sum(tl.sum(summand(g_edge, y_edge, LOG), 1), 0)

    held_dx = input_gradient(held_g.to(tl.float32), held_y.to(tl.float32), total, LOG)
    tl.store(
        vectors(dx_row + head, held_column, VECTOR), held_dx.to(grad_input_ptr.dtype.element_ty), mask=inside,
        eviction_policy="evict_first",
    )  # fmt: skip
    if EDGES:
        dx_edge = input_gradient(g_edge, y_edge, total, LOG).to(grad_input_ptr.dtype.element_ty)
        tl.store(dx_row + edge, dx_edge, mask=at_edge)
    for block in range(blocks):
        again = block_columns((blocks - 1 - block) * BLOCK, BLOCK, LANES * VECTOR)
        g = tl.load(vectors(g_row + head, again, VECTOR), eviction_policy="evict_first").to(tl.float32)
        y = tl.load(vectors(y_row + head, again, VECTOR), eviction_policy="evict_first").to(tl.float32)
        dx = input_gradient(g, y, total, LOG).to(grad_input_ptr.dtype.element_ty)
        tl.store(vectors(dx_row + head, again, VECTOR), dx, eviction_policy="evict_first")


class Schedule(NamedTuple):
    """How a width is done: `rows` whole rows per program of `block` elements; or, if `hold`, the loop with AHEAD."""

    rows: int
    block: int
    hold: int
    warps: int
    ahead: int = 0


# Shares of the copy bandwidth below are of whole calls: on an H200 (copy 4.24 TB/s), then on an H100 (3.00 TB/s);
# bfloat16 where no dtype is named.
#
# A warp holds up to 1024 elements, 32 per thread, and no program of several rows has more than one warp: two rows in
# two warps cost a sixth at 1000 columns. What is read is to be evicted last: forward 4096 x 8192 87.9 and 91.2%
# (without the hint 83.8 and 89.7%), 32768 x 4096 99.2% (94.8%), backward 4096 x 8192 94.3 and 94.9% (89.5 and 93.4%),
# 32768 x 2048 99.8 and 99.1% (97.7 and 97.9%). To be evicted first costs 3 to 5%; hints on the stores gain nothing.
_PER_WARP = 1024
# Rows up to this wide are taken whole.
_WHOLE = 8192
# And so are some up to here, where a power of two is not much wider than the row.
_WHOLE_16384 = Schedule(1, 16384, 0, 16)

# Beyond, the loop: the widest row and its schedule, by direction, whether it is of log-softmax, and bytes of an
# element. A larger block spends fewer instructions on running sums, and what is held is not read again; but there have
# to be programs enough that some write while others read, as registers allow. A row's second reading has to find it in
# L2, so what counts for the longest is how few rows are under way: one program per multiprocessor, which is what 32
# elements in each of 1024 threads leave room for. 132 rows of 190000 columns of 2 bytes fill the L2 cache; from there
# on the limit is that of reading twice, 66%, which 2**20 columns have. A block that is asked for ahead takes registers
# too: it gains where it costs no program, or where it is all that is under way.
#
# Where rows are held as a whole (below) the entries of their widths are for other devices.
_FORWARD_2_BYTES = (
    # 16384 x 12000: 98.4 and 98.0% (nothing ahead 96.5 and 97.6%).
    (12288, Schedule(1, 4096, 4096, 8, 2)),
    # 4096 x 16384: 93.2 and 95.7% (88.5 and 93.8%); 8192 x 20011: 91.8 and 96.3% (88.7 and 96.1%).
    (20480, Schedule(1, 8192, 8192, 8, 1)),
    # 8192 x 24576: 96.7 and 99.0% (94.0 and 98.7%).
    (28672, Schedule(1, 8192, 8192, 16, 1)),
    # 8192 x 32000: 94.8 and 98.5% (a block ahead 95.3 and 97.7%).
    (32768, Schedule(1, 8192, 8192, 16)),
    # 8192 x 50257: 82.6 and 96.2% (83.0 and 95.4%); log-softmax 88.7 and 96.8% (86.6 and 96.5%).
    (57344, Schedule(1, 16384, 16384, 16, 1)),
    # 4096 x 65536: 93.2 and 96.3% (the next schedule 85.6 and 99.3%).
    (81920, Schedule(1, 16384, 16384, 16)),
    # 4096 x 100352: 81.9 and 98.2% (the one before 81.4 and 82.4%); 4096 x 128256: 90.3 and 96.1% (nothing ahead 84.9
    # and 97.2%); 8192 x 151936: 89.6 and 91.3% (84.6 and 91.0%).
    (None, Schedule(1, 32768, 32768, 32, 2)),
)
_FORWARD_4_BYTES = (
    # 16384 x 12000: 98.8 and 98.1% (97.9 and 98.4%).
    (12288, Schedule(1, 4096, 4096, 16, 2)),
    (16384, _WHOLE_16384),
    # 4096 x 32768: 95.9 and 97.2% (both sweeps ahead 91.3 and 99.9%).
    (32768, Schedule(1, 16384, 16384, 16)),
    # 2048 x 128256: 79.7 and 80.9%.
    (None, Schedule(1, 32768, 32768, 32)),
)
_BACKWARD_4_BYTES = (
    # 16384 x 12000: 102.0%; log-softmax 100.0%.
    (12288, Schedule(1, 8192, 8192, 16)),
    (16384, _WHOLE_16384),
    # 4096 x 32768: 100.4%, log-softmax 98.0%; 2048 x 65536: 79.8%, 96.6%; 2048 x 128256: log-softmax 84.4%.
    (None, Schedule(1, 16384, 16384, 32)),
)
_LOOPS = {
    ("forward", False, 2): _FORWARD_2_BYTES,
    ("forward", True, 2): _FORWARD_2_BYTES,
    ("backward", False, 2): (
        # 16384 x 12000: 99.9% (102.2% with a block that leaves 8193 columns 77.6%); 8192 x 8193: 94.7% (95.1%).
        (12288, Schedule(1, 4096, 4096, 8)),
        # 4096 x 16384: 95.7% (whole 93%); 8192 x 20011: 98.3% (96.9%).
        (20480, Schedule(1, 8192, 8192, 8)),
        # 8192 x 24576: 101.3% (99.1%); 8192 x 32000: 99.7% (95.3%).
        (32768, Schedule(1, 8192, 8192, 16)),
        # 8192 x 50257: 95.1% (91.0%); 4096 x 65536: 98.4% (95.2%); 4096 x 128256: 80.4% (79.0%).
        (None, Schedule(1, 16384, 32768, 16)),
    ),
    ("backward", True, 2): (
        # 16384 x 12000: 96.0% (97.2%); 8192 x 8193: 91.3% (91.0%).
        (12288, Schedule(1, 4096, 4096, 8)),
        # 97%, in the loop 92%.
        (16384, _WHOLE_16384),
        # 8192 x 20011: 94.9% (96.4%).
        (20480, Schedule(1, 8192, 8192, 8)),
        # 8192 x 24576: 96.7% (95.0%); 8192 x 32000: 98.0% (97.5%); 8192 x 50257: 98.4% (96.8%).
        (57344, Schedule(1, 8192, 8192, 32)),
        # 4096 x 65536: 97.1% (96.4%); 4096 x 100352: 100.3% (95.4%); 4096 x 128256: 98.5% (94.9%).
        (None, Schedule(1, 32768, 32768, 32)),
    ),
    ("forward", False, 4): _FORWARD_4_BYTES,
    ("forward", True, 4): _FORWARD_4_BYTES,
    ("backward", False, 4): _BACKWARD_4_BYTES,
    ("backward", True, 4): _BACKWARD_4_BYTES,
}


# Rows that programs hold, as in ``schedules``. In brackets the loop, or up to 8192 whole rows in float32; two numbers
# are an H200's and an H100's, one is an H200's.
_FORWARD_PARTS_2_BYTES: PartsTable = (
    (4096, None),
    # 16384 x 5000: 96.4% (88.6%), log-softmax 96.0% (87.7%). 4096 x 8192: 88.2% (88.6%), 89.4% (87.5%).
    (8192, Holding(128)),
    # 16384 x 9000: 99.0% (89.1%). 4096 x 16384: 94.3% (92.5%), log-softmax 94.4% (92.9%). 8192 x 20011: 98.0% (91.5%),
    # 97.8% (92.6%). 8192 x 32000: 99.6%, 99.6%; shared 98.3%, 99.6%. 8192 x 40000: 99.8%, 99.7%; shared 94.1%, 96.3%.
    (49152, Holding(256)),
    # As for cross-entropy. In brackets shared: 8192 x 50257 99.0% (92.2%), log-softmax 95.2% (95.2%); 8192 x 51200
    # 99.9% (94.7%).
    (51200, Holding(256, registers=128)),
    # In brackets 12 chunks and 96 registers, with which an H100 has 101.0%. 8192 x 52000: 97.7% (94.6%). 4096 x 65536:
    # 95.8% (91.2%), log-softmax 97.9% (93.7%); held by one program 88.5%. 4096 x 100352: 98.8% (93.1%). 4096 x 128256:
    # 99.2% (95.2%), log-softmax 100.2% (97.3%). 4096 x 129280: 98.1% (95.6%).
    (143360, Holding(128, 20, 128)),
    # Not by eight programs a row, nor by sixteen: 8192 x 151936 98.3% (95.2%), by eight 95.2%; 4096 x 128256 91.0%,
    # 1024 x 262144 89.4%. Perhaps since what runs at a time is then so many rows, which start and end as one.
    (163840, Holding(128, 17, 128)),
    # 2048 x 200064: 97.1% (91.7%). 2048 x 256000: 96.2% (92.2%). 1024 x 262144: 94.4% (89.5%).
    (None, Holding(128, 20, 128)),
)
_FORWARD_PARTS_4_BYTES: PartsTable = (
    (8192, None),
    # 4096 x 10000: 95.5% (92.5%). 4096 x 16384: 98.0% (98.0%). 4096 x 20011: 98.0% (62.9%), log-softmax 98.0% (65.9%).
    (24576, Holding(256)),
    # 4096 x 30000: 98.1% (93.7%). 4096 x 32768: 98.7% (95.7%).
    (32768, Holding(512)),
    # In brackets 12 chunks and 96 registers. 2048 x 65536: 99.3% (98.2%). 2048 x 128256: 100.2% (97.4%).
    (None, Holding(128, 19, 128)),
)
# Softmax, log-softmax. In brackets 8 chunks with as many registers as the compiler takes, or 96 for log-softmax, with
# which an H100 has 101.8 to 103.0%. 8192 x 28000: 101.5% (97.1%), 100.9% (101.1%). 8192 x 32000: 101.2% (100.8%). 8192
# x 50257: 103.2% (98.3%), 100.4% (100.6%). 4096 x 65536: 102.1% (95.4%). 4096 x 128256: 103.4% (96.4%), 104.0%
# (104.1%). 8192 x 151936: 103.9% (98.9%). Float32: 4096 x 30000: 97.9% (94.9%). 2048 x 50257: 100.7% (90.2%), 102.0%
# (101.5%). 2048 x 65536: 96.9% (98.6%). 2048 x 128256: 95.3% (93.8%), 102.5% (101.5%).
_SHARED_BACKWARD = Holding(128, 10, 128)
# Log-softmax, 8192 x 32000: 103.0%, as wider rows 100.6%.
_FOUR_LOG_BACKWARD = Holding(128, 8, 96)
# Softmax, log-softmax. 8192 x 10000: 98.9% (98.5%), 99.4% (94.4%). 8192 x 14000: 100.6% (99.5%), 100.4% (100.2%).
# 4096 x 16384: 97.9% (96.1%), 98.5% (98.7%); float16 98.1% (96.1%). 8192 x 20011: 100.5% (98.3%), 101.4% (94.5%).
# 8192 x 24576: 101.6% (100.4%), 101.8% (96.5%; shared 102.4%). 16384 x 5000: 99.0% (98.1%), 98.7% (96.1%), but 4096 x
# 8192: 93.3% (93.5%), 93.2% (94.2%).
_WHOLE_BACKWARD_2_BYTES: PartsTable = ((8192, None), (24576, Holding(256)))
# 4096 x 10000: 99.3% (96.3%), 98.8% (95.3%). 4096 x 12000: 99.5% (97.1%). 4096 x 16384: 101.1% (101.0%), 99.5%
# (101.8%). 4096 x 20011: 100.8% (76.1%), 100.9% (88.1%). 4096 x 24576: 101.9% (100.0%).
_WHOLE_BACKWARD_4_BYTES: PartsTable = ((8192, None), (12288, Holding(256)), (16384, None), (24576, Holding(512)))
_PARTS: dict[tuple[str, bool, int], PartsTable] = {
    ("forward", False, 2): _FORWARD_PARTS_2_BYTES,
    ("forward", True, 2): _FORWARD_PARTS_2_BYTES,
    ("forward", False, 4): _FORWARD_PARTS_4_BYTES,
    ("forward", True, 4): _FORWARD_PARTS_4_BYTES,
    ("backward", False, 2): (*_WHOLE_BACKWARD_2_BYTES, (None, _SHARED_BACKWARD)),
    ("backward", True, 2): (
        *_WHOLE_BACKWARD_2_BYTES,
        (28672, _SHARED_BACKWARD),
        (32768, _FOUR_LOG_BACKWARD),
        (None, _SHARED_BACKWARD),
    ),
    ("backward", False, 4): (*_WHOLE_BACKWARD_4_BYTES, (28672, None), (None, _SHARED_BACKWARD)),
    ("backward", True, 4): (*_WHOLE_BACKWARD_4_BYTES, (32768, None), (None, _SHARED_BACKWARD)),
}


@functools.cache
def _schedule(direction: str, classes: int, log: bool, size: int) -> Schedule:
    """The schedule of rows of `classes` elements of `size` bytes."""
    if classes <= _WHOLE:
        block = triton.next_power_of_2(classes)
        return Schedule(max(1, _PER_WARP // block), block, 0, 4 if block == 2048 else max(1, block // _PER_WARP))
    table = _LOOPS[direction, log, size]
    return next(schedule for widest, schedule in table if widest is None or classes <= widest)


def _vectors_and_edges(rows: int, classes: int, places: list[tuple[int, int, int]]) -> tuple[int, bool]:
    """VECTOR and EDGES for rows of tensors at all of `places`: address, row stride, bytes of an element."""
    vector = max(4, *(16 // size for _, _, size in places))
    starts = {address // size % vector for address, _, size in places}
    steps = {stride % vector for _, stride, _ in places}
    if starts == {0} and steps == {0} and not classes % vector:
        return vector, False
    # Edges have to be at the same columns of all, and few.
    if classes < 2 * vector or len(starts) > 1 or (len(steps) > 1 and rows > 1):
        return 1, False
    return vector, True


def _places(*tensors: Tensor) -> list[tuple[int, int, int]]:
    return [(tensor.data_ptr(), tensor.stride(0), tensor.element_size()) for tensor in tensors]


def softmax_forward(input: Tensor, output: Tensor) -> None:
    """``output <- softmax(input)`` over (rows, classes)."""
    _run("forward", (input, output), LOG=False)


def log_softmax_forward(input: Tensor, output: Tensor) -> None:
    """``output <- log_softmax(input)`` over (rows, classes)."""
    _run("forward", (input, output), LOG=True)


def softmax_backward(grad_output: Tensor, output: Tensor, grad_input: Tensor) -> None:
    """``grad_input <- d softmax`` from the gradient of its result and the result itself."""
    _run("backward", (grad_output, output, grad_input), LOG=False)


def log_softmax_backward(grad_output: Tensor, output: Tensor, grad_input: Tensor) -> None:
    """``grad_input <- d log_softmax`` from the gradient of its result and the result itself."""
    _run("backward", (grad_output, output, grad_input), LOG=True)


def softmax_prepare(
    device: torch.device, dtype: torch.dtype, rows: int, classes: int, stride: int, offset: int
) -> PreparedSoftmax:
    """See ``loss_core.backend``."""
    return _prepare(device, dtype, rows, classes, stride, offset, LOG=False)


def log_softmax_prepare(
    device: torch.device, dtype: torch.dtype, rows: int, classes: int, stride: int, offset: int
) -> PreparedSoftmax:
    """See ``loss_core.backend``."""
    return _prepare(device, dtype, rows, classes, stride, offset, LOG=True)


class _Plan(NamedTuple):
    """A kernel's launch: of that many programs, with its first numbers, which the strides follow; parts of a row."""

    launch: Launch
    programs: int
    numbers: tuple[int, ...]
    parts: int = 0


def _plan(
    direction: str, device: torch.device, dtypes: tuple[torch.dtype, ...], rows: int, classes: int,
    places: list[tuple[int, int, int]], LOG: bool,
) -> _Plan:  # fmt: skip
    refuse_float64(*dtypes)
    size = max(dtype.itemsize for dtype in dtypes)
    rows_each, block, hold, warps, ahead = _schedule(direction, classes, LOG, size)
    vector, edges = _vectors_and_edges(rows, classes, places)
    key, threads = (device.index, *dtypes), 32 * warps
    whole, loop, in_parts = _KERNELS[direction]
    bytes_held = size if direction == "forward" else 2 * size
    how = parts_of(_PARTS[direction, LOG, size], classes, bytes_held, vector) if had_better_hold(device) else None
    if how is not None:
        constants = LOG, how.chunks, how.lanes, vector, edges, patience(device.index), how.programs > 1
        launch = prepared(in_parts, key, constants, how.lanes, how.registers)
        return _Plan(launch, rows * how.programs, (classes,), how.programs)
    if hold:
        of_forward = (ahead,) if direction == "forward" else ()
        constants = LOG, block, hold, *of_forward, threads, vector, edges
        return _Plan(prepared(loop, key, constants, threads), rows, (classes,))
    launch = prepared(whole, key, (LOG, rows_each, block, vector, edges), threads)
    return _Plan(launch, -(-rows // rows_each), (rows, classes))


_KERNELS = {
    "forward": (softmax_fwd_kernel, softmax_fwd_long_kernel, softmax_fwd_parts_kernel),
    "backward": (softmax_bwd_kernel, softmax_bwd_long_kernel, softmax_bwd_parts_kernel),
}


def _run(direction: str, tensors: tuple[Tensor, ...], LOG: bool) -> None:
    """Launch over (rows, classes)."""
    last = tensors[-1]
    rows, classes = last.shape
    dtypes = tuple(tensor.dtype for tensor in tensors)
    if not rows or not classes:
        refuse_float64(*dtypes)
        return
    plan = _plan(direction, last.device, dtypes, rows, classes, _places(*tensors), LOG)
    _prepared(plan, last.device, rows, *(tensor.stride(0) for tensor in tensors))(*tensors)


def _prepared(plan: _Plan, device: torch.device, rows: int, *strides: int) -> Callable[..., None]:
    """The launch as a function of the tensors alone."""
    launch, programs, numbers, parts = plan
    numbers = *numbers, *strides
    if not parts:
        return lambda *tensors: launch(programs, tensors, *numbers)
    if parts == 1:
        return lambda *tensors: launch(programs, (*tensors, None), *numbers, parts)
    words = parts_words(rows, parts)
    return lambda *tensors: launch(programs, (*tensors, zeroed_words(words, device)), *numbers, parts)


def _prepare(
    device: torch.device, dtype: torch.dtype, rows: int, classes: int, stride: int, offset: int, LOG: bool
) -> PreparedSoftmax:
    size = dtype.itemsize
    new = (0, classes, size)
    forth = _plan("forward", device, (dtype, dtype), rows, classes, [(offset, stride, size), new], LOG)
    back = _plan("backward", device, (dtype, dtype, dtype), rows, classes, [new, new, new], LOG)
    return PreparedSoftmax(
        _prepared(forth, device, rows, stride, classes), _prepared(back, device, rows, classes, classes, classes)
    )
