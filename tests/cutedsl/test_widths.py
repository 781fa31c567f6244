"""Each schedule of the tables at the narrowest rows that it is for, which are neither multiples of a step nor few."""

import math

import loss_core
import pytest
import spills
import torch
from loss_cutedsl import _schedule
from support import devices
from support.softmax import input_gradient

pytestmark = pytest.mark.skipif(
    bool(devices.unavailable_reason("cutedsl")), reason=f"cutedsl: {devices.unavailable_reason('cutedsl')}"
)

# More than run at a time, so that blocks start where others have ended.
ROWS = 2500


def least_vectors(table):
    """Vectors of the narrowest rows of each entry, from where a row has a block of its own, and of wider ones."""
    return [129, *(width.most + 1 for width in table if width.most < _schedule.LARGEST)]


def columns(vectors, dtype, ragged):
    """As the tool that says what of these schedules spills has them."""
    width = _schedule.VECTOR_BYTES // dtype.itemsize
    cols = spills.columns(vectors, width, ragged)
    assert _schedule.most_vectors(cols, width, ragged) == vectors
    assert (cols % width != 0) == ragged
    return cols


CROSS_ENTROPY = [(*case, vectors) for case, table in _schedule.PLAIN.items() for vectors in least_vectors(table)]
SOFTMAX = [
    (case.inputs == 2, case.least, case.ragged)
    for case in (*_schedule.SOFTMAX_IN_REGISTERS, *_schedule.MEASURED_SOFTMAX)
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("gradient", "ragged", "vectors"), CROSS_ENTROPY)
def test_cross_entropy(gradient, ragged, vectors, dtype, device):
    cols = columns(vectors, dtype, ragged)
    rows = min(ROWS, 2**24 // cols)
    x = (4 * torch.randn(rows, cols)).to(device, dtype)
    target = torch.randint(cols, (rows,), device=device)
    target[0], target[-1] = -100, cols - 1
    reference = x.double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(reference, target)
    given = x.requires_grad_(gradient)
    loss = loss_core.cross_entropy(given, target, backend="cutedsl")
    torch.testing.assert_close(loss.detach().double(), wanted.detach(), atol=1e-5, rtol=1e-5)
    if gradient:
        (grad,) = torch.autograd.grad(loss, given)
        (truth,) = torch.autograd.grad(wanted, reference)
        rounding = max(torch.finfo(dtype).eps, 2e-6)
        torch.testing.assert_close(grad.double(), truth, atol=1e-5 / rows, rtol=2 * rounding)


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize(("backward", "vectors", "ragged"), SOFTMAX)
def test_softmax(op, backward, vectors, ragged, device):
    dtype = torch.bfloat16
    cols = columns(vectors, dtype, ragged)
    rows = min(ROWS, 2**24 // cols)
    x = (4 * torch.randn(rows, cols)).to(device, dtype).requires_grad_(backward)
    with torch.set_grad_enabled(backward):
        y = getattr(loss_core, op)(x, -1, backend="cutedsl")
    rounding = 2 * torch.finfo(dtype).eps
    if not backward:
        wanted = getattr(torch, op)(x.double(), -1)
        torch.testing.assert_close(y.double(), wanted, atol=1e-7, rtol=rounding)
        return
    g = torch.randn(rows, cols).to(device, dtype)
    (grad,) = torch.autograd.grad(y, x, g)
    wanted = input_gradient(op, g, y.detach())
    largest = float(wanted.abs().max())
    assert math.isfinite(largest)
    torch.testing.assert_close(grad.double(), wanted, atol=1e-5 * largest, rtol=rounding)
