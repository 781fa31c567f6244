"""The sum over the rows of a launch of cross-entropy: what it is divided by, and what is kept of it meanwhile."""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Float32, Int32, Int64, cute

from ._cross_entropy_rows import CrossEntropyRows
from ._device import load_float, load_integer

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

# What the threads of a block tell one another has places in the notes. This one: how many blocks were done before.
NOTE_DONE = 8


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
    rows: Int32
    row_step: Int32
    slices: Int32
    denominator_kind: Int32
    items: Float32
    ignore_index: Int64
    logit_scale: Float32


class CrossEntropyTotal(CrossEntropyRows):
    """What the forms of the forward share of a launch's sum."""

    def counted(self, it):
        return (it.denominator_kind >= DENOMINATOR_ROWS) & (it.denominator_kind <= DENOMINATOR_BYTES_64)

    @cute.jit
    def share_of_row(self, it: Operands, row):
        """What a row that is not ignored adds to a counted denominator: one, or its bytes."""
        value = Int64(1)
        if it.denominator_kind == DENOMINATOR_BYTES_32:
            value = load_integer(32, it.g_bytes + Int64(row) * 4)
        if it.denominator_kind == DENOMINATOR_BYTES_64:
            value = load_integer(64, it.g_bytes + Int64(row) * 8)
        return value

    @cute.jit
    def or_given(self, it: Operands, value: Float32):
        """A denominator, or the one that the caller gave."""
        if it.denominator_kind == DENOMINATOR_VALUE:
            value = it.items
        if it.denominator_kind == DENOMINATOR_POINTER:
            value = load_float(it.g_items)
        return value
