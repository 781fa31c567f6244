"""Softmax and log-softmax, forward and backward.

With m = max x and total = sum exp(x - m), over each row of V classes::

    softmax      y = exp(x - m) / total             dx = y * (dy - sum_j dy[j] * y[j])
    log-softmax  y = (x - m) - log(total)           dx = dy - exp(y) * sum_j dy[j]

All in float32, each element rounded once. A row is read once where it fits in the registers of a block, which then ends
with it, or in the shared memory of a block or a cluster; where that takes several rows, the next one's copies run under
the stores of this one. Longer rows are read twice, the sum with a running maximum (Milakov and Gimelshein 2018).
A row that has NaN or +inf, or only -inf, gives NaN.

Prefixes: ``g_`` global address (Int64), ``s_`` shared-memory address (Int32). Sizes: R rows, V classes.
"""

from __future__ import annotations

import abc
from typing import NamedTuple

import cutlass
import torch
from cutlass import Float32, Int32, Int64, Uint32, cute
from loss_core.backend import PreparedSoftmax

from . import _schedule
from ._compile import compiled
from ._device import (
    LN2,
    LOG2E,
    LOWEST,
    argument_of,
    cluster_wait,
    commit,
    divide,
    exp2,
    fma,
    load_element,
    log2,
    pack,
    store_global,
    wait,
    warp_barrier,
)
from ._launch import DTYPES, is_ragged, machine_of, require, stream_of
from ._meeting_rows import MeetingRows
from ._registers import RowsInRegisters
from ._schedule import BESIDE_A_RESULT, VECTOR_BYTES, Schedule, most_vectors

ENTRY_WORDS = 2


class Forward(MeetingRows, abc.ABC):
    """y = softmax(x) or log_softmax(x) over rows: the launch, and what a row's maximum and sum make of its elements."""

    log: bool

    @cute.jit
    def __call__(
        self,
        g_input: Int64,  # (R, V)
        input_stride: Int64,
        g_output: Int64,  # (R, V)
        output_stride: Int64,
        rows: Int32,
        cols: Int32,
        chunks: Int32,
        grid: Int32,
        shared_bytes: Int32,
        stream,
    ):
        self.softmax_forward_kernel(g_input, input_stride, g_output, output_stride, rows, cols, chunks).launch(
            grid=[grid, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.cluster, 1, 1] if self.cluster > 1 else None,
            smem=shared_bytes,
            stream=stream,
            min_blocks_per_mp=self.schedule.blocks,
            # Shared memory is where rows are; and stating it spares the compiler the question to a device.
            preferred_smem_carveout=100,
        )

    @abc.abstractmethod
    def softmax_forward_kernel(self, *arguments):
        """As the launch calls it; ``chunks`` is 1 of rows in registers."""

    def outside(self):
        """A word that adds nothing to the sum."""
        return self.lowest()

    def normalization(self, highest, total):
        """What ``results`` needs of a row's maximum and sum."""
        if self.log:
            return Float32(1.0), highest, log2(total) * Float32(LN2)
        if self.dtype is Float32:
            return Float32(LOG2E), highest, divide(Float32(1.0), total)
        factor, bias, unit = argument_of(highest, Float32(LOG2E))
        return factor, bias, divide(Float32(1.0), total * unit)

    def results(self, raw, factor, bias, scale):
        """Output elements from input elements. Of one that has a row alone it is exactly 1, or 0 as a logarithm."""
        if self.log:
            return [(x - bias) - scale for x in raw]
        if self.dtype is Float32:
            return [exp2((x - bias) * factor) * scale for x in raw]
        # Rounding to 16 bits leaves nothing of what the unit's division does to a 1.
        return [exp2(fma(x, factor, bias)) * scale for x in raw]

    @cute.jit
    def write_elements(self, g_vectors, phase, g_out, out_phase, first, cols, factor, bias, scale):
        """Write a row one by one, read once more from the cache: its vectors do not coincide with the result's."""
        for col in cutlass.range(first, cols, self.step, unroll=1):
            x = self.load_column(g_vectors, phase, col)
            self.store_column(g_out, out_phase, col, self.results([x], factor, bias, scale)[0])


