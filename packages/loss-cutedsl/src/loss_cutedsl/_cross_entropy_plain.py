"""Cross-entropy's forward in the plain case, at its best: a block, or a cluster, has one row and ends with it.

It sums the row, tells its loss and writes the gradient. Meanwhile the row is in shared memory; or in registers, all of
it asked for at once, ignored or not; or, without a gradient, it streams through them. As many blocks as there is room
for are under way at a time, so that the start and the end of one fall together with the middle of others. None waits
for what it has stored, and none for another block, but for two things:

The gradient needs the denominator. The first blocks count a slice of the targets each, before anything else: behind the
copies of all blocks that start with them the targets would come last.

The losses have to be added up. Each is published in a word of its own, which is 0 before. The word is the whole
message, so nothing has to be visible before it is. Behind the blocks of the rows come a few that take up a slice of the
words each, the last of them the sums of the others too: in an order that depends on nothing but the number of rows.
They leave all words at 0.
"""

from __future__ import annotations

import abc

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from ._cross_entropy_rows import RowFacts
from ._cross_entropy_total import CrossEntropyTotal, Operands
from ._device import (
    LOWEST,
    add,
    add_64,
    cluster_wait,
    commit,
    divide,
    float_of,
    larger,
    load_element,
    load_relaxed_64,
    load_relaxed_four,
    load_shared,
    message_of,
    number_of,
    pack,
    quotient,
    remainder,
    shuffle_xor_64,
    smaller,
    store_element,
    store_float,
    store_global,
    store_relaxed,
    store_relaxed_64,
    store_relaxed_four,
    tree,
    unpack,
    wait,
    warp_reduce,
)
from ._meeting_rows import MeetingRows
from ._registers import RowsInRegisters
from ._schedule import EARLY_PART, PLAIN_ENTRY_WORDS, VECTOR_BYTES, Eviction, Schedule
from ._workspace import (
    MOST_PARTS,
    WORKSPACE_COUNT,
    WORKSPACE_LOSSES,
    WORKSPACE_PARTS,
    plain_workspace_words,
)

# Slices of the targets, at most: few enough for their blocks to run at a time, and for each to need but one step.
MOST_COUNTED = 32
# What has been counted is one word, with the number of warps whose count is in it above.
WARPS_SHIFT = 48
# Targets that a thread counts at a time.
TARGETS_UNROLL = 8
# How often a block looks for what others count before it counts for itself. A look takes about a microsecond.
LOOKS = 4096

# Vectors of losses that a thread takes up at a time. More would take registers that the rows need.
LOSSES_UNROLL = 4

# A note: the factor of the gradient.
NOTE_FACTOR = 12


