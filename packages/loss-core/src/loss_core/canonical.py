"""The canonical form, rows x classes, and the way back; and the device guard around a backend's kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from loss_core.dtypes import kind

T = TypeVar("T")


def class_dim(shape: torch.Size, dim: int, name: str = "input") -> int:
    """`dim` counted from 0; an IndexError in torch's words if `shape` has no such dimension."""
    # Dynamo cannot trace the second question for an int.
    if not (isinstance(dim, int) or hasattr(dim, "__index__")):
        raise TypeError(f"dim must be an integer, got {kind(dim)}")
    dims = max(len(shape), 1)
    if not -dims <= dim < dims:
        raise IndexError(
            f"dim out of range: expected to be in [{-dims}, {dims - 1}] for {name} of shape {tuple(shape)}, got {dim}"
        )
    return dim % dims


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of that shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def row_stride(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """Elements from one row of the last dimension to the next, or None where that is no one number."""
    if not shape or strides[-1] != 1:
        return None
    if len(shape) == 2:
        return strides[0]
    return shape[-1] if strides == contiguous_strides(shape) else None


def to_rows(input: Tensor, dim: int) -> Tensor:
    """`input` as (rows, classes) with stride 1 along classes: a view where its strides permit, else a copy."""
    # What lies in the memory of a negative view has the other sign.
    input = input.resolve_neg()
    if input.dim() != 2 or dim != 1:
        moved = input if dim == input.dim() - 1 or input.dim() == 0 else input.movedim(dim, -1)
        classes = moved.shape[-1] if moved.dim() else 1
        # No -1 here: it has no answer where the tensor is empty.
        input = moved.reshape(moved.numel() // classes if classes else 0, classes)
    if input.stride(1) == 1:
        return input
    if input.shape[1] == 1:
        # One class has no neighbour, so any stride may be called 1.
        return input.as_strided(input.shape, (input.stride(0), 1))
    return input.contiguous()


def from_rows(rows: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """A view of (rows, classes) in `shape`, whose dimension `dim` holds the classes."""
    if len(shape) == 2 and dim == 1:
        return rows
    if dim == len(shape) - 1 or not shape:
        return rows.view(shape)
    return rows.view(*shape[:dim], *shape[dim + 1 :], shape[dim]).movedim(-1, dim)


def sent_to(device: torch.device, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`tensor` on `device`, and in `dtype` if given, without waiting for it where that is safe."""
    # What a CPU is sent without waiting has not arrived yet when it is read.
    return tensor.to(device, dtype, non_blocking=device.type != "cpu")


def may_be_overwritten(rows: Tensor, input: Tensor) -> bool:
    """Whether `rows` is `input`'s own memory and no two of its elements share an address."""
    return share_memory(rows, input) and (rows.shape[0] <= 1 or abs(rows.stride(0)) >= rows.shape[1])


def share_memory(rows: Tensor, input: Tensor) -> bool:
    """Whether `rows`, made from `input`, is a view of it rather than a copy."""
    return rows.untyped_storage().data_ptr() == input.untyped_storage().data_ptr()


def on_device_of(input: Tensor, function: Callable[..., T], *arguments: Any) -> T:
    """`function` of the arguments while `input`'s device is current, and the former one again afterwards."""
    if several_devices():
        device = input.device
        if not is_current(device):
            with torch.accelerator.device_index(device.index):
                return function(*arguments)
    return function(*arguments)


def is_current(device: torch.device) -> bool:
    """Whether `device` is the current one of its type."""
    return device.index is None or device.index == torch.accelerator.current_device_index()


@lru_cache(maxsize=1)
def several_devices() -> bool:
    """Whether there are devices of which one has to be made current."""
    return torch.accelerator.device_count() > 1
