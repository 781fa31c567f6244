"""Softmax and log-softmax along one dimension.

The way of a call: ``softmax`` -> ``_run`` (choice of the backend) -> ``_Softmax`` (autograd; skipped where no gradient
is wanted) -> the backend's ``softmax_forward``, or ``softmax_columns_forward`` where that spares a transposed copy.
Under ``torch.compile`` the middle is one opaque op.

The usual call, along the last dimension of rows, goes a shorter way: ``_run`` -> ``_usual`` (all that does not depend
on values, looked up) -> ``_UsualSoftmax``, where a gradient is wanted -> the functions that the backend prepared.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from loss_core import registry
from loss_core.backend import UnsupportedInput
from loss_core.canonical import (
    class_dim,
    contiguous_strides,
    from_rows,
    is_current,
    on_device_of,
    row_stride,
    several_devices,
    to_rows,
)
from loss_core.columns import from_columns, outer_dims, to_columns
from loss_core.derivative import first_derivative_only, refuse_tangent
from loss_core.dtypes import FLOATING, kind, names
from loss_core.memory import allocator
from loss_core.registry import Backend
from loss_core.usual import apply_of_usual, prepare


def softmax(input: Tensor, dim: int = -1, *, dtype: torch.dtype | None = None, backend: str | None = None) -> Tensor:
    r"""Softmax along `dim`: :math:`y_c = \exp(x_c - \mathrm{lse}(x))`, as ``torch.nn.functional.softmax``.

    All arithmetic is in float32 (float64 for float64), the result is rounded once. A row of only -inf, or with +inf or
    NaN, is NaN throughout. Under autocast a half-precision input gives float32, as in torch.

    Args:
        input: floating point, any shape and strides.
        dim: the dimension that sums to one.
        dtype: dtype of the result; None for the input's. Unlike torch, which casts the input first, the arithmetic
            does not suffer from a narrow one.
        backend: name of the backend, which then runs or raises; None chooses one that can.

    Returns:
        A tensor of input's shape.

    Raises:
        TypeError: input or dtype is not floating point.
        IndexError: dim is out of range.
        BackendUnavailable: the backend named is not installed or cannot run on this device.
        UnsupportedInput: the backend named does not do this case.

    Second derivatives raise a RuntimeError when they are computed.

    Example:
        >>> import torch, loss_core
        >>> loss_core.softmax(torch.tensor([0.0, float("-inf"), 0.0]))
        tensor([0.5000, 0.0000, 0.5000])
    """
    return _run("softmax", input, dim, dtype, backend)


def log_softmax(
    input: Tensor, dim: int = -1, *, dtype: torch.dtype | None = None, backend: str | None = None
) -> Tensor:
    r"""Log-softmax along `dim`: :math:`y_c = x_c - \mathrm{lse}(x)`, as ``torch.nn.functional.log_softmax``.

    Arguments, result, precision and errors are those of ``softmax``.

    Example:
        >>> import torch, loss_core
        >>> loss_core.log_softmax(torch.zeros(2, 2), dim=0)
        tensor([[-0.6931, -0.6931],
                [-0.6931, -0.6931]])
    """
    return _run("log_softmax", input, dim, dtype, backend)


def _run(op: str, input: Tensor, dim: int, dtype: torch.dtype | None, backend: str | None) -> Tensor:
    if (
        type(input) is Tensor
        and dtype is None
        and type(dim) is int
        and not torch.is_autocast_enabled(input.device.type)
        and not torch.compiler.is_dynamo_compiling()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and not input.is_neg()
    ):
        usual = _usual(
            op, input.dtype, input.shape, input.stride(), input.data_ptr() % 16, input.device, dim,
            backend or registry.chosen(), registry.searches,
        )  # fmt: skip
        if usual is not None and (usual.one_device or is_current(input.device)):
            if input.requires_grad and torch.is_grad_enabled():
                return _apply_usual(input, usual)
            output = usual.new(usual.shape, usual.contiguous, usual.dtype)
            usual.forward(input, output)
            return output
    if not isinstance(input, Tensor) or input.dtype not in FLOATING:
        raise TypeError(f"input must be a tensor of {names(FLOATING)}, got {kind(input)}")
    if dtype is None:
        dtype = _default_dtype(input)
    elif dtype not in FLOATING:
        raise TypeError(f"dtype must be one of {names(FLOATING)}, got {dtype}")
    dim = class_dim(input.shape, dim)
    if torch.compiler.is_compiling():
        return _forward_op(input, op, dim, dtype, backend)
    return _first_that_can(op, input, dim, dtype, backend)


def _default_dtype(input: Tensor) -> torch.dtype:
    half = input.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if half and torch.is_autocast_enabled(input.device.type) else input.dtype


class _Usual(NamedTuple):
    """The usual call, prepared by a backend.

    Attributes:
        forward, backward: of ``PreparedSoftmax``.
        new: what allocates the result and the gradient.
        shape, contiguous, dtype: theirs; the second their strides.
        one_device: whether there is but one, which then is current.
        op, module: of the backend.
    """

    forward: Any
    backward: Any
    new: Any
    shape: tuple[int, ...]
    contiguous: tuple[int, ...]
    dtype: torch.dtype
    one_device: bool
    op: str
    module: Any


@lru_cache(1024)
def _usual(
    op: str,
    dtype: torch.dtype,
    shape: torch.Size,
    strides: tuple[int, ...],
    offset: int,
    device: torch.device,
    dim: int,
    name: str | None,
    searches: int,
) -> _Usual | None:
    """The call if it is one and the backend prepares it. `searches` only tells apart what is kept."""
    stride = row_stride(shape, strides) if class_dim(shape, dim) == len(shape) - 1 else None
    if stride is None or dtype not in FLOATING or not prod(shape):
        return None
    found = prepare(op, device, name, dtype, prod(shape[:-1]), shape[-1], stride, offset)
    if found is None:
        return None
    module, prepared = found
    contiguous = contiguous_strides(shape)
    return _Usual(
        prepared.forward,
        prepared.backward,
        allocator(device),
        tuple(shape),
        contiguous,
        dtype,
        not several_devices(),
        op,
        module,
    )


class _UsualSoftmax(torch.autograd.Function):
    """``_Softmax`` for the usual call."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, usual: _Usual) -> Tensor:  # type: ignore[override]
        output = usual.new(usual.shape, usual.contiguous, usual.dtype)
        usual.forward(input, output)
        ctx.save_for_backward(output)
        ctx.usual = usual
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (output,) = ctx.saved_tensors
        grad_output = grad_output.resolve_neg()
        usual = ctx.usual
        contiguous = usual.contiguous
        if (
            grad_output.stride() == contiguous == output.stride()
            and not (grad_output.data_ptr() | output.data_ptr()) % 16
        ):  # fmt: skip
            grad = usual.new(usual.shape, contiguous, usual.dtype)
            usual.backward(grad_output, output, grad)
        else:
            with torch.no_grad():
                grad = _launch(
                    usual.op, "backward", (grad_output, output), output.dim() - 1, usual.dtype, usual.module, True
                )
        if torch.is_grad_enabled():
            grad = first_derivative_only(grad, usual.op, grad_output, output)
        return grad, None


