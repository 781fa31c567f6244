"""cut-cross-entropy: Triton kernels that make the logits in tiles, once in each direction, and keep none of them.

The library drops the gradients of tiles that are small throughout (``filter_eps="high"``), which saves much of the
backward pass where most classes are unlikely. Here it is called with ``filter_eps=None``, which drops nothing: its
time is that of the whole gradient, as everybody else's is.
"""

from __future__ import annotations

import torch
from loss_core.backend import CrossEntropyOptions
from torch import Tensor

from loss_bench.peers.requirements import lazily, linear_cross_entropy_with, missing_reason, refuse_dtype

API_VERSION = 1
OPS = ("linear_cross_entropy",)
PEER = "cut-cross-entropy"

_DTYPES = (torch.float16, torch.bfloat16)


def unavailable_reason(device: torch.device) -> str | None:
    """Needs cut-cross-entropy and a GPU of compute capability 8.0."""
    return missing_reason(PEER, "cut_cross_entropy", "cce", at_least="25.1", device=device, capability=(8, 0))


@linear_cross_entropy_with("ignore_index", "softcap")
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    options: CrossEntropyOptions,
) -> Tensor:
    """``cut_cross_entropy.linear_cross_entropy`` without its filter; the loss is a float32."""
    refuse_dtype(input, _DTYPES)
    return lazily("cut_cross_entropy", "linear_cross_entropy")(
        input,
        linear_weight,
        target,
        ignore_index=options.ignore_index,
        softcap=options.softcap,
        reduction=options.reduction,
        filter_eps=None,
    )