class Backward(MeetingRows, abc.ABC):
    """dx from dy and y, of softmax or log_softmax, over rows: the launch, and what a sum makes of a row."""

    log: bool

    @cute.jit
    def __call__(
        self,
        g_upstream: Int64,  # dy (R, V)
        upstream_stride: Int64,
        g_output: Int64,  # y (R, V)
        output_stride: Int64,
        g_grad: Int64,  # dx (R, V)
        grad_stride: Int64,
        rows: Int32,
        cols: Int32,
        chunks: Int32,
        grid: Int32,
        shared_bytes: Int32,
        stream,
    ):
        self.softmax_backward_kernel(
            g_upstream, upstream_stride, g_output, output_stride, g_grad, grad_stride, rows, cols, chunks
        ).launch(
            grid=[grid, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.cluster, 1, 1] if self.cluster > 1 else None,
            smem=shared_bytes,
            stream=stream,
            min_blocks_per_mp=self.schedule.blocks,
            # Shared memory is where rows are; and stating it spares the compiler the question to a device.
            preferred_smem_carveout=100,
        )

    @abc.abstractmethod
    def softmax_backward_kernel(self, *arguments):
        """As the launch calls it; ``chunks`` is 1 of rows in registers."""

    def outside(self):
        """A word that adds nothing to the sum."""
        return Uint32(0)

    def dot_of_words(self, y_words, dy_words):
        """What words add to the sum."""
        return self.sum_vectors(lambda y, dy: [self.term(*pair) for pair in zip(y, dy)], y_words, dy_words)

    def term(self, y, dy):
        """What an element adds to the sum."""
        return dy if self.log else y * dy

    def results(self, y, dy, dot):
        """dx of elements."""
        if self.log:
            return [fma(Float32(0.0) - dot, exp2(a * Float32(LOG2E)), b) for a, b in zip(y, dy)]
        return [a * (b - dot) for a, b in zip(y, dy)]

    @cute.jit
    def dot_of_elements(self, g_y, phase, g_dy, dy_phase, first, cols):
        """This thread's part of the sum, of rows whose vectors do not coincide."""
        dot = Float32(0.0)
        for col in cutlass.range(first, cols, self.step, unroll=1):
            dot = dot + self.term(self.load_column(g_y, phase, col), self.load_column(g_dy, dy_phase, col))
        return dot

    @cute.jit
    def write_elements(self, g_y, phase, g_dy, dy_phase, g_out, out_phase, first, cols, dot):
        """Write such a row, read once more from the cache."""
        for col in cutlass.range(first, cols, self.step, unroll=1):
            y, dy = self.load_column(g_y, phase, col), self.load_column(g_dy, dy_phase, col)
            self.store_column(g_out, out_phase, col, self.results([y], [dy], dot)[0])


class SoftmaxRows(MeetingRows):
    """What both directions share. ``held``: rows are kept in shared memory."""

    def __init__(self, dtype, schedule: Schedule, ragged: bool, *, log: bool, held: bool):
        super().__init__(dtype, schedule, ragged, ENTRY_WORDS)
        self.log = log
        self.held = held
        self.eviction = BESIDE_A_RESULT if held else None

    @cute.jit
    def coming(self, g_tensor, stride, row, rows, cols, g_end):
        """As ``span`` and ``inside``, of a row that may be behind the last: then it has no vectors."""
        g_vectors, phase, vectors = self.span(g_tensor, stride, row, cols)
        low, high = self.inside(g_vectors, vectors, g_tensor, g_end)
        if row >= rows:
            vectors = Int32(0)
            low = Int32(0)
            high = Int32(0)
        return g_vectors, phase, vectors, low, high

    def chunk_words(self, s_row, g_vectors, first, chunk, phase, vectors, cols):
        """The words of one chunk of a row, ``outside`` where a vector is not (all of) the row's."""
        if self.held:
            return self.staged_words(s_row, chunk)
        return self.load_words(g_vectors, first, chunk, phase, vectors, cols, self.outside())

    def load_end(self, s_row, offset, g_vectors, at):
        if self.held:
            return load_element(self.dtype, s_row + offset, "shared")
        return load_element(self.dtype, g_vectors + Int64(at) * self.element_bytes)

    def leave_ends(self):
        """Before the next row's copies: they go to what other lanes than those that start them have read."""
        if self.held:
            warp_barrier()


