"""What the usual calls of cross_entropy and softmax share: what a backend prepares, and the short way into autograd."""

from __future__ import annotations

from typing import Any

import torch

from loss_core import registry
from loss_core.backend import UnsupportedInput


def prepare(op: str, device: torch.device, name: str | None, *call: Any, **facts: Any) -> tuple[Any, Any] | None:
    """The module of the backend that comes first and what it prepares for such calls, or None if it prepares none."""
    module: Any = registry.candidates(op, device, name)[0].module
    of_backend = getattr(module, f"{op}_prepare", None)
    if of_backend is None:
        return None
    try:
        prepared = of_backend(device, *call, **facts)
    except UnsupportedInput:
        return None
    return None if prepared is None else (module, prepared)


def apply_in_c(function: type[torch.autograd.Function]) -> Any:
    """The ``apply`` of a function for calls without torch.func's transforms.

    Function.apply serves these first, in Python; without one that takes as long as the rest.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def apply_of_usual(function: type[torch.autograd.Function]) -> Any:
    """``apply_in_c``, of a function whose backward autograd is not to look up, in Python, each time."""
    if hasattr(function, "_backward_cls"):
        function._backward_cls.apply = function.backward
    return apply_in_c(function)
