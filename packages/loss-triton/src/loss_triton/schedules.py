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
    # 57.5%, 4096 x 16384 79.6 and 70.6%, 8192 x 20011 91.2 and 88.0%, 8192 x 24576 91.2 and 91.7%, 16384 x 16384 94.0
    # and 95.5%, 32768 x 8192 92.8 and 95.6%: it pays where L2 is much of all that is read, and longer where rows are
    # few and long: 8192 x 28000 93.6 and 90.3%, 8192 x 32000 95.9 and 94.3%, 8192 x 36000 95.9 and 95.8%, 8192 x 40000
    # 95.2 and 96.7%. In the loop: 65536 x 4096 88.7 and 87.1%, 131072 x 2048 90.1 and 89.4%, 8192 x 32000 91.4 and
    # 93.7%, 4096 x 128256 92.4 and 98.4%.
    if held:
        return (classes * size << max(rows_bits - 1, 0)) < (600e6 if classes * size > 50000 else 350e6)
    return classes * size <= 32768


@lru_cache
def gradient_schedule(classes: int, size: int, vector: int, l2_bytes: int) -> Schedule:
    """For a kernel that reads a row of `size`-byte elements and writes its gradient."""
    return _look_up((_GRADIENT_SMALLER_L2 if l2_bytes < _SMALLER_L2 else _GRADIENT)[size], classes, vector)


class Holding(NamedTuple):
    """How programs hold rows of some widths: an entry of a table.

    Attributes:
        lanes: threads of a program.
        chunks: vectors of a lane at most; None for as many as a row needs, so that one program has it alone. Programs
            that share a row have as many each as divide it best.
        registers: the most that a thread may have; None for those of what is held and 32 more where one program has a
            row alone, and else for as many as the compiler takes.
    """

    lanes: int
    chunks: int | None = None
    registers: int | None = None


class Parts(NamedTuple):
    """How programs hold a row; see ``parts``.

    Attributes:
        programs: that share it, a part each.
        lanes: threads of a program.
        chunks: vectors of a lane.
        registers: the most that a thread may have; None for as many as the compiler takes.
    """

    programs: int
    lanes: int
    chunks: int
    registers: int | None = None

    @property
    def early(self) -> int:
        """Of a part's chunks one in so many is asked for before it is known whether the row is ignored."""
        # Forward and backward on an H200, all and a quarter: 8192 x 32000 96.5 and 96.3%, 4096 x 128256 89.0 and
        # 91.8%; with half of the rows ignored 71.7 and 85.3%, 74.5 and 85.3%. A program of so many lanes has its
        # multiprocessor to itself, where nothing is under way while it waits: 4096 x 32768 float32 95.8 and 94.5%.
        return 1 if self.lanes >= 512 else 4


# How programs hold rows up to so many classes, None where none does. What counts is how much is under way: 120 to 200
# KiB that a multiprocessor has at a time, with as few registers beside them as the compiler can be made to do with:
# those do not grow with what is held, so fewer threads that hold more each have more under way. A program has a row
# alone while two of them have room. The loops' blocks fit few widths; what is held fits all.
PartsTable = tuple[tuple[int | None, Holding | None], ...]

