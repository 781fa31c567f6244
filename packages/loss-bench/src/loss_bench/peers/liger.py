"""Liger (``liger-kernel``): its Triton kernels.

Its cross-entropy always writes the gradient over the logits, in an evaluation too. Its linear cross-entropy is called
with its defaults, which sum the weight's gradient in the dtype of the weight.
"""

from __future__ import annotations

import torch
from loss_core.backend import CrossEntropyOptions
from torch import Tensor

from loss_bench.peers.requirements import cross_entropy_with, lazily, linear_cross_entropy_with, missing_reason

API_VERSION = 1
OPS = ("cross_entropy", "softmax", "linear_cross_entropy")
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


@linear_cross_entropy_with("ignore_index", "label_smoothing", "z_loss", "softcap", "weight", "linear_bias")
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    options: CrossEntropyOptions,
) -> Tensor:
    """``liger_kernel.transformers.functional.liger_fused_linear_cross_entropy``; the loss is a float32."""
    return lazily("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")(
        input,
        linear_weight,
        target,
        bias=linear_bias,
        ce_weight=weight,
        ignore_index=options.ignore_index,
        lse_square_scale=options.z_loss,
        label_smoothing=options.label_smoothing,
        reduction=options.reduction,
        softcap=options.softcap,
    )


def softmax(input: Tensor) -> Tensor:
    """``liger_kernel.ops.softmax``."""
    return lazily("liger_kernel.ops.softmax", "LigerSoftmaxFunction.apply")(input)
