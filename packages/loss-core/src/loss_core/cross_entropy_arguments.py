"""What the arguments of cross-entropy have to be, and what the rest of it is told of them."""

from __future__ import annotations

from functools import lru_cache
from math import inf
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from loss_core.backend import REDUCTIONS, CrossEntropyOptions
from loss_core.canonical import class_dim, sent_to
from loss_core.dtypes import FLOATING, INTEGRAL, accumulation_dtype, kind, names


class Facts(NamedTuple):
    """What dtypes, shapes and options say before any tensor is looked at."""

    options: CrossEntropyOptions
    dim: int  # the class dimension, from 0 on
    classes: int
    shape: torch.Size  # of the target
    probabilities: bool
    looked_at: bool  # whether targets out of range raise, rather than give NaN
    in_rows: bool  # whether the input has the canonical form, but for its strides


def no_tensor(input: object, target: object) -> TypeError:
    """The error for an input or a target that is no tensor."""
    if not isinstance(input, Tensor):
        return TypeError(f"input must be a tensor of {names(FLOATING)}, got {kind(input)}")
    return TypeError(f"target must be a tensor, got {kind(target)}")


def facts_of(
    input_dtype: torch.dtype,
    shape: torch.Size,
    device: torch.device,
    target_dtype: torch.dtype,
    target_shape: torch.Size,
    target_device: torch.device,
    dim: int,
    *of_options: Any,
) -> Facts:
    """Raises where dtypes, shapes, devices or options are not what they may be."""
    options = _options(*of_options)
    if input_dtype not in FLOATING:
        raise TypeError(f"input must be a tensor of {names(FLOATING)}, got {input_dtype}")
    if len(shape) == 0:
        raise ValueError("input must have a class dimension, got a scalar")
    dim = class_dim(shape, dim)
    classes = shape[dim]
    if classes == 0:
        raise ValueError(f"input must have at least one class, got shape {tuple(shape)} with classes in dim {dim}")
    probabilities = target_dtype.is_floating_point
    if not probabilities and target_dtype not in INTEGRAL:
        raise TypeError(
            f"target must hold class indices ({names(INTEGRAL)}) or floating-point probabilities, got {target_dtype}"
        )
    expected = shape if probabilities else shape[:dim] + shape[dim + 1 :]
    if target_shape != expected:
        raise ValueError(
            f"target must have shape {tuple(expected)} for input of shape {tuple(shape)} with classes in dim {dim}, "
            f"got {tuple(target_shape)}"
        )
    if target_device != device:
        raise ValueError(f"target must be on input's device {device}, got {target_device}")
    if probabilities and options.ignore_index >= 0:
        raise ValueError(f"ignore_index is for class indices; with probabilities leave it, got {options.ignore_index}")
    in_rows = len(shape) == 2 and dim == 1
    return Facts(options, dim, classes, expected, probabilities, device.type == "cpu", in_rows)


facts_met = lru_cache(1024)(facts_of)
"""``facts_of``, looked up where the same were met before."""


def _options(
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
) -> CrossEntropyOptions:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")
    for name, value in (
        ("ignore_index", ignore_index), ("label_smoothing", label_smoothing), ("z_loss", z_loss),
        ("softcap", 1.0 if softcap is None else softcap), ("logit_scale", logit_scale),
    ):  # fmt: skip
        if not isinstance(value, Integral if name == "ignore_index" else Real):
            wanted = "an integer" if name == "ignore_index" else "a number"
            raise TypeError(f"{name} must be {wanted}, got {kind(value)}")
        if not -inf < value < inf:
            raise ValueError(f"{name} must be finite, got {value}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if not z_loss >= 0.0:
        raise ValueError(f"z_loss must not be negative, got {z_loss}")
    if softcap is not None and not softcap > 0.0:
        raise ValueError(f"softcap must be positive or None, got {softcap}")
    # Of one type each: 0 and 0.0 are one key where options are looked up.
    return CrossEntropyOptions(
        int(ignore_index), reduction, float(label_smoothing), float(z_loss),
        None if softcap is None else float(softcap), float(logit_scale),
    )  # fmt: skip


def checked_weight(weight: Tensor, input: Tensor, classes: int) -> Tensor:
    """The class weights as a backend gets them."""
    if not isinstance(weight, Tensor) or weight.dtype not in FLOATING:
        raise TypeError(f"weight must be a floating-point tensor, got {kind(weight)}")
    if weight.shape != (classes,):
        raise ValueError(f"weight must have shape ({classes},), one per class, got {tuple(weight.shape)}")
    if weight.device != input.device:
        raise ValueError(f"weight must be on input's device {input.device}, got {weight.device}")
    _without_gradient("weight", weight)
    return weight.detach().to(accumulation_dtype(input.dtype)).contiguous().resolve_neg()


def _without_gradient(name: str, value: Tensor) -> None:
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} gets no gradient and must not require one, got requires_grad=True; detach it")


