"""Softmax along an inner dimension: without a transposed copy, to the same accuracy as along rows."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import loss_core
import loss_triton
from loss_core.columns import from_columns, outer_dims, to_columns
from support import devices

OPS = ("softmax", "log_softmax")


@pytest.fixture(autouse=True)
def _needs_the_backend():
    if reason := devices.unavailable_reason("triton"):
        pytest.skip(reason)


@pytest.fixture
def calls(monkeypatch):
    """The names of the functions over columns that are called."""
    made = []
    for op in OPS:
        for direction in ("forward", "backward"):
            name = f"{op}_columns_{direction}"
            function = getattr(loss_triton, name)

            def record(*tensors, name=name, function=function):
                made.append(name)
                return function(*tensors)

            monkeypatch.setattr(loss_triton, name, record)
    return made


def close(got, wanted, dtype):
    """To a few units in the last place of `dtype`, near 1; NaN where NaN is due."""
    allowed = 4 * max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(got.double(), wanted, rtol=allowed, atol=allowed, equal_nan=True)


def check(op, x, dim, dtype=None):
    """Forward and backward of `op` against float64; returns the result and the gradient."""
    x = x.detach().requires_grad_()
    y = getattr(loss_core, op)(x, dim, dtype=dtype, backend="triton")
    g = torch.randn(x.shape, device=x.device).to(y.dtype)
    (dx,) = torch.autograd.grad(y, x, g)
    close(y.detach(), getattr(torch, op)(x.detach().double(), dim), y.dtype)
    # The backward starts from the rounded result.
    p = y.detach().double().exp() if op == "log_softmax" else y.detach().double()
    share = g.double() if op == "log_softmax" else g.double() * p
    close(dx, share - p * share.sum(dim, keepdim=True), x.dtype)
    assert y.dtype == (dtype or x.dtype)
    assert dx.dtype == x.dtype
    return y, dx


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((3, 5, 7), 0),
        ((3, 5, 7), 1),
        ((2, 300, 16), 1),  # several tiles, whole vectors
        ((1, 1025, 33), 1),
        ((700, 2), 0),
        ((2, 21, 4, 40), 1),
        ((4, 3, 2, 8), 2),
        ((2, 2, 1, 3, 1), 1),
    ],
)
def test_against_float64(op, dtype, shape, dim, device, calls, nan_filled_memory):
    x = (3 * torch.randn(shape, device=device)).to(dtype)
    y, dx = check(op, x, dim)
    assert calls == [f"{op}_columns_forward", f"{op}_columns_backward"]
    assert y.is_contiguous()
    assert dx.is_contiguous()


@pytest.mark.parametrize("op", OPS)
def test_layouts(op, device, calls):
    base = torch.randn(40, 70, device=device)
    y, _ = check(op, base.t(), 1)
    assert y.stride() == base.t().stride()
    check(op, base[:, 3:60], 0)  # neither aligned nor as wide as it lies
    check(op, torch.randn(2, 9, 50, device=device)[:, ::2, 1:34], 1)
    check(op, torch.randn(1, 1, 24, device=device).expand(3, 5, 24), 1)
    check(op, torch.randn(6, 4, 8, device=device).permute(1, 2, 0), 2)
    assert calls == [f"{op}_columns_forward", f"{op}_columns_backward"] * 5


@pytest.mark.parametrize("op", OPS)
def test_rows_stay_rows(op, device, calls):
    check(op, torch.randn(4, 6, device=device), 1)
    check(op, torch.randn(6, 4, device=device).t(), 0)
    check(op, torch.randn(5, 1, device=device), 0)
    check(op, torch.randn(5, 1, 3, device=device), 1)
    check(op, torch.randn(4, 6, 10, device=device)[:, :, ::2], 1)
    assert not calls


@pytest.mark.parametrize("op", OPS)
def test_result_dtype(op, device):
    x = torch.randn(2, 90, 24, device=device)
    check(op, x.bfloat16(), 1, torch.float32)
    check(op, x, 1, torch.float16)


@pytest.mark.parametrize("op", OPS)
def test_infinities_and_nan(op, device):
    x = torch.randn(2, 600, 16, device=device)
    x[0, :, 1] = float("-inf")
    x[0, :599, 2] = float("-inf")
    x[0, 1:, 3] = float("-inf")
    x[1, 7, 4] = float("nan")
    x[1, 599, 5] = float("inf")
    x[1, 8, 6] = 1e4
    got = getattr(loss_core, op)(x, 1, backend="triton")
    close(got, getattr(torch, op)(x.double(), 1), torch.float32)


@pytest.mark.parametrize("op", OPS)
def test_gradient_that_lies_otherwise(op, device, calls):
    x = torch.randn(3, 11, 8, device=device, requires_grad=True)
    x64 = x.detach().double().requires_grad_()
    for grad in (
        torch.ones((), device=device).expand(3, 11, 8),
        torch.randn(8, 11, 3, device=device).permute(2, 1, 0),
        torch.randn(3, 8, 11, device=device).transpose(1, 2),
    ):
        (dx,) = torch.autograd.grad(getattr(loss_core, op)(x, 1, backend="triton"), x, grad)
        (dx64,) = torch.autograd.grad(getattr(torch, op)(x64, 1), x64, grad.double())
        close(dx, dx64, torch.float32)
    assert len(calls) == 6


def test_too_few_columns_are_done_as_rows(device, calls):
    x = torch.randn(5000, 3, device=device)
    y, dx = check("softmax", x, 0)
    assert calls[0] == "softmax_columns_forward"
    # What the refused call would have returned, and what lies as rows and is not tried as columns again.
    assert y.stride(0) == dx.stride(0) == 1
    assert len(calls) == 1


def test_without_the_functions(device, monkeypatch):
    for op in OPS:
        for direction in ("forward", "backward"):
            monkeypatch.delattr(loss_triton, f"{op}_columns_{direction}")
    y, _ = check("softmax", torch.randn(3, 5, 7, device=device), 1)
    assert y.stride(1) == 1


def test_columns_are_views(device):
    for shape, dim, order in (
        ((3, 5, 7), 0, (0, 1, 2)),
        ((2, 5, 3, 4), 1, (0, 1, 2, 3)),
        ((2, 5, 3, 4), 2, (0, 1, 2, 3)),
        ((5, 7), 1, (1, 0)),
        ((6, 4, 8), 2, (1, 2, 0)),
    ):
        x = torch.randn(shape, device=device).permute(order)
        outer = outer_dims(x, dim)
        columns = to_columns(x, dim, outer)
        assert columns.data_ptr() == x.data_ptr()
        assert columns.stride(2) == 1
        back = from_columns(columns, x.shape, dim, outer)
        assert back.shape == x.shape
        assert torch.equal(back, x)


def test_many_small_outer_indices_are_done_as_rows(device):
    x = torch.randn(2**14, 2, 3, device=device)
    with pytest.raises(loss_core.UnsupportedInput, match="few elements"):
        loss_triton.softmax_columns_forward(x, torch.empty_like(x))
    with pytest.raises(loss_core.UnsupportedInput, match="float64"):
        loss_triton.softmax_columns_forward(x.double(), torch.empty_like(x))


def test_compiled_calls_are_done_as_rows(device, calls):
    x = torch.randn(3, 5, 7, device=device)
    y = torch.ops.loss_core.softmax(x, "softmax", 1, torch.float32, "triton")
    dx = torch.ops.loss_core.softmax_backward(x, x.softmax(1), "softmax", 1, torch.float32, "triton")
    # As the compiler was told.
    assert y.stride() == dx.stride() == (35, 1, 5)
    assert not calls
