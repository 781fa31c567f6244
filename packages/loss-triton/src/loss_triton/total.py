"""The sum of what programs find out about their rows, in the launch in which they do.

Each program publishes its row's value in a word of its own, which is 0 before. The word is the whole message: nothing
has to be visible before it is, so that no program waits for what it has stored, as it would have to before it told a
counter. The last programs take a slice of the rows each: they wait for its words, add them up and publish the sum, and
the very last adds the sums. Their order depends on nothing but the number of rows, and all words are left at 0.

Programs start in the order of their rows, and a slice ends before the row of its program: nobody waits for a program
that has no place yet.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loss_triton.rows import block_columns, lane_sum, vectors

# The workspace is of int64 words. In the first, ``denominator`` counts targets; it has a sector of memory to itself,
# for all programs read it. Then, for each value of rows that is summed: a word for each slice, and half a word for each
# row.
_COUNT_WORDS = tl.constexpr(16)
_SLICES = tl.constexpr(64)

# Rows that one program adds up: with fewer, to publish another sum takes longer.
_LEAST_SLICE = tl.constexpr(256)

# A published float32 is its bits with the sign turned, so that 0.0 is not 0; and a row that is ignored is a NaN that no
# arithmetic makes, for it signals.
_SIGN = tl.constexpr(-(1 << 31))
_IGNORED = tl.constexpr(0x7F800001 - (1 << 31))


def workspace_words(rows: int, values: int = 1) -> int:
    """int64 words of a launch that sums so many values of each row."""
    return _COUNT_WORDS.value + values * (_SLICES.value + (rows + 3) // 4 * 2)


@triton.jit
def words_of(workspace_ptr, rows, VALUE: tl.constexpr):
    """Where the words of a value begin."""
    return workspace_ptr + _COUNT_WORDS + VALUE * (_SLICES + tl.cdiv(rows, 4) * 2)


@triton.jit
def _row_words(words_ptr):
    return (words_ptr + _SLICES).to(tl.pointer_type(tl.int32))


@triton.jit
def _slices(rows):
    """Vectors of four rows in a slice, and how many slices there are."""
    size = tl.maximum(tl.cdiv(tl.cdiv(rows, 4), _SLICES), _LEAST_SLICE // 4)
    return size, tl.cdiv(rows, 4 * size)


@triton.jit
def publish(words_ptr, row, value, live):
    """Tell a row's value, or that the row is ignored."""
    # The sum makes -0.0 the 0.0 that it equals.
    bits = (value + 0.0).to(tl.int32, bitcast=True) ^ _SIGN
    tl.atomic_add(_row_words(words_ptr) + row, tl.where(live, bits, _IGNORED), sem="relaxed")


@triton.jit
def _taken(word_ptr, needed, there):
    """The words `there`, once those `needed` are known; left at 0."""
    words = tl.load(word_ptr, mask=there, other=0, volatile=True)
    while tl.max(tl.ravel((needed & (words == 0)).to(tl.int32)), 0) == 1:
        words = tl.load(word_ptr, mask=there, other=0, volatile=True)
    # Each warp reads all words for itself where they are fewer than lanes.
    tl.debug_barrier()
    tl.store(word_ptr, tl.zeros(words.shape, words.dtype), mask=there)
    return words


@triton.jit
def sum_slice(words_ptr, row, rows, LANES: tl.constexpr):
    """For a program that has published its row: if it is one of the last, add up a slice.

    The slice ends before the program's own row, or with the last, so that it waits for no row that comes later.
    """
    size, slices = _slices(rows)
    number = row - (rows - slices)
    if number >= 0:
        begin = number * size * 4
        end = tl.minimum(begin + size * 4, rows)
        totals = tl.zeros((LANES,), tl.float32)
        live = tl.zeros((LANES,), tl.int32)
        for start in range(begin, end, 4 * LANES):
            rows_here = block_columns(start, 4 * LANES, 4 * LANES)
            inside = rows_here < tl.cdiv(end, 4) * 4
            row_ptr = vectors(_row_words(words_ptr), rows_here, 4)
            words = _taken(row_ptr, rows_here < end, inside)
            of_live = (words != 0) & (words != _IGNORED)
            totals += lane_sum(tl.where(of_live, (words ^ _SIGN).to(tl.float32, bitcast=True), 0.0), LANES)
            live += lane_sum(of_live.to(tl.int32), LANES)
        total_bits = tl.sum(totals, 0).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        tl.atomic_add(words_ptr + number, ((tl.sum(live, 0).to(tl.int64) + 1) << 32) | total_bits, sem="relaxed")


@triton.jit
def sum_of_slices(words_ptr, rows):
    """For the program of the last row: the sum of all rows' values, and how many rows are not ignored."""
    _, slices = _slices(rows)
    number = tl.arange(0, _SLICES)
    there = number < slices
    words = _taken(words_ptr + number, there, there)
    totals = tl.where(there, words.to(tl.int32).to(tl.float32, bitcast=True), 0.0)
    return tl.sum(totals, 0), tl.sum(tl.where(there, (words >> 32) - 1, 0), 0)
