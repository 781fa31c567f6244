"""Device functions that the kernels share: where a row lies, and what is done to a block of it.

A row that does not start at a multiple of 16 bytes, or does not end at one, cannot be read in 16-byte vectors as it
stands. It is cut into a head and a tail shorter than one vector, together the *edges*, and a body in between that
starts and ends at a multiple of it. ``VECTOR`` is the number of elements in 16 bytes; the host sets ``EDGES`` only
where all rows of both tensors, read and written, are cut at the same columns.
"""

import triton
import triton.language as tl


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
def online_logsumexp(x, maximum, total):
    """Take a block into the running maximum and the running sum of exp(x - maximum) (Milakov and Gimelshein, 2018).

    A block of only -inf leaves both as they are: what is subtracted is never -inf.
    """
    larger = tl.maximum(maximum, tl.max(x, 0))
    finite = tl.where(larger == float("-inf"), 0.0, larger)
    total = total * tl.exp(maximum - finite) + tl.sum(tl.exp(x - finite), 0)
    return larger, total


@triton.jit
def logsumexp(maximum, total):
    """log(sum(exp(x))) from the running pair; -inf for a row of only -inf."""
    return tl.where(maximum == float("-inf"), 0.0, maximum) + tl.log(total)


@triton.jit
def softcapped(x, softcap):
    """softcap * tanh(x / softcap), to float32 rounding of the result also where x is small."""
    u = x / softcap
    decay = tl.exp(-2.0 * tl.abs(u))
    magnitude = (1.0 - decay) / (1.0 + decay)
    square = u * u
    # 1 - decay cancels for small u, where four terms of the series are enough.
    series = u * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315))))
    return softcap * tl.where(tl.abs(u) < 0.2, series, tl.where(u < 0.0, -magnitude, magnitude))
