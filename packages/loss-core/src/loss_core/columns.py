"""The other canonical form, outer x classes x inner, of a tensor whose classes do not lie side by side."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def outer_dims(input: Tensor, dim: int) -> int | None:
    """How many of the dimensions other than `dim` are the outer ones, in order; the rest are the inner ones.

    None where the tensor is no view of (outer, classes, inner) with stride 1 along inner and more than one of them, or
    where its classes have stride 1 and it is better seen as rows.
    """
    if input.dim() < 2 or input.shape[dim] == 1 or input.stride(dim) == 1 or not input.numel():
        return None
    shape = (*input.shape[:dim], *input.shape[dim + 1 :])
    strides = (*input.stride()[:dim], *input.stride()[dim + 1 :])
    outer, inner = len(shape), 1
    while outer and (shape[outer - 1] == 1 or strides[outer - 1] == inner):
        outer -= 1
        inner *= shape[outer]
    if inner == 1:
        return None
    expected = None
    for size, stride in zip(reversed(shape[:outer]), reversed(strides[:outer]), strict=True):
        if size == 1:
            continue
        if expected is not None and stride != expected:
            return None
        expected = stride * size
    return outer


def to_columns(input: Tensor, dim: int, outer: int) -> Tensor:
    """`input` as (outer, classes, inner) with stride 1 along inner: a view where its strides permit, else a copy."""
    moved = input.resolve_neg().movedim(dim, outer)
    shape = moved.shape
    columns = moved.reshape(math.prod(shape[:outer]), shape[outer], math.prod(shape[outer + 1 :]))
    return columns if columns.stride(2) == 1 else columns.contiguous()


def from_columns(columns: Tensor, shape: torch.Size, dim: int, outer: int) -> Tensor:
    """A view of (outer, classes, inner) in `shape`, whose dimension `dim` holds the classes."""
    rest = (*shape[:dim], *shape[dim + 1 :])
    return columns.view(*rest[:outer], shape[dim], *rest[outer:]).movedim(outer, dim)
