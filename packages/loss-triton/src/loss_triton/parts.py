"""Rows that are held in registers and so read from memory once: a part by each of the programs that share a row.

A row of one part concerns no other program, and nothing of what follows is done. Each program publishes what it found
in its part as a word, which is 0 before and is the whole message (see ``total``), and looks for the words of the
others. Programs of a row start one after the other, so that they run at the same time nearly always; but nothing
promises it. So none waits for good: a program whose patience ends reads the parts that it lacks itself, to the same
bits. The last program of a row that has looked leaves its words at 0.

What a part has been read for may be written over (a gradient that takes the logits' memory) once its word is there, and
not before: who reads it for another looks at the word once more afterwards.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loss_triton.rows import (
    edge_columns,
    finite_or_zero,
    lane_max,
    lane_sum,
    opaque,
    vectors,
)

# How the caches are told to treat rows where a result as large is written.
BESIDE_A_RESULT = tl.constexpr("evict_last")

# Words of a row come in sectors of their own: of 128 bytes, so many words.
SECTOR = tl.constexpr(16)


def parts_words(rows: int, parts: int) -> int:
    """int64 words of a launch that divides rows so."""
    return rows * (-(-(parts + 1) // SECTOR.value) * SECTOR.value)


@triton.jit
def words_of_row(workspace_ptr, row, parts):
    """Where the words of a row begin: one of each part, and a count of the programs that have left."""
    return workspace_ptr + tl.cast(row, tl.int64) * (tl.cdiv(parts + 1, SECTOR) * SECTOR)


@triton.jit
def message_of(first, second):
    """Two float32 as a word, which is 0 where both are 0.0."""
    high = first.to(tl.int32, bitcast=True).to(tl.int64)
    low = second.to(tl.int32, bitcast=True).to(tl.int64)
    return (high << 32) | (low & 0xFFFFFFFF)


@triton.jit
def numbers_of(words):
    """The two float32 of a word."""
    first = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return first, words.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def tell(words_ptr, part, message):
    """Publish what was found in a part."""
    tl.atomic_add(words_ptr + part, message, sem="relaxed")


@triton.jit
def _look(words_ptr, parts, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    words = tl.load(words_ptr + lane, mask=lane < parts, other=0, volatile=True)
    # Over all lanes, so that all warps go the same way.
    return words, tl.sum((words != 0).to(tl.int32), 0) == parts


@triton.jit
def told(words_ptr, parts, PATIENCE: tl.constexpr, LANES: tl.constexpr):
    """The words of all parts, one a lane, 0 from lane `parts` on; and whether all are there."""
    words, complete = _look(words_ptr, parts, LANES)
    tries = 1
    while (not complete) & (tries < PATIENCE):
        words, complete = _look(words_ptr, parts, LANES)
        tries += 1
    return words, complete


@triton.jit
def word_in(words, part, LANES: tl.constexpr):
    """The word of one part."""
    return tl.sum(tl.where(tl.arange(0, LANES) == part, words, 0), 0)


@triton.jit
def with_word(words, words_ptr, part, message, LANES: tl.constexpr):
    """The words with that of a part which was read for another: its own if it has come meanwhile, or else `message`."""
    # All lanes have read the part before one looks.
    tl.debug_barrier()
    word = tl.atomic_add(words_ptr + part, 0, sem="acq_rel")
    return tl.where(tl.arange(0, LANES) == part, tl.where(word == 0, message, word), words)


@triton.jit
def leave(words_ptr, parts, SEM: tl.constexpr, LANES: tl.constexpr):
    """For a program that will look at no word any more: how many of the row's have left before, in the first lane.

    SEM: "relaxed" for one that has seen all words, its own among them; "acq_rel" for one that must not count as gone
    before what it published can be seen.
    """
    lane = tl.arange(0, LANES)
    return tl.atomic_add(words_ptr + parts + tl.zeros((LANES,), tl.int32), 1, mask=lane == 0, sem=SEM)


@triton.jit
def clear(words_ptr, parts, left, LANES: tl.constexpr):
    """Leave the words of the row at 0, if this program was the last to leave."""
    lane = tl.arange(0, LANES)
    first = tl.sum(tl.where(lane == 0, left, 0), 0) < parts - 1
    tl.store(words_ptr + lane, tl.zeros((LANES,), tl.int64), mask=lane < tl.where(first, 0, parts + 1))


@triton.jit
def learnt(
    words_ptr, row_ptrs, head, body, classes, parts, argument, MESSAGE_OF_OTHER: tl.constexpr,
    PATIENCE: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The words of all parts, one a lane, for a program that has told its own; and what ``clear`` needs.

    MESSAGE_OF_OTHER finds out what another part's program does, in the same order, from the rows at row_ptrs.
    """
    words, complete = told(words_ptr, parts, PATIENCE, LANES)
    if complete:
        left = leave(words_ptr, parts, "relaxed", LANES)
    else:
        for part in range(parts):
            if word_in(words, part, LANES) == 0:
                message = MESSAGE_OF_OTHER(
                    row_ptrs, head, body, classes, part, argument, VECTOR, EDGES, LANES, CHUNKS
                )  # fmt: skip
                words = with_word(words, words_ptr, part, message, LANES)
        left = leave(words_ptr, parts, "acq_rel", LANES)
    return words, left


