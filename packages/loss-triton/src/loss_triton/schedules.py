"""Launch-time choices: how wide a block is, how many warps share it, how many programs run. Data, with its reason."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch


class Schedule(NamedTuple):
    """How a kernel that sums over a row is launched.

    Attributes:
        lanes: threads of a program.
        block: elements of a row that a program takes at a time.
        hold: elements at the row's end that it takes first and keeps; not less than a block, for the blocks before it
            are read without a mask.
        ahead: whether a block that is read again is asked for while the one before is written.
    """

    lanes: int
    block: int
    hold: int
    ahead: bool = False


def _schedule(vector: int, warps: int, block: int, hold: int, ahead: bool = False) -> Schedule:
    """From rounds, the vectors that a lane has of a block and of the held part."""
    lanes = 32 * warps
    return Schedule(lanes, lanes * vector * block, lanes * vector * hold, ahead)


# Rows up to `classes` wide: (classes, warps, rounds of a block, rounds held[, ahead]), for 2-byte and for 4-byte
# elements. Read off sweeps on an H200 and an H100 (triton 3.6; docs/tuning.md): narrow rows are held whole; wide ones
# want every lane to have several vectors in flight, and all rows in flight together to stay within the L2 cache, so the
# widest get a processor to themselves, unless programs share them (below).
_Table = dict[int, tuple[tuple[Any, ...], ...]]
_FORWARD: _Table = {
    2: (
        (512, 1, 1, 2), (1024, 1, 2, 4), (2048, 1, 2, 8), (4096, 2, 2, 8), (8192, 4, 2, 2), (12288, 4, 4, 4),
        (16384, 8, 4, 4), (None, 4, 4, 4),
    ),
    4: ((256, 1, 1, 2), (512, 1, 2, 4), (1024, 1, 2, 8), (2048, 2, 2, 8), (None, 8, 4, 8)),
}  # fmt: skip
_GRADIENT: _Table = {
    2: (
        (256, 1, 1, 1), (512, 1, 1, 2), (1024, 1, 1, 4), (2048, 2, 2, 2), (4096, 4, 2, 2), (8192, 4, 2, 2),
        (12288, 8, 2, 2), (32768, 8, 4, 4), (65536, 16, 2, 2), (None, 32, 4, 4, True),
    ),
    4: (
        (128, 1, 1, 1), (256, 1, 1, 2), (512, 1, 1, 4), (1024, 2, 2, 2), (2048, 2, 4, 4), (4096, 4, 2, 2),
        (8192, 8, 1, 2), (32768, 16, 4, 4, True), (65536, 32, 4, 4), (None, 32, 8, 8),
    ),
}  # fmt: skip
# For an L2 cache smaller than an H200's, as an H100's is (50 MiB): the registers of a block ahead leave room for fewer
# rows at a time, and more of what is read again is still there. 8192 x 32000 has 96.3% with it and 93.8% without, and
# on the H200 91.0 and 92.4%; 8192 x 50257 90.3 and 86.8%, 77.5 and 82.5%.
_SMALLER_L2 = 60 * 2**20
_GRADIENT_SMALLER_L2: _Table = {
    2: (
        *_GRADIENT[2][:5], (8192, 4, 4, 4), (12288, 8, 2, 2), (32768, 8, 4, 4, True), (65536, 16, 2, 2, True),
        (None, 32, 4, 4, True),
    ),
    4: _GRADIENT[4],
}  # fmt: skip


def _look_up(table: tuple[tuple[Any, ...], ...], classes: int, vector: int) -> Schedule:
    for up_to, *schedule in table:
        if up_to is None or classes <= up_to:
            return _schedule(vector, *schedule)
    raise AssertionError("the last row of a table has no bound")


@lru_cache
def forward_schedule(classes: int, size: int, vector: int) -> Schedule:
    """For a kernel that reads a row of `size`-byte elements once."""
    return _look_up(_FORWARD[size], classes, vector)


def evicts_first(classes: int, size: int) -> bool:
    """Whether a kernel that reads a row of `size`-byte elements once asks the caches to evict it first."""
    # An L2 full of what others have written writes it back while rows are read; with the hint it gives up lines of the
    # rows before those. Loss alone on an H200, after a flush that writes, with and without: 92.4 and 91.9% at
    # 32768 x 8192, 77.5 and 69.7% at 4096 x 16384; 91.4 and 93.7% at 8192 x 32000, 92.4 and 98.4% at 4096 x 128256.
    return classes * size <= 32768


@lru_cache
def gradient_schedule(classes: int, size: int, vector: int, l2_bytes: int) -> Schedule:
    """For a kernel that reads a row of `size`-byte elements and writes its gradient."""
    return _look_up((_GRADIENT_SMALLER_L2 if l2_bytes < _SMALLER_L2 else _GRADIENT)[size], classes, vector)


class Parts(NamedTuple):
    """How programs share a row; see ``parts``.

    Attributes:
        lanes: threads of a program.
        chunks: vectors of a lane.
        registers: the most that a thread may have; None for as many as the compiler takes.
    """

    lanes: int
    chunks: int
    registers: int | None = None

    def of_row(self, classes: int, vector: int) -> int:
        """How many a row has."""
        return -(-classes // (self.lanes * vector * self.chunks))


# How programs share rows up to so many classes, None where one takes a row alone. What counts is how much is under way:
# 120 to 128 KiB that a multiprocessor has at a time, with as few registers beside them as the compiler can be made to
# do with.
PartsTable = tuple[tuple[int | None, Parts | None], ...]

GRADIENT_PARTS: dict[int, PartsTable] = {
    # Whole calls, forward and backward, on an H200 and an H100, in brackets one program a row: 8192 x 50257 87.4 and
    # 98.5% (82.6 and 90.1%); 4096 x 65536 91.1 and 97.4% (81.9 and 91.5%); 4096 x 128256 89.8 and 99.8% (84.3 and
    # 96.1%), 8192 x 151936 90.9 and 101.1% (86.3 and 91.6%). 8192 x 32000 90.3% in 64 lanes, 16 chunks (93.2%).
    2: ((32768, None), (57344, Parts(64, 12, 96)), (98304, Parts(128, 16, 128)), (None, Parts(128, 12, 96))),
    # 2048 x 128256 94.1 and 99.8% (79.6 and 79.7%).
    4: ((32768, None), (None, Parts(128, 16, 128))),
}


def parts_of(table: PartsTable, classes: int, size: int, vector: int) -> Parts | None:
    """How rows of `size`-byte elements are shared, or None where a program takes one alone."""
    # Elements that are read one by one take too many registers for their addresses.
    if vector * size < 16:
        return None
    parts = next(parts for up_to, parts in table if up_to is None or classes <= up_to)
    # A lane looks for the word of each part, and one is for who has left.
    return parts if parts is not None and parts.of_row(classes, vector) < parts.lanes else None


@lru_cache
def l2_cache_size(device: torch.device) -> int:
    """Bytes of the device's L2 cache; 0 for the interpreter."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


