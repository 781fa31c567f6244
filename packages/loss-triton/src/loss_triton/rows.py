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


@triton.jit
def sum_of_rows(row_ptr, rows, LANES: tl.constexpr):
    """Sum of row_ptr (rows,) float32, in a fixed order; past the L1 cache, since other programs wrote it.

    row_ptr: a multiple of 16 bytes.
    """
    # A lane has several vectors in flight: nothing else runs by now, and each step costs a latency of memory.
    WIDTH: tl.constexpr = 4 * LANES
    body = rows // 4 * 4
    totals = tl.zeros((LANES,), tl.float32)
    for start in range(0, body, 4 * WIDTH):
        columns = block_columns(start, 4 * WIDTH, WIDTH)
        losses = tl.load(vectors(row_ptr, columns, 4), mask=columns < body, other=0.0, cache_modifier=".cg")
        totals += lane_sum(losses, LANES)
    rest = body + tl.arange(0, 4)
    return tl.sum(totals, 0) + tl.sum(tl.load(row_ptr + rest, mask=rest < rows, other=0.0, cache_modifier=".cg"), 0)


# The counters of a launch are int64 words: the first counts finished rows, the last one is for ``denominator`` to count
# targets in. They lie in different sectors of memory, for all programs write the one and read the other.
COUNTERS = 17
COUNT_WORD = tl.constexpr(COUNTERS - 1)
FINISHED_ROW = tl.constexpr(1 << 32)


@triton.jit
def row_is_known(counters_ptr, live):
    """Announce what this program has stored for its row. Nothing waits for it but the thread that stored it."""
    tl.atomic_add(counters_ptr, live.to(tl.int64) + FINISHED_ROW, sem="release")


@triton.jit
def wait_for_rows(counters_ptr, rows):
    """Wait until all rows are known, and set the counters back to 0; returns the number of rows not ignored.

    For one program at its end, while others run in every other place.
    """
    all_finished = tl.cast(rows, tl.int64) * FINISHED_ROW
    word = tl.atomic_add(counters_ptr, 0, sem="acquire")
    while word < all_finished:
        word = tl.atomic_add(counters_ptr, 0, sem="acquire")
    tl.store(counters_ptr, 0)
    tl.store(counters_ptr + COUNT_WORD, 0)
    return word % FINISHED_ROW
