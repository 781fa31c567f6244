"""crossentropy-triton: one Triton kernel that writes the gradient over the logits.

The library's own function is a causal loss that shifts the labels and copies the logits for it. As a cross-entropy its
kernels are called without that copy.
"""

from __future__ import annotations

from typing import Any

import torch
from loss_core.backend import CrossEntropyOptions
from torch import Tensor

from loss_bench.peers.requirements import cross_entropy_with, lazily, missing_reason, refuse_options

API_VERSION = 1
OPS = ("cross_entropy",)
PEER = "crossentropy-triton"
INPLACE = True

_MODULE = "crossentropy_triton.crossentropy_tl"


def unavailable_reason(device: torch.device) -> str | None:
    """Needs crossentropy-triton and a CUDA GPU."""
    return missing_reason(PEER, _MODULE, "crossentropy-triton", at_least="0.1", device=device)


@cross_entropy_with("ignore_index", reductions=("mean",))
def cross_entropy(logits: Tensor, target: Tensor, weight: Tensor | None, options: CrossEntropyOptions) -> Tensor:
    """The library's forward and backward; mean only, loss in the dtype of the logits."""
    return _CrossEntropy.apply(logits, target, options.ignore_index)


def causal_lm_loss(logits: Tensor, labels: Tensor, weight: Tensor | None, options: CrossEntropyOptions) -> Tensor:
    """The library's own ``CrossEntropyFunction``: (sequences, time, classes) logits, (sequences, time) labels."""
    refuse_options(options, {"weight": weight}, known=("ignore_index",), reductions=("mean",))
    return lazily(_MODULE, "CrossEntropyFunction.apply")(logits, labels, options.ignore_index)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignore_index: int) -> Tensor:
        loss, gradient = lazily(_MODULE, "cross_entropy_forward")(logits, target, ignore_index)
        ctx.save_for_backward(gradient.detach())
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return lazily(_MODULE, "cross_entropy_backward")(gradient, grad_outputs[0]), None, None
