"""How many threads, blocks and bytes work on a row: one table, and why.

What bounds a row. An H200 multiprocessor gets about 18 bytes a clock of the device's copy bandwidth, so for
forward + gradient in bf16 (2 bytes in, 2 out) it has to finish about 4.6 elements a clock. It can issue 128
instructions (4 warps of 32) and 16 special-function results a clock: 28 instructions and 3.5 exponentials an
element. The kernels need about 11 instructions and 2 exponentials (one for the sum, one for the gradient; keeping
the first would take the registers of a whole row), so arithmetic takes about half the time that memory takes, and
the only question is whether copies run all that time. They do when a row is resident (read from memory once) and
the next row's copies are in flight while this one is worked on: about 16 KB in flight per multiprocessor cover the
latency, and every schedule below has at least twice that.

``float32`` needs half the arithmetic a byte, so the same numbers hold with room to spare.
"""

from __future__ import annotations

from typing import NamedTuple

VECTOR_BYTES = 16


class Schedule(NamedTuple):
    """What a kernel is compiled for, beyond its dtype and options.

    Attributes:
        threads: of a block.
        row_threads: threads of the block on one row: all of them, or 32 (then a block has several rows at a time).
        cluster: blocks that share a row.
        stages: rows (in the streamed form: chunks) in shared memory at a time.
        unroll: vectors that a thread takes per step of its loop over a row.
        blocks: blocks that a multiprocessor is to hold at a time; it bounds the registers of a thread.
    """

    threads: int
    row_threads: int
    cluster: int
    stages: int
    unroll: int
    blocks: int

    def scratch_bytes(self, entry_words: int) -> int:
        """Shared memory for reductions: two halves, an entry per warp of the row; at least a word per warp."""
        entries = max(1, self.row_threads // 32) * self.cluster
        needed = max(2 * entries * 4 * entry_words, 8 * (self.threads // 32) + 16)
        return -(-needed // 128) * 128

    def chunks(self, vectors: int) -> int:
        """Loop steps over a row of at most that many vectors."""
        return -(-vectors // (self.row_threads * self.cluster * self.unroll))

    def slot_bytes(self, chunks: int) -> int:
        """Bytes of one group of threads' part of a row in shared memory."""
        return chunks * self.unroll * self.row_threads * VECTOR_BYTES


class Machine(NamedTuple):
    """What a schedule depends on of a device.

    Attributes:
        architecture: name to compile for, such as "sm_90a".
        processors: number of multiprocessors.
        block_bytes: shared memory that one block may have.
        processor_bytes: shared memory of a multiprocessor.
        clusters: whether blocks can read and write one another's shared memory.
        overlap: whether a launch may start while the one before it still runs.
    """

    architecture: str
    processors: int
    block_bytes: int
    processor_bytes: int
    clusters: bool
    overlap: bool


# Bytes of shared memory that a block may have and that a multiprocessor has, by compute capability.
SHARED_BYTES = {
    (8, 0): (163 * 1024, 164 * 1024),
    (8, 6): (99 * 1024, 100 * 1024),
    (8, 7): (163 * 1024, 164 * 1024),
    (8, 9): (99 * 1024, 100 * 1024),
    (9, 0): (227 * 1024, 228 * 1024),
    (10, 0): (227 * 1024, 228 * 1024),
    (10, 3): (227 * 1024, 228 * 1024),
    (12, 0): (99 * 1024, 100 * 1024),
}


def machine(capability: tuple[int, int], processors: int) -> Machine:
    """The machine of a compute capability, 8.0 or later."""
    block_bytes, processor_bytes = SHARED_BYTES.get(capability, (99 * 1024, 100 * 1024))
    major, minor = capability
    return Machine(
        architecture=f"sm_{major}{minor}{'a' if major >= 9 else ''}",
        processors=processors,
        block_bytes=block_bytes,
        processor_bytes=processor_bytes,
        clusters=major in (9, 10),
        overlap=major >= 9,
    )


# A block reserves this much shared memory for itself.
RESERVED_BYTES = 1024


def resident_blocks(machine: Machine, schedule: Schedule, shared_bytes: int) -> int:
    """Blocks that one multiprocessor holds at a time."""
    return max(1, min(schedule.blocks, machine.processor_bytes // (shared_bytes + RESERVED_BYTES)))


def _round_up_to_power(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def held(
    machine: Machine, vectors: int, inputs: int = 1, entry_words: int = 8, ragged: bool = False
) -> Schedule | None:
    """The schedule for rows of that many vectors held in shared memory, or None where they do not fit.

    Up to 4 KB a warp takes a row, and nothing has to be synchronised. Longer rows take a block with about 8 vectors a
    thread, so that a multiprocessor holds 1024 threads and 128 KB at any width; rows of more than a quarter of a
    multiprocessor's shared memory take all of its threads they can. What does not fit in one block takes a cluster,
    the smallest that leaves room. Ragged rows need registers for their edges, so they take two vectors a step.
    """
    if vectors <= 256:
        per_thread = -(-vectors // 32)
        unroll = min(per_thread, 2 if ragged or per_thread <= 2 else 4)
        return Schedule(128, 32, 1, 2, unroll, 6)
    for cluster in (1, 2, 4, 8, 16):
        if cluster > 1 and not machine.clusters:
            return None
        share = -(-vectors // cluster)
        threads = min(512, max(64, _round_up_to_power(-(-share // 8))))
        unroll = 4 if share >= 4 * threads and not ragged else 2
        for stages in (2, 1):
            schedule = Schedule(threads, threads, cluster, stages, unroll, 1024 // threads)
            chunks = schedule.chunks(vectors)
            needed = schedule.scratch_bytes(entry_words) + inputs * stages * schedule.slot_bytes(chunks)
            if needed <= machine.block_bytes and (stages == 1 or needed <= machine.processor_bytes // 4):
                return schedule
    return None


def streamed(machine: Machine, vectors: int, ragged: bool = False) -> Schedule:
    """The schedule for rows that are read once and not held: chunks in flight, blocks enough to hide a row's end."""
    if vectors <= 256:
        per_thread = -(-vectors // 32)
        return Schedule(128, 32, 1, 4, min(per_thread, 2 if ragged or per_thread <= 2 else 4), 5)
    threads = min(256, max(64, _round_up_to_power(-(-vectors // 8))))
    return Schedule(threads, threads, 1, 3, 2 if ragged else 4, 768 // threads)


def direct(machine: Machine, vectors: int) -> Schedule:
    """The schedule for rows that go through registers only: element by element work, or too long for anything else."""
    if vectors <= 128:
        return Schedule(128, 32, 1, 1, max(1, min(4, -(-vectors // 32))), 8)
    return Schedule(256, 256, 1, 1, 4 if vectors >= 1024 else 1, 4)