class SoftmaxForward(Forward, SoftmaxRows):
    """Rows in shared memory, or read twice."""

    @cute.kernel
    def softmax_forward_kernel(
        self,
        g_input: Int64,
        input_stride: Int64,
        g_output: Int64,
        output_stride: Int64,
        rows: Int32,
        cols: Int32,
        chunks: Int32,
    ):
        """One group of threads (a warp, a block or a cluster) takes rows in turn."""
        thread, group, rank, first_row, row_step = self.place()
        first = rank * self.row_threads + thread
        s_scratch = Int32(cute.arch.get_dyn_smem(Uint32, 128).toint())
        stage_bytes = chunks * (self.unroll * self.row_threads * VECTOR_BYTES)
        s_slots = s_scratch + self.scratch_bytes + group * (self.stages * stage_bytes) + thread * VECTOR_BYTES
        g_end = g_input + (Int64(rows - 1) * input_stride + Int64(cols)) * self.element_bytes
        self.start_meeting(s_scratch, thread)
        if cutlass.const_expr(self.held):
            self.fill_tails(s_slots, chunks, cols, first, self.outside())
            for s in cutlass.range_constexpr(self.stages):
                early_row = first_row + s * row_step
                if early_row < rows:
                    g_early, early_phase, early_vectors = self.span(g_input, input_stride, early_row, cols)
                    early_low, early_high = self.inside(g_early, early_vectors, g_input, g_end)
                    s_early = s_slots + s * stage_bytes
                    self.start_row(s_early, g_early, first, chunks, early_low, early_high)
                    self.copy_ends(s_early, g_early, first, early_phase, early_vectors, early_low, early_high, cols)
                commit()
        if cutlass.const_expr(self.cluster > 1):
            # A block must not send to one that has not started.
            cluster_wait()
        policy = self.policy()
        stage = Int32(0)
        turn = Int32(0)
        for row in cutlass.range(first_row, rows, row_step, unroll=1):
            g_vectors, phase, vectors = self.span(g_input, input_stride, row, cols)
            g_out, out_phase, out_vectors = self.span(g_output, output_stride, row, cols)
            s_row = s_slots + stage * stage_bytes
            highest = Float32(LOWEST)
            total = Float32(0.0)
            if cutlass.const_expr(self.held):
                wait(self.stages - 1)
                self.mask_ends([s_row], first, phase, vectors, chunks * self.unroll, cols, Float32(float("-inf")))
                highest, total = self.sum_staged(s_row, chunks, Float32(LOG2E))
            else:
                for chunk in cutlass.range(chunks, unroll=1):
                    words = self.chunk_words(s_row, g_vectors, first, chunk, phase, vectors, cols)
                    highest, total = self.absorb_words(words, Float32(LOG2E), highest, total)
                if cutlass.const_expr(self.ragged):
                    highest, total = self.absorb_ends(g_vectors, first, phase, vectors, cols, highest, total)
            highest, total, sums, best = self.reduce_row(s_scratch, turn, thread, rank, Float32(LOG2E), highest, total)
            turn = (turn + 1) & 3
            factor, bias, scale = self.normalization(highest, total)

            next_row = row + self.stages * row_step
            g_next, next_phase, next_vectors, next_low, next_high = self.coming(
                g_input, input_stride, next_row, rows, cols, g_end
            )
            aligned = True
            if cutlass.const_expr(self.ragged):
                aligned = out_phase == phase
            if aligned:
                if cutlass.const_expr(self.ragged):
                    self.write_ends(s_row, g_vectors, g_out, first, phase, vectors, cols, factor, bias, scale)
                for chunk in cutlass.range(chunks, unroll=1):
                    words = self.chunk_words(s_row, g_vectors, first, chunk, phase, vectors, cols)
                    for u in cutlass.range_constexpr(self.unroll):
                        index = chunk * self.unroll + u
                        vector = self.vector(first, index)
                        values = self.results(self.vector_values(words, u), factor, bias, scale)
                        whole = self.whole(vector, phase, vectors, cols)
                        store_global(g_out + Int64(vector) * VECTOR_BYTES, pack(self.dtype, values), whole)
                        if cutlass.const_expr(self.held):
                            self.start(s_row, g_next, first, index, next_low, next_high, policy)
            else:
                if cutlass.const_expr(self.held):
                    self.start_row(s_row, g_next, first, chunks, next_low, next_high)
                self.write_elements(g_vectors, phase, g_out, out_phase, first, cols, factor, bias, scale)
            if cutlass.const_expr(self.held):
                self.copy_ends(s_row, g_next, first, next_phase, next_vectors, next_low, next_high, cols)
                commit()
                stage = stage + 1
                if stage == self.stages:
                    stage = Int32(0)

    @cute.jit
    def absorb_ends(self, g_vectors, first, phase, vectors, cols, highest, total):
        """Take this lane's element at the row's ends into the sum."""
        wanted, at, offset = self.end_of_row(first, phase, vectors, cols)
        if wanted:
            x = self.load_end(Int32(0), offset, g_vectors, at)
            highest, total = self.absorb_values([x], Float32(LOG2E), highest, total)
        return highest, total

    @cute.jit
    def write_ends(self, s_row, g_vectors, g_out, first, phase, vectors, cols, factor, bias, scale):
        wanted, at, offset = self.end_of_row(first, phase, vectors, cols)
        if wanted:
            x = self.load_end(s_row, offset, g_vectors, at)
            self.store_end(g_out, at, self.results([x], factor, bias, scale)[0])
        self.leave_ends()


