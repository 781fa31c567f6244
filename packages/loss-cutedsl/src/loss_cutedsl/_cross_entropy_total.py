"""What a launch of cross-entropy adds up over its rows: the denominator, and who is done.

A *team* is the threads that report together: a block, or of blocks with several rings one group of threads. A cluster
has the teams of its first block, and the others' threads take part in their work.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from ._cross_entropy_rows import CrossEntropyRows, RowFacts
from ._device import (
    add,
    add_release,
    load_acquire,
    load_element,
    load_float,
    load_integer,
    load_relaxed_below,
    load_shared_word,
    store_element,
    store_float,
    store_shared_word,
    warp_barrier,
    warp_reduce,
)

# Where the denominator of a scalar reduction comes from. The counted ones are neighbours.
(
    DENOMINATOR_ONE,
    DENOMINATOR_ROWS,
    DENOMINATOR_WEIGHTS,
    DENOMINATOR_BYTES_32,
    DENOMINATOR_BYTES_64,
    DENOMINATOR_VALUE,
    DENOMINATOR_POINTER,
) = range(7)

# With the gradient, the denominator is counted in slices: at most one a lane of a warp, and so many targets of each a
# thread at a time.
MOST_SLICES = 32
COUNT_UNROLL = 4
# How often a block looks for slices that others count before it counts them itself. A look takes about a microsecond.
LOOKS = 32

# The workspace, in 32-bit words, is all 0 between launches: the slices' sums; the counters of slices and of blocks that
# are done; and from a cache line of their own on what the blocks add up: their losses, without a gradient their shares
# of the denominator, and with statistics their z-loss parts.
WORKSPACE_SLICES_DONE = MOST_SLICES
WORKSPACE_TEAMS_DONE = MOST_SLICES + 1
WORKSPACE_DRAWN = 56
WORKSPACE_SUMS = 64
MOST_SUMS = 3
SUMS_UNROLL = 8

# What a block's threads tell one another, by its offset in the notes: whether all slices had been counted, what they
# add up to, and how many blocks were done before.
NOTE_COUNTED = 0
NOTE_DENOMINATOR = 4
NOTE_DONE = 8


def workspace_words(blocks: int) -> int:
    """64-bit words of the workspace for a grid of that many blocks that keep sums (clusters count as one)."""
    return (WORKSPACE_SUMS + MOST_SUMS * blocks + 1) // 2


class Operands(NamedTuple):
    """The tensors and numbers of one launch, for the functions that the kernel is made of."""

    g_logits: Int64
    logits_stride: Int64
    g_end: Int64  # of the logits' memory
    g_grad: Int64
    grad_stride: Int64
    g_target: Int64
    g_bytes: Int64
    g_items: Int64
    g_loss: Int64
    g_lse: Int64
    g_denominator: Int64
    g_z_loss: Int64
    g_prediction: Int64
    g_correct: Int64
    g_workspace: Int64
    g_row_loss: Int64
    rows: Int32
    row_step: Int32
    slices: Int32
    denominator_kind: Int32
    items: Float32
    ignore_index: Int64
    logit_scale: Float32


class CrossEntropyTotal(CrossEntropyRows):
    """What the forms of the forward share: who counts the denominator, and what is left when all are done.

    The gradient needs the denominator before its first element is written. The first teams count a slice of the
    targets each while their first rows are on the way; the others look for the result a bounded number of times and
    then count for themselves, so that none waits for one that may not be running. Either way gives the same bits.
    """

    # Teams

    def team(self):
        """This team's number."""
        return cute.arch.block_idx()[0] // self.cluster

    def teams(self):
        return cute.arch.grid_dim()[0] // self.cluster

    def team_thread(self):
        return cute.arch.thread_idx()[0]

    def team_threads(self):
        return self.threads

    # Denominator

    def counted(self, it):
        return (it.denominator_kind >= DENOMINATOR_ROWS) & (it.denominator_kind <= DENOMINATOR_BYTES_64)

    @cute.jit
    def count_slice(self, facts: RowFacts, it: Operands):
        """Count one slice, if this team is one of those that count, and announce it.

        Only teams that also announce themselves count: the slices are complete before they are reset.
        """
        number = self.team()
        if self.counted(it) & (facts.rank == 0) & (number < it.slices):
            total = self.slice_sum(facts, it, number)
            if self.team_thread() == 0:
                store_float(it.g_workspace + Int64(number) * 4, total)
                add_release(it.g_workspace + WORKSPACE_SLICES_DONE * 4, Int32(1))

    @cute.jit
    def slice_sum(self, facts: RowFacts, it: Operands, number: Int32):
        """Rows, weights or bytes of a slice's rows that are not ignored; the same bits whichever team adds them."""
        thread = self.team_thread()
        step = it.slices * self.team_threads()
        total = Float32(0.0)
        for start in cutlass.range(number * self.team_threads() + thread, it.rows, step * COUNT_UNROLL, unroll=1):
            targets = []
            for u in cutlass.range_constexpr(COUNT_UNROLL):
                row = start + u * step
                targets.append(self.load_target(it.g_target, row, row < it.rows, it.ignore_index))
            for u in cutlass.range_constexpr(COUNT_UNROLL):
                target = targets[u]
                if target != it.ignore_index:
                    w_y = self.target_weight(facts.g_weight, self.column(facts, target), facts.cols)
                    total = total + self.share_of_denominator(it, start + u * step, w_y)
        return self.sum_block(facts.s_scratch, thread, self.team_threads(), total)

    @cute.jit
    def share_of_denominator(self, it: Operands, row: Int32, w_y: Float32):
        """What a row that is not ignored adds to a counted denominator."""
        value = Float32(1.0)
        if cutlass.const_expr(self.weighted):
            if it.denominator_kind == DENOMINATOR_WEIGHTS:
                value = w_y
        if it.denominator_kind == DENOMINATOR_BYTES_32:
            value = Float32(load_integer(32, it.g_bytes + Int64(row) * 4))
        if it.denominator_kind == DENOMINATOR_BYTES_64:
            value = Float32(load_integer(64, it.g_bytes + Int64(row) * 8))
        return value

    @cute.jit
    def denominator(self, facts: RowFacts, it: Operands):
        """What the sum is divided by, the same for all threads of all teams. Once a launch: its notes stay."""
        value = Float32(1.0)
        if self.counted(it):
            thread = self.team_thread()
            s_notes = facts.s_scratch + self.notes
            # One warp reads the workspace, and its first thread reports later that the team is done with it.
            if thread < 32:
                done = Int32(0)
                if thread == 0:
                    for _ in cutlass.range(LOOKS, unroll=1):
                        if done < it.slices:
                            done = load_acquire(it.g_workspace + WORKSPACE_SLICES_DONE * 4)
                warp_barrier()
                total = warp_reduce(load_relaxed_below(it.g_workspace + Int64(thread) * 4, thread, it.slices), add)
                if thread == 0:
                    store_shared_word(s_notes + NOTE_COUNTED, Int32(done >= it.slices))
                    store_element(Float32, s_notes + NOTE_DENOMINATOR, total, "shared")
            self.meet()
            value = load_element(Float32, s_notes + NOTE_DENOMINATOR, "shared")
            if load_shared_word(s_notes + NOTE_COUNTED) == 0:
                value = Float32(0.0)
                for number in cutlass.range(it.slices, unroll=1):
                    total = self.slice_sum(facts, it, number)
                    if thread % 32 == number:
                        value = total
                value = warp_reduce(value, add)
        return self.or_given(it, value)

    @cute.jit
    def or_given(self, it: Operands, value: Float32):
        """A denominator, or the one that the caller gave."""
        if it.denominator_kind == DENOMINATOR_VALUE:
            value = it.items
        if it.denominator_kind == DENOMINATOR_POINTER:
            value = load_float(it.g_items)
        return value
