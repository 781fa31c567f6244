"""Plain ``torch.nn.functional``, the baseline of all speed-ups."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from loss_core.backend import CrossEntropyOptions
from torch import Tensor

from loss_bench.peers.requirements import cross_entropy_with, linear_cross_entropy_with

API_VERSION = 1
OPS = ("cross_entropy", "softmax", "log_softmax", "linear_cross_entropy")
PEER = "torch"

KNOWN = ("ignore_index", "label_smoothing", "z_loss", "softcap", "logit_scale", "weight")
"""Options of ``F.cross_entropy``, and those that users put around it."""


def unavailable_reason(device: torch.device) -> str | None:
    """Never: torch runs on all of its devices."""
    return None


@cross_entropy_with(*KNOWN)
def cross_entropy(logits: Tensor, target: Tensor, weight: Tensor | None, options: CrossEntropyOptions) -> Tensor:
    """``F.cross_entropy``; the loss has the dtype of the logits."""
    return functional_cross_entropy(logits, target, weight, options)


@linear_cross_entropy_with(*KNOWN, "linear_bias")
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    options: CrossEntropyOptions,
) -> Tensor:
    """``F.linear``, and ``F.cross_entropy`` of the whole logits; the loss has the dtype of the input."""
    return functional_linear_cross_entropy(input, linear_weight, target, linear_bias, weight, options)


def functional_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    options: CrossEntropyOptions,
) -> Tensor:
    """The same without a look at the options, to be compiled too."""
    return functional_cross_entropy(F.linear(input, linear_weight, linear_bias), target, weight, options)


def functional_cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None, options: CrossEntropyOptions
) -> Tensor:
    """``F.cross_entropy``, by itself where it has the options, to be compiled too.

    Scale, softcap and z-loss are written around it the way model code does it, on logits in float32.
    """
    extended = options.logit_scale != 1.0 or options.softcap is not None or options.z_loss != 0.0
    if extended:
        logits = _transformed(logits, options)
    loss = F.cross_entropy(
        logits,
        target,
        # torch wants the weights in the dtype of the logits.
        weight if weight is None else weight.to(logits.dtype),
        ignore_index=options.ignore_index,
        reduction=options.reduction,
        label_smoothing=options.label_smoothing,
    )
    return loss + _z_loss(logits, target, weight, options) if options.z_loss else loss


def _transformed(logits: Tensor, options: CrossEntropyOptions) -> Tensor:
    x = logits.float() * options.logit_scale if logits.dtype != torch.float64 else logits * options.logit_scale
    return x if options.softcap is None else options.softcap * torch.tanh(x / options.softcap)


def _z_loss(logits: Tensor, target: Tensor, weight: Tensor | None, options: CrossEntropyOptions) -> Tensor:
    kept = target != options.ignore_index
    rows = options.z_loss * torch.logsumexp(logits, dim=-1).square() * kept
    if options.reduction != "mean":
        return rows if options.reduction == "none" else rows.sum()
    return rows.sum() / (kept.sum() if weight is None else (weight[target.where(kept, 0)] * kept).sum())


def softmax(input: Tensor) -> Tensor:
    """``F.softmax`` over the last dimension."""
    return F.softmax(input, dim=-1)


def log_softmax(input: Tensor) -> Tensor:
    """``F.log_softmax`` over the last dimension."""
    return F.log_softmax(input, dim=-1)
