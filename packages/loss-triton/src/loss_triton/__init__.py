"""Triton kernels for loss-core: the backend ``triton``.

loss-core finds this module by its entry point; nothing here has to be called by hand. The kernels run on GPUs that
Triton supports, and on CPU tensors in Triton's interpreter (``TRITON_INTERPRET=1`` before triton is imported).
"""

from __future__ import annotations

import torch
from triton import knobs

from loss_triton.__about__ import __version__
from loss_triton.compatibility import (
    CrossEntropyFunction,
    FusedCrossEntropyFunction,
    TritonCausalLMLoss,
    TritonCrossEntropyLoss,
)
from loss_triton.cross_entropy import (
    cross_entropy_backward,
    cross_entropy_forward,
    cross_entropy_prepare,
    cross_entropy_rescale_live,
)
from loss_triton.softmax import (
    log_softmax_backward,
    log_softmax_forward,
    log_softmax_prepare,
    softmax_backward,
    softmax_forward,
    softmax_prepare,
)
from loss_triton.softmax_columns import (
    log_softmax_columns_backward,
    log_softmax_columns_forward,
    softmax_columns_backward,
    softmax_columns_forward,
)

API_VERSION = 1
OPS = ("cross_entropy", "softmax", "log_softmax")

__all__ = [
    "API_VERSION",
    "OPS",
    "CrossEntropyFunction",
    "FusedCrossEntropyFunction",
    "TritonCausalLMLoss",
    "TritonCrossEntropyLoss",
    "__version__",
    "cross_entropy_backward",
    "cross_entropy_forward",
    "cross_entropy_prepare",
    "cross_entropy_rescale_live",
    "log_softmax_backward",
    "log_softmax_columns_backward",
    "log_softmax_columns_forward",
    "log_softmax_forward",
    "log_softmax_prepare",
    "softmax_backward",
    "softmax_columns_backward",
    "softmax_columns_forward",
    "softmax_forward",
    "softmax_prepare",
    "unavailable_reason",
]

# The kernels were defined in one mode or the other when this module was imported.
_INTERPRETED = knobs.runtime.interpret


def unavailable_reason(device: torch.device) -> str | None:
    """Why the kernels cannot run on `device`, or None: Triton compiles for GPUs, and interprets on the CPU."""
    if _INTERPRETED:
        return None if device.type == "cpu" else f"TRITON_INTERPRET is set, which takes CPU tensors, not {device.type}"
    if device.type == "cpu":
        return "Triton runs on GPUs; TRITON_INTERPRET=1 interprets its kernels on the CPU"
    if device.type not in ("cuda", "xpu"):
        return f"Triton has no compiler for {device.type}"
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        major, minor = torch.cuda.get_device_capability(device)
        return f"needs compute capability 8.0 or newer, {torch.cuda.get_device_name(device)} has {major}.{minor}"
    return None
