"""Rows at the ends of a dtype's range, where a logit times log2(e) overflows float32, and rows far from zero."""

import loss_core
import pytest
import torch

# Rows of one block and of several, in vectors and not.
WIDTHS = [40, 9001, 33000]


def extreme_rows(classes, dtype):
    """Masks made with the least number, alone, beside logits and beside -inf; the largest number; shifted logits."""
    least, most = torch.finfo(dtype).min, torch.finfo(dtype).max
    x = torch.randn(11, classes)
    x[0] = least
    x[1, : classes // 2] = least
    x[2, 1:] = least
    x[3, ::3], x[3, 1::3] = least, -torch.inf
    x[4, 5] = most
    x[5, 7::2] = most
    x[6, 0], x[6, -1] = least, most
    # The last elements apart from the others, for they are summed last.
    x[7, :-3], x[7, -3:] = least, least / 2
    x[8, :-3], x[8, -3:] = most, most / 2
    x[9] -= 3e4
    x[10] += 1e4
    return x.to(dtype)


# The gradient in the forward, no gradient, and the backward that computes it from the logits once more.
@pytest.mark.parametrize(("gradient", "reduction"), [(True, "mean"), (False, "mean"), (True, "none")])
@pytest.mark.parametrize("classes", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy(dtype, classes, gradient, reduction, backend, device):
    x = extreme_rows(classes, dtype)
    target = torch.randint(classes, (len(x),))
    target[4], target[6] = 5, 0
    exact = x.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(exact, target, reduction="none")
    # A row's gradient is that of its own loss.
    (truth,) = torch.autograd.grad(losses, exact, torch.ones_like(losses))
    # Row by row, for the sum of all would be inf.
    for row in range(len(x)):
        logits = x[row : row + 1].to(device).requires_grad_(gradient)
        loss = loss_core.cross_entropy(
            logits, target[row : row + 1].to(device), reduction=reduction, backend=backend
        ).squeeze()
        wanted = losses[row].detach().to(torch.float32)
        torch.testing.assert_close(
            loss.detach().cpu(), wanted, rtol=4e-6, atol=1e-6, msg=lambda m, row=row: f"row {row}: {m}"
        )
        if gradient:
            (grad,) = torch.autograd.grad(loss, logits)
            close(grad[0], truth[row], dtype, row)


# Of which no logit times log2(e) is a float32.
LEFT = [43.7, -1e4, 3e5, -7e8, 3e9, 1e30]


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("classes", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_with_one_class_left_has_no_loss(dtype, classes, gradient, backend, device):
    """Nothing of what rounding did to the exponents is left, and no loss is below 0."""
    x = torch.full((len(LEFT), classes), -torch.inf, dtype=dtype)
    target = torch.arange(len(LEFT)) * 7 % classes
    x[torch.arange(len(LEFT)), target] = torch.tensor(LEFT, dtype=dtype)
    for row in range(len(LEFT)):
        logits = x[row : row + 1].to(device).requires_grad_(gradient)
        loss = loss_core.cross_entropy(logits, target[row : row + 1].to(device), backend=backend)
        assert float(loss) == 0.0, LEFT[row]
        if gradient:
            (grad,) = torch.autograd.grad(loss, logits)
            assert float(grad.abs().max()) < 2e-7, LEFT[row]


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("classes", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_with_one_class_left_has_its_probability(dtype, classes, op, backend, device):
    x = torch.full((len(LEFT), classes), -torch.inf, dtype=dtype)
    x[:, -1] = torch.tensor(LEFT, dtype=dtype)
    result = getattr(loss_core, op)(x.to(device), -1, backend=backend).cpu().float()
    wanted = getattr(torch, op)(torch.where(x.isinf(), x, 0.0).double(), -1).float()
    # The interpreter truncates narrow dtypes.
    narrow = 0.0 if "cuda" in str(device) else torch.finfo(dtype).eps
    torch.testing.assert_close(result, wanted, atol=1.5e-7 if dtype == torch.float32 else narrow, rtol=0.0)


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("classes", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_softmax(dtype, classes, op, backend, device):
    x = extreme_rows(classes, dtype)
    result = getattr(loss_core, op)(x.to(device), -1, backend=backend)
    truth = getattr(torch, op)(x.double(), -1)
    for row in range(len(x)):
        close(result[row], truth[row].to(torch.float32), dtype, row, 1e-6 if op == "log_softmax" else 1e-9)


def close(actual, truth, dtype, row, absolute=1e-9):
    # Exponents are rounded to float32, up to 30 of them matter; the interpreter truncates narrow dtypes.
    relative = 4e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        actual.detach().cpu().double(), truth.double().to(dtype).double(), rtol=relative, atol=absolute,
    )  # fmt: skip
