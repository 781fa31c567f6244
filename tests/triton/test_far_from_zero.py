"""The backward keeps the digits of rows whose lse, a float32, has none to spare."""

import loss_core
import pytest
import torch
from support import devices
from torch.nn import functional

REASON = devices.unavailable_reason("triton")
pytestmark = pytest.mark.skipif(bool(REASON), reason=f"triton: {REASON}")

# Where numbers of float32 lie 2**-15, 2**-10 and 1 apart, and an lse is rounded by up to half of that.
SHIFTS = [500.0, -1e4, -1e7]
OPTIONS = [{"weight": True}, {"label_smoothing": 0.1}, {"logit_scale": -0.5}, {"z_loss": 1e-3}]


def exact_loss(logits, target, reduction, weight=None, logit_scale=1.0, softcap=None, z_loss=0.0, label_smoothing=0.0):
    x = logit_scale * logits
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    loss = functional.cross_entropy(x, target, weight, reduction="none", label_smoothing=label_smoothing)
    loss = loss + torch.where(target == -100, 0, z_loss * x.logsumexp(-1) ** 2)
    if reduction == "none":
        return loss
    live = target != -100
    return loss.sum() / (live.sum() if weight is None else weight[target[live]].sum())


# A narrow row, rows with and without edges, one of several blocks, and one that lies too unevenly for vectors.
@pytest.mark.parametrize(("classes", "padding"), [(40, 0), (1003, 0), (1024, 0), (9001, 0), (300, 1)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("shift", SHIFTS)
def test_widths(shift, reduction, classes, padding, device):
    check(shift, reduction, classes, padding, torch.float32, {}, device)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("shift", SHIFTS[:2])
def test_options(shift, reduction, options, device):
    check(shift, reduction, 43, 0, torch.float32, options, device)


@pytest.mark.parametrize("shift", [500.0, -2e3])
def test_softcap(shift, device):
    # What the cap makes of a logit is rounded, once and for all.
    check(shift, "none", 43, 0, torch.float32, {"softcap": 5e3}, device, relative=1e-3)


@pytest.mark.parametrize(
    ("dtype", "shift"), [(torch.float16, -3e4), (torch.bfloat16, 1e4), (torch.bfloat16, -1e6)], ids=str
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_narrow_dtypes(reduction, dtype, shift, device):
    check(shift, reduction, 1003, 0, dtype, {}, device)


def check(shift, reduction, classes, padding, dtype, options, device, relative=None):
    padded = (torch.randn(5, classes + padding) + shift).to(dtype)
    # With smoothing the loss of -inf is inf.
    padded[1, : classes // 2] = -torch.inf if not options else shift
    target = torch.tensor([0, classes - 1, -100, classes // 2, classes - 2])
    options = {**options, "weight": torch.rand(classes) + 0.5} if "weight" in options else options
    exact = padded.double().requires_grad_()
    of_exact = {key: value.double() if key == "weight" else value for key, value in options.items()}
    wanted = exact_loss(exact[:, :classes], target, reduction, **of_exact)
    upstream = torch.rand(wanted.shape) + 0.5
    (truth,) = torch.autograd.grad(wanted, exact, upstream.double())
    logits = padded.to(device).requires_grad_()
    options = {key: value.to(device) if key == "weight" else value for key, value in options.items()}
    loss = loss_core.cross_entropy(
        logits[:, :classes], target.to(device), reduction=reduction, backend="triton", **options
    )
    (grad,) = torch.autograd.grad(loss, logits, upstream.to(device))
    # The interpreter truncates narrow dtypes.
    relative = relative or (4e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(grad.cpu().double(), truth, rtol=relative, atol=relative * truth.abs().max().item() / 8)
