"""Dtypes that the ops take, and how they are called in messages."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGRAL = (torch.int32, torch.int64, torch.uint8)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic, and of the loss, for logits of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    """`dtypes` as a message lists them: ``"float16, float32"``."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def kind(value: object) -> str:
    """What `value` is, for "expected ..., got ...": a tensor's dtype, anything else's type."""
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
