"""Rows that a block, or a warp, has in registers: all of a row is asked for at once, and stays there until its end."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int64, Uint32, cute

from ._device import (
    LOWEST,
    argument_of,
    divide,
    exp2,
    fma,
    load_element,
    load_global,
    load_global_or,
    maximum,
    store_global,
)
from ._meeting_rows import MeetingRows
from ._schedule import VECTOR_BYTES, Eviction, Schedule


class RowsInRegisters(MeetingRows):
    """A thread has as many vectors of a row as the schedule's ``unroll`` says, and an element of its ends.

    ``full``: how many of a thread's vectors are all of any row's, as ``_schedule.in_registers`` says. Only of the first
    of a row that begins inside a vector this does not hold.
    """

    def __init__(
        self, dtype, schedule: Schedule, ragged: bool, entry_words: int, *, full: int, eviction: Eviction | None
    ):
        super().__init__(dtype, schedule, ragged, entry_words)
        self.full = full
        self.eviction = eviction

    def is_there(self, row, rows):
        """Whether there is a row of that number: the last block may have more groups of threads than rows."""
        return row < rows if self.groups > 1 else True

    def surely_whole(self, u):
        """Whether a thread's vector number ``u`` belongs to the row entirely, whatever row it is."""
        return u < self.full and not (self.ragged and u == 0)

    @cute.jit
    def ask_for_words(self, g_vectors, first, phase, vectors, cols, outside: Uint32):
        """This thread's words of a row, ``outside`` where a vector is not (all of) the row's."""
        return self.ask_between(0, self.unroll, g_vectors, first, phase, vectors, cols, outside)

    @cute.jit
    def ask_between(
        self, begin: cutlass.Constexpr, end: cutlass.Constexpr, g_vectors, first, phase, vectors, cols, outside: Uint32
    ):
        """Those of this thread's vectors from number ``begin`` up to ``end``."""
        policy = self.policy()
        g_first = g_vectors + Int64(first) * VECTOR_BYTES
        words = []
        for u in cutlass.range_constexpr(begin, end):
            g_vector = g_first + u * self.step * VECTOR_BYTES
            if cutlass.const_expr(self.surely_whole(u)):
                words = words + load_global(g_vector, None, policy)
            else:
                whole = self.whole(self.vector(first, u), phase, vectors, cols)
                words = words + load_global_or(g_vector, whole, outside, policy)
        return words

    @cute.jit
    def ask_for_end(self, g_vectors, first, phase, vectors, cols, outside: Float32):
        """This lane's element at the row's ends, or ``outside``."""
        end = outside
        if cutlass.const_expr(self.ragged):
            wanted, at, _ = self.end_of_row(first, phase, vectors, cols)
            if wanted:
                end = load_element(self.dtype, g_vectors + Int64(at) * self.element_bytes)
        return end

    @cute.jit
    def sum_registers(self, words, end, power):
        """Maximum and sum of 2**((t - maximum) * power) of the elements that this thread has."""
        highest = self.highest_of(words, Float32(LOWEST))
        if cutlass.const_expr(self.ragged):
            highest = maximum(highest, end)
        factor, bias, unit = argument_of(highest, power)
        total = self.total_of(words, factor, bias)
        if cutlass.const_expr(self.ragged):
            total = total + exp2(fma(end, factor, bias))
        return highest, divide(total, unit)

    def store_vector(self, g_out, first, u, phase, vectors, cols, words):
        """Write this thread's vector number ``u``, if it belongs to the row entirely."""
        whole = None if self.surely_whole(u) else self.whole(self.vector(first, u), phase, vectors, cols)
        store_global(g_out + Int64(first) * VECTOR_BYTES + u * self.step * VECTOR_BYTES, words, whole)
