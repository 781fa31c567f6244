"""The float64 reference and the verdict on a backend's result.

The reference is written out here, apart from loss_core's own, and works through the rows in pieces, so that it never
needs the whole of the logits in float64.

An element of a gradient is judged against ``budget * scale``: the scale is the size of the terms that make the
element (so that a difference of large terms is not asked to be exact), the budget a small multiple of the dtype's
rounding that leaves room for log-probabilities held in that dtype, as torch itself holds them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from loss_bench.calls import Call
from loss_bench.cases import Case
from loss_bench.inputs import IGNORE_INDEX, Inputs
from loss_bench.measure import poison

_PIECE_BYTES = 256 << 20

# bf16 log-probabilities near -20 are 0.06 apart, which is 6% of a probability: 8 units of rounding.
_BUDGET = {
    torch.float16: 16 * torch.finfo(torch.float16).eps,
    torch.bfloat16: 16 * torch.finfo(torch.bfloat16).eps,
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
        judge = _judge_cross_entropy if case.op == "cross_entropy" else _judge_softmax
        result = _Result(before, target, inputs.weight, upstream, output, gradient)
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
    changed[::16] = IGNORE_INDEX
    if (changed == IGNORE_INDEX).all():
        return target
    return changed


def _pieces(case: Case) -> Iterator[slice]:
    step = max(1, _PIECE_BYTES // (8 * case.classes))
    for start in range(0, case.rows, step):
        yield slice(start, min(case.rows, start + step))


def _verdict(loss_error: float, loss_worst: float, grad: _Errors | None, *, missing: bool, overwrites: bool) -> Verdict:
    reasons = ["no gradient"] if missing else []
    if not loss_worst <= 1:
        reasons.append("result is NaN" if math.isnan(loss_worst) else f"result is off by {loss_error:.1e}")
    if grad and not grad.worst <= 1:
        found = "is NaN" if math.isnan(grad.worst) else f"is off by {grad.worst:.1f} times what it may be"
        reasons.append(f"gradient {found}")
    worst = _larger(loss_worst, grad.worst if grad else 0.0)
    return Verdict(not reasons, loss_error, grad.relative if grad else None, worst, "; ".join(reasons), overwrites)


def _mean_denominator(case: Case, target: Tensor, weight: Tensor | None) -> float:
    if case.options.reduction != "mean":
        return 1.0
    kept = target[target != IGNORE_INDEX]
    return float(weight.double()[kept].sum()) if weight is not None else float(kept.numel())


def _judge_cross_entropy(case: Case, result: _Result) -> tuple[float, float, _Errors | None]:
    assert result.target is not None
    denominator = _mean_denominator(case, result.target, result.weight)
    errors, row_losses = _Errors(), []
    for rows in _pieces(case):
        reference = _CrossEntropyRows(case, result.logits[rows], result.target[rows], result.weight)
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
    info = torch.finfo(case.torch_dtype)
    # An element below the smallest number of the dtype is rounded to 0 or to that number.
    return terms.mul_(_BUDGET[case.torch_dtype]).add_(2 * info.smallest_normal * info.eps)


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


class _CrossEntropyRows:
    """The loss of some rows in float64, and its gradient with respect to the raw logits."""

    def __init__(self, case: Case, logits: Tensor, target: Tensor, weight: Tensor | None) -> None:
        self._options = case.options
        x = logits.double()
        if case.options.softcap is not None:
            x = case.options.softcap * torch.tanh(x / case.options.softcap)
        self._x = x
        self._keep = target != IGNORE_INDEX
        self._target = target.long().where(self._keep, 0)[:, None]
        self._weight = torch.ones(case.classes, dtype=torch.float64, device=x.device) if weight is None else weight
        self._weight = self._weight.double()
        self._own_weight = self._weight[self._target[:, 0]]
        self.lse = torch.logsumexp(x, dim=1)
        self.loss = self._loss()

    def _loss(self) -> Tensor:
        smoothing, classes = self._options.label_smoothing, self._x.shape[1]
        loss = (1 - smoothing) * self._own_weight * (self.lse - self._x.gather(1, self._target)[:, 0])
        if smoothing:
            spread = self.lse * self._weight.sum() - self._x @ self._weight
            loss = loss + smoothing / classes * spread
        if self._options.z_loss:
            loss = loss + self._options.z_loss * self.lse.square()
        return loss.where(self._keep, 0)

    def gradient(self, upstream: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient d loss / d logits times `upstream` (rows,), and the sum of the absolute values of its terms."""
        smoothing, classes = self._options.label_smoothing, self._x.shape[1]
        upstream = upstream.where(self._keep, 0)
        mass = (1 - smoothing) * self._own_weight + smoothing / classes * self._weight.sum()
        if self._options.z_loss:
            mass = mass + 2 * self._options.z_loss * self.lse
        grad = torch.exp(self._x - self.lse[:, None]).mul_((mass * upstream)[:, None])
        terms = grad.abs()
        if smoothing:
            spread = smoothing / classes * self._weight * upstream[:, None]
            grad -= spread
            terms += spread.abs()
        own = ((1 - smoothing) * self._own_weight * upstream)[:, None]
        grad.scatter_add_(1, self._target, -own)
        # The target's element is p - 1: what p loses to rounding near 1 is no error of the difference.
        terms.scatter_add_(1, self._target, own.abs())
        if self._options.softcap is not None:
            slope = 1 - (self._x / self._options.softcap).square()
            grad, terms = grad * slope, terms * slope + terms * torch.finfo(torch.float32).eps
        return grad, terms


def _judge_softmax(case: Case, result: _Result) -> tuple[float, float, _Errors | None]:
    forward, backward = _Errors(), _Errors()
    for rows in _pieces(case):
        x = result.logits[rows].double()
        lse = torch.logsumexp(x, dim=1, keepdim=True)
        is_log = case.op == "log_softmax"
        want = x - lse if is_log else torch.exp(x - lse)
        forward.add(result.output[rows], want, _allowed(case, x.abs() + lse.abs() if is_log else want.clone()))
        if result.gradient is not None:
            assert isinstance(result.upstream, Tensor)
            outer = result.upstream[rows].double()
            backward.add(result.gradient[rows], *_softmax_gradient(case, want, outer))
    return forward.relative, forward.worst, backward if result.gradient is not None else None


def _softmax_gradient(case: Case, output: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of softmax or log-softmax, and the error that each element may have."""
    if case.op == "log_softmax":
        probability = output.exp()
        total = outer.sum(1, keepdim=True)
        terms = outer.abs() + probability * outer.abs().sum(1, keepdim=True)
        return outer - probability * total, _allowed(case, terms)
    total = (outer * output).sum(1, keepdim=True)
    terms = output * (outer.abs() + (outer * output).abs().sum(1, keepdim=True))
    return output * (outer - total), _allowed(case, terms)
