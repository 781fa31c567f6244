"""The CuTe DSL backend of loss-core: cross-entropy, softmax and log-softmax on NVIDIA GPUs from sm_80 on.

loss-core finds this module by its entry point; ``loss_core.cross_entropy(..., backend="cutedsl")`` is the way to call
it. The functions below are the contract of ``loss_core.backend``. Importing this module imports neither the DSL nor
any kernel: that happens at the first question whether the backend is available, or at the first call, which then puts
the op itself in the place of the function here.
"""

from __future__ import annotations

import torch
from loss_core.backend import CrossEntropyForward, CrossEntropyOptions, PreparedCrossEntropy, PreparedSoftmax
from torch import Tensor

from .__about__ import __version__

__all__ = [
    "API_VERSION",
    "OPS",
    "__version__",
    "cross_entropy_backward",
    "cross_entropy_forward",
    "cross_entropy_prepare",
    "cross_entropy_rescale_live",
    "log_softmax_backward",
    "log_softmax_forward",
    "log_softmax_prepare",
    "softmax_backward",
    "softmax_forward",
    "softmax_prepare",
    "unavailable_reason",
]

API_VERSION = 1
OPS = ("cross_entropy", "softmax", "log_softmax")


def unavailable_reason(device: torch.device) -> str | None:
    """Why the kernels cannot run on ``device`` here and now, or None if they can."""
    from . import _environment

    return _environment.unavailable_reason(device)


def _load() -> None:
    """Put the ops themselves in the place of the functions below: imports cost each call."""
    from . import cross_entropy, softmax

    globals().update(
        cross_entropy_forward=cross_entropy.forward,
        cross_entropy_backward=cross_entropy.backward,
        cross_entropy_prepare=cross_entropy.prepare,
        cross_entropy_rescale_live=cross_entropy.rescale_live,
        softmax_forward=softmax.softmax_forward,
        softmax_backward=softmax.softmax_backward,
        log_softmax_forward=softmax.log_softmax_forward,
        log_softmax_backward=softmax.log_softmax_backward,
        softmax_prepare=softmax.softmax_prepare,
        log_softmax_prepare=softmax.log_softmax_prepare,
    )


def cross_entropy_forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    byte_lengths: Tensor | None,
    num_items: float | Tensor | None,
    options: CrossEntropyOptions,
    *,
    grad: Tensor | None,
    stats: bool,
) -> CrossEntropyForward:
    """Loss, and with ``grad`` its gradient too, the logits read once."""
    _load()
    return cross_entropy_forward(logits, target, weight, byte_lengths, num_items, options, grad=grad, stats=stats)


def cross_entropy_backward(
    grad_loss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    denominator: Tensor | None,
    options: CrossEntropyOptions,
    *,
    grad: Tensor,
    skip_if_one: bool,
) -> None:
    """The gradient recomputed from logits and lse, times the upstream gradient."""
    _load()
    cross_entropy_backward(
        grad_loss, logits, target, weight, lse, denominator, options, grad=grad, skip_if_one=skip_if_one
    )


def cross_entropy_prepare(
    device: torch.device,
    dtype: torch.dtype,
    target_dtype: torch.dtype,
    rows: int,
    classes: int,
    stride: int,
    offset: int,
    options: CrossEntropyOptions,
    *,
    gradient: bool,
) -> PreparedCrossEntropy | None:
    """Both for calls that have all of this in common, what they look up being looked up."""
    _load()
    return cross_entropy_prepare(device, dtype, target_dtype, rows, classes, stride, offset, options, gradient=gradient)


def cross_entropy_rescale_live(grad_loss: Tensor, grad: Tensor, target: Tensor, ignore_index: int) -> None:
    """``grad *= grad_loss``, in place, in rows that are not ignored; reads one number where that is 1."""
    _load()
    cross_entropy_rescale_live(grad_loss, grad, target, ignore_index)


def softmax_forward(input: Tensor, output: Tensor) -> None:
    """``output = softmax(input)`` along the last dimension."""
    _load()
    softmax_forward(input, output)


def softmax_backward(grad_output: Tensor, output: Tensor, grad_input: Tensor) -> None:
    """``grad_input`` of softmax, from its output."""
    _load()
    softmax_backward(grad_output, output, grad_input)


def log_softmax_forward(input: Tensor, output: Tensor) -> None:
    """``output = log_softmax(input)`` along the last dimension."""
    _load()
    log_softmax_forward(input, output)


def log_softmax_backward(grad_output: Tensor, output: Tensor, grad_input: Tensor) -> None:
    """``grad_input`` of log_softmax, from its output."""
    _load()
    log_softmax_backward(grad_output, output, grad_input)


def softmax_prepare(
    device: torch.device, dtype: torch.dtype, rows: int, classes: int, stride: int, offset: int
) -> PreparedSoftmax | None:
    """Both directions for inputs that have all of this in common, what they look up being looked up."""
    _load()
    return softmax_prepare(device, dtype, rows, classes, stride, offset)


def log_softmax_prepare(
    device: torch.device, dtype: torch.dtype, rows: int, classes: int, stride: int, offset: int
) -> PreparedSoftmax | None:
    """As ``softmax_prepare``, for log_softmax."""
    _load()
    return log_softmax_prepare(device, dtype, rows, classes, stride, offset)