# A part is a tuple of chunks, a vector for each lane: arithmetic that took all of it at a time would take registers for
# all of it as float32, several times. Of a row that one program holds alone all chunks but the last are full, or with
# edges all but two: FULL says of how many that is taken for known, which saves masks and what they leave out.


@triton.jit
def chunk_of(row_ptr, head, body, part, chunk, VECTOR: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr):
    """Pointers to a chunk, as (1, WIDTH), and which of its columns there are.

    Chunks are a constant apart, which shows only where it is added last.
    """
    begin = part * (CHUNKS * WIDTH)
    column = tl.arange(0, WIDTH)[None, :]
    ptr = vectors(vectors(row_ptr + (head + begin), column, VECTOR), chunk * WIDTH, VECTOR)
    return ptr, column < body - begin - chunk * WIDTH


@triton.jit
def load_chunk(
    row_ptr, head, body, part, chunk, other,
    VECTOR: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, EVICTION: tl.constexpr,
):  # fmt: skip
    """A chunk, `other` where it has no column."""
    ptr, inside = chunk_of(row_ptr, head, body, part, chunk, VECTOR, WIDTH, CHUNKS)
    return tl.load(ptr, mask=inside, other=other, eviction_policy=EVICTION)


@triton.jit
def store_chunk(
    row_ptr, values, head, body, part, chunk,
    VECTOR: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, FULL: tl.constexpr = 0,
):  # fmt: skip
    """Write a chunk."""
    ptr, inside = chunk_of(row_ptr, head, body, part, chunk, VECTOR, WIDTH, CHUNKS)
    values = values.to(row_ptr.dtype.element_ty)
    if chunk < FULL:
        tl.store(ptr, values, eviction_policy="evict_first")
    else:
        tl.store(ptr, values, mask=inside, eviction_policy="evict_first")


@triton.jit
def load_part(
    row_ptr, head, body, part, other,
    VECTOR: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, EVICTION: tl.constexpr, FULL: tl.constexpr = 0,
):  # fmt: skip
    """All chunks of a part, `other` where there is no column."""
    held = ()
    for chunk in tl.static_range(CHUNKS):
        if chunk < FULL:
            ptr, _ = chunk_of(row_ptr, head, body, part, chunk, VECTOR, WIDTH, CHUNKS)
            loaded = tl.load(ptr, eviction_policy=EVICTION)
        else:
            loaded = load_chunk(row_ptr, head, body, part, chunk, other, VECTOR, WIDTH, CHUNKS, EVICTION)
        # Triton has no (*held, loaded).
        held = held + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
    return held


@triton.jit
def load_part_if(
    wanted, row_ptr, head, body, part, other,
    VECTOR: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, EARLY: tl.constexpr, EVICTION: tl.constexpr,
):  # fmt: skip
    """The same of a part that is wanted; of another something.

    One chunk in EARLY, the first ones, does not wait until it is known whether the part is wanted.
    """
    held = ()
    for chunk in tl.static_range(CHUNKS):
        width = body if chunk < tl.cdiv(CHUNKS, EARLY) else tl.where(wanted, body, 0)
        loaded = load_chunk(row_ptr, head, width, part, chunk, other, VECTOR, WIDTH, CHUNKS, EVICTION)
        held = held + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
    return held


@triton.jit
def chunks_of(body, part, WIDTH: tl.constexpr, CHUNKS: tl.constexpr):
    """How many chunks of a part have columns. A loop over them is not unrolled, which would take registers."""
    return tl.minimum(tl.cdiv(body - part * (CHUNKS * WIDTH), WIDTH), CHUNKS)


@triton.jit
def edges_of_part(head, body, classes, part, VECTOR: tl.constexpr):
    """Columns of the row's edges, and which of them a part has: the first all, others none."""
    columns, in_edge = edge_columns(head, body, classes, VECTOR)
    # The interpreter cannot broadcast a truth value.
    return columns, in_edge & (columns * 0 + part == 0)


