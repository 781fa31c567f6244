"""What a case's results are, in float64 on the CPU, and how far from that a backend may be.

The values come from ``torch.nn.functional`` where it has the option and from the plain formula elsewhere, in float64
and differentiated by autograd; nothing here calls a loss-core backend. An element may be off by

    2 * (|torch - truth| + eps(arithmetic) * sensitivity) + eps(result) * |truth| + smallest(result)

where ``torch`` is the same computation in the arithmetic's dtype (float32, float64 for float64 inputs), not rounded
any further; ``eps(result)`` is one unit in the last place of the result (twice that for a gradient that took the
logits' memory and is rescaled there); ``sensitivity`` bounds what one rounding of each intermediate result does to the
element (terms that cancel in the truth do not cancel there); and ``smallest`` is the underflow. Per element, so that
the many small ones of a gradient are held to their own size, not to that of the largest. The factor 2 leaves room for
another order of summation and an approximate exp2. Rows that are ignored have exactly 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from loss_core.testing.case import Case
from loss_core.testing.inputs import Inputs


class Expected(NamedTuple):
    """One result of a case, in the result's shape, on the CPU.

    Attributes:
        truth: in float64.
        torch: what PyTorch computes in the arithmetic's dtype.
        budget: float64, how far from the truth a result may be.
        dtype: the dtype that the result has to have.
    """

    truth: Tensor
    torch: Tensor
    budget: Tensor
    dtype: torch.dtype


def expected(case: Case, inputs: Inputs, upstream: Tensor) -> dict[str, Expected]:
    """The results of `case` by name.

    ``loss`` and, of the statistics, ``z_loss``, ``lse``, ``prediction`` and ``correct``; or ``output``; and
    ``gradient`` if the case asks for one.
    """
    if case.op in ("softmax", "log_softmax"):
        return _softmax(case, inputs, upstream.detach().cpu())
    return _cross_entropy(case, inputs, upstream.detach().cpu())


def assert_within(name: str, actual: Tensor, wanted: Expected) -> None:
    """Raise an AssertionError if `actual` is further from the truth than its budget.

    The message names the worst element's index and its three values: the result, PyTorch's, the float64 one.
    """
    truth = wanted.truth
    if actual.dtype != wanted.dtype or actual.shape != truth.shape:
        raise AssertionError(
            f"{name} must have dtype {wanted.dtype} and shape {tuple(truth.shape)}, "
            f"got {actual.dtype} and {tuple(actual.shape)}"
        )
    got = actual.detach().cpu().double()
    special = ~truth.isfinite()
    same = torch.where(truth.isnan(), got.isnan(), got == truth)
    error = torch.where(special, torch.where(same, 0.0, torch.inf), (got - truth).abs())
    error = torch.nan_to_num(error, nan=torch.inf, posinf=torch.inf)
    off = error > torch.where(special, 0.0, wanted.budget)
    if not off.any():
        return
    worst = int(torch.where(off, error / (wanted.budget + 1e-300), -1.0).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), truth.shape))
    result, low, true, budget = (
        float(t.detach().reshape(-1)[worst]) for t in (got, wanted.torch, truth, wanted.budget)
    )
    raise AssertionError(
        f"{name}[{', '.join(map(str, index))}] = {result!r}, PyTorch {low!r}, float64 {true!r}: off by "
        f"{abs(result - true):.3g}, allowed {budget:.3g}; {int(off.sum())} of {off.numel()} elements are off"
    )


def _budget(truth: Tensor, low: Tensor, sensitivity: Tensor, result: torch.dtype, arithmetic: torch.dtype) -> Tensor:
    error = torch.nan_to_num((low.double() - truth).abs(), posinf=0.0)
    of_arithmetic = torch.finfo(arithmetic).eps * torch.nan_to_num(sensitivity, posinf=0.0)
    return torch.nan_to_num(2 * (error + of_arithmetic) + torch.finfo(result).eps * truth.abs() + _smallest(result))


def _smallest(dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    # float16 has gradual underflow; what underflows in bfloat16 or float32 may be flushed to zero.
    return info.tiny * info.eps if dtype == torch.float16 else info.tiny


def _arithmetic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _steps(classes: int) -> float:
    """Roundings on the way to a sum over the classes, summed in blocks."""
    return 8 + math.log2(classes)


# Cross-entropy and the causal-LM loss


class _Tensors(NamedTuple):
    """Rows of a cross-entropy; those of a causal-LM loss without the positions that have no target."""

    logits: Tensor
    target: Tensor
    weight: Tensor | None
    byte_lengths: Tensor | None
    num_items: float | None
    live: Tensor


def _rows(case: Case, inputs: Inputs) -> _Tensors:
    logits, target, byte_lengths = inputs.logits.detach().cpu(), inputs.target.cpu(), inputs.byte_lengths
    byte_lengths = None if byte_lengths is None else byte_lengths.cpu()
    if case.op == "causal_lm_loss" and not case.shift_labels:
        logits, target = logits[..., :-1, :], target[..., 1:]
        byte_lengths = None if byte_lengths is None else byte_lengths[..., 1:]
    logits = Inputs(logits, inputs.dim, target).rows(logits)
    if case.target == "probabilities":
        target = Inputs(target, inputs.dim, target).rows(target)
        live = torch.ones(logits.shape[0], dtype=torch.bool)
    else:
        target = target.reshape(-1).long()
        live = target != case.ignore_index
    return _Tensors(
        logits,
        target,
        None if inputs.weight is None else inputs.weight.cpu(),
        None if byte_lengths is None else byte_lengths.reshape(-1),
        None if inputs.num_items is None else float(inputs.num_items),
        live,
    )


class _Losses(NamedTuple):
    """The differentiable computation, once, in some dtype."""

    leaf: Tensor  # the logits
    x: Tensor  # after scale and softcap
    lse: Tensor
    rows: Tensor
    z_rows: Tensor
    denominator: Tensor


def _losses(case: Case, tensors: _Tensors, dtype: torch.dtype) -> _Losses:
    logits, target, weight, byte_lengths, num_items, live = tensors
    leaf = logits.to(dtype).requires_grad_()
    weight = None if weight is None else weight.to(dtype)
    x = leaf * case.logit_scale
    if case.softcap is not None:
        x = case.softcap * torch.tanh(x / case.softcap)
    # Zeros in ignored rows: NaN times zero is NaN on autograd's way back.
    of_live = torch.where(live.unsqueeze(-1), x, 0)
    if case.target == "probabilities":
        goal = target.to(dtype)
        rows = functional.cross_entropy(of_live, goal, weight, reduction="none", label_smoothing=case.label_smoothing)
    else:
        rows = functional.cross_entropy(
            of_live, target, weight, ignore_index=case.ignore_index, reduction="none",
            label_smoothing=case.label_smoothing,
        )  # fmt: skip
    z_rows = torch.zeros_like(rows)
    if case.z_loss:
        z_rows = torch.where(live, case.z_loss * _lse(of_live) ** 2, 0)
        rows = rows + z_rows
    denominator = torch.ones((), dtype=dtype)
    if case.reduction == "byte_mean":
        assert byte_lengths is not None
        denominator = (byte_lengths * live).sum().to(dtype)
    elif case.reduction == "mean" and num_items is not None:
        denominator = torch.tensor(num_items, dtype=dtype)
    elif case.reduction == "mean" and weight is not None and case.target != "probabilities":
        denominator = weight[target[live]].sum()
    elif case.reduction == "mean":
        denominator = live.sum().to(dtype)
    return _Losses(leaf, x, _lse(x), rows, z_rows, denominator)


def _lse(x: Tensor) -> Tensor:
    """logsumexp, NaN where a logit is +inf, as a row of log_softmax is."""
    return torch.where((x == torch.inf).any(-1), torch.nan, torch.logsumexp(x, -1))


def _reduced(case: Case, rows: Tensor, denominator: Tensor) -> Tensor:
    return rows if case.reduction == "none" else rows.sum() / denominator


def _cross_entropy(case: Case, inputs: Inputs, upstream: Tensor) -> dict[str, Expected]:
    tensors, arithmetic = _rows(case, inputs), _arithmetic(case.dtype)
    if case.reduction == "none":
        shifted = case.op == "causal_lm_loss" and not case.shift_labels
        upstream = (upstream[..., :-1] if shifted else upstream).reshape(-1)
    true, low = _losses(case, tensors, torch.float64), _losses(case, tensors, arithmetic)
    of_loss, of_gradient, magnitude = _sensitivities(case, tensors, true, upstream.double())
    z_sensitivity = 2 * _steps(case.classes) * true.z_rows.detach().abs()

    def of_rows(of: str, sensitivity: Tensor) -> Expected:
        truth, torchs = (_reduced(case, getattr(losses, of), losses.denominator).detach() for losses in (true, low))
        total = _reduced(case, sensitivity, true.denominator.detach().abs())
        budget = _budget(truth, torchs, total, arithmetic, arithmetic)
        truth, torchs, budget = (_in_shape(case, inputs, t) for t in (truth, torchs, budget))
        return Expected(truth, torchs, budget, arithmetic)

    results = {"loss": of_rows("rows", of_loss)}
    if case.stats:
        results["z_loss"] = of_rows("z_rows", z_sensitivity)
        budget = _budget(true.lse, low.lse, magnitude, arithmetic, arithmetic)
        truth, torchs, budget = (t.detach().view(inputs.target.shape) for t in (true.lse, low.lse, budget))
        results["lse"] = Expected(truth, torchs, budget, arithmetic)
        results |= _predictions(case, inputs, tensors)
    if case.grad:
        results["gradient"] = _gradient(case, inputs, tensors, true, low, upstream, of_gradient)
    return results


def _gradient(
    case: Case, inputs: Inputs, tensors: _Tensors, true: _Losses, low: _Losses, upstream: Tensor, sensitivity: Tensor
) -> Expected:
    both = []
    for losses in (true, low):
        loss = _reduced(case, losses.rows, losses.denominator)
        (grad,) = torch.autograd.grad(loss, losses.leaf, upstream.to(loss.dtype))
        both.append(torch.where(tensors.live.unsqueeze(-1), grad, 0))
    truth, torchs = both
    budget = _budget(truth, torchs, sensitivity, case.dtype, low.leaf.dtype)
    if case.inplace and case.reduction != "none":
        budget = budget + torch.finfo(case.dtype).eps * truth.abs()
    budget = torch.where(tensors.live.unsqueeze(-1), budget, 0)
    truth, torchs, budget = (_like_logits(case, inputs, t) for t in (truth, torchs, budget))
    return Expected(truth, torchs, budget, case.dtype)


def _sensitivities(case: Case, tensors: _Tensors, true: _Losses, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What one rounding of every intermediate does to: the row losses, the gradient, the lse.

    With m[c] the weighted probability of class c as target and A = sum(m) + 2 z |lse|, the gradient is
    A softmax(x)[c] - m[c], and softmax(x)[c] = exp(x[c] - lse) has the relative error of x[c] - lse absolutely.
    """
    x, lse = true.x.detach(), true.lse.detach()
    smoothing, classes = case.label_smoothing, case.classes
    if case.target == "probabilities":
        mass = (1 - smoothing) * tensors.target.double() + smoothing / classes
    else:
        index = torch.where(tensors.live, tensors.target, 0)
        mass = (1 - smoothing) * functional.one_hot(index, classes).double() + smoothing / classes
    if tensors.weight is not None:
        mass = mass * tensors.weight.double()
    size = torch.where(x.isfinite(), x.abs(), 0)
    if case.softcap is not None:
        size = size.clamp(min=case.softcap)
    largest = size.amax(-1) if classes else lse
    magnitude = lse.abs() + largest + _steps(classes)
    of_loss = (mass * (lse.abs().unsqueeze(-1) + size + _steps(classes))).sum(-1)
    of_loss = of_loss + 2 * case.z_loss * lse.abs() * magnitude
    height = mass.sum(-1) + 2 * case.z_loss * lse.abs()
    of_gradient = torch.exp(x - lse.unsqueeze(-1)) * (height * magnitude).unsqueeze(-1) + 4 * mass
    factor = (upstream / true.denominator.detach()).abs().expand(lse.shape) * abs(case.logit_scale)
    of_loss = torch.where(tensors.live, torch.nan_to_num(of_loss, posinf=0.0), 0)
    return of_loss, of_gradient * factor.unsqueeze(-1), magnitude


