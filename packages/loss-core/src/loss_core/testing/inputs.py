"""The tensors of a case: drawn on the CPU from a seed of its own, rounded to its dtype, laid out, then moved."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from loss_core.testing.case import Case


@dataclass
class Inputs:
    """What a case passes on.

    Attributes:
        logits: the tensor under test, a leaf that requires grad if the case asks for one; any shape and strides.
        dim: its class dimension.
        target: in logits' shape without `dim` (in logits' shape for probabilities). For causal_lm_loss the labels.
        weight: (V,) or None.
        byte_lengths: like the target, or None.
        num_items: what the case's num_items says.
    """

    logits: Tensor
    dim: int
    target: Tensor
    weight: Tensor | None = None
    byte_lengths: Tensor | None = None
    num_items: float | Tensor | None = None

    def rows(self, tensor: Tensor) -> Tensor:
        """`tensor`, in logits' shape, as (rows, classes)."""
        moved = tensor.movedim(self.dim, -1)
        return moved.reshape(moved.shape[:-1].numel(), moved.shape[-1])


def make_inputs(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """The tensors of `case` on `device`, bit for bit the same on every device."""
    # The layout is left out: the same numbers in another one must give the same result.
    seed = zlib.crc32(str(replace(case, op="", layout="contiguous")).encode())
    generator = torch.Generator().manual_seed(seed)
    target, ignored = _target(case, generator)
    values = VALUES[case.values](case, target, generator).to(case.dtype)
    if case.op == "causal_lm_loss" and not case.shift_labels:
        # The label at t + 1 is position t's; the last position has none.
        of_position = ignored.view(2, -1)[:, 1:]
        ignored = torch.nn.functional.pad(of_position, (0, 1), value=True).reshape(-1)
    # NaN, as padding often is: an ignored row must not let its logits through.
    if case.op in ("cross_entropy", "causal_lm_loss"):
        values[ignored] = torch.nan
    laid, dim = LAYOUTS[case.layout](values.to(device))
    at = dim % laid.dim()
    leading = laid.shape[:at] + laid.shape[at + 1 :]
    if case.layout == "expanded":
        # All rows are row 0, whose logits NaN would make all of them useless.
        laid = torch.nan_to_num(laid[:1], nan=0.5).expand_as(laid)
    inputs = Inputs(laid.detach().requires_grad_(case.grad), dim, _target_like(case, target, leading, laid, generator))
    if case.weight:
        weight = 0.1 + torch.rand(case.classes, generator=generator)
        # A class without weight is legal.
        weight[case.classes // 2] = 0.0 if case.classes > 2 else 0.3
        inputs.weight = weight.to(device)
    if case.reduction == "byte_mean":
        lengths = torch.randint(1, 9, leading, generator=generator, dtype=torch.int32)
        inputs.byte_lengths = lengths.to(device)
    if case.num_items:
        # Not the number of rows, or a backend that ignores it would pass.
        items = 2.0 * case.rows + 3
        inputs.num_items = items if case.num_items == "float" else torch.tensor(items, device=device)
    return inputs


def upstream(case: Case, result: Tensor) -> Tensor:
    """The gradient that reaches `result` from above."""
    if case.upstream == "one":
        return torch.ones_like(result)
    if case.upstream == "nan":
        return torch.full_like(result, torch.nan)
    generator = torch.Generator().manual_seed(zlib.crc32(b"upstream" + str(result.shape).encode()))
    if case.upstream == "expanded":
        scalar = torch.randn((), generator=generator) + 2
        return scalar.to(result.device, result.dtype).expand(result.shape)
    drawn = torch.randn(result.shape, generator=generator).to(result.device, result.dtype)
    return drawn * 1024 if case.upstream == "large" else drawn


def _target(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(rows,) int64 targets with both ends of the vocabulary among them, and which rows are ignored."""
    rows, classes = case.rows, min(case.classes, 256) if case.target == "uint8" else case.classes
    target = torch.randint(classes, (rows,), generator=generator)
    if rows:
        target[0] = classes - 1
        target[-1] = 0 if rows > 1 else classes - 1
    ignored = torch.zeros(rows, dtype=torch.bool)
    # uint8 has no room for a negative ignore_index.
    if case.target == "uint8" and case.ignore_index < 0:
        return target, ignored
    if case.ignored == "all":
        ignored[:] = True
    elif case.ignored == "some":
        # Never row 1, in which the special values stand.
        ignored[2::3] = True
        if rows == 2:
            ignored[0] = True
    if 0 <= case.ignore_index < classes:
        ignored |= target == case.ignore_index
    return torch.where(ignored, case.ignore_index, target), ignored


def _target_like(case: Case, target: Tensor, leading: torch.Size, logits: Tensor, generator: torch.Generator) -> Tensor:
    if case.target == "probabilities":
        mass = torch.rand(logits.shape, generator=generator)
        return mass.to(logits.device, case.dtype)
    if case.target == "strided":
        return target.repeat_interleave(2).to(logits.device)[::2].view(leading)
    return target.to(getattr(torch, case.target)).view(leading).to(logits.device)


# Values: (rows, classes) float32


def _normal(case: Case, target: Tensor, generator: torch.Generator) -> Tensor:
    return 2 * torch.randn(case.rows, case.classes, generator=generator)


def _at_target(values: Tensor, target: Tensor, entry: Callable[[Tensor], Tensor] | float) -> Tensor:
    """`values` with another entry at each row's target (at class 0 where it is no class)."""
    index = torch.where((target >= 0) & (target < values.shape[1]), target, 0).unsqueeze(1)
    new = entry(values.gather(1, index)) if callable(entry) else torch.full(index.shape, entry)
    return values.scatter(1, index, new)


def _peaked(case: Case, target: Tensor, generator: torch.Generator) -> Tensor:
    return _at_target(_normal(case, target, generator), target, lambda x: x + 60)


def _masked(case: Case, target: Tensor, generator: torch.Generator) -> Tensor:
    values = _normal(case, target, generator)
    masked = values.masked_fill(torch.rand(values.shape, generator=generator) < 0.3, -torch.inf)
    return _at_target(masked, target, 0.5)


def _blocks(case: Case, target: Tensor, generator: torch.Generator) -> Tensor:
    """Only the target and one class in the middle are left."""
    values = torch.full((case.rows, case.classes), -torch.inf)
    values[:, case.classes // 2] = 1.0
    return _at_target(values, target, 0.5)


def _target_masked(case: Case, target: Tensor, generator: torch.Generator) -> Tensor:
    return _at_target(_normal(case, target, generator), target, -torch.inf)


def _special_row(entry: float, column: slice) -> Callable[[Case, Tensor, torch.Generator], Tensor]:
    def values(case: Case, target: Tensor, generator: torch.Generator) -> Tensor:
        values = _normal(case, target, generator)
        values[1, column] = entry
        return values

    return values


VALUES: dict[str, Callable[[Case, Tensor, torch.Generator], Tensor]] = {
    "normal": _normal,
    "equal": lambda case, target, generator: torch.zeros(case.rows, case.classes),
    "ties": lambda case, target, generator: _normal(case, target, generator).round(),
    "high": lambda case, target, generator: _normal(case, target, generator) + 100,
    "low": lambda case, target, generator: _normal(case, target, generator) - 1e4,
    # No digits are left after the point in float16, where this is -65504.
    "far_low": lambda case, target, generator: (_normal(case, target, generator) - 1e7).clamp(
        min=torch.finfo(case.dtype).min
    ),
    "peaked": _peaked,
    "spread": lambda case, target, generator: 2e3 * _normal(case, target, generator),
    "masked": _masked,
    "blocks": _blocks,
    "target_masked": _target_masked,
    "all_masked": _special_row(-torch.inf, slice(None)),
    "plus_inf": _special_row(torch.inf, slice(3, 4)),
    "nan": _special_row(torch.nan, slice(-1, None)),
}


# Layouts: contiguous (rows, classes) to (tensor, class dimension). What lies between the elements is NaN.


def _row_strided(x: Tensor) -> tuple[Tensor, int]:
    rows, classes = x.shape
    return x.new_full((rows, 2 * classes + 3), torch.nan)[:, 1 : 1 + classes].copy_(x), -1


def _class_strided(x: Tensor) -> tuple[Tensor, int]:
    rows, classes = x.shape
    return x.new_full((rows, 2 * classes), torch.nan)[:, ::2].copy_(x), -1


def _unaligned(x: Tensor) -> tuple[Tensor, int]:
    return x.new_full((x.numel() + 1,), torch.nan)[1:].view(x.shape).copy_(x), -1


def _in_two(x: Tensor) -> Tensor:
    return x.view(2, x.shape[0] // 2, x.shape[1])


def _sequence_first(x: Tensor) -> tuple[Tensor, int]:
    return _in_two(x).transpose(0, 1).contiguous().transpose(0, 1), -1


def _sliced_tokens(x: Tensor) -> tuple[Tensor, int]:
    x = _in_two(x)
    return x.new_full((2, x.shape[1] + 1, x.shape[2]), torch.nan)[:, :-1].copy_(x), -1


def _torch_layout(x: Tensor) -> tuple[Tensor, int]:
    return _in_two(x).transpose(1, 2).contiguous(), 1


def _torch_layout_sliced(x: Tensor) -> tuple[Tensor, int]:
    x = _in_two(x).transpose(1, 2)
    return x.new_full((2, x.shape[1], x.shape[2] + 2), torch.nan)[:, :, 1:-1].copy_(x), 1


def _image(x: Tensor) -> tuple[Tensor, int]:
    return x.view(1, 2, x.shape[0] // 2, x.shape[1]).permute(0, 3, 1, 2).contiguous(), 1


LAYOUTS: dict[str, Callable[[Tensor], tuple[Tensor, Any]]] = {
    "contiguous": lambda x: (x, -1),
    "row_strided": _row_strided,
    "class_strided": _class_strided,
    "expanded": lambda x: (x[:1].expand_as(x), -1),
    "transposed": lambda x: (x.t().contiguous().t(), -1),
    "unaligned": _unaligned,
    "three_dims": lambda x: (_in_two(x), -1),
    "sequence_first": _sequence_first,
    "sliced_tokens": _sliced_tokens,
    "torch_layout": _torch_layout,
    "torch_layout_sliced": _torch_layout_sliced,
    "image": _image,
    "one_dim": lambda x: (x[0], -1),
    "dim_0": lambda x: (x.t().contiguous(), 0),
    "dim_0_of_3": lambda x: (_in_two(x).permute(2, 0, 1).contiguous(), -3),
}
