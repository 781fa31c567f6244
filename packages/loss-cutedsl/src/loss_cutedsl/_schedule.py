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

from typing import Literal, NamedTuple

VECTOR_BYTES = 16

# Shared memory behind what the reductions use: two barrier objects of those in a cluster, and words that a block's
# threads tell one another; see ``MeetingRows`` and ``StagedRows``.
MET_BYTES = 16
NOTE_BYTES = 16

# Row numbers and columns are 32-bit in the kernels; offsets are not.
LARGEST = 2**31 - 2**16

# Words that a warp of the plain case hands to the others of its row: maximum and sum.
PLAIN_ENTRY_WORDS = 2

# Rows up to which a launch may have threads for every tile: the loop's counter goes a step, that is all tiles, beyond
# the last. So many rows of more than one tile fit into no memory.
MOST_AT_A_TIME = 2**30


def most_vectors(cols, width: int, ragged: bool):
    """The most vectors, of ``width`` elements, that a row can touch; a ragged row may touch one less."""
    return (cols + (2 * width - 2)) // width if ragged else cols // width


# Rows that a cluster of more than two blocks takes at most. How many such clusters run at a time depends on how many
# multiprocessors each of a device's partitions has, which is not the same on all devices of a name; with one wave of
# clusters, one that finds no place would do its whole share after all others have ended.
ROWS_OF_LARGE_CLUSTER = 8


