"""Cross-entropy's forward: the loss, and with it the finished gradient, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute

from ._cross_entropy_rows import ENTRY_WORDS, RowFacts
from ._cross_entropy_total import (
    DENOMINATOR_WEIGHTS,
    NOTE_DONE,
    CrossEntropyTotal,
    Operands,
)
from ._device import (
    LOWEST,
    above,
    add,
    add_release,
    barrier,
    cluster_barrier,
    commit,
    divide,
    exchange_add,
    load_acquire,
    load_element,
    load_float_below,
    load_floats,
    load_relaxed_below,
    load_shared,
    load_shared_word,
    maximum_or_nan,
    pack,
    ptx,
    select_below,
    store_byte,
    store_element,
    store_float,
    store_floats,
    store_global,
    store_int64,
    store_shared,
    store_shared_word,
    store_word,
    tree,
    unpack,
    wait,
    warp_barrier,
    warp_reduce,
)
from ._schedule import BESIDE_A_RESULT, VECTOR_BYTES, Schedule
from ._workspace import (
    MOST_SLICES,
    SUMS_WORDS,
    WORKSPACE_DONE,
    WORKSPACE_SLICES_DONE,
    WORKSPACE_SUMS,
    workspace_words,
)

# Targets of a slice that a thread counts at a time.
COUNT_UNROLL = 4
# How often a block looks for slices that others count before it counts them itself. A look takes about a microsecond.
LOOKS = 32

# Blocks whose sums a thread adds at a time at the end, where each step costs a latency: as many as 64 registers hold.
SUMS_UNROLL = 11

# The notes: whether all slices had been counted, and what they add up to.
NOTE_COUNTED = 0
NOTE_DENOMINATOR = 4


def grid(schedule: Schedule, resident_blocks: int, scalar: bool, rows: int) -> tuple[int, int, int]:
    """Blocks of a launch, slices that are counted, and 64-bit words of the workspace."""
    blocks = schedule.grid(resident_blocks, rows)
    teams = blocks // schedule.cluster
    slices = min(MOST_SLICES, teams, -(-rows // (schedule.threads * COUNT_UNROLL)))
    return blocks, slices, workspace_words(teams) if scalar else 0


class Cursor(NamedTuple):
    """The chunk whose copies start next, in the streamed form: ``stages`` chunks ahead of the one that is summed.

    ``coming_target`` is that of the row after the cursor's: loaded a row before it is asked for. The rest is of the
    cursor's row, as ``coming_row`` gives it.
    """

    row: Int32
    chunk: Int32
    stage: Int32
    coming_target: Int64
    g_vectors: Int64
    phase: Int32
    vectors: Int32
    low: Int32
    high: Int32


class CrossEntropyForward(CrossEntropyTotal):
    """Loss of every row, its reduction and, with ``gradient``, the finished gradient: logits read once.

    Two forms of one kernel. ``gradient``: a stage of shared memory is a row; a persistent grid takes rows in turn and
    starts the next row's copies while it writes the gradient of this one. Without: a stage is a chunk of a row, and
    nothing is held, so that rows of any length stream through.

    The gradient needs the denominator before its first element is written. The first blocks count a slice of the
    targets each while their first rows are on the way; the others look for the result a bounded number of times and
    then count for themselves, so that no block waits for one that may not be running. Either way gives the same bits.
    Without a gradient only the end needs it, and each block counts its own rows. The sum of the losses is left to the
    block that is done last.
    """

    def __init__(
        self,
        dtype,
        schedule: Schedule,
        ragged: bool,
        *,
        target_bits: int,
        gradient: bool,
        scalar: bool,
        weighted: bool,
        smoothing: bool,
        logits: str,
        stats: bool,
        shard: bool,
    ):
        super().__init__(dtype, schedule, ragged, ENTRY_WORDS)
        self.target_bits = target_bits
        self.gradient = gradient
        self.eviction = BESIDE_A_RESULT if gradient else None
        self.scalar = scalar
        self.weighted = weighted
        self.smoothing = smoothing
        self.logits = logits
        self.stats = stats
        self.shard = shard
        # A block that has one row at a time has the row's loss in every thread.
        self.one_row = self.groups == 1
        # Such a block asks for the denominator when it has summed its first row. Of a cluster only the first block
        # reports that it is done with the workspace, so there all have to have asked before.
        self.asks_late = self.one_row and self.cluster == 1

    @cute.jit
    def __call__(
        self,
        g_logits: Int64,  # (R, V)
        logits_stride: Int64,
        g_grad: Int64,  # (R, V), or null
        grad_stride: Int64,
        g_target: Int64,  # (R,)
        g_weight: Int64,  # (V,) float32, or null
        g_bytes: Int64,  # (R,) int32 or int64, or null
        g_items: Int64,  # (1,) float32, or null
        g_loss: Int64,  # () or (R,) float32
        g_lse: Int64,  # (R,) float32
        g_denominator: Int64,  # (1,) float32, or null
        g_z_loss: Int64,  # () or (R,) float32, or null
        g_prediction: Int64,  # (R,) int64, or null
        g_correct: Int64,  # (R,) bool, or null
        g_workspace: Int64,  # see above
        rows: Int32,
        grid: Int32,
        slices: Int32,
        denominator_kind: Int32,
        items: Float32,
        cols: Int32,
        chunks: Int32,
        shared_bytes: Int32,
        ignore_index: Int64,
        first_class: Int64,
        total_classes: Int64,
        label_smoothing: Float32,
        z_loss: Float32,
        logit_scale: Float32,
        softcap: Float32,
        stream,
    ):
        self.cross_entropy_forward_kernel(
            g_logits,
            logits_stride,
            g_grad,
            grad_stride,
            g_target,
            g_weight,
            g_bytes,
            g_items,
            g_loss,
            g_lse,
            g_denominator,
            g_z_loss,
            g_prediction,
            g_correct,
            g_workspace,
            rows,
            slices,
            denominator_kind,
            items,
            cols,
            chunks,
            ignore_index,
            first_class,
            total_classes,
            label_smoothing,
            z_loss,
            logit_scale,
            softcap,
        ).launch(
            grid=[grid, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.cluster, 1, 1] if self.cluster > 1 else None,
            smem=shared_bytes,
            stream=stream,
            min_blocks_per_mp=self.schedule.blocks,
            # Shared memory is where the rows are; and stating it spares the compiler the question to a device.
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def cross_entropy_forward_kernel(
        self,
        g_logits: Int64,
        logits_stride: Int64,
        g_grad: Int64,
        grad_stride: Int64,
        g_target: Int64,
        g_weight: Int64,
        g_bytes: Int64,
        g_items: Int64,
        g_loss: Int64,
        g_lse: Int64,
        g_denominator: Int64,
        g_z_loss: Int64,
        g_prediction: Int64,
        g_correct: Int64,
        g_workspace: Int64,
        rows: Int32,
        slices: Int32,
        denominator_kind: Int32,
        items: Float32,
        cols: Int32,
        chunks: Int32,
        ignore_index: Int64,
        first_class: Int64,
        total_classes: Int64,
        label_smoothing: Float32,
        z_loss: Float32,
        logit_scale: Float32,
        softcap: Float32,
    ):
        """One group of threads (a warp, a block or a cluster) takes rows in turn."""
        thread, group, rank, first_row, row_step = self.place()
        first = rank * self.row_threads + thread
        s_scratch = Int32(cute.arch.get_dyn_smem(Uint32, 128).toint())
        held = chunks if cutlass.const_expr(self.gradient) else Int32(1)
        stage_bytes = held * (self.unroll * self.row_threads * VECTOR_BYTES)
        s_slots = s_scratch + self.scratch_bytes + group * (self.stages * stage_bytes) + thread * VECTOR_BYTES
        facts = self.row_facts(
            cols, chunks, first, thread, rank, s_scratch, g_weight, first_class, total_classes,
            label_smoothing, z_loss, logit_scale, softcap,
        )  # fmt: skip
        it = Operands(
            g_logits=g_logits,
            logits_stride=logits_stride,
            g_end=g_logits + (Int64(rows - 1) * logits_stride + Int64(cols)) * self.element_bytes,
            g_grad=g_grad,
            grad_stride=grad_stride,
            g_target=g_target,
            g_bytes=g_bytes,
            g_items=g_items,
            g_loss=g_loss,
            g_lse=g_lse,
            g_denominator=g_denominator,
            g_z_loss=g_z_loss,
            g_prediction=g_prediction,
            g_correct=g_correct,
            g_workspace=g_workspace,
            rows=rows,
            row_step=row_step,
            slices=slices,
            denominator_kind=denominator_kind,
            items=items,
            ignore_index=ignore_index,
            logit_scale=logit_scale,
        )
        # The first copies come before everything that takes time, and before their targets are known.
        target = self.load_target(g_target, first_row, first_row < rows, ignore_index)
        if cutlass.const_expr(self.gradient):
            self.start_rows(facts, it, s_slots, stage_bytes, first_row)
            self.fill_tails(s_slots, chunks, cols, first, self.lowest())
        else:
            cursor = self.start_chunks(facts, it, s_slots, first_row)
        denominator = Float32(1.0)
        if cutlass.const_expr(self.gradient):
            self.count_slice(facts, it)
            if cutlass.const_expr(not self.asks_late):
                denominator = self.denominator(facts, it)
        if cutlass.const_expr(self.cluster > 1):
            # A block must not write to the shared memory of one that has not started; and the first of a cluster,
            # which alone reports that it is done with the workspace, does so for all.
            cluster_barrier()
        count = Float32(0.0)
        if cutlass.const_expr(self.gradient):
            loss_sum, z_sum, denominator = self.held_rows(
                facts, it, s_slots, stage_bytes, first_row, target, denominator
            )
        else:
            loss_sum, z_sum, count = self.streamed_rows(facts, it, s_slots, first_row, target, cursor)
        if cutlass.const_expr(self.scalar):
            self.finish_sum(facts, it, loss_sum, z_sum, count, denominator)

    # Denominator

    @cute.jit
    def count_slice(self, facts: RowFacts, it: Operands):
        """Count one slice, if this block is one of those that count, and announce it.

        Only blocks that also report to ``finish_sum`` count: the slices are complete before they are reset.
        """
        number = cute.arch.block_idx()[0] // self.cluster
        if self.counted(it) & (facts.rank == 0) & (number < it.slices):
            total = self.slice_sum(facts, it, number)
            if cute.arch.thread_idx()[0] == 0:
                store_float(it.g_workspace + Int64(number) * 4, total)
                add_release(it.g_workspace + WORKSPACE_SLICES_DONE * 4, Int32(1))

    @cute.jit
    def slice_sum(self, facts: RowFacts, it: Operands, number: Int32):
        """Rows, weights or bytes of a slice's rows that are not ignored; the same bits whichever block adds them."""
        thread = cute.arch.thread_idx()[0]
        step = it.slices * self.threads
        total = Float32(0.0)
        for start in cutlass.range(number * self.threads + thread, it.rows, step * COUNT_UNROLL, unroll=1):
            targets = []
            for u in cutlass.range_constexpr(COUNT_UNROLL):
                row = start + u * step
                targets.append(self.load_target(it.g_target, row, row < it.rows, it.ignore_index))
            for u in cutlass.range_constexpr(COUNT_UNROLL):
                target = targets[u]
                if target != it.ignore_index:
                    w_y = self.target_weight(facts.g_weight, self.column(facts, target), facts.cols)
                    total = total + self.share_of_denominator(it, start + u * step, w_y)
        return self.sum_block(facts.s_scratch, thread, self.threads, total)

    @cute.jit
    def share_of_denominator(self, it: Operands, row: Int32, w_y: Float32):
        """What a row that is not ignored adds to a counted denominator."""
        value = Float32(self.share_of_row(it, row))
        if cutlass.const_expr(self.weighted):
            if it.denominator_kind == DENOMINATOR_WEIGHTS:
                value = w_y
        return value

    @cute.jit
    def denominator(self, facts: RowFacts, it: Operands):
        """What the sum is divided by, the same for all threads of all blocks. Once a launch: its notes stay."""
        value = Float32(1.0)
        if self.counted(it):
            thread = cute.arch.thread_idx()[0]
            s_notes = facts.s_scratch + self.notes
            # One warp reads the workspace, and its first thread reports later that the block is done with it.
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
            barrier()
            value = load_element(Float32, s_notes + NOTE_DENOMINATOR, "shared")
            if load_shared_word(s_notes + NOTE_COUNTED) == 0:
                value = Float32(0.0)
                for number in cutlass.range(it.slices, unroll=1):
                    total = self.slice_sum(facts, it, number)
                    if thread % 32 == number:
                        value = total
                value = warp_reduce(value, add)
        return self.or_given(it, value)

    # Rows held in shared memory, with their gradient

    @cute.jit
    def start_rows(self, facts: RowFacts, it: Operands, s_slots, stage_bytes, first_row):
        """Start the copies of the first rows, ignored ones too: to know would take as long as the copies do."""
        for s in cutlass.range_constexpr(self.stages):
            row = first_row + s * it.row_step
            if row < it.rows:
                g_vectors, phase, vectors = self.span(it.g_logits, it.logits_stride, row, facts.cols)
                low, high = self.inside(g_vectors, vectors, it.g_logits, it.g_end)
                s_row = s_slots + s * stage_bytes
                self.start_row(s_row, g_vectors, facts.first, facts.chunks, low, high)
                self.copy_edges(s_row, g_vectors, facts.first, phase, vectors, low, high, facts.cols)
            commit()

    @cute.jit
    def held_rows(self, facts: RowFacts, it: Operands, s_slots, stage_bytes, first_row, target, denominator):
        """Sum each row, write its gradient, and let the next row's copies follow.

        The rows' losses, added up, and the denominator.
        """
        cols, chunks, first = facts.cols, facts.chunks, facts.first
        loss_sum = Float32(0.0)
        z_sum = Float32(0.0)
        parity = Int32(0)
        stage = Int32(0)
        scale = divide(it.logit_scale, denominator)
        row = first_row
        coming_row = row + it.row_step
        while row < it.rows:
            # Targets are loaded well before they are needed: this row's with the row before.
            coming_target = self.load_target(it.g_target, coming_row, coming_row < it.rows, it.ignore_index)
            next_row = coming_row
            next_target = coming_target
            if cutlass.const_expr(self.stages > 1):
                next_row = row + self.stages * it.row_step
                next_target = self.load_target(it.g_target, next_row, next_row < it.rows, it.ignore_index)
            s_row = s_slots + stage * stage_bytes
            g_vectors, phase, vectors = self.span(it.g_logits, it.logits_stride, row, cols)
            g_out, out_phase, out_vectors = self.span(it.g_grad, it.grad_stride, row, cols)
            y = self.column(facts, target)
            x_y = Float32(0.0)
            w_y = Float32(1.0)
            highest = Float32(LOWEST)
            total = Float32(1.0)
            pull = Float32(0.0)
            lse = Float32(0.0)
            wait(self.stages - 1)
            if self.reads(target, it.ignore_index):
                x_y = self.target_logit(g_vectors, phase, y, cols)
                w_y = self.target_weight(facts.g_weight, y, cols)
                self.mask_edges(s_row, first, phase, vectors, chunks * self.unroll, cols, Float32(float("-inf")))
                anchor = self.anchor(facts, x_y, y)
                highest, total, x_sum, w_sum, key, index = self.sum_held(facts, s_row, phase, anchor)
                parity = parity ^ 1
                highest, total, x_sum, w_sum, key, index = self.finish(
                    facts, parity, highest, total, x_sum, w_sum, key, index
                )
                loss, z_part, lse, pull = self.row_loss(facts, target, y, x_y, w_y, highest, total, x_sum, w_sum)
                if target != it.ignore_index:
                    loss_sum = loss_sum + loss
                    z_sum = z_sum + z_part
                if first == 0:
                    self.write_stats(row, target != it.ignore_index, y, index, it.g_prediction, it.g_correct)
            if first == 0:
                store_float(it.g_lse + Int64(row) * 4, lse)
            if cutlass.const_expr(self.asks_late):
                if row == first_row:
                    denominator = self.denominator(facts, it)
                    scale = divide(it.logit_scale, denominator)
            if cutlass.const_expr(self.one_row):
                # Before the last gradient is written: to announce waits for what the thread has stored.
                if coming_row >= it.rows:
                    self.announce(facts, it, loss_sum, z_sum, Float32(0.0))

            g_next, next_phase, next_vectors, next_low, next_high = self.coming_row(facts, it, next_row, next_target)
            if target != it.ignore_index:
                self.write_gradient(
                    facts, s_row, g_vectors, phase, vectors, g_out, out_phase, y, x_y, w_y, highest,
                    divide(pull * scale, total), scale, g_next, next_low, next_high,
                )  # fmt: skip
            else:
                self.write_zeros(g_out, out_phase, out_vectors, first, chunks, cols)
                self.start_row(s_row, g_next, first, chunks, next_low, next_high)
            target = coming_target
            self.copy_edges(s_row, g_next, first, next_phase, next_vectors, next_low, next_high, cols)
            commit()
            stage = stage + 1
            if stage == self.stages:
                stage = Int32(0)
            row = coming_row
            coming_row = row + it.row_step
        return loss_sum, z_sum, denominator

    # Rows that stream through shared memory

    @cute.jit
    def start_chunks(self, facts: RowFacts, it: Operands, s_slots, first_row):
        """Start the copies of the first chunks, of ignored rows too: to know would take as long as the copies do."""
        anything = it.ignore_index + Int64(1)
        cursor = Cursor(first_row, Int32(0), Int32(0), anything, *self.coming_row(facts, it, first_row, anything))
        for _ in cutlass.range_constexpr(self.stages):
            row, chunk, stage, _, *of_row = self.start_chunk(facts, it, s_slots, cursor)
            cursor = Cursor(row, chunk, stage, anything, *of_row)
        row, row_after = cursor.row, cursor.row + it.row_step
        target = self.load_target(it.g_target, row, row < it.rows, it.ignore_index)
        coming_target = self.load_target(it.g_target, row_after, row_after < it.rows, it.ignore_index)
        return Cursor(row, cursor.chunk, cursor.stage, coming_target, *self.coming_row(facts, it, row, target))

    @cute.jit
    def start_chunk(self, facts: RowFacts, it: Operands, s_slots, cursor: Cursor):
        """Start the copies of the chunk under the cursor, if there are any; move the cursor on."""
        row, chunk, stage, coming_target, g_vectors, phase, vectors, low, high = cursor
        s_chunk = s_slots + stage * (self.unroll * self.row_threads * VECTOR_BYTES)
        self.start_part(s_chunk, g_vectors, facts.first, chunk, phase, vectors, low, high, facts.cols)
        commit()
        stage = stage + 1
        if stage == self.stages:
            stage = Int32(0)
        chunk = chunk + 1
        if chunk == facts.chunks:
            chunk = Int32(0)
            row = row + it.row_step
            g_vectors, phase, vectors, low, high = self.coming_row(facts, it, row, coming_target)
            row_after = row + it.row_step
            coming_target = self.load_target(it.g_target, row_after, row_after < it.rows, it.ignore_index)
        return row, chunk, stage, coming_target, g_vectors, phase, vectors, low, high

    @cute.jit
    def streamed_rows(self, facts: RowFacts, it: Operands, s_slots, first_row, target, cursor: Cursor):
        """Sum each row chunk by chunk, and let the copies run ahead.

        The rows' losses, added up, and what they add to the denominator.
        """
        (
            ahead_row, ahead_chunk, ahead_stage, ahead_target,
            ahead_vectors, ahead_phase, ahead_number, ahead_low, ahead_high,
        ) = cursor  # fmt: skip
        loss_sum = Float32(0.0)
        z_sum = Float32(0.0)
        count = Float32(0.0)
        parity = Int32(0)
        stage = Int32(0)
        for row in cutlass.range(first_row, it.rows, it.row_step, unroll=1):
            # Loaded well before it is needed: with the row before.
            coming_row = row + it.row_step
            coming_target = self.load_target(it.g_target, coming_row, coming_row < it.rows, it.ignore_index)
            g_vectors, phase, vectors = self.span(it.g_logits, it.logits_stride, row, facts.cols)
            y = self.column(facts, target)
            x_y = Float32(0.0)
            w_y = Float32(1.0)
            live = self.reads(target, it.ignore_index)
            if live:
                x_y = self.target_logit(g_vectors, phase, y, facts.cols)
                w_y = self.target_weight(facts.g_weight, y, facts.cols)
            anchor = self.anchor(facts, x_y, y)
            highest = Float32(LOWEST)
            total = Float32(0.0)
            x_sum = Float32(0.0)
            w_sum = Float32(0.0)
            key = Float32(float("-inf"))
            index = self.first_column(facts.first, phase, facts.cols)
            for chunk in cutlass.range(facts.chunks, unroll=1):
                wait(self.stages - 1)
                s_chunk = s_slots + stage * (self.unroll * self.row_threads * VECTOR_BYTES)
                if live:
                    self.mask_chunk(facts, s_chunk, chunk, phase, vectors)
                    highest, total, x_sum, w_sum, key, index = self.absorb(
                        facts, s_chunk, Int32(0), chunk, phase, anchor,
                        highest, total, x_sum, w_sum, key, index,
                    )  # fmt: skip
                (
                    ahead_row, ahead_chunk, ahead_stage, ahead_target,
                    ahead_vectors, ahead_phase, ahead_number, ahead_low, ahead_high,
                ) = self.start_chunk(
                    facts, it, s_slots,
                    Cursor(
                        ahead_row, ahead_chunk, ahead_stage, ahead_target,
                        ahead_vectors, ahead_phase, ahead_number, ahead_low, ahead_high,
                    ),
                )  # fmt: skip
                stage = stage + 1
                if stage == self.stages:
                    stage = Int32(0)
            loss = Float32(0.0)
            z_part = Float32(0.0)
            lse = Float32(0.0)
            if live:
                parity = parity ^ 1
                highest, total, x_sum, w_sum, key, index = self.finish(
                    facts, parity, highest, total, x_sum, w_sum, key, index
                )
                loss, z_part, lse, pull = self.row_loss(facts, target, y, x_y, w_y, highest, total, x_sum, w_sum)
            if target == it.ignore_index:
                loss = Float32(0.0)
                z_part = Float32(0.0)
            if cutlass.const_expr(self.scalar):
                if target != it.ignore_index:
                    count = count + self.share_of_denominator(it, row, w_y)
            loss_sum = loss_sum + loss
            z_sum = z_sum + z_part
            if facts.first == 0:
                store_float(it.g_lse + Int64(row) * 4, lse)
                if cutlass.const_expr(not self.scalar):
                    store_float(it.g_loss + Int64(row) * 4, loss)
                    if cutlass.const_expr(self.stats):
                        store_float(it.g_z_loss + Int64(row) * 4, z_part)
                self.write_stats(row, target != it.ignore_index, y, index, it.g_prediction, it.g_correct)
            target = coming_target
        return loss_sum, z_sum, count

    # Parts of a row

    @cute.jit
    def coming_row(self, facts: RowFacts, it: Operands, row, target):
        """A row's first vector, elements of it before the row, number of vectors, and which to copy: [low, high).

        None of them if there is no such row, or it is not looked at.
        """
        g_vectors, phase, vectors = self.span(it.g_logits, it.logits_stride, row, facts.cols)
        low, high = self.inside(g_vectors, vectors, it.g_logits, it.g_end)
        if (row >= it.rows) | (not self.reads(target, it.ignore_index)):
            low = Int32(0)
            high = Int32(0)
            vectors = Int32(0)
        return g_vectors, phase, vectors, low, high

    def reads(self, target, ignore_index):
        """Whether the logits of a row are looked at: an ignored row's only for its statistics."""
        return Boolean(True) if self.stats else target != ignore_index

    def first_column(self, first, phase, cols):
        """The first column of this thread's vectors: its argmax as long as it has seen nothing above -inf."""
        col = first * self.width - phase
        return ptx(
            "{ .reg .pred p; max.s32 {$w0}, {$r0}, 0; setp.lt.s32 p, {$w0}, {$r1};"
            " selp.b32 {$w0}, {$w0}, 0x7fffffff, p; }",
            [Int32],
            [col, cols],
        )

    @cute.jit
    def mask_chunk(self, facts, s_chunk, chunk, phase, vectors):
        """Mask what is not of the row in this chunk; of the streamed form, whose slots hold one chunk."""
        outside = Float32(float("-inf"))
        if cutlass.const_expr(self.ragged):
            if (chunk == 0) & (facts.first == 0) & (phase > 0):
                self.mask_elements(s_chunk, Int32(0), phase, facts.cols, outside)
        if self.may_end(facts, chunk, vectors):
            for u in cutlass.range_constexpr(self.unroll):
                vector = self.vector(facts.first, chunk * self.unroll + u)
                if (vector + 1) * self.width - phase > facts.cols:
                    if cutlass.const_expr(self.ragged):
                        self.mask_elements(self.slot(s_chunk, u), vector, phase, facts.cols, outside)
                    else:
                        store_shared(self.slot(s_chunk, u), [self.lowest()] * 4)

    def may_end(self, facts, chunk, vectors):
        """Whether a chunk may have slots that are not, or not wholly, of the row."""
        if self.ragged:
            # A row has at most one vector less than the most that `chunks` was made for.
            return chunk + 2 >= facts.chunks
        return (chunk + 1) * (self.unroll * self.step) > vectors

    @cute.jit
    def sum_held(self, facts, s_row, phase, anchor):
        """This thread's part of the row's sums, from shared memory."""
        highest = Float32(LOWEST)
        total = Float32(0.0)
        x_sum = Float32(0.0)
        w_sum = Float32(0.0)
        key = Float32(float("-inf"))
        index = self.first_column(facts.first, phase, facts.cols)
        for chunk in cutlass.range(facts.chunks, unroll=1):
            highest, total, x_sum, w_sum, key, index = self.absorb(
                facts, s_row, chunk, chunk, phase, anchor,
                highest, total, x_sum, w_sum, key, index,
            )  # fmt: skip
        return highest, total, x_sum, w_sum, key, index

    @cute.jit
    def absorb(
        self, facts, s_row, place, chunk, phase, anchor,
        highest, total, x_sum, w_sum, key, index,
    ):  # fmt: skip
        """Take one chunk (at ``place`` in shared memory) into the running sums; that of t counts from ``anchor``."""
        raw = []
        columns = []
        for u in cutlass.range_constexpr(self.unroll):
            raw = raw + unpack(self.dtype, load_shared(self.slot(s_row, place * self.unroll + u)))
            column = self.vector(facts.first, chunk * self.unroll + u) * self.width - phase
            columns = columns + [column + lane for lane in range(self.width)]
        t = [self.value(facts, x, col) for x, col in zip(raw, columns)]
        highest, total = self.absorb_values(t, facts.power, highest, total)
        if cutlass.const_expr(self.smoothing):
            seen = [x - anchor for x in t]
            if cutlass.const_expr(self.weighted):
                weights = [load_float_below(facts.g_weight + Int64(col) * 4, col, facts.cols) for col in columns]
                w_sum = w_sum + tree(weights, add)
                seen = [select_below(col, facts.cols, x * w, Float32(0.0)) for x, w, col in zip(seen, weights, columns)]
            else:
                seen = [select_below(col, facts.cols, x, Float32(0.0)) for x, col in zip(seen, columns)]
            x_sum = x_sum + tree(seen, add)
        if cutlass.const_expr(self.stats):
            keys = raw
            if cutlass.const_expr(self.logits != "linear"):
                keys = [
                    select_below(col, facts.cols, x * facts.inner, Float32(float("-inf")))
                    for x, col in zip(raw, columns)
                ]
            best = tree(keys, maximum_or_nan)
            if above(best, key) != 0:
                key = best
                for i in cutlass.range_constexpr(len(keys) - 1, -1, -1):
                    # There is a NaN among the keys only if it is the best.
                    index = ptx(
                        "{ .reg .pred p; setp.nan.f32 p, {$r0}, {$r0}; setp.eq.or.f32 p, {$r0}, {$r1}, p;"
                        " selp.b32 {$w0}, {$r2}, {$r3}, p; }",
                        [Int32],
                        [keys[i], best, columns[i], index],
                    )
        return highest, total, x_sum, w_sum, key, index

    def finish(self, facts, parity, highest, total, x_sum, w_sum, key, index):
        """The row's sums, the same for all of its threads."""
        sums = []
        if self.smoothing:
            sums = [x_sum, w_sum] if self.weighted else [x_sum]
        best = (key, index) if self.stats else None
        highest, total, sums, best = self.reduce_row(
            facts.s_scratch, parity, facts.thread, facts.rank, facts.power, highest, total, sums, best
        )
        if self.smoothing:
            x_sum = sums[0]
            w_sum = sums[1] if self.weighted else Float32(facts.cols)
        if self.stats:
            key, index = best
        return highest, total, x_sum, w_sum, key, index

    # Results

    def write_stats(self, row, live, y, index, g_prediction, g_correct):
        if self.stats:
            store_int64(g_prediction + Int64(row) * 8, Int64(index))
            store_byte(g_correct + Int64(row), Int32((index == y) & live))

    @cute.jit
    def write_gradient(
        self, facts, s_row, g_vectors, phase, vectors, g_out, out_phase, y, x_y, w_y, highest, pull, scale,
        g_next, next_low, next_high,
    ):  # fmt: skip
        """Write the gradient of the row in shared memory.

        It is pull * 2**(t - highest) - scale * (e / V * w + (1 - e) * w[y] * [c = y]).
        Each slot that is done takes the next row's copy.
        """
        aligned = True
        if cutlass.const_expr(self.ragged):
            aligned = out_phase == phase
        if aligned:
            if cutlass.const_expr(self.ragged):
                if self.owns(facts.first, Int32(0)):
                    self.edge_gradient(facts, s_row, Int32(0), phase, g_out, highest, pull, scale)
                if self.owns(facts.first, vectors - 1):
                    s_last = self.slot(s_row, (vectors - 1 - facts.first) // self.step)
                    self.edge_gradient(facts, s_last, vectors - 1, phase, g_out, highest, pull, scale)
            policy = self.policy()
            for chunk in cutlass.range(facts.chunks, unroll=1):
                # All loads of the chunk come before its first copy: the compiler may not move them across one.
                words = [load_shared(self.slot(s_row, chunk * self.unroll + u)) for u in range(self.unroll)]
                for u in cutlass.range_constexpr(self.unroll):
                    index = chunk * self.unroll + u
                    vector = self.vector(facts.first, index)
                    values = self.gradient_values(
                        facts, unpack(self.dtype, words[u]), vector * self.width - phase, highest, pull, scale
                    )
                    store_global(
                        g_out + Int64(vector) * VECTOR_BYTES,
                        pack(self.dtype, values),
                        self.whole(vector, phase, vectors, facts.cols),
                    )
                    self.start(s_row, g_next, facts.first, index, next_low, next_high, policy)
            # The thread that stored the target's vector stores the target once more: its two stores keep their order.
            if (y < facts.cols) & self.owns(facts.first, (phase + y) // self.width):
                self.target_gradient(facts, y, x_y, w_y, g_out, phase, highest, pull, scale)
        else:
            # Vectors of logits and gradient do not coincide: element by element, the logits once more from the cache.
            self.start_row(s_row, g_next, facts.first, facts.chunks, next_low, next_high)
            for col in cutlass.range(facts.first, facts.cols, self.step, unroll=1):
                x = load_element(self.dtype, g_vectors + (Int64(phase) + Int64(col)) * self.element_bytes)
                values = self.gradient_values(facts, [x], col, highest, pull, scale)
                store_element(self.dtype, g_out + (Int64(out_phase) + Int64(col)) * self.element_bytes, values[0])
            if (y < facts.cols) & (y % self.step == facts.first):
                self.target_gradient(facts, y, x_y, w_y, g_out, out_phase, highest, pull, scale)

    def edge_gradient(self, facts, s_slot, vector, phase, g_out, highest, pull, scale):
        raw = unpack(self.dtype, load_shared(s_slot))
        values = self.gradient_values(facts, raw, vector * self.width - phase, highest, pull, scale)
        self.store_edge(g_out, vector, phase, facts.cols, values)

    # The sum over all rows

    def sums_address(self, it, block):
        """Where a block's sums are: losses, shares of the denominator, z-loss parts."""
        return it.g_workspace + (Int64(block) * SUMS_WORDS + WORKSPACE_SUMS) * 4

    @cute.jit
    def announce(self, facts: RowFacts, it: Operands, loss_sum, z_sum, count):
        """Store the block's sums, and note how many blocks had done so before."""
        if (cute.arch.thread_idx()[0] == 0) & (facts.rank == 0):
            block = cute.arch.block_idx()[0] // self.cluster
            zero = Float32(0.0)
            # What nothing was added to is named as what it is; see ``operand``.
            sums = [loss_sum, zero if self.gradient else count, z_sum if self.stats else zero, zero]
            store_floats(self.sums_address(it, block), sums)
            done_before = exchange_add(it.g_workspace + WORKSPACE_DONE * 4, Int32(1))
            store_shared_word(facts.s_scratch + self.notes + NOTE_DONE, done_before)

    @cute.jit
    def finish_sum(self, facts: RowFacts, it: Operands, loss_sum, z_sum, count, denominator):
        """Add the blocks' sums: the block that is done last adds all of them, in the order of the blocks.

        No other needs the workspace by then, and it leaves all of it at 0.
        """
        thread = cute.arch.thread_idx()[0]
        blocks = cute.arch.grid_dim()[0] // self.cluster
        if cutlass.const_expr(not self.one_row):
            # Every thread of a row has the row's loss: count it once.
            if thread % self.row_threads != 0:
                loss_sum = Float32(0.0)
                z_sum = Float32(0.0)
                count = Float32(0.0)
            barrier()
            loss_sum = self.sum_block(facts.s_scratch, thread, self.threads, loss_sum)
            if cutlass.const_expr(not self.gradient):
                count = self.sum_block(facts.s_scratch, thread, self.threads, count)
            if cutlass.const_expr(self.stats):
                z_sum = self.sum_block(facts.s_scratch, thread, self.threads, z_sum)
        if cutlass.const_expr(not (self.one_row and self.gradient)):
            self.announce(facts, it, loss_sum, z_sum, count)
        if facts.rank == 0:
            barrier()
            if load_shared_word(facts.s_scratch + self.notes + NOTE_DONE) == blocks - 1:
                loss, count, z_part = self.take_sums(facts, it, blocks, thread)
                if cutlass.const_expr(not self.gradient):
                    if self.counted(it):
                        denominator = count
                    denominator = self.or_given(it, denominator)
                # A block has at least as many threads.
                if thread < WORKSPACE_SUMS:
                    store_word(it.g_workspace + Int64(thread) * 4, Int32(0))
                if thread == 0:
                    store_float(it.g_loss, divide(loss, denominator))
                    if it.g_denominator != 0:
                        store_float(it.g_denominator, denominator)
                    if cutlass.const_expr(self.stats):
                        store_float(it.g_z_loss, divide(z_part, denominator))

    @cute.jit
    def take_sums(self, facts: RowFacts, it: Operands, blocks, thread):
        """The sums of the blocks' sums, the same for all threads; sets those to 0."""
        loss = Float32(0.0)
        count = Float32(0.0)
        z_part = Float32(0.0)
        for start in cutlass.range(thread, blocks, self.threads * SUMS_UNROLL, unroll=1):
            sums = []
            for u in cutlass.range_constexpr(SUMS_UNROLL):
                block = start + u * self.threads
                sums.append(load_floats(self.sums_address(it, block), block < blocks))
            for u in cutlass.range_constexpr(SUMS_UNROLL):
                block = start + u * self.threads
                store_floats(self.sums_address(it, block), [Float32(0.0)] * SUMS_WORDS, block < blocks)
            loss = loss + tree([of_block[0] for of_block in sums], add)
            count = count + tree([of_block[1] for of_block in sums], add)
            z_part = z_part + tree([of_block[2] for of_block in sums], add)
        loss = self.sum_block(facts.s_scratch, thread, self.threads, loss)
        if cutlass.const_expr(not self.gradient):
            count = self.sum_block(facts.s_scratch, thread, self.threads, count)
        if cutlass.const_expr(self.stats):
            z_part = self.sum_block(facts.s_scratch, thread, self.threads, z_part)
        return loss, count, z_part


def forward_arguments():
    """Arguments of CrossEntropyForward to compile for."""
    addresses = [Int64(0), Int64(1), Int64(0), Int64(1)] + [Int64(0)] * 11
    counts = [*[Int32(1)] * 4, Float32(1.0), *[Int32(1)] * 3]
    return [*addresses, *counts, Int64(-100), Int64(0), Int64(1), *[Float32(1.0)] * 4]