def _predictions(case: Case, inputs: Inputs, tensors: _Tensors) -> dict[str, Expected]:
    # Scaled in the arithmetic's dtype, whose rounding may make ties.
    scaled = tensors.logits.to(_arithmetic(case.dtype)) * case.logit_scale
    prediction = scaled.argmax(-1)
    correct = (prediction == tensors.target) & tensors.live
    # No class is the largest beside NaN.
    anything = torch.where(scaled.isnan().any(-1), torch.inf, 0.0).double()
    exact = {"prediction": (prediction, torch.int64), "correct": (correct, torch.bool)}
    return {
        name: Expected(
            values.double().view(inputs.target.shape),
            values.view(inputs.target.shape),
            (anything if name == "prediction" else torch.where(tensors.live, anything, 0)).view(inputs.target.shape),
            dtype,
        )
        for name, (values, dtype) in exact.items()
    }


def _in_shape(case: Case, inputs: Inputs, rows: Tensor) -> Tensor:
    """A loss of rows in the shape that the op gives it."""
    if case.reduction != "none":
        return rows
    shape = inputs.target.shape
    if case.target == "probabilities":
        dim = inputs.dim % len(shape)
        shape = shape[:dim] + shape[dim + 1 :]
    if case.op == "causal_lm_loss" and not case.shift_labels:
        return functional.pad(rows.view(*shape[:-1], shape[-1] - 1), (0, 1))
    return rows.view(shape)


