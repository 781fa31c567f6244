"""Plain ``torch.nn.functional``, the baseline of all speed-ups."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from loss_core.backend import CrossEntropyOptions
from torch import Tensor

from loss_bench.peers.requirements import refuse_options

API_VERSION = 1
OPS = ("cross_entropy", "softmax", "log_softmax")
PEER = "torch"


def unavailable_reason(device: torch.device) -> str | None:
    """Never: torch runs on all of its devices."""
    return None


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    byte_lengths: Tensor | None,
    num_items: float | Tensor | None,
    options: CrossEntropyOptions,
) -> Tensor:
    """``F.cross_entropy``; the loss has the dtype of the logits."""
    refuse_options(
        options,
        known=("ignore_index", "label_smoothing", "weight"),
        weight=weight,
        byte_lengths=byte_lengths,
        num_items=num_items,
    )
    return functional_cross_entropy(logits, target, weight, options)


def functional_cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None, options: CrossEntropyOptions
) -> Tensor:
    """The call of ``F.cross_entropy`` by itself, to be compiled too."""
    return F.cross_entropy(
        logits,
        target,
        # torch wants the weights in the dtype of the logits.
        weight if weight is None else weight.to(logits.dtype),
        ignore_index=options.ignore_index,
        reduction=options.reduction,
        label_smoothing=options.label_smoothing,
    )


def softmax(input: Tensor) -> Tensor:
    """``F.softmax`` over the last dimension."""
    return F.softmax(input, dim=-1)


def log_softmax(input: Tensor) -> Tensor:
    """``F.log_softmax`` over the last dimension."""
    return F.log_softmax(input, dim=-1)
