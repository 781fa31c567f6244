"""The ``torch`` backend: the math of every op in readable PyTorch, on any device that torch has, float64 included.

It defines what the other backends compute. Half-precision logits are converted to float32 a few rows at a time, so
that beside the result it holds about five temporaries of ``pieces.PIECE`` elements, 80 MiB in all on a CPU, and four
times that on a GPU; with class probabilities as target two more, and for float64 twice the bytes.
"""

from __future__ import annotations

import torch

from loss_core.reference.cross_entropy import (
    cross_entropy_backward,
    cross_entropy_forward,
    cross_entropy_probabilities,
    cross_entropy_rescale_live,
)
from loss_core.reference.softmax import (
    log_softmax_backward,
    log_softmax_forward,
    softmax_backward,
    softmax_forward,
)

# A number of its own, as any backend states it: raising loss-core's must not silently raise this one.
API_VERSION = 1
OPS = ("cross_entropy", "softmax", "log_softmax")

__all__ = [
    "API_VERSION",
    "OPS",
    "cross_entropy_backward",
    "cross_entropy_forward",
    "cross_entropy_probabilities",
    "cross_entropy_rescale_live",
    "log_softmax_backward",
    "log_softmax_forward",
    "softmax_backward",
    "softmax_forward",
    "unavailable_reason",
]


def unavailable_reason(device: torch.device) -> str | None:
    """None: torch runs on every device that it made a tensor on."""
    return None
