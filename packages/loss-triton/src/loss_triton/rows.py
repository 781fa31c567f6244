"""Device functions that the kernels share: where a row lies, and what is done to a block of it.

A row that does not start at a multiple of 16 bytes, or does not end at one, cannot be read in 16-byte vectors as it
stands. It is cut into a head and a tail shorter than one vector, together the *edges*, and a body in between that
starts and ends at a multiple of it. ``VECTOR`` is the number of elements in 16 bytes, or 1 where rows of the tensors
that are read and written are not cut at the same columns; without ``EDGES`` the body is the whole row.

A block is (rounds, LANES * VECTOR) elements of a row: a lane, which is a thread, has a vector of each round.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def body_of(row_ptr, classes, VECTOR: tl.constexpr, EDGES: tl.constexpr):
    """Width of the row's head and of its body."""
    head = 0
    if EDGES:
        SIZE: tl.constexpr = row_ptr.dtype.element_ty.primitive_bitwidth // 8
        start = row_ptr.to(tl.int64) // SIZE
        # A row may be shorter than its head would be.
        head = tl.minimum((VECTOR - start % VECTOR) % VECTOR, classes).to(tl.int32)
    # Rounded without edges too, where it changes nothing, to show the compiler that masks do not cut vectors.
    return head, (classes - head) // VECTOR * VECTOR


@triton.jit
def row_of(
    logits_ptr, target_ptr, row, classes, logits_stride, ignore_index, VECTOR: tl.constexpr, EDGES: tl.constexpr
):  # fmt: skip
    """A row's target, whether the row is not ignored, its pointer, and the widths of its head and its body."""
    target = tl.load(target_ptr + row).to(tl.int64)
    row_ptr = logits_ptr + tl.cast(row, tl.int64) * logits_stride
    head, body = body_of(row_ptr, classes, VECTOR, EDGES)
    return target, target != ignore_index, row_ptr, head, body


@triton.jit
def foresee(target_ptr, row, rows, LANES: tl.constexpr):
    """Ask the multiprocessor's own cache for the targets of the next rows, which programs that start here later have.

    Without it each waits for its target until L2 has answered.
    """
    if not _INTERPRETED and tl.target_info.is_cuda():
        next_row = tl.minimum(row + 1 + tl.arange(0, LANES), rows - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L1 [$1]; mov.b32 $0, 0;", "=r,l", [target_ptr + next_row],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def block_columns(start, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """SIZE columns from start, as (SIZE // WIDTH, WIDTH)."""
    return start + tl.arange(0, SIZE // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def vectors(body_ptr, columns, VECTOR: tl.constexpr):
    """Pointers to columns of a body, with the alignment that the compiler cannot see."""
    if VECTOR > 1:
        return tl.multiple_of(body_ptr + columns, (1, 16))
    else:
        return body_ptr + columns


@triton.jit
def edge_columns(head, body, classes, VECTOR: tl.constexpr):
    """Columns of the head and of the tail as (1, 2 * VECTOR), and which of them there are."""
    lane = tl.arange(0, 2 * VECTOR)[None, :]
    columns = tl.where(lane < VECTOR, lane, head + body + lane - VECTOR)
    inside = tl.where(lane < VECTOR, lane < head, columns < classes)
    return columns, inside


@triton.jit
def opaque(x):
    """x, of which the compiler may not keep another form (float32) from before in registers."""
    if _INTERPRETED or x.dtype.primitive_bitwidth != 16:
        return x
    elif tl.target_info.is_cuda():
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    else:
        return x


@triton.jit
def opaque_until(x, after):
    """As ``opaque``, and with which the compiler can begin nothing before it has `after`, a float32 scalar."""
    if _INTERPRETED or x.dtype.primitive_bitwidth != 16:
        return x
    elif tl.target_info.is_cuda():
        # 0, since grids have one dimension, which the compiler does not know.
        zero = after.to(tl.int32, bitcast=True) & tl.program_id(1)
        return tl.inline_asm_elementwise(
            "xor.b32 $0, $1, $2;", "=r,r,r,r", [x, zero], dtype=x.dtype, is_pure=True, pack=2
        )  # fmt: skip
    else:
        return x


@triton.jit
def lane_max(x, LANES: tl.constexpr):
    """Maximum of each lane of a block; no lane waits for another."""
    VECTOR: tl.constexpr = x.shape[1] // LANES
    return tl.max(tl.max(tl.reshape(x, (x.shape[0], LANES, VECTOR)), 2), 0)


@triton.jit
def lane_sum(x, LANES: tl.constexpr):
    """Sum of each lane of a block; no lane waits for another."""
    VECTOR: tl.constexpr = x.shape[1] // LANES
    return tl.sum(tl.sum(tl.reshape(x, (x.shape[0], LANES, VECTOR)), 2), 0)


@triton.jit
def over_lanes(value, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """One value per lane, for each element of a block."""
    return tl.reshape(tl.broadcast_to(value[:, None], (LANES, VECTOR)), (1, LANES * VECTOR))


@triton.jit
def finite_or_zero(maximum):
    """What may be subtracted: the maximum, or 0 where there is none (only -inf), since -inf - -inf is NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def online_sum(x, peak, total, log2_scale, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """Take a block into each lane's running maximum and running sum of 2**((x - maximum) * log2_scale).

    This is the online softmax of Milakov and Gimelshein (2018). The difference is taken before it is scaled: it is
    exact where the logits are far from zero. exp2 rather than exp, which pays for results below 2**-126.
    """
    larger = tl.maximum(peak, lane_max(x, LANES))
    finite = finite_or_zero(larger)
    total = total * tl.exp2((peak - finite) * log2_scale)
    return larger, total + lane_sum(tl.exp2((x - over_lanes(finite, LANES, VECTOR)) * log2_scale), LANES)


@triton.jit
def fused(x, power, bias):
    """x * power - bias, rounded once."""
    if _INTERPRETED:
        # Whose own rounds twice.
        return (x.to(tl.float64) * power - bias).to(tl.float32)
    else:
        return tl.fma(x, power, -bias)


@triton.jit
def argument_of(peak, scale):
    """Power, bias and factor with which 2**((x - peak) * scale) is 2**(x * power - bias) * factor, for x up to peak.

    One instruction for the argument instead of two. The bias is rounded, which the factor takes back.
    """
    # From a bias of 2**30 on, whose rounding could be too much for a factor, float32 numbers lie so far apart that the
    # result is 1 or 0; it is with any power that keeps them apart, and a power of two has nothing to round.
    is_near = tl.abs(peak * scale) < 2.0**30
    power = tl.where(is_near, scale, tl.where(tl.abs(peak) > 2.0**40, 1.0, 2.0**64))
    bias = peak * power
    return power, bias, tl.exp2(-fused(peak, power, bias))


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
    row_ptr, classes, head, body,
    VECTOR: tl.constexpr, EDGES: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write zeros to the row at row_ptr."""
    zeros = tl.zeros((BLOCK // (LANES * VECTOR), LANES * VECTOR), row_ptr.dtype.element_ty)
    for start in range(0, body, BLOCK):
        columns = block_columns(start, BLOCK, LANES * VECTOR)
        tl.store(vectors(row_ptr + head, columns, VECTOR), zeros, mask=columns < body)
    if EDGES:
        columns, inside = edge_columns(head, body, classes, VECTOR)
        tl.store(row_ptr + columns, tl.zeros((1, 2 * VECTOR), row_ptr.dtype.element_ty), mask=inside)
