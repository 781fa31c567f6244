"""Softmax and log-softmax over (rows, classes), forward and backward.

Two kernels each way, chosen by width: whole rows in registers, many narrow ones or a wide one per program; and a loop
over the blocks of one long row. ``LOG`` makes softmax's kernels log-softmax's. The schedules are at the end of the
kernels, the launchers at the end of the file.

A row that does not start on a 16-byte boundary, or whose width is not a multiple of the vector, is read and written in
three parts: up to the first boundary, whole vectors, and the rest. The parts outside the vectors are the *edge*.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from loss_core.backend import UnsupportedInput
from torch import Tensor


def _trace_name(name: str) -> Callable[[Any], str]:
    """The name a profiler shows: both ops share a kernel."""
    return lambda specialization: f"log_{name}" if specialization.constants["LOG"] else name


@triton.jit
def _body(row_ptr, classes, VECTOR: tl.constexpr, EDGES: tl.constexpr):
    """Where the whole vectors of a row start and how many elements they hold."""
    if not EDGES:
        return 0, classes
    else:
        SIZE: tl.constexpr = row_ptr.dtype.element_ty.primitive_bitwidth // 8
        start = row_ptr.to(tl.int64) // SIZE
        head = tl.minimum((VECTOR - start % VECTOR) % VECTOR, classes).to(tl.int32)
        return head, (classes - head) // VECTOR * VECTOR


@triton.jit
def _vectors(row_ptr, head, column, EDGES: tl.constexpr):
    """Pointers to columns counted from the first whole vector, with the alignment that the compiler cannot see."""
    if not EDGES:
        return row_ptr + column
    else:
        return tl.multiple_of((row_ptr + head) + column, (1, 16))


@triton.jit
def _columns(start, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """SIZE columns from start, as (SIZE // WIDTH, WIDTH)."""
    return start + tl.arange(0, SIZE // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _lane_max(x, LANES: tl.constexpr):
    """Maximum of each lane, a lane being the columns that one thread holds of (rounds, width)."""
    VECTOR: tl.constexpr = x.shape[1] // LANES
    return tl.max(tl.max(tl.reshape(x, (x.shape[0], LANES, VECTOR)), 2), 0)


@triton.jit
def _lane_sum(x, LANES: tl.constexpr):
    """Sum of each lane."""
    VECTOR: tl.constexpr = x.shape[1] // LANES
    return tl.sum(tl.sum(tl.reshape(x, (x.shape[0], LANES, VECTOR)), 2), 0)


@triton.jit
def _over_lanes(value, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """A lane's value for each of its columns, as (1, width)."""
    return tl.reshape(tl.broadcast_to(value[:, None], (LANES, VECTOR)), (1, LANES * VECTOR))


@triton.jit
def _edge(head, body, classes, VECTOR: tl.constexpr):
    """Columns of the elements outside the vectors, and which of the 2 * VECTOR lanes have one."""
    lane = tl.arange(0, 2 * VECTOR)[None, :]
    column = tl.where(lane < VECTOR, lane, head + body + lane - VECTOR)
    return column, tl.where(lane < VECTOR, lane < head, column < classes)


@triton.jit
def _exp(x):
    """exp(x): three instructions fewer than ``tl.exp``, which keeps results below 2**-126 from becoming 0."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _normalizer(total, LOG: tl.constexpr):
    """What ``_normalized`` needs of the sum of exponentials: once per row, so it may be the exact division."""
    if LOG:
        return tl.log(total)
    else:
        return tl.div_rn(tl.full(total.shape, 1.0, tl.float32), total)


@triton.jit
def _normalized(shifted, normalizer, LOG: tl.constexpr):
    """The result from x - max(x)."""
    if LOG:
        return shifted - normalizer
    else:
        return _exp(shifted) * normalizer


@triton.jit(repr=_trace_name("softmax_fwd_kernel"), do_not_specialize=["rows"])
def softmax_fwd_kernel(
    input_ptr, output_ptr,
    rows, classes, input_stride, output_stride,
    LOG: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """y = exp(x - max(x)) / sum(exp(x - max(x))), or its logarithm. One program does ROWS rows, held in registers.

    input_ptr: (rows, classes), floating point. output_ptr: (rows, classes), floating point.
    BLOCK is at least classes. VECTOR elements are 16 bytes. EDGES peels the edges, which both tensors' rows must have
    at the same columns.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    x_row = input_ptr + row * input_stride
    y_row = output_ptr + row * output_stride
    head, body = _body(x_row, classes, VECTOR, EDGES)
    inside = (row < rows) & (column < body)

    x = tl.load(_vectors(x_row, head, column, EDGES), mask=inside, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, 1, keep_dims=True)
    if EDGES:
        edge, at_edge = _edge(head, body, classes, VECTOR)
        at_edge = at_edge & (row < rows)
        x_edge = tl.load(x_row + edge, mask=at_edge, other=float("-inf")).to(tl.float32)
        peak = tl.maximum(peak, tl.max(x_edge, 1, keep_dims=True))

    # A row of -inf has -inf - -inf = NaN here, as it should; so has one with +inf or NaN.
    total = tl.sum(_exp(x - peak), 1, keep_dims=True)
    if EDGES:
        total += tl.sum(_exp(x_edge - peak), 1, keep_dims=True)
    normalizer = _normalizer(total, LOG)

    y = _normalized(x - peak, normalizer, LOG).to(output_ptr.dtype.element_ty)
    tl.store(_vectors(y_row, head, column, EDGES), y, mask=inside)
    if EDGES:
        y_edge = _normalized(x_edge - peak, normalizer, LOG).to(output_ptr.dtype.element_ty)
        tl.store(y_row + edge, y_edge, mask=at_edge)


@triton.jit(repr=_trace_name("softmax_fwd_long_kernel"))
def softmax_fwd_long_kernel(
    input_ptr, output_ptr,
    classes, input_stride, output_stride,
    LOG: tl.constexpr, BLOCK: tl.constexpr, HOLD: tl.constexpr,
    LANES: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """y = exp(x - max(x)) / sum(exp(x - max(x))), or its logarithm. One program does one row in two sweeps.

    The first sweep carries maximum and sum of exponentials per lane, so that no warp waits for another before the row
    is read. The last HOLD elements stay in registers; the second sweep reads the others again, latest first, while
    caches still have them.

    input_ptr: (rows, classes), floating point. output_ptr: (rows, classes), floating point.
    LANES * VECTOR divides BLOCK and HOLD, BLOCK is at most HOLD. VECTOR and EDGES as in softmax_fwd_kernel.
    """
    row = tl.program_id(0).to(tl.int64)
    x_row = input_ptr + row * input_stride
    y_row = output_ptr + row * output_stride
    head, body = _body(x_row, classes, VECTOR, EDGES)
    blocks = tl.cdiv(tl.maximum(body - HOLD, 0), BLOCK)
    held_column = _columns(blocks * BLOCK, HOLD, LANES * VECTOR)
    inside = held_column < body

    lane_peak = tl.full((LANES,), float("-inf"), tl.float32)
    lane_total = tl.zeros((LANES,), tl.float32)
    for block in range(blocks):
        column = _columns(block * BLOCK, BLOCK, LANES * VECTOR)
        x = tl.load(_vectors(x_row, head, column, EDGES), eviction_policy="evict_last").to(tl.float32)
        new_peak = tl.maximum(lane_peak, _lane_max(x, LANES))
        # A lane that has seen only -inf subtracts 0, not -inf.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        lane_total = lane_total * _exp(lane_peak - shift) + _lane_sum(
            _exp(x - _over_lanes(shift, LANES, VECTOR)), LANES
        )
        lane_peak = new_peak

    held_ptr = _vectors(x_row, head, held_column, EDGES)
    held = tl.load(held_ptr, mask=inside, other=float("-inf"), eviction_policy="evict_first").to(tl.float32)
    peak = tl.max(tl.maximum(lane_peak, _lane_max(held, LANES)), 0)
    if EDGES:
        edge, at_edge = _edge(head, body, classes, VECTOR)
        x_edge = tl.load(x_row + edge, mask=at_edge, other=float("-inf")).to(tl.float32)
        peak = tl.maximum(peak, tl.max(tl.max(x_edge, 1), 0))
    total = tl.sum(lane_total * _exp(lane_peak - peak) + _lane_sum(_exp(held - peak), LANES), 0)
    if EDGES:
        total += tl.sum(tl.sum(_exp(x_edge - peak), 1), 0)
    normalizer = _normalizer(total, LOG)

    held_y = _normalized(held - peak, normalizer, LOG).to(output_ptr.dtype.element_ty)
    tl.store(_vectors(y_row, head, held_column, EDGES), held_y, mask=inside, eviction_policy="evict_first")
    if EDGES:
        y_edge = _normalized(x_edge - peak, normalizer, LOG).to(output_ptr.dtype.element_ty)
        tl.store(y_row + edge, y_edge, mask=at_edge)
    for block in range(blocks):
        again = _columns((blocks - 1 - block) * BLOCK, BLOCK, LANES * VECTOR)
        x = tl.load(_vectors(x_row, head, again, EDGES), eviction_policy="evict_first").to(tl.float32)
        y = _normalized(x - peak, normalizer, LOG).to(output_ptr.dtype.element_ty)
        tl.store(_vectors(y_row, head, again, EDGES), y, eviction_policy="evict_first")


@triton.jit
def _summand(g, y, LOG: tl.constexpr):
    """What the backward sums over a row: the gradient's share along the output."""
    if LOG:
        return g
    else:
        return g * y


@triton.jit
def _input_gradient(g, y, total, LOG: tl.constexpr):
    if LOG:
        return g - _exp(y) * total
    else:
        return y * (g - total)


@triton.jit(repr=_trace_name("softmax_bwd_kernel"), do_not_specialize=["rows"])
def softmax_bwd_kernel(
    grad_output_ptr, output_ptr, grad_input_ptr,
    rows, classes, grad_output_stride, output_stride, grad_input_stride,
    LOG: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """dx = y * (g - sum(g * y)), or for the logarithm g - exp(y) * sum(g). One program does ROWS rows, in registers.

    grad_output_ptr, output_ptr, grad_input_ptr: (rows, classes), floating point.
    BLOCK, VECTOR and EDGES as in softmax_fwd_kernel.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    g_row = grad_output_ptr + row * grad_output_stride
    y_row = output_ptr + row * output_stride
    dx_row = grad_input_ptr + row * grad_input_stride
    head, body = _body(y_row, classes, VECTOR, EDGES)
    inside = (row < rows) & (column < body)

    g_ptr = _vectors(g_row, head, column, EDGES)
    y_ptr = _vectors(y_row, head, column, EDGES)
    g = tl.load(g_ptr, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr, mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(_summand(g, y, LOG), 1, keep_dims=True)
    if EDGES:
        edge, at_edge = _edge(head, body, classes, VECTOR)
        at_edge = at_edge & (row < rows)
        g_edge = tl.load(g_row + edge, mask=at_edge, other=0.0).to(tl.float32)
        y_edge = tl.load(y_row + edge, mask=at_edge, other=0.0).to(tl.float32)
        total += tl.sum(_summand(g_edge, y_edge, LOG), 1, keep_dims=True)

    dx = _input_gradient(g, y, total, LOG).to(grad_input_ptr.dtype.element_ty)
    tl.store(_vectors(dx_row, head, column, EDGES), dx, mask=inside)
    if EDGES:
        dx_edge = _input_gradient(g_edge, y_edge, total, LOG).to(grad_input_ptr.dtype.element_ty)
        tl.store(dx_row + edge, dx_edge, mask=at_edge)


@triton.jit(repr=_trace_name("softmax_bwd_long_kernel"))
def softmax_bwd_long_kernel(
    grad_output_ptr, output_ptr, grad_input_ptr,
    classes, grad_output_stride, output_stride, grad_input_stride,
    LOG: tl.constexpr, BLOCK: tl.constexpr, HOLD: tl.constexpr,
    LANES: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """dx = y * (g - sum(g * y)), or for the logarithm g - exp(y) * sum(g). One program does one row in two sweeps.

    The sweeps are those of softmax_fwd_long_kernel. The logarithm's first one reads g alone.

    grad_output_ptr, output_ptr, grad_input_ptr: (rows, classes), floating point.
    BLOCK, HOLD, LANES, VECTOR and EDGES as in softmax_fwd_long_kernel.
    """
    row = tl.program_id(0).to(tl.int64)
    g_row = grad_output_ptr + row * grad_output_stride
    y_row = output_ptr + row * output_stride
    dx_row = grad_input_ptr + row * grad_input_stride
    head, body = _body(y_row, classes, VECTOR, EDGES)
    blocks = tl.cdiv(tl.maximum(body - HOLD, 0), BLOCK)
    held_column = _columns(blocks * BLOCK, HOLD, LANES * VECTOR)
    inside = held_column < body

    lane_total = tl.zeros((LANES,), tl.float32)
    for block in range(blocks):
        column = _columns(block * BLOCK, BLOCK, LANES * VECTOR)
        g = tl.load(_vectors(g_row, head, column, EDGES), eviction_policy="evict_last").to(tl.float32)
        if LOG:
            lane_total += _lane_sum(g, LANES)
        else:
            y = tl.load(_vectors(y_row, head, column, EDGES), eviction_policy="evict_last").to(tl.float32)
            lane_total += _lane_sum(g * y, LANES)

    held_g_ptr = _vectors(g_row, head, held_column, EDGES)
    held_y_ptr = _vectors(y_row, head, held_column, EDGES)
    held_g = tl.load(held_g_ptr, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    held_y = tl.load(held_y_ptr, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    total = tl.sum(lane_total + _lane_sum(_summand(held_g, held_y, LOG), LANES), 0)
    if EDGES:
        edge, at_edge = _edge(head, body, classes, VECTOR)
        g_edge = tl.load(g_row + edge, mask=at_edge, other=0.0).to(tl.float32)
        y_edge = tl.load(y_row + edge, mask=at_edge, other=0.0).to(tl.float32)
        total += tl.sum(tl.sum(_summand(g_edge, y_edge, LOG), 1), 0)

    held_dx = _input_gradient(held_g, held_y, total, LOG).to(grad_input_ptr.dtype.element_ty)
    tl.store(_vectors(dx_row, head, held_column, EDGES), held_dx, mask=inside, eviction_policy="evict_first")
    if EDGES:
        dx_edge = _input_gradient(g_edge, y_edge, total, LOG).to(grad_input_ptr.dtype.element_ty)
        tl.store(dx_row + edge, dx_edge, mask=at_edge)
    for block in range(blocks):
        again = _columns((blocks - 1 - block) * BLOCK, BLOCK, LANES * VECTOR)
        g = tl.load(_vectors(g_row, head, again, EDGES), eviction_policy="evict_first").to(tl.float32)
        y = tl.load(_vectors(y_row, head, again, EDGES), eviction_policy="evict_first").to(tl.float32)
        dx = _input_gradient(g, y, total, LOG).to(grad_input_ptr.dtype.element_ty)
        tl.store(_vectors(dx_row, head, again, EDGES), dx, eviction_policy="evict_first")


class Schedule(NamedTuple):
    """How a width is done: `rows` whole rows per program of `block` elements; or, if `hold`, the loop."""

    rows: int
    block: int
    hold: int
    warps: int


# Shares of the copy bandwidth below: H200, bfloat16 where no dtype is named.
#
# A warp holds up to 1024 elements, 32 per thread, and no program of several rows has more than one warp: two rows in
# two warps cost a sixth at 1000 columns. Hints to evict what whole rows read and write cost 3 to 5%.
_PER_WARP = 1024
# Rows this wide are taken whole. In between, a power of two is too much wider than the row: at 12000 columns of
# float32 the loop has 95% and 99%, the whole row 92% and 94%.
_WHOLE = (range(1, 8193), range(12289, 16385))
# Beyond, the loop: the widest row and its schedule. A larger block spends fewer instructions on running sums, so it
# gains with the number of blocks (128256 columns: 80% of forward with 16384, 72% with 8192). A row's second reading
# has to find it in L2, so fewer warps per multiprocessor do better than more: 8192 elements held with 8 warps have
# 66% there, and 16384 with 32 warps 78% of the backward, which reads two tensors. Narrower ones gain by more held:
# float32 at 32768 has 97% and 100%, 81% and 74% with half of it.
_LOOPS = {
    "forward": (
        (12288, Schedule(1, 4096, 8192, 16)),
        (65536, Schedule(1, 8192, 16384, 16)),
        (None, Schedule(1, 16384, 16384, 16)),
    ),
    "backward": (
        (12288, Schedule(1, 4096, 8192, 16)),
        (65536, Schedule(1, 8192, 16384, 32)),
        (None, Schedule(1, 16384, 16384, 32)),
    ),
}


@functools.cache
def _schedule(direction: str, classes: int) -> Schedule:
    """The schedule of rows of `classes` elements."""
    if any(classes in widths for widths in _WHOLE):
        block = triton.next_power_of_2(classes)
        # 2048 columns have 90% with 1 or 4 warps; the latter gain more from the hints' absence.
        return Schedule(max(1, _PER_WARP // block), block, 0, 4 if block == 2048 else max(1, block // _PER_WARP))
    return next(schedule for widest, schedule in _LOOPS[direction] if widest is None or classes <= widest)


_WARP = 64 if torch.version.hip else 32
"""Threads per warp where it matters for speed."""


def _vectors_and_edges(classes: int, tensors: tuple[Tensor, ...]) -> tuple[int, bool]:
    """Elements of the narrowest tensor in 16 bytes, and whether the rows of all have edges, at the same columns."""
    vector = 4
    multiple = classes
    for tensor in tensors:
        vector = max(vector, 16 // tensor.element_size())
        multiple |= tensor.stride(0) | tensor.data_ptr()
    # The compiler knows what is a multiple of 16, in elements as in bytes.
    if not multiple & 15 or classes < 2 * vector:
        return vector, False
    starts = {tensor.data_ptr() // tensor.element_size() % vector for tensor in tensors}
    steps = {tensor.stride(0) % vector for tensor in tensors}
    return vector, len(starts) == 1 and (len(steps) == 1 or tensors[0].shape[0] == 1)


def _check(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype == torch.float64:
            raise UnsupportedInput("float64: the kernels compute in float32")


def softmax_forward(input: Tensor, output: Tensor) -> None:
    """``output <- softmax(input)`` over (rows, classes)."""
    _forward(input, output, LOG=False)


def log_softmax_forward(input: Tensor, output: Tensor) -> None:
    """``output <- log_softmax(input)`` over (rows, classes)."""
    _forward(input, output, LOG=True)


def softmax_backward(grad_output: Tensor, output: Tensor, grad_input: Tensor) -> None:
    """``grad_input <- d softmax`` from the gradient of its result and the result itself."""
    _backward(grad_output, output, grad_input, LOG=False)


def log_softmax_backward(grad_output: Tensor, output: Tensor, grad_input: Tensor) -> None:
    """``grad_input <- d log_softmax`` from the gradient of its result and the result itself."""
    _backward(grad_output, output, grad_input, LOG=True)


def _forward(input: Tensor, output: Tensor, LOG: bool) -> None:
    _check(input, output)
    rows, classes = input.shape
    if not rows or not classes:
        return
    schedule = _schedule("forward", classes)
    vector, edges = _vectors_and_edges(classes, (input, output))
    if schedule.hold:
        softmax_fwd_long_kernel[(rows,)](
            input,
            output,
            classes,
            input.stride(0),
            output.stride(0),
            LOG=LOG,
            BLOCK=schedule.block,
            HOLD=schedule.hold,
            LANES=schedule.warps * _WARP,
            VECTOR=vector,
            EDGES=edges,
            num_warps=schedule.warps,
        )
    else:
        softmax_fwd_kernel[(triton.cdiv(rows, schedule.rows),)](
            input,
            output,
            rows,
            classes,
            input.stride(0),
            output.stride(0),
            LOG=LOG,
            ROWS=schedule.rows,
            BLOCK=schedule.block,
            VECTOR=vector,
            EDGES=edges,
            num_warps=schedule.warps,
        )


def _backward(grad_output: Tensor, output: Tensor, grad_input: Tensor, LOG: bool) -> None:
    _check(grad_output, output, grad_input)
    rows, classes = output.shape
    if not rows or not classes:
        return
    schedule = _schedule("backward", classes)
    vector, edges = _vectors_and_edges(classes, (output, grad_output, grad_input))
    if schedule.hold:
        softmax_bwd_long_kernel[(rows,)](
            grad_output,
            output,
            grad_input,
            classes,
            grad_output.stride(0),
            output.stride(0),
            grad_input.stride(0),
            LOG=LOG,
            BLOCK=schedule.block,
            HOLD=schedule.hold,
            LANES=schedule.warps * _WARP,
            VECTOR=vector,
            EDGES=edges,
            num_warps=schedule.warps,
        )
    else:
        softmax_bwd_kernel[(triton.cdiv(rows, schedule.rows),)](
            grad_output,
            output,
            grad_input,
            rows,
            classes,
            grad_output.stride(0),
            output.stride(0),
            grad_input.stride(0),
            LOG=LOG,
            ROWS=schedule.rows,
            BLOCK=schedule.block,
            VECTOR=vector,
            EDGES=edges,
            num_warps=schedule.warps,
        )