class SoftmaxForwardInRegisters(Forward, RowsInRegisters):
    """A warp or a block has one row, all of it in registers, and ends with it."""

    def __init__(self, dtype, schedule: Schedule, ragged: bool, *, log: bool, full: int):
        super().__init__(dtype, schedule, ragged, ENTRY_WORDS, full=full, eviction=BESIDE_A_RESULT)
        self.log = log

    @cute.kernel
    def softmax_forward_kernel(
        self,
        g_input: Int64,
        input_stride: Int64,
        g_output: Int64,
        output_stride: Int64,
        rows: Int32,
        cols: Int32,
        chunks: Int32,
    ):
        """A group of threads (a warp or a block) has the row of its number."""
        first, _, _, row, _ = self.place()
        s_scratch = Int32(cute.arch.get_dyn_smem(Uint32, 128).toint())
        if self.is_there(row, rows):
            g_vectors, phase, vectors = self.span(g_input, input_stride, row, cols)
            g_out, out_phase, _ = self.span(g_output, output_stride, row, cols)
            self.take_row(s_scratch, first, g_vectors, phase, vectors, g_out, out_phase, cols)

    @cute.jit
    def take_row(self, s_scratch, first, g_vectors, phase, vectors, g_out, out_phase, cols):
        words = self.ask_for_words(g_vectors, first, phase, vectors, cols, self.outside())
        end = self.ask_for_end(g_vectors, first, phase, vectors, cols, Float32(float("-inf")))
        power = Float32(LOG2E)
        highest, total = self.sum_registers(words, end, power)
        highest, total, _, _ = self.reduce_row(s_scratch, Int32(0), first, Int32(0), power, highest, total)
        factor, bias, scale = self.normalization(highest, total)
        aligned = True
        if cutlass.const_expr(self.ragged):
            aligned = out_phase == phase
        if aligned:
            if cutlass.const_expr(self.ragged):
                wanted, at, _ = self.end_of_row(first, phase, vectors, cols)
                if wanted:
                    self.store_end(g_out, at, self.results([end], factor, bias, scale)[0])
            for u in cutlass.range_constexpr(self.unroll):
                values = self.results(self.vector_values(words, u), factor, bias, scale)
                self.store_vector(g_out, first, u, phase, vectors, cols, pack(self.dtype, values))
        else:
            self.write_elements(g_vectors, phase, g_out, out_phase, first, cols, factor, bias, scale)


