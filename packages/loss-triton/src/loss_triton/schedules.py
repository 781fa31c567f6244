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
# widest get a processor to themselves, unless they are held as a whole (below).
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


def evicts_first(rows_bits: int, classes: int, size: int, *, held: bool) -> bool:
    """Whether a kernel that reads rows of `size`-byte elements once asks the caches to evict them first.

    Args:
        rows_bits: of the number of rows.
        classes: of a row.
        size: bytes of an element.
        held: whether rows are held as a whole.
    """
    # An L2 full of what others have written writes it back while rows are read; with the hint it gives up lines of the
    # rows before those. Loss alone on an H200, after a flush that writes, with and without. Held: 4096 x 8192 65.6 and
    # 57.5%, 4096 x 16384 79.6 and 70.6%, 8192 x 20011 92.2 and 89.1%, 8192 x 24576 92.2 and 93.2%, 16384 x 16384 96.3
    # and 97.4%, 32768 x 8192 93.2 and 95.7%: it pays where L2 is much of all that is read. In the loop: 65536 x 4096
    # 88.7 and 87.1%, 131072 x 2048 90.1 and 89.4%, 8192 x 32000 91.4 and 93.7%, 4096 x 128256 92.4 and 98.4%.
    if held:
        return (classes * size << max(rows_bits - 1, 0)) < 350e6
    return classes * size <= 32768


@lru_cache
def gradient_schedule(classes: int, size: int, vector: int, l2_bytes: int) -> Schedule:
    """For a kernel that reads a row of `size`-byte elements and writes its gradient."""
    return _look_up((_GRADIENT_SMALLER_L2 if l2_bytes < _SMALLER_L2 else _GRADIENT)[size], classes, vector)


