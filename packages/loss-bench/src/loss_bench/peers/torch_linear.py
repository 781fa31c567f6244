"""torch's own ``F.linear_cross_entropy``, which goes through the rows in chunks and never holds all logits.

It is asked for with torch's default options, which choose the size of the chunks and where sums are kept in float32.
Without options, and for label smoothing, torch falls back to what the backend ``torch-nn`` times.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from loss_core.backend import CrossEntropyOptions
from torch import Tensor

from loss_bench.peers.requirements import linear_cross_entropy_with

API_VERSION = 1
OPS = ("linear_cross_entropy",)
PEER = "torch"


def unavailable_reason(device: torch.device) -> str | None:
    """Needs torch 2.13."""
    if not hasattr(F, "linear_cross_entropy"):
        return f"torch {torch.__version__} has no linear_cross_entropy; 2.13 or newer is needed"
    return None


@linear_cross_entropy_with("ignore_index", "weight", "linear_bias")
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    options: CrossEntropyOptions,
) -> Tensor:
    """``F.linear_cross_entropy`` in chunks; the loss has the dtype of the input."""
    return F.linear_cross_entropy(
        input,
        linear_weight,
        target,
        linear_bias=linear_bias,
        # torch wants the weights in the dtype of the input.
        weight=weight if weight is None else weight.to(input.dtype),
        ignore_index=options.ignore_index,
        reduction=options.reduction,
        options=_default_options(),
    )


@functools.cache
def _default_options() -> Any:
    return torch.nn.LinearCrossEntropyOptions()
