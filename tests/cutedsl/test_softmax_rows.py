"""Softmax's kernels, all of them, run in Python by threads that take turns; see ``gpu_model``."""

from typing import NamedTuple

import pytest

pytest.importorskip("tvm_ffi", reason="cutedsl: apache-tvm-ffi is not installed")
pytest.importorskip("cutlass.cute", reason="cutedsl: nvidia-cutlass-dsl is not installed")

import numpy as np
import torch
from cutedsl.gpu_model import NAN, Launch, Memory, float32, lowest
from cutedsl.test_memory import dtypes, in_python, layouts
from cutlass import BFloat16, Float32
from loss_cutedsl import _schedule, softmax
from loss_cutedsl._schedule import Schedule

READ, UPSTREAM, WRITTEN = range(1, 4)


class Forward(softmax.SoftmaxForward):
    lowest = lowest


class ForwardInRegisters(softmax.SoftmaxForwardInRegisters):
    lowest = lowest


class Case(NamedTuple):
    """A launch. ``gap``: elements between rows; ``offset``: of the first row, in a vector; dy has the gaps of dx."""

    schedule: Schedule
    clusters: int
    rows: int
    cols: int
    backward: bool = False
    log: bool = False
    dtype: type = Float32
    offset: int = 0
    gap: int = 0
    out_offset: int = 0
    out_gap: int = 0
    dy_offset: int = 0
    held: bool = True
    at_once: bool = False  # rows that are all in registers

    def inputs(self):
        """Logits, or results and their gradients: rows that are all -inf, have a NaN or are partly -inf among them."""
        random = np.random.default_rng(self.cols)
        x = (3 * random.standard_normal((self.rows, self.cols)) + 40).astype(float32)
        x[1::4] = -np.inf
        x[2::4, self.cols // 3] = NAN
        x[3::4, 1::3] = -np.inf
        x[3::4, self.cols // 2 + 1 :] = -np.inf
        if not self.backward:
            return (x,)
        y = (torch.log_softmax if self.log else torch.softmax)(torch.tensor(x), -1)
        return y.numpy(), random.standard_normal((self.rows, self.cols)).astype(float32)

    def exact(self):
        inputs = [torch.tensor(values).double() for values in self.inputs()]
        if not self.backward:
            return (torch.log_softmax if self.log else torch.softmax)(*inputs, -1)
        y, dy = inputs
        backward = torch._log_softmax_backward_data if self.log else torch._softmax_backward_data
        return backward(dy, y, -1, torch.float64)


def launch(monkeypatch, case, seed, resident):
    """What the kernel writes."""
    size = case.dtype.width // 8
    width = _schedule.VECTOR_BYTES // size
    stride, out_stride = case.cols + case.gap, case.cols + case.out_gap
    offsets = (case.offset, case.out_offset, case.dy_offset)
    ragged = any(number % width for number in (*offsets, case.cols, stride, out_stride))
    vectors = _schedule.most_vectors(case.cols, width, ragged)
    memory = Memory()

    inputs = case.inputs()
    read = memory.matrix(READ, size, inputs[0], stride, case.offset)
    empty = np.full((case.rows, case.cols), NAN, float32)
    written = memory.matrix(WRITTEN, size, empty, out_stride, case.out_offset, writable=True)
    arguments = {"rows": case.rows, "cols": case.cols}
    if case.backward:
        upstream = memory.matrix(UPSTREAM, size, inputs[1], out_stride, case.dy_offset)
        arguments |= {"g_output": read, "output_stride": stride, "g_grad": written, "grad_stride": out_stride}
        arguments |= {"g_upstream": upstream, "upstream_stride": out_stride}
    else:
        arguments |= {"g_input": read, "input_stride": stride, "g_output": written, "output_stride": out_stride}
    if case.at_once:
        schedule, full = _schedule.in_registers(case.schedule, case.cols * size)
        kernel_class = softmax.SoftmaxBackwardInRegisters if case.backward else ForwardInRegisters
        kernel = in_python(kernel_class)(case.dtype, schedule, ragged, log=case.log, full=full)
        arguments["chunks"] = 1
        shared_bytes = kernel.scratch_bytes
    else:
        kernel_class = softmax.SoftmaxBackward if case.backward else Forward
        kernel = in_python(kernel_class)(case.dtype, case.schedule, ragged, log=case.log, held=case.held)
        arguments["chunks"] = case.schedule.chunks(vectors)
        inputs_held = len(inputs) * case.held
        shared_bytes = _schedule.shared_bytes(case.schedule, vectors, inputs_held, softmax.ENTRY_WORDS)
    name = f"softmax_{'backward' if case.backward else 'forward'}_kernel"
    Launch(
        kernel, memory, case.clusters * case.schedule.cluster, seed, resident, shared_bytes=shared_bytes,
        word_bytes=kernel.scratch_bytes,
    ).run(monkeypatch, getattr(kernel, name), **arguments)  # fmt: skip
    return memory.written_matrix(written, size, (case.rows, case.cols), out_stride)


def check(monkeypatch, case, seeds=2):
    """Launches, each in another order: with all clusters at a time, or one after the other."""
    results = [launch(monkeypatch, case, seed, 1 if seed % 2 else case.clusters) for seed in range(seeds)]
    wanted = case.exact()
    tolerance = 1e-6 * wanted[wanted.isfinite()].abs().max().item()
    torch.testing.assert_close(torch.tensor(results[0]).double(), wanted, rtol=1e-5, atol=tolerance, equal_nan=True)
    for result in results[1:]:
        assert result.tobytes() == results[0].tobytes(), "the order in which threads run shows"


# Threads of a block, of a row, blocks of a cluster, stages, vectors a step.
GROUPS, BLOCK, DEEP_BLOCK = Schedule(64, 32, 1, 2, 1, 1), Schedule(64, 64, 1, 1, 2, 1), Schedule(64, 64, 1, 2, 1, 1)
PAIR, DEEP_PAIR = Schedule(64, 64, 2, 1, 1, 1), Schedule(32, 32, 2, 2, 2, 1)
FOUR, DEEP_FOUR = Schedule(32, 32, 4, 1, 1, 1), Schedule(64, 64, 4, 2, 1, 1)

directions = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])


