"""Cross-entropy and its gradient in PyTorch, worked through a few rows at a time.

With x a row after scale and softcap, and A = (1 - e) w[y] + (e / V) sum(w) + 2 z lse,

    d loss / d x[c] = A softmax(x)[c] - (1 - e) w[y] [c == y] - (e / V) w[c]
    d x[c] / d logit[c] = logit_scale (1 - (x[c] / softcap)**2)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from loss_core.backend import CrossEntropyForward, CrossEntropyOptions, refuse_shard
from loss_core.derivative import first_derivative_only
from loss_core.dtypes import accumulation_dtype
from loss_core.reference.pieces import pieces


class _Targets(NamedTuple):
    """What the target says of each row; all of size (rows,)."""

    live: Tensor  # bool: not ignored
    here: Tensor  # bool: the class is one of the logits' (always, but in a shard of the vocabulary)
    index: Tensor  # type: ignore[assignment]  # int64: the class's column, 0 where ignored or not here
    weight: Tensor  # weight[index], 1 without class weights; NaN where out of range, which spreads to loss and gradient


def cross_entropy_forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    byte_lengths: Tensor | None,
    num_items: Tensor | float | None,
    options: CrossEntropyOptions,
    *,
    grad: Tensor | None,
    stats: bool,
) -> CrossEntropyForward:
    """See ``loss_core.backend``."""
    refuse_shard(weight, options, stats=stats, forward=True)
    dtype = accumulation_dtype(logits.dtype)
    targets = _targets(target, weight, options, logits.shape[1], dtype)
    denominator = _denominator(targets, weight, byte_lengths, num_items, options, dtype)
    factor = torch.ones((), dtype=dtype, device=logits.device) if denominator is None else 1 / denominator
    loss = torch.empty(logits.shape[0], dtype=dtype, device=logits.device)
    lse = torch.empty_like(loss)
    prediction = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device) if stats else None
    for rows in pieces(logits):
        scaled = _scaled(logits[rows].to(dtype), options.logit_scale)
        if prediction is not None:
            prediction[rows] = scaled.argmax(-1)
        x = _capped(scaled, options.softcap)
        piece = _Targets(*(of[rows] for of in targets))
        loss[rows], lse[rows] = _row_loss(x, piece, weight, options)
        if grad is not None:
            grad[rows] = _row_gradient(x, lse[rows], piece, weight, options, factor)
    z_loss = torch.where(targets.live, options.z_loss * lse**2, 0) if stats else None
    if options.reduction != "none":
        loss, z_loss = _sum(loss, denominator), None if z_loss is None else _sum(z_loss, denominator)
    correct = None if prediction is None else (prediction == target) & targets.live
    return CrossEntropyForward(loss, lse, denominator, z_loss, prediction, correct)


def cross_entropy_backward(
    grad_loss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    denominator: Tensor | None,
    options: CrossEntropyOptions,
    *,
    grad: Tensor,
    skip_if_one: bool,
) -> None:
    """See ``loss_core.backend``. Always recomputes: torch cannot look at a value on the device and leave."""
    refuse_shard(weight, options, stats=False, forward=False)
    dtype = accumulation_dtype(logits.dtype)
    targets = _targets(target, weight, options, logits.shape[1], dtype)
    factor = grad_loss.reshape(-1)
    factor = (factor if denominator is None else factor / denominator).expand(logits.shape[0])
    for rows in pieces(logits):
        x = _capped(_scaled(logits[rows].to(dtype), options.logit_scale), options.softcap)
        piece = _Targets(*(of[rows] for of in targets))
        grad[rows] = _row_gradient(x, lse[rows], piece, weight, options, factor[rows])


def cross_entropy_rescale_live(grad_loss: Tensor, grad: Tensor, target: Tensor, ignore_index: int) -> None:
    """See ``loss_core.backend``. Never leaves at once: torch cannot look at a value on the device and leave."""
    factor = grad_loss.reshape(())
    # What a CPU holds may be looked at, and a factor of each row takes it longer than one of all.
    if factor.device.type != "cpu" or not factor.isfinite():
        factor = torch.where(target.to(torch.int64) == ignore_index, 1, factor).unsqueeze(-1)
    grad.mul_(factor)


def cross_entropy_probabilities(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    num_items: Tensor | float | None,
    options: CrossEntropyOptions,
) -> Tensor:
    """Cross-entropy with class probabilities t as target, differentiable in both.

    With t' = (1 - e) t + e / V the loss of a row is sum(w[c] t'[c] (lse - x[c])) + z lse**2, where a class with
    t' = 0 adds nothing even if its logit is -inf; "mean" divides by the number of rows, as torch does.
    """
    rows = _Probabilities.apply(logits, target, weight, options)
    if options.reduction == "none":
        return rows
    if options.reduction == "sum":
        return rows.sum()
    items: Any = rows.shape[0] if num_items is None else num_items
    return (rows.sum() / items).squeeze()


def _sum(rows: Tensor, denominator: Tensor | None) -> Tensor:
    return rows.sum() if denominator is None else (rows.sum() / denominator).squeeze()


def _targets(
    target: Tensor, weight: Tensor | None, options: CrossEntropyOptions, classes: int, dtype: torch.dtype
) -> _Targets:
    target = target.to(torch.int64)
    live = target != options.ignore_index
    total = classes if options.total_classes is None else options.total_classes
    column = target - options.first_class
    here = (column >= 0) & (column < classes)
    index = torch.where(live & here, column, 0)
    of_target = torch.ones(index.shape, dtype=dtype, device=index.device) if weight is None else weight[index]
    return _Targets(live, here, index, torch.where((target >= 0) & (target < total), of_target, torch.nan))


def _denominator(
    targets: _Targets,
    weight: Tensor | None,
    byte_lengths: Tensor | None,
    num_items: Tensor | float | None,
    options: CrossEntropyOptions,
    dtype: torch.dtype,
) -> Tensor | None:
    if options.reduction in ("none", "sum"):
        return None
    if isinstance(num_items, Tensor):
        return num_items.to(dtype).reshape(1)
    if num_items is not None:
        return torch.full((1,), num_items, dtype=dtype, device=targets.live.device)
    # A target out of range has no weight to add, but is a row.
    of_invalid = 1.0 if weight is None else 0.0
    counted = targets.weight.nan_to_num(of_invalid) if byte_lengths is None else byte_lengths
    return torch.where(targets.live, counted, 0).sum().to(dtype).reshape(1)


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1 else x * scale


def _capped(x: Tensor, softcap: float | None) -> Tensor:
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def _below_peak(x: Tensor) -> tuple[Tensor, Tensor]:
    """x relative to its row's maximum, and that maximum (rows, 1)."""
    peak = x.amax(-1, keepdim=True)
    # A row without a finite maximum has nothing to be relative to.
    peak = torch.where(peak.isfinite(), peak, 0)
    return x - peak, peak


