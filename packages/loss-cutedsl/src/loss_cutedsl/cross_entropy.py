"""Cross-entropy: the forward with the gradient in it, the forward alone, the recomputing backward, the rescale.

With x the logits after scale and softcap, and for a row of V classes with target y, maximum m = max x and
total = sum_c exp(x[c] - m)::

    lse    = m + log(total)
    loss   = (1 - e) * w[y] * (lse - x[y]) + e / V * sum_c w[c] * (lse - x[c]) + z * lse ** 2
    d loss / d x[c] = p[c] * ((1 - e) * w[y] + e / V * sum w + 2 z lse) - (1 - e) * w[y] * [c = y] - e / V * w[c]

All in float32, differences to the maximum before anything else, so that large logits lose nothing. The sum runs
online, with a running maximum (Milakov and Gimelshein 2018). The gradient in the same pass as the loss, for
scalar reductions whose denominator is known before the logits are read, is as in Liger (Hsu et al. 2024).

Prefixes: ``g_`` global address (Int64), ``s_`` shared-memory address (Int32). Sizes: R rows, V classes.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import torch
from cutlass import Float32, Int32, Int64, Uint32, cute
from loss_core.backend import CrossEntropyForward as ForwardResult
from loss_core.backend import UnsupportedInput

from . import _schedule
from ._compile import compiled
from ._device import (
    LN2,
    LOG2E,
    LOWEST,
    StagedRows,
    add,
    barrier,
    cluster_barrier,
    commit,
    divide,
    exp2,
    fma,
    launch_dependents,
    load_element,
    load_float,
    load_float_below,
    load_global,
    load_integer,
    load_shared,
    log2,
    maximum,
    pack,
    ptx,
    select_below,
    store_byte,
    store_element,
    store_float,
    store_global,
    store_int64,
    tanh,
    tree,
    unpack,
    wait,
    wait_for_previous_launch,
    warp_reduce,
)
from ._launch import DTYPES, is_ragged, machine_of, most_vectors, require, stream_of
from ._schedule import VECTOR_BYTES, Schedule

# Where the denominator of a scalar reduction comes from.
DENOMINATOR_ONE, DENOMINATOR_ROWS, DENOMINATOR_WEIGHTS, DENOMINATOR_BYTES, DENOMINATOR_VALUE, DENOMINATOR_POINTER = (
    range(6)
)

# Words of the workspace: partial denominators, then the counter of finished blocks, then partial losses.
COUNT_BLOCKS = 32
COUNT_THREADS = 512
COUNT_UNROLL = 8
# Shared memory of the counting kernels: a word per warp. The DSL sees only what its own allocator hands out.
COUNT_BYTES = 128
WORKSPACE_COUNTER = COUNT_BLOCKS
WORKSPACE_PARTIALS = 64

ENTRY_WORDS = 8


class RowFacts(NamedTuple):
    """What stays the same over the rows of one launch.

    The kernels work with values t = x / unit, whose powers are exp(x - m) = 2 ** ((t - max t) * power). ``inner`` is
    the factor of a logit before the softcap ``limit``. ``confidence``, ``share``: 1 - e and e / V.
    """

    cols: Int32
    chunks: Int32
    first: Int32
    thread: Int32
    rank: Int32
    s_scratch: Int32
    g_weight: Int64
    z_loss: Float32
    confidence: Float32
    share: Float32
    inner: Float32
    limit: Float32
    unit: Float32
    power: Float32


class CrossEntropyRows(StagedRows):
    """What the kernels of cross-entropy share: a row's logits, loss, and gradient.

    ``logits``, a compile-time fact, is how a raw logit r becomes t: "linear" (positive scale s, no softcap: t = r and
    the scale is the unit), "scaled" (any scale: t = s r) or "softcap" (t = c tanh(s r / c)).
    """

    def row_facts(
        self, cols, chunks, first, thread, rank, s_scratch, g_weight, label_smoothing, z_loss, logit_scale, softcap
    ):  # fmt: skip
        linear = self.logits == "linear"
        return RowFacts(
            cols=cols,
            chunks=chunks,
            first=first,
            thread=thread,
            rank=rank,
            s_scratch=s_scratch,
            g_weight=g_weight,
            z_loss=z_loss,
            confidence=Float32(1.0) - label_smoothing,
            share=divide(label_smoothing, Float32(cols)),
            inner=divide(logit_scale, softcap) if self.logits == "softcap" else logit_scale,
            limit=softcap,
            unit=logit_scale if linear else Float32(1.0),
            power=logit_scale * Float32(LOG2E) if linear else Float32(LOG2E),
        )

    def value(self, facts, raw, col):
        """t of a raw logit; -inf for columns outside the row."""
        if self.logits == "linear":
            return raw
        t = raw * facts.inner
        if self.logits == "softcap":
            t = tanh(t) * facts.limit
        return select_below(col, facts.cols, t, Float32(float("-inf")))

    def slope(self, facts, raw):
        """The softcap's derivative at a raw logit, or None for 1."""
        if self.logits != "softcap":
            return None
        bounded = tanh(raw * facts.inner)
        return fma(Float32(0.0) - bounded, bounded, Float32(1.0))

    def row_loss(self, facts, y, x_y, w_y, highest, total, x_sum, w_sum):
        """Loss, its z-loss part, lse, and the factor of the probabilities in the gradient; NaN if y is no class."""
        log_total = log2(total) * Float32(LN2)
        lse = fma(highest, facts.unit, log_total)
        push = facts.confidence * w_y
        loss = push * (log_total - (self.value(facts, x_y, y) - highest) * facts.unit)
        pull = push
        if self.smoothing:
            loss = fma(facts.share, fma(w_sum, lse, Float32(0.0) - x_sum * facts.unit), loss)
            pull = fma(facts.share, w_sum, pull)
        z_part = facts.z_loss * lse * lse
        pull = fma(facts.z_loss * Float32(2.0), lse, pull)
        nan = Float32(float("nan"))
        loss = select_below(y, facts.cols, loss + z_part, nan)
        pull = select_below(y, facts.cols, pull, nan)
        return loss, z_part, lse, pull

    def gradient_values(self, facts, raw, col, highest, pull, scale):
        """Gradient of elements from column ``col`` on, without the target's own term."""
        values = []
        for lane in range(len(raw)):
            value = exp2((self.value(facts, raw[lane], col + lane) - highest) * facts.power)
            if self.smoothing:
                push = Float32(0.0) - facts.share * scale
                if self.weighted:
                    push = push * load_float_below(facts.g_weight + Int64(col + lane) * 4, col + lane, facts.cols)
                value = fma(value, pull, push)
            else:
                value = value * pull
            slope = self.slope(facts, raw[lane])
            values.append(value if slope is None else value * slope)
        return values

    def target_gradient(self, facts, y, x_y, w_y, g_out, out_phase, highest, pull, scale):
        """Store the target's gradient, formed in float32."""
        push = facts.confidence * w_y
        if self.smoothing:
            push = fma(facts.share, w_y, push)
        value = exp2((self.value(facts, x_y, y) - highest) * facts.power) * pull - push * scale
        slope = self.slope(facts, x_y)
        if slope is not None:
            value = value * slope
        store_element(self.dtype, g_out + (Int64(out_phase) + Int64(y)) * self.element_bytes, value)

    def load_target(self, g_target, row, wanted, otherwise):
        """The target of a row, or ``otherwise`` where the row is not wanted."""
        bits = self.target_bits
        load = {64: "ld.global.b64 {$w0}, [{$r0}];", 32: "ld.global.s32 v, [{$r0}];", 8: "ld.global.u8 v, [{$r0}];"}[
            bits
        ]
        widen = {64: "", 32: "@p cvt.s64.s32 {$w0}, v;", 8: "@p cvt.u64.u32 {$w0}, v;"}[bits]
        return ptx(
            "{ .reg .pred p; .reg .b32 v; setp.ne.u32 p, {$r1}, 0; mov.b64 {$w0}, {$r2}; @p %s %s }" % (load, widen),
            [Int64],
            [g_target + Int64(row) * (bits // 8), Int32(wanted), otherwise],
        )

    def column(self, target, cols):
        """A target as Int32; ``cols`` if it is no class, so that one unsigned comparison tells."""
        return ptx(
            "{ .reg .pred p; .reg .b64 b; .reg .b32 c; cvt.u64.u32 b, {$r1}; setp.lt.u64 p, {$r0}, b;"
            " cvt.u32.u64 c, {$r0}; selp.b32 {$w0}, c, {$r1}, p; }",
            [Int32],
            [target, cols],
        )

    def target_logit(self, g_vectors, phase, y, cols):
        """The raw logit of column y, or column 0's where y is no column."""
        inside = ptx("{ .reg .pred p; setp.lt.u32 p, {$r0}, {$r1}; selp.b32 {$w0}, {$r0}, 0, p; }", [Int32], [y, cols])
        return load_element(self.dtype, g_vectors + (Int64(phase) + Int64(inside)) * self.element_bytes)

    def target_weight(self, g_weight, y, cols):
        if not self.weighted:
            return Float32(1.0)
        return load_float_below(g_weight + Int64(y) * 4, y, cols)


class CrossEntropyForward(CrossEntropyRows):
    """Loss of every row, its reduction and, with ``gradient``, the finished gradient: logits read once.

    Two forms of one kernel. ``gradient``: a stage of shared memory is a row; a persistent grid takes rows in turn and
    starts the next row's copies while it writes the gradient of this one. Without: a stage is a chunk of a row, and
    nothing is held, so that rows of any length stream through.
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
        overlap: bool,
    ):
        super().__init__(dtype, schedule, ragged, ENTRY_WORDS)
        self.target_bits = target_bits
        self.gradient = gradient
        self.scalar = scalar
        self.weighted = weighted
        self.smoothing = smoothing
        self.logits = logits
        self.stats = stats
        self.overlap = overlap

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
        g_workspace: Int64,  # float32 words, see above
        rows: Int32,
        cols: Int32,
        chunks: Int32,
        grid: Int32,
        shared_bytes: Int32,
        count_grid: Int32,
        denominator_kind: Int32,
        bytes_bits: Int32,
        items: Float32,
        ignore_index: Int64,
        label_smoothing: Float32,
        z_loss: Float32,
        logit_scale: Float32,
        softcap: Float32,
        stream,
    ):
        if cutlass.const_expr(self.scalar):
            self.cross_entropy_count_kernel(
                g_target, g_weight, g_bytes, g_workspace, rows, cols, denominator_kind, bytes_bits, ignore_index
            ).launch(grid=[count_grid, 1, 1], block=[COUNT_THREADS, 1, 1], smem=COUNT_BYTES, stream=stream)
        self.cross_entropy_forward_kernel(
            g_logits,
            logits_stride,
            g_grad,
            grad_stride,
            g_target,
            g_weight,
            g_items,
            g_loss,
            g_lse,
            g_denominator,
            g_z_loss,
            g_prediction,
            g_correct,
            g_workspace,
            rows,
            cols,
            chunks,
            count_grid,
            denominator_kind,
            items,
            ignore_index,
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
            use_pdl=self.scalar and self.overlap,
            min_blocks_per_mp=self.schedule.blocks,
            # Shared memory is where the rows are; and stating it spares the compiler the question to a device.
            preferred_smem_carveout=100,
        )

    # Denominator

    @cute.kernel
    def cross_entropy_count_kernel(
        self,
        g_target: Int64,
        g_weight: Int64,
        g_bytes: Int64,
        g_workspace: Int64,
        rows: Int32,
        cols: Int32,
        kind: Int32,
        bytes_bits: Int32,
        ignore_index: Int64,
    ):
        """Partial denominators, one a block: rows, weights or bytes that are not ignored. Resets the counter."""
        if cutlass.const_expr(self.overlap):
            launch_dependents()
        thread = cute.arch.thread_idx()[0]
        block = cute.arch.block_idx()[0]
        blocks = cute.arch.grid_dim()[0]
        total = Float32(0.0)
        if (kind >= DENOMINATOR_ROWS) & (kind <= DENOMINATOR_BYTES):
            step = blocks * COUNT_THREADS
            for start in cutlass.range(block * COUNT_THREADS + thread, rows, step * COUNT_UNROLL, unroll=1):
                found = []
                for u in cutlass.range_constexpr(COUNT_UNROLL):
                    row = start + u * step
                    target = self.load_target(g_target, row, row < rows, ignore_index)
                    found.append((row, target))
                for u in cutlass.range_constexpr(COUNT_UNROLL):
                    row, target = found[u]
                    if target != ignore_index:
                        value = Float32(1.0)
                        if kind == DENOMINATOR_WEIGHTS:
                            value = load_float_below(g_weight + target * 4, self.column(target, cols), cols)
                        if kind == DENOMINATOR_BYTES:
                            if bytes_bits == 64:
                                value = Float32(load_integer(64, g_bytes + Int64(row) * 8))
                            else:
                                value = Float32(load_integer(32, g_bytes + Int64(row) * 4))
                        total = total + value
        s_base = Int32(cute.arch.get_dyn_smem(Uint32, 128).toint())
        total = self.sum_block(s_base, thread, COUNT_THREADS, total)
        if thread == 0:
            store_float(g_workspace + Int64(block) * 4, total)
            if block == 0:
                store_float(g_workspace + WORKSPACE_COUNTER * 4, Float32(0.0))

    @cute.jit
    def denominator(self, g_workspace, g_items, count_grid, kind, items: Float32):
        """What the sum is divided by; waits for the launch that counts."""
        if cutlass.const_expr(self.overlap):
            wait_for_previous_launch()
        value = Float32(1.0)
        if (kind >= DENOMINATOR_ROWS) & (kind <= DENOMINATOR_BYTES):
            lane = cute.arch.thread_idx()[0] % 32
            value = warp_reduce(load_float_below(g_workspace + Int64(lane) * 4, lane, count_grid), add)
        if kind == DENOMINATOR_VALUE:
            value = items
        if kind == DENOMINATOR_POINTER:
            value = load_float(g_items)
        return value

    # The row

    @cute.kernel
    def cross_entropy_forward_kernel(
        self,
        g_logits: Int64,
        logits_stride: Int64,
        g_grad: Int64,
        grad_stride: Int64,
        g_target: Int64,
        g_weight: Int64,
        g_items: Int64,
        g_loss: Int64,
        g_lse: Int64,
        g_denominator: Int64,
        g_z_loss: Int64,
        g_prediction: Int64,
        g_correct: Int64,
        g_workspace: Int64,
        rows: Int32,
        cols: Int32,
        chunks: Int32,
        count_grid: Int32,
        denominator_kind: Int32,
        items: Float32,
        ignore_index: Int64,
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
        g_end = g_logits + (Int64(rows - 1) * logits_stride + Int64(cols)) * self.element_bytes
        if cutlass.const_expr(self.gradient):
            self.fill_tails(s_slots, chunks, cols, first, self.lowest())
        if cutlass.const_expr(self.cluster > 1):
            # A block must not write to the shared memory of one that has not started.
            cluster_barrier()

        facts = self.row_facts(
            cols, chunks, first, thread, rank, s_scratch, g_weight, label_smoothing, z_loss, logit_scale, softcap
        )
        loss_sum = Float32(0.0)
        z_sum = Float32(0.0)
        parity = Int32(0)
        stage = Int32(0)

        if cutlass.const_expr(self.gradient):
            for s in cutlass.range_constexpr(self.stages):
                early_row = first_row + s * row_step
                early_target = self.load_target(g_target, early_row, early_row < rows, ignore_index)
                if self.reads(early_target, ignore_index, early_row < rows):
                    g_vectors, phase, vectors = self.span(g_logits, logits_stride, early_row, cols)
                    low, high = self.inside(g_vectors, vectors, g_logits, g_end)
                    s_row = s_slots + s * stage_bytes
                    self.start_row(s_row, g_vectors, first, chunks, low, high)
                    self.copy_edges(s_row, g_vectors, first, phase, vectors, low, high, cols)
                commit()
        denominator = Float32(1.0)
        if cutlass.const_expr(self.scalar and self.gradient):
            denominator = self.denominator(g_workspace, g_items, count_grid, denominator_kind, items)

        if cutlass.const_expr(self.gradient):
            scale = divide(logit_scale, denominator)
            target = self.load_target(g_target, first_row, first_row < rows, ignore_index)
            for row in cutlass.range(first_row, rows, row_step, unroll=1):
                # Targets are loaded well before they are needed: this row's with the row before.
                coming_row = row + row_step
                coming_target = self.load_target(g_target, coming_row, coming_row < rows, ignore_index)
                next_row = row + self.stages * row_step
                next_target = coming_target
                if cutlass.const_expr(self.stages > 1):
                    next_target = self.load_target(g_target, next_row, next_row < rows, ignore_index)
                s_row = s_slots + stage * stage_bytes
                g_vectors, phase, vectors = self.span(g_logits, logits_stride, row, cols)
                g_out, out_phase, out_vectors = self.span(g_grad, grad_stride, row, cols)
                y = self.column(target, cols)
                x_y = Float32(0.0)
                w_y = Float32(1.0)
                highest = Float32(LOWEST)
                total = Float32(1.0)
                pull = Float32(0.0)
                lse = Float32(0.0)
                wait(self.stages - 1)
                if self.reads(target, ignore_index, True):
                    x_y = self.target_logit(g_vectors, phase, y, cols)
                    w_y = self.target_weight(g_weight, y, cols)
                    self.mask_edges(s_row, first, phase, vectors, chunks * self.unroll, cols, Float32(float("-inf")))
                    highest, total, x_sum, w_sum, key, index = self.sum_held(facts, s_row, phase)
                    parity = parity ^ 1
                    highest, total, x_sum, w_sum, key, index = self.finish(
                        facts, parity, highest, total, x_sum, w_sum, key, index
                    )
                    loss, z_part, lse, pull = self.row_loss(facts, y, x_y, w_y, highest, total, x_sum, w_sum)
                    if target != ignore_index:
                        loss_sum = loss_sum + loss
                        z_sum = z_sum + z_part
                    if first == 0:
                        self.write_stats(row, target != ignore_index, y, index, g_prediction, g_correct)
                if first == 0:
                    store_float(g_lse + Int64(row) * 4, lse)

                g_next, next_phase, next_vectors = self.span(g_logits, logits_stride, next_row, cols)
                next_low, next_high = self.inside(g_next, next_vectors, g_logits, g_end)
                if not self.reads(next_target, ignore_index, next_row < rows):
                    next_low = Int32(0)
                    next_high = Int32(0)
                    next_vectors = Int32(0)
                if target != ignore_index:
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
        else:
            # The cursor of the copies runs `stages` chunks ahead of the chunk that is summed.
            ahead_row = first_row
            ahead_chunk = Int32(0)
            ahead_stage = Int32(0)
            ahead_target = self.load_target(g_target, first_row, first_row < rows, ignore_index)
            for _ in cutlass.range_constexpr(self.stages):
                ahead_row, ahead_chunk, ahead_stage, ahead_target = self.start_chunk(
                    facts, s_slots, g_logits, logits_stride, g_end, g_target, ignore_index, rows, row_step,
                    ahead_row, ahead_chunk, ahead_stage, ahead_target,
                )  # fmt: skip
            for row in cutlass.range(first_row, rows, row_step, unroll=1):
                target = self.load_target(g_target, row, row >= 0, ignore_index)
                g_vectors, phase, vectors = self.span(g_logits, logits_stride, row, cols)
                y = self.column(target, cols)
                x_y = Float32(0.0)
                w_y = Float32(1.0)
                live = self.reads(target, ignore_index, True)
                if live:
                    x_y = self.target_logit(g_vectors, phase, y, cols)
                    w_y = self.target_weight(g_weight, y, cols)
                highest = Float32(LOWEST)
                total = Float32(0.0)
                x_sum = Float32(0.0)
                w_sum = Float32(0.0)
                key = Float32(float("-inf"))
                index = self.first_column(first, phase, cols)
                for chunk in cutlass.range(chunks, unroll=1):
                    wait(self.stages - 1)
                    s_chunk = s_slots + stage * stage_bytes
                    if live:
                        self.mask_chunk(facts, s_chunk, chunk, phase, vectors)
                        highest, total, x_sum, w_sum, key, index = self.absorb(
                            facts, s_chunk, Int32(0), chunk, phase,
                            highest, total, x_sum, w_sum, key, index,
                        )  # fmt: skip
                    ahead_row, ahead_chunk, ahead_stage, ahead_target = self.start_chunk(
                        facts, s_slots, g_logits, logits_stride, g_end, g_target, ignore_index, rows, row_step,
                        ahead_row, ahead_chunk, ahead_stage, ahead_target,
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
                    loss, z_part, lse, pull = self.row_loss(facts, y, x_y, w_y, highest, total, x_sum, w_sum)
                if target == ignore_index:
                    loss = Float32(0.0)
                    z_part = Float32(0.0)
                loss_sum = loss_sum + loss
                z_sum = z_sum + z_part
                if first == 0:
                    store_float(g_lse + Int64(row) * 4, lse)
                    if cutlass.const_expr(not self.scalar):
                        store_float(g_loss + Int64(row) * 4, loss)
                        if cutlass.const_expr(self.stats):
                            store_float(g_z_loss + Int64(row) * 4, z_part)
                    self.write_stats(row, target != ignore_index, y, index, g_prediction, g_correct)
            if cutlass.const_expr(self.scalar):
                denominator = self.denominator(g_workspace, g_items, count_grid, denominator_kind, items)
        if cutlass.const_expr(self.scalar):
            self.finish_sum(
                s_scratch, rank, group, loss_sum, z_sum, denominator, g_workspace, g_loss, g_denominator, g_z_loss
            )

    def reads(self, target, ignore_index, exists):
        """Whether the logits of a row are looked at: an ignored row's only for its statistics."""
        if self.stats:
            return exists if not isinstance(exists, bool) else target == target
        return target != ignore_index

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
        """Mask the edges of a row that are in this chunk; of the streamed form, whose slots hold one chunk."""
        outside = Float32(float("-inf"))
        if cutlass.const_expr(self.ragged):
            if (chunk == 0) & (facts.first == 0) & (phase > 0):
                self.mask_elements(s_chunk, Int32(0), phase, facts.cols, outside)
        # A row has at most one vector less than the most that `chunks` was made for.
        if chunk + 2 >= facts.chunks:
            for u in cutlass.range_constexpr(self.unroll):
                vector = self.vector(facts.first, chunk * self.unroll + u)
                if (vector + 1) * self.width - phase > facts.cols:
                    self.mask_elements(
                        s_chunk + u * (self.row_threads * VECTOR_BYTES), vector, phase, facts.cols, outside
                    )

    @cute.jit
    def start_chunk(
        self, facts, s_slots, g_logits, logits_stride, g_end, g_target, ignore_index, rows, row_step, row, chunk, stage,
        target,
    ):  # fmt: skip
        """Start the copies of the chunk under the cursor, if there is one; move the cursor on."""
        if self.reads(target, ignore_index, row < rows):
            s_chunk = s_slots + stage * (self.unroll * self.row_threads * VECTOR_BYTES)
            g_vectors, phase, vectors = self.span(g_logits, logits_stride, row, facts.cols)
            low, high = self.inside(g_vectors, vectors, g_logits, g_end)
            self.start_part(s_chunk, g_vectors, facts.first, chunk, phase, vectors, low, high, facts.cols)
        commit()
        stage = stage + 1
        if stage == self.stages:
            stage = Int32(0)
        chunk = chunk + 1
        if chunk == facts.chunks:
            chunk = Int32(0)
            row = row + row_step
            target = self.load_target(g_target, row, row < rows, ignore_index)
        return row, chunk, stage, target

    @cute.jit
    def sum_held(self, facts, s_row, phase):
        """This thread's part of the row's sums, from shared memory."""
        highest = Float32(LOWEST)
        total = Float32(0.0)
        x_sum = Float32(0.0)
        w_sum = Float32(0.0)
        key = Float32(float("-inf"))
        index = self.first_column(facts.first, phase, facts.cols)
        for chunk in cutlass.range(facts.chunks, unroll=1):
            highest, total, x_sum, w_sum, key, index = self.absorb(
                facts, s_row, chunk, chunk, phase,
                highest, total, x_sum, w_sum, key, index,
            )  # fmt: skip
        return highest, total, x_sum, w_sum, key, index

    @cute.jit
    def absorb(
        self, facts, s_row, place, chunk, phase,
        highest, total, x_sum, w_sum, key, index,
    ):  # fmt: skip
        """Take one chunk (at ``place`` in shared memory) into the running sums."""
        raw = []
        columns = []
        for u in cutlass.range_constexpr(self.unroll):
            raw = raw + unpack(self.dtype, load_shared(self.slot(s_row, place * self.unroll + u)))
            column = self.vector(facts.first, chunk * self.unroll + u) * self.width - phase
            columns = columns + [column + lane for lane in range(self.width)]
        t = [self.value(facts, x, col) for x, col in zip(raw, columns)]
        highest, total = self.absorb_values(t, facts.power, highest, total)
        if cutlass.const_expr(self.smoothing):
            seen = t
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
            best = tree(keys, maximum)
            if best > key:
                key = best
                for i in cutlass.range_constexpr(len(keys) - 1, -1, -1):
                    index = ptx(
                        "{ .reg .pred p; setp.eq.f32 p, {$r0}, {$r1}; selp.b32 {$w0}, {$r2}, {$r3}, p; }",
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
                    self.start(s_row, g_next, facts.first, index, next_low, next_high)
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

    @cute.jit
    def finish_sum(
        self, s_scratch, rank, group, loss_sum, z_sum, denominator, g_workspace, g_loss, g_denominator, g_z_loss
    ):
        """Add the blocks' sums: the last block to finish adds all of them, in the order of the blocks."""
        thread = cute.arch.thread_idx()[0]
        block = cute.arch.block_idx()[0] // self.cluster
        blocks = cute.arch.grid_dim()[0] // self.cluster
        # Every thread of a row has the row's loss: count it once.
        if thread % self.row_threads != 0:
            loss_sum = Float32(0.0)
            z_sum = Float32(0.0)
        if rank == 0:
            barrier()
            loss_sum = self.sum_block(s_scratch, thread, self.threads, loss_sum)
            if cutlass.const_expr(self.stats):
                z_sum = self.sum_block(s_scratch, thread, self.threads, z_sum)
            g_partials = g_workspace + WORKSPACE_PARTIALS * 4
            if thread == 0:
                store_float(g_partials + Int64(block) * 4, loss_sum)
                if cutlass.const_expr(self.stats):
                    store_float(g_partials + Int64(blocks + block) * 4, z_sum)
                before = ptx(
                    "fence.acq_rel.gpu; atom.acq_rel.gpu.global.add.u32 {$w0}, [{$r0}], 1; fence.acq_rel.gpu;",
                    [Int32],
                    [g_workspace + WORKSPACE_COUNTER * 4],
                )
                ptx("st.shared.b32 [{$r0}], {$r1};", None, [s_scratch, before])
            barrier()
            before = ptx("ld.shared.b32 {$w0}, [{$r0}];", [Int32], [s_scratch])
            barrier()
            if before == blocks - 1:
                loss = self.sum_block(s_scratch, thread, self.threads, self.sum_partials(g_partials, blocks, thread))
                if thread == 0:
                    store_float(g_loss, divide(loss, denominator))
                    if g_denominator != 0:
                        store_float(g_denominator, denominator)
                if cutlass.const_expr(self.stats):
                    z_part = self.sum_block(
                        s_scratch,
                        thread,
                        self.threads,
                        self.sum_partials(g_partials + Int64(blocks) * 4, blocks, thread),
                    )
                    if thread == 0:
                        store_float(g_z_loss, divide(z_part, denominator))

    @cute.jit
    def sum_partials(self, g_partials, blocks, thread):
        value = Float32(0.0)
        for i in cutlass.range(thread, blocks, self.threads, unroll=1):
            value = value + ptx("ld.relaxed.gpu.global.f32 {$w0}, [{$r0}];", [Float32], [g_partials + Int64(i) * 4])
        return value


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
    ):
        super().__init__(dtype, schedule, ragged, ENTRY_WORDS)
        self.target_bits = target_bits
        self.weighted = weighted
        self.smoothing = smoothing
        self.logits = logits

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
        cols: Int32,
        tiles: Int32,
        grid: Int32,
        skip_if_one: Int32,
        ignore_index: Int64,
        label_smoothing: Float32,
        z_loss: Float32,
        logit_scale: Float32,
        softcap: Float32,
        stream,
    ):
        if cutlass.const_expr(self.weighted and self.smoothing):
            self.cross_entropy_weight_sum_kernel(g_weight, g_workspace, cols).launch(
                grid=[1, 1, 1], block=[COUNT_THREADS, 1, 1], smem=COUNT_BYTES, stream=stream
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
            cols,
            tiles,
            skip_if_one,
            ignore_index,
            label_smoothing,
            z_loss,
            logit_scale,
            softcap,
        ).launch(grid=[grid, 1, 1], block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def cross_entropy_weight_sum_kernel(self, g_weight: Int64, g_workspace: Int64, cols: Int32):
        """The sum of all class weights; one block."""
        thread = cute.arch.thread_idx()[0]
        total = Float32(0.0)
        for col in cutlass.range(thread, cols, COUNT_THREADS, unroll=4):
            total = total + load_float(g_weight + Int64(col) * 4)
        s_base = Int32(cute.arch.get_dyn_smem(Uint32, 128).toint())
        total = self.sum_block(s_base, thread, COUNT_THREADS, total)
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
        cols: Int32,
        tiles: Int32,
        skip_if_one: Int32,
        ignore_index: Int64,
        label_smoothing: Float32,
        z_loss: Float32,
        logit_scale: Float32,
        softcap: Float32,
    ):
        """One group of threads to a tile; tiles of a row are neighbours."""
        thread, group, rank, work, work_step = self.place()
        row = work // tiles
        wanted = row < rows
        upstream = Float32(1.0)
        if wanted & (g_upstream != 0):
            upstream = load_float(g_upstream + Int64(row) * upstream_stride * 4)
        if skip_if_one != 0:
            wanted = wanted & (upstream != 1.0)
        if wanted:
            first = thread + (work - row * tiles) * (self.row_threads * self.unroll)
            target = self.load_target(g_target, row, row >= 0, ignore_index)
            g_vectors, phase, vectors = self.span(g_logits, logits_stride, row, cols)
            g_out, out_phase, out_vectors = self.span(g_grad, grad_stride, row, cols)
            if target == ignore_index:
                self.write_zeros(g_out, out_phase, out_vectors, first, Int32(1), cols)
            else:
                facts = self.row_facts(
                    cols,
                    Int32(1),
                    first,
                    thread,
                    rank,
                    Int32(0),
                    g_weight,
                    label_smoothing,
                    z_loss,
                    logit_scale,
                    softcap,
                )
                scale = upstream * logit_scale
                if g_denominator != 0:
                    scale = divide(scale, load_float(g_denominator))
                lse = load_float(g_lse + Int64(row) * 4)
                highest = divide(lse, facts.unit)
                y = self.column(target, cols)
                x_y = self.target_logit(g_vectors, phase, y, cols)
                w_y = self.target_weight(g_weight, y, cols)
                pull = fma(z_loss * Float32(2.0), lse, facts.confidence * w_y)
                if cutlass.const_expr(self.smoothing):
                    w_sum = load_float(g_workspace) if cutlass.const_expr(self.weighted) else Float32(cols)
                    pull = fma(facts.share, w_sum, pull)
                pull = select_below(y, cols, pull, Float32(float("nan"))) * scale
                self.write_tile(facts, g_vectors, phase, vectors, g_out, out_phase, y, x_y, w_y, highest, pull, scale)

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


class CrossEntropyRescale(StagedRows):
    """grad *= upstream, in place; nothing but one load where upstream is 1."""

    def __init__(self, dtype, schedule: Schedule, ragged: bool):
        super().__init__(dtype, schedule, ragged, ENTRY_WORDS)

    @cute.jit
    def __call__(
        self,
        g_upstream: Int64,  # (1,) float32
        g_grad: Int64,  # (R, V)
        grad_stride: Int64,
        rows: Int32,
        cols: Int32,
        tiles: Int32,
        grid: Int32,
        stream,
    ):
        self.cross_entropy_rescale_kernel(g_upstream, g_grad, grad_stride, rows, cols, tiles).launch(
            grid=[grid, 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def cross_entropy_rescale_kernel(
        self, g_upstream: Int64, g_grad: Int64, grad_stride: Int64, rows: Int32, cols: Int32, tiles: Int32
    ):
        """One group of threads to a tile of a row."""
        thread, group, rank, work, work_step = self.place()
        row = work // tiles
        upstream = load_float(g_upstream)
        if (row < rows) & (upstream != 1.0):
            first = thread + (work - row * tiles) * (self.row_threads * self.unroll)
            g_vectors, phase, vectors = self.span(g_grad, grad_stride, row, cols)
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


# Host


class ForwardPlan(NamedTuple):
    """A compiled forward and how it is launched. ``most_blocks``: of a grid, a multiple of the cluster."""

    launch: object
    schedule: Schedule
    chunks: int
    shared_bytes: int
    most_blocks: int
    gradient: bool


_forward_plans: dict[tuple, ForwardPlan] = {}
_backward_plans: dict[tuple, tuple] = {}


def _forward_plan(index, dtype, cols, ragged, target_bits, gradient, scalar, weighted, smoothing, logits, stats):
    machine = machine_of(index)
    vectors = most_vectors(cols, dtype.itemsize, ragged)
    schedule = _schedule.held(machine, vectors, 1, ENTRY_WORDS, ragged) if gradient else None
    gradient = schedule is not None
    if schedule is None:
        schedule = _schedule.streamed(machine, vectors, ragged)
    return _make_forward_plan(
        machine, dtype, vectors, schedule, ragged, target_bits, gradient, scalar, weighted, smoothing, logits, stats
    )


def _make_forward_plan(
    machine, dtype, vectors, schedule, ragged, target_bits, gradient, scalar, weighted, smoothing, logits, stats
):  # fmt: skip
    facts = {
        "target_bits": target_bits,
        "gradient": gradient,
        "scalar": scalar,
        "weighted": weighted,
        "smoothing": smoothing,
        "logits": logits,
        "stats": stats,
        "overlap": machine.overlap,
    }
    launch = compiled(
        CrossEntropyForward,
        (str(dtype), tuple(schedule), ragged, *facts.items()),
        lambda: CrossEntropyForward(DTYPES[dtype], schedule, ragged, **facts),
        forward_arguments,
        machine.architecture,
    )
    chunks = schedule.chunks(vectors)
    groups = schedule.threads // schedule.row_threads
    held = schedule.slot_bytes(chunks if gradient else 1)
    shared_bytes = schedule.scratch_bytes(ENTRY_WORDS) + groups * schedule.stages * held
    blocks = machine.processors * _schedule.resident_blocks(machine, schedule, shared_bytes)
    blocks = max(schedule.cluster, blocks // schedule.cluster * schedule.cluster)
    return ForwardPlan(launch, schedule, chunks, shared_bytes, blocks, gradient)


def forward_arguments():
    """Arguments of CrossEntropyForward to compile for."""
    addresses = [Int64(0), Int64(1), Int64(0), Int64(1)] + [Int64(0)] * 11
    return [*addresses, *[Int32(1)] * 8, Float32(1.0), Int64(-100), *[Float32(1.0)] * 4]


def backward_arguments():
    """Arguments of CrossEntropyBackward to compile for."""
    return [*[Int64(0)] * 11, *[Int32(1)] * 5, Int64(-100), *[Float32(1.0)] * 4]


def rescale_arguments():
    """Arguments of CrossEntropyRescale to compile for."""
    return [*[Int64(0)] * 3, *[Int32(1)] * 4]


TARGET_BITS = {torch.int64: 64, torch.int32: 32, torch.uint8: 8}


def _logits_kind(options):
    if options.softcap is not None:
        return "softcap"
    return "linear" if options.logit_scale > 0 else "scaled"


def _require(logits, target):
    require(logits)
    if logits.shape[1] == 0:
        raise UnsupportedInput("cutedsl: at least one class expected, got 0")
    if target.dtype not in TARGET_BITS:
        raise UnsupportedInput(f"cutedsl: targets of int64, int32 or uint8 expected, got {target.dtype}")


def forward(logits, target, weight, byte_lengths, num_items, options, *, grad, stats):
    """``cross_entropy_forward`` of the contract in loss_core.backend."""
    _require(logits, target)
    rows, cols = logits.shape
    reduction = options.reduction
    scalar = reduction != "none"
    device = logits.device
    if rows == 0:
        return _empty_forward(device, num_items, reduction, stats)
    index = device.index
    dtype = logits.dtype
    kind = _logits_kind(options)
    ragged = is_ragged(cols, logits) if grad is None else is_ragged(cols, logits, grad)
    key = (
        index, dtype, cols, ragged, TARGET_BITS[target.dtype], grad is not None, scalar, weight is not None,
        options.label_smoothing != 0.0, kind, stats,
    )  # fmt: skip
    plan = _forward_plans.get(key)
    if plan is None:
        plan = _forward_plans[key] = _forward_plan(*key)
    return run_forward(plan, logits, target, weight, byte_lengths, num_items, options, grad, stats)


def run_forward(plan, logits, target, weight, byte_lengths, num_items, options, grad, stats):
    """Launch a plan: allocate what it returns, and hand over addresses and numbers."""
    rows, cols = logits.shape
    device = logits.device
    reduction = options.reduction
    scalar = reduction != "none"
    schedule = plan.schedule
    groups = schedule.threads // schedule.row_threads
    grid = min(plan.most_blocks, -(-rows // groups) * schedule.cluster)
    float32 = torch.float32
    denominator = z_part = prediction = correct = None
    denominator_kind = DENOMINATOR_ONE
    items = 1.0
    items_address = workspace_address = 0
    count_grid = 1
    if scalar:
        blocks = grid // schedule.cluster
        buffer = torch.empty(rows + WORKSPACE_PARTIALS + 2 * blocks, dtype=float32, device=device)
        workspace_address = buffer.data_ptr() + 4 * rows
        lse = buffer[:rows]
        loss = torch.empty((), dtype=float32, device=device)
        if reduction == "mean":
            if num_items is None:
                denominator_kind = DENOMINATOR_ROWS if weight is None else DENOMINATOR_WEIGHTS
            elif isinstance(num_items, torch.Tensor):
                denominator_kind = DENOMINATOR_POINTER
                items_address = num_items.data_ptr()
            else:
                denominator_kind = DENOMINATOR_VALUE
                items = float(num_items)
        elif reduction == "byte_mean":
            denominator_kind = DENOMINATOR_BYTES
        if denominator_kind != DENOMINATOR_ONE:
            denominator = torch.empty(1, dtype=float32, device=device)
            count_grid = min(COUNT_BLOCKS, -(-rows // (COUNT_THREADS * COUNT_UNROLL)))
    else:
        lse = torch.empty(rows, dtype=float32, device=device)
        loss = torch.empty(rows, dtype=float32, device=device)
    if stats:
        z_part = torch.empty_like(loss)
        prediction = torch.empty(rows, dtype=torch.int64, device=device)
        correct = torch.empty(rows, dtype=torch.bool, device=device)
    stream = stream_of(device.index)
    plan.launch(
        logits.data_ptr(),
        logits.stride(0),
        0 if grad is None else grad.data_ptr(),
        0 if grad is None else grad.stride(0),
        target.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        0 if byte_lengths is None else byte_lengths.data_ptr(),
        items_address,
        loss.data_ptr(),
        lse.data_ptr(),
        0 if denominator is None else denominator.data_ptr(),
        0 if z_part is None else z_part.data_ptr(),
        0 if prediction is None else prediction.data_ptr(),
        0 if correct is None else correct.data_ptr(),
        workspace_address,
        rows,
        cols,
        plan.chunks,
        grid,
        plan.shared_bytes,
        count_grid,
        denominator_kind,
        64 if byte_lengths is not None and byte_lengths.dtype == torch.int64 else 32,
        items,
        options.ignore_index,
        float(options.label_smoothing),
        float(options.z_loss),
        float(options.logit_scale),
        1.0 if options.softcap is None else float(options.softcap),
        stream,
    )
    if grad is not None and not plan.gradient:
        # Rows that fit nowhere: the gradient is recomputed from the logits.
        _run_backward(None, 0, logits, target, weight, lse, denominator, options, grad, False)
    return ForwardResult(loss, lse, denominator, z_part, prediction, correct)


def _empty_forward(device, num_items, reduction, stats):
    """The result for no rows: what a sum over nothing gives, divided as the reduction says."""
    float32 = torch.float32
    lse = torch.empty(0, dtype=float32, device=device)
    denominator = None
    if reduction == "none":
        loss = torch.empty(0, dtype=float32, device=device)
    elif reduction == "sum":
        loss = torch.zeros((), dtype=float32, device=device)
    else:
        denominator = torch.zeros(1, dtype=float32, device=device)
        if isinstance(num_items, torch.Tensor):
            denominator.copy_(num_items.reshape(1))
        elif num_items is not None:
            denominator.fill_(float(num_items))
        loss = (torch.zeros(1, dtype=float32, device=device) / denominator).reshape(())
    if not stats:
        return ForwardResult(loss, lse, denominator)
    prediction = torch.empty(0, dtype=torch.int64, device=device)
    return ForwardResult(
        loss, lse, denominator, loss.clone(), prediction, torch.empty(0, dtype=torch.bool, device=device)
    )


def backward(grad_loss, logits, target, weight, lse, denominator, options, *, grad, skip_if_one):
    """``cross_entropy_backward`` of the contract in loss_core.backend."""
    _require(logits, target)
    if logits.shape[0] == 0:
        return
    stride = grad_loss.stride(0) if options.reduction == "none" else 0
    _run_backward(grad_loss, stride, logits, target, weight, lse, denominator, options, grad, skip_if_one)


def _run_backward(grad_loss, upstream_stride, logits, target, weight, lse, denominator, options, grad, skip_if_one):
    rows, cols = logits.shape
    device = logits.device
    kind = _logits_kind(options)
    ragged = is_ragged(cols, logits, grad)
    smoothing = options.label_smoothing != 0.0
    key = (device.index, logits.dtype, cols, ragged, TARGET_BITS[target.dtype], weight is not None, smoothing, kind)
    plan = _backward_plans.get(key)
    if plan is None:
        plan = _backward_plans[key] = _backward_plan(*key)
    launch, schedule, tiles = plan
    workspace = None
    if smoothing and weight is not None:
        workspace = torch.empty(1, dtype=torch.float32, device=device)
    groups = schedule.threads // schedule.row_threads
    launch(
        0 if grad_loss is None else grad_loss.data_ptr(),
        upstream_stride,
        logits.data_ptr(),
        logits.stride(0),
        grad.data_ptr(),
        grad.stride(0),
        target.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        lse.data_ptr(),
        0 if denominator is None else denominator.data_ptr(),
        0 if workspace is None else workspace.data_ptr(),
        rows,
        cols,
        tiles,
        -(-rows * tiles // groups),
        int(skip_if_one),
        options.ignore_index,
        float(options.label_smoothing),
        float(options.z_loss),
        float(options.logit_scale),
        1.0 if options.softcap is None else float(options.softcap),
        stream_of(device.index),
    )


def _backward_plan(index, dtype, cols, ragged, target_bits, weighted, smoothing, logits):
    machine = machine_of(index)
    vectors = most_vectors(cols, dtype.itemsize, ragged)
    schedule = _schedule.direct(machine, vectors)
    facts = {
        "target_bits": target_bits,
        "weighted": weighted,
        "smoothing": smoothing,
        "logits": logits,
    }
    launch = compiled(
        CrossEntropyBackward,
        (str(dtype), tuple(schedule), ragged, *facts.items()),
        lambda: CrossEntropyBackward(DTYPES[dtype], schedule, ragged, **facts),
        backward_arguments,
        machine.architecture,
    )
    return launch, schedule, schedule.chunks(vectors)


def rescale(grad_loss, grad):
    """``cross_entropy_rescale`` of the contract in loss_core.backend."""
    require(grad)
    rows, cols = grad.shape
    if rows == 0 or cols == 0:
        return
    ragged = is_ragged(cols, grad)
    index = grad.device.index
    dtype = grad.dtype
    machine = machine_of(index)
    vectors = most_vectors(cols, dtype.itemsize, ragged)
    schedule = _schedule.direct(machine, vectors)
    launch = compiled(
        CrossEntropyRescale,
        (str(dtype), tuple(schedule), ragged),
        lambda: CrossEntropyRescale(DTYPES[dtype], schedule, ragged),
        rescale_arguments,
        machine.architecture,
    )
    tiles = schedule.chunks(vectors)
    groups = schedule.threads // schedule.row_threads
    launch(
        grad_loss.data_ptr(), grad.data_ptr(), grad.stride(0), rows, cols, tiles, -(-rows * tiles // groups),
        stream_of(index),
    )  # fmt: skip