_apply_usual = apply_of_usual(_UsualSoftmax)


def _first_that_can(
    op: str, input: Tensor, dim: int, dtype: torch.dtype, backend: str | None, columns: bool = True
) -> Tensor:
    def run(choice: Backend) -> Tensor:
        if hasattr(choice.module, f"{op}_forward"):
            refuse_tangent(input, choice.name)
            return _kernels(op, input, dim, dtype, choice.module, columns)
        # Widened before, not after: its result is rounded to the dtype that it was given.
        widened = to_rows(input, dim).to(torch.promote_types(input.dtype, dtype))
        rows = on_device_of(input, getattr(choice.module, op), widened)
        return from_rows(rows.to(dtype), input.shape, dim)

    return registry.first_that_can(op, input.device, backend, run)


def _kernels(op: str, input: Tensor, dim: int, dtype: torch.dtype, module: Any, columns: bool) -> Tensor:
    if torch.is_grad_enabled() and input.requires_grad:
        return _Softmax.apply(input, op, dim, dtype, module)
    return _launch(op, "forward", (input,), dim, dtype, module, columns)


def _launch(
    op: str, direction: str, inputs: tuple[Tensor, ...], dim: int, dtype: torch.dtype, module: Any, columns: bool
) -> Tensor:
    """A new tensor of `dtype`, filled by the kernel of `op` and `direction`; as columns if `columns` and possible."""
    like = inputs[-1]
    by_columns = getattr(module, f"{op}_columns_{direction}", None) if columns else None
    outer = outer_dims(like, dim) if by_columns else None
    if by_columns and outer is not None:
        seen = [to_columns(tensor, dim, outer) for tensor in inputs]
        result = torch.empty(seen[-1].shape, dtype=dtype, device=like.device)
        try:
            on_device_of(like, by_columns, *seen, result)
            return from_columns(result, like.shape, dim, outer)
        except UnsupportedInput:
            pass  # As rows, perhaps.
    seen = [to_rows(tensor, dim) for tensor in inputs]
    result = torch.empty(seen[-1].shape, dtype=dtype, device=like.device)
    on_device_of(like, getattr(module, f"{op}_{direction}"), *seen, result)
    return from_rows(result, like.shape, dim)