def _like_logits(case: Case, inputs: Inputs, rows: Tensor) -> Tensor:
    """(rows, classes) in the logits' shape."""
    moved = inputs.logits.movedim(inputs.dim, -1).shape
    if case.op == "causal_lm_loss" and not case.shift_labels:
        rows = functional.pad(rows.view(*moved[:-2], moved[-2] - 1, moved[-1]), (0, 0, 0, 1))
    return rows.reshape(moved).movedim(-1, inputs.dim)


# Softmax and log-softmax


def _softmax(case: Case, inputs: Inputs, upstream: Tensor) -> dict[str, Expected]:
    function = getattr(functional, case.op)
    result_dtype = case.result_dtype or case.dtype
    arithmetic = _arithmetic(case.dtype)
    logits, dim = inputs.logits.detach().cpu(), inputs.dim
    outputs: list[Tensor] = []
    gradients: list[Tensor] = []
    for dtype in (torch.float64, arithmetic):
        leaf = logits.to(dtype).requires_grad_()
        output = function(leaf, dim)
        outputs.append(output.detach())
        if case.grad:
            gradients += torch.autograd.grad(output, leaf, upstream.to(dtype))
    truth, low = outputs
    # Of x - max, not of x: whoever subtracts the log-sum-exp in one rounding loses the digits of large logits.
    logit = logits.double()
    below = (logit - logit.amax(dim, keepdim=True)).abs() if logit.numel() else logit
    size = (1 if case.op == "log_softmax" else truth) * (below + _steps(case.classes))
    results = {
        "output": Expected(truth, low, _budget(truth, low, size, result_dtype, arithmetic), result_dtype),
    }
    if case.grad:
        # The gradient is computed from the rounded output, so that rounding is one of its intermediates.
        g, info = upstream.double(), torch.finfo(arithmetic)
        rounding = torch.finfo(result_dtype).eps * truth.abs() + _smallest(result_dtype)
        of_output = torch.nan_to_num(rounding / info.eps, posinf=0.0) + _steps(case.classes) * truth.abs()
        if case.op == "softmax":
            inner = g.abs() + (g * truth).abs().sum(dim, keepdim=True)
            sensitivity = of_output * inner + truth * (g.abs() * of_output).sum(dim, keepdim=True)
        else:
            total = torch.exp(truth) * g.abs().sum(dim, keepdim=True)
            sensitivity = g.abs() + total * (torch.nan_to_num(of_output, posinf=0.0) + _steps(case.classes))
        gradient, low = gradients
        budget = _budget(gradient, low, sensitivity, case.dtype, arithmetic)
        results["gradient"] = Expected(gradient, low, budget, case.dtype)
    return results
