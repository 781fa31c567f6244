"""Device functions that the kernels share: where a row lies, and what is done to a block of it.

A row that does not start at a multiple of 16 bytes, or does not end at one, cannot be read in 16-byte vectors as it
stands. It is cut into a head and a tail shorter than one vector, together the *edges*, and a body in between that
starts and ends at a multiple of it. ``VECTOR`` is the number of elements in 16 bytes; the host sets ``EDGES`` only
where all rows of both tensors, read and written, are cut at the same columns.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def body_start(row, stride, VECTOR: tl.constexpr, EDGES: tl.constexpr):
    """Offset of the first element of the row's body, of which the compiler can see that it is a multiple of VECTOR."""
    start = tl.cast(row, tl.int64) * stride
    if EDGES:
        start = (start + (VECTOR - 1)) // VECTOR * VECTOR
    return start


@triton.jit
def body_span(row, stride, classes, VECTOR: tl.constexpr, EDGES: tl.constexpr):
    """Width of the row's head and of its body."""
    if EDGES:
        start = tl.cast(row, tl.int64) * stride
        head = ((start + (VECTOR - 1)) // VECTOR * VECTOR - start).to(tl.int32)
        # A row may be shorter than its head would be.
        head = tl.minimum(head, classes)
        return head, (classes - head) // VECTOR * VECTOR
    else:
        return 0, classes


@triton.jit
def edge_columns(head, body, classes, VECTOR: tl.constexpr):
    """Columns of the head and of the tail, and which of these 2 * VECTOR lanes stand for one."""
    lane = tl.arange(0, 2 * VECTOR)
    columns = tl.where(lane < VECTOR, lane, head + body + lane - VECTOR)
    inside = tl.where(lane < VECTOR, lane < head, columns < classes)
    return columns, inside


@triton.jit
def finite_or_zero(maximum):
    """What may be subtracted: the maximum, or 0 where there is none (only -inf), since -inf - -inf is NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def online_sum(x, maximum, total, log2_scale):
    """Take a block into the running maximum and the running sum of 2**((x - maximum) * log2_scale).

    This is the online softmax of Milakov and Gimelshein (2018). The difference is taken before it is scaled: it is
    exact where the logits are far from zero. exp2 rather than exp, which pays for results below 2**-126.
    """
    larger = tl.maximum(maximum, tl.max(x, 0))
    finite = finite_or_zero(larger)
    total = total * tl.exp2((maximum - finite) * log2_scale)
    return larger, total + tl.sum(tl.exp2((x - finite) * log2_scale), 0)


@triton.jit
def softcapped(x, softcap):
    """softcap * tanh(x / softcap), to float32 rounding of the result also where x is small."""
    u = x / softcap
    decay = tl.exp2(tl.abs(u) * (-2.0 * LOG2_E))
    magnitude = (1.0 - decay) / (1.0 + decay)
    square = u * u
    # 1 - decay cancels for small u, where four terms of the series are enough.
    series = u * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315))))
    return softcap * tl.where(tl.abs(u) < 0.2, series, tl.where(u < 0.0, -magnitude, magnitude))


@triton.jit
def zero_row(
    grad_ptr, row, classes, grad_stride, head, body, VECTOR: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr
):
    """Write zeros to a row of grad_ptr (rows, classes)."""
    body_ptr = grad_ptr + body_start(row, grad_stride, VECTOR, EDGES)
    offsets = tl.arange(0, BLOCK)
    zeros = tl.zeros((BLOCK,), grad_ptr.dtype.element_ty)
    for start in range(0, body, BLOCK):
        tl.store(body_ptr + start + offsets, zeros, mask=start + offsets < body)
    if EDGES:
        columns, inside = edge_columns(head, body, classes, VECTOR)
        edge_zeros = tl.zeros((2 * VECTOR,), grad_ptr.dtype.element_ty)
        tl.store(grad_ptr + tl.cast(row, tl.int64) * grad_stride + columns, edge_zeros, mask=inside)