def schedules(*some):
    return pytest.mark.parametrize("schedule", some, ids=lambda schedule: "-".join(map(str, schedule[:5])))


@schedules(GROUPS, BLOCK, DEEP_BLOCK, PAIR, DEEP_PAIR, FOUR, DEEP_FOUR)
@directions
def test_rows_one_after_the_other(monkeypatch, backward, schedule):
    """Enough for both barrier objects to come back to the parity that they began with."""
    log = backward == (schedule.stages == 1)
    check(monkeypatch, Case(schedule, 1, 6, 152, backward, log))


@schedules(DEEP_PAIR, FOUR)
@directions
def test_a_row_a_cluster(monkeypatch, backward, schedule):
    check(monkeypatch, Case(schedule, 3, 3, 304, backward, schedule.stages == 1, BFloat16))


@schedules(GROUPS, PAIR, DEEP_PAIR, FOUR)
@directions
@pytest.mark.parametrize(
    ("dtype", "cols", "offset", "gap", "out_offset", "out_gap", "dy_offset"),
    [
        # All begin at the same place in a vector; never what is written; here and there.
        (Float32, 141, 3, 0, 3, 0, 3), (Float32, 134, 1, 2, 2, 2, 1), (BFloat16, 269, 5, 0, 5, 2, 5),
        # One vector a row, or parts of two; never dy where the others do, or hardly ever any two.
        (Float32, 1, 2, 0, 2, 0, 1), (BFloat16, 3, 6, 8, 6, 0, 6),
    ],
)  # fmt: skip
def test_ragged_rows(monkeypatch, dtype, cols, offset, gap, out_offset, out_gap, dy_offset, backward, schedule):
    """The first begins and the last ends inside a vector that is not all of the tensor's."""
    rows = 4 * schedule.groups
    layout = (offset, gap, out_offset, out_gap, dy_offset)
    check(monkeypatch, Case(schedule, 1, rows, cols, backward, backward, dtype, *layout), seeds=1)