def _log_sum(exponentials: Tensor) -> Tensor:
    """The logarithm of the sum over the classes (rows, 1); NaN, as torch's log_softmax, where a logit is +inf.

    Of exponentials relative to the maximum it keeps the digits that the rounding of a large lse takes from lse - x.
    """
    log_sum = exponentials.sum(-1, keepdim=True).log()
    return torch.where(log_sum == torch.inf, torch.nan, log_sum)


def _row_loss(
    x: Tensor, targets: _Targets, weight: Tensor | None, options: CrossEntropyOptions
) -> tuple[Tensor, Tensor]:
    """The losses of rows, and their lse."""
    smoothing, classes = options.label_smoothing, x.shape[-1]
    index = targets.index.unsqueeze(-1)
    below, peak = _below_peak(x)
    below_target = below.gather(-1, index).squeeze(-1)
    if smoothing > 0:
        below_all, mass = (below.sum(-1), classes) if weight is None else ((below * weight).sum(-1), weight.sum())
    # In place: a second tensor of this size costs a CPU more than the exponentials do.
    log_sum = _log_sum(below.exp_())
    lse = (log_sum + peak).squeeze(-1)
    log_sum = log_sum.squeeze(-1)
    if options.total_classes is not None:
        x_target = torch.where(targets.here, x.gather(-1, index).squeeze(-1), 0)
        return torch.where(targets.live, -targets.weight * x_target, 0), lse
    loss = targets.weight * (log_sum - below_target)
    if smoothing > 0:
        loss = (1 - smoothing) * loss + smoothing / classes * (mass * log_sum - below_all)
    if options.z_loss > 0:
        loss = loss + options.z_loss * lse**2
    return torch.where(targets.live, loss, 0), lse