class _Softmax(torch.autograd.Function):
    """The kernels of one backend under autograd; the result is what the backward needs, so only it is saved."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, op: str, dim: int, dtype: torch.dtype, module: Any) -> Tensor:  # type: ignore[override]
        output = _launch(op, "forward", (input,), dim, dtype, module, True)
        ctx.save_for_backward(output)
        ctx.rest = op, input.dtype, dim, module
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (output,) = ctx.saved_tensors
        op, dtype, dim, module = ctx.rest
        if not torch.is_grad_enabled():
            grad = _launch(op, "backward", (grad_output, output), dim, dtype, module, True)
            return grad, None, None, None, None
        with torch.no_grad():
            grad = _launch(op, "backward", (grad_output, output), dim, dtype, module, True)
        return first_derivative_only(grad, op, grad_output, output), None, None, None, None


# torch.compile: opaque ops, so that neither the choice of the backend nor its kernels are traced. How their results lie
# in memory has to be known before the backend is, so they are done as rows.


@torch.library.custom_op("loss_core::softmax", mutates_args=())
def _forward_op(input: Tensor, op: str, dim: int, dtype: torch.dtype, backend: str | None) -> Tensor:
    return _first_that_can(op, input.detach(), dim, dtype, backend, columns=False)


@_forward_op.register_fake
def _(input, op, dim, dtype, backend):  # type: ignore[no-untyped-def]
    return _empty_rows(input, dim, dtype)


@torch.library.custom_op("loss_core::softmax_backward", mutates_args=())
def _backward_op(
    grad_output: Tensor, output: Tensor, op: str, dim: int, dtype: torch.dtype, backend: str | None
) -> Tensor:
    def run(choice: Backend) -> Tensor:
        if not hasattr(choice.module, f"{op}_backward"):
            raise UnsupportedInput(registry.OWN_AUTOGRAD)
        return _launch(op, "backward", (grad_output, output), dim, dtype, choice.module, False)

    return registry.first_that_can(op, output.device, backend, run, compiled=True)


@_backward_op.register_fake
def _(grad_output, output, op, dim, dtype, backend):  # type: ignore[no-untyped-def]
    return _empty_rows(output, dim, dtype)


def _empty_rows(like: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    shape = like.shape
    if not shape:
        return like.new_empty((), dtype=dtype)
    moved = (*shape[:dim], *shape[dim + 1 :], shape[dim])
    return like.new_empty(moved, dtype=dtype).movedim(-1, dim)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, op, dim, _, backend = inputs
    ctx.save_for_backward(output)
    ctx.rest = op, dim, input.dtype, backend


def _compiled_backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    (output,) = ctx.saved_tensors
    return _backward_op(grad_output, output, *ctx.rest), None, None, None, None


_forward_op.register_autograd(_compiled_backward, setup_context=_save_for_backward)