class SoftmaxBackward(Backward, SoftmaxRows):
    """Rows in shared memory, where a stage holds a row of y and one of dy, or read twice."""

    @cute.kernel
    def softmax_backward_kernel(
        self,
        g_upstream: Int64,
        upstream_stride: Int64,
        g_output: Int64,
        output_stride: Int64,
        g_grad: Int64,
        grad_stride: Int64,
        rows: Int32,
        cols: Int32,
        chunks: Int32,
    ):
        """One group of threads (a warp, a block or a cluster) takes rows in turn."""
        thread, group, rank, first_row, row_step = self.place()
        first = rank * self.row_threads + thread
        s_scratch = Int32(cute.arch.get_dyn_smem(Uint32, 128).toint())
        part_bytes = chunks * (self.unroll * self.row_threads * VECTOR_BYTES)
        s_slots = s_scratch + self.scratch_bytes + group * (2 * self.stages * part_bytes) + thread * VECTOR_BYTES
        last_row = Int64(rows - 1)
        g_y_end = g_output + (last_row * output_stride + Int64(cols)) * self.element_bytes
        g_dy_end = g_upstream + (last_row * upstream_stride + Int64(cols)) * self.element_bytes
        self.start_meeting(s_scratch, thread)
        if cutlass.const_expr(self.held):
            self.fill_tails(s_slots, chunks, cols, first, self.outside(), parts=2)
            for s in cutlass.range_constexpr(self.stages):
                early_row = first_row + s * row_step
                if early_row < rows:
                    s_early = s_slots + s * (2 * part_bytes)
                    g_early, early_phase, early_vectors = self.span(g_output, output_stride, early_row, cols)
                    early_low, early_high = self.inside(g_early, early_vectors, g_output, g_y_end)
                    self.start_row(s_early, g_early, first, chunks, early_low, early_high)
                    self.copy_ends(s_early, g_early, first, early_phase, early_vectors, early_low, early_high, cols)
                    g_early, early_phase, early_vectors = self.span(g_upstream, upstream_stride, early_row, cols)
                    early_low, early_high = self.inside(g_early, early_vectors, g_upstream, g_dy_end)
                    self.start_row(s_early + part_bytes, g_early, first, chunks, early_low, early_high)
                    self.copy_ends(
                        s_early + part_bytes, g_early, first, early_phase, early_vectors, early_low, early_high, cols
                    )
                commit()
        if cutlass.const_expr(self.cluster > 1):
            # A block must not send to one that has not started.
            cluster_wait()
        policy = self.policy()
        stage = Int32(0)
        turn = Int32(0)
        for row in cutlass.range(first_row, rows, row_step, unroll=1):
            g_y, phase, vectors = self.span(g_output, output_stride, row, cols)
            g_dy, dy_phase, dy_vectors = self.span(g_upstream, upstream_stride, row, cols)
            g_out, out_phase, out_vectors = self.span(g_grad, grad_stride, row, cols)
            s_y = s_slots + stage * (2 * part_bytes)
            s_dy = s_y + part_bytes
            aligned = True
            if cutlass.const_expr(self.ragged):
                aligned = (dy_phase == phase) & (out_phase == phase)
            if cutlass.const_expr(self.held):
                wait(self.stages - 1)
            dot = Float32(0.0)
            if aligned:
                if cutlass.const_expr(self.held):
                    slots = chunks * self.unroll
                    self.mask_ends([s_y, s_dy], first, phase, vectors, slots, cols, Float32(0.0))
                for chunk in cutlass.range(chunks, unroll=1):
                    y_words = self.chunk_words(s_y, g_y, first, chunk, phase, vectors, cols)
                    dy_words = self.chunk_words(s_dy, g_dy, first, chunk, phase, vectors, cols)
                    dot = dot + self.dot_of_words(y_words, dy_words)
                if cutlass.const_expr(self.ragged and not self.held):
                    dot = dot + self.dot_of_ends(g_y, g_dy, first, phase, vectors, cols)
            else:
                dot = self.dot_of_elements(g_y, phase, g_dy, dy_phase, first, cols)
            sums = self.reduce_sums(s_scratch, turn, thread, rank, [dot])
            turn = (turn + 1) & 3
            dot = sums[0]

            next_row = row + self.stages * row_step
            g_next_y, next_phase, next_vectors, next_low, next_high = self.coming(
                g_output, output_stride, next_row, rows, cols, g_y_end
            )
            g_next_dy, next_dy_phase, next_dy_vectors, next_dy_low, next_dy_high = self.coming(
                g_upstream, upstream_stride, next_row, rows, cols, g_dy_end
            )
            if aligned:
                if cutlass.const_expr(self.ragged):
                    self.write_ends(s_y, g_y, s_dy, g_dy, g_out, first, phase, vectors, cols, dot)
                for chunk in cutlass.range(chunks, unroll=1):
                    y_words = self.chunk_words(s_y, g_y, first, chunk, phase, vectors, cols)
                    dy_words = self.chunk_words(s_dy, g_dy, first, chunk, phase, vectors, cols)
                    for u in cutlass.range_constexpr(self.unroll):
                        index = chunk * self.unroll + u
                        vector = self.vector(first, index)
                        values = self.results(self.vector_values(y_words, u), self.vector_values(dy_words, u), dot)
                        whole = self.whole(vector, phase, vectors, cols)
                        store_global(g_out + Int64(vector) * VECTOR_BYTES, pack(self.dtype, values), whole)
                        if cutlass.const_expr(self.held):
                            self.start(s_y, g_next_y, first, index, next_low, next_high, policy)
                            self.start(s_dy, g_next_dy, first, index, next_dy_low, next_dy_high, policy)
            else:
                if cutlass.const_expr(self.held):
                    self.start_row(s_y, g_next_y, first, chunks, next_low, next_high)
                    self.start_row(s_dy, g_next_dy, first, chunks, next_dy_low, next_dy_high)
                self.write_elements(g_y, phase, g_dy, dy_phase, g_out, out_phase, first, cols, dot)
            if cutlass.const_expr(self.held):
                self.copy_ends(s_y, g_next_y, first, next_phase, next_vectors, next_low, next_high, cols)
                self.copy_ends(s_dy, g_next_dy, first, next_dy_phase, next_dy_vectors, next_dy_low, next_dy_high, cols)
                commit()
                stage = stage + 1
                if stage == self.stages:
                    stage = Int32(0)

    @cute.jit
    def dot_of_ends(self, g_y, g_dy, first, phase, vectors, cols):
        """What this lane's element at the row's ends adds to the sum."""
        wanted, at, offset = self.end_of_row(first, phase, vectors, cols)
        dot = Float32(0.0)
        if wanted:
            y = self.load_end(Int32(0), offset, g_y, at)
            dy = self.load_end(Int32(0), offset, g_dy, at)
            dot = self.term(y, dy)
        return dot

    @cute.jit
    def write_ends(self, s_y, g_y, s_dy, g_dy, g_out, first, phase, vectors, cols, dot):
        wanted, at, offset = self.end_of_row(first, phase, vectors, cols)
        if wanted:
            y = self.load_end(s_y, offset, g_y, at)
            dy = self.load_end(s_dy, offset, g_dy, at)
            self.store_end(g_out, at, self.results([y], [dy], dot)[0])
        self.leave_ends()


