"""Softmax, log-softmax and their gradients in PyTorch, a few rows at a time where dtypes have to be converted."""

from __future__ import annotations

import torch
from torch import Tensor

from loss_core.dtypes import accumulation_dtype
from loss_core.reference.pieces import pieces


def softmax_forward(input: Tensor, output: Tensor) -> None:
    """output = exp(input - lse). See ``loss_core.backend``."""
    _forward(input, output, torch.softmax)


def log_softmax_forward(input: Tensor, output: Tensor) -> None:
    """output = input - lse. See ``loss_core.backend``."""
    _forward(input, output, torch.log_softmax)


def softmax_backward(grad_output: Tensor, output: Tensor, grad_input: Tensor) -> None:
    """grad_input = y (g - sum(g y)), y the output and g its gradient. See ``loss_core.backend``."""
    for rows in pieces(output):
        dtype = accumulation_dtype(output.dtype)
        y, g = output[rows].to(dtype), grad_output[rows].to(dtype)
        grad_input[rows] = y * (g - (g * y).sum(-1, keepdim=True))


def log_softmax_backward(grad_output: Tensor, output: Tensor, grad_input: Tensor) -> None:
    """grad_input = g - exp(y) sum(g), y the output and g its gradient. See ``loss_core.backend``."""
    for rows in pieces(output):
        dtype = accumulation_dtype(output.dtype)
        y, g = output[rows].to(dtype), grad_output[rows].to(dtype)
        grad_input[rows] = g - torch.exp(y) * g.sum(-1, keepdim=True)


def _forward(input: Tensor, output: Tensor, function) -> None:  # type: ignore[no-untyped-def]
    for rows in pieces(input):
        output[rows] = function(input[rows].to(accumulation_dtype(input.dtype)), -1)
