"""The verdict on a backend's result, against float64.

An element of a gradient is judged against ``budget * scale``: the scale is the size of the terms that make the
element (so that a difference of large terms is not asked to be exact), the budget a small multiple of the dtype's
rounding that leaves room for log-probabilities held in that dtype, as torch itself holds them. That much room would
hide a factor that all elements have in common, so the whole has to be an eighth as far off at the most: the norm of the
difference over the norm of what the elements may be off.

The gradients of a linear op are sums over classes or rows, in which the roundings of the terms, which are independent,
add up as a random walk does. So the scale of an element is the norm of its terms with a mean square in place of the
other factor; and since rounding then has little effect on the whole, the whole is judged too, more narrowly: the norm
of the difference over the norm.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loss_bench.calls import Call, shifted
from loss_bench.cases import LINEAR, Case
from loss_bench.inputs import IGNORE_INDEX, Inputs
from loss_bench.measure import poison, restore
from loss_bench.reference import (
    CrossEntropyRows,
    LinearPieces,
    mean_denominator,
    pieces,
    softmax_gradient,
    softmax_rows,
)

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


# Of the elements and of the norm of a linear op's gradients, in units of rounding. Measured with plain torch, whose
# logits and log-probabilities are rounded to the dtype, at 512 x 256 x 8192 to 64 x 128 x 50257 on a CPU: up to 35
# and 0.6 in bf16, 12 and 0.9 in fp16. Sums kept in bf16, tile after tile as some libraries keep them, come to 48 and
# 5.3 over 128256 classes. In float32 the order in which products are summed matters: up to 570 and 71. Counting the
# ignored rows in the mean, one in 16 here, is an error of 8.5 units of the norm in bf16.
_LINEAR_BUDGET = {
    torch.float16: (96, 8),
    torch.bfloat16: (96, 8),
    torch.float32: (2048, 256),
    torch.float64: (2048, 256),
}

# Of what the elements may be off, for the norm of all of them: 3 units of rounding in half precision, beside what
# elements near the smallest number lose. Measured on an H200 and an H100, all libraries: up to 0.9 units in bf16, 0.4
# for softmax, and 3.2 in fp16, where gradients are that small. Counting the ignored rows in the mean, one in 16 here,
# is an error of 8 units in bf16.
_NORM_SHARE = 1 / 8

# Of millions of elements some lie at several standard deviations.
_TAIL = 6


@dataclass(frozen=True)
class Verdict:
    """How far a result is from float64.

    Attributes:
        right: whether it is within the budget.
        loss_error: relative error of the loss; of the output (norm of the difference over the norm) for softmax.
        grad_error: relative error of the gradient, the same way, the largest where there are several; None without one.
        worst: largest error of an element, or of a norm, as a multiple of what it may be; above 1 is wrong.
        reason: what is wrong, or "".
        overwrites: whether the call changed its inputs.
    """

    right: bool
    loss_error: float
    grad_error: float | None
    worst: float
    reason: str
    overwrites: bool


@dataclass
class _Errors:
    """Sums over the pieces of `what`.

    Attributes:
        norm_budget: relative error that the norm of all may have; None where that follows from the elements' own.
        allowed_squares: sum of the squares of what the elements may be off.
        floor_squares: sum of the squares of what an element may be off however large it is.
    """

    what: str = "gradient"
    norm_budget: float | None = None
    squares: float = 0.0
    reference_squares: float = 0.0
    allowed_squares: float = 0.0
    floor_squares: float = 0.0
    worst: float = 0.0

    def add(self, got: Tensor, want: Tensor, allowed: Tensor, floor: Tensor | float = 0.0) -> None:
        difference = _distance(got, want)
        self.squares += float(difference.square().sum())
        self.reference_squares += _finite_squares(want)
        self.allowed_squares += _finite_squares(allowed)
        self.floor_squares += float(torch.as_tensor(floor).square().mean()) * want.numel()
        # The largest of nothing is 0; NaN, which no comparison would find, stays NaN.
        if difference.numel():
            self.worst = _larger(self.worst, float((difference / allowed).masked_fill_(difference == 0, 0.0).amax()))

    @property
    def relative(self) -> float:
        if self.reference_squares == 0:
            return math.sqrt(self.squares)
        return math.sqrt(self.squares / self.reference_squares)

    @property
    def excess(self) -> float:
        """The largest error of an element, or that of the norm, as a multiple of what it may be."""
        if self.norm_budget is None:
            allowed = _NORM_SHARE * math.sqrt(self.allowed_squares)
        else:
            allowed = self.norm_budget * math.sqrt(self.reference_squares) + math.sqrt(self.floor_squares)
        return _larger(self.worst, math.sqrt(self.squares) / allowed if allowed else 0.0)


def _distance(got: Tensor, want: Tensor) -> Tensor:
    """The absolute difference in float64; of a NaN or an infinity that is the true value there is none."""
    got = got.double()
    same = (got == want) | (got.isnan() & want.isnan())
    return (got - want).abs_().masked_fill_(same, 0.0)


def _finite_squares(values: Tensor) -> float:
    """The sum of the squares of those that are finite."""
    return float(values.square().nan_to_num_(0.0, posinf=0.0).sum())


def _larger(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


@dataclass(frozen=True)
class _Result:
    """What a call returned, and what it was given.

    Attributes:
        leaves: as they were before the call; logits as (rows, classes).
        gradients: one of each leaf, None where there is none; empty for a call without grad.
    """

    leaves: tuple[Tensor, ...]
    target: Tensor | None
    weight: Tensor | None
    upstream: Tensor | float | None
    output: Tensor
    gradients: tuple[Tensor | None, ...]

    def outer(self, rows: slice) -> Tensor | float | None:
        """The upstream gradient of these rows."""
        return self.upstream[rows] if isinstance(self.upstream, Tensor) else self.upstream


def check(case: Case, call: Call, inputs: Inputs, *, grad: bool, seed: int = 0) -> Verdict:
    """Run `call` once on the first set, with some rows ignored and a random upstream gradient, and judge the result.

    The inputs are put back if the call changed them.
    """
    leaves = inputs.leaves(0)
    before = tuple(leaf.detach().clone() for leaf in leaves)
    target = _with_ignored_rows(inputs.target[0]) if inputs.target else None
    upstream = (inputs.grad_output[0] if inputs.grad_output else _random_upstream(seed)) if grad else None
    _clear(leaves)
    poison(before[0].device, case.logits_bytes)
    try:
        output, gradients = _run(call, leaves, target, upstream)
        overwrites = not all(torch.equal(leaf.detach(), value) for leaf, value in zip(leaves, before, strict=True))
        if overwrites:
            restore(leaves, before)
        if case.op not in LINEAR:
            flat = (case.rows, case.classes)
            before = (before[0].view(flat),)
            gradients = tuple(None if gradient is None else gradient.reshape(flat) for gradient in gradients)
        targets = shifted(target) if case.op == "causal_lm_loss" else target
        result = _Result(before, targets, inputs.weight, upstream, output, gradients)
        return _verdict(*_judge(case)(case, result), missing=_missing(result), overwrites=overwrites)
    finally:
        _clear(leaves)


def _clear(leaves: Iterable[Tensor]) -> None:
    for leaf in leaves:
        leaf.grad = None


def _missing(result: _Result) -> list[str]:
    """A reason for each leaf that has no gradient."""
    found = zip(_leaf_names(result), result.gradients, strict=False)
    return [f"no gradient{name and ' of ' + name}" for name, gradient in found if gradient is None]


def _leaf_names(result: _Result) -> Sequence[str]:
    """Logits are the only ones and need no name."""
    return [""] if len(result.leaves) == 1 else ["input", "linear_weight", "linear_bias"]


def _random_upstream(seed: int) -> float:
    # A multiple of 1/64 is exact in every dtype, so that the reference is scaled by the same number. Near 1 it would
    # not show whether it was looked at.
    return int(torch.randint(80, 129, (), generator=torch.Generator().manual_seed(seed))) / 64


def _run(
    call: Call, leaves: Sequence[Tensor], target: Tensor | None, upstream: Tensor | float | None
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    if upstream is None:
        with torch.no_grad():
            return call(*(leaf.detach() for leaf in leaves), target).clone(), ()
    output = call(*leaves, target)
    output.backward(upstream.to(output.dtype) if isinstance(upstream, Tensor) else torch.full_like(output, upstream))
    return output.detach(), tuple(_own_gradient(leaf) for leaf in leaves)


def _own_gradient(leaf: Tensor) -> Tensor | None:
    gradient = leaf.grad
    if gradient is not None and gradient.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr():
        # The inputs are about to be restored, and the gradient has their memory.
        return gradient.clone()
    return gradient


def _with_ignored_rows(target: Tensor) -> Tensor:
    changed = target.clone()
    changed.view(-1)[::16] = IGNORE_INDEX
    if (changed == IGNORE_INDEX).all():
        return target
    return changed


Judgement = tuple[float, float, "Sequence[_Errors]"]
"""(relative error of the result, its largest error as a multiple of what it may be, those of the gradients)."""


def _judge(case: Case) -> Callable[[Case, _Result], Judgement]:
    if case.op in LINEAR:
        return _judge_linear
    return _judge_cross_entropy if case.is_loss else _judge_softmax


def _verdict(
    loss_error: float, loss_worst: float, grads: Sequence[_Errors], *, missing: Sequence[str], overwrites: bool
) -> Verdict:
    reasons = list(missing)
    if not loss_worst <= 1:
        reasons.append("result is NaN" if math.isnan(loss_worst) else f"result is off by {loss_error:.1e}")
    for grad in grads:
        if not grad.excess <= 1:
            found = "is NaN" if math.isnan(grad.excess) else f"is off by {grad.excess:.1f} times what it may be"
            reasons.append(f"{grad.what} {found}")
    worst = functools.reduce(_larger, (grad.excess for grad in grads), loss_worst)
    grad_error = functools.reduce(_larger, (grad.relative for grad in grads)) if grads else None
    return Verdict(not reasons, loss_error, grad_error, worst, "; ".join(reasons), overwrites)


def _judge_cross_entropy(case: Case, result: _Result) -> Judgement:
    assert result.target is not None
    denominator = mean_denominator(case, result.target, result.weight)
    (logits,), gradient = result.leaves, next(iter(result.gradients), None)
    errors, row_losses = _Errors(), []
    for rows in pieces(case):
        reference = CrossEntropyRows(case, logits[rows], result.target[rows], result.weight)
        row_losses.append(reference.loss)
        if gradient is not None:
            want, terms = reference.gradient(_row_factor(result, rows, denominator, reference.loss))
            errors.add(gradient[rows], want, _allowed(case, terms))
    loss_error, loss_worst = _loss_error(case, torch.cat(row_losses), result.output, denominator)
    return loss_error, loss_worst, [errors] if gradient is not None else []


def _row_factor(result: _Result, rows: slice, denominator: float, like: Tensor) -> Tensor:
    """What the gradient of each row's loss is multiplied by."""
    outer = torch.as_tensor(result.outer(rows), device=like.device, dtype=torch.float64)
    return (outer / denominator).expand(like.shape)