@triton.jit
def load_edges(row_ptr, head, body, classes, part, other, VECTOR: tl.constexpr, EDGES: tl.constexpr):
    """A part's edges in float32, `other` where it has none."""
    if EDGES:
        columns, in_edge = edges_of_part(head, body, classes, part, VECTOR)
        return tl.load(row_ptr + columns, mask=in_edge, other=other).to(tl.float32)
    else:
        return tl.full((1, 1), other, tl.float32)


# Maximum and sum of exponentials of a row, for cross-entropy and softmax.


@triton.jit
def peak_of_part(held, x_edge, EDGES: tl.constexpr, LANES: tl.constexpr):
    """Its maximum."""
    peaks = lane_max(held[0].to(tl.float32), LANES)
    for chunk in tl.static_range(1, len(held)):
        peaks = tl.maximum(peaks, lane_max(held[chunk].to(tl.float32), LANES))
    peak = tl.max(peaks, 0)
    if EDGES:
        peak = tl.maximum(peak, tl.max(tl.max(x_edge, 1), 0))
    return peak


@triton.jit
def totals_of_chunk(x, peak, log2_scale, LANES: tl.constexpr):
    """Sums of the lanes' 2**((x - peak) * log2_scale), 0 in a part of -inf alone."""
    return lane_sum(tl.exp2((opaque(x).to(tl.float32) - finite_or_zero(peak)) * log2_scale), LANES)


@triton.jit
def totals_of_part(held, peak, log2_scale, LANES: tl.constexpr):
    """The same of all chunks."""
    totals = totals_of_chunk(held[0], peak, log2_scale, LANES)
    for chunk in tl.static_range(1, len(held)):
        totals += totals_of_chunk(held[chunk], peak, log2_scale, LANES)
    return totals


@triton.jit
def total_of_edges(x_edge, peak, log2_scale, EDGES: tl.constexpr):
    """The same of the edges."""
    if EDGES:
        return tl.sum(tl.sum(tl.exp2((x_edge - finite_or_zero(peak)) * log2_scale), 1), 0)
    else:
        return 0.0


@triton.jit
def _message_of_other(
    row_ptrs, head, body, classes, part, log2_scale,
    VECTOR: tl.constexpr, EDGES: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """For ``learnt``. The part is read twice, and not held."""
    row_ptr = row_ptrs[0]
    WIDTH: tl.constexpr = LANES * VECTOR
    peaks = tl.full((LANES,), float("-inf"), tl.float32)
    for chunk in range(chunks_of(body, part, WIDTH, CHUNKS)):
        x = load_chunk(row_ptr, head, body, part, chunk, float("-inf"), VECTOR, WIDTH, CHUNKS, BESIDE_A_RESULT)
        peaks = tl.maximum(peaks, lane_max(x.to(tl.float32), LANES))
    peak = tl.max(peaks, 0)
    x_edge = load_edges(row_ptr, head, body, classes, part, float("-inf"), VECTOR, EDGES)
    if EDGES:
        peak = tl.maximum(peak, tl.max(tl.max(x_edge, 1), 0))
    totals = tl.zeros((LANES,), tl.float32)
    for chunk in range(chunks_of(body, part, WIDTH, CHUNKS)):
        x = load_chunk(row_ptr, head, body, part, chunk, float("-inf"), VECTOR, WIDTH, CHUNKS, BESIDE_A_RESULT)
        totals += totals_of_chunk(x, peak, log2_scale, LANES)
    return message_of(peak, tl.sum(totals, 0) + total_of_edges(x_edge, peak, log2_scale, EDGES))


@triton.jit
def peak_and_total(
    words_ptr, row_ptr, head, body, classes, parts, log2_scale,
    PATIENCE: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Maximum (-inf in a row of that alone) and sum of the row, for a program that has told its own.

    And what ``clear`` needs.
    """
    words, left = learnt(
        words_ptr, (row_ptr,), head, body, classes, parts, log2_scale, _message_of_other,
        PATIENCE, VECTOR, EDGES, LANES, CHUNKS,
    )  # fmt: skip
    there = tl.arange(0, LANES) < parts
    peaks, totals = numbers_of(words)
    peaks = tl.where(there, peaks, float("-inf"))
    peak = tl.max(peaks, 0)
    total = tl.sum(tl.where(there, totals * tl.exp2((peaks - finite_or_zero(peak)) * log2_scale), 0.0), 0)
    return peak, total, left
