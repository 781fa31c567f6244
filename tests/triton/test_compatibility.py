"""The names of earlier packages: their arguments and results, from float64."""

import loss_triton
import pytest
import torch
from support import devices

REASON = devices.unavailable_reason("triton")
pytestmark = pytest.mark.skipif(bool(REASON), reason=f"triton: {REASON}")


def inputs(*shape):
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(*shape, generator=generator).to(devices.DEVICE).requires_grad_()
    labels = torch.randint(shape[-1], shape[:-1], generator=generator).to(devices.DEVICE)
    labels[..., 1] = -100
    return logits, labels


def reference(logits, labels, upstream):
    exact = logits.detach().double().cpu().requires_grad_()
    loss = torch.nn.functional.cross_entropy(exact.reshape(-1, exact.shape[-1]), labels.reshape(-1).cpu())
    (grad,) = torch.autograd.grad(loss, exact, torch.tensor(upstream, dtype=torch.float64))
    return loss, grad


@pytest.mark.parametrize(
    "loss", [lambda x, y: loss_triton.CrossEntropyFunction.apply(x, y, -100), loss_triton.TritonCausalLMLoss(37)]
)
def test_next_token_loss(loss):
    logits, labels = inputs(2, 5, 37)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    expected, expected_grad = reference(logits, shifted, 1.7)
    value = loss(logits, labels)
    value.backward(torch.tensor(1.7, device=value.device))
    torch.testing.assert_close(value.detach().double().cpu(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.grad.double().cpu(), expected_grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_labels_of_few_bits(dtype):
    """In a comparison with a uint8, -100 is 156, which is a byte like any other."""
    logits, labels = inputs(2, 6, 200)
    labels = torch.full_like(labels, 156).to(dtype)
    expected, expected_grad = reference(logits[:, :-1], labels[:, 1:].long(), 1.7)
    value = loss_triton.CrossEntropyFunction.apply(logits, labels, -100)
    value.backward(torch.tensor(1.7, device=value.device))
    torch.testing.assert_close(value.detach().double().cpu(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.grad[:, :-1].double().cpu(), expected_grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("loss", [loss_triton.FusedCrossEntropyFunction.apply, loss_triton.TritonCrossEntropyLoss()])
def test_loss_without_shift(loss):
    logits, targets = inputs(6, 41)
    targets[1] = -100
    expected, expected_grad = reference(logits, targets, -0.6)
    value = loss(logits, targets)
    value.backward(torch.tensor(-0.6, device=value.device))
    torch.testing.assert_close(value.detach().double().cpu(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.grad.double().cpu(), expected_grad, rtol=1e-5, atol=1e-7)


def test_nothing_to_learn_from_is_zero():
    logits, labels = inputs(2, 4, 9)
    loss = loss_triton.CrossEntropyFunction.apply(logits, torch.full_like(labels, -100), -100)
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad.count_nonzero().item() == 0


def test_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match="must have 10 classes"):
        loss_triton.TritonCausalLMLoss(10)(*inputs(2, 4, 9))
