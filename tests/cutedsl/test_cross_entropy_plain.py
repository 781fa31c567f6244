"""The kernel of the plain case, all of it, run in Python by threads that take turns; see ``gpu_model``."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest

pytest.importorskip("tvm_ffi", reason="cutedsl: apache-tvm-ffi is not installed")
pytest.importorskip("cutlass.cute", reason="cutedsl: nvidia-cutlass-dsl is not installed")

import numpy as np
import torch
from cutedsl.gpu_model import NAN, SHARED_BEGIN, Launch, Memory, float32, lowest, message_of
from cutedsl.test_memory import IGNORED, in_python
from cutlass import BFloat16, Float32
from loss_cutedsl import _cross_entropy_plain, _cross_entropy_total, _schedule, _workspace
from loss_cutedsl._schedule import PLAIN_ENTRY_WORDS, Schedule
from torch.nn import functional

LOGITS, GRAD, TARGET, BYTES, ITEMS, LOSS, LSE, DENOMINATOR, WORKSPACE = range(1, 10)
ITEM_COUNT = float32(7.5)
KINDS = {
    "none": _cross_entropy_total.DENOMINATOR_ONE,
    "sum": _cross_entropy_total.DENOMINATOR_ONE,
    "mean": _cross_entropy_total.DENOMINATOR_ROWS,
    "byte_mean, 4": _cross_entropy_total.DENOMINATOR_BYTES_32,
    "byte_mean, 8": _cross_entropy_total.DENOMINATOR_BYTES_64,
    "items": _cross_entropy_total.DENOMINATOR_VALUE,
    "items by pointer": _cross_entropy_total.DENOMINATOR_POINTER,
}


class Held(_cross_entropy_plain.CrossEntropyHeld):
    lowest = lowest


class Streamed(_cross_entropy_plain.CrossEntropyStreamed):
    lowest = lowest


class InRegisters(_cross_entropy_plain.CrossEntropyInRegisters):
    lowest = lowest


class Hasty(Held):
    def lacks(self, wanted, a, b, c, d):
        """Never: what has not come is taken for 0."""
        return False


class Case(NamedTuple):
    """A launch. ``gap``, ``grad_gap``: elements between rows; ``offset``: of the first row, in a vector.

    ``slices``: of the targets, that are counted; ``parts``: slices of the losses.
    """

    schedule: Schedule
    rows: int
    cols: int
    gradient: bool = True
    reduction: str = "mean"
    dtype: type = Float32
    offset: int = 0
    gap: int = 0
    grad_gap: int = 0
    in_place: bool = False
    ignored: str = "every third"
    beyond: bool = False  # targets that are no class
    masked: bool = False  # logits that are -inf
    slices: int = 2
    parts: int = 1
    held: bool = True
    at_once: bool = False  # rows that are all in registers
    missing: int | None = None  # column from which rows that are ignored have no memory
    target_bits: int = 64
    z_loss: float = 0.0
    scale: float = 1.0

    def targets(self):
        targets = [(5 * row + 1) % self.cols for row in range(self.rows)]
        if self.beyond:
            targets[1::4] = [(self.cols, -1, 2**31 - 1)[i % 3] for i in range(len(targets[1::4]))]
        out = {"none": [], "all": range(self.rows), "first": [0], "every third": range(2, self.rows, 3)}
        out["all but first"], out["all but last"] = range(1, self.rows), range(self.rows - 1)
        for row in out[self.ignored]:
            targets[row] = IGNORED
        return targets

    def logits(self):
        random = np.random.default_rng(self.cols)
        x = (3 * random.standard_normal((self.rows, self.cols)) + 40).astype(float32)
        if self.masked:
            # Whole vectors, and one here and there; not the targets.
            x[:, self.cols // 2 :] = -np.inf
            x[:, ::7] = -np.inf
        for row, target in enumerate(self.targets()):
            if 0 <= target < self.cols:
                x[row, target] = float32(41.5)
        return x


def launch(monkeypatch, case, seed, resident, workspace, held_class=Held):
    """Loss, denominator, lse and gradient, as the kernel leaves them, and the workspace."""
    size = case.dtype.width // 8
    width = 16 // size
    stride, grad_stride = case.cols + case.gap, case.cols + (case.gap if case.in_place else case.grad_gap)
    ragged = any(number % width for number in (case.offset, case.cols, stride, grad_stride))
    vectors = _schedule.most_vectors(case.cols, width, ragged)
    schedule, scalar = case.schedule, case.reduction != "none"
    eviction = "evict_last" if case.gradient else "evict_first"
    kernel_class, facts = Streamed, {}
    if case.held:
        kernel_class, facts = held_class, {"gradient": case.gradient, "eviction": eviction}
    elif case.at_once:
        schedule, full = _schedule.in_registers(schedule, case.cols * size)
        early = _schedule.asked_early(schedule, case.gradient)
        facts = {"gradient": case.gradient, "full": full, "early": early, "eviction": eviction}
        kernel_class = InRegisters
    memory = Memory()

    arguments = dict.fromkeys(("g_grad",), 0) | denominator_arguments(memory, case)
    arguments["g_logits"] = memory.matrix(LOGITS, size, case.logits(), stride, case.offset, case.in_place)
    for row, target in enumerate(case.targets()):
        for col in range(case.missing or case.cols, case.cols):
            if target == IGNORED:
                del memory.cells[arguments["g_logits"] + (row * stride + col) * size]
    if case.gradient:
        empty = np.full((case.rows, case.cols), NAN, float32)
        arguments["g_grad"] = (
            arguments["g_logits"]
            if case.in_place
            else memory.matrix(GRAD, size, empty, grad_stride, case.offset, writable=True)
        )
    kernel = in_python(kernel_class)(case.dtype, schedule, ragged, target_bits=case.target_bits, scalar=scalar, **facts)
    Launch(
        kernel, memory, (case.rows + case.parts * scalar) * schedule.cluster, seed, resident,
        shared_bytes=_schedule.shared_bytes(schedule, vectors, int(case.held), PLAIN_ENTRY_WORDS),
        word_bytes=kernel.scratch_bytes, neighbours_write=case.in_place and ragged,
    ).run(
        monkeypatch, kernel.cross_entropy_plain_kernel, logits_stride=stride, grad_stride=grad_stride,
        g_target=memory.vector(TARGET, case.target_bits // 8, case.targets(), False),
        g_loss=memory.vector(LOSS, 4, [None] * (1 if scalar else case.rows)),
        g_lse=memory.vector(LSE, 4, [None] * case.rows),
        g_workspace=memory.vector(WORKSPACE, 4, workspace) if scalar else 0, rows=case.rows, slices=case.slices,
        denominator_kind=KINDS[case.reduction], items=ITEM_COUNT, cols=case.cols, chunks=schedule.chunks(vectors),
        ignore_index=IGNORED, z_loss=float32(case.z_loss), logit_scale=float32(case.scale), **arguments,
    )  # fmt: skip

    grad = None
    if case.gradient:
        grad = memory.written_matrix(arguments["g_grad"], size, (case.rows, case.cols), grad_stride)
    return [*loss_denominator_lse(memory, case), grad], memory.words(WORKSPACE, len(workspace)) if scalar else workspace


def byte_counts(case):
    return [3 * row + 1 for row in range(case.rows)]


def denominator_arguments(memory, case):
    """What a kernel finds the denominator by, and where it leaves it."""
    arguments = dict.fromkeys(("g_bytes", "g_items", "g_denominator"), 0)
    if case.reduction.startswith("byte_mean"):
        arguments["g_bytes"] = memory.vector(BYTES, int(case.reduction[-1]), byte_counts(case), False)
    if case.reduction == "items by pointer":
        arguments["g_items"] = memory.vector(ITEMS, 4, [ITEM_COUNT], False)
    if case.reduction != "none":
        arguments["g_denominator"] = memory.vector(DENOMINATOR, 4, [None])
    return arguments


def loss_denominator_lse(memory, case):
    scalar = case.reduction != "none"
    found = memory.words(LOSS, 1 if scalar else case.rows), memory.words(DENOMINATOR, 1) if scalar else [1.0]
    return [np.array(values, float32) for values in (*found, memory.words(LSE, case.rows))]


def exact(case):
    target = torch.tensor(case.targets())
    x = torch.tensor(case.logits()).double().requires_grad_()
    # From the maximum: far from zero float64 has no digits to spare either.
    top = x.detach().max(-1, keepdim=True).values
    of_row = case.scale * (x - top)
    lse = of_row.logsumexp(-1) + case.scale * top[:, 0]
    live, beyond = target != IGNORED, (target != IGNORED) & ((target < 0) | (target >= case.cols))
    each = functional.cross_entropy(of_row, target.masked_fill(beyond, 0), reduction="none")
    each = torch.where(live, each + case.z_loss * lse**2, 0.0)
    (grad,) = torch.autograd.grad(each.sum(), x)
    each, grad = each.detach().masked_fill(beyond, np.nan), grad.masked_fill(beyond[:, None], np.nan)
    denominator = {
        "mean": live.sum(), "none": 1.0, "sum": 1.0, "items": ITEM_COUNT, "items by pointer": ITEM_COUNT,
    }.get(case.reduction, torch.tensor(byte_counts(case))[live].sum())  # fmt: skip
    denominator = torch.as_tensor(float(denominator), dtype=torch.float64)
    # Ignored rows have a gradient of 0 whatever they are divided by.
    grad = torch.where(live[:, None], grad / denominator, 0.0)
    loss = each if case.reduction == "none" else (each.sum() / denominator)[None]
    return loss, denominator[None], torch.where(live, lse.detach(), 0.0), grad if case.gradient else None


def check(monkeypatch, case, seeds=2):
    """Launches one after the other, each in another order and with the workspace that the one before left.

    All clusters at a time, or one beside those that wait for the losses, who then are to look in vain but once.
    """
    workspace = [0] * (2 * _workspace.plain_workspace_words(case.rows))
    first = None
    for seed in range(seeds):
        few = seed % 2
        with monkeypatch.context() as patch:
            patch.setattr(_cross_entropy_plain, "LOOKS", 1 if few else 10**9)
            resident = case.parts + 1 if few else case.parts + case.rows
            got, workspace = launch(patch, case, seed, resident, workspace)
        assert workspace == [0] * len(workspace)
        first = first or got
        for value, before, wanted in zip(got, first, exact(case), strict=True):
            if wanted is not None:
                assert value.tobytes() == before.tobytes(), "the order in which threads run shows"
                torch.testing.assert_close(torch.tensor(value).double(), wanted, rtol=1e-5, atol=4e-6, equal_nan=True)


# Threads of a block, blocks of a cluster, vectors a step.
ONE, TWO, PAIR, FOUR = (
    Schedule(threads, threads, cluster, 1, unroll, 1)
    for threads, cluster, unroll in [(64, 1, 2), (64, 1, 1), (64, 2, 2), (32, 4, 1)]
)


def schedules(*some):
    return pytest.mark.parametrize("schedule", some, ids=lambda schedule: "-".join(map(str, schedule[:5])))


gradients = pytest.mark.parametrize("gradient", [False, True], ids=["loss", "gradient"])


@schedules(ONE, TWO, PAIR, FOUR)
@gradients
def test_rows_of_several_chunks(monkeypatch, gradient, schedule):
    check(monkeypatch, Case(schedule, 3, 1100, gradient, masked=schedule.unroll == 2))


@schedules(ONE, TWO, PAIR, FOUR)
@pytest.mark.parametrize(
    ("gradient", "dtype", "cols", "offset", "gap", "grad_gap"),
    [
        (True, Float32, 261, 3, 0, 0), (False, Float32, 254, 1, 2, 0), (True, BFloat16, 77, 0, 0, 0),
        (True, BFloat16, 1019, 5, 8, 16), (False, BFloat16, 515, 7, 0, 0),
    ],
)  # fmt: skip
def test_ragged_rows(monkeypatch, gradient, dtype, cols, offset, gap, grad_gap, schedule):
    """The first begins and the last ends inside a vector that is not all of the tensor's."""
    check(monkeypatch, Case(schedule, 4, cols, gradient, "sum", dtype, offset, gap, grad_gap), seeds=1)


