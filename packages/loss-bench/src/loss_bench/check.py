"""The verdict on a backend's result, against float64.

An element of a gradient is judged against ``budget * scale``: the scale is the size of the terms that make the
element (so that a difference of large terms is not asked to be exact), the budget a small multiple of the dtype's
rounding that leaves room for log-probabilities held in that dtype, as torch itself holds them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from loss_bench.calls import Call, shifted
from loss_bench.cases import Case
from loss_bench.inputs import IGNORE_INDEX, Inputs
from loss_bench.measure import poison
from loss_bench.reference import CrossEntropyRows, mean_denominator, pieces, softmax_gradient, softmax_rows

# torch holds bf16 log-probabilities, which are 0.125 apart below -16: half of that is 6% of a probability, 8 units of
# rounding, and they are rounded more than once. Measured on an H200 with 50257 to 151936 classes: up to 18 units.
_BUDGET = {
    torch.float16: 24 * torch.finfo(torch.float16).eps,
    torch.bfloat16: 24 * torch.finfo(torch.bfloat16).eps,
    torch.float32: 128 * torch.finfo(torch.float32).eps,
    torch.float64: 1024 * torch.finfo(torch.float64).eps,
}
_LOSS_BUDGET = {
    torch.float16: 4 * torch.finfo(torch.float16).eps,
    torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps,
    torch.float32: 2e-5,
    torch.float64: 1e-11,
}


@dataclass(frozen=True)
class Verdict:
    """How far a result is from float64.

    Attributes:
        right: whether it is within the budget.
        loss_error: relative error of the loss; of the output (norm of the difference over the norm) for softmax.
        grad_error: relative error of the gradient, the same way; None without one.
        worst: largest error of an element, as a multiple of what it may be; above 1 is wrong.
        reason: what is wrong, or "".
        overwrites: whether the call changed the logits.
    """

    right: bool
    loss_error: float
    grad_error: float | None
    worst: float
    reason: str
    overwrites: bool


@dataclass
class _Errors:
    """Sums over the pieces."""

    squares: float = 0.0
    reference_squares: float = 0.0
    worst: float = 0.0

    def add(self, got: Tensor, want: Tensor, allowed: Tensor) -> None:
        difference = (got.double() - want).abs_()
        self.squares += float(difference.square().sum())
        self.reference_squares += float(want.square().sum())
        # The largest of nothing is 0; NaN, which no comparison would find, stays NaN.
        if difference.numel():
            self.worst = _larger(self.worst, float((difference / allowed).amax()))

    @property
    def relative(self) -> float:
        if self.reference_squares == 0:
            return math.sqrt(self.squares)
        return math.sqrt(self.squares / self.reference_squares)


def _larger(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


@dataclass(frozen=True)
class _Result:
    """What a call returned, and what it was given."""

    logits: Tensor
    target: Tensor | None
    weight: Tensor | None
    upstream: Tensor | float | None
    output: Tensor
    gradient: Tensor | None


def check(case: Case, call: Call, inputs: Inputs, *, grad: bool, seed: int = 0) -> Verdict:
    """Run `call` once on the first set, with some rows ignored and a random upstream gradient, and judge the result.

    The logits are put back if the call changed them.
    """
    logits = inputs.logits[0]
    before = logits.detach().clone()
    target = _with_ignored_rows(inputs.target[0]) if inputs.target else None
    upstream = (inputs.grad_output[0] if inputs.grad_output else _random_upstream(seed)) if grad else None
    logits.grad = None
    poison(logits.device, case.logits_bytes)
    try:
        output, gradient = _run(call, logits, target, upstream)
        overwrites = not torch.equal(logits.detach(), before)
        if overwrites:
            with torch.no_grad():
                logits.copy_(before)
        judge = _judge_cross_entropy if case.is_loss else _judge_softmax
        flat = (case.rows, case.classes)
        gradient = None if gradient is None else gradient.reshape(flat)
        targets = shifted(target) if case.op == "causal_lm_loss" else target
        result = _Result(before.view(flat), targets, inputs.weight, upstream, output, gradient)
        return _verdict(*judge(case, result), missing=grad and gradient is None, overwrites=overwrites)
    finally:
        logits.grad = None


def _random_upstream(seed: int) -> float:
    # A multiple of 1/64 is exact in every dtype, so that the reference is scaled by the same number.
    return int(torch.randint(32, 97, (), generator=torch.Generator().manual_seed(seed))) / 64


def _run(
    call: Call, logits: Tensor, target: Tensor | None, upstream: Tensor | float | None
) -> tuple[Tensor, Tensor | None]:
    if upstream is None:
        with torch.no_grad():
            return call(logits.detach(), target).clone(), None
    output = call(logits, target)
    output.backward(upstream.to(output.dtype) if isinstance(upstream, Tensor) else torch.full_like(output, upstream))
    gradient = logits.grad
    if gradient is not None and gradient.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr():
        # The logits are about to be restored, and the gradient has their memory.
        gradient = gradient.clone()
    return output.detach(), gradient


def _with_ignored_rows(target: Tensor) -> Tensor:
    changed = target.clone()
    changed.view(-1)[::16] = IGNORE_INDEX
    if (changed == IGNORE_INDEX).all():
        return target
    return changed


def _verdict(loss_error: float, loss_worst: float, grad: _Errors | None, *, missing: bool, overwrites: bool) -> Verdict:
    reasons = ["no gradient"] if missing else []
    if not loss_worst <= 1:
        reasons.append("result is NaN" if math.isnan(loss_worst) else f"result is off by {loss_error:.1e}")
    if grad and not grad.worst <= 1:
        found = "is NaN" if math.isnan(grad.worst) else f"is off by {grad.worst:.1f} times what it may be"
        reasons.append(f"gradient {found}")
    worst = _larger(loss_worst, grad.worst if grad else 0.0)
    return Verdict(not reasons, loss_error, grad.relative if grad else None, worst, "; ".join(reasons), overwrites)


def _judge_cross_entropy(case: Case, result: _Result) -> tuple[float, float, _Errors | None]:
    assert result.target is not None
    denominator = mean_denominator(case, result.target, result.weight)
    errors, row_losses = _Errors(), []
    for rows in pieces(case):
        reference = CrossEntropyRows(case, result.logits[rows], result.target[rows], result.weight)
        row_losses.append(reference.loss)
        if result.gradient is not None:
            outer = result.upstream[rows] if isinstance(result.upstream, Tensor) else result.upstream
            factor = torch.as_tensor(outer, device=reference.loss.device, dtype=torch.float64) / denominator
            want, terms = reference.gradient(factor.expand(reference.loss.shape))
            errors.add(result.gradient[rows], want, _allowed(case, terms))
    loss_error, loss_worst = _loss_error(case, torch.cat(row_losses), result.output, denominator)
    return loss_error, loss_worst, errors if result.gradient is not None else None


def _allowed(case: Case, terms: Tensor) -> Tensor:
    """The error that each element may have; `terms` (the size of what it is made of) is used up."""
    # An element below the smallest number of the dtype is rounded to 0 or to that number.
    return terms.mul_(_BUDGET[case.torch_dtype]).add_(2 * _smallest(case))


def _smallest(case: Case) -> float:
    info = torch.finfo(case.torch_dtype)
    return info.smallest_normal * info.eps


def _loss_error(case: Case, row_losses: Tensor, output: Tensor, denominator: float) -> tuple[float, float]:
    budget = _LOSS_BUDGET.get(output.dtype, 2e-5)
    got = output.double()
    if case.options.reduction == "none":
        difference = (got - row_losses).abs()
        worst = float((difference / (budget * (row_losses.abs() + 1))).amax())
        return float(difference.norm() / row_losses.norm()), worst
    want = float(row_losses.sum()) / denominator
    error = abs(float(got) - want) / max(abs(want), 1e-30)
    return error, error / budget


def _judge_softmax(case: Case, result: _Result) -> tuple[float, float, _Errors | None]:
    forward, backward = _Errors(), _Errors()
    for rows in pieces(case):
        want, terms = softmax_rows(case, result.logits[rows])
        forward.add(result.output[rows], want, _allowed(case, terms))
        if result.gradient is not None:
            assert isinstance(result.upstream, Tensor)
            outer = result.upstream[rows].double()
            want, terms = softmax_gradient(case, want, outer)
            allowed = _allowed(case, terms)
            if case.op == "softmax":
                # It is made of the rounded output, whose small probabilities have the dtype's smallest spacing.
                allowed += outer.abs().add_(1.0).mul_(_smallest(case))
            backward.add(result.gradient[rows], want, allowed)
    return forward.relative, forward.worst, backward if result.gradient is not None else None
