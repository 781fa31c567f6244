"""Kernels that are compiled once per dtype and schedule, and launched without Triton's own look at every argument.

``kernel[grid](...)`` inspects each argument of each call to find the binary that was specialised on it; that takes
longer than the launch. Kernels made by ``kernel`` here are specialised on nothing but dtypes and constants, which the
caller knows, and say in their code what is aligned; so a dictionary finds the binary. As a side effect no binary
depends on a number of rows or on an address, and an argument that happens to be 1 stays an ordinary integer. Numbers
whose size or type the caller does not choose (strides, options) have their type in the kernel's signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
import triton
from loss_core.backend import UnsupportedInput
from torch import Tensor
from triton.runtime import driver

_WARP = 64 if torch.version.hip else 32

# Called by a profiler around each launch.
_hooks = triton.knobs.runtime


class _Binary(NamedTuple):
    """A compiled kernel, and what its launcher takes beside the kernel's arguments."""

    compiled: Any
    launch: Callable[..., None]
    function: Any
    metadata: Any
    stream_of: Callable[[Any], int]
    device: int


class Kernel:
    """A Triton kernel and its compiled binaries.

    Called as ``kernel(programs, key, arguments, constants, threads)``: on a grid of `programs` of so many threads each
    (at most 1024), with the positional `arguments` and then `constants`, the values of its constexpr parameters. `key`
    has to tell apart what makes another binary beside the constants: the device's index first, then the dtypes of
    tensors and which of them are None.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters.values()
        # Annotations are strings where a module defers them.
        variable = [p.name for p in parameters if "constexpr" not in str(p.annotation)]
        self.jit = triton.jit(function, do_not_specialize=variable)
        self._binaries: dict[Hashable, _Binary] = {}
        self.__doc__ = function.__doc__

    def __call__(
        self,
        programs: int,
        key: tuple[Any, ...],
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        threads: int,
    ) -> None:
        binary = self._binaries.get((key, constants, threads))
        if binary is None:
            self._compile(programs, key, arguments, constants, threads)
            return
        compiled, launch, function, metadata, stream_of, device = binary
        if _hooks.launch_enter_hook.calls or _hooks.launch_exit_hook.calls:
            compiled[programs, 1, 1](*arguments, *constants)
            return
        # What compiled[grid](...) does, the same from Triton 3.5 to 3.9, without the hooks: half the time.
        launch(programs, 1, 1, stream_of(device), function, metadata, None, None, None, *arguments, *constants)

    def _compile(
        self,
        programs: int,
        key: tuple[Any, ...],
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        threads: int,
    ) -> None:
        """Compile, launch, and keep the binary."""
        compiled = self.jit[programs,](*arguments, *constants, num_warps=max(1, threads // _WARP))
        # The interpreter has no binary to keep.
        if compiled is not None:
            self._binaries[key, constants, threads] = _Binary(
                compiled, compiled.run, compiled.function, compiled.packed_metadata,
                driver.active.get_current_stream, key[0],
            )  # fmt: skip


def kernel(function: Callable[..., Any]) -> Kernel:
    """Decorator for a kernel that ``Kernel`` launches."""
    return Kernel(function)


def refuse_float64(*tensors: Tensor) -> None:
    """The kernels compute in float32."""
    for tensor in tensors:
        if tensor.dtype == torch.float64:
            raise UnsupportedInput("the Triton kernels take float16, bfloat16 and float32, got float64")