@lru_cache
def options_schedule(classes: int, vector: int) -> Schedule:
    """For the kernel with options. Two, since each multiplies its many binaries."""
    return _schedule(vector, 4, 1, 2) if classes <= 2048 else _schedule(vector, 16, 2, 2)


@lru_cache
def backward_schedule(classes: int, vector: int) -> tuple[int, int]:
    """Lanes and block of kernels that take no sum over the row."""
    for warps in (1, 2):
        if classes <= 32 * warps * vector * 2:
            return 32 * warps, 32 * warps * vector * 2
    return 128, 128 * vector * 4


@lru_cache
def few_programs(device: torch.device) -> int:
    """Programs of a kernel whose programs take several rows each: few, since most of its calls leave at once."""
    # The interpreter runs the programs of a CPU tensor one after the other.
    return 8 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def alignment(size: int, classes: int, *places: int) -> tuple[int, bool]:
    """Elements of a vector, and whether rows have edges (see ``rows``).

    Args:
        size: bytes of an element.
        classes: of a row.
        places: address and row stride in elements of the logits, then of the gradient if there is one. Both are cut
            at the same columns, or else taken element by element.
    """
    vector = 16 // size
    starts, strides = {place % 16 for place in places[::2]}, {stride % vector for stride in places[1::2]}
    if len(starts) > 1 or len(strides) > 1:
        return 1, False
    return vector, bool(starts != {0} or strides != {0} or classes % vector)
