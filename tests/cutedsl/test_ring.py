"""The kernel with rings, all of it, run in Python by threads that take turns; see ``ring_model``."""

from typing import NamedTuple

import pytest

pytest.importorskip("tvm_ffi", reason="cutedsl: apache-tvm-ffi is not installed")
pytest.importorskip("cutlass.cute", reason="cutedsl: nvidia-cutlass-dsl is not installed")

import numpy as np
import torch
from cutedsl.ring_model import NAN, Launch, Memory, float32, lowest
from cutedsl.test_memory import IGNORED, in_python
from cutlass import BFloat16, Float32
from loss_cutedsl import _cross_entropy_ring, _cross_entropy_total, _schedule, _workspace
from loss_cutedsl._schedule import Ring
from torch.nn import functional

LOGITS, GRAD, TARGET, BYTES, ITEMS, LOSS, LSE, DENOMINATOR, WORKSPACE, ROW_LOSS = range(1, 11)
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


class Kernel(_cross_entropy_ring.CrossEntropyRing):
    lowest = lowest


class Late(Kernel):
    def announce(self, facts, it, count):
        """Before what has been counted is there."""
        if facts.first == 0:
            ring = _cross_entropy_ring
            done_before = ring.exchange_add(it.g_workspace + ring.WORKSPACE_DONE * 4, 1)
            ring.store_shared_word(facts.s_scratch + self.notes + ring.NOTE_DONE, done_before)
            ring.add_64(it.g_workspace + ring.WORKSPACE_COUNT * 4, count)


class Case(NamedTuple):
    """A launch. ``gap``, ``grad_gap``: elements between rows; ``offset``: of the first row, in a vector."""

    ring: Ring
    grid: int
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
    slices: int = 1
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


