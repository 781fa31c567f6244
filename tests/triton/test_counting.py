"""A program whose patience ends before all targets are counted counts them itself, to the same bits."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import loss_core
from loss_triton import cross_entropy, denominator
from support import devices
from support.plans import forget

pytestmark = pytest.mark.skipif(
    bool(devices.unavailable_reason("triton")), reason=f"triton: {devices.unavailable_reason('triton')}"
)


def loss_and_gradient(logits, target, **options):
    loss = loss_core.cross_entropy(logits, target, backend="triton", **options)
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


@pytest.fixture
def launches():
    """``launches(patience)``: kernels are prepared anew, for so much of it."""
    mend = pytest.MonkeyPatch()

    def prepare(patience):
        mend.setattr(cross_entropy, "patience", lambda device: patience)
        forget()

    yield prepare
    mend.undo()
    forget()


# Fewer rows than programs that count, as many, more, and such that slices end unevenly.
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=["plain", "options"])
def test_impatient_programs(rows, options, launches, device):
    logits = torch.randn(rows, 40).to(device).requires_grad_()
    target = torch.randint(40, (rows,))
    target[1::3] = -100
    reference = logits.detach().double().cpu().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(reference, target, **options)
    wanted = wanted.detach(), torch.autograd.grad(wanted, reference)[0]
    results = []
    # In the interpreter, where a program waits in vain for the next, there is no patience at all.
    for patience in (0,) if device == "cpu" else (0, 2048):
        launches(patience)
        results.append(loss_and_gradient(logits, target.to(device), **options))
    for got in results:
        for actual, truth in zip(got, wanted, strict=True):
            torch.testing.assert_close(actual.double().cpu(), truth, atol=1e-6, rtol=1e-5)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


@pytest.fixture
def few_are_too_many(monkeypatch):
    """A launch before the kernel counts rows from 50 on."""
    monkeypatch.setattr(denominator, "TOO_MANY_ROWS", 50)
    forget()
    yield
    forget()


def test_too_many_rows_to_count_in_the_kernel(few_are_too_many, monkeypatch, device):
    counted = []
    count = denominator.Launch.__call__

    def noting(self, programs, *arguments):
        counted.append(self._jit.__name__)
        count(self, programs, *arguments)

    monkeypatch.setattr(denominator.Launch, "__call__", noting)
    logits, target = torch.randn(60, 40).to(device).requires_grad_(), torch.randint(40, (60,))
    target[::3] = -100
    reference = logits.detach().double().cpu().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(reference, target)
    loss, grad = loss_and_gradient(logits, target.to(device))
    torch.testing.assert_close(loss.double().cpu(), wanted.detach(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(grad.double().cpu(), torch.autograd.grad(wanted, reference)[0], atol=1e-7, rtol=1e-5)
    assert counted[0] == "cross_entropy_denominator_kernel"
