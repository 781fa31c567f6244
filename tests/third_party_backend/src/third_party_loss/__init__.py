"""A backend in a few lines: cross-entropy as kernels, one row loss at a time, and softmax as a ready-made function.

loss-core builds "mean", "sum" and "byte_mean" from "none", and brings validation, layouts and autograd.
"""

import torch
from loss_core.backend import CrossEntropyForward, UnsupportedInput

API_VERSION = 1
OPS = ("cross_entropy", "softmax")
REDUCTIONS = ("none",)


def unavailable_reason(device):
    return None if device.type == "cpu" else f"runs on CPUs, not on {device.type}"


def cross_entropy_forward(logits, target, weight, byte_lengths, num_items, options, *, grad, stats):
    _check(logits, weight, options, stats)
    x = logits.float()
    live, index = _live(target, options)
    lse = torch.logsumexp(x, -1)
    lse = torch.where(lse == torch.inf, torch.nan, lse)  # a row with +inf is NaN, as in torch
    loss = lse - x.gather(-1, index[:, None])[:, 0]
    return CrossEntropyForward(torch.where(live, loss, 0), lse)


def cross_entropy_backward(grad_loss, logits, target, weight, lse, denominator, options, *, grad, skip_if_one):
    live, index = _live(target, options)
    result = torch.exp(logits.float() - lse[:, None])
    result.scatter_add_(-1, index[:, None], torch.full((len(index), 1), -1.0))
    grad.copy_(torch.where(live[:, None], result * grad_loss[:, None], 0))


def softmax(input):
    _check_dtype(input)
    return torch.softmax(input.float(), -1).to(input.dtype)


def _check_dtype(logits):
    if logits.dtype == torch.float64:
        raise UnsupportedInput("computes in float32, got float64")


def _check(logits, weight, options, stats):
    _check_dtype(logits)
    plain = options._replace(ignore_index=-100, reduction="none")
    if plain != type(options)(reduction="none") or weight is not None or stats:
        raise UnsupportedInput("knows no class weights, smoothing, z-loss, softcap, scale and statistics")


def _live(target, options):
    live = target.long() != options.ignore_index
    return live, torch.where(live, target.long(), 0)
