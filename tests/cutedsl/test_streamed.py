"""The form of the forward whose rows stream through shared memory, run in Python by threads that take turns."""

from typing import NamedTuple

import pytest

pytest.importorskip("tvm_ffi", reason="cutedsl: apache-tvm-ffi is not installed")
pytest.importorskip("cutlass.cute", reason="cutedsl: nvidia-cutlass-dsl is not installed")

import numpy as np
from cutedsl import test_cross_entropy_plain as plain
from cutedsl.gpu_model import Launch, Memory, float32, lowest
from cutedsl.test_cross_entropy_plain import ITEM_COUNT, KINDS, LOGITS, LOSS, LSE, TARGET, WORKSPACE
from cutedsl.test_memory import IGNORED, in_python
from cutlass import BFloat16, Float32
from loss_cutedsl import _cross_entropy_forward, _schedule, _workspace
from loss_cutedsl._cross_entropy_rows import ENTRY_WORDS
from loss_cutedsl._schedule import Schedule


class Kernel(_cross_entropy_forward.CrossEntropyForward):
    lowest = lowest

    def first_column(self, first, phase, cols):
        """Of statistics alone."""
        return 0


class Late(Kernel):
    def announce(self, facts, it, loss_sum, z_sum, count):
        """Before the sums are there."""
        form = _cross_entropy_forward
        if form.cute.arch.thread_idx()[0] == 0:
            done_before = form.exchange_add(it.g_workspace + form.WORKSPACE_DONE * 4, 1)
            form.store_shared_word(facts.s_scratch + self.notes + form.NOTE_DONE, done_before)
            block = form.cute.arch.block_idx()[0]
            form.store_floats(self.sums_address(it, block), [loss_sum, count, z_sum, float32(0.0)])


class Case(NamedTuple):
    """As in ``test_cross_entropy_plain``."""

    schedule: Schedule
    grid: int
    rows: int
    cols: int
    reduction: str = "mean"
    dtype: type = Float32
    offset: int = 0
    gap: int = 0
    ignored: str = "every third"
    target_bits: int = 64

    def wanted(self):
        return plain.Case(
            None, self.rows, self.cols, False, self.reduction, self.dtype, self.offset, self.gap,
            ignored=self.ignored,
        )  # fmt: skip


def launch(monkeypatch, case, seed, resident, workspace, kernel_class=Kernel):
    """Loss, denominator and lse, as the kernel leaves them, and the workspace."""
    size = case.dtype.width // 8
    width = 16 // size
    stride = case.cols + case.gap
    ragged = any(number % width for number in (case.offset, case.cols, stride))
    vectors = _schedule.most_vectors(case.cols, width, ragged)
    schedule, of = case.schedule, case.wanted()
    scalar = case.reduction != "none"
    memory = Memory()

    kernel = in_python(kernel_class)(
        case.dtype, schedule, ragged, target_bits=case.target_bits, gradient=False, scalar=scalar, weighted=False,
        smoothing=False, logits="linear", stats=False, shard=False,
    )  # fmt: skip
    arguments = dict.fromkeys(("g_grad", "grad_stride", "g_weight", "g_z_loss", "g_prediction", "g_correct"), 0)
    arguments |= plain.denominator_arguments(memory, of)
    Launch(
        kernel, memory, case.grid, seed, resident, word_bytes=kernel.scratch_bytes,
        shared_bytes=_schedule.shared_bytes(schedule, vectors, 1, ENTRY_WORDS, whole_rows=False),
    ).run(
        monkeypatch, kernel.cross_entropy_forward_kernel, logits_stride=stride,
        g_logits=memory.matrix(LOGITS, size, of.logits(), stride, case.offset),
        g_target=memory.vector(TARGET, case.target_bits // 8, of.targets(), False),
        g_loss=memory.vector(LOSS, 4, [None] * (1 if scalar else case.rows)),
        g_lse=memory.vector(LSE, 4, [None] * case.rows), g_workspace=memory.vector(WORKSPACE, 4, workspace),
        rows=case.rows, slices=1, denominator_kind=KINDS[case.reduction], items=ITEM_COUNT, cols=case.cols,
        chunks=schedule.chunks(vectors), ignore_index=IGNORED, first_class=0, total_classes=case.cols,
        label_smoothing=float32(0.0), z_loss=float32(0.0), logit_scale=float32(1.0), softcap=float32(1.0), **arguments,
    )  # fmt: skip

    return plain.loss_denominator_lse(memory, of), memory.words(WORKSPACE, len(workspace))


def check(monkeypatch, case, seeds=2):
    """Launches one after the other, each in another order and with the workspace that the one before left."""
    clusters = case.grid // case.schedule.cluster
    workspace = [0] * (2 * _workspace.workspace_words(clusters))
    first = None
    for seed in range(seeds):
        got, workspace = launch(monkeypatch, case, seed, 1 if seed % 2 else clusters, workspace)
        assert workspace == [0] * len(workspace)
        first = first or got
        for value, before, wanted in zip(got, first, plain.exact(case.wanted())[:3], strict=True):
            assert value.tobytes() == before.tobytes(), "the order in which threads run shows"
            tolerance = 4e-6 * max(1.0, np.nan_to_num(wanted.abs().max().item()))
            np.testing.assert_allclose(value, wanted.numpy(), rtol=1e-5, atol=tolerance)


# Threads of a block, of a row, blocks of a cluster (always one), stages, vectors a step.
GROUPS, BLOCK = Schedule(64, 32, 1, 3, 1, 1), Schedule(64, 64, 1, 2, 2, 1)
schedules = pytest.mark.parametrize("schedule", [GROUPS, BLOCK], ids=["groups", "block"])


@schedules
@pytest.mark.parametrize("reduction", KINDS)
def test_reductions(monkeypatch, reduction, schedule):
    check(monkeypatch, Case(schedule, 2, 7, 36, reduction), seeds=1)


@pytest.mark.parametrize("ignored", ["none", "all", "first", "all but first", "all but last"])
@schedules
def test_ignored_rows(monkeypatch, schedule, ignored):
    check(monkeypatch, Case(schedule, 2, 7, 40, dtype=BFloat16, ignored=ignored))


@schedules
@pytest.mark.parametrize(("grid", "rows"), [(4, 1), (4, 3), (4, 13)])
def test_rows_and_blocks(monkeypatch, schedule, grid, rows):
    check(monkeypatch, Case(schedule, grid, rows, 24, ignored="none", target_bits=32))


@schedules
@pytest.mark.parametrize(
    ("dtype", "cols", "offset", "gap"), [(Float32, 600, 0, 0), (Float32, 261, 3, 0), (BFloat16, 1019, 5, 8)]
)
def test_rows_of_several_chunks(monkeypatch, dtype, cols, offset, gap, schedule):
    check(monkeypatch, Case(schedule, 2, 4, cols, "sum", dtype, offset, gap), seeds=1)


def test_more_blocks_than_are_added_at_a_time(monkeypatch):
    monkeypatch.setattr(_cross_entropy_forward, "SUMS_UNROLL", 1)
    check(monkeypatch, Case(BLOCK, 66, 66, 4), seeds=1)


def test_sums_that_come_after_the_announcement_are_found_out(monkeypatch):
    for seed in range(3):
        workspace = [0] * (2 * _workspace.workspace_words(2))
        with pytest.raises(AssertionError, match="in no order"):
            launch(monkeypatch, Case(BLOCK, 2, 4, 24), seed, 2, workspace, Late)