def launch(monkeypatch, case, seed, resident, workspace, kernel_class=Kernel):
    """Loss, denominator, lse and gradient, as the kernel leaves them, and the workspace."""
    size = case.dtype.width // 8
    width = 16 // size
    stride, grad_stride = case.cols + case.gap, case.cols + (case.gap if case.in_place else case.grad_gap)
    ragged = any(number % width for number in (case.offset, case.cols, stride, grad_stride))
    vectors = _schedule.most_vectors(case.cols, width, ragged)
    ring = case.ring._replace(held=case.ring.chunks(vectors) if case.gradient else 0)
    scalar = case.reduction != "none"
    memory = Memory()

    arguments = dict.fromkeys(("g_grad", "g_row_loss"), 0) | denominator_arguments(memory, case)
    arguments["g_logits"] = memory.matrix(LOGITS, size, case.logits(), stride, case.offset, case.in_place)
    if case.gradient:
        empty = np.full((case.rows, case.cols), NAN, float32)
        arguments["g_grad"] = (
            arguments["g_logits"]
            if case.in_place
            else memory.matrix(GRAD, size, empty, grad_stride, case.offset, writable=True)
        )
    if scalar:
        arguments["g_row_loss"] = memory.vector(ROW_LOSS, 4, [NAN] * (-(-case.rows // 4) * 4))
    kernel = in_python(kernel_class)(
        case.dtype, ring, ragged, target_bits=case.target_bits, gradient=case.gradient, scalar=scalar,
        evicts_first=not case.gradient and scalar,
    )  # fmt: skip
    word_bytes = kernel.groups * (kernel.scratch_bytes + kernel.control_bytes)
    Launch(
        kernel, memory, case.grid, seed, resident, shared_bytes=ring.shared_bytes(), word_bytes=word_bytes
    ).run(
        monkeypatch, kernel.cross_entropy_ring_kernel, logits_stride=stride, grad_stride=grad_stride,
        g_target=memory.vector(TARGET, case.target_bits // 8, case.targets(), False),
        g_loss=memory.vector(LOSS, 4, [None] * (1 if scalar else case.rows)),
        g_lse=memory.vector(LSE, 4, [None] * case.rows),
        g_workspace=memory.vector(WORKSPACE, 4, workspace), rows=case.rows, slices=case.slices,
        denominator_kind=KINDS[case.reduction], items=ITEM_COUNT, cols=case.cols, chunks=ring.chunks(vectors),
        ignore_index=IGNORED, z_loss=float32(case.z_loss), logit_scale=float32(case.scale), **arguments,
    )  # fmt: skip

    grad = None
    if case.gradient:
        grad = memory.written_matrix(arguments["g_grad"], size, (case.rows, case.cols), grad_stride)
    return [*loss_denominator_lse(memory, case), grad], memory.words(WORKSPACE, len(workspace))


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
    """Launches one after the other, each in another order and with the workspace that the one before left."""
    workspace = [0] * (2 * _workspace.RING_WORKSPACE_WORDS)
    first = None
    for seed in range(seeds):
        clusters = case.grid // case.ring.cluster
        got, workspace = launch(monkeypatch, case, seed, 1 if seed % 2 else clusters, workspace)
        assert workspace == [0] * len(workspace)
        first = first or got
        for value, before, wanted in zip(got, first, exact(case), strict=True):
            if wanted is not None:
                assert value.tobytes() == before.tobytes(), "the order in which threads run shows"
                tolerance = 4e-6 * max(1.0, np.nan_to_num(wanted.abs().max().item()))
                torch.testing.assert_close(
                    torch.tensor(value).double(), wanted, rtol=1e-5, atol=tolerance, equal_nan=True
                )


# Threads of a group, groups, blocks of a cluster, chunks in a ring, vectors of a chunk a thread.
RINGS = [Ring(64, 1, 1, 1, 2), Ring(64, 1, 1, 4, 1), Ring(64, 2, 1, 2, 1), Ring(64, 1, 2, 1, 2), Ring(64, 1, 2, 3, 1)]
rings = pytest.mark.parametrize("ring", RINGS, ids=lambda ring: "-".join(map(str, ring[:5])))
gradients = pytest.mark.parametrize("gradient", [False, True], ids=["loss", "gradient"])


@rings
@gradients
def test_rows_of_several_chunks(monkeypatch, gradient, ring):
    check(monkeypatch, Case(ring, 2, 5, 600, gradient, masked=ring.unroll == 2))


@rings
@pytest.mark.parametrize(
    ("gradient", "dtype", "cols", "offset", "gap", "grad_gap"),
    [
        (True, Float32, 261, 3, 0, 0), (False, Float32, 254, 1, 2, 0), (True, BFloat16, 77, 0, 0, 0),
        (True, BFloat16, 1019, 5, 8, 16), (False, BFloat16, 515, 7, 0, 0),
    ],
)  # fmt: skip
def test_ragged_rows(monkeypatch, gradient, dtype, cols, offset, gap, grad_gap, ring):
    """The first begins and the last ends inside a vector that is not all of the tensor's."""
    check(monkeypatch, Case(ring, 2, 4, cols, gradient, "sum", dtype, offset, gap, grad_gap), seeds=1)


@pytest.mark.parametrize("ignored", ["none", "all", "first", "all but first", "all but last"])
@pytest.mark.parametrize(
    ("ring", "gradient"), [(RINGS[2], True), (RINGS[3], False), (RINGS[4], True)], ids=["groups", "cluster", "deep"]
)
def test_ignored_rows(monkeypatch, ring, gradient, ignored):
    check(monkeypatch, Case(ring, 2, 7, 40, gradient, dtype=BFloat16, ignored=ignored), seeds=2)


@pytest.mark.parametrize("reduction", KINDS)
@gradients
def test_reductions(monkeypatch, gradient, reduction):
    if not gradient or reduction != "none":
        check(monkeypatch, Case(RINGS[2], 2, 5, 36, gradient, reduction, z_loss=1e-3, scale=0.5), seeds=1)


@pytest.mark.parametrize(("grid", "rows"), [(1, 1), (4, 3), (4, 12)])
@pytest.mark.parametrize(("ring", "gradient"), [(RINGS[2], False), (RINGS[4], True)], ids=["groups", "cluster"])
def test_rows_and_blocks(monkeypatch, ring, gradient, grid, rows):
    check(monkeypatch, Case(ring, max(grid, ring.cluster), rows, 24, gradient, ignored="none", target_bits=32), seeds=2)


def test_slices(monkeypatch):
    """More than there are blocks, or each with more rows than threads that count."""
    check(monkeypatch, Case(RINGS[1], 1, 35, 4, True, "byte_mean, 8", ignored="all but last"), seeds=1)
    check(monkeypatch, Case(RINGS[4], 4, 6, 4, True, slices=9), seeds=2)
    check(monkeypatch, Case(RINGS[0], 2, 34, 4, True, slices=2, ignored="all but first"), seeds=2)


@pytest.mark.parametrize("ignored", ["all", "first", "every third"])
@pytest.mark.parametrize("reduction", ["mean", "byte_mean, 4", "byte_mean, 8"])
@pytest.mark.parametrize(("grid", "rows"), [(4, 2), (2, 9)])
@pytest.mark.parametrize("ring", [RINGS[2], RINGS[4]], ids=["groups", "cluster"])
def test_teams_count_their_own_rows(monkeypatch, ring, grid, rows, reduction, ignored):
    """Fewer than there are teams, or several each."""
    check(monkeypatch, Case(ring, grid, rows, 8, False, reduction, ignored=ignored), seeds=2)


def test_more_rows_than_are_added_at_a_time(monkeypatch):
    monkeypatch.setattr(_cross_entropy_ring, "ROWS_UNROLL", 1)
    check(monkeypatch, Case(RINGS[2], 2, 270, 4, False, "byte_mean, 8"), seeds=1)


def test_counts_that_come_after_the_announcement_are_found_out(monkeypatch):
    for seed in range(3):
        workspace = [0] * (2 * _workspace.RING_WORKSPACE_WORDS)
        with pytest.raises(AssertionError, match="in no order"):
            launch(monkeypatch, Case(RINGS[1], 2, 5, 24, False), seed, 2, workspace, Late)


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


@pytest.mark.parametrize("ring", [RINGS[1], RINGS[3]], ids=["block", "cluster"])
@gradients
def test_rows_far_from_zero(monkeypatch, gradient, ring):
    check(monkeypatch, Far(ring, 2, 11, 140, gradient, "sum", ignored="none", scale=0.5), seeds=1)


@pytest.mark.parametrize("ring", [RINGS[1], RINGS[3]], ids=["block", "cluster"])
@gradients
def test_targets_that_are_no_class(monkeypatch, gradient, ring):
    check(monkeypatch, Case(ring, 2, 7, 26, gradient, "sum" if gradient else "none", beyond=True), seeds=1)


@pytest.mark.parametrize("ring", [RINGS[0], RINGS[2]], ids=["block", "groups"])
@pytest.mark.parametrize(("cols", "offset", "gap"), [(264, 0, 0), (263, 1, 0), (37, 3, 2)])
def test_in_place(monkeypatch, cols, offset, gap, ring):
    check(monkeypatch, Case(ring, 2, 6, cols, in_place=True, offset=offset, gap=gap), seeds=1)