def grid(schedule: Schedule, resident_blocks: int, scalar: bool, rows: int) -> tuple[int, int, int]:
    """Blocks of a launch, slices that are counted, and 64-bit words of the workspace."""
    if not scalar:
        return rows * schedule.cluster, 0, 0
    # Blocks start in the order of their numbers, or nearly so: of those that run at a time others may be ahead of half.
    half = max(1, resident_blocks // schedule.cluster // 2)
    # Each adds up twice what it takes up at a time, since the first losses have come when the last rows start.
    parts = min(MOST_PARTS, half, -(-rows // (2 * 4 * LOSSES_UNROLL * schedule.threads)))
    return (rows + parts) * schedule.cluster, min(rows, MOST_COUNTED, half), plain_workspace_words(rows)


class CrossEntropyPlain(MeetingRows, CrossEntropyTotal, abc.ABC):
    """Loss of every row; with ``scalar`` their sum, and with ``gradient`` the finished gradient: logits read once.

    A row has two warps or more, whose exchange is what shows them the notes.

    Compile-time facts as in ``CrossEntropyForward``, of which this is the case without weights, smoothing, softcap,
    statistics and shards. Where a row is the subclasses say.
    """

    smoothing = weighted = stats = shard = gradient = False
    logits = "linear"

    def __init__(self, dtype, schedule: Schedule, ragged: bool, *, target_bits: int, scalar: bool, **more):
        super().__init__(dtype, schedule, ragged, PLAIN_ENTRY_WORDS, **more)
        self.target_bits = target_bits
        self.scalar = scalar

    @cute.jit
    def __call__(
        self,
        g_logits: Int64,  # (R, V)
        logits_stride: Int64,
        g_grad: Int64,  # (R, V), or null; its rows start as far into a vector as those of the logits
        grad_stride: Int64,
        g_target: Int64,  # (R,)
        g_weight: Int64,  # null, as all else that only ``CrossEntropyForward`` has
        g_bytes: Int64,  # (R,) int32 or int64, or null
        g_items: Int64,  # (1,) float32, or null
        g_loss: Int64,  # () or (R,) float32
        g_lse: Int64,  # (R,) float32
        g_denominator: Int64,  # (1,) float32, or null
        g_z_loss: Int64,
        g_prediction: Int64,
        g_correct: Int64,
        g_workspace: Int64,  # see ``_workspace``; or null
        rows: Int32,
        blocks: Int32,
        slices: Int32,
        denominator_kind: Int32,
        items: Float32,
        cols: Int32,
        chunks: Int32,
        shared_bytes: Int32,
        ignore_index: Int64,
        first_class: Int64,
        total_classes: Int64,
        label_smoothing: Float32,
        z_loss: Float32,
        logit_scale: Float32,
        softcap: Float32,
        stream,
    ):
        self.cross_entropy_plain_kernel(
            g_logits, logits_stride, g_grad, grad_stride, g_target, g_bytes, g_items, g_loss, g_lse, g_denominator,
            g_workspace, rows, slices, denominator_kind, items, cols, chunks, ignore_index, z_loss, logit_scale,
        ).launch(
            grid=[blocks, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.cluster, 1, 1] if self.cluster > 1 else None,
            smem=shared_bytes,
            stream=stream,
            min_blocks_per_mp=self.schedule.blocks,
            preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def cross_entropy_plain_kernel(
        self,
        g_logits: Int64,
        logits_stride: Int64,
        g_grad: Int64,
        grad_stride: Int64,
        g_target: Int64,
        g_bytes: Int64,
        g_items: Int64,
        g_loss: Int64,
        g_lse: Int64,
        g_denominator: Int64,
        g_workspace: Int64,
        rows: Int32,
        slices: Int32,
        denominator_kind: Int32,
        items: Float32,
        cols: Int32,
        chunks: Int32,
        ignore_index: Int64,
        z_loss: Float32,
        logit_scale: Float32,
    ):
        """A block, or a cluster, has the row of its number; those behind the last row add the losses up."""
        thread, _, rank, row, teams = self.place()
        s_scratch = Int32(cute.arch.get_dyn_smem(Uint32, 128).toint())
        facts = self.row_facts(
            cols, chunks, rank * self.row_threads + thread, thread, rank, s_scratch, Int64(0), Int64(0), Int64(cols),
            Float32(0.0), z_loss, logit_scale, Float32(1.0),
        )  # fmt: skip
        it = Operands(
            g_logits=g_logits,
            logits_stride=logits_stride,
            g_end=g_logits + (Int64(rows - 1) * logits_stride + Int64(cols)) * self.element_bytes,
            g_grad=g_grad,
            grad_stride=grad_stride,
            g_target=g_target,
            g_bytes=g_bytes,
            g_items=g_items,
            g_loss=g_loss,
            g_lse=g_lse,
            g_denominator=g_denominator,
            g_z_loss=Int64(0),
            g_prediction=Int64(0),
            g_correct=Int64(0),
            g_workspace=g_workspace,
            rows=rows,
            row_step=Int32(1),
            slices=slices,
            denominator_kind=denominator_kind,
            items=items,
            ignore_index=ignore_index,
            logit_scale=logit_scale,
        )
        if row < rows:
            self.take_row(facts, it, s_scratch + self.scratch_bytes + thread * VECTOR_BYTES, row)
        elif rank == 0:
            self.take_up_losses(facts, it, row - rows, teams - rows - 1)

    # A row

    @cute.jit
    def take_row(self, facts: RowFacts, it: Operands, s_row, row):
        g_vectors, phase, vectors = self.span(it.g_logits, it.logits_stride, row, facts.cols)
        self.start_meeting(facts.s_scratch, facts.thread)
        if cutlass.const_expr(self.scalar):
            self.count_slice(facts, it, row)
        target = self.load_target(it.g_target, row, True, it.ignore_index)
        asked = self.ask_for_row(facts, it, s_row, g_vectors, phase, vectors, target)
        # Asked for now, so that it has come by the time that the row has.
        word = self.look(facts, it)
        y = self.column(facts, target)
        has_target = self.has_target(facts, phase, y)
        x_y = self.early_target(g_vectors, phase, y, has_target)
        if cutlass.const_expr(self.cluster > 1):
            # A block must not send to one that has not started.
            cluster_wait()
        highest, total = self.sum_row(facts, it, asked, g_vectors, phase, vectors, target)
        if cutlass.const_expr(self.gradient):
            # Before the exchange: after it all have the note, and none looks for the count any more.
            self.note_factor(facts, it, word)
        highest, total, _, _ = self.reduce_row(
            facts.s_scratch, Int32(0), facts.thread, facts.rank, facts.power, highest, total
        )
        x_y = self.late_target(facts, asked, phase, y, has_target, x_y)
        loss, _, lse, pull = self.row_loss(
            facts, Int64(y), y, x_y, Float32(1.0), highest, total, Float32(0.0), Float32(0.0)
        )
        # Who has the target's logit tells the loss; nobody has that of a target that is no class.
        if (has_target != 0) | ((y >= facts.cols) & (facts.first == 0)):
            self.tell(it, row, target != it.ignore_index, loss, lse)
        if cutlass.const_expr(self.gradient):
            g_out, _, _ = self.span(it.g_grad, it.grad_stride, row, facts.cols)
            if target != it.ignore_index:
                scale = load_element(Float32, facts.s_scratch + self.notes + NOTE_FACTOR, "shared")
                pull = divide(pull * scale, total)
                self.write_row(facts, asked, g_out, phase, vectors, y, has_target, x_y, highest, pull, scale)
            else:
                self.write_zeros(g_out, phase, vectors, facts.first, facts.chunks, facts.cols)

    @abc.abstractmethod
    def ask_for_row(self, facts, it, s_row, g_vectors, phase, vectors, target):
        """Begin to read a row, whose target has been asked for; what the others know as ``asked``: where it will be."""

    @abc.abstractmethod
    def sum_row(self, facts, it, asked, g_vectors, phase, vectors, target):
        """This thread's part of the row's maximum and sum, once the row is there."""

    @cute.jit
    def has_target(self, facts, phase, y):
        """Whether this thread has the vector of column y, 0 or 1."""
        found = Int32(0)
        if (y < facts.cols) & self.owns(facts.first, quotient(phase + y, self.width)):
            found = Int32(1)
        return found

    @cute.jit
    def early_target(self, g_vectors, phase, y, has_target):
        """The logit of column y, for the thread that has it, asked for with the row."""
        x_y = Float32(0.0)
        if has_target != 0:
            x_y = self.load_column(g_vectors, phase, y)
        return x_y

    def late_target(self, facts, asked, phase, y, has_target, x_y):
        """The same once the row is there."""
        return x_y

    def write_row(self, facts, asked, g_out, phase, vectors, y, has_target, x_y, highest, pull, scale):
        """Write the gradient of a row, in a form that has one."""

    @cute.jit
    def tell(self, it, row, live, loss, lse):
        if not live:
            loss = Float32(0.0)
            lse = Float32(0.0)
        store_float(it.g_lse + Int64(row) * 4, lse)
        if cutlass.const_expr(self.scalar):
            store_relaxed(it.g_workspace + (Int64(row) + WORKSPACE_LOSSES) * 4, message_of(loss))
        else:
            store_float(it.g_loss + Int64(row) * 4, loss)

    # The denominator

    def count_word(self, it):
        """The address of what has been counted."""
        return it.g_workspace + WORKSPACE_COUNT * 4

    @cute.jit
    def count_slice(self, facts: RowFacts, it: Operands, number):
        """Count a slice of the targets, each warp for itself: whole numbers, whose sum is the same in any order."""
        if self.counted(it) & (number < it.slices) & (facts.rank == 0):
            step = it.slices * self.row_threads
            share = self.share_of_rows(it, number * self.row_threads + facts.thread, step)
            for distance in (16, 8, 4, 2, 1):
                share = share + shuffle_xor_64(share, distance)
            if facts.thread % 32 == 0:
                add_64(self.count_word(it), share + (Int64(1) << WARPS_SHIFT))

    @cute.jit
    def share_of_rows(self, it: Operands, begin, step):
        """What the rows from ``begin`` on, ``step`` apart, add to a counted denominator."""
        share = Int64(0)
        for start in cutlass.range(begin, it.rows, step * TARGETS_UNROLL, unroll=1):
            targets = []
            for u in cutlass.range_constexpr(TARGETS_UNROLL):
                row = start + u * step
                targets.append(self.load_target(it.g_target, row, row < it.rows, it.ignore_index))
            for u in cutlass.range_constexpr(TARGETS_UNROLL):
                if targets[u] != it.ignore_index:
                    share = share + self.share_of_row(it, start + u * step)
        return share

    @cute.jit
    def look(self, facts, it):
        """What has been counted so far, for the thread that will need it."""
        word = Int64(0)
        if cutlass.const_expr(self.gradient):
            if facts.thread == 0:
                word = load_relaxed_64(self.count_word(it))
        return word

    @cute.jit
    def denominator(self, it: Operands, word):
        """What the sum is divided by, for one thread; ``word``: what it saw of the count.

        Which blocks run first is not known, so none waits for good: one that has looked in vain counts for itself.
        """
        value = Float32(1.0)
        if self.counted(it):
            complete = Int64(it.slices * self.warps) << WARPS_SHIFT
            looks = Int32(0)
            while (word < complete) & (looks < LOOKS):
                word = load_relaxed_64(self.count_word(it))
                looks = looks + 1
            if word < complete:
                word = complete + self.share_of_rows(it, Int32(0), Int32(1))
            value = float_of(word - complete)
        return self.or_given(it, value)

    @cute.jit
    def note_factor(self, facts, it, word):
        """The factor of the gradient, for the block."""
        if facts.thread == 0:
            factor = divide(it.logit_scale, self.denominator(it, word))
            store_element(Float32, facts.s_scratch + self.notes + NOTE_FACTOR, factor, "shared")

    # The sum over all rows

    @cute.jit
    def take_up_losses(self, facts: RowFacts, it: Operands, number, last):
        """Add one slice of the losses up; block number ``last`` then all slices."""
        vectors = (it.rows + 3) // 4
        size = (vectors + last) // (last + 1)
        end = smaller(number * size + size, vectors)
        g_losses = it.g_workspace + WORKSPACE_LOSSES * 4
        step = self.row_threads * LOSSES_UNROLL
        value = Float32(0.0)
        for vector in cutlass.range(number * size + facts.thread, end, step, unroll=1):
            value = value + self.taken_up(g_losses, it.rows, vector, end, self.row_threads)
        value = self.sum_block(facts.s_scratch, facts.thread, self.row_threads, value)
        if number < last:
            if facts.thread == 0:
                store_relaxed(it.g_workspace + (Int64(number) + WORKSPACE_PARTS) * 4, message_of(value))
        elif facts.thread < 32:
            self.finish(facts, it, value, last)

    @cute.jit
    def taken_up(self, g_messages, count, vector, end, step):
        """The sum of messages: of the ``count`` that there are those in some vectors below ``end``, ``step`` apart.

        Waits for them, and leaves 0.
        """
        found = []
        for u in cutlass.range_constexpr(LOSSES_UNROLL):
            at = vector + u * step
            found.append(load_relaxed_four(g_messages + Int64(at) * VECTOR_BYTES, at < end))
        sums = []
        for u in cutlass.range_constexpr(LOSSES_UNROLL):
            at = vector + u * step
            g_vector = g_messages + Int64(at) * VECTOR_BYTES
            wanted = Int32(0)
            if at < end:
                wanted = count - 4 * at
            a, b, c, d = found[u]
            while self.lacks(wanted, a, b, c, d):
                a, b, c, d = load_relaxed_four(g_vector, at < end)
            if wanted > 0:
                store_relaxed_four(g_vector, [Int32(0)] * 4)
            sums.append((number_of(a) + number_of(b)) + (number_of(c) + number_of(d)))
        return tree(sums, add)

    def lacks(self, wanted, a, b, c, d):
        """Whether one of the first ``wanted`` messages has not come."""
        first, second = (wanted > 0) & (a == 0), (wanted > 1) & (b == 0)
        return first | second | (wanted > 2) & (c == 0) | (wanted > 3) & (d == 0)

    @cute.jit
    def finish(self, facts, it, value, parts):
        """Add the sums of all slices up, by one warp, and divide. ``value``: that of the last slice."""
        # Used after the sums, so that one latency does for both.
        word = load_relaxed_64(self.count_word(it))
        g_parts = it.g_workspace + WORKSPACE_PARTS * 4
        others = self.taken_up(g_parts, parts, facts.thread, (parts + 3) // 4, Int32(32))
        value = value + warp_reduce(others, add)
        if facts.thread == 0:
            denominator = self.denominator(it, word)
            store_float(it.g_loss, divide(value, denominator))
            if it.g_denominator != 0:
                store_float(it.g_denominator, denominator)
            # No block looks for the count any more: each has told its loss since.
            store_relaxed_64(self.count_word(it), Int64(0))


class CrossEntropyWhole(CrossEntropyPlain):
    """Rows that are all there from their sum to their end, so that their gradient can be written."""

    def __init__(self, *facts, gradient: bool, **more):
        super().__init__(*facts, **more)
        self.gradient = gradient

    @cute.jit
    def write_row(self, facts, asked, g_out, phase, vectors, y, has_target, x_y, highest, pull, scale):
        """Write pull * 2**((t - highest) * power) - scale * [c = y].

        Who has stored the target's element stores it once more: two stores of one thread keep their order.
        """
        if cutlass.const_expr(self.ragged):
            wanted, at, offset = self.end_of_row(facts.first, phase, vectors, facts.cols)
            if wanted:
                x = self.element_at_end(asked, offset)
                self.store_end(g_out, at, self.gradient_values(facts, [x], at - phase, highest, pull, scale)[0])
                if at - phase == y:
                    self.target_gradient(facts, y, x, Float32(1.0), g_out, phase, highest, pull, scale)
            if not self.whole(quotient(phase + y, self.width), phase, vectors, facts.cols):
                has_target = Int32(0)
        self.write_vectors(facts, asked, g_out, phase, vectors, highest, pull, scale)
        if has_target != 0:
            self.target_gradient(facts, y, x_y, Float32(1.0), g_out, phase, highest, pull, scale)

    @abc.abstractmethod
    def element_at_end(self, asked, offset):
        """This lane's element at the row's ends."""

    @abc.abstractmethod
    def write_vectors(self, facts, asked, g_out, phase, vectors, highest, pull, scale):
        """Write the vectors that are all of the row, without the target's own term."""


class CrossEntropyHeld(CrossEntropyWhole):
    """Rows are copied to shared memory; ``eviction``: the L2's policy for them."""

    def __init__(self, *facts, eviction: Eviction | None, **more):
        super().__init__(*facts, **more)
        self.eviction = eviction

    @cute.jit
    def ask_for_row(self, facts, it, s_row, g_vectors, phase, vectors, target):
        """Start the copies of a row; of one that is ignored those of the first chunks, of which nothing is used."""
        low, high = self.inside(g_vectors, vectors, it.g_logits, it.g_end)
        policy = self.policy()
        self.fill_tails(s_row, facts.chunks, facts.cols, facts.first, self.lowest())
        early = larger(facts.chunks // EARLY_PART, Int32(1))
        self.start_between(s_row, g_vectors, facts.first, Int32(0), early, low, high, policy)
        # To wait for the target before that would leave the memory idle meanwhile.
        if target != it.ignore_index:
            self.start_between(s_row, g_vectors, facts.first, early, facts.chunks, low, high, policy)
        self.copy_ends(s_row, g_vectors, facts.first, phase, vectors, low, high, facts.cols)
        commit()
        return s_row

    @cute.jit
    def sum_row(self, facts, it, asked, g_vectors, phase, vectors, target):
        wait(0)
        slots = facts.chunks * self.unroll
        self.mask_ends([asked], facts.first, phase, vectors, slots, facts.cols, Float32(float("-inf")))
        highest = Float32(LOWEST)
        total = Float32(0.0)
        for chunk in cutlass.range(facts.chunks, unroll=1):
            highest, total = self.absorb_words(self.staged_words(asked, chunk), facts.power, highest, total)
        return highest, total

    def early_target(self, g_vectors, phase, y, has_target):
        return Float32(0.0)

    @cute.jit
    def late_target(self, facts, asked, phase, y, has_target, x_y):
        if has_target != 0:
            vector, element = quotient(phase + y, self.width), remainder(phase + y, self.width)
            s_vector = self.slot(asked, quotient(vector - facts.first, self.step))
            x_y = load_element(self.dtype, s_vector + element * self.element_bytes, "shared")
        return x_y

    def element_at_end(self, asked, offset):
        return load_element(self.dtype, asked + offset, "shared")

    @cute.jit
    def write_vectors(self, facts, asked, g_out, phase, vectors, highest, pull, scale):
        for chunk in cutlass.range(facts.chunks, unroll=1):
            for u in cutlass.range_constexpr(self.unroll):
                index = chunk * self.unroll + u
                vector = self.vector(facts.first, index)
                raw = unpack(self.dtype, load_shared(self.slot(asked, index)))
                values = self.gradient_values(facts, raw, vector * self.width - phase, highest, pull, scale)
                whole = self.whole(vector, phase, vectors, facts.cols)
                store_global(g_out + Int64(vector) * VECTOR_BYTES, pack(self.dtype, values), whole)


class CrossEntropyStreamed(CrossEntropyPlain):
    """The loss alone of rows that go through registers: each chunk is asked for while the one before is summed."""

    def ask_for_row(self, facts, it, s_row, g_vectors, phase, vectors, target):
        return self.chunk_words(facts, g_vectors, phase, vectors, Int32(0))

    @cute.jit
    def sum_row(self, facts, it, asked, g_vectors, phase, vectors, target):
        highest = Float32(LOWEST)
        total = Float32(0.0)
        words = asked
        chunks = facts.chunks
        if target == it.ignore_index:
            chunks = Int32(0)
        for chunk in cutlass.range(chunks, unroll=1):
            coming = self.chunk_words(facts, g_vectors, phase, vectors, chunk + 1)
            highest, total = self.absorb_values(unpack(self.dtype, words), facts.power, highest, total)
            words = coming
        if cutlass.const_expr(self.ragged):
            wanted, at, _ = self.end_of_row(facts.first, phase, vectors, facts.cols)
            if wanted & (chunks > 0):
                x = load_element(self.dtype, g_vectors + Int64(at) * self.element_bytes)
                highest, total = self.absorb_values([x], facts.power, highest, total)
        return highest, total

    def chunk_words(self, facts, g_vectors, phase, vectors, chunk):
        """The words of a chunk, -inf where a vector is not (all of) the row's."""
        return self.load_words(g_vectors, facts.first, chunk, phase, vectors, facts.cols, self.lowest())


class CrossEntropyInRegisters(CrossEntropyWhole, RowsInRegisters):
    """Rows are in registers; ``early``: how many of a thread's vectors are asked for before the target is known."""

    def __init__(self, *facts, early: int, **more):
        super().__init__(*facts, **more)
        self.early = early

    @cute.jit
    def ask_for_row(self, facts, it, s_row, g_vectors, phase, vectors, target):
        row = g_vectors, facts.first, phase, vectors, facts.cols
        words = self.ask_between(0, self.early, *row, self.lowest())
        if cutlass.const_expr(self.early < self.unroll):
            late = [self.lowest()] * ((self.unroll - self.early) * VECTOR_BYTES // 4)
            if target != it.ignore_index:
                late = self.ask_between(self.early, self.unroll, *row, self.lowest())
            words = words + late
        return words, self.ask_for_end(*row, Float32(float("-inf")))

    def sum_row(self, facts, it, asked, g_vectors, phase, vectors, target):
        return self.sum_registers(*asked, facts.power)

    def element_at_end(self, asked, offset):
        _, end = asked
        return end

    def write_vectors(self, facts, asked, g_out, phase, vectors, highest, pull, scale):
        words, _ = asked
        for u in range(self.unroll):
            col = self.vector(facts.first, u) * self.width - phase
            values = self.gradient_values(facts, self.vector_values(words, u), col, highest, pull, scale)
            self.store_vector(g_out, facts.first, u, phase, vectors, facts.cols, pack(self.dtype, values))
