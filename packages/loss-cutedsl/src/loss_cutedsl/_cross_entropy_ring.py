"""Cross-entropy's forward through a ring (see ``_ring``): the plain case, at its best."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute

from ._cross_entropy_rows import RowFacts
from ._cross_entropy_total import (
    DENOMINATOR_BYTES_32,
    DENOMINATOR_BYTES_64,
    NOTE_DONE,
    CrossEntropyTotal,
    Operands,
)
from ._device import (
    LOWEST,
    add,
    add_64,
    divide,
    draw,
    exchange_add,
    float_of,
    from_first_lane,
    larger,
    load_element,
    load_floats,
    load_integer,
    load_relaxed_64,
    load_shared_word,
    select_below,
    shuffle_xor_64,
    store_element,
    store_float,
    store_shared_word,
    store_word,
    tree,
    unpack,
    wait_for,
)
from ._ring import RingRows
from ._schedule import VECTOR_BYTES, Ring
from ._workspace import (
    RING_WORKSPACE_WORDS,
    WORKSPACE_COUNT,
    WORKSPACE_DONE,
    WORKSPACE_SLICES_DRAWN,
    WORKSPACE_SUMS,
)

# Vectors of losses that a thread adds at a time at the end: nothing else runs then, and each step costs a latency.
ROWS_UNROLL = 16

# What has been counted is one word, with the number of slices that are in it above.
SLICES_SHIFT = 48
MOST_RING_SLICES = 2**15 - 1
# For more rows than leave room for a step of so many.
FEW_RING_SLICES = 255
# Targets of a slice that a lane counts at a time.
TARGETS_UNROLL = 8

# A note: the factor of the gradient.
NOTE_FACTOR = 12


def slices_and_words(rows: int, teams: int, slices: int) -> tuple[int, int]:
    """Slices that are counted of at most ``slices``, and 64-bit words of the workspace."""
    # Their number is bounded for the step of the loop over targets, which must not count beyond 32 bits.
    return min(MOST_RING_SLICES if rows < 2**31 - 2**24 else FEW_RING_SLICES, slices), RING_WORKSPACE_WORDS


class CrossEntropyRing(RingRows, CrossEntropyTotal):
    """Loss of every row, their sum and, with ``gradient``, the finished gradient: logits read once.

    The losses are kept by row: which group takes a row is not known, and their sum keeps its order.

    Compile-time facts as in ``CrossEntropyForward`` and ``RingRows``.
    """

    smoothing = weighted = stats = shard = False
    logits = "linear"

    def __init__(
        self, dtype, ring: Ring, ragged: bool, *, target_bits: int, gradient: bool, scalar: bool,
        evicts_first: bool,
    ):  # fmt: skip
        super().__init__(dtype, ring, ragged)
        self.evicts_first = evicts_first
        self.target_bits = target_bits
        self.gradient = gradient
        self.scalar = scalar
        # The gradient needs the denominator early: then slices of the targets are counted. Else each team counts its
        # own rows.
        self.counts = scalar and not gradient

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
        g_workspace: Int64,  # see ``_cross_entropy_total``
        g_row_loss: Int64,  # (R,) float32 of whole vectors
        rows: Int32,
        grid: Int32,
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
        self.cross_entropy_ring_kernel(
            g_logits, logits_stride, g_grad, grad_stride, g_target, g_bytes, g_items, g_loss, g_lse, g_denominator,
            g_workspace, g_row_loss, rows, slices, denominator_kind, items, cols, chunks, ignore_index, z_loss,
            logit_scale,
        ).launch(
            grid=[grid, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.cluster, 1, 1] if self.cluster > 1 else None,
            smem=shared_bytes,
            stream=stream,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def cross_entropy_ring_kernel(
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
        g_row_loss: Int64,
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
        """One group of threads draws rows, sums each and writes its gradient; one thread more fetches them."""
        fetches, group, thread = self.role()
        rank = cute.arch.block_idx()[0] % self.cluster
        s_block, s_scratch, s_control, s_ring = self.memory(group)
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
            g_row_loss=g_row_loss,
            rows=rows,
            row_step=self.teams(),
            slices=slices,
            denominator_kind=denominator_kind,
            items=items,
            ignore_index=ignore_index,
            logit_scale=logit_scale,
        )
        self.make_barriers(s_block)
        if fetches != 0:
            if cute.arch.thread_idx()[0] % 32 == 0:
                self.fetch_rows(facts, it, s_control, s_ring, self.team())
        else:
            self.take_rows(facts, it, s_control, s_ring + thread * VECTOR_BYTES, self.team())

    # The thread that fetches

    @cute.jit
    def fetch_rows(self, facts: RowFacts, it: Operands, s_control, s_ring, first_row):
        """Draw rows and fetch them.

        Of an ignored row there is one chunk, with nothing in it; of the first row all, for to know would take as long
        as to fetch.
        """
        at = self.fetched()
        row = first_row
        target = it.ignore_index + Int64(1)
        while row < it.rows:
            g_vectors, phase, vectors = self.span(it.g_logits, it.logits_stride, row, facts.cols)
            low, high = self.inside(g_vectors, vectors, it.g_logits, it.g_end)
            chunks = facts.chunks
            if target == it.ignore_index:
                chunks = Int32(1)
                high = Int32(0)
            row, at = self.fetch_row(facts, it, s_control, s_ring, g_vectors, low, high, chunks, at)
            target = self.load_target(it.g_target, row, row < it.rows, it.ignore_index)

    # The threads that sum

    @cute.jit
    def take_rows(self, facts: RowFacts, it: Operands, s_control, s_ring, first_row):
        """Sum each row as it comes, write its gradient, and leave the end to the team that is done last."""
        target = self.load_target(it.g_target, first_row, first_row < it.rows, it.ignore_index)
        if cutlass.const_expr(self.scalar and self.gradient):
            self.count_slices(facts, it)
        count = Int64(0)
        if first_row >= it.rows:
            self.announce(facts, it, count)
        row = first_row
        place = Int32(0)
        parity = Int32(0)
        turn = Int32(0)
        while row < it.rows:
            coming = Int32(0)
            if (target != it.ignore_index) | (row == first_row):
                place, parity, turn, coming, target, count = self.take_row(
                    facts, it, s_control, s_ring, row, row == first_row, target, place, parity, turn, count
                )
            else:
                place, parity, turn, coming = self.pass_row(facts, it, s_control, row, place, parity, turn, count)
                target = self.coming_target(it, coming)
            row = coming
        self.finish_sum(facts, it)

    def coming_target(self, it, coming):
        return self.load_target(it.g_target, coming, coming < it.rows, it.ignore_index)

    @cute.jit
    def take_row(self, facts, it, s_control, s_ring, row, is_first, target, place, parity, turn, count):
        g_vectors, phase, vectors = self.span(it.g_logits, it.logits_stride, row, facts.cols)
        live = Int32(target != it.ignore_index)
        y = self.column(facts, target)
        x_y = self.target_logit(g_vectors, phase, y, facts.cols)
        share = Int64(0)
        if cutlass.const_expr(self.counts):
            if (live != 0) & (facts.first == 0):
                share = self.whole_share(it, row)
        held = []
        if cutlass.const_expr(self.gradient):
            highest, total, coming, place, parity, held = self.hold_row(
                facts, it, s_control, s_ring, g_vectors, phase, vectors, place, parity
            )
        else:
            highest, total, coming, place, parity = self.stream_row(
                facts, it, s_control, s_ring, g_vectors, phase, vectors, place, parity
            )
            # On its way while the row is reduced.
            coming_target = self.coming_target(it, coming)
        if cutlass.const_expr(self.gradient):
            # Before the exchange: after it all have the note, and a cluster may be done with the workspace.
            if is_first:
                self.note_factor(facts, it)
        highest, total, _, _ = self.reduce_row(
            facts.s_scratch, turn, facts.thread, facts.rank, facts.power, highest, total
        )
        loss, _, lse, pull = self.row_loss(
            facts, Int64(y), y, x_y, Float32(1.0), highest, total, Float32(0.0), Float32(0.0)
        )
        if live == 0:
            loss = Float32(0.0)
            lse = Float32(0.0)
        count = count + share
        self.keep(facts, it, row, coming, loss, lse, count)
        if cutlass.const_expr(self.gradient):
            g_out, out_phase, out_vectors = self.span(it.g_grad, it.grad_stride, row, facts.cols)
            if live != 0:
                scale = load_element(Float32, facts.s_scratch + self.notes + NOTE_FACTOR, "shared")
                self.write_held(facts, held, g_out, phase, vectors, y, x_y, highest, divide(pull * scale, total), scale)
            else:
                self.write_zeros(g_out, phase, vectors, facts.first, facts.chunks, facts.cols)
            coming_target = self.coming_target(it, coming)
        return place, parity, (turn + 1) & 3, coming, coming_target, count

    @cute.jit
    def note_factor(self, facts, it):
        """The factor of the gradient, for the group."""
        if facts.thread == 0:
            factor = divide(it.logit_scale, self.denominator(it))
            store_element(Float32, facts.s_scratch + self.notes + NOTE_FACTOR, factor, "shared")

    @cute.jit
    def pass_row(self, facts, it, s_control, row, place, parity, turn, count):
        """An ignored row: its only chunk says which row is next."""
        wait_for(s_control + self.full + place * 8, parity)
        coming = load_shared_word(s_control + self.coming + place * 4)
        self.release(s_control, place)
        place, parity = self.behind(place, parity, self.stages)
        if cutlass.const_expr(self.cluster > 1):
            # Neither block may be more than a row ahead of the other, or numbers that were sent could be overwritten.
            self.exchange(facts.s_scratch, turn, facts.thread, facts.rank, [Float32(0.0), Float32(0.0)])
            turn = (turn + 1) & 3
        self.keep(facts, it, row, coming, Float32(0.0), Float32(0.0), count)
        if cutlass.const_expr(self.gradient):
            g_out, phase, vectors = self.span(it.g_grad, it.grad_stride, row, facts.cols)
            self.write_zeros(g_out, phase, vectors, facts.first, facts.chunks, facts.cols)
        return place, parity, turn, coming

    @cute.jit
    def keep(self, facts, it, row, coming, loss, lse, count):
        """Store what is known of a row; before its gradient, since to announce waits for what the thread has stored."""
        if facts.first == 0:
            store_float(it.g_lse + Int64(row) * 4, lse)
            if cutlass.const_expr(self.scalar):
                store_float(it.g_row_loss + Int64(row) * 4, loss)
            else:
                store_float(it.g_loss + Int64(row) * 4, loss)
        if coming >= it.rows:
            self.announce(facts, it, count)

    @cute.jit
    def hold_row(self, facts, it, s_control, s_ring, g_vectors, phase, vectors, place, parity):
        """This thread's part of a row's sums, and its vectors."""
        highest = Float32(LOWEST)
        total = Float32(0.0)
        coming = Int32(0)
        held = []
        for chunk in cutlass.range_constexpr(self.held):
            at_start = chunk == 0
            at_end = chunk >= self.held - self.end_chunks
            words, coming, place, parity = self.take_chunk(s_control, s_ring, place, parity, chunk == self.held - 1)
            words = self.with_edges(facts, it, words, g_vectors, Int32(chunk), phase, vectors, at_start, at_end)
            t = self.elements_of_row(facts, words, Int32(chunk), phase, vectors, at_start, at_end)
            highest, total = self.absorb_values(t, facts.power, highest, total)
            held = held + words
        return highest, total, coming, place, parity, held

    @cute.jit
    def stream_row(self, facts, it, s_control, s_ring, g_vectors, phase, vectors, place, parity):
        """This thread's part of a row's sums."""
        highest = Float32(LOWEST)
        total = Float32(0.0)
        coming = Int32(0)
        # A loop for each kind of chunk: in one, the compiler runs the code of both kinds for each chunk.
        head = 1 if self.ragged else 0
        tail = larger(facts.chunks - self.end_chunks, Int32(head))
        if cutlass.const_expr(self.ragged):
            highest, total, coming, place, parity = self.stream_chunk(
                facts, it, s_control, s_ring, g_vectors, Int32(0), phase, vectors, True, highest, total, place, parity
            )
        for chunk in cutlass.range(head, tail, unroll=1):
            highest, total, coming, place, parity = self.stream_chunk(
                facts, it, s_control, s_ring, g_vectors, chunk, phase, vectors, False, highest, total, place, parity
            )
        for chunk in cutlass.range(tail, facts.chunks, unroll=1):
            highest, total, coming, place, parity = self.stream_chunk(
                facts, it, s_control, s_ring, g_vectors, chunk, phase, vectors, True, highest, total, place, parity
            )
        return highest, total, coming, place, parity

    @cute.jit
    def stream_chunk(
        self, facts, it, s_control, s_ring, g_vectors, chunk, phase, vectors, at_edge: cutlass.Constexpr,
        highest, total, place, parity,
    ):  # fmt: skip
        words, coming, place, parity = self.take_chunk(s_control, s_ring, place, parity, at_edge)
        words = self.with_edges(facts, it, words, g_vectors, chunk, phase, vectors, at_edge, at_edge)
        t = self.elements_of_row(facts, words, chunk, phase, vectors, at_edge, at_edge)
        highest, total = self.absorb_values(t, facts.power, highest, total)
        return highest, total, coming, place, parity

    @cute.jit
    def write_held(self, facts, held, g_out, phase, vectors, y, x_y, highest, pull, scale):
        """Write the gradient of the row that is held: pull * 2**((t - highest) * power) - scale * [c = y]."""
        for index in cutlass.range_constexpr(len(held)):
            vector = self.vector(facts.first, Int32(index))
            # A branch, also where it is always taken: otherwise the compiler computes all vectors before it stores the
            # first, and the stores of a row come all at once.
            if vector < vectors:
                values = self.gradient_values(
                    facts, unpack(self.dtype, held[index]), vector * self.width - phase, highest, pull, scale
                )
                self.store_held(facts, index, len(held), g_out, phase, vectors, values)
        # The thread that stored the target's vector stores the target once more: its two stores keep their order.
        if (y < facts.cols) & self.owns(facts.first, (phase + y) // self.width):
            self.target_gradient(facts, y, x_y, Float32(1.0), g_out, phase, highest, pull, scale)

    # The denominator

    @cute.jit
    def count_slices(self, facts: RowFacts, it: Operands):
        """Draw slices of the targets and count what is not ignored, as long as there are any; by the team's first warp.

        So who waits for the result waits for warps that run. It is one word, and whole numbers: their sum is the same
        in any order.
        """
        if self.counted(it) & (facts.rank == 0) & (facts.thread < 32):
            lane = facts.thread
            number = from_first_lane(draw(it.g_workspace + WORKSPACE_SLICES_DRAWN * 4, lane == 0))
            while number < it.slices:
                drawn = draw(it.g_workspace + WORKSPACE_SLICES_DRAWN * 4, lane == 0)
                total = Int64(0)
                step = it.slices * 32
                for start in cutlass.range(number * 32 + lane, it.rows, step * TARGETS_UNROLL, unroll=1):
                    targets = []
                    for u in cutlass.range_constexpr(TARGETS_UNROLL):
                        row = start + u * step
                        targets.append(self.load_target(it.g_target, row, row < it.rows, it.ignore_index))
                    for u in cutlass.range_constexpr(TARGETS_UNROLL):
                        if targets[u] != it.ignore_index:
                            total = total + self.whole_share(it, start + u * step)
                for distance in (16, 8, 4, 2, 1):
                    total = total + shuffle_xor_64(total, distance)
                if lane == 0:
                    add_64(it.g_workspace + WORKSPACE_COUNT * 4, total + (Int64(1) << SLICES_SHIFT))
                number = from_first_lane(drawn)

    @cute.jit
    def whole_share(self, it: Operands, row):
        """What a row that is not ignored adds to a counted denominator."""
        value = Int64(1)
        if it.denominator_kind == DENOMINATOR_BYTES_32:
            value = load_integer(32, it.g_bytes + Int64(row) * 4)
        if it.denominator_kind == DENOMINATOR_BYTES_64:
            value = load_integer(64, it.g_bytes + Int64(row) * 8)
        return value

    @cute.jit
    def denominator(self, it: Operands):
        """What the sum is divided by, once all slices have been counted; for one thread."""
        word = Int64(0)
        if self.counted(it):
            word = load_relaxed_64(it.g_workspace + WORKSPACE_COUNT * 4)
            while (word >> SLICES_SHIFT) < Int64(it.slices):
                word = load_relaxed_64(it.g_workspace + WORKSPACE_COUNT * 4)
        return self.denominator_of(it, word)

    @cute.jit
    def denominator_of(self, it: Operands, word):
        """What the sum is divided by, from the word of what has been counted, of which nothing is missing."""
        value = Float32(1.0)
        if self.counted(it):
            if cutlass.const_expr(self.gradient):
                word = word - (Int64(it.slices) << SLICES_SHIFT)
            value = float_of(word)
        return self.or_given(it, value)

    # The sum over all rows

    @cute.jit
    def announce(self, facts: RowFacts, it: Operands, count):
        """Note how many teams were done before; ahead of it what the team has counted, for the one that is last."""
        if facts.first == 0:
            if cutlass.const_expr(self.counts):
                add_64(it.g_workspace + WORKSPACE_COUNT * 4, count)
            done_before = exchange_add(it.g_workspace + WORKSPACE_DONE * 4, Int32(1))
            store_shared_word(facts.s_scratch + self.notes + NOTE_DONE, done_before)

    @cute.jit
    def finish_sum(self, facts: RowFacts, it: Operands):
        """The team that is done last adds the losses up, and leaves the workspace at 0."""
        if facts.rank == 0:
            self.meet()
            if load_shared_word(facts.s_scratch + self.notes + NOTE_DONE) == self.teams() - 1:
                if cutlass.const_expr(self.scalar):
                    # Of all teams, for they have announced. Used after the losses, so that one latency does for both.
                    word = load_relaxed_64(it.g_workspace + WORKSPACE_COUNT * 4)
                    # The group meets here: nobody resets the workspace before the word has been read.
                    loss = self.sum_rows(facts, it)
                    if facts.thread == 0:
                        denominator = self.denominator_of(it, word)
                        store_float(it.g_loss, divide(loss, denominator))
                        if it.g_denominator != 0:
                            store_float(it.g_denominator, denominator)
                if facts.thread < WORKSPACE_SUMS:
                    store_word(it.g_workspace + Int64(facts.thread) * 4, Int32(0))

    @cute.jit
    def sum_rows(self, facts: RowFacts, it: Operands):
        """The sum of the rows' losses, in an order that depends on nothing but how many there are."""
        value = Float32(0.0)
        for start in cutlass.range(4 * facts.thread, it.rows, 4 * self.row_threads * ROWS_UNROLL, unroll=1):
            sums = []
            for u in cutlass.range_constexpr(ROWS_UNROLL):
                row = start + 4 * u * self.row_threads
                losses = load_floats(it.g_row_loss + Int64(row) * 4, row < it.rows)
                sums = sums + [select_below(row + i, it.rows, losses[i], Float32(0.0)) for i in range(4)]
            value = value + tree(sums, add)
        return self.sum_block(facts.s_scratch, facts.thread, self.row_threads, value)
