"""Programs that draw their rows give what a program for each row gives, bit for bit."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import loss_core
from loss_core import memory
from loss_triton import cross_entropy, schedules
from support import devices

pytestmark = pytest.mark.skipif(
    bool(devices.unavailable_reason("triton")), reason=f"triton: {devices.unavailable_reason('triton')}"
)


@pytest.fixture
def programs(monkeypatch):
    """``programs(number)``: so many of a multiprocessor draw rows of any width; 0: one for each row."""

    def choose(number):
        def schedule(classes, size, vector):
            return schedules.gradient_schedule(classes, size, vector)._replace(programs=number)

        monkeypatch.setattr(cross_entropy, "gradient_schedule", schedule)
        forget()

    yield choose
    monkeypatch.undo()
    forget()


def forget():
    cross_entropy._plan.cache_clear()
    # The usual call keeps what was prepared of it.
    loss_core.registry.refresh()


def loss_and_gradient(logits, classes, target, options):
    view = (logits * 1)[:, :classes]
    loss = loss_core.cross_entropy(view, target, backend="triton", **options)
    (grad,) = torch.autograd.grad(loss, logits, torch.tensor(0.7, device=logits.device))
    return loss.detach(), grad


@pytest.mark.parametrize(
    ("rows", "classes", "padding", "dtype", "options"),
    [
        (1, 40, 0, torch.float32, {}),
        (2, 1001, 0, torch.bfloat16, {"reduction": "sum"}),
        (7, 1000, 24, torch.float32, {"num_items": 7}),
        (7, 1000, 24, torch.bfloat16, {"inplace": True}),
        (70, 33, 1, torch.bfloat16, {}),
        (3, 40000, 0, torch.bfloat16, {}),
        (100, 8, 0, torch.float32, {"inplace": True}),
    ],
)
def test_the_same_bits(programs, rows, classes, padding, dtype, options, device):
    logits = (3 * torch.randn(rows, classes + padding, device=device)).to(dtype).requires_grad_()
    target = torch.randint(classes, (rows,), device=device)
    target[1::3] = -100
    results = []
    for number in (0, 3):
        programs(number)
        results.append(loss_and_gradient(logits, classes, target, options))
        assert not any(words.any() for words in memory._kept.values()), "a launch leaves the counters at 0"
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    reference = logits.detach()[:, :classes].double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(reference, target, reduction="sum")
    loss = loss / {"sum": 1}.get(options.get("reduction"), options.get("num_items", (target != -100).sum()))
    (0.7 * loss).backward()
    torch.testing.assert_close(results[0][0].double(), loss.detach(), rtol=1e-5, atol=1e-6)
    # The interpreter cuts bfloat16 off where it should round it, and an inplace gradient is rounded twice.
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(results[0][1][:, :classes].double(), reference.grad, rtol=tolerance, atol=1e-6)