class SoftmaxBackwardInRegisters(Backward, RowsInRegisters):
    """A warp or a block has one row, all of it in registers, and ends with it."""

    def __init__(self, dtype, schedule: Schedule, ragged: bool, *, log: bool, full: int):
        super().__init__(dtype, schedule, ragged, ENTRY_WORDS, full=full, eviction=BESIDE_A_RESULT)
        self.log = log

    @cute.kernel
    def softmax_backward_kernel(
        self,
        g_upstream: Int64,
        upstream_stride: Int64,
        g_output: Int64,
        output_stride: Int64,
        g_grad: Int64,
        grad_stride: Int64,
        rows: Int32,
        cols: Int32,
        chunks: Int32,
    ):
        """A group of threads (a warp or a block) has the row of its number."""
        first, _, _, row, _ = self.place()
        s_scratch = Int32(cute.arch.get_dyn_smem(Uint32, 128).toint())
        if self.is_there(row, rows):
            y = self.span(g_output, output_stride, row, cols)
            dy = self.span(g_upstream, upstream_stride, row, cols)
            g_out, out_phase, _ = self.span(g_grad, grad_stride, row, cols)
            self.take_row(s_scratch, first, *y, *dy, g_out, out_phase, cols)

    @cute.jit
    def take_row(self, s_scratch, first, g_y, phase, vectors, g_dy, dy_phase, dy_vectors, g_out, out_phase, cols):
        y_words = self.ask_for_words(g_y, first, phase, vectors, cols, self.outside())
        dy_words = self.ask_for_words(g_dy, first, dy_phase, dy_vectors, cols, self.outside())
        y_end = self.ask_for_end(g_y, first, phase, vectors, cols, Float32(0.0))
        dy_end = self.ask_for_end(g_dy, first, dy_phase, dy_vectors, cols, Float32(0.0))
        aligned = True
        if cutlass.const_expr(self.ragged):
            aligned = (dy_phase == phase) & (out_phase == phase)
        dot = Float32(0.0)
        if aligned:
            dot = self.dot_of_words(y_words, dy_words)
            if cutlass.const_expr(self.ragged):
                dot = dot + self.term(y_end, dy_end)
        else:
            dot = self.dot_of_elements(g_y, phase, g_dy, dy_phase, first, cols)
        dot = self.reduce_sums(s_scratch, Int32(0), first, Int32(0), [dot])[0]
        if aligned:
            if cutlass.const_expr(self.ragged):
                wanted, at, _ = self.end_of_row(first, phase, vectors, cols)
                if wanted:
                    self.store_end(g_out, at, self.results([y_end], [dy_end], dot)[0])
            for u in cutlass.range_constexpr(self.unroll):
                values = self.results(self.vector_values(y_words, u), self.vector_values(dy_words, u), dot)
                self.store_vector(g_out, first, u, phase, vectors, cols, pack(self.dtype, values))
        else:
            self.write_elements(g_y, phase, g_dy, dy_phase, g_out, out_phase, first, cols, dot)


