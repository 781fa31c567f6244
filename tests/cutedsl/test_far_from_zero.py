"""The backward keeps the digits of rows whose lse, a float32, has none to spare: run in Python, against float64."""

import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("tvm_ffi", reason="cutedsl: apache-tvm-ffi is not installed")
pytest.importorskip("cutlass.cute", reason="cutedsl: nvidia-cutlass-dsl is not installed")

import numpy as np
import torch
from cutedsl.test_arithmetic import IN_PYTHON
from cutedsl.test_memory import IGNORED, MODULES, SINGLE, Memory, in_python
from cutlass import BFloat16, Float32
from loss_cutedsl import _cross_entropy_backward, _schedule
from torch.nn import functional

float32 = np.float32
LOGITS, GRAD, UPSTREAM, LSE, DENOMINATOR, WEIGHT, WORKSPACE = range(1, 8)


class Backward(_cross_entropy_backward.CrossEntropyBackward):
    """Threads that meet where the kernel's do: what one writes, another may be about to read."""

    def meet(self):
        self.meetings[self.place()[1]].wait(timeout=60)

    def reduce_row(self, s_scratch, parity, thread, rank, power, highest, total):
        group = self.place()[1]
        self.parts[group][thread] = highest, total
        self.meet()
        top = max(part[0] for part in self.parts[group].values())
        total = sum(part[1] * np.exp2((part[0] - top) * power) for part in self.parts[group].values())
        self.meet()
        return top, float32(total), [], None

    def load_target(self, g_target, row, wanted, otherwise):
        return self.targets[row]

    def column(self, facts, target):
        return target - facts.first_class if 0 <= target - facts.first_class < facts.cols else facts.cols

    def target_logit(self, g_vectors, phase, y, cols):
        return self.memory.read(g_vectors + (phase + (y if y < cols else 0)) * self.element_bytes)

    def or_nan(self, facts, target, value):
        return value if 0 <= target < facts.total_classes else float32(np.nan)