def checked_byte_lengths(byte_lengths: Tensor | None, input: Tensor, facts: Facts) -> Tensor | None:
    """The byte lengths as a backend gets them; None without."""
    reduction, shape = facts.options.reduction, facts.shape
    if (byte_lengths is not None) != (reduction == "byte_mean"):
        raise ValueError(
            f"byte_lengths go with reduction='byte_mean' and only with it, got reduction={reduction!r} "
            f"{'without' if byte_lengths is None else 'with'} byte_lengths"
        )
    if byte_lengths is None:
        return None
    if facts.probabilities:
        raise ValueError("reduction='byte_mean' needs class indices, got a floating-point target")
    if not isinstance(byte_lengths, Tensor) or not _holds_integers(byte_lengths.dtype):
        raise TypeError(f"byte_lengths must be a tensor of integers, got {kind(byte_lengths)}")
    if byte_lengths.shape != shape:
        raise ValueError(f"byte_lengths must have target's shape {tuple(shape)}, got {tuple(byte_lengths.shape)}")
    if byte_lengths.device != input.device:
        raise ValueError(f"byte_lengths must be on input's device {input.device}, got {byte_lengths.device}")
    if byte_lengths.dtype not in (torch.int32, torch.int64):
        byte_lengths = byte_lengths.to(torch.int64)
    return byte_lengths.reshape(-1).contiguous()


def _holds_integers(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def checked_num_items(num_items: float | Tensor, input: Tensor, reduction: str) -> float | Tensor:
    """The denominator as a backend gets it."""
    if reduction != "mean":
        raise ValueError(f"num_items is the denominator of reduction='mean', got reduction={reduction!r}")
    if not isinstance(num_items, Tensor):
        if not isinstance(num_items, Real):
            raise TypeError(f"num_items must be a number or a tensor of one element, got {kind(num_items)}")
        return float(num_items)
    if num_items.numel() != 1:
        raise ValueError(f"num_items must have one element, got shape {tuple(num_items.shape)}")
    _without_gradient("num_items", num_items)
    num_items = num_items.detach().reshape(1).resolve_neg()
    if num_items.device.type == "cpu" and not torch.compiler.is_compiling():
        return float(num_items.item())
    return sent_to(input.device, num_items, accumulation_dtype(input.dtype))


def check_range(target: Tensor, classes: int, ignore_index: int, shape: torch.Size) -> None:
    """Raise the IndexError for a target out of range; waits for the device."""
    if target.device.type == "meta":
        return
    # Compared with a uint8, 300 classes would become 44.
    target = target.long()
    bad = ((target < 0) | (target >= classes)) & ~is_ignored(target, ignore_index)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise IndexError(
            f"target {int(target[row])} in row {_place(row, shape)} is outside [0, {classes}) and is not ignore_index "
            f"({ignore_index})"
        )


def _place(row: int, shape: torch.Size) -> int | tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(row), shape)) if len(shape) > 1 else row


# No token is longer; and so many rows as fit anywhere have a sum that fits into 48 bits, where kernels may count it.
MOST_BYTES = 2**24


def bounded_byte_lengths(
    byte_lengths: Tensor, target: Tensor, ignore_index: int, shape: torch.Size, *, looked_at: bool
) -> Tensor:
    """The byte lengths, in [0, MOST_BYTES].

    Others raise a ValueError, unless their row is ignored; if they are not looked at, which would mean to wait for the
    device, they are cut off: kernels count on it.
    """
    if looked_at and byte_lengths.device.type != "meta":
        bad = ((byte_lengths < 0) | (byte_lengths > MOST_BYTES)) & ~is_ignored(target, ignore_index)
        if bad.any():
            row = int(bad.nonzero()[0])
            raise ValueError(
                f"byte_lengths must be in [0, {MOST_BYTES}], got {int(byte_lengths[row])} in row {_place(row, shape)}"
            )
    return byte_lengths.clamp(0, MOST_BYTES)


def is_ignored(target: Tensor, ignore_index: int) -> Tensor:
    """Of each target, whether it is ignore_index."""
    # Compared with a uint8, -100 would become 156; with an int32, 2**32 would become 0.
    return target.long() == ignore_index