# Host


class Plan(NamedTuple):
    """A compiled kernel and how it is launched. ``most_blocks``: of a grid, a multiple of the cluster."""

    launch: object
    schedule: Schedule
    chunks: int
    shared_bytes: int
    most_blocks: int


# A width that grows from call to call, as attention over a growing text has, makes a plan each; to make all of them
# anew takes some microseconds each.
MOST_PLANS = 512

_plans: dict[tuple, Plan] = {}


def forward_arguments():
    """Arguments of SoftmaxForward to compile for."""
    return [*[Int64(0)] * 4, *[Int32(1)] * 5]


def backward_arguments():
    """Arguments of SoftmaxBackward to compile for."""
    return [*[Int64(0)] * 6, *[Int32(1)] * 5]


def _plan(index, dtype, cols, ragged, backward, log):
    machine = machine_of(index)
    vectors = most_vectors(cols, VECTOR_BYTES // dtype.itemsize, ragged)
    inputs = 2 if backward else 1
    schedule = _schedule.softmax_in_registers(machine, vectors, inputs, ragged)
    if schedule is not None:
        return make_plan_in_registers(machine, dtype, cols, schedule, ragged, backward, log)
    schedule = _schedule.held(machine, vectors, inputs, ENTRY_WORDS, ragged, _schedule.MEASURED_SOFTMAX)
    held = schedule is not None
    if schedule is None:
        schedule = _schedule.direct(machine, vectors)
    return make_plan(machine, dtype, vectors, schedule, ragged, backward, log, held)


def make_plan_in_registers(machine, dtype, cols, schedule, ragged, backward, log):
    """Blocks do not stay, so that a grid has as many as rows take."""
    kernel_class = SoftmaxBackwardInRegisters if backward else SoftmaxForwardInRegisters
    schedule, full = _schedule.in_registers(schedule, cols * dtype.itemsize)
    launch = compiled(
        kernel_class,
        (str(dtype), tuple(schedule), ragged, log, full),
        lambda: kernel_class(DTYPES[dtype], schedule, ragged, log=log, full=full),
        backward_arguments if backward else forward_arguments,
        machine.architecture,
    )
    return Plan(launch, schedule, 1, schedule.scratch_bytes(ENTRY_WORDS), _schedule.LARGEST)


def make_plan(machine, dtype, vectors, schedule, ragged, backward, log, held):
    kernel_class = SoftmaxBackward if backward else SoftmaxForward
    launch = compiled(
        kernel_class,
        (str(dtype), tuple(schedule), ragged, log, held),
        lambda: kernel_class(DTYPES[dtype], schedule, ragged, log=log, held=held),
        backward_arguments if backward else forward_arguments,
        machine.architecture,
    )
    shared_bytes = _schedule.shared_bytes(schedule, vectors, 1 + backward if held else 0, ENTRY_WORDS)
    most_blocks = _schedule.most_blocks(machine, schedule, shared_bytes)
    return Plan(launch, schedule, schedule.chunks(vectors), shared_bytes, most_blocks)


def _run(backward, log, *tensors):
    """Launch over tensors of one shape, the one that is written last."""
    first = tensors[0]
    rows, cols = first.shape
    if rows == 0 or cols == 0:
        return
    if tensors[-1].dtype != first.dtype:
        _run_in_float32(backward, log, *tensors)
        return
    key = (first.get_device(), first.dtype, cols, is_ragged(cols, *tensors), backward, log)
    plan = _plans.get(key)
    if plan is None or rows > _schedule.LARGEST:
        require(first)
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _plan(*key)
    run_plan(plan, *tensors)


def _run_in_float32(backward, log, *tensors):
    """Launch over tensors whose dtypes differ, which the kernels' vectors do not allow.

    Widening is exact, and the result is rounded to the dtype asked for from the float32 that a kernel would round.
    """
    for tensor in tensors:
        require(tensor)
    *read, written = tensors
    result = torch.empty(written.shape, dtype=torch.float32, device=written.device)
    _run(backward, log, *(tensor.float() for tensor in read), result)
    written.copy_(result)


def run_plan(plan, *tensors):
    """Hand over addresses and numbers."""
    launch, first = plan.launch, tensors[0]
    addresses = []
    for tensor in tensors:
        addresses += (tensor.data_ptr(), tensor.stride(0))
    launch(*addresses, *_numbers(plan, *first.shape), stream_of(first.get_device()))


def _prepare(device, dtype, rows, cols, stride, offset, log):
    """Both directions, in new contiguous memory but for the input; None where the general way refuses."""
    if dtype not in DTYPES or max(rows, cols) > _schedule.LARGEST:
        return None
    index, size = device.index, dtype.itemsize
    cut = cols * size % VECTOR_BYTES != 0
    forth = _plan(index, dtype, cols, cut or (offset | stride * size) % VECTOR_BYTES != 0, False, log)
    back = _plan(index, dtype, cols, cut, True, log)
    launch_forth, forth_numbers = forth.launch, _numbers(forth, rows, cols)
    launch_back, back_numbers = back.launch, _numbers(back, rows, cols)

    def forward(input, output):
        launch_forth(input.data_ptr(), stride, output.data_ptr(), cols, *forth_numbers, stream_of(index))

    def backward(grad_output, output, grad_input):
        launch_back(
            grad_output.data_ptr(), cols, output.data_ptr(), cols, grad_input.data_ptr(), cols,
            *back_numbers, stream_of(index),
        )  # fmt: skip

    return PreparedSoftmax(forward, backward)


def _numbers(plan, rows, cols):
    """What a launch takes after the addresses and strides."""
    grid = plan.schedule.grid(plan.most_blocks, rows)
    return rows, cols, plan.chunks, grid, plan.shared_bytes


def softmax_prepare(device, dtype, rows, cols, stride, offset):
    """``softmax_prepare`` of the contract in loss_core.backend."""
    return _prepare(device, dtype, rows, cols, stride, offset, False)


def log_softmax_prepare(device, dtype, rows, cols, stride, offset):
    """``log_softmax_prepare`` of the contract in loss_core.backend."""
    return _prepare(device, dtype, rows, cols, stride, offset, True)


def softmax_forward(input, output):
    """``softmax_forward`` of the contract in loss_core.backend."""
    _run(False, False, input, output)


def softmax_backward(grad_output, output, grad_input):
    """``softmax_backward`` of the contract in loss_core.backend."""
    _run(True, False, grad_output, output, grad_input)


def log_softmax_forward(input, output):
    """``log_softmax_forward`` of the contract in loss_core.backend."""
    _run(False, True, input, output)


def log_softmax_backward(grad_output, output, grad_input):
    """``log_softmax_backward`` of the contract in loss_core.backend."""
    _run(True, True, grad_output, output, grad_input)
