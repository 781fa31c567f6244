"""Liger's CuTe DSL kernels (``liger-kernel`` with ``nvidia-cutlass-dsl``), named by their own module.

Its cross-entropy always writes the gradient over the logits, in an evaluation too.
"""

from __future__ import annotations

import torch
from loss_core.backend import CrossEntropyOptions
from torch import Tensor

from loss_bench.peers.requirements import cross_entropy_with, lazily, missing_reason

API_VERSION = 1
OPS = ("cross_entropy",)
PEER = "liger-kernel"
INPLACE = True

_MODULE = "liger_kernel.ops.cutedsl.ops.cross_entropy"


def unavailable_reason(device: torch.device) -> str | None:
    """Needs a liger-kernel that has the CuTe DSL ops, and a GPU of compute capability 9.0."""
    return missing_reason(PEER, _MODULE, "liger", at_least="0.8", device=device, capability=(9, 0))


@cross_entropy_with("ignore_index", "label_smoothing", "z_loss", "softcap", "weight")
def cross_entropy(logits: Tensor, target: Tensor, weight: Tensor | None, options: CrossEntropyOptions) -> Tensor:
    """``LigerCrossEntropyFunction`` of the CuTe DSL ops."""
    loss, *_ = lazily(_MODULE, "LigerCrossEntropyFunction.apply")(
        logits,
        target,
        weight,
        options.ignore_index,
        options.z_loss,
        options.label_smoothing,
        options.reduction,
        options.softcap,
    )
    return loss
