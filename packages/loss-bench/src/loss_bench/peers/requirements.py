"""What the adapters ask of the machine and of the call."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from loss_core.backend import CrossEntropyOptions, UnsupportedInput
from packaging.version import Version
from torch import Tensor

_DEFAULTS = CrossEntropyOptions()

LibraryCrossEntropy = Callable[[Tensor, Tensor, "Tensor | None", CrossEntropyOptions], Tensor]
BackendCrossEntropy = Callable[
    [Tensor, Tensor, "Tensor | None", "Tensor | None", "float | Tensor | None", CrossEntropyOptions], Tensor
]
LibraryLinearCrossEntropy = Callable[
    [Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None", CrossEntropyOptions], Tensor
]
BackendLinearCrossEntropy = Callable[
    [
        Tensor,
        Tensor,
        Tensor,
        "Tensor | None",
        "Tensor | None",
        "Tensor | None",
        "float | Tensor | None",
        CrossEntropyOptions,
    ],
    Tensor,
]


def cross_entropy_with(
    *known: str, reductions: Collection[str] = ("none", "mean", "sum")
) -> Callable[[LibraryCrossEntropy], BackendCrossEntropy]:
    """Make a backend's ``cross_entropy`` of a function that calls a library and has the options `known`.

    The function is called with (logits, target, weight, options). A call with an option that is neither `known` nor
    left at its default raises ``UnsupportedInput``, which names all of those.

    Args:
        known: fields of ``CrossEntropyOptions`` that the library has, and ``"weight"`` if it has class weights.
        reductions: those that it has.
    """

    def decorate(function: LibraryCrossEntropy) -> BackendCrossEntropy:
        def cross_entropy(
            logits: Tensor,
            target: Tensor,
            weight: Tensor | None,
            byte_lengths: Tensor | None,
            num_items: float | Tensor | None,
            options: CrossEntropyOptions,
        ) -> Tensor:
            # The benchmark times this too: the usual call is through after one comparison.
            if options != _DEFAULTS or weight is not None or byte_lengths is not None or num_items is not None:
                tensors = {"weight": weight, "byte_lengths": byte_lengths, "num_items": num_items}
                refuse_options(options, tensors, known=known, reductions=reductions)
            return function(logits, target, weight, options)

        cross_entropy.__doc__ = function.__doc__
        return cross_entropy

    return decorate


def linear_cross_entropy_with(
    *known: str, reductions: Collection[str] = ("none", "mean", "sum")
) -> Callable[[LibraryLinearCrossEntropy], BackendLinearCrossEntropy]:
    """Make a backend's ``linear_cross_entropy`` of a function that calls a library and has the options `known`.

    The function is called with (input, linear_weight, target, linear_bias, weight, options); ``"linear_bias"`` is an
    option too. Arguments and refusals are those of ``cross_entropy_with``.
    """

    def decorate(function: LibraryLinearCrossEntropy) -> BackendLinearCrossEntropy:
        def linear_cross_entropy(
            input: Tensor,
            linear_weight: Tensor,
            target: Tensor,
            linear_bias: Tensor | None,
            weight: Tensor | None,
            byte_lengths: Tensor | None,
            num_items: float | Tensor | None,
            options: CrossEntropyOptions,
        ) -> Tensor:
            tensors = {
                "linear_bias": linear_bias,
                "weight": weight,
                "byte_lengths": byte_lengths,
                "num_items": num_items,
            }
            if options != _DEFAULTS or any(tensor is not None for tensor in tensors.values()):
                refuse_options(options, tensors, known=known, reductions=reductions)
            return function(input, linear_weight, target, linear_bias, weight, options)

        linear_cross_entropy.__doc__ = function.__doc__
        return linear_cross_entropy

    return decorate


def refuse_options(
    options: CrossEntropyOptions,
    tensors: Mapping[str, object],
    *,
    known: Collection[str],
    reductions: Collection[str] = ("none", "mean", "sum"),
) -> None:
    """Raise for every option that is given and not `known`.

    Args:
        options: of the call.
        tensors: the other options of the call by name, None where they are not given.
        known: names of those that the library has.
        reductions: those that it has.

    Raises:
        UnsupportedInput: naming all of them.
    """
    given = {name for name, value in options._asdict().items() if value != getattr(_DEFAULTS, name)}
    given |= {name for name, value in tensors.items() if value is not None}
    lacking = sorted(given - set(known) - {"reduction"})
    if options.reduction not in reductions:
        lacking.append(f"reduction {options.reduction!r}")
    if lacking:
        raise UnsupportedInput(f"the library has no {', '.join(lacking)}")


def refuse_dtype(tensor: Tensor, dtypes: Collection[torch.dtype]) -> None:
    """Raise for a dtype that is not among `dtypes`.

    Raises:
        UnsupportedInput: naming it.
    """
    if tensor.dtype not in dtypes:
        raise UnsupportedInput(f"the library has no {str(tensor.dtype).removeprefix('torch.')}")


@functools.cache
def lazily(module: str, attribute: str) -> Any:
    """``module.attribute``, imported on the first call; dots in `attribute` lead on. Later calls cost nothing."""
    found: Any = importlib.import_module(module)
    for name in attribute.split("."):
        found = getattr(found, name)
    return found


def missing_reason(
    distribution: str,
    module: str,
    extra: str,
    *,
    at_least: str,
    device: torch.device,
    capability: tuple[int, int] = (0, 0),
) -> str | None:
    """Why a CUDA library cannot be used, or None if it can.

    Args:
        distribution: what has to be installed.
        module: what has to import.
        extra: of loss-bench, that installs it.
        at_least: the oldest version that the adapter was written for.
        device: where it should run.
        capability: the oldest compute capability that it supports.
    """
    if device.type != "cuda":
        return "needs a CUDA device"
    try:
        found = version(distribution)
    except PackageNotFoundError:
        return f"{distribution} is not installed; pip install 'loss-bench[{extra}]'"
    if Version(found) < Version(at_least):
        return f"{distribution} {found} is too old; {at_least} or newer is needed"
    if torch.cuda.get_device_capability(device) < capability:
        return f"needs compute capability {capability[0]}.{capability[1]} or newer"
    try:
        importlib.import_module(module)
    # A library that is broken on this machine may fail in any way while it is imported.
    except Exception as error:
        return f"import of {module} failed: {type(error).__name__}: {error}"
    return None
