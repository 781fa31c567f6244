"""Rows that programs hold: whole, or in parts; what each tells the others, what one does that has waited in vain."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import loss_core
import loss_triton
import triton
import triton.language as tl
from loss_core.backend import CrossEntropyOptions
from loss_triton import cross_entropy, parts, rows, schedules, softmax
from loss_triton.launch import Launch
from support import devices
from support.plans import forget
from support.softmax import input_gradient

pytestmark = pytest.mark.skipif(
    bool(devices.unavailable_reason("triton")), reason=f"triton: {devices.unavailable_reason('triton')}"
)

# In the interpreter a program waits in vain for those behind it, and finds the words of those before it; where programs
# run at the same time, all do either.
PATIENCES = (2048, 0) if devices.HAS_GPU else (0,)
ROWS = 300 if devices.HAS_GPU else 7
# Dtype, columns, and where in a vector rows begin: a part that is full, a column more, several; parts have 2 chunks of
# 32 lanes.
CASES = (
    (torch.float32, 256, 0), (torch.float32, 1003, 3), (torch.float16, 513, 0), (torch.bfloat16, 1003, 3),
    (torch.bfloat16, 2056, 0), (torch.bfloat16, 2056, 5),
)  # fmt: skip


def in_parts(table, classes, held, vector):
    return schedules.Parts(-(-classes // (64 * vector)), 32, 2)


def in_larger_parts(table, classes, held, vector):
    return schedules.Parts(-(-classes // (128 * vector)), 32, 4)


def whole(table, classes, held, vector):
    return schedules.Parts(1, 32, -(-classes // (32 * vector)))


HOW = {**{f"parts-{patience}": (in_parts, patience) for patience in PATIENCES}, "whole": (whole, 0)}


@pytest.fixture(params=HOW.values(), ids=HOW)
def launched(request, monkeypatch):
    """Kernels of held rows alone, in small parts with so much patience or whole; in the end names of those launched.

    And their words.
    """
    how, patience = request.param
    names, words, needing = [], [], []

    def zeroed_words(count, device, *stream):
        words.append(torch.zeros(count, dtype=torch.int64, device=device))
        return words[-1]

    def run(self, *arguments):
        names.append(self._jit.__name__)
        parameters = self._jit.arg_names
        constants = dict(zip(parameters[-len(self._constants) :], self._constants, strict=True))
        # A loss that is summed needs words, and a row that programs share.
        summed = constants.get("REDUCE", "cross_entropy" in names[-1])
        needing.append("workspace_ptr" in parameters and (summed or constants.get("SHARED", False)))
        call(self, *arguments)

    call = Launch.__call__
    monkeypatch.setattr(Launch, "__call__", run)
    for module in (cross_entropy, softmax):
        monkeypatch.setattr(module, "had_better_hold", lambda device: True)
        monkeypatch.setattr(module, "parts_of", how)
        monkeypatch.setattr(module, "patience", lambda device: patience)
        monkeypatch.setattr(module, "zeroed_words", zeroed_words)
    forget()
    yield names
    forget()
    assert all("_parts_" in name or "_whole_" in name for name in names)
    assert names
    assert len(words) == sum(needing)
    assert not any(used.any() for used in words)


def placed(values, start, device):
    """`values` as rows that begin `start` elements into a vector, and have an odd stride if `start` is not 0."""
    rows, classes = values.shape
    memory = torch.full((rows, classes + 2 * start + (-classes) % 8), math.nan, dtype=values.dtype, device=device)
    view = memory[:, start : start + classes]
    view.copy_(values)
    return view


def logits_and_target(classes, dtype):
    """Masked columns, a masked row; targets at both ends, in each part, ignored and out of range."""
    x = (4 * torch.randn(ROWS, classes)).to(dtype)
    target = torch.randint(classes, (ROWS,))
    target[0], target[1], target[2], target[3] = 0, classes - 1, -100, classes
    x[0, 1:] = -math.inf
    x[1, : classes // 2] = -math.inf
    x[2] = math.nan
    x[4, classes // 3] = math.inf
    x[5] = -math.inf
    target[6] = classes // 2
    return x, target


def gradient(x, target, reduction):
    """Loss and gradient in float64, with NaN where a target is out of range."""
    x = x.double().requires_grad_()
    valid = (target >= 0) & (target < x.shape[1])
    loss = torch.nn.functional.cross_entropy(x, torch.where(valid, target, -100), reduction="none")
    loss = torch.where(valid | (target == -100), loss, math.nan)
    live = int((target != -100).sum()) if reduction == "mean" else 1
    (grad,) = torch.autograd.grad(loss[valid].sum() / live, x)
    grad[~valid & (target != -100)] = math.nan
    return loss.detach().sum() / live, torch.where((target == -100)[:, None], 0.0, grad)


def forward(x, target, grad, **options):
    return loss_triton.cross_entropy_forward(
        x, target, None, None, None, CrossEntropyOptions(**options), grad=grad, stats=False
    )


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(("dtype", "classes", "start"), CASES)
def test_cross_entropy(dtype, classes, start, inplace, launched, device):
    values, target = logits_and_target(classes, dtype)
    x = placed(values, start, device)
    grad = x if inplace else placed(torch.full_like(values, math.nan), start, device)
    out = forward(x, target.to(device, torch.int32 if inplace else torch.int64), grad)
    _, wanted = gradient(values, target, "mean")
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(
        grad.double().cpu(), wanted, atol=rounding / ROWS, rtol=max(rounding, 1e-5), equal_nan=True
    )
    assert out.loss.isnan()
    lse = torch.where(target == -100, 0.0, values.double().logsumexp(1))
    # Of a row with +inf the sum is NaN, as its gradient is.
    lse[4] = math.nan
    torch.testing.assert_close(out.lse.double().cpu(), lse, atol=1e-5, rtol=1e-6, equal_nan=True)
    assert out.denominator.item() == int((target != -100).sum())


@pytest.mark.parametrize("rows", [2**12, 2**30], ids=["evicted first", "not"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize(("dtype", "classes", "start"), CASES)
@pytest.mark.parametrize("launched", [(whole, 0)], indirect=True, ids=["whole"])
def test_the_loss_alone(dtype, classes, start, reduction, rows, launched, monkeypatch, device):
    first = schedules.evicts_first(rows.bit_length(), classes, dtype.itemsize, held=True)
    assert first == (rows < 2**20)
    monkeypatch.setattr(cross_entropy, "evicts_first", lambda *size, held: first)
    values, target = logits_and_target(classes, dtype)
    if reduction == "mean":
        values[3:6], target[3] = torch.randn(3, classes).to(dtype), 7
        values[2] = 0.5
    out = forward(placed(values, start, device), target.to(device), None, reduction=reduction)
    assert launched == ["cross_entropy_fwd_whole_kernel"]
    x, valid = values.double(), target < classes
    chosen = torch.where(valid, x.gather(1, target.clamp(0, classes - 1)[:, None])[:, 0], math.nan)
    # Of a row with +inf the sum is NaN, as its gradient is; of one of -inf alone the loss is.
    wanted = torch.where(target == -100, 0.0, torch.where(x.isposinf().any(1), math.nan, x.logsumexp(1)) - chosen)
    if reduction == "mean":
        wanted = wanted.sum() / (target != -100).sum()
    torch.testing.assert_close(out.loss.double().cpu(), wanted, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_and_twice_the_same_bits(reduction, launched, device):
    values, target = logits_and_target(1003, torch.bfloat16)
    values[3:6] = torch.randn(3, 1003).to(values.dtype)
    target[3] = 7
    loss, wanted = gradient(values, target, reduction)
    x = values.to(device)
    results = []
    for _ in range(2):
        grad = torch.full_like(x, math.nan)
        results.append((forward(x, target.to(device), grad, reduction=reduction).loss, grad))
    torch.testing.assert_close(results[0][0].double().cpu(), loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[0][1].double().cpu(), wanted, rtol=2**-7, atol=1e-6)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.skipif(not devices.HAS_GPU, reason="the interpreter has no patience")
@pytest.mark.parametrize("classes", [1003, 2056])
def test_the_same_bits_with_and_without_patience(classes, monkeypatch, device):
    x, target = torch.randn(ROWS, classes).bfloat16().to(device), torch.randint(classes, (ROWS,), device=device)
    g = torch.randn_like(x)
    monkeypatch.setattr(cross_entropy, "parts_of", in_parts)
    monkeypatch.setattr(softmax, "parts_of", in_parts)
    results = []
    for patience in PATIENCES:
        for module in (cross_entropy, softmax):
            monkeypatch.setattr(module, "patience", lambda device, patience=patience: patience)
        forget()
        grad, y, dx = (torch.full_like(x, math.nan) for _ in range(3))
        loss = forward(x, target, grad).loss
        loss_triton.softmax_forward(x, y)
        loss_triton.softmax_backward(g, y, dx)
        results.append((loss, grad, y, dx))
    forget()
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


@pytest.mark.parametrize(("dtype", "classes", "start"), CASES)
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_softmax(op, dtype, classes, start, launched, device):
    values, _ = logits_and_target(classes, dtype)
    rounding = max(torch.finfo(dtype).eps, 1e-6)
    x, y = placed(values, start, device), placed(torch.full_like(values, math.nan), start, device)
    getattr(loss_triton, f"{op}_forward")(x, y)
    wanted = getattr(torch, op)(values.double(), 1)
    torch.testing.assert_close(y.double().cpu(), wanted, atol=4 * rounding, rtol=4 * rounding, equal_nan=True)

    g = torch.randn(ROWS, classes).to(dtype)
    dx = placed(torch.full_like(values, math.nan), start, device)
    getattr(loss_triton, f"{op}_backward")(placed(g, start, device), y, dx)
    wanted = input_gradient(op, g, y.cpu())
    torch.testing.assert_close(dx.double().cpu(), wanted, atol=16 * rounding, rtol=4 * rounding, equal_nan=True)


def test_through_the_prepared_call(launched, device):
    """And an upstream gradient that is not 1."""
    values, target = torch.randn(ROWS, 1537), torch.randint(1537, (ROWS,))
    target[1] = -100
    x = values.to(device).requires_grad_()
    reference = values.double().requires_grad_()
    loss = loss_core.cross_entropy(x, target.to(device), backend="triton")
    wanted = torch.nn.functional.cross_entropy(reference, target)
    torch.testing.assert_close(loss.detach().double().cpu(), wanted.detach(), atol=1e-6, rtol=1e-6)
    # Its kernel has a row for each program.
    launched_by_then = list(launched)
    (grad,) = torch.autograd.grad(loss, x, torch.tensor(1.7, device=device))
    del launched[len(launched_by_then) :]
    (truth,) = torch.autograd.grad(wanted, reference, torch.tensor(1.7, dtype=torch.float64))
    torch.testing.assert_close(grad.double().cpu(), truth, atol=1e-7, rtol=1e-5)


@triton.jit
def with_word_kernel(words_ptr, out_ptr, part, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    words = tl.load(words_ptr + lane)
    told = parts.with_word(words, words_ptr, part, tl.full((), -5, tl.int64), LANES)
    tl.store(out_ptr + lane, told)


@pytest.mark.parametrize("word", [0, 17])
def test_a_word_that_has_come_meanwhile_is_taken(word, device):
    """Its program may have written over what was read for it."""
    words = torch.zeros(32, dtype=torch.int64, device=device)
    words[3], words[5] = word, 9
    told = torch.empty_like(words)
    with_word_kernel[(1,)](words, told, 3, 32, num_warps=1)
    assert told.tolist() == [0, 0, 0, word or -5, 0, 9] + [0] * 26


@triton.jit
def opaque_kernel(x_ptr, after_ptr, out_ptr, SIZE: tl.constexpr):
    columns = tl.arange(0, SIZE)
    x = tl.load(x_ptr + columns)
    tl.store(out_ptr + columns, rows.opaque_until(rows.opaque(x), tl.load(after_ptr)))


@pytest.mark.parametrize("after", [0.0, -0.0, -1.5, 3e38, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_the_compiler_may_not_know_is_what_it_was(dtype, after, device):
    x = torch.randn(256, device=device).to(dtype)
    x[:3] = torch.tensor([math.inf, -math.inf, math.nan])
    out = torch.full_like(x, 5.0)
    opaque_kernel[(3,)](x, torch.tensor([after], device=device), out, 256, num_warps=1)
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    assert torch.equal(out.view(bits), x.view(bits))


TABLES = {
    **{f"loss alone {size}": (table, size, 1) for size, table in schedules.FORWARD_PARTS.items()},
    **{f"gradient {size}": (table, size, 1) for size, table in schedules.GRADIENT_PARTS.items()},
    **{" ".join(map(str, key)): (table, key[2], 1 + (key[0] == "backward")) for key, table in softmax._PARTS.items()},
}


@pytest.mark.parametrize("name", TABLES)
def test_parts_make_a_row(name):
    table, size, tensors = TABLES[name]
    assert table[-1][0] is None
    for classes in sorted({2**power + more for power in range(21) for more in (-1, 0, 1)}):
        for vector in (16 // size, 1):
            how = schedules.parts_of(table, max(1, classes), tensors * size, vector)
            if how is None:
                continue
            assert vector > 1
            count = how.programs
            assert count < how.lanes <= 1024
            # What has no number of chunks is held by one program, and the loss alone has no kernel for anything else.
            entry = next(entry for up_to, entry in table if up_to is None or max(1, classes) <= up_to)
            assert (count == 1) == (entry.chunks is None)
            assert count == 1 or not name.startswith("loss alone")
            # A program's registers are those of a multiprocessor at most, and what is held takes some.
            held = how.chunks * vector * tensors * size // 4
            assert how.registers is None or held < how.registers <= 65536 // how.lanes
            chunk = how.lanes * vector
            assert (count - 1) * how.chunks * chunk < classes <= count * how.chunks * chunk
            # Of a row alone all chunks but the last are full.
            assert count > 1 or (how.chunks - 1) * chunk < classes


@pytest.mark.skipif(devices.HAS_GPU, reason="follows the interpreter")
@pytest.mark.parametrize("op", ["cross_entropy", "softmax"])
@pytest.mark.parametrize("launched", [(in_parts, 0)], indirect=True, ids=["parts"])
def test_who_reads_for_others_leaves_after_its_last_look(op, launched, monkeypatch, device):
    """The last to leave takes the words back; without one, it would seem that a part has not been written over."""
    from triton.runtime.interpreter import interpreter_builder as builder

    touched, rmw = [], builder.create_atomic_rmw

    def noting(operation, ptr, value, mask, *how):
        addresses = ptr.data[mask.data].ravel().tolist()
        touched.extend((builder.grid_idx[0], address // 8) for address in addresses)
        return rmw(operation, ptr, value, mask, *how)

    monkeypatch.setattr(builder, "create_atomic_rmw", noting)
    x = torch.randn(1, 1003)
    count = in_parts(None, 1003, 4, 4).programs
    assert count == 4
    if op == "cross_entropy":
        forward(x, torch.tensor([5]), torch.empty_like(x), reduction="sum")
    else:
        loss_triton.softmax_backward(x, torch.randn(1, 1003).softmax(1), torch.empty_like(x))
    # All others of the row's words lie in front of the count of those that have left.
    words = {where for _, where in touched}
    left = min(where for where in words if where + 1 not in words and where - count in words)
    for program in range(count):
        own = [where for by, where in touched if by == program and left - count <= where <= left]
        looks = own[1:-1]
        assert own[-1] == left
        assert left not in looks
        # Programs run one after the other: the first finds no word but its own, the last all of them.
        assert len(looks) == count - 1 - program


@pytest.mark.skipif(devices.HAS_GPU, reason="follows the interpreter")
@pytest.mark.parametrize("launched", [(in_larger_parts, 0), (whole, 0)], indirect=True, ids=["parts", "whole"])
@pytest.mark.parametrize(("lanes", "gradient", "read"), [(32, True, 256), (512, True, 1024), (32, False, 1024)])
def test_how_much_of_an_ignored_row_is_read(lanes, gradient, read, launched, monkeypatch, device):
    """With a gradient a quarter, where other programs have the multiprocessor meanwhile; for the loss alone all."""
    from triton.runtime.interpreter import interpreter_builder as builder

    places, load = [], builder.create_masked_load

    def noting(ptrs, mask, *how):
        places.extend(ptrs.data[mask.data].ravel().tolist())
        return load(ptrs, mask, *how)

    x = torch.randn(2, 1024)
    monkeypatch.setattr(builder, "create_masked_load", noting)
    # The table's choice for so many lanes, with the small parts of this file.
    monkeypatch.setattr(schedules.Parts, "early", schedules.Parts(1, lanes, 2).early)
    if not gradient:
        monkeypatch.setattr(cross_entropy, "parts_of", whole)
    forward(x, torch.tensor([-100, 5]), torch.empty_like(x) if gradient else None)
    of_rows = [len({place for place in places if 0 <= place - row.data_ptr() < 4096}) for row in x]
    assert of_rows == [read, 1024]


def widths_of(table, vector):
    """Rows that each entry holds: the two narrowest that end with a vector or one column into it, and a wide one."""
    before = 0
    for up_to, entry in table:
        if entry is not None:
            yield from (before + 1, before + vector, (up_to or 5 * before // 4) - 1)
        before = up_to


def loss_and_wanted(x, result):
    """Of cross-entropy, with its gradient or, where there is no `result`, alone."""
    target = torch.randint(x.shape[1], (len(x),), device=x.device)
    target[0], target[-1] = -100, x.shape[1] - 1
    out = forward(x, target, result)
    loss, wanted = gradient(x, target, "mean")
    torch.testing.assert_close(out.loss.double(), loss, atol=1e-5, rtol=1e-5)
    return wanted


def forward_and_wanted(op, x, result):
    getattr(loss_triton, f"{op}_forward")(x, result)
    return getattr(torch, op)(x.double(), 1)


def backward_and_wanted(op, x, result):
    """With x as the upstream gradient."""
    y = getattr(torch, op)(x.flip(0, 1).double(), 1).to(x.dtype)
    getattr(loss_triton, f"{op}_backward")(x, y, result)
    return input_gradient(op, x, y)


ENTRIES = [(name, classes) for name, (table, size, _) in TABLES.items() for classes in widths_of(table, 16 // size)]


@pytest.mark.parametrize(("name", "classes"), ENTRIES)
def test_each_entry_of_the_tables(name, classes, monkeypatch, device):
    """As it is launched on Hopper, with the rows of more programs than run at a time."""
    kernels, call = [], Launch.__call__

    def noting(self, *arguments):
        kernels.append(self._jit.__name__)
        call(self, *arguments)

    monkeypatch.setattr(Launch, "__call__", noting)
    for module in (cross_entropy, softmax):
        monkeypatch.setattr(module, "had_better_hold", lambda device: True)
    forget()
    of_loss = name.startswith(("loss alone", "gradient"))
    # The interpreter takes its time. A loss has an ignored row, and it takes a second row to begin inside a vector.
    rows = 2 if of_loss or classes % 8 else 1
    if devices.HAS_GPU:
        rows = 300 if classes > 20000 else 2100
    x = (4 * torch.randn(rows, classes, device=device)).to(torch.float32 if TABLES[name][1] == 4 else torch.bfloat16)
    # What is taken twice, or not at all, shows in the sums.
    x[:, :3] = x[:, -3:] = 12.0
    result = torch.full_like(x, math.nan)
    alone = name.startswith("loss alone")
    if of_loss:
        wanted = loss_and_wanted(x, None if alone else result)
    else:
        op = "log_softmax" if "True" in name else "softmax"
        wanted = (forward_and_wanted if "forward" in name else backward_and_wanted)(op, x, result)
    forget()
    assert len(kernels) == 1
    assert "_parts_" in kernels[0] or "_whole_" in kernels[0]
    if not alone:
        rounding, largest = max(torch.finfo(x.dtype).eps, 2e-6), float(wanted.abs().max())
        torch.testing.assert_close(result.double(), wanted, atol=1e-5 * largest, rtol=2 * rounding)
