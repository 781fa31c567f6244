"""A loud end to second derivatives and forward-mode ones, which the kernels do not have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from loss_core.backend import UnsupportedInput


class _FirstDerivativeOnly(torch.autograd.Function):
    """The identity on a gradient, connected to what it depends on; its own backward raises."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, op: str, *depends_on: Tensor | None) -> Tensor:  # type: ignore[override]
        ctx.op = op
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:  # type: ignore[override]
        raise RuntimeError(
            f"loss_core.{ctx.op} has no second derivative: its gradient comes from a kernel. "
            f"Compute it with torch.nn.functional.{ctx.op} where one is needed."
        )


def first_derivative_only(grad: Tensor, op: str, *depends_on: Tensor | None) -> Tensor:
    """`grad`, such that differentiating it again with respect to anything in `depends_on` raises a RuntimeError.

    Under ``create_graph=True`` a gradient without a graph would silently count as a constant.
    """
    return _FirstDerivativeOnly.apply(grad, op, *depends_on)


def refuse_tangent(input: Tensor, backend: str) -> None:
    """Raise UnsupportedInput if `input` carries a tangent and `backend` has kernels, which would drop it.

    The reference's tangents are those of PyTorch's ops.
    """
    # Outside a dual_level nothing carries one.
    if forward_ad._current_level >= 0 and backend != "torch" and forward_ad.unpack_dual(input).tangent is not None:
        raise UnsupportedInput(f"backend {backend!r} has no forward-mode derivative")
