"""Liger's CuTe DSL kernels (``liger-kernel`` with ``nvidia-cutlass-dsl``), named by their own module.

Its cross-entropy always writes the gradient over the logits, in an evaluation too. Its linear cross-entropy is the one
for compute capability 9.0; for others the library chooses elsewhere.
"""

from __future__ import annotations

import functools

import torch
from loss_core.backend import CrossEntropyOptions, UnsupportedInput
from torch import Tensor

from loss_bench.peers.requirements import (
    cross_entropy_with,
    lazily,
    linear_cross_entropy_with,
    missing_reason,
    refuse_dtype,
)

API_VERSION = 1
OPS = ("cross_entropy", "linear_cross_entropy")
PEER = "liger-kernel"
INPLACE = True

_MODULE = "liger_kernel.ops.cutedsl.ops.cross_entropy"
_LINEAR_MODULE = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90"


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


@linear_cross_entropy_with("ignore_index", reductions=("mean", "sum"))
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    options: CrossEntropyOptions,
) -> Tensor:
    """``liger_fused_linear_cross_entropy_sm90`` of the CuTe DSL ops; it names the shapes that it does not do."""
    refuse_dtype(input, (torch.bfloat16,))
    if input.is_cuda and _capability(input.device) != (9, 0):
        raise UnsupportedInput("the library has this for compute capability 9.0 alone")
    return lazily(_LINEAR_MODULE, "liger_fused_linear_cross_entropy_sm90")(
        input, linear_weight, target, options.ignore_index, options.reduction
    )


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
