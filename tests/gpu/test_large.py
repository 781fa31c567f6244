"""Sizes at which 32-bit offsets, grids and on-chip memory end. Values that float64 gives for a few rows."""

import loss_core
import pytest
import torch
from support.devices import skip_without

# One process at a time: they would not fit beside one another.
pytestmark = [pytest.mark.gpu, pytest.mark.huge, pytest.mark.xdist_group("huge")]


def loss_of(logits, target):
    return torch.nn.functional.cross_entropy(logits.double(), target, reduction="none")


@pytest.fixture(autouse=True)
def memory_given_back():
    yield
    torch.cuda.empty_cache()


def test_cross_entropy_beyond_2_31_elements_in_float32(backend, need_memory):
    rows, classes = 65536, 50257
    need_memory(30)
    logits = torch.randn(rows, classes, device="cuda", requires_grad=True)
    target = torch.randint(classes, (rows,), device="cuda")
    loss = loss_core.cross_entropy(logits, target, backend=backend)
    (grad,) = torch.autograd.grad(loss, logits)
    # 2**31 / 50257 = 42730.0: the rows on both sides of the overflow.
    checked = torch.tensor([0, 42729, 42730, 42731, 65535], device="cuda")
    some = logits.detach()[checked].double().requires_grad_()
    (wanted,) = torch.autograd.grad(loss_of(some, target[checked]).sum(), some)
    torch.testing.assert_close(grad[checked].double() * rows, wanted, atol=1e-6, rtol=1e-4)
    pieces = [loss_of(logits.detach()[i : i + 4096], target[i : i + 4096]).sum() for i in range(0, rows, 4096)]
    torch.testing.assert_close(loss.double(), torch.stack(pieces).sum() / rows, atol=0, rtol=1e-6)