def run(monkeypatch, kernel, memory, grid, backwards, **arguments):
    """All blocks, one after the other, the threads of each at once."""
    here = threading.local()
    arch = SimpleNamespace(
        thread_idx=lambda: (here.thread, 0, 0),
        block_idx=lambda: (here.block, 0, 0),
        grid_dim=lambda: (grid, 1, 1),
        get_dyn_smem=lambda kind, alignment: SimpleNamespace(toint=lambda: 0),
    )
    below = {"load_float_below": lambda g, index, bound: memory.read(g) if 0 <= index < bound else float32(0.0)}
    primitives = {**memory.primitives(), **IN_PYTHON, **below, "cute": SimpleNamespace(arch=arch)}
    primitives |= {"load_float": memory.read, "barrier": kernel.meet}
    for module in MODULES:
        for key, value in primitives.items():
            if hasattr(module, key):
                monkeypatch.setattr(module, key, value)
    errors = []

    def one_thread(block, thread):
        here.block, here.thread = block, thread
        try:
            with np.errstate(all="ignore"):
                kernel.cross_entropy_backward_kernel(**arguments)
        except Exception as error:
            errors.append(error)

    for block in reversed(range(grid)) if backwards else range(grid):
        kernel.meetings = [threading.Barrier(kernel.row_threads) for _ in range(kernel.groups)]
        kernel.parts = [{} for _ in range(kernel.groups)]
        threads = [threading.Thread(target=one_thread, args=(block, thread)) for thread in range(kernel.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    monkeypatch.undo()
    assert not errors


def gradient(
    monkeypatch, x, targets, lse, upstream, *, denominator=None, dtype=Float32, schedule=SINGLE[1], in_place=False,
    backwards=False, offset=0, weight=None, smoothing=0.0, z_loss=0.0, scale=1.0, softcap=None, shard=None,
):  # fmt: skip
    """As the kernel writes it, not rounded to ``dtype``."""
    rows, cols = x.shape
    memory = Memory(dtype.width // 8)
    ragged = (offset | cols) % memory.width != 0
    schedule = _schedule.Schedule(*schedule, 1)
    tiles = schedule.chunks(_schedule.most_vectors(cols, memory.width, ragged))
    logits = memory.tensor(LOGITS, rows, cols, cols, offset, lambda row, col: float32(x[row, col]))
    grad = memory.tensor(LOGITS if in_place else GRAD, rows, cols, cols, offset)

    def floats(place, values):
        if values is None:
            return 0
        each = 4 // memory.size
        return memory.tensor(place, len(values), 1, each, 0, lambda row, col: float32(values[row]))

    kernel = in_python(Backward)(
        dtype, schedule, ragged, target_bits=64, weighted=weight is not None, smoothing=smoothing != 0,
        logits="softcap" if softcap else "linear" if scale > 0 else "scaled", early=False,
    )  # fmt: skip
    kernel.targets, kernel.memory = targets, memory
    first_class, total_classes = shard or (0, cols)
    run(
        monkeypatch, kernel, memory, 3, backwards, g_upstream=floats(UPSTREAM, upstream), upstream_stride=1,
        g_logits=logits, logits_stride=cols, g_grad=grad, grad_stride=cols, g_target=0,
        g_weight=floats(WEIGHT, weight), g_lse=floats(LSE, lse), g_denominator=floats(DENOMINATOR, denominator),
        g_workspace=floats(WORKSPACE, None if weight is None else [weight.sum()]), rows=rows, skip_if_one=0, cols=cols,
        tiles=tiles, ignore_index=IGNORED, first_class=first_class, total_classes=total_classes,
        label_smoothing=float32(smoothing), z_loss=float32(z_loss), logit_scale=float32(scale),
        softcap=float32(softcap or 1.0),
    )  # fmt: skip
    return torch.tensor([[memory.take(grad, row, col, cols) for col in range(cols)] for row in range(rows)]).double()


def exact(x, targets, upstream, weight=None, smoothing=0.0, z_loss=0.0, scale=1.0, softcap=None):
    """The gradient in float64, and each row's lse."""
    logits = torch.tensor(x).double().requires_grad_()
    of_row = scale * logits
    of_row = softcap * torch.tanh(of_row / softcap) if softcap else of_row
    weight = None if weight is None else torch.tensor(weight).double()
    target = torch.tensor(targets)
    loss = functional.cross_entropy(of_row, target, weight, reduction="none", label_smoothing=smoothing)
    lse = of_row.logsumexp(-1)
    if z_loss:
        loss = loss + torch.where(target == IGNORED, 0, z_loss * lse**2)
    (grad,) = torch.autograd.grad(loss, logits, torch.tensor(upstream).double())
    # Where torch has NaN if the logits have.
    grad[target == IGNORED] = 0
    return grad, lse.detach().numpy()


def rows_far_from_zero(cols, shifts, dtype):
    x = 2 * np.random.default_rng(cols).standard_normal((len(shifts), cols)) + np.array(shifts)[:, None]
    return torch.tensor(x).to(torch.float32 if dtype is Float32 else torch.bfloat16).float().numpy()


def check(monkeypatch, x, targets, relative=4e-6, of_kernel=(), **options):
    upstream = np.random.default_rng(1).random(len(x)).astype(float32) + float32(0.5)
    truth, lse = exact(x, targets, upstream, **options)
    got = gradient(monkeypatch, x, targets, lse, upstream, **dict(of_kernel), **options)
    for row in range(len(x)):
        size = truth[row].abs().nan_to_num().max().item()
        torch.testing.assert_close(got[row], truth[row], rtol=relative, atol=relative * size / 8, equal_nan=True)


SHIFTS = [3000.0, 0.0, -2e4, 70.0, 1e6]
LARGER_SHIFTS = [3000.0, 0.0, -2e4, -1e6, 1100.0]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("schedule", SINGLE, ids=lambda facts: "-".join(map(str, facts)))
@pytest.mark.parametrize(("cols", "offset"), [(1, 0), (7, 0), (64, 0), (37, 3), (131, 0)])
@pytest.mark.parametrize(("dtype", "shifts"), [(Float32, SHIFTS), (BFloat16, LARGER_SHIFTS)], ids=["4 bytes", "2"])
def test_layouts(monkeypatch, dtype, shifts, cols, offset, schedule, in_place):
    x = rows_far_from_zero(cols, shifts, dtype)
    targets = [0, cols - 1, cols // 2, IGNORED, cols - 1]
    for backwards in (False, True):
        of_kernel = {"dtype": dtype, "schedule": schedule, "in_place": in_place, "offset": offset}
        check(monkeypatch, x, targets, of_kernel={**of_kernel, "backwards": backwards})


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"smoothing": 0.1}, {"scale": 0.5}, {"scale": -0.5}, {"z_loss": 1e-3}, {"smoothing": 0.1, "scale": -2.0}],
    ids=str,
)
def test_options(monkeypatch, options, weighted, in_place):
    x = rows_far_from_zero(37, SHIFTS, Float32)
    weight = np.random.default_rng(2).random(37).astype(float32) + float32(0.5) if weighted else None
    check(monkeypatch, x, [0, 36, 18, IGNORED, 5], of_kernel={"in_place": in_place}, weight=weight, **options)


@pytest.mark.parametrize("shift", [500.0, -2e3])
def test_softcap(monkeypatch, shift):
    # What the cap makes of a logit is rounded, once and for all.
    x = rows_far_from_zero(37, [shift, 0.0], Float32)
    check(monkeypatch, x, [0, 36], relative=1e-3, softcap=5e3)


@pytest.mark.parametrize("shift", [0.0, 3000.0, -2e4])
@pytest.mark.parametrize("in_place", [False, True])
def test_logits_that_are_not_finite(monkeypatch, in_place, shift):
    x = rows_far_from_zero(37, [shift] * 8, Float32)
    x[0, :18] = -np.inf
    x[1, 1:] = -np.inf
    x[2] = -np.inf
    x[3, 5] = np.inf
    x[4, 5] = np.nan
    x[5:7] = x[4:1:-2]
    # Those of an ignored row have no part in anything, and of a row whose target is masked they are as usual.
    x[7, 36] = -np.inf
    check(monkeypatch, x, [20, 0, 3, 3, 3, IGNORED, IGNORED, 36], of_kernel={"in_place": in_place})


def test_a_target_that_is_no_class(monkeypatch):
    x = rows_far_from_zero(37, [3000.0, 3000.0], Float32)
    got = gradient(monkeypatch, x, [37, -1], x.max(1) + 1, [1.0, 1.0])
    assert got.isnan().all()


def test_a_shard_keeps_the_lse_of_all(monkeypatch):
    x = rows_far_from_zero(37, [3000.0, -2e4], Float32)
    lse = x.max(1) + float32(2.0)
    # The first target is this shard's fourth class, the second is another shard's.
    got = gradient(monkeypatch, x, [40, 3], lse, [1.0, 1.0], shard=(37, 111))
    wanted = torch.tensor(x).double().sub(torch.tensor(lse).double()[:, None]).exp()
    wanted[0, 3] -= 1
    torch.testing.assert_close(got, wanted, rtol=4e-6, atol=0)
