"""flash-linear-attention (``fla-core``): its fused cross-entropy in Triton, alone and behind a linear layer.

The linear one is called with its defaults: at most 8 chunks, and sums of the weight's gradient in float32. It makes the
gradients in an evaluation too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from loss_core.backend import CrossEntropyOptions
from torch import Tensor

from loss_bench.peers.requirements import cross_entropy_with, lazily, linear_cross_entropy_with, missing_reason

API_VERSION = 1
OPS = ("cross_entropy", "linear_cross_entropy")
PEER = "fla-core"

_MODULE = "fla.modules.fused_cross_entropy"
_LINEAR_MODULE = "fla.modules.fused_linear_cross_entropy"


def unavailable_reason(device: torch.device) -> str | None:
    """Needs fla-core and a CUDA GPU."""
    return missing_reason(PEER, _MODULE, "fla", at_least="0.6", device=device)


@cross_entropy_with("ignore_index", "label_smoothing", "z_loss", "softcap", "logit_scale")
def cross_entropy(logits: Tensor, target: Tensor, weight: Tensor | None, options: CrossEntropyOptions) -> Tensor:
    """``fla.modules.fused_cross_entropy.FusedCrossEntropyLoss``; row losses in float32, reduced by torch."""
    return _loss(options)(logits, target)


@functools.lru_cache(maxsize=8)
def _loss(options: CrossEntropyOptions) -> Callable[[Tensor, Tensor], Tensor]:
    return lazily(_MODULE, "FusedCrossEntropyLoss")(
        ignore_index=options.ignore_index,
        reduction=options.reduction,
        label_smoothing=options.label_smoothing,
        logit_scale=options.logit_scale,
        lse_square_scale=options.z_loss,
        logit_softcapping=options.softcap,
    )


@linear_cross_entropy_with(
    "ignore_index", "label_smoothing", "softcap", "logit_scale", "linear_bias", reductions=("mean", "sum")
)
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    options: CrossEntropyOptions,
) -> Tensor:
    """``fla.modules.fused_linear_cross_entropy.FusedLinearCrossEntropyLoss``; the loss is a float32."""
    return _linear_loss(options)(input, target, linear_weight, linear_bias)


@functools.lru_cache(maxsize=8)
def _linear_loss(options: CrossEntropyOptions) -> Callable[..., Tensor]:
    return lazily(_LINEAR_MODULE, "FusedLinearCrossEntropyLoss")(
        ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing,
        logit_scale=options.logit_scale,
        logit_softcapping=options.softcap,
        reduction=options.reduction,
    )