def _judge_linear(case: Case, result: _Result) -> Judgement:
    """Piece by piece of the rows, so that the logits are never there as a whole."""
    assert result.target is not None
    denominator = mean_denominator(case, result.target, result.weight)
    product = LinearPieces(case, result.leaves)
    elements, norm = (factor * torch.finfo(case.torch_dtype).eps for factor in _LINEAR_BUDGET[case.torch_dtype])
    errors = [_Errors(f"gradient of {name}", norm) for name in _leaf_names(result)[: len(result.gradients)]]

    def judge(place: int, part: slice, want: Tensor, scale: Tensor, floor: Tensor) -> None:
        gradient = result.gradients[place]
        if gradient is not None:
            # Half the smallest number is what each term may lose, and the sum is rounded too.
            floor = floor * (_smallest(case) / 2)
            allowed = scale.mul_(elements) + _TAIL * floor + 2 * _smallest(case)
            errors[place].add(gradient[part], want, allowed, floor)

    row_losses, row_terms = [], []
    for rows in pieces(case):
        reference = CrossEntropyRows(case, product.logits(rows), result.target[rows], result.weight)
        row_losses.append(reference.loss)
        row_terms.append(reference.loss_terms())
        if result.gradients:
            judge(
                0, rows, *product.add(rows, *reference.gradient(_row_factor(result, rows, denominator, reference.loss)))
            )
    if result.gradients:
        for classes in product.class_pieces():
            judge(1, classes, *product.weight_gradient(classes))
            if case.options.bias:
                judge(2, classes, *product.bias_gradient(classes))
    # Rounded logits move a loss by half a unit of them at most, also where the loss itself is a float32.
    slack = torch.cat(row_terms) * (torch.finfo(case.torch_dtype).eps / 2)
    loss_error, loss_worst = _loss_error(case, torch.cat(row_losses), result.output, denominator, slack)
    present = [error for error, gradient in zip(errors, result.gradients, strict=True) if gradient is not None]
    return loss_error, loss_worst, present


