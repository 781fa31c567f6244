"""The forward's loops over rows, run in Python: what they read has arrived, is the row's own, and is taken once."""

import itertools
from types import SimpleNamespace

import pytest

pytest.importorskip("tvm_ffi", reason="cutedsl: apache-tvm-ffi is not installed")
pytest.importorskip("cutlass.cute", reason="cutedsl: nvidia-cutlass-dsl is not installed")

from cutedsl.plain import plain
from cutlass import BFloat16
from loss_cutedsl import _cross_entropy_forward, _cross_entropy_rows, _schedule

IGNORED = -100
CHUNKS = 3


class Model(_cross_entropy_forward.CrossEntropyForward):
    """One thread of a block: the loops are the kernel's, what they call keeps a record.

    A row's address is its number, and a slot of shared memory holds (row, chunk) once that has arrived.
    """

    held_rows = plain(_cross_entropy_forward.CrossEntropyForward.held_rows)
    start_rows = plain(_cross_entropy_forward.CrossEntropyForward.start_rows)
    streamed_rows = plain(_cross_entropy_forward.CrossEntropyForward.streamed_rows)
    start_chunks = plain(_cross_entropy_forward.CrossEntropyForward.start_chunks)
    start_chunk = plain(_cross_entropy_forward.CrossEntropyForward.start_chunk)
    coming_row = plain(_cross_entropy_forward.CrossEntropyForward.coming_row)

    def __init__(self, schedule, targets, gradient):
        super().__init__(
            BFloat16, schedule, False, target_bits=64, gradient=gradient, scalar=True, weighted=False, smoothing=False,
            logits="linear", stats=False, shard=False,
        )  # fmt: skip
        self.targets = targets
        self.slots, self.groups_on_the_way, self.group = {}, [], []
        self.parities, self.read, self.zeros, self.announced = [], [], [], 0

    # Copies

    def copy(self, s_slot, content):
        # What a slot holds may not be read from when its copy starts.
        self.slots.pop(s_slot, None)
        self.group.append((s_slot, content))

    def commit(self):
        self.groups_on_the_way.append(self.group)
        self.group = []

    def wait(self, pending):
        while len(self.groups_on_the_way) > pending:
            self.slots.update(self.groups_on_the_way.pop(0))

    def start_row(self, s_row, g_vectors, first, chunks, low, high):
        if low < high:
            self.copy(int(s_row), (g_vectors, 0))

    def start_part(self, s_chunk, g_vectors, first, chunk, phase, vectors, low, high, cols):
        if low < high:
            self.copy(int(s_chunk), (g_vectors, int(chunk)))

    # Rows

    def load_target(self, g_target, row, wanted, otherwise):
        return self.targets[int(row)] if wanted else otherwise

    def span(self, g_tensor, stride, row, cols):
        return int(row), 0, 1

    def inside(self, g_vectors, vectors, g_begin, g_end):
        return 0, vectors

    def sum_held(self, facts, s_row, phase, anchor):
        self.read.append(self.slots[int(s_row)])
        return (0,) * 6

    def absorb(self, facts, s_chunk, place, chunk, phase, anchor, *sums):
        self.read.append(self.slots[int(s_chunk)])
        assert self.read[-1][1] == chunk
        return sums

    def target_logit(self, g_vectors, phase, y, cols):
        self.of_target = g_vectors
        return 0.0

    def finish(self, facts, parity, *sums):
        self.parities.append(int(parity))
        return sums

    def row_loss(self, facts, target, *rest):
        assert self.read[-1][0] == self.of_target, "the target's logit and the sums are of one row"
        assert target == self.targets[self.of_target]
        return 0.0, 0.0, 0.0, 0.0

    def write_gradient(self, facts, s_row, g_vectors, *rest):
        assert self.slots[int(s_row)] == (g_vectors, 0)
        *_, g_next, low, high = rest
        self.start_row(s_row, g_next, 0, 1, low, high)

    def write_zeros(self, g_out, *rest):
        self.zeros.append(g_out)

    def announce(self, *rest):
        self.announced += 1

    def denominator(self, facts, it):
        return 1.0

    def nothing(self, *rest):
        return 0.0

    copy_edges = mask_edges = mask_chunk = write_stats = column = target_weight = nothing
    first_column = share_of_denominator = nothing


def run(monkeypatch, schedule, rows, order, gradient, ignored):
    """All blocks, one after the other, and the addresses that floats were stored to."""
    targets = [IGNORED if row in ignored else 7 for row in range(rows)]
    stored, done = [], []
    module = _cross_entropy_forward
    it = module.Operands(**dict.fromkeys(module.Operands._fields, 0))
    it = it._replace(rows=rows, row_step=len(order), ignore_index=IGNORED)
    facts = _cross_entropy_rows.RowFacts(**dict.fromkeys(_cross_entropy_rows.RowFacts._fields, 0))
    facts = facts._replace(cols=8, chunks=1 if gradient else CHUNKS)
    in_python = {
        "cutlass": SimpleNamespace(
            const_expr=bool, range_constexpr=range, range=lambda *bounds, unroll: range(*map(int, bounds))
        ),
        "divide": lambda a, b: 1.0,
        "store_float": lambda g_address, value: stored.append(int(g_address)),
    }
    for name, value in in_python.items():
        monkeypatch.setattr(module, name, value)
    for block in order:
        model = Model(schedule, targets, gradient)
        monkeypatch.setattr(module, "commit", model.commit)
        monkeypatch.setattr(module, "wait", model.wait)
        if gradient:
            model.start_rows(facts, it, 0, 1, block)
            model.held_rows(facts, it, 0, 1, block, targets[block], 1.0)
        else:
            cursor = model.start_chunks(facts, it, 0, block)
            model.streamed_rows(facts, it, 0, block, targets[block], cursor)
        done.append(model)
    return done, stored


ROWS = [(1, 1), (3, 3), (4, 3), (6, 3), (7, 3), (29, 3), (9, 1)]


@pytest.mark.parametrize("ignored", ["none", "all", "the first", "every third"])
@pytest.mark.parametrize(("rows", "blocks"), ROWS)
@pytest.mark.parametrize(("form", "stages"), [("held", 1), ("held", 2), ("held", 3), ("streamed", 3), ("streamed", 4)])
def test_every_row_is_taken_once_and_from_its_own_copy(monkeypatch, form, stages, rows, blocks, ignored):
    gradient = form != "streamed"
    schedule = _schedule.Schedule(64, 64, 1, stages, 1, 1)
    ignored = {"none": [], "all": range(rows), "the first": range(blocks), "every third": range(0, rows, 3)}[ignored]
    chunks = range(1 if gradient else CHUNKS)
    for order in (range(blocks), range(blocks)[::-1]):
        done, stored = run(monkeypatch, schedule, rows, order, gradient, ignored)
        read = [content for model in done for content in model.read]
        assert sorted(read) == [(row, chunk) for row in range(rows) if row not in ignored for chunk in chunks]
        assert sorted(stored) == [4 * row for row in range(rows)], "an lse for each row"
        for model in done:
            # A warp that is a row ahead writes to the other half of the scratch.
            assert all(one != after for one, after in itertools.pairwise(model.parities))
        if gradient:
            assert sorted(row for model in done for row in model.zeros) == sorted(ignored)
            assert [model.announced for model in done] == [1] * blocks