def test_cross_entropy_rows_beyond_2_31_elements_in_bfloat16(backend, need_memory):
    rows, classes = 70000, 32768
    need_memory(12)
    logits = torch.randn(rows, classes, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(classes, (rows,), device="cuda")
    loss = loss_core.cross_entropy(logits, target, reduction="none", backend=backend)
    upstream = torch.randn(rows, device="cuda")
    (grad,) = torch.autograd.grad(loss, logits, upstream)
    last = logits.detach()[-10:].double().requires_grad_()
    wanted = loss_of(last, target[-10:])
    torch.testing.assert_close(loss[-10:].double(), wanted, atol=0, rtol=1e-5)
    (wanted,) = torch.autograd.grad(wanted, last, upstream[-10:].double())
    torch.testing.assert_close(grad[-10:].double(), wanted, atol=1e-9, rtol=2**-8)


def test_cross_entropy_with_a_row_stride_beyond_32_bits(backend, need_memory):
    need_memory(6)
    # Two rows 2**31 + 7 elements apart, in one buffer.
    stride, classes = 2**31 + 7, 1000
    buffer = torch.empty(stride + classes, device="cuda", dtype=torch.bfloat16)
    logits = buffer.as_strided((2, classes), (stride, 1))
    logits.copy_(torch.randn(2, classes))
    logits.requires_grad_()
    target = torch.tensor([3, 999], device="cuda")
    loss = loss_core.cross_entropy(logits, target, reduction="none", backend=backend)
    torch.testing.assert_close(loss.double(), loss_of(logits.detach(), target), atol=0, rtol=1e-5)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    wanted = torch.softmax(logits.detach().double(), -1) - torch.nn.functional.one_hot(target, classes)
    torch.testing.assert_close(grad.double(), wanted, atol=1e-9, rtol=2**-8)


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_softmax_beyond_2_32_elements(op, backend, need_memory):
    skip_without(backend, op)
    rows, classes = 131075, 32769
    need_memory(38)
    x = torch.randn(rows, classes, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = getattr(loss_core, op)(x, backend=backend)
    probabilities = y.detach()[-5:].float()
    if op == "log_softmax":
        probabilities = probabilities.exp()
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(5, device="cuda"), atol=1e-2, rtol=0)
    wanted = getattr(torch, op)(x.detach()[-5:].double(), -1)
    torch.testing.assert_close(y.detach()[-5:].double(), wanted, atol=1e-12, rtol=2**-8)
    # The gradient of one element in the last row, and none elsewhere.
    upstream = torch.zeros((), device="cuda", dtype=torch.bfloat16).expand_as(y).clone()
    upstream[-1, 7] = 1
    (grad,) = torch.autograd.grad(y, x, upstream)
    tail = x.detach()[-2:].double().requires_grad_()
    (wanted,) = torch.autograd.grad(getattr(torch, op)(tail, -1)[1, 7], tail)
    # A log-probability near -11 is rounded to a sixteenth, and the gradient is computed from it.
    torch.testing.assert_close(grad[-2:].double(), wanted, atol=1e-9, rtol=2**-6 if op == "softmax" else 2**-4)
    assert not grad[:5].any()


def test_softmax_with_an_outer_stride_of_2_32(backend, need_memory):
    skip_without(backend, "softmax")
    need_memory(36)
    x = torch.randn(2, 65536, 65536, device="cuda", dtype=torch.bfloat16)
    y = loss_core.softmax(x, backend=backend)
    for place in ((0, 0), (0, 32768), (1, 0), (1, 65535)):
        wanted = torch.softmax(x[place].double(), -1)
        torch.testing.assert_close(y[place].double(), wanted, atol=1e-12, rtol=2**-8)
    # A view whose rows are far apart, too.
    y = loss_core.softmax(x[:, 3, :1000], backend=backend)
    torch.testing.assert_close(y.double(), torch.softmax(x[:, 3, :1000].double(), -1), atol=1e-12, rtol=2**-8)


@pytest.mark.parametrize("op", ["softmax", "cross_entropy"])
def test_one_row_of_2_28_classes(op, backend, need_memory):
    """Far more than fits on chip: another path or a loop, or a refusal, not an endless compilation."""
    skip_without(backend, op)
    need_memory(12)
    x = torch.randn(1, 2**28, device="cuda", dtype=torch.bfloat16)
    target = torch.tensor([2**28 - 1], device="cuda")
    try:
        if op == "softmax":
            y = loss_core.softmax(x, backend=backend)
        else:
            loss = loss_core.cross_entropy(x, target, backend=backend)
    except loss_core.UnsupportedInput as refusal:
        pytest.skip(f"{backend} refuses: {refusal}")
    if op == "softmax":
        assert abs(y.double().sum().item() - 1) < 2e-2
    else:
        lse = torch.logsumexp(torch.stack([torch.logsumexp(p.double(), 0) for p in x[0].chunk(16)]), 0)
        torch.testing.assert_close(loss.double(), lse - x[0, -1].double(), atol=0, rtol=1e-4)


def test_the_automatic_choice_does_a_row_of_2_28_classes(need_memory):
    need_memory(12)
    x = torch.randn(1, 2**28, device="cuda", dtype=torch.bfloat16)
    assert abs(loss_core.softmax(x).double().sum().item() - 1) < 2e-2


def test_more_rows_than_a_grid_axis_holds(backend):
    logits = torch.randn(65536, 8, device="cuda", requires_grad=True)
    target = torch.randint(8, (65536,), device="cuda")
    loss = loss_core.cross_entropy(logits, target, reduction="none", backend=backend)
    torch.testing.assert_close(loss.double(), loss_of(logits.detach(), target), atol=1e-5, rtol=0)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    wanted = torch.softmax(logits.detach().double(), -1) - torch.nn.functional.one_hot(target, 8)
    torch.testing.assert_close(grad.double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rows", [65536, 2**20 + 1])
def test_mean_over_many_rows(rows, backend):
    logits = torch.randn(rows, 8, device="cuda", requires_grad=True)
    target = torch.randint(8, (rows,), device="cuda")
    target[::3] = -100
    loss = loss_core.cross_entropy(logits, target, backend=backend)
    reference = logits.detach().double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(reference, target)
    torch.testing.assert_close(loss.double(), wanted.detach(), atol=0, rtol=1e-5)
    (grad,), (wanted,) = torch.autograd.grad(loss, logits), torch.autograd.grad(wanted, reference)
    torch.testing.assert_close(grad.double() * rows, wanted * rows, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_softmax_over_the_middle_dimension_of_many(op, backend):
    skip_without(backend, op)
    x = torch.randn(65537, 3, 2, device="cuda", requires_grad=True)
    y = getattr(loss_core, op)(x, 1, backend=backend)
    reference = x.detach().double().requires_grad_()
    wanted = getattr(torch, op)(reference, 1)
    torch.testing.assert_close(y.double(), wanted, atol=1e-5, rtol=0)
    upstream = torch.randn_like(y)
    (grad,), (wanted,) = torch.autograd.grad(y, x, upstream), torch.autograd.grad(wanted, reference, upstream.double())
    torch.testing.assert_close(grad.double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_softmax_over_the_middle_dimension_beyond_2_31_elements(op, backend, need_memory):
    skip_without(backend, op)
    # A copy with the classes last may be made of what is passed in.
    need_memory(32)
    x = torch.randn(2, 1024, 1_100_000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = getattr(loss_core, op)(x, 1, backend=backend)
    for place in ((0, 0), (1, 0), (0, 1_099_999), (1, 1_099_999)):
        column = x.detach()[place[0], :, place[1]].double()
        got = y.detach()[place[0], :, place[1]].double()
        torch.testing.assert_close(got, getattr(torch, op)(column, 0), atol=1e-12, rtol=2**-8)
    upstream = torch.zeros_like(y)
    upstream[1, 5, -1] = 1
    (grad,) = torch.autograd.grad(y, x, upstream)
    column = x.detach()[1, :, -1].double().requires_grad_()
    (wanted,) = torch.autograd.grad(getattr(torch, op)(column, 0)[5], column)
    torch.testing.assert_close(grad[1, :, -1].double(), wanted, atol=1e-9, rtol=2**-6 if op == "softmax" else 2**-4)
    assert not grad[0, :, :10].any()
