"""Rows through a ring, on GPUs that copy in bulk (compute capability 9.0 and later): the mechanism.

The warps that work on rows never ask for memory. A warp of its own, of which one thread runs, keeps a ring of chunks
filled: it draws the number of the next row from a counter, and each chunk is one request. So what is in flight depends
on the size of the ring alone, and not on what the other threads do. They take the chunks out as they come, and hold the
row in registers until what they need of all of it is known: a chunk's place is free again as soon as it has been read,
and the next row is on its way while this one's results are written.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from ._device import (
    MeetingRows,
    arrive,
    arrive_and_expect,
    barrier,
    cluster_barrier,
    copy_bulk,
    draw,
    evict_first,
    larger,
    load_shared,
    load_shared_word,
    make_mbarrier,
    named_barrier,
    pack,
    select_below,
    select_words,
    send,
    show_mbarriers,
    smaller,
    store_global,
    store_shared_word,
    unpack,
    wait_for,
    warp_barrier,
)
from ._schedule import RING_ENTRY_WORDS, VECTOR_BYTES, Ring
from ._workspace import WORKSPACE_DRAWN


class Fetched(NamedTuple):
    """How far the thread that fetches has come.

    The place of the next chunk and that of the next number that is sent, each with the parity of its phase.
    """

    place: Int32
    parity: Int32
    sent_place: Int32
    sent_parity: Int32


class RingRows(MeetingRows):
    """The mechanism of a kernel with rings.

    A block has ``groups`` of ``row_threads`` threads and as many warps that fetch; with a cluster of two each block has
    half of a row.

    A block may end while the other still runs: what the other sends are entries, for which all threads that work on the
    row wait, and numbers, for which the thread that fetches waits before it knows that there are no more rows.

    Compile-time facts as in ``StagedRows``; ``ring.held``: chunks of a row, where they are held; ``evicts_first``:
    whether the L2 is to give up what is copied before all else.
    """

    evicts_first: bool

    def __init__(self, dtype, ring: Ring, ragged: bool):
        super().__init__(dtype, ring, ragged, RING_ENTRY_WORDS)
        self.held = ring.held
        # Chunks at a row's end that may not be full: a row touches as many vectors as its place says, or one less.
        self.end_chunks = 2 if ragged else 1
        self.chunk_bytes = ring.chunk_bytes
        # Of one group, by offset: the barrier objects of chunks that are full, of places that are empty, and of numbers
        # sent to the other block; then words: the row after a chunk's, and the numbers sent.
        self.sent_places = ring.sent_places
        self.full = 0
        self.empty = self.full + 8 * self.stages
        self.sent = self.empty + 8 * self.stages
        self.coming = self.sent + 8 * self.sent_places
        self.numbers = self.coming + 4 * self.stages
        self.control_bytes = ring.control_bytes

    # Who does what

    @cute.jit
    def role(self):
        """Whether this thread's warp fetches, the group that it belongs to, and its number there."""
        workers = self.groups * self.row_threads
        at = cute.arch.thread_idx()[0]
        fetches = Int32(0)
        group = at // self.row_threads
        thread = at % self.row_threads
        if at >= workers:
            fetches = Int32(1)
            group = (at - workers) // 32
            thread = Int32(0)
        return fetches, group, thread

    def memory(self, group):
        """Shared memory: that of the block, and the scratch, the control and the ring of a group."""
        s_memory = Int32(cute.arch.get_dyn_smem(Uint32, 128).toint())
        s_control = s_memory + self.groups * self.scratch_bytes
        s_ring = s_control + self.groups * self.control_bytes
        return (
            s_memory,
            s_memory + group * self.scratch_bytes,
            s_control + group * self.control_bytes,
            s_ring + group * (self.stages * self.chunk_bytes),
        )

    @cute.jit
    def make_barriers(self, s_memory):
        """One thread makes the barrier objects of all groups; then all may use them."""
        s_control = s_memory + self.groups * self.scratch_bytes
        if cute.arch.thread_idx()[0] == 0:
            for group in cutlass.range_constexpr(self.groups):
                if cutlass.const_expr(self.cluster > 1):
                    self.make_met(s_memory + group * self.scratch_bytes)
                s_group = s_control + group * self.control_bytes
                for place in cutlass.range_constexpr(self.stages):
                    make_mbarrier(s_group + self.full + 8 * place, 1)
                    make_mbarrier(s_group + self.empty + 8 * place, self.warps)
                for place in cutlass.range_constexpr(self.sent_places):
                    make_mbarrier(s_group + self.sent + 8 * place, 1)
            show_mbarriers()
        if cutlass.const_expr(self.cluster > 1):
            cluster_barrier()
        else:
            barrier()

    def team(self):
        """The first rows go to the first group of each block, that few rows keep many processors busy."""
        return self.role()[1] * (self.teams() // self.groups) + cute.arch.block_idx()[0] // self.cluster

    def teams(self):
        return cute.arch.grid_dim()[0] // self.cluster * self.groups

    def meet(self):
        named_barrier(1 + self.role()[1], self.row_threads)

    # The thread that fetches

    def fetched(self):
        """Before the first chunk: all places are empty."""
        return Fetched(Int32(0), Int32(1), Int32(0), Int32(0))

    @cute.jit
    def fetch_row(self, facts, it, s_control, s_ring, g_vectors, low, high, chunks, at: Fetched):
        """Fetch a row's chunks, as fast as places become empty: of its vectors those of [low, high).

        With the last chunk comes the number of the row after it. That number, and how far it got.
        """
        place, parity, sent_place, sent_parity = at
        policy = evict_first() if self.evicts_first else None
        drawn = draw(it.g_workspace + WORKSPACE_DRAWN * 4, facts.rank == 0)
        for chunk in cutlass.range(chunks - 1, unroll=1):
            wait_for(s_control + self.empty + place * 8, parity)
            self.fetch_chunk(facts, s_control, s_ring, place, g_vectors, chunk, low, high, policy)
            place, parity = self.behind(place, parity, self.stages)
        wait_for(s_control + self.empty + place * 8, parity)
        # Not in the loop, where the compiler would have the sum, and wait for the counter, before the first chunk.
        coming = drawn + it.row_step
        if cutlass.const_expr(self.cluster > 1):
            coming = self.agree(facts, s_control, sent_place, sent_parity, coming)
            sent_place, sent_parity = self.behind(sent_place, sent_parity, self.sent_places)
        store_shared_word(s_control + self.coming + place * 4, coming)
        self.fetch_chunk(facts, s_control, s_ring, place, g_vectors, chunks - 1, low, high, policy)
        place, parity = self.behind(place, parity, self.stages)
        return coming, Fetched(place, parity, sent_place, sent_parity)

    @cute.jit
    def behind(self, place, parity, places: cutlass.Constexpr):
        """The place behind one, and the parity of its phase."""
        place = place + 1
        if place == places:
            place = Int32(0)
            parity = parity ^ 1
        return place, parity

    @cute.jit
    def fetch_chunk(self, facts, s_control, s_ring, place, g_vectors, chunk, low, high, policy):
        """Ask for the vectors of one chunk that are of [low, high)."""
        s_full, s_chunk = s_control + self.full + place * 8, s_ring + place * self.chunk_bytes
        # In one piece, unless another block's vectors lie between.
        pieces = 1 if self.cluster == 1 else self.unroll
        width = self.row_threads * self.unroll // pieces
        copies = []
        size = Int32(0)
        for piece in cutlass.range_constexpr(pieces):
            begin = (chunk * pieces + piece) * (width * self.cluster) + facts.rank * width
            start = larger(begin, low)
            count = larger(smaller(begin + width, high) - start, Int32(0))
            s_piece = s_chunk + (piece * width + start - begin) * VECTOR_BYTES
            copies.append((s_piece, g_vectors + Int64(start) * VECTOR_BYTES, count))
            size = size + count * VECTOR_BYTES
        arrive_and_expect(s_full, size)
        for piece in cutlass.range_constexpr(pieces):
            s_piece, g_piece, count = copies[piece]
            copy_bulk(s_piece, g_piece, count * VECTOR_BYTES, s_full, count > 0, policy)

    def agree(self, facts, s_control, place, parity, number):
        """The number that the first block of the cluster has drawn."""
        s_number = s_control + self.numbers + place * 4
        s_sent = s_control + self.sent + place * 8
        for block in range(self.cluster):
            send(s_number, [number], s_sent, Int32(block), facts.rank == 0)
        arrive_and_expect(s_sent, Int32(4))
        wait_for(s_sent, parity, "cluster")
        return load_shared_word(s_number)

    # The threads that work on rows

    @cute.jit
    def take_chunk(self, s_control, s_ring, place, parity, is_last: cutlass.Constexpr):
        """This thread's vectors of the chunk that comes next; with the row's last the number of the row after it."""
        wait_for(s_control + self.full + place * 8, parity)
        words = [load_shared(self.slot(s_ring + place * self.chunk_bytes, u)) for u in range(self.unroll)]
        coming = Int32(0)
        if cutlass.const_expr(is_last):
            coming = load_shared_word(s_control + self.coming + place * 4)
        self.release(s_control, place)
        place, parity = self.behind(place, parity, self.stages)
        return words, coming, place, parity

    @cute.jit
    def release(self, s_control, place):
        """A warp has read what is at a place."""
        warp_barrier()
        if cute.arch.thread_idx()[0] % 32 == 0:
            arrive(s_control + self.empty + place * 8)

    @cute.jit
    def with_edges(
        self, facts, it, chunk_words, g_vectors, chunk, phase, vectors,
        at_start: cutlass.Constexpr, at_end: cutlass.Constexpr,
    ):  # fmt: skip
        """With the vectors that reach beyond the tensor's memory, as only its first and last rows have them."""
        whole = []
        for u in cutlass.range_constexpr(self.unroll):
            a, b, c, d = chunk_words[u]
            if cutlass.const_expr(self.ragged and (at_end or (at_start and u == 0))):
                low, high = self.inside(g_vectors, vectors, it.g_logits, it.g_end)
                vector = self.vector(facts.first, chunk * self.unroll + u)
                if (vector < low) | ((vector >= high) & (vector < vectors)):
                    a, b, c, d = pack(self.dtype, self.load_edge(g_vectors, vector, phase, facts.cols))
            whole.append([a, b, c, d])
        return whole

    def elements_of_row(self, facts, chunk_words, chunk, phase, vectors, at_start, at_end):
        """A chunk's elements, -inf for those that are not of the row."""
        elements = []
        for u, words in enumerate(chunk_words):
            vector = self.vector(facts.first, chunk * self.unroll + u)
            if self.ragged and (at_end or (at_start and u == 0)):
                col = vector * self.width - phase
                elements += [
                    select_below(col + lane, facts.cols, x, Float32(float("-inf")))
                    for lane, x in enumerate(unpack(self.dtype, words))
                ]
            elif at_end:
                elements += unpack(self.dtype, select_words(vector < vectors, words, self.lowest()))
            else:
                elements += unpack(self.dtype, words)
        return elements

    @cute.jit
    def store_held(self, facts, index: cutlass.Constexpr, count: cutlass.Constexpr, g_out, phase, vectors, values):
        """Store this thread's vector ``index`` of the ``count`` that it holds of a row."""
        vector = self.vector(facts.first, Int32(index))
        whole = self.whole(vector, phase, vectors, facts.cols)
        g_thread = g_out + Int64(facts.first) * VECTOR_BYTES
        store_global(g_thread + index * self.step * VECTOR_BYTES, pack(self.dtype, values), whole)
        if cutlass.const_expr(self.ragged and (index == 0 or index >= count - self.end_chunks * self.unroll)):
            if not whole:
                self.store_edge(g_out, vector, phase, facts.cols, values)