def _row_gradient(
    x: Tensor, lse: Tensor, targets: _Targets, weight: Tensor | None, options: CrossEntropyOptions, factor: Tensor
) -> Tensor:
    """The gradient with respect to the logits before scale and cap, times `factor`: one, or one a row. In x's dtype."""
    # Factors of a row go to its few terms, for every pass over x counts.
    factor = factor * options.logit_scale
    of_target = (1 - options.label_smoothing) * targets.weight
    of_each = options.label_smoothing / x.shape[-1]
    whole = x.shape[-1] if weight is None else weight.sum()
    of_softmax = (of_target + of_each * whole + 2 * options.z_loss * lse) * factor
    # Relative to the maximum, which loses nothing to the rounding of a large lse; in a shard lse is that of all shards.
    softmax = torch.softmax(x, -1) if options.total_classes is None else torch.exp(x - lse.unsqueeze(-1))
    grad = softmax.mul_(of_softmax.unsqueeze(-1))
    if of_each > 0:
        of_class = of_each * factor.unsqueeze(-1)
        grad -= of_class if weight is None else of_class * weight
    of_target = torch.where(targets.here, -of_target * factor, 0)
    grad.scatter_add_(-1, targets.index.unsqueeze(-1), of_target.unsqueeze(-1))
    if options.softcap is not None:
        grad *= 1 - (x / options.softcap) ** 2
    return grad.masked_fill_(~targets.live.unsqueeze(-1), 0)


class _Probabilities(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, options: CrossEntropyOptions
    ) -> Tensor:
        loss = torch.empty(logits.shape[0], dtype=accumulation_dtype(logits.dtype), device=logits.device)
        for rows in pieces(logits):
            x, mass = _piece(logits[rows], target[rows], weight, options)
            below, peak = _below_peak(x)
            log_sum = _log_sum(below.exp())
            # 0 * inf is NaN, but a class without probability adds nothing.
            loss[rows] = torch.where(mass == 0, 0, mass * (log_sum - below)).sum(-1)
            if options.z_loss > 0:
                loss[rows] += options.z_loss * (log_sum + peak).squeeze(-1) ** 2
        ctx.save_for_backward(logits, target, weight)
        ctx.options = options
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        with torch.no_grad():
            grads = _gradients(ctx, grad_loss)
        if torch.is_grad_enabled():
            depends_on = grad_loss, *ctx.saved_tensors[:2]
            grads = [
                grad if grad is None else first_derivative_only(grad, "cross_entropy", *depends_on) for grad in grads
            ]
        return *grads, None, None


def _gradients(ctx: Any, grad_loss: Tensor) -> list[Tensor | None]:
    """The gradients with respect to logits and target that ``_Probabilities`` needs."""
    logits, target, weight = ctx.saved_tensors
    options: CrossEntropyOptions = ctx.options
    grad_logits = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
    grad_target = torch.empty_like(target) if ctx.needs_input_grad[1] else None
    for rows in pieces(logits):
        # A function, so that its temporaries are gone before those of the next piece are made.
        of_logits, of_target = (None if grad is None else grad[rows] for grad in (grad_logits, grad_target))
        _write_gradients(logits[rows], target[rows], weight, grad_loss[rows], options, of_logits, of_target)
    return [grad_logits, grad_target]


def _write_gradients(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    grad_loss: Tensor,
    options: CrossEntropyOptions,
    grad_logits: Tensor | None,
    grad_target: Tensor | None,
) -> None:
    x, mass = _piece(logits, target, weight, options)
    below, peak = _below_peak(x)
    log_sum = _log_sum(below.exp())
    upstream = grad_loss.unsqueeze(-1)
    if grad_target is not None:
        of_target = log_sum - below
        factor = upstream * (1 - options.label_smoothing)
        grad_target.copy_((of_target if weight is None else of_target * weight) * factor)
    if grad_logits is not None:
        grad = torch.exp(below - log_sum) * (mass.sum(-1, keepdim=True) + 2 * options.z_loss * (log_sum + peak)) - mass
        if options.softcap is not None:
            grad *= 1 - (x / options.softcap) ** 2
        grad_logits.copy_(grad * (upstream * options.logit_scale))


def _piece(
    logits: Tensor, target: Tensor, weight: Tensor | None, options: CrossEntropyOptions
) -> tuple[Tensor, Tensor]:
    """x and the weighted smoothed probabilities of some rows, in the accumulation dtype."""
    dtype = accumulation_dtype(logits.dtype)
    x = _capped(_scaled(logits.to(dtype), options.logit_scale), options.softcap)
    mass = (1 - options.label_smoothing) * target.to(dtype) + options.label_smoothing / x.shape[-1]
    return x, mass if weight is None else mass * weight
