"""The reference in float64 against torch, to 1e-12: every pair of options, every reduction, loss and gradient."""

import itertools

import loss_core
import pytest
import torch
from loss_core.testing import make_inputs
from loss_core.testing.case import OPTIONS, Case
from torch.nn import functional

PAIRS = [*itertools.combinations(OPTIONS, 1), *itertools.combinations(OPTIONS, 2), *itertools.combinations(OPTIONS, 3)]


def formula(x, target, weight, ignore_index, e, z, cap, scale):
    """Row losses as design and docstring state them, one class at a time."""
    x = scale * x
    if cap is not None:
        x = cap * torch.tanh(x / cap)
    rows = []
    for row, y in zip(x, target.tolist(), strict=True):
        if y == ignore_index:
            rows.append(torch.zeros((), dtype=x.dtype))
            continue
        lse = row.exp().sum().log()
        of_target = (1 - e) * weight[y] * (lse - row[y])
        uniform = e / len(row) * (weight * (lse - row)).sum()
        rows.append(of_target + uniform + z * lse**2)
    return torch.stack(rows)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum", "byte_mean"])
@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_every_combination_of_options(names, reduction):
    if {"float_items", "tensor_items"} <= set(names) or ("items" in "".join(names) and reduction != "mean"):
        reduction = "mean"  # num_items is its denominator
    options = {}
    for name in names:
        options |= OPTIONS[name]
    case = Case("cross_entropy", rows=6, classes=13, dtype=torch.float64, reduction=reduction, **options)
    inputs = make_inputs(case)
    logits = torch.nan_to_num(inputs.logits.detach(), nan=0.3).requires_grad_()
    live = inputs.target != case.ignore_index
    got = loss_core.cross_entropy(
        logits, inputs.target, inputs.weight, reduction=reduction, label_smoothing=case.label_smoothing,
        z_loss=case.z_loss, softcap=case.softcap, logit_scale=case.logit_scale, byte_lengths=inputs.byte_lengths,
        num_items=inputs.num_items, backend="torch",
    )  # fmt: skip

    weight = torch.ones(13, dtype=torch.float64) if inputs.weight is None else inputs.weight.double()
    rows = formula(
        logits, inputs.target, weight, case.ignore_index, case.label_smoothing, case.z_loss, case.softcap,
        case.logit_scale,
    )  # fmt: skip
    denominator = {
        "none": 1.0,
        "sum": 1.0,
        "byte_mean": 0 if inputs.byte_lengths is None else inputs.byte_lengths[live].sum(),
        "mean": weight[inputs.target[live]].sum() if inputs.num_items is None else inputs.num_items,
    }[reduction]
    wanted = rows if reduction == "none" else rows.sum() / denominator
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-12)
    upstream = torch.randn_like(got)
    (grad,) = torch.autograd.grad(got, logits, upstream)
    (truth,) = torch.autograd.grad(wanted, logits, upstream)
    torch.testing.assert_close(grad, truth, atol=1e-12, rtol=1e-12)

    plain = {"weight", "smoothing"}
    if set(names) <= plain and reduction != "byte_mean":
        of_torch = functional.cross_entropy(
            logits, inputs.target, weight, reduction=reduction, label_smoothing=case.label_smoothing
        )
        torch.testing.assert_close(got, of_torch, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradcheck(weighted, smoothing, reduction):
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 5, -100, 2])
    weight = torch.rand(6) if weighted else None
    torch.autograd.gradcheck(
        lambda x: loss_core.cross_entropy(
            x, target, weight, reduction=reduction, label_smoothing=smoothing, z_loss=0.02, softcap=3.0, logit_scale=0.7
        ),
        logits,
    )


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_probabilities(weighted, smoothing, reduction):
    logits = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)
    target = torch.rand(2, 6, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(6, dtype=torch.float64) if weighted else None
    options = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing}
    got = loss_core.cross_entropy(logits, target, dim=1, **options)
    wanted = functional.cross_entropy(logits, target, **options)
    torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-12)
    upstream = torch.randn_like(wanted)
    for grad, truth in zip(
        torch.autograd.grad(got, (logits, target), upstream),
        torch.autograd.grad(wanted, (logits, target), upstream),
        strict=True,
    ):
        torch.testing.assert_close(grad, truth, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("offset", [-1e7, 1e7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", [{}, {"weight": True}, {"label_smoothing": 0.1}, {"logit_scale": -1.0}], ids=str)
@pytest.mark.parametrize("target", ["indices", "probabilities"])
def test_logits_far_from_zero(target, options, dtype, offset):
    """Whoever subtracts the log-sum-exp in one rounding has no digits left."""
    logits = (torch.rand(4, 6, dtype=dtype) * 4 + offset).requires_grad_()
    goal = torch.tensor([0, 5, -100, 2]) if target == "indices" else torch.rand(4, 6, dtype=dtype, requires_grad=True)
    weight = torch.rand(6, dtype=dtype) if options.get("weight") else None
    options = {name: value for name, value in options.items() if name != "weight"}
    loss = loss_core.cross_entropy(logits, goal, weight, reduction="none", backend="torch", **options)
    # Exact in float64: the logits are multiples of a power of two.
    exact = (logits.detach().double() - offset).requires_grad_()
    of_torch = goal if target == "indices" else goal.detach().double().requires_grad_()
    wanted = functional.cross_entropy(
        exact * options.pop("logit_scale", 1.0), of_torch, None if weight is None else weight.double(),
        reduction="none", **options,
    )  # fmt: skip
    precision = 1e-12 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(loss.double(), wanted, atol=precision, rtol=precision)
    upstream = torch.rand(4, dtype=dtype)
    leaves = [(logits, exact)] if target == "indices" else [(logits, exact), (goal, of_torch)]
    for leaf, truth in leaves:
        (grad,) = torch.autograd.grad(loss, leaf, upstream, retain_graph=True)
        (right,) = torch.autograd.grad(wanted, truth, upstream.double(), retain_graph=True)
        torch.testing.assert_close(grad.double(), right, atol=precision, rtol=precision)


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dim", [-3, -2, -1, 0, 1, 2])
def test_softmax_over_each_dimension(op, dim):
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    got, wanted = getattr(loss_core, op)(x, dim), getattr(functional, op)(x, dim)
    torch.testing.assert_close(got, wanted, atol=1e-14, rtol=1e-13)
    upstream = torch.randn_like(x)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, upstream)[0] for y in (got, wanted)), atol=1e-14, rtol=1e-13)


def test_rows_do_not_depend_on_the_pieces(monkeypatch):
    """Worked through one row at a time or all at once, the bits are the same."""
    import sys

    logits = torch.randn(7, 33, dtype=torch.bfloat16).requires_grad_()
    target = torch.tensor([0, -100, 32, 5, 6, 7, 8])
    results = []
    for piece in (1, 33 * 3, 2**22):
        monkeypatch.setattr(sys.modules["loss_core.reference.pieces"], "PIECE", piece)
        loss = loss_core.cross_entropy(logits, target, label_smoothing=0.1)
        results.append((loss.detach(), *torch.autograd.grad(loss, logits)))
    for other in results[1:]:
        assert torch.equal(results[0][0], other[0])
        assert torch.equal(results[0][1], other[1])