def _allowed(case: Case, terms: Tensor) -> Tensor:
    """The error that each element may have; `terms` (the size of what it is made of) is used up."""
    # An element below the smallest number of the dtype is rounded to 0 or to that number.
    return terms.mul_(_BUDGET[case.torch_dtype]).add_(2 * _smallest(case))


def _smallest(case: Case) -> float:
    info = torch.finfo(case.torch_dtype)
    return info.smallest_normal * info.eps


def _loss_error(
    case: Case, row_losses: Tensor, output: Tensor, denominator: float, slack: Tensor | None = None
) -> tuple[float, float]:
    """The relative error, and the error as a multiple of what it may be; `slack` (rows,) is added to that."""
    budget = _LOSS_BUDGET.get(output.dtype, 2e-5)
    slack = torch.zeros_like(row_losses) if slack is None else slack
    if case.options.reduction == "none":
        errors = _Errors()
        errors.add(output, row_losses, budget * (row_losses.abs() + 1) + slack)
        return errors.relative, errors.worst
    got = float(output)
    if denominator == 0:
        # A mean over no rows is NaN as torch's, or nothing.
        error = 0.0 if math.isnan(got) or got == 0 else math.inf
        return error, error
    want = float(row_losses.sum()) / denominator
    if got == want or (math.isnan(got) and math.isnan(want)):
        return 0.0, 0.0
    error = abs(got - want) / max(abs(want), 1e-30)
    return error, error / (budget + float(slack.sum()) / denominator / max(abs(want), 1e-30))


def _judge_softmax(case: Case, result: _Result) -> Judgement:
    (logits,), gradient = result.leaves, next(iter(result.gradients), None)
    forward, backward = _Errors(), _Errors()
    if case.op == "log_softmax":
        # The sum of a random upstream gradient cancels and its terms do not; beside them the rest would not count.
        backward.norm_budget = _NORM_SHARE * _BUDGET[case.torch_dtype]
    for rows in pieces(case):
        want, terms = softmax_rows(case, logits[rows])
        forward.add(result.output[rows], want, _allowed(case, terms))
        if gradient is not None:
            assert isinstance(result.upstream, Tensor)
            outer = result.upstream[rows].double()
            want, terms = softmax_gradient(case, want, outer)
            allowed = _allowed(case, terms)
            if case.op == "softmax":
                # It is made of the rounded output, whose small probabilities have the dtype's smallest spacing.
                allowed += outer.abs().add_(1.0).mul_(_smallest(case))
            backward.add(gradient[rows], want, allowed)
    return forward.relative, forward.excess, [backward] if gradient is not None else []