@pytest.mark.parametrize(
    ("held", "schedule"),
    [(True, GROUPS), (True, BLOCK), (True, PAIR), (False, BLOCK), (False, Schedule(64, 32, 1, 1, 1, 1))],
    ids=lambda facts: "-".join(map(str, facts[:5])) if isinstance(facts, tuple) else "held" if facts else "read twice",
)
@directions
@layouts
@dtypes
def test_layouts(monkeypatch, dtype, layout, backward, held, schedule):
    """Rows of one vector and of few, which begin where the results do or elsewhere."""
    cols, gap, out_gap, offset, out_offset = layout
    rows = 2 * schedule.groups + 1
    layout = (offset, gap, out_offset, out_gap, out_offset)
    check(monkeypatch, Case(schedule, 1, rows, cols, backward, backward == held, dtype, *layout, held), seeds=1)


@schedules(BLOCK, Schedule(64, 32, 1, 1, 1, 1))
@directions
@pytest.mark.parametrize(("cols", "offset"), [(300, 0), (141, 3)])
def test_rows_that_are_read_twice(monkeypatch, cols, offset, backward, schedule):
    case = Case(schedule, 1, 4, cols, backward, offset == 0, held=False)
    check(monkeypatch, case._replace(offset=offset, out_offset=offset, dy_offset=offset), seeds=1)


# Of one vector a thread and less, and of ends in vectors behind those of the threads: 257 and 1019. What is written
# begins where the rows do, or elsewhere; the upstream gradient not always where it does.
# A row a block, or a warp: then the last block has a row and a warp without one.
@schedules(Schedule(64, 64, 1, 1, 0, 1), Schedule(64, 32, 1, 1, 0, 1))
@directions
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    ("dtype", "cols", "offset", "gap", "out_offset", "out_gap", "dy_offset"),
    [
        (Float32, 300, 0, 0, 0, 0, 0), (Float32, 256, 0, 4, 0, 0, 0), (Float32, 257, 2, 1, 2, 5, 2),
        (Float32, 141, 3, 0, 3, 0, 1), (Float32, 96, 1, 3, 2, 2, 2), (BFloat16, 1024, 0, 0, 0, 8, 0),
        (BFloat16, 1019, 5, 8, 5, 0, 5), (BFloat16, 24, 0, 0, 0, 0, 0), (BFloat16, 3, 6, 8, 6, 0, 6),
        (Float32, 1, 2, 0, 2, 0, 2),
    ],
)  # fmt: skip
def test_rows_in_registers(
    monkeypatch, dtype, cols, offset, gap, out_offset, out_gap, dy_offset, log, backward, schedule
):
    layout = (offset, gap, out_offset, out_gap, dy_offset)
    blocks = -(-5 // schedule.groups)
    check(
        monkeypatch, Case(schedule, blocks, 5, cols, backward, log, dtype, *layout, held=False, at_once=True), seeds=1
    )


class Far(Case):
    """Rows far from zero, of ties, and with all of the probability at one place."""

    def inputs(self):
        largest = np.finfo(float32).max
        x = 3 * np.random.default_rng(self.cols).standard_normal((self.rows, self.cols))
        x += np.array([0.0, 1e4, -1e4, 1e6, -7e8, 7e8, -(2.0**32), 1e30, 0.0])[:, None]
        x[8] = -largest
        x[::4, 1:] -= 1e4
        return (x.clip(-largest, largest).astype(float32),)

    def exact(self):
        # From the maximum: far from zero float64 has no digits to spare either.
        x = torch.tensor(self.inputs()[0]).double()
        return (torch.log_softmax if self.log else torch.softmax)(x - x.amax(-1, keepdim=True), -1)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(("held", "at_once"), [(True, False), (False, False), (False, True)])
@dtypes
def test_rows_far_from_zero(monkeypatch, dtype, held, at_once, log):
    clusters = 9 if at_once else 1
    check(monkeypatch, Far(BLOCK, clusters, 9, 300, log=log, dtype=dtype, held=held, at_once=at_once), seeds=1)