# Forward and backward, whole calls on an H200, in brackets the loop. Up to 49152 classes (24576 in float32) all of a
# row was asked for at once, where a quarter has a point less.
GRADIENT_PARTS: dict[int, PartsTable] = {
    2: (
        (2048, None),
        # 32768 x 3000 86.7% (73.0%), 32768 x 3500 87.7% (75.7%).
        (3584, Holding(64)),
        # 32768 x 4096 88.7% (91.9%).
        (4096, None),
        # 32768 x 5000 93.2% (85.7%), 32768 x 8192 96.6% (95.0%), 4096 x 8192 71.8% (70.3%), 16384 x 9000 92.6% (78.7%),
        # 16384 x 12288 93.9% (94.8%).
        (12288, Holding(128)),
        # 16384 x 13000 95.6% (88.2%), 16384 x 16001 96.0% (92.6%), 16384 x 16384 95.7% (96.9%).
        (16383, Holding(256)),
        (16384, None),
        # 8192 x 17000 92.3% (80.1%), 8192 x 20011 93.4% (84.0%), 8192 x 32000 96.6% (92.4%), 8192 x 32001 96.1%
        # (89.1%); where programs shared them before, in brackets: 8192 x 33000 96.6% (87.4%), 8192 x 49000 97.4%
        # (88.8%).
        (49152, Holding(256)),
        # With fewer registers than else, for two programs to have room. In brackets shared: 8192 x 50257 96.5% (92.1%),
        # 8192 x 51200 97.7% (92.0%).
        (51200, Holding(256, registers=128)),
        # 8192 x 57344 94.9%, as wider rows 93.5%.
        (61440, Holding(128, 20, 120)),
        # 4096 x 65536 91.7%, 4096 x 98304 92.8% (24 chunks, eight programs a row, 90.1%), 4096 x 128256 94.2%, 4096 x
        # 129280 94.7%, 8192 x 151936 96.6%, 2048 x 256000 91.6%, 1024 x 262144 87.8%. In parts of 24 of which the last
        # are not full 128256 has 91.9%, 151936 93.7%; (128, 12, 96), 99.8 and 101.1% on an H100, 87.7 and 89.0%.
        (None, Holding(64, 23, 128)),
    ),
    4: (
        (4096, None),
        # 16384 x 5000 94.1% (92.9%), 16384 x 8192 96.7% (94.7%), 8192 x 10000 93.5% (78.3%), 8192 x 16384 96.9%
        # (95.9%), 4096 x 20011 93.1% (88.3%), 4096 x 24576 92.5% (93.5%).
        (24576, Holding(256)),
        # 4096 x 28000 93.4% (89.8%), 4096 x 32768 95.7% (94.0%).
        (32768, Holding(512)),
        # In brackets 16 chunks and 128 registers: 2048 x 50257 93.7% (89.2%), with 24 chunks 87.5%.
        (57344, Holding(128, 20, 120)),
        # 2048 x 65536 96.1% (89.9%), 2048 x 128256 99.2% (92.1%; H100 99.8%).
        (None, Holding(128, 24, 128)),
    ),
}

# Likewise without a gradient.
FORWARD_PARTS: dict[int, PartsTable] = {
    2: (
        (2048, None),
        # 65536 x 2500 86.3% (58.9%), 65536 x 3500 91.8% (78.0%), 32768 x 4096 87.0% (85.1%), 32768 x 5500 90.6%
        # (76.5%; twice the lanes 85.6%).
        (6144, Holding(64)),
        # 32768 x 7000 93.9% (85.6%), 32768 x 8192 96.0% (92.5%), 32768 x 8191 97.1% (86.3%), 16384 x 9000 88.3%
        # (79.8%; twice the lanes 81.6%), 16384 x 12288 93.3% (89.6%).
        (12288, Holding(128)),
        # 16384 x 14000 93.6% (84.1%), 16384 x 16384 97.4% (94.0%), 8192 x 20011 92.2% (84.8%), 8192 x 32000 94.7%
        # (92.2%), 8192 x 32001 96.1% (91.8%), 8192 x 40000 97.2% (93.7%), 8192 x 49000 98.9% (96.2%).
        (49152, Holding(256)),
        # With fewer registers than else, for two programs to have room: 8192 x 50257 98.4% (94.2%), 8192 x 51200 99.2%
        # (94.9%), and with 132 registers 78.0%.
        (51200, Holding(256, registers=128)),
        # 8192 x 57344 81.1% (98.6%).
        (None, None),
    ),
    4: (
        (2048, None),
        # 32768 x 2500 90.2% (52.4%), 32768 x 4096 96.1% (82.4%).
        (4096, Holding(128)),
        # 16384 x 5000 90.5% (89.9%), 16384 x 6000 92.2% (94.3%).
        (6144, None),
        # 16384 x 8192 96.2% (93.8%), 8192 x 16384 97.4% (97.1%), 4096 x 20011 88.3% (86.7%), 4096 x 24576 92.0%
        # (90.9%).
        (24576, Holding(256)),
        # 4096 x 32768 92.6% (94.7%).
        (None, None),
    ),
}


def parts_of(table: PartsTable, classes: int, held: int, vector: int) -> Parts | None:
    """How a row is held, or None where it is not.

    Args:
        table: of the kernel.
        classes: of a row.
        held: bytes of a column that are held, in all tensors.
        vector: elements of a vector.
    """
    # Elements that are read one by one take too many registers for their addresses.
    if vector == 1:
        return None
    holding = next(holding for up_to, holding in table if up_to is None or classes <= up_to)
    if holding is None:
        return None
    lanes, chunks, registers = holding
    if chunks is None:
        chunks = -(-classes // (lanes * vector))
        # Beside what is held, the registers that the arithmetic can be made to do with.
        return Parts(1, lanes, chunks, registers or chunks * vector * held // 4 + 32)
    vectors = -(-classes // (lanes * vector))
    count = -(-vectors // chunks)
    # A lane looks for the word of each part, and one is for who has left.
    return Parts(count, lanes, -(-vectors // count), registers) if count < lanes else None


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