class Schedule(NamedTuple):
    """What a kernel is compiled for, beyond its dtype and options.

    Attributes:
        threads: of a block.
        row_threads: threads of the block on one row: all of them, or 32 (then a block has several rows at a time).
        cluster: blocks that share a row.
        stages: rows (in the streamed form: chunks) in shared memory at a time.
        unroll: vectors that a thread takes per step of its loop over a row.
        blocks: blocks that a multiprocessor is to hold at a time; it bounds the registers of a thread.
        rows: that a group of threads takes at most, one after the other; 0 for as many as there are for it when all
            blocks run at a time. Fewer rows leave less to wait for when some multiprocessors are slower than others,
            and each block starts and ends anew. Taken where it makes at least two waves of blocks.
    """

    threads: int
    row_threads: int
    cluster: int
    stages: int
    unroll: int
    blocks: int
    rows: int = 0

    @property
    def groups(self) -> int:
        """Of threads in a block, each with a row at a time."""
        return self.threads // self.row_threads

    def grid(self, most_blocks: int, rows: int) -> int:
        """Blocks to launch; ``most_blocks``: those that the device holds at a time, a multiple of the cluster."""

        def blocks_of(rows_each: int) -> int:
            return -(-rows // (self.groups * rows_each)) * self.cluster

        if self.cluster > 2:
            most_blocks = max(most_blocks, blocks_of(self.rows or ROWS_OF_LARGE_CLUSTER))
        elif self.rows and blocks_of(self.rows) >= 2 * most_blocks:
            most_blocks = blocks_of(self.rows)
        return min(most_blocks, blocks_of(1))

    def scratch_bytes(self, entry_words: int) -> int:
        """Shared memory for reductions: two halves, an entry per warp of the row; at least a word per warp; notes."""
        entries = max(1, self.row_threads // 32) * self.cluster
        needed = max(2 * entries * 4 * entry_words, 4 * (self.threads // 32)) + MET_BYTES + NOTE_BYTES
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
        early: whether a launch may begin before the one ahead of it has ended.
        l2_bytes: of the L2 cache.
    """

    architecture: str
    processors: int
    block_bytes: int
    processor_bytes: int
    clusters: bool
    early: bool
    l2_bytes: int


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


def machine(capability: tuple[int, int], processors: int, l2_bytes: int) -> Machine:
    """The machine of a compute capability, 8.0 or later."""
    block_bytes, processor_bytes = SHARED_BYTES.get(capability, (99 * 1024, 100 * 1024))
    major, minor = capability
    return Machine(
        architecture=f"sm_{major}{minor}{'a' if major >= 9 else ''}",
        processors=processors,
        block_bytes=block_bytes,
        processor_bytes=processor_bytes,
        clusters=major in (9, 10),
        # Of 12.x one report has such launches fail where a graph was captured.
        early=major in (9, 10),
        l2_bytes=l2_bytes,
    )


# A block reserves this much shared memory for itself.
RESERVED_BYTES = 1024


def resident_blocks(machine: Machine, schedule: Schedule, shared_bytes: int) -> int:
    """Blocks that one multiprocessor holds at a time."""
    return max(1, min(schedule.blocks, machine.processor_bytes // (shared_bytes + RESERVED_BYTES)))


def _round_up_to_power(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


class Measured(NamedTuple):
    """The best schedule of those tried at one width, taken for rows of ``least`` to ``most`` vectors.

    It is for machines with clusters. ``inputs``: rows held together; ``ragged``: whether they start inside a vector.
    """

    inputs: int
    ragged: bool
    least: int
    most: int
    schedule: Schedule


# Times by device events, as a share of the bandwidth of a copy. Where a width has no entry, the estimate below was as
# good or has not been compared.

# Cross-entropy, forward and backward, whole calls on an H200 (copy 4.22 TB/s); torch 2.11+cu130, DSL 4.8.1. In brackets
# the same for other numbers of rows a block.
MEASURED_GRADIENT = (
    # 32768 x 8192 bf16: 87.0% (8: 86.1%, all: 84.0%); 83.8% with 256 threads. 4096 x 8192: 62.6% (all), which are
    # too few rows for two waves of four: with them it has about 54%.
    Measured(1, False, 513, 1024, Schedule(128, 128, 1, 2, 4, 6, 4)),
    # 4096 x 16384 fp16: 74.7% (1: 72.2%, 4: 67.6%, all: 73.3%).
    Measured(1, False, 1025, 2048, Schedule(256, 256, 1, 1, 2, 6, 2)),
    # 8192 x 32000 bf16: 90.4% (1: 83.8%, 4: 89.0%, 8: 86.5%, all: 83.6%). One block of 1024 threads with three rows in
    # flight has 77.7%, two blocks of 512 with four vectors a step 83.9%.
    Measured(1, False, 2049, 4096, Schedule(512, 512, 1, 1, 2, 3, 2)),
    # 4096 x 32768 float32: 89.9% (1: 87.3%, all: 86.7%). One block of 1024 threads has 86.8%.
    Measured(1, False, 4097, 8192, Schedule(256, 256, 2, 1, 4, 3, 2)),
    # 4096 x 128256 bf16: 85.2% (4: 76.5%, 2: 68.4%), 8192 x 151936: 90.1% (4: 81.8%). One block has the multiprocessor
    # to itself, so it takes as many threads as there can be, and no other runs when it starts or ends.
    Measured(1, False, 14337, 24576, Schedule(1024, 1024, 2, 1, 2, 1)),
    # 8192 x 50257 bf16: 80.0% (2: 76.4%, all: 78.5%). A few threads write the ends of a row element by element; four
    # blocks, each with half a row, have more else to do meanwhile.
    Measured(1, True, 3585, 7168, Schedule(256, 256, 2, 1, 2, 4, 4)),
)

# Softmax, whole calls on an H200 (copy 4.22 to 4.25 TB/s); torch 2.11+cu130, DSL 4.8.1. In brackets the estimate below,
# with blocks that stay; bf16 where no dtype is named.
#
# A row a block, and as many blocks as there is room for: each is small, so that many rows are under way, whose starts
# and ends fall together with the middle of others, and a longer row has more blocks. Nothing needs to be known of other
# rows here, so that a block has nothing to do but its row; cross-entropy's blocks stay.
MEASURED_SOFTMAX = (
    # Forward. 4096 x 16384: 92.5% (84.9%); one block 91.3%, four 80.9%. 4096 x 24576: 94.5% (80.9%).
    Measured(1, False, 1793, 3072, Schedule(256, 256, 2, 1, 2, 6, 1)),
    # 8192 x 32000: 97.7% (90.8%).
    Measured(1, False, 3073, 4096, Schedule(256, 256, 2, 1, 2, 4, 1)),
    # 8192 x 40960: 100.6%, as wider rows 93.4%.
    Measured(1, False, 4097, 7168, Schedule(128, 128, 4, 1, 2, 8, 1)),
    # 4096 x 65536: 97.0% (86.2%), two blocks of 512 97.2%; 4096 x 32768 float32: 96.8%, with four vectors a step 97.1%.
    Measured(1, False, 7169, 8192, Schedule(256, 256, 4, 1, 2, 4, 1)),
    # 4096 x 100352: 100.4%, as wider rows 93.5%.
    Measured(1, False, 8193, 14336, Schedule(128, 128, 8, 1, 2, 7, 1)),
    # 4096 x 128256: 99.6% (91.5%); four vectors a step have no registers: 91.4%. 4096 x 151936: 99.4% (92.3%).
    Measured(1, False, 14337, 19200, Schedule(256, 256, 8, 1, 2, 4, 1)),
    # 1024 x 262144: 95.8% (71.9%).
    Measured(1, False, 19201, 32768, Schedule(256, 256, 8, 1, 2, 3, 1)),
    # Forward, ragged. 8192 x 50257, when it was not in registers: 95.2%.
    Measured(1, True, 6401, 8400, Schedule(256, 256, 2, 1, 1, 4, 1)),
    # 4096 x 128257: 96.1%.
    Measured(1, True, 8401, 19200, Schedule(256, 256, 8, 1, 2, 5, 1)),
    # Backward. 4096 x 16384: 96.9% (92.7%).
    Measured(2, False, 1281, 2048, Schedule(256, 256, 2, 1, 2, 4, 1)),
    # 8192 x 20480: 102.2%, as wider rows 96.5%.
    Measured(2, False, 2049, 2560, Schedule(128, 128, 4, 1, 1, 8, 1)),
    # 8192 x 32000: 102.9% (98.4%); 8192 x 24576: 103.0%.
    Measured(2, False, 2561, 4096, Schedule(256, 256, 4, 1, 2, 4, 1)),
    # Four vectors a step spill in log-softmax's, up to three blocks a multiprocessor: 16 bytes, and 1 to 20 points.
    # Softmax and log-softmax, then log-softmax by four: 4096 x 40960 102.0 and 102.0% (92.5%).
    Measured(2, False, 4097, 6400, Schedule(256, 256, 4, 1, 2, 3, 1)),
    # 4096 x 65536: 103.1 and 103.5% (101.1%); 4096 x 73728: 103.5% (88.3%); 4096 x 32768 float32: 103.5% (102.9%).
    Measured(2, False, 6401, 9216, Schedule(256, 256, 8, 1, 2, 4, 1)),
    # 4096 x 81920: 103.3 and 103.5% (82.2 to 92.0%); 4096 x 114688: 103.6% (97.2%).
    Measured(2, False, 9217, 15360, Schedule(256, 256, 8, 1, 2, 3, 1)),
    # 4096 x 128256: 103.8 and 104.0% (97.6%); 8192 x 151936: 104.6 and 104.7% (84.5%); 1024 x 196608: 101.4 and 101.4%.
    Measured(2, False, 15361, 24576, Schedule(256, 256, 8, 1, 4, 2, 1)),
    # Backward, ragged. 4096 x 32769: 95.6%, as wider rows 92.2%.
    Measured(2, True, 4097, 4200, Schedule(256, 256, 2, 1, 2, 3, 1)),
    # 8192 x 50257: 99.4%.
    Measured(2, True, 4201, 8400, Schedule(256, 256, 4, 1, 2, 3, 1)),
    # 4096 x 128257: 98.5%.
    Measured(2, True, 8401, 24576, Schedule(256, 256, 8, 1, 2, 3, 1)),
)

# The same of rows that are all in registers, of a block or of a warp (32 threads), where that was better; ``unroll`` is
# then what a row takes. Measured likewise (copy 4.25 TB/s); in brackets what had been best of rows in shared memory.
#
# There is less to do: no copies to start, and of ragged rows no ends to bring to their places among those, after which
# the lanes of a warp have to meet. So ragged rows gain most. Wider rows take more registers than leave two blocks.
SOFTMAX_IN_REGISTERS = (
    # Forward. 524288 x 136: 50.5% (38.3%); 524288 x 256: 93.3% (77.3%); 262144 x 512: 99.1% (91.0%); 131072 x 600:
    # 96.4% (71.5%).
    Measured(1, False, 1, 96, Schedule(128, 32, 1, 1, 0, 12)),
    # 131072 x 1024: 98.9% (98.2%).
    Measured(1, False, 97, 128, Schedule(64, 32, 1, 1, 0, 20)),
    # 65536 x 1536: 97.6% (97.2%).
    Measured(1, False, 129, 192, Schedule(64, 64, 1, 1, 0, 21)),
    # 65536 x 2048: 99.2% (98.8%), 32768 x 2048: 95.5% (94.4%); a warp a row 98.5 and 95.1%.
    Measured(1, False, 193, 256, Schedule(128, 128, 1, 1, 0, 12)),
    # 65536 x 2560: 99.3% (99.1%); 65536 x 2568 by 128 threads 95.9%, 97.1% in shared memory.
    Measured(1, False, 257, 352, Schedule(64, 64, 1, 1, 0, 18)),
    # 32768 x 3072: 98.0% (97.0%); 32768 x 4096: 98.7% (98.0%).
    Measured(1, False, 353, 512, Schedule(128, 128, 1, 1, 0, 10)),
    # 32768 x 5120: 99.3% (99.3%); 16384 x 7168: 98.3% (97.4%). 4096 x 8192: 89.6% (87.7%), with eight blocks 88.8%,
    # with seven 88.3%; float16 89.0% (87.7%); 16384 x 4096 float32: 98.5% (98.5%).
    Measured(1, False, 513, 1024, Schedule(128, 128, 1, 1, 0, 9)),
    # 16384 x 9216: 98.7%, by 256 threads 99.0%, but 16384 x 8200 94.5% by those.
    Measured(1, False, 1025, 1120, Schedule(128, 128, 1, 1, 0, 8)),
    # 16384 x 10240: 99.4% (98.5%); 8192 x 14336: 97.1% (95.2%). With 16384 columns there is no difference.
    Measured(1, False, 1121, 1792, Schedule(256, 256, 1, 1, 0, 4)),
    # Forward, ragged. 524288 x 137: 43.6% (27.7%); 524288 x 257: 60.9% (45.6%); 262144 x 501: 97.5% (82.0%);
    # 131072 x 769: 97.2% (69.4%).
    Measured(1, True, 1, 110, Schedule(128, 32, 1, 1, 0, 12)),
    # 131072 x 1001: 98.6% (84.9%).
    Measured(1, True, 111, 130, Schedule(64, 64, 1, 1, 0, 25)),
    # 65536 x 1501: 96.7% (82.8%); 65536 x 2001: 98.2% (91.6%).
    Measured(1, True, 131, 258, Schedule(64, 64, 1, 1, 0, 21)),
    # 65536 x 2561: 98.8% (88.7%).
    Measured(1, True, 259, 330, Schedule(64, 64, 1, 1, 0, 16)),
    # 32768 x 3001: 97.4% (93.1%).
    Measured(1, True, 331, 430, Schedule(128, 128, 1, 1, 0, 10)),
    # 32768 x 4001: 99.0% (95.4%); 32768 x 5001: 98.9% (97.1%); 16384 x 7001: 97.5% (94.8%).
    Measured(1, True, 431, 900, Schedule(128, 128, 1, 1, 0, 8)),
    # 16384 x 8191: 98.4% (95.7%).
    Measured(1, True, 901, 1030, Schedule(256, 256, 1, 1, 0, 5)),
    # 16384 x 9001: 98.3% (91.4%).
    Measured(1, True, 1031, 1152, Schedule(128, 128, 1, 1, 0, 8)),
    # 16384 x 10001: 98.8% (96.9%); 8192 x 12001: 96.4% (94.2%).
    Measured(1, True, 1153, 1600, Schedule(256, 256, 1, 1, 0, 4)),
    # 8192 x 16001: 98.0% (95.6%); 8192 x 20011: 98.1% (92.2%); 8192 x 28001: 98.9% (98.5%).
    Measured(1, True, 1601, 3600, Schedule(256, 256, 1, 1, 0, 3)),
    # 8192 x 32003: 99.1% (98.2%); 4096 x 40001: 96.8% (95.6%); 8192 x 50257: 98.8% (98.2%).
    Measured(1, True, 3601, 6400, Schedule(256, 256, 1, 1, 0, 2)),
    # Backward. 524288 x 136: 92.7% (78.8%); 524288 x 256: 101.7% (96.9%); 262144 x 512: 101.6% (97.3%).
    Measured(2, False, 1, 64, Schedule(128, 32, 1, 1, 0, 10)),
    # 131072 x 600: 99.3% (93.2%); 131072 x 1024: 101.7% (101.6%), log-softmax 101.9% (98.2%).
    Measured(2, False, 65, 128, Schedule(64, 64, 1, 1, 0, 18)),
    # 65536 x 2048: 101.9% (101.4%); 32768 x 2048: 99.2% (98.4%).
    Measured(2, False, 129, 352, Schedule(128, 128, 1, 1, 0, 9)),
    # 32768 x 4096: 101.9% (101.2%). 4096 x 8192: 94.2% (92.4%), with three blocks 94.0%, 128 threads 93.7%; log-softmax
    # 94.2% (93.0%), 92.6 and 93.2%.
    Measured(2, False, 353, 1024, Schedule(256, 256, 1, 1, 0, 4)),
    # 16384 x 9216: 102.0%; 16384 x 8200, log-softmax, by 512 threads 93.7% (97.4%).
    Measured(2, False, 1025, 1120, Schedule(256, 256, 1, 1, 0, 3)),
    # 16384 x 9216: 102.7% (101.7%); 16384 x 10240: 102.8% (102.0%). Up to 16384 columns there is no difference.
    Measured(2, False, 1121, 1280, Schedule(512, 512, 1, 1, 0, 2)),
    # Backward, ragged. 524288 x 257: 89.7% (70.8%); 262144 x 501: 100.7% (89.5%).
    Measured(2, True, 1, 66, Schedule(128, 32, 1, 1, 0, 10)),
    # 131072 x 769: 100.2% (92.3%); 131072 x 1001: 100.9% (96.9%).
    Measured(2, True, 67, 130, Schedule(64, 64, 1, 1, 0, 18)),
    # 65536 x 1501: 100.7% (92.5%); 65536 x 2001: 101.2% (97.0%).
    Measured(2, True, 131, 258, Schedule(128, 128, 1, 1, 0, 10)),
    # 65536 x 2561: 102.1% (98.1%); 32768 x 3001: 100.3% (95.8%); 32768 x 3089 by 256 threads 92.9%.
    Measured(2, True, 259, 430, Schedule(128, 128, 1, 1, 0, 8)),
    # 32768 x 4001: 101.3% (97.0%); 32768 x 5001: 102.4% (98.0%); 16384 x 6001: 100.2% (95.8%).
    Measured(2, True, 431, 800, Schedule(256, 256, 1, 1, 0, 4)),
    # 16384 x 8191: 101.3% (96.7%); 16384 x 10001: 101.6% (98.1%).
    Measured(2, True, 801, 1300, Schedule(256, 256, 1, 1, 0, 3)),
    # 8192 x 12001: 100.4% (95.7%); 8192 x 16001: 100.7% (96.8%); 8192 x 20011: 100.4% (98.0%).
    Measured(2, True, 1301, 2560, Schedule(256, 256, 1, 1, 0, 2)),
    # 4096 x 25003: 98.0% (94.7%); 8192 x 32003: 102.5% (99.1%).
    Measured(2, True, 2561, 4096, Schedule(512, 512, 1, 1, 0, 1)),
)


def held(
    machine: Machine,
    vectors: int,
    inputs: int = 1,
    entry_words: int = 8,
    ragged: bool = False,
    measured: tuple[Measured, ...] = (),
) -> Schedule | None:
    """The schedule for rows of that many vectors held in shared memory, or None where they do not fit.

    It is that of ``measured`` where the table has the width, and otherwise an estimate.

    Up to 4 KB a warp takes a row, and nothing has to be synchronised. Longer rows take a block with about 8 vectors a
    thread, so that a multiprocessor holds 1024 threads and 128 KB at any width; rows of more than a quarter of a
    multiprocessor's shared memory take all of its threads they can. What does not fit in one block takes a cluster,
    the smallest that leaves room. Ragged rows need registers for their edges, so they take two vectors a step.
    """
    found = _measured(machine, measured, vectors, inputs, ragged)
    if found is not None:
        return found
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
            blocks = 1024 // threads
            schedule = Schedule(threads, threads, cluster, stages, unroll, blocks)
            needed = shared_bytes(schedule, vectors, inputs, entry_words)
            if needed <= machine.block_bytes and (stages == 1 or needed <= machine.processor_bytes // 4):
                # Fewer blocks for want of shared memory leave more registers to each.
                return (
                    schedule._replace(blocks=1) if 2 * (needed + RESERVED_BYTES) > machine.processor_bytes else schedule
                )
    return None


def _measured(
    machine: Machine, table: tuple[Measured, ...], vectors: int, inputs: int, ragged: bool
) -> Schedule | None:
    """What a table has for rows of that many vectors."""
    if machine.clusters:
        for case in table:
            if case.inputs == inputs and case.ragged == ragged and case.least <= vectors <= case.most:
                return case.schedule
    return None


def shared_bytes(schedule: Schedule, vectors: int, inputs: int, entry_words: int, whole_rows: bool = True) -> int:
    """Shared memory that a block needs, for rows of at most ``vectors`` vectors.

    Args:
        schedule: of the kernel.
        vectors: that a row touches at most.
        inputs: rows that a stage holds: 0 where nothing is staged.
        entry_words: words of the kernel's reductions.
        whole_rows: whether a stage is a row, or a chunk of one.
    """
    slot = schedule.slot_bytes(schedule.chunks(vectors) if whole_rows else 1)
    return schedule.scratch_bytes(entry_words) + inputs * schedule.groups * schedule.stages * slot


def streamed(machine: Machine, vectors: int, ragged: bool = False, element_bytes: int = 2) -> Schedule:
    """The schedule for rows that are read once and not held: chunks in flight, blocks enough to hide a row's end.

    Small blocks: at the end of a row few threads wait for one another, and many rows are under way. Loss alone on an
    H200, measured as above (in brackets: blocks of twice as many threads): 32768 x 8192 bf16 85.5% (76.9%);
    8192 x 32000 83.4% (80.8%); 4096 x 16384 fp16 59.3% (58.9%); 8192 x 50257 bf16 72.5% (67.6%); 4096 x 32768 float32,
    which has half the arithmetic a byte, 94.0% (92.1%). At 4096 x 128256 256 threads reach 98.7%.
    """
    if vectors <= 256:
        per_thread = -(-vectors // 32)
        return Schedule(128, 32, 1, 4, min(per_thread, 2 if ragged or per_thread <= 2 else 4), 5)
    if 512 < vectors <= 1024 and not ragged:
        # A warp a row waits for no other: 32768 x 8192 90.8%, with 64 threads 89.9%; 4096 x 8192 53.1 and 51.9%.
        return Schedule(128, 32, 1, 4, 4, 5)
    if vectors <= 1024:
        return Schedule(64, 64, 1, 4, 4, 10)
    if element_bytes == 4 and not ragged and vectors >= 6144 and machine.block_bytes >= 160 * 1024:
        return Schedule(256, 256, 1, 4, 4, 4)
    if vectors <= 8192:
        # The edges of ragged rows take registers: 8192 x 50257 on an H100 has 89.9% with five blocks, 84.0% with six.
        return Schedule(128, 128, 1, 4, 4, 5 if ragged else 8)
    return Schedule(256, 256, 1, 3, 4, 3)


class Form(NamedTuple):
    """How the plain case takes a row: by which schedule, and whether it is held in shared memory.

    A row that is not streams through registers, or is all in them, of one block, where the schedule's ``unroll`` is 0.
    """

    schedule: Schedule
    held: bool

    @property
    def at_once(self) -> bool:
        """Whether all of a row is in registers."""
        return not self.schedule.unroll


def _held(threads: int, cluster: int, unroll: int, blocks: int) -> Form:
    return Form(Schedule(threads, threads, cluster, 1, unroll, blocks), True)


def _streamed(threads: int, unroll: int, blocks: int) -> Form:
    return Form(Schedule(threads, threads, 1, 1, unroll, blocks), False)


def _at_once(threads: int, blocks: int) -> Form:
    return Form(Schedule(threads, threads, 1, 1, 0, blocks), False)


class Width(NamedTuple):
    """The form of rows of at most ``most`` vectors."""

    most: int
    form: Form


# The plain case of cross-entropy by the most vectors of a row: the best of those tried, whole calls on H200s (copy 4.24
# to 4.25 TB/s), which differ by a point and a half; torch 2.11+cu130, DSL 4.8.1; bf16 where no dtype is named. Blocks
# that stay take a row a warp up to 128 vectors.
#
# Each block is small, so that many are under way: of the 1024 to 1536 threads and 120 to 190 KB of rows that a
# multiprocessor has at a time few wait for the same thing. In registers a row has less to do: no copies to start, one
# look at each word for the maximum and one for the sum, where the running maximum of what streams takes two more
# instructions an element; and of a ragged row no ends to bring to their places among those in shared memory. Each
# number of vectors a thread is a binary of its own, and rows lose whose vectors are no multiple of the threads.

# Forward and backward. In brackets rows in shared memory.
GRADIENT = (
    # 65536 x 2048: 85.4% (85.2%).
    Width(256, _at_once(64, 20)),
    Width(448, _at_once(64, 16)),
    # 32768 x 4096: 90.6% (89.9%); all asked for before the target is known, by 128 threads, 92.2%.
    Width(576, _at_once(64, 14)),
    Width(672, _at_once(128, 9)),
    # 32768 x 8192: 97.4% (96.7%); 4096 x 8192: 73.8% (70.5%).
    Width(1024, _at_once(128, 8)),
    # 16384 x 9216: 94.3% (93.0%).
    Width(1152, _at_once(128, 7)),
    # 16384 x 10240: 95.2% (93.6%).
    Width(1280, _at_once(128, 6)),
    # 16384 x 12288: 96.1% (95.7%); 13312: 96.6% (95.1%); 14336: 97.1% (96.6%).
    Width(1792, _at_once(128, 5)),
    # 16384 x 16384: 97.7% (96.8%); 4096 x 16384: 86.0% (83.9%).
    Width(2048, _at_once(256, 4)),
    # 8192 x 20480: 95.0% (94.4%); 8192 x 24576: 96.5% (95.3%).
    Width(3072, _at_once(256, 3)),
    # 8192 x 28672: 96.3%.
    Width(3584, _held(128, 2, 2, 8)),
    # 8192 x 32000: 97.6%, in registers of 512 threads 97.6%.
    Width(4096, _held(256, 2, 2, 5)),
    # 8192 x 36864: 98.3% (96.8%).
    Width(4608, _at_once(384, 2)),
    # 8192 x 40960: 98.4% (98.1%).
    Width(5120, _at_once(320, 2)),
    # 8192 x 49152: 98.8%, in registers 98.0%; 8192 x 57344: 99.0%; 4096 x 20480 float32: 94.5%, as wider rows 84.8%.
    Width(7168, _held(128, 4, 2, 8)),
    # 4096 x 32768 float32: 97.2%, by eight blocks of 128 threads 97.3%; 4096 x 65536: 96.6 and 94.7%.
    Width(8192, _held(256, 4, 2, 5)),
    # 4096 x 81920: 97.5%, as wider rows 83.7%; 4096 x 100352: 96.0 and 86.1%.
    Width(14336, _held(128, 8, 2, 7)),
    # 4096 x 128256: 98.9%; 8192 x 151936: 101.0%. With 128 threads half a point less.
    Width(19200, _held(256, 8, 2, 5)),
    Width(32768, _held(256, 8, 2, 3)),
)

# Ragged rows, which may have up to two vectors more.
GRADIENT_RAGGED = (
    # 65536 x 2001: 81.5% (73.2%).
    Width(258, _at_once(64, 20)),
    Width(450, _at_once(64, 16)),
    # 32768 x 4001: 89.6% (78.2%).
    Width(578, _at_once(64, 14)),
    # 32768 x 5001: 89.4% (84.4%).
    Width(674, _at_once(128, 9)),
    # 32768 x 6001: 93.3% (89.8%); 32768 x 7001: 96.1% (93.1%).
    Width(898, _at_once(128, 8)),
    # 32768 x 8191: 97.3% (77.6%); 16384 x 9001: 93.4% (78.3%).
    Width(1154, _at_once(128, 7)),
    # 16384 x 10001: 94.2% (84.0%).
    Width(1410, _at_once(128, 6)),
    # 16384 x 12001: 95.2% (88.9%); 13001: 95.9% (89.3%); 14001: 96.4% (92.8%).
    Width(1794, _at_once(128, 5)),
    # 16384 x 16001: 97.2% (95.1%).
    Width(2050, _at_once(256, 4)),
    # 8192 x 18001: 93.2% (77.1%).
    Width(2306, _at_once(192, 4)),
    # 8192 x 20011: 93.1% (82.7%); 8192 x 22003: 93.8% (83.0%).
    Width(2820, _at_once(256, 3)),
    # 8192 x 25003: 95.3% (85.4%).
    Width(3140, _at_once(192, 3)),
    # 8192 x 28001: 94.1% (91.8%).
    Width(3586, _at_once(256, 3)),
    # 8192 x 30001: 93.9% (92.5%).
    Width(3842, _at_once(384, 2)),
    # 8192 x 32003: 96.3% (94.8%).
    Width(4098, _at_once(512, 2)),
    # 8192 x 36001: 97.7% (94.9%).
    Width(4610, _at_once(384, 2)),
    # 8192 x 40001: 97.6% (96.0%); 8192 x 45007: 98.0% (96.7%).
    Width(5634, _at_once(256, 2)),
    # 8192 x 50257: 97.2%, in registers 90.7%, all asked for before the target is known 98.3%; four blocks 85.4%.
    Width(8192, _held(256, 2, 1, 4)),
    Width(19200, _held(256, 8, 1, 5)),
    Width(32770, _held(256, 8, 1, 3)),
)

# The loss alone. In brackets what had been best before rows were in registers: copied to shared memory or streamed.
LOSS_ALONE = (
    # 65536 x 1500: 76.9% (55.1%).
    Width(192, _at_once(64, 20)),
    # 65536 x 2048: 89.4% (76.5%).
    Width(256, _at_once(64, 16)),
    # 65536 x 2560: 88.5% (59.4%); 3000: 88.4% (67.0%).
    Width(384, _at_once(64, 12)),
    # 32768 x 4096: 90.8% (77.2%). 32768 x 5120: 91.6% (85.2%). 32768 x 6000: 93.5%.
    Width(768, _at_once(128, 8)),
    # 32768 x 7000: 94.8%, by 256 threads 84.3%.
    Width(960, _at_once(128, 6)),
    # 32768 x 8192: 95.2 to 98.8% (93.5 to 94.1%), 128 threads half a point less; 4096 x 8192: 65.5% (62.0%). 16384 x
    # 9216: 93.0% (87.4%).
    Width(1280, _at_once(256, 5)),
    # 16384 x 12288: 95.2% (90.7%).
    Width(1536, _at_once(256, 4)),
    # 16384 x 13312: 96.2%, as wider rows 90.9%.
    Width(1728, _at_once(192, 4)),
    # 16384 x 14336: 96.5%. 16384 x 16384: 97.0% (93.5%), 4096 x 16384: 80.8% (75.5%). 8192 x 20480: 92.5% (88.4%).
    Width(2816, _at_once(256, 3)),
    # 8192 x 24576: 96.1% (89.2%), as narrower rows 92.3%; 8192 x 28672: 96.9% (90.5%). 8192 x 32000: 97.6% (92.8 to
    # 94.4%), by 512 threads 96.9%; 8192 x 36864: 98.3%, as wider rows 88.7%. 8192 x 16384 float32: 95.7% (93.1%).
    Width(4736, _at_once(384, 2)),
    # 8192 x 40960: 99.0% (91.1%); 8192 x 49152: 100.8% (95.9%).
    Width(6400, _at_once(256, 2)),
    # 8192 x 57344: 95.7%, in registers 93.9%.
    Width(7168, _held(128, 4, 2, 8)),
    # 4096 x 32768 float32: 95.8%; streamed by eight blocks of 128 threads 91%. 4096 x 65536: 90.6 to 95.4%.
    Width(8192, _held(256, 4, 2, 6)),
    # 4096 x 128256: 100.3%; with 512 threads 92.6%, with two vectors a step 94.4%.
    Width(LARGEST, _streamed(256, 4, 4)),
)

LOSS_ALONE_RAGGED = (
    # 65536 x 1501: 76.3% (55.2%).
    Width(194, _at_once(64, 20)),
    # 65536 x 2001: 84.8% (63.6%).
    Width(258, _at_once(64, 16)),
    # 65536 x 3001: 91.4%.
    Width(386, _at_once(64, 12)),
    # 32768 x 4001: 86.8% (64.1%). 32768 x 6001: 92.4% (75.3%).
    Width(770, _at_once(128, 8)),
    # 32768 x 8191: 95.6% (61.5%).
    Width(1026, _at_once(128, 6)),
    # 16384 x 9001: 90.0%; 16384 x 10001: 92.3%.
    Width(1282, _at_once(256, 5)),
    # 16384 x 11271: 90.8%, by 256 threads 88.1%.
    Width(1410, _at_once(192, 5)),
    # 16384 x 12001: 94.8%.
    Width(1538, _at_once(256, 3)),
    # 16384 x 12295: 93.6%, as wider rows 83.9%; 13321: 94.1%.
    Width(1730, _at_once(192, 4)),
    # 16384 x 14001: 95.3%, as wider rows 92.5%.
    Width(1794, _at_once(256, 4)),
    # 16384 x 16001: 97.0%; 16384 x 16385: 91.7% (79.1%). 8192 x 20011: 92.5%; 8192 x 25003: 92.0%.
    Width(3140, _at_once(256, 3)),
    # 8192 x 28681: 94.8%. 8192 x 32003: 96.6% (88.1 to 89.6%), by 512 threads 95.9%; 8192 x 36001: 98.0%, as wider rows
    # 90.5%.
    Width(4610, _at_once(384, 2)),
    # 8192 x 40001: 98.9%; 8192 x 50257: 99.1 to 100.9% (92.4%); 8192 x 20011 float32: 98.0%. By clusters, or more
    # threads, 56 to 85%.
    Width(6402, _at_once(256, 2)),
    # 8192 x 57345: 93.4%, in registers 89.4%. 4096 x 65537: 85.5%.
    Width(8192, _streamed(128, 4, 8)),
    Width(LARGEST, _streamed(256, 4, 4)),
)

# By whether there is a gradient, and whether rows are ragged.
PLAIN = {
    (True, False): GRADIENT,
    (True, True): GRADIENT_RAGGED,
    (False, False): LOSS_ALONE,
    (False, True): LOSS_ALONE_RAGGED,
}

# For an L2 cache smaller than an H200's, as an H100's is (50 MiB), a row that is not in registers is held where it
# fits, as with a gradient. Whole calls on an H100, held and streamed: 4096 x 128256 101.7 and 97.5%. Rows in registers
# have not been measured there: it has the same multiprocessors, and less memory bandwidth to keep up with.
SMALLER_L2 = 60 * 2**20

# Of a row one part in so many is asked for before it is known whether it is ignored, in shared memory and in registers.
EARLY_PART = 4

# Rows up to which there is a block for each: blocks, and what the loops over rows count to, stay below 2**31.
MOST_PLAIN_ROWS = 2**27


def plain(machine: Machine, vectors: int, ragged: bool, gradient: bool) -> Form | None:
    """The form for rows of at most that many vectors, or None where a row does not get a block."""
    if vectors <= 128:
        return None
    form = _of_width(PLAIN[gradient, ragged], vectors)
    if form is not None and not form.at_once:
        if not machine.clusters:
            # What aligned rows have in a cluster, ragged ones may have in registers.
            form = _of_width(PLAIN[gradient, True], vectors)
        elif machine.l2_bytes < SMALLER_L2:
            form = _of_width(PLAIN[True, ragged], vectors)
    if form is not None and _runs(machine, form, vectors):
        return form
    return None if gradient else _streamed(256, 4, 4)


def _of_width(table: tuple[Width, ...], vectors: int) -> Form | None:
    return next((width.form for width in table if vectors <= width.most), None)


def _runs(machine: Machine, form: Form, vectors: int) -> bool:
    """Whether a machine has the clusters and the shared memory for a form."""
    if form.at_once:
        return True
    needed = shared_bytes(form.schedule, vectors, int(form.held), PLAIN_ENTRY_WORDS)
    return (machine.clusters or form.schedule.cluster == 1) and needed <= machine.block_bytes


def in_registers(schedule: Schedule, row_bytes: int) -> tuple[Schedule, int]:
    """The schedule with as many vectors a thread as rows have, and how many of these are full.

    Of any row those of all threads are then there and all of the row, but for the first of a row that begins inside a
    vector. A row's end that is not all of a vector takes no place: its elements are read one by one.
    """
    step = schedule.row_threads * VECTOR_BYTES
    return schedule._replace(unroll=-(-row_bytes // step)), row_bytes // step


def asked_early(schedule: Schedule, gradient: bool) -> int:
    """How many vectors of a row in registers a thread asks for before it knows whether the row is ignored.

    The others wait for the target, so that of an ignored row a quarter is read. Whole calls with a gradient on an H200,
    and with half of the rows ignored; in brackets with all asked for at once: 65536 x 2048 bf16 84.4 and 73.6% (88.2,
    65.7%), 32768 x 8192 97.4 and 86.4% (97.0, 72.8%), 4096 x 8192 73.8% (74.4%), 16384 x 16384 97.7 and 86.7% (97.6,
    73.1%). Without a gradient 32768 x 8192 loses 2 points, 8192 x 32000 a half to one.
    """
    return max(1, schedule.unroll // EARLY_PART) if gradient else schedule.unroll


def softmax_in_registers(machine: Machine, vectors: int, inputs: int, ragged: bool) -> Schedule | None:
    """The schedule for softmax's rows of that many vectors where they are all in registers, or None."""
    return _measured(machine, SOFTMAX_IN_REGISTERS, vectors, inputs, ragged)


# When the L2 gives up the lines of rows that are copied to shared memory, by PTX's names; None: as those of all else.
Eviction = Literal["evict_first", "evict_last"]

# Where a result as large as the row is written. Whole calls on an H200 (copy 4.22 TB/s, an L2 full of what others have
# written), without and with it. Cross-entropy and its gradient: 4096 x 8192 bf16 69.5 and 70.1%, 4096 x 16384 81.1 and
# 83.9%, 32768 x 8192 93.9 and 96.5%, 8192 x 32000 94.1 and 97.4%, 4096 x 32768 float32 94.6 and 97.2%. Softmax forward:
# 4096 x 8192 84.4 and 87.3%, 32768 x 2048 93.4 and 94.7%, 4096 x 128256 99.5 and 101.7%; backward: 89.8 and 92.5%, 97.5
# and 99.1%, 103.7 and 104.9%. With "evict_first" all of them lose, 1 to 8 points. On an H100 8192 x 32000 97.2 and
# 98.1%, 4096 x 128256 99.0 and 100.0%, with label smoothing and z-loss 88.5 and 89.7%, 87.7 and 89.1%.
#
# Why is not known. A guess: lines of rows stay until after those of the result, which are then written back sooner, and
# in order.
BESIDE_A_RESULT: Eviction = "evict_last"


def eviction(machine: Machine, row_bytes: int, *, gradient: bool, scalar: bool) -> Eviction | None:
    """The policy for rows of so many bytes in the plain case of cross-entropy, but for those that stream."""
    if gradient:
        return BESIDE_A_RESULT
    # Of a loss for each row a backward may read the logits once more.
    return "evict_first" if scalar and evicts_first(machine, row_bytes) else None


def evicts_first(machine: Machine, row_bytes: int) -> bool:
    """Whether rows of so many bytes that are held and read once, where none is written, are the first for L2 to evict.

    An L2 full of what others have written writes it back while rows are read; with the hint it gives up lines of the
    rows before those. Whole calls on an H200, with and without: 4096 x 8192 bf16 62.8 and 54.9%, 4096 x 16384 75.9 and
    68.8%, 32768 x 8192 95.1 and 94.6%, 8192 x 32000 92.5 and 90.3%, 4096 x 32768 float32 95.5 and 96.6%. With
    "evict_last" the first two have 55.5 and 69.1%, 8192 x 32000 88.6%. Rows that stream lose, and on an H100, whose L2
    is smaller, 8192 x 32000 does: 94.5 and 96.7%.
    """
    return row_bytes <= (32768 if machine.l2_bytes < SMALLER_L2 else 65536)


def most_blocks(machine: Machine, schedule: Schedule, block_shared_bytes: int) -> int:
    """Blocks that the device holds at a time, a multiple of the cluster."""
    blocks = machine.processors * resident_blocks(machine, schedule, block_shared_bytes)
    return max(schedule.cluster, blocks // schedule.cluster * schedule.cluster)


def direct(machine: Machine, vectors: int) -> Schedule:
    """The schedule for rows that go through registers only: element by element work, or too long for anything else."""
    if vectors <= 128:
        return Schedule(128, 32, 1, 1, max(1, min(4, -(-vectors // 32))), 8)
    return Schedule(256, 256, 1, 1, 4 if vectors >= 1024 else 1, 4)