class Parts(NamedTuple):
    """How programs hold a row; see ``parts``.

    Attributes:
        lanes: threads of a program.
        chunks: vectors of a lane; None in a table: as many as a row needs, so that one program has it alone.
        registers: the most that a thread may have; None for as many as the compiler takes.
    """

    lanes: int
    chunks: int | None
    registers: int | None = None

    def of_row(self, classes: int, vector: int) -> int:
        """How many a row has."""
        return 1 if self.chunks is None else -(-classes // (self.lanes * vector * self.chunks))

    @property
    def early(self) -> int:
        """Of a part's chunks one in so many is asked for before it is known whether the row is ignored."""
        # Forward and backward on an H200, all and a quarter: 8192 x 32000 96.8 and 95.2%, 4096 x 128256 89.8 and
        # 87.9%; with half of the rows ignored 72.0 and 84.0%, 74.5 and 84.4%. A program of so many lanes has its
        # multiprocessor to itself, where nothing is under way while it waits: 4096 x 32768 float32 96.0 and 90.5%.
        return 1 if self.lanes >= 512 else 2


# How programs hold rows up to so many classes, None where none does. What counts is how much is under way: 120 to 128
# KiB that a multiprocessor has at a time, with as few registers beside them as the compiler can be made to do with. So
# a program has a row alone while two of them have room. The loops' blocks fit few widths; what is held fits all.
PartsTable = tuple[tuple[int | None, Parts | None], ...]

# Forward and backward, whole calls on an H200 with all of a row asked for at once, in brackets the loop.
GRADIENT_PARTS: dict[int, PartsTable] = {
    2: (
        (2048, None),
        # 32768 x 3000 86.7% (73.0%), 32768 x 3500 87.7% (75.7%).
        (3584, Parts(64, None)),
        # 32768 x 4096 88.7% (91.9%).
        (4096, None),
        # 32768 x 5000 93.2% (85.7%), 32768 x 8192 96.6% (95.0%), 4096 x 8192 71.8% (70.3%), 16384 x 9000 92.6% (78.7%),
        # 16384 x 12288 93.9% (94.8%).
        (12288, Parts(128, None)),
        # 16384 x 13000 95.6% (88.2%), 16384 x 16001 96.0% (92.6%), 16384 x 16384 95.7% (96.9%).
        (16383, Parts(256, None)),
        (16384, None),
        # 8192 x 17000 92.3% (80.1%), 8192 x 20011 93.4% (84.0%), 8192 x 32000 96.6% (92.4%), 8192 x 32001 96.1%
        # (89.1%); where programs shared them before, in brackets: 8192 x 33000 96.6% (87.4%), 8192 x 49000 97.4%
        # (88.8%).
        (49152, Parts(256, None)),
        # And on an H100: 8192 x 50257 87.4 and 98.5% (82.6 and 90.1%), held by one program 80.2%.
        (57344, Parts(64, 12, 96)),
        # 4096 x 65536 91.1 and 97.4% (81.9 and 91.5%), held by one program 86.3%.
        (98304, Parts(128, 16, 128)),
        # 4096 x 128256 89.8 and 99.8% (84.3 and 96.1%), 8192 x 151936 90.9 and 101.1% (86.3 and 91.6%).
        (None, Parts(128, 12, 96)),
    ),
    4: (
        (4096, None),
        # 16384 x 5000 94.1% (92.9%), 16384 x 8192 96.7% (94.7%), 8192 x 10000 93.5% (78.3%), 8192 x 16384 96.9%
        # (95.9%), 4096 x 20011 93.1% (88.3%), 4096 x 24576 92.5% (93.5%).
        (24576, Parts(256, None)),
        # 4096 x 28000 93.4% (89.8%), 4096 x 32768 95.7% (94.0%).
        (32768, Parts(512, None)),
        # And on an H100: 2048 x 128256 94.1 and 99.8% (79.6 and 79.7%).
        (None, Parts(128, 16, 128)),
    ),
}

# Likewise without a gradient.
FORWARD_PARTS: dict[int, PartsTable] = {
    2: (
        (2048, None),
        # 65536 x 2500 86.3% (58.9%), 65536 x 3500 91.8% (78.0%), 32768 x 4096 87.0% (85.1%), 32768 x 5500 90.6%
        # (76.5%; twice the lanes 85.6%).
        (6144, Parts(64, None)),
        # 32768 x 7000 93.9% (85.6%), 32768 x 8192 96.0% (92.5%), 32768 x 8191 97.1% (86.3%), 16384 x 9000 88.3%
        # (79.8%; twice the lanes 81.6%), 16384 x 12288 93.3% (89.6%).
        (12288, Parts(128, None)),
        # 16384 x 14000 93.6% (84.1%), 16384 x 16384 97.4% (94.0%), 8192 x 20011 92.2% (84.8%), 8192 x 32000 94.7%
        # (92.2%), 8192 x 32001 96.1% (91.8%), 8192 x 40000 97.2% (93.7%), 8192 x 49000 98.9% (96.2%).
        (49152, Parts(256, None)),
        (None, None),
    ),
    4: (
        (2048, None),
        # 32768 x 2500 90.2% (52.4%), 32768 x 4096 96.1% (82.4%).
        (4096, Parts(128, None)),
        # 16384 x 5000 90.5% (89.9%), 16384 x 6000 92.2% (94.3%).
        (6144, None),
        # 16384 x 8192 96.2% (93.8%), 8192 x 16384 97.4% (97.1%), 4096 x 20011 88.3% (86.7%), 4096 x 24576 92.0%
        # (90.9%).
        (24576, Parts(256, None)),
        # 4096 x 32768 92.6% (94.7%).
        (None, None),
    ),
}


def parts_of(table: PartsTable, classes: int, size: int, vector: int) -> Parts | None:
    """How rows of `size`-byte elements are held, or None where they are not."""
    # Elements that are read one by one take too many registers for their addresses.
    if vector * size < 16:
        return None
    parts = next(parts for up_to, parts in table if up_to is None or classes <= up_to)
    if parts is None:
        return None
    if parts.chunks is None:
        chunks = -(-classes // (parts.lanes * vector))
        # Beside what is held, the registers that the arithmetic can be made to do with.
        return Parts(parts.lanes, chunks, parts.registers or chunks * vector * size // 4 + 32)
    # A lane looks for the word of each part, and one is for who has left.
    return parts if parts.of_row(classes, vector) < parts.lanes else None


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
