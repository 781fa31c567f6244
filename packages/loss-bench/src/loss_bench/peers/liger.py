"""Liger (``liger-kernel``): its Triton kernels.

Its cross-entropy always writes the gradient over the logits, in an evaluation too.
"""

from __future__ import annotations

import torch
from loss_core.backend import CrossEntropyOptions
from torch import Tensor

from loss_bench.peers.requirements import cross_entropy_with, lazily, missing_reason

API_VERSION = 1
OPS = ("cross_entropy", "softmax")
PEER = "liger-kernel"
INPLACE = True


def unavailable_reason(device: torch.device) -> str | None:
    """Needs liger-kernel and a CUDA GPU."""
    return missing_reason(PEER, "liger_kernel.ops.cross_entropy", "liger", at_least="0.5", device=device)


@cross_entropy_with("ignore_index", "label_smoothing", "z_loss", "softcap", "weight")
def cross_entropy(logits: Tensor, target: Tensor, weight: Tensor | None, options: CrossEntropyOptions) -> Tensor:
    """``liger_kernel.transformers.functional.liger_cross_entropy``; the loss has the dtype of the logits."""
    return lazily("liger_kernel.transformers.functional", "liger_cross_entropy")(
        logits,
        target,
        weight,
        ignore_index=options.ignore_index,
        reduction=options.reduction,
        label_smoothing=options.label_smoothing,
        lse_square_scale=options.z_loss,
        softcap=options.softcap,
    )


def softmax(input: Tensor) -> Tensor:
    """``liger_kernel.ops.softmax``."""
    return lazily("liger_kernel.ops.softmax", "LigerSoftmaxFunction.apply")(input)
