"""Rows that a block, or a cluster, has in shared memory: how its threads meet, and who has the ends of ragged rows."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute

from ._device import (
    StagedRows,
    arrive_and_expect,
    cluster_arrive,
    load_element,
    make_mbarrier,
    quotient,
    remainder,
    send,
    show_mbarriers,
    store_element,
    wait_for,
    warp_barrier,
)
from ._schedule import MET_BYTES, VECTOR_BYTES, Schedule


class MeetingRows(StagedRows):
    """Rows whose blocks, in a cluster, tell one another what they know of a row without a barrier of all threads.

    There is a barrier object for each half of the scratch. Who has started the copies of a row, or waits for them,
    need not wait for the others before they send. A block may end when its threads have: the blocks of a cluster have
    the same rows, so whatever is sent to one is of an exchange that all of its threads wait for.
    """

    def __init__(self, dtype, schedule: Schedule, ragged: bool, entry_words: int):
        super().__init__(dtype, schedule, ragged, entry_words)
        self.met = self.notes - MET_BYTES

    @cute.jit
    def start_meeting(self, s_scratch, thread):
        """Make the two barrier objects and tell the cluster; ``cluster_wait`` comes before the first exchange."""
        if cutlass.const_expr(self.cluster > 1):
            if thread == 0:
                for half in cutlass.range_constexpr(2):
                    make_mbarrier(s_scratch + self.met + 8 * half, 1)
                show_mbarriers()
            cluster_arrive()

    def exchange(self, s_scratch, turn, thread, rank, words):
        """As in ``StagedRows``; ``turn`` goes from 0 to 3, for a barrier object has phases."""
        half = turn & 1
        if self.cluster == 1:
            return super().exchange(s_scratch, half, thread, rank, words)
        lane = thread % 32
        entries = self.warps * self.cluster
        s_half = s_scratch + half * (entries * self.entry_bytes)
        s_met = s_scratch + self.met + 8 * half
        s_mine = s_half + (rank * self.warps + thread // 32) * self.entry_bytes
        # All lanes have read what they need of the row before: what is sent now lets the others write over it.
        warp_barrier()
        send(s_mine, words, s_met, lane, lane < self.cluster)
        self.expect_entries(s_met, thread, 4 * len(words) * entries)
        wait_for(s_met, turn >> 1, "cluster")
        return [(lane + 32 * e, entries, s_half + (lane + 32 * e) * self.entry_bytes) for e in range(-(-entries // 32))]

    @cute.jit
    def expect_entries(self, s_met, thread, size: cutlass.Constexpr):
        if thread == 0:
            arrive_and_expect(s_met, Int32(size))

    # The ends of ragged rows: vectors that are not all of the row. One thread would take the elements of such a vector
    # one after the other while the lanes beside it wait, in a narrow row for as long as all else takes; so the lanes of
    # the warp that has the vector take one each.

    @cute.jit
    def end(self, first, vectors):
        """The place of this lane's element in the vectors of the row, and its offset from this thread's slots.

        The first lanes have the first vector, those after them the last one, and the others what is behind it.
        """
        at = remainder(first, 32)
        if at >= self.width:
            at = at + (vectors - 2) * self.width
        vector, element = quotient(at, self.width), remainder(at, self.width)
        lanes = remainder(vector, self.step) - first
        return at, self.slot(lanes * VECTOR_BYTES + element * self.element_bytes, quotient(vector, self.step))

    def warp_owns(self, first, vector):
        """Whether this warp has that vector."""
        return quotient(remainder(vector, self.step), 32) == quotient(first, 32)

    def has_end(self, at, first, phase, cols):
        """Whether a lane has the element at that place. In a row of one vector the first lanes have it."""
        mine = self.warp_owns(first, quotient(at, self.width)) & (at >= remainder(first, 32))
        return mine & (at >= phase) & (at < phase + cols)

    @cute.jit
    def copy_ends(self, s_row, g_vectors, first, phase, vectors, low, high, cols):
        """As ``copy_edges``."""
        if cutlass.const_expr(self.ragged):
            if (low > 0) | (high < vectors):
                at, offset = self.end(first, vectors)
                vector = quotient(at, self.width)
                # After what the lanes that have the vectors read of the row before, and before their next copies.
                warp_barrier()
                if ((vector < low) | (vector >= high)) & self.has_end(at, first, phase, cols):
                    x = load_element(self.dtype, g_vectors + Int64(at) * self.element_bytes)
                    store_element(self.dtype, s_row + offset, x, "shared")
                warp_barrier()

    @cute.jit
    def mask_ends(self, s_rows, first, phase, vectors, slots, cols, outside: Float32):
        """As ``mask_edges``, for rows that begin at the same place in a vector."""
        if cutlass.const_expr(self.ragged):
            at, offset = self.end(first, vectors)
            vector = quotient(at, self.width)
            # Of a row of one vector, which is both ends, each lane has what is beyond its end.
            beyond = at >= phase + cols
            if remainder(first, 32) < self.width:
                beyond = at < phase
            # After the copies of all lanes have come, and before any lane reads.
            warp_barrier()
            if beyond & self.warp_owns(first, vector) & (quotient(vector, self.step) < slots):
                for s_row in s_rows:
                    store_element(self.dtype, s_row + offset, outside, "shared")
            warp_barrier()

    @cute.jit
    def end_of_row(self, first, phase, vectors, cols):
        """Whether this lane has an element of the row, in a vector that is not all of the row, and as ``end``."""
        at, offset = self.end(first, vectors)
        cut = not self.whole(quotient(at, self.width), phase, vectors, cols)
        return cut & self.has_end(at, first, phase, cols), at, offset

    def store_end(self, g_out, at, value):
        store_element(self.dtype, g_out + Int64(at) * self.element_bytes, value)
