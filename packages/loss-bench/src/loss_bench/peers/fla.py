"""flash-linear-attention (``fla-core``): its fused cross-entropy in Triton."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from loss_core.backend import CrossEntropyOptions
from torch import Tensor

from loss_bench.peers.requirements import cross_entropy_with, lazily, missing_reason

API_VERSION = 1
OPS = ("cross_entropy",)
PEER = "fla-core"

_MODULE = "fla.modules.fused_cross_entropy"


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
