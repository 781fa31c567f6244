"""Cross-entropy under ``torch.compile``: opaque ops, so that neither the backend's choice nor its kernels are traced.

The gradient is computed in the backward, where the compiler can place its memory; an op may not hand a buffer through.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loss_core import registry
from loss_core.backend import CrossEntropyForward, CrossEntropyOptions, UnsupportedInput
from loss_core.canonical import from_rows, on_device_of, to_rows
from loss_core.cross_entropy_arguments import Facts, bounded_byte_lengths, check_range
from loss_core.dtypes import accumulation_dtype
from loss_core.environment import is_on
from loss_core.registry import Backend


def compiled(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    byte_lengths: Tensor | None,
    num_items: float | Tensor | None,
    facts: Facts,
    backend: str | None,
    stats: bool,
) -> Any:
    """What ``_compute`` in ``cross_entropy`` returns."""
    options, dim, shape = facts.options, facts.dim, facts.shape
    if isinstance(num_items, float):
        num_items = torch.full((1,), num_items, dtype=accumulation_dtype(input.dtype), device=input.device)
    # A shard of the vocabulary, the last two options, is no matter of this API.
    loss, lse, denominator, *rest = _forward_op(
        input, target, weight, byte_lengths, num_items, *options[:-2], dim, stats, backend
    )
    # Without statistics their places are empty tensors.
    result = CrossEntropyForward(loss, lse, denominator, *rest) if stats else loss
    return result if options.reduction != "none" or len(shape) == 1 else in_shape(result, shape)


def in_shape(result: Any, shape: torch.Size) -> Any:
    """The losses of rows, or with statistics all of a result, in the target's shape."""
    if isinstance(result, Tensor):
        return result.view(shape)
    z_loss = None if result.z_loss is None else result.z_loss.view(shape)
    return result._replace(loss=result.loss.view(shape), z_loss=z_loss)


@torch.library.custom_op("loss_core::cross_entropy", mutates_args=())
def _forward_op(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    byte_lengths: Tensor | None,
    num_items: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    dim: int,
    stats: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    options = CrossEntropyOptions(ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale)
    looked_at = input.device.type == "cpu" or is_on("LOSS_VALIDATE")
    if looked_at:
        check_range(target, input.shape[dim], ignore_index, target.shape)
    if byte_lengths is not None:
        byte_lengths = bounded_byte_lengths(byte_lengths, target, ignore_index, target.shape, looked_at=looked_at)

    def forward(module: Any) -> CrossEntropyForward:
        return module.cross_entropy_forward(
            to_rows(input, dim), target, weight, byte_lengths, num_items, options, grad=None, stats=stats
        )

    result = _first_that_can(forward, input, reduction, backend)
    if num_items is not None:
        # An op may not return its argument, which is the denominator.
        result = result._replace(denominator=num_items.clone())
    return tuple(map(_or_empty, result))  # type: ignore[return-value]


def _or_empty(tensor: Tensor | None) -> Tensor:
    return torch.empty(0) if tensor is None else tensor


@_forward_op.register_fake
def _(  # type: ignore[no-untyped-def]
    input, target, weight, byte_lengths, num_items, ignore_index, reduction, label_smoothing, z_loss, softcap,
    logit_scale, dim, stats, backend,
):  # fmt: skip
    dtype = accumulation_dtype(input.dtype)
    rows = target.shape[0]
    loss = input.new_empty((rows,) if reduction == "none" else (), dtype=dtype)
    denominator = input.new_empty(1, dtype=dtype) if reduction in ("mean", "byte_mean") else torch.empty(0)
    if not stats:
        return loss, input.new_empty(rows, dtype=dtype), denominator, *(torch.empty(0) for _ in range(3))
    return (
        loss,
        input.new_empty(rows, dtype=dtype),
        denominator,
        torch.empty_like(loss),
        input.new_empty(rows, dtype=torch.int64),
        input.new_empty(rows, dtype=torch.bool),
    )


@torch.library.custom_op("loss_core::cross_entropy_backward", mutates_args=())
def _backward_op(
    grad_loss: Tensor,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    denominator: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    dim: int,
    backend: str | None,
) -> Tensor:
    options = CrossEntropyOptions(ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale)
    grad_loss = grad_loss.resolve_neg()
    logits = to_rows(input, dim)
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)

    def backward(module: Any) -> None:
        module.cross_entropy_backward(
            grad_loss, logits, target, weight, lse, denominator if denominator.numel() else None, options,
            grad=grad, skip_if_one=False,
        )  # fmt: skip

    _first_that_can(backward, input, reduction, backend)
    return from_rows(grad, input.shape, dim)


@_backward_op.register_fake
def _(grad_loss, input, target, *_):  # type: ignore[no-untyped-def]
    dim = _[-2]
    shape = input.shape
    rows = input.new_empty((target.shape[0], shape[dim]))
    return from_rows(rows, shape, dim)


def _first_that_can(call: Any, input: Tensor, reduction: str, backend: str | None) -> Any:
    """`call` with the module of the first candidate whose kernels do not refuse it."""

    def kernels(choice: Backend) -> Any:
        if not hasattr(choice.module, "cross_entropy_forward"):
            raise UnsupportedInput(registry.OWN_AUTOGRAD)
        if reduction not in choice.reductions:
            raise UnsupportedInput(f"knows the reductions {', '.join(choice.reductions)}, got {reduction!r}")
        return on_device_of(input, call, choice.module)

    return registry.first_that_can("cross_entropy", input.device, backend, kernels, compiled=True)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    input, target, weight, _, _, *options, dim, stats, backend = inputs
    _, lse, denominator, z_loss, prediction, correct = output
    ctx.save_for_backward(input, target, weight, lse, denominator)
    ctx.rest = (*options, dim, backend)
    ctx.mark_non_differentiable(lse, denominator, z_loss, prediction, correct)


def _compiled_backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    input, target, weight, lse, denominator = ctx.saved_tensors
    grad = _backward_op(grad_loss, input, target, weight, lse, denominator, *ctx.rest)
    return (grad, *(None,) * 13)


_forward_op.register_autograd(_compiled_backward, setup_context=_save_for_backward)
