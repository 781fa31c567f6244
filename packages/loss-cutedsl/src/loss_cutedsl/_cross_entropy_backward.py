"""Cross-entropy's gradient after the forward: recomputed from the logits, or rescaled in place.

Most launches find an upstream gradient of 1 and are over at once. It has just been filled in by another launch, so that
much of their time is the way from one launch to the next: with ``early``, a compile-time fact, they are under way
before that one has ended, and wait for it before they read anything.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from ._cross_entropy_rows import ENTRY_WORDS, CrossEntropyRows
from ._device import (
    LOWEST,
    barrier,
    divide,
    fma,
    load_element,
    load_element_below,
    load_float,
    load_global,
    pack,
    select_below,
    store_element,
    store_float,
    store_global,
    unpack,
    wait_for_launches,
)
from ._schedule import VECTOR_BYTES, Schedule

# The kernel that adds up the class weights: its threads, and its shared memory, a word per warp. The DSL sees only the
# shared memory that its own allocator hands out, so the launch has to ask for it.
WEIGHT_SUM_THREADS = 512
WEIGHT_SUM_BYTES = 128

# Logits that a thread has under way where it sums a row again.
SUM_UNROLL = 8


class CrossEntropyBackward(CrossEntropyRows):
    """The gradient recomputed from logits and lse, times the upstream gradient; a group of threads to a tile."""

    def __init__(
        self,
        dtype,
        schedule: Schedule,
        ragged: bool,
        *,
        target_bits: int,
        weighted: bool,
        smoothing: bool,
        logits: str,
        early: bool,
    ):
        super().__init__(dtype, schedule, ragged, ENTRY_WORDS)
        self.target_bits = target_bits
        self.early = early
        self.weighted = weighted
        self.smoothing = smoothing
        self.logits = logits
        # An lse is rounded by up to 2**-24 of its size, and each probability with it. Beyond this size that would show
        # in a gradient of the dtype.
        self.large_lse = 64.0 if dtype is Float32 else 1024.0

    @cute.jit
    def __call__(
        self,
        g_upstream: Int64,  # (1,) or (R,) float32; null for 1
        upstream_stride: Int64,
        g_logits: Int64,  # (R, V)
        logits_stride: Int64,
        g_grad: Int64,  # (R, V)
        grad_stride: Int64,
        g_target: Int64,  # (R,)
        g_weight: Int64,  # (V,) float32, or null
        g_lse: Int64,  # (R,) float32
        g_denominator: Int64,  # (1,) float32, or null
        g_workspace: Int64,  # (1,) float32, or null
        rows: Int32,
        grid: Int32,
        skip_if_one: Int32,
        cols: Int32,
        tiles: Int32,
        ignore_index: Int64,
        first_class: Int64,
        total_classes: Int64,
        label_smoothing: Float32,
        z_loss: Float32,
        logit_scale: Float32,
        softcap: Float32,
        stream,
    ):
        if cutlass.const_expr(self.weighted and self.smoothing):
            self.cross_entropy_weight_sum_kernel(g_weight, g_workspace, cols).launch(
                grid=[1, 1, 1], block=[WEIGHT_SUM_THREADS, 1, 1], smem=WEIGHT_SUM_BYTES, stream=stream
            )
        self.cross_entropy_backward_kernel(
            g_upstream,
            upstream_stride,
            g_logits,
            logits_stride,
            g_grad,
            grad_stride,
            g_target,
            g_weight,
            g_lse,
            g_denominator,
            g_workspace,
            rows,
            skip_if_one,
            cols,
            tiles,
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
            smem=self.scratch_bytes,
            stream=stream,
            use_pdl=self.early,
        )

    @cute.kernel
    def cross_entropy_weight_sum_kernel(self, g_weight: Int64, g_workspace: Int64, cols: Int32):
        """The sum of all class weights; one block."""
        thread = cute.arch.thread_idx()[0]
        total = Float32(0.0)
        for col in cutlass.range(thread, cols, WEIGHT_SUM_THREADS, unroll=4):
            total = total + load_float(g_weight + Int64(col) * 4)
        s_base = Int32(cute.arch.get_dyn_smem(Uint32, 128).toint())
        total = self.sum_block(s_base, thread, WEIGHT_SUM_THREADS, total)
        if thread == 0:
            store_float(g_workspace, total)

    @cute.kernel
    def cross_entropy_backward_kernel(
        self,
        g_upstream: Int64,
        upstream_stride: Int64,
        g_logits: Int64,
        logits_stride: Int64,
        g_grad: Int64,
        grad_stride: Int64,
        g_target: Int64,
        g_weight: Int64,
        g_lse: Int64,
        g_denominator: Int64,
        g_workspace: Int64,
        rows: Int32,
        skip_if_one: Int32,
        cols: Int32,
        tiles: Int32,
        ignore_index: Int64,
        first_class: Int64,
        total_classes: Int64,
        label_smoothing: Float32,
        z_loss: Float32,
        logit_scale: Float32,
        softcap: Float32,
    ):
        """A group of threads takes tiles in turn; tiles of a row are neighbours.

        With ``skip_if_one`` and an upstream gradient of 1 it takes none.
        """
        if cutlass.const_expr(self.early):
            wait_for_launches()
        thread, group, rank, first_work, work_step = self.place()
        s_scratch = Int32(cute.arch.get_dyn_smem(Uint32, 128).toint())
        work_end = rows * tiles
        if skip_if_one != 0:
            if load_float(g_upstream) == 1.0:
                work_end = Int32(0)
        for work in cutlass.range(first_work, work_end, work_step, unroll=1):
            row = work // tiles
            tile = work - row * tiles
            upstream = Float32(1.0)
            if g_upstream != 0:
                upstream = load_float(g_upstream + Int64(row) * upstream_stride * 4)
            first = thread + tile * (self.row_threads * self.unroll)
            target = self.load_target(g_target, row, row >= 0, ignore_index)
            g_vectors, phase, vectors = self.span(g_logits, logits_stride, row, cols)
            g_out, out_phase, out_vectors = self.span(g_grad, grad_stride, row, cols)
            if target == ignore_index:
                self.write_zeros(g_out, out_phase, out_vectors, first, Int32(1), cols)
            else:
                facts = self.row_facts(
                    cols, Int32(1), first, thread, rank, s_scratch, g_weight, first_class, total_classes,
                    label_smoothing, z_loss, logit_scale, softcap,
                )  # fmt: skip
                scale = upstream * logit_scale
                if g_denominator != 0:
                    scale = divide(scale, load_float(g_denominator))
                lse = load_float(g_lse + Int64(row) * 4)
                highest = divide(lse, facts.unit)
                y = self.column(facts, target)
                x_y = self.target_logit(g_vectors, phase, y, cols)
                w_y = self.target_weight(g_weight, y, cols)
                pull = fma(z_loss * Float32(2.0), lse, facts.confidence * w_y)
                if cutlass.const_expr(self.smoothing):
                    w_sum = load_float(g_workspace) if cutlass.const_expr(self.weighted) else Float32(cols)
                    pull = fma(facts.share, w_sum, pull)
                pull = self.or_nan(facts, target, pull) * scale
                if self.sums_again(facts, lse):
                    # One group takes the whole row: where the gradient takes the logits' memory, another one would
                    # overwrite what is still to be summed. That of another tile from row to row: a group may come by
                    # tiles of one number only.
                    if tile == row % tiles:
                        self.write_row(facts, g_vectors, phase, g_out, out_phase, y, x_y, w_y, pull, scale)
                else:
                    self.write_tile(
                        facts, g_vectors, phase, vectors, g_out, out_phase, y, x_y, w_y, highest, pull, scale
                    )

    def sums_again(self, facts, lse):
        """Whether to sum a row anew: its lse has lost digits, and is not one of several shards."""
        large = (lse > self.large_lse) | (lse < -self.large_lse)
        return large & (facts.total_classes == Int64(facts.cols))

    @cute.jit
    def sum_row(self, facts, g_vectors, phase):
        """A row's maximum and the sum of its powers, as the forward had them; for all threads of the group."""
        highest = Float32(LOWEST)
        total = Float32(0.0)
        # Element by element, which takes one loop for every layout, and few registers from all other rows.
        for start in cutlass.range(facts.thread, facts.cols, self.row_threads * SUM_UNROLL, unroll=1):
            raw = []
            for u in cutlass.range_constexpr(SUM_UNROLL):
                col = start + u * self.row_threads
                g_element = g_vectors + (Int64(phase) + Int64(col)) * self.element_bytes
                raw.append(load_element_below(self.dtype, g_element, col, facts.cols))
            t = []
            for u in cutlass.range_constexpr(SUM_UNROLL):
                col = start + u * self.row_threads
                t.append(select_below(col, facts.cols, self.value(facts, raw[u], col), Float32(float("-inf"))))
            highest, total = self.absorb_values(t, facts.power, highest, total)
        highest, total, _, _ = self.reduce_row(
            facts.s_scratch, Int32(0), facts.thread, facts.rank, facts.power, highest, total
        )
        if cutlass.const_expr(self.warps > 1):
            # The scratch is the next row's.
            barrier()
        return highest, total

    @cute.jit
    def write_row(self, facts, g_vectors, phase, g_out, out_phase, y, x_y, w_y, pull, scale):
        """The gradient of a whole row, from what it is summed to here."""
        highest, total = self.sum_row(facts, g_vectors, phase)
        self.write_columns(
            facts, g_vectors, phase, g_out, out_phase, Int32(0), facts.cols, y, x_y, w_y, highest,
            divide(pull, total), scale,
        )  # fmt: skip

    @cute.jit
    def write_tile(self, facts, g_vectors, phase, vectors, g_out, out_phase, y, x_y, w_y, highest, pull, scale):
        """The gradient of one tile; see CrossEntropyForward.write_gradient."""
        aligned = True
        if cutlass.const_expr(self.ragged):
            aligned = out_phase == phase
        if aligned:
            words = []
            for u in cutlass.range_constexpr(self.unroll):
                vector = self.vector(facts.first, u)
                whole = self.whole(vector, phase, vectors, facts.cols)
                words.append(load_global(g_vectors + Int64(vector) * VECTOR_BYTES, whole))
            for u in cutlass.range_constexpr(self.unroll):
                vector = self.vector(facts.first, u)
                values = self.gradient_values(
                    facts, unpack(self.dtype, words[u]), vector * self.width - phase, highest, pull, scale
                )
                whole = self.whole(vector, phase, vectors, facts.cols)
                store_global(g_out + Int64(vector) * VECTOR_BYTES, pack(self.dtype, values), whole)
            if cutlass.const_expr(self.ragged):
                # Whole vectors are done, and where the gradient takes the logits' memory, gone.
                if self.has(facts.first, Int32(0)) & (not self.whole(Int32(0), phase, vectors, facts.cols)):
                    self.edge_tile(facts, g_vectors, Int32(0), phase, g_out, highest, pull, scale)
                last = vectors - 1
                if (last > 0) & self.has(facts.first, last) & (not self.whole(last, phase, vectors, facts.cols)):
                    self.edge_tile(facts, g_vectors, last, phase, g_out, highest, pull, scale)
            if (y < facts.cols) & self.has(facts.first, (phase + y) // self.width):
                self.target_gradient(facts, y, x_y, w_y, g_out, phase, highest, pull, scale)
        else:
            start = (facts.first - facts.thread) * self.width
            stop = start + self.row_threads * self.unroll * self.width
            # Columns, not vectors, are dealt here: one tile may be left with none.
            if stop > facts.cols:
                stop = facts.cols
            self.write_columns(
                facts, g_vectors, phase, g_out, out_phase, start, stop, y, x_y, w_y, highest, pull, scale
            )

    @cute.jit
    def write_columns(
        self, facts, g_vectors, phase, g_out, out_phase, start, stop, y, x_y, w_y, highest, pull, scale
    ):  # fmt: skip
        """The gradient of columns [start, stop), element by element."""
        for col in cutlass.range(start + facts.thread, stop, self.row_threads, unroll=1):
            x = load_element(self.dtype, g_vectors + (Int64(phase) + Int64(col)) * self.element_bytes)
            values = self.gradient_values(facts, [x], col, highest, pull, scale)
            store_element(self.dtype, g_out + (Int64(out_phase) + Int64(col)) * self.element_bytes, values[0])
        if (y >= start) & (y < stop) & ((y - start) % self.row_threads == facts.thread):
            self.target_gradient(facts, y, x_y, w_y, g_out, out_phase, highest, pull, scale)

    def edge_tile(self, facts, g_vectors, vector, phase, g_out, highest, pull, scale):
        raw = self.load_edge(g_vectors, vector, phase, facts.cols)
        values = self.gradient_values(facts, raw, vector * self.width - phase, highest, pull, scale)
        self.store_edge(g_out, vector, phase, facts.cols, values)


def backward_arguments():
    """Arguments of CrossEntropyBackward to compile for."""
    return [*[Int64(0)] * 11, *[Int32(1)] * 5, Int64(-100), Int64(0), Int64(1), *[Float32(1.0)] * 4]


class CrossEntropyRescale(CrossEntropyRows):
    """grad *= upstream, in place, in rows that are not ignored; nothing but one load where upstream is 1."""

    def __init__(self, dtype, schedule: Schedule, ragged: bool, *, target_bits: int, early: bool):
        super().__init__(dtype, schedule, ragged, ENTRY_WORDS)
        self.target_bits = target_bits
        self.early = early

    @cute.jit
    def __call__(
        self,
        g_upstream: Int64,  # (1,) float32
        g_grad: Int64,  # (R, V)
        grad_stride: Int64,
        g_target: Int64,  # (R,)
        rows: Int32,
        grid: Int32,
        cols: Int32,
        tiles: Int32,
        ignore_index: Int64,
        stream,
    ):
        self.cross_entropy_rescale_kernel(
            g_upstream, g_grad, grad_stride, g_target, rows, cols, tiles, ignore_index
        ).launch(grid=[grid, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=self.early)

    @cute.kernel
    def cross_entropy_rescale_kernel(
        self,
        g_upstream: Int64,
        g_grad: Int64,
        grad_stride: Int64,
        g_target: Int64,
        rows: Int32,
        cols: Int32,
        tiles: Int32,
        ignore_index: Int64,
    ):
        """A group of threads takes tiles in turn; none where upstream is 1."""
        if cutlass.const_expr(self.early):
            wait_for_launches()
        thread, group, rank, first_work, work_step = self.place()
        upstream = load_float(g_upstream)
        work_end = rows * tiles
        if upstream == 1.0:
            work_end = Int32(0)
        for work in cutlass.range(first_work, work_end, work_step, unroll=1):
            row = work // tiles
            # The zeros of an ignored row would become NaN where upstream is not finite.
            if self.load_target(g_target, row, row >= 0, ignore_index) != ignore_index:
                first = thread + (work - row * tiles) * (self.row_threads * self.unroll)
                g_vectors, phase, vectors = self.span(g_grad, grad_stride, row, cols)
                self.rescale_tile(g_vectors, phase, vectors, first, cols, upstream)

    @cute.jit
    def rescale_tile(self, g_vectors, phase, vectors, first, cols, upstream):
        words = []
        for u in cutlass.range_constexpr(self.unroll):
            vector = self.vector(first, u)
            whole = self.whole(vector, phase, vectors, cols)
            words.append(load_global(g_vectors + Int64(vector) * VECTOR_BYTES, whole))
        for u in cutlass.range_constexpr(self.unroll):
            vector = self.vector(first, u)
            values = [value * upstream for value in unpack(self.dtype, words[u])]
            whole = self.whole(vector, phase, vectors, cols)
            store_global(g_vectors + Int64(vector) * VECTOR_BYTES, pack(self.dtype, values), whole)
        if cutlass.const_expr(self.ragged):
            # One vector that is both first and last is to be scaled once.
            if self.has(first, Int32(0)):
                self.rescale_edge(g_vectors, Int32(0), phase, cols, upstream)
            if (vectors > 1) & self.has(first, vectors - 1):
                self.rescale_edge(g_vectors, vectors - 1, phase, cols, upstream)

    @cute.jit
    def rescale_edge(self, g_vectors, vector, phase, cols, upstream):
        if not self.whole(vector, phase, vector, cols):
            raw = self.load_edge(g_vectors, vector, phase, cols)
            self.store_edge(g_vectors, vector, phase, cols, [value * upstream for value in raw])


def rescale_arguments():
    """Arguments of CrossEntropyRescale to compile for."""
    return [*[Int64(0)] * 4, *[Int32(1)] * 4, Int64(-100)]
