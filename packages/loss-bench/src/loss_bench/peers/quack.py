"""Quack (``quack-kernels``): CuTe DSL kernels for Hopper and newer."""

from __future__ import annotations

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
OPS = ("cross_entropy", "softmax", "linear_cross_entropy")
PEER = "quack-kernels"

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LINEAR_DTYPES = (torch.float16, torch.bfloat16)
_LINEAR_MULTIPLE = 8
_CHUNK = 4096
"""The library's default."""


def unavailable_reason(device: torch.device) -> str | None:
    """Needs quack-kernels and a GPU of compute capability 9.0."""
    return missing_reason(PEER, "quack", "quack", at_least="0.6", device=device, capability=(9, 0))


@cross_entropy_with("ignore_index", "weight")
def cross_entropy(logits: Tensor, target: Tensor, weight: Tensor | None, options: CrossEntropyOptions) -> Tensor:
    """``quack.cross_entropy.cross_entropy``; row losses in float32, reduced by torch."""
    refuse_dtype(logits, _DTYPES)
    return lazily("quack.cross_entropy", "cross_entropy")(
        logits, target, weight=weight, ignore_index=options.ignore_index, reduction=options.reduction
    )


@linear_cross_entropy_with("ignore_index", reductions=("mean", "sum"))
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    options: CrossEntropyOptions,
) -> Tensor:
    """``quack.linear_cross_entropy.chunked_linear_cross_entropy``, which chooses the path; the loss is a float32."""
    refuse_dtype(input, _LINEAR_DTYPES)
    if any(size % _LINEAR_MULTIPLE for size in (*input.shape, linear_weight.shape[0])):
        # Its module takes the whole logits then, as torch does.
        raise UnsupportedInput(f"the library's chunks need rows, hidden and classes in multiples of {_LINEAR_MULTIPLE}")
    return lazily("quack.linear_cross_entropy", "chunked_linear_cross_entropy")(
        input,
        linear_weight,
        target,
        # The library fails where a chunk has as many rows as features.
        chunk_size=_CHUNK if input.shape[1] != _CHUNK else _CHUNK // 2,
        ignore_index=options.ignore_index,
        reduction=options.reduction,
    )


def softmax(input: Tensor) -> Tensor:
    """``quack.softmax.softmax``."""
    refuse_dtype(input, _DTYPES)
    return lazily("quack.softmax", "softmax")(input)
