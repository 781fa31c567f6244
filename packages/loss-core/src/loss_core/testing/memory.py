"""Memory that shows when it was never written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

_MAKERS = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty"))


@contextlib.contextmanager
def nan_filled_empty() -> Iterator[None]:
    """Fill what ``torch.empty``, ``empty_like``, ``empty_strided`` and ``Tensor.new_empty`` return, inside a block.

    Floating-point memory is filled with NaN, integers with their largest value. Fresh memory is often zero or left
    over from an equal call, which hides an element that a kernel does not write.
    """
    with contextlib.ExitStack() as stack:
        for owner, name in _MAKERS:
            stack.enter_context(mock.patch.object(owner, name, _filling(getattr(owner, name))))
        yield


def _filling(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def make_filled(*args: Any, **kwargs: Any) -> Tensor:
        tensor = make(*args, **kwargs)
        if tensor.device.type == "meta" or not tensor.numel():
            return tensor
        with torch.no_grad():
            if tensor.is_floating_point():
                return tensor.fill_(torch.nan)
            return tensor if tensor.is_complex() else tensor.fill_(_largest(tensor.dtype))

    return make_filled


def _largest(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max