@schedules(ONE, TWO)
@pytest.mark.parametrize(
    ("dtype", "cols", "offset", "gap"),
    [(Float32, 1100, 0, 0), (Float32, 261, 3, 0), (BFloat16, 1019, 5, 8), (BFloat16, 24, 0, 0), (BFloat16, 3, 1, 0)],
)
def test_rows_that_stream(monkeypatch, dtype, cols, offset, gap, schedule):
    case = Case(schedule, 4, cols, False, dtype=dtype, offset=offset, gap=gap, held=False, masked=dtype is Float32)
    check(monkeypatch, case)


# Of one vector a thread and less, and of ends in vectors behind those of the threads: 257 and 1019. One warp has no
# exchange, which the gradient needs.
@pytest.mark.parametrize(
    ("schedule", "gradient"), [(TWO, False), (TWO, True), (FOUR._replace(cluster=1), False)],
    ids=["loss", "gradient", "loss of a warp"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("dtype", "cols", "offset", "gap"),
    [
        (Float32, 1100, 0, 0), (Float32, 256, 0, 0), (Float32, 257, 2, 1), (Float32, 261, 3, 0), (Float32, 96, 1, 3),
        (BFloat16, 1024, 0, 0), (BFloat16, 1023, 7, 1), (BFloat16, 1019, 5, 8), (BFloat16, 24, 0, 0),
        (BFloat16, 3, 1, 0),
    ],
)  # fmt: skip
def test_rows_in_registers(monkeypatch, dtype, cols, offset, gap, schedule, gradient):
    case = Case(
        schedule, 5, cols, gradient, dtype=dtype, offset=offset, gap=gap, grad_gap=gap, held=False, at_once=True,
        masked=dtype is Float32, beyond=cols > 1000,
    )  # fmt: skip
    check(monkeypatch, case)


@pytest.mark.parametrize("ignored", ["none", "all", "first", "all but first", "all but last"])
@pytest.mark.parametrize(
    ("schedule", "gradient"), [(TWO, True), (PAIR, False), (FOUR, True)], ids=["two", "pair", "four"]
)
def test_ignored_rows(monkeypatch, schedule, gradient, ignored):
    check(monkeypatch, Case(schedule, 5, 40, gradient, dtype=BFloat16, ignored=ignored))


@pytest.mark.parametrize("held", [True, False])
def test_of_an_ignored_row_a_quarter_is_read(monkeypatch, held):
    check(monkeypatch, Case(TWO, 5, 1024, held=held, at_once=not held, missing=256), seeds=1)


@pytest.mark.parametrize("reduction", KINDS)
@gradients
def test_reductions(monkeypatch, gradient, reduction):
    if not gradient or reduction != "none":
        check(monkeypatch, Case(TWO, 5, 36, gradient, reduction, z_loss=1e-3, scale=0.5), seeds=1)


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize(("schedule", "gradient"), [(TWO, False), (PAIR, True)], ids=["two", "pair"])
def test_counts(monkeypatch, schedule, gradient, slices, rows):
    slices = min(rows, slices)
    check(monkeypatch, Case(schedule, rows, 24, gradient, ignored="none", slices=slices, target_bits=32))


@pytest.mark.parametrize("parts", [2, 3])
@schedules(ONE, FOUR)
def test_losses_are_added_in_parts(monkeypatch, schedule, parts):
    check(monkeypatch, Case(schedule, 7, 8, schedule is ONE, "byte_mean, 8", parts=parts))


def test_sums_that_are_added_before_they_have_come_are_found_out(monkeypatch):
    case = Case(ONE, 9, 8, False, "sum", parts=3)
    workspace = [0] * (2 * _workspace.plain_workspace_words(case.rows))
    got, after = launch(monkeypatch, case, 0, case.rows + case.parts, workspace, Hasty)
    assert after != workspace
    assert not np.allclose(got[0], exact(case)[0])


def run_alone(monkeypatch, memory, rows, function, **given):
    """Run a function of the kernel's by one block."""
    kernel = in_python(Held)(Float32, ONE, False, target_bits=64, gradient=False, scalar=True, eviction=None)
    launched = Launch(kernel, memory, 1, 0, 1, shared_bytes=kernel.scratch_bytes, word_bytes=kernel.scratch_bytes)
    it = SimpleNamespace(rows=rows, ignore_index=IGNORED, **given)

    def run():
        function(kernel, SimpleNamespace(thread=launched.me, rank=0, s_scratch=SHARED_BEGIN), it)

    launched.run(monkeypatch, run)


@pytest.mark.parametrize("rows", [1, 255, 256, 257, 600])
def test_more_losses_than_are_taken_up_at_a_time(monkeypatch, rows):
    monkeypatch.setattr(_cross_entropy_plain, "LOSSES_UNROLL", 1)
    losses = np.random.default_rng(rows).standard_normal(rows).astype(float32)
    losses[::5] = -0.0
    words = [0] * (2 * _workspace.plain_workspace_words(rows))
    at = _workspace.WORKSPACE_LOSSES
    words[at : at + rows] = map(message_of, losses)
    memory = Memory()
    run_alone(
        monkeypatch, memory, rows, lambda kernel, facts, it: kernel.take_up_losses(facts, it, 0, 0), slices=0,
        g_workspace=memory.vector(WORKSPACE, 4, words), g_loss=memory.vector(LOSS, 4, [None]), g_denominator=0,
        denominator_kind=KINDS["sum"],
    )  # fmt: skip
    np.testing.assert_allclose(memory.words(LOSS, 1)[0], losses.astype(float).sum(), rtol=1e-6, atol=1e-6)
    assert memory.words(WORKSPACE, len(words)) == [0] * len(words)


@pytest.mark.parametrize("rows", [1, 64, 65, 300])
@pytest.mark.parametrize("reduction", ["mean", "byte_mean, 4", "byte_mean, 8"])
def test_more_targets_than_are_counted_at_a_time(monkeypatch, reduction, rows):
    """By two blocks, one after the other."""
    monkeypatch.setattr(_cross_entropy_plain, "TARGETS_UNROLL", 2)
    case = Case(ONE, rows, 7, reduction=reduction)
    words = [0] * (2 * _workspace.plain_workspace_words(rows))
    for number in range(2):
        memory = Memory()
        arguments = denominator_arguments(memory, case)
        run_alone(
            monkeypatch, memory, rows, lambda kernel, facts, it, number=number: kernel.count_slice(facts, it, number),
            slices=2, g_workspace=memory.vector(WORKSPACE, 4, words), denominator_kind=KINDS[reduction],
            g_target=memory.vector(TARGET, 8, case.targets(), False), g_bytes=arguments["g_bytes"],
        )  # fmt: skip
        words = memory.words(WORKSPACE, len(words))
    wanted = [1 if reduction == "mean" else byte_counts(case)[row] for row in range(rows)]
    count = sum(wanted[row] for row, target in enumerate(case.targets()) if target != IGNORED)
    low, high = words[_workspace.WORKSPACE_COUNT :][:2]
    assert low + (high << 32) == count + (2 * ONE.threads // 32 << _cross_entropy_plain.WARPS_SHIFT)


class Far(Case):
    """Rows far from zero, whose target has their maximum."""

    def logits(self):
        random = np.random.default_rng(self.cols)
        largest = np.finfo(float32).max
        x = 3 * random.standard_normal((self.rows, self.cols))
        x[:8] += np.array([0.0, 1e4, -1e4, 1e6, -1e9, 1.2e9, -(2.0**32), 1e30])[:, None]
        x[8:11] = np.array([-largest, 7.0, largest])[:, None]
        for row, target in enumerate(self.targets()):
            x[row, target] = x[row].max()
        # Ties, masks and what is left of a row.
        x[10, 3:] = -1.0
        x[9, 1:20] = -largest
        return x.clip(-largest, largest).astype(float32)


@schedules(TWO, FOUR)
@gradients
def test_rows_far_from_zero(monkeypatch, gradient, schedule):
    reduction = "sum" if gradient else "none"
    check(monkeypatch, Far(schedule, 11, 140, gradient, reduction, ignored="none", scale=0.5), seeds=1)


@gradients
def test_rows_in_registers_far_from_zero(monkeypatch, gradient):
    reduction = "sum" if gradient else "none"
    case = Far(TWO, 11, 140, gradient, reduction, ignored="none", scale=0.5, held=False, at_once=True)
    check(monkeypatch, case, seeds=1)


class Sharp(Case):
    """Rows whose target has their maximum, beside which a large scale leaves nothing."""

    def logits(self):
        x = 3 * np.random.default_rng(self.cols).standard_normal((self.rows, self.cols))
        for row, target in enumerate(self.targets()):
            x[row, target] = x[row].max() + 0.5
        return x.astype(float32)


@pytest.mark.parametrize("held", [True, False])
def test_large_scales(monkeypatch, held):
    case = Sharp(TWO, 5, 140, False, "none", ignored="none", scale=1e8, held=held, at_once=not held)
    check(monkeypatch, case, seeds=1)


@schedules(TWO, FOUR)
@gradients
def test_targets_that_are_no_class(monkeypatch, gradient, schedule):
    check(monkeypatch, Case(schedule, 7, 26, gradient, "sum" if gradient else "none", beyond=True), seeds=1)


def test_targets_that_are_no_class_of_rows_that_stream(monkeypatch):
    check(monkeypatch, Case(TWO, 7, 26, False, "none", beyond=True, held=False), seeds=1)


@schedules(ONE, PAIR, FOUR)
@pytest.mark.parametrize(("cols", "offset", "gap"), [(264, 0, 0), (263, 1, 0), (37, 3, 2)])
def test_in_place(monkeypatch, cols, offset, gap, schedule):
    check(monkeypatch, Case(schedule, 5, cols, in_place=True, offset=offset, gap=gap), seeds=1)
