"""Cross-entropy's forward: the loss, and with it the finished gradient."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from ._cross_entropy_rows import COUNT_BYTES, COUNT_THREADS, ENTRY_WORDS, CrossEntropyRows
from ._device import (
    LOWEST,
    add,
    barrier,
    cluster_barrier,
    commit,
    divide,
    launch_dependents,
    load_element,
    load_float,
    load_float_below,
    load_integer,
    load_shared,
    maximum,
    pack,
    ptx,
    select_below,
    store_byte,
    store_element,
    store_float,
    store_global,
    store_int64,
    tree,
    unpack,
    wait,
    wait_for_previous_launch,
    warp_reduce,
)
from ._schedule import VECTOR_BYTES, Schedule

# Where the denominator of a scalar reduction comes from.
DENOMINATOR_ONE, DENOMINATOR_ROWS, DENOMINATOR_WEIGHTS, DENOMINATOR_BYTES, DENOMINATOR_VALUE, DENOMINATOR_POINTER = (
    range(6)
)

# Words of the workspace: partial denominators, then the counter of finished blocks, then partial losses.
COUNT_BLOCKS = 32
COUNT_UNROLL = 8
WORKSPACE_COUNTER = COUNT_BLOCKS
WORKSPACE_PARTIALS = 64


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


def forward_arguments():
    """Arguments of CrossEntropyForward to compile for."""
    addresses = [Int64(0), Int64(1), Int64(0), Int64(1)] + [Int64(0)] * 11
    return [*addresses, *[Int32(1)] * 8, Float32(1.0), Int64(-100), *[Float32(1.0)] * 4]
