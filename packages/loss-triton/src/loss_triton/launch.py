"""Kernels that are compiled once per dtype and schedule, and launched without Triton's own look at every argument.

``kernel[grid](...)`` inspects each argument of each call to find the binary that was specialised on it; that takes
longer than the launch. Kernels made by ``kernel`` here are specialised on nothing but dtypes and constants, which the
caller knows, and say in their code what is aligned; so the caller keeps a ``Launch`` for each set of them. As a side
effect no binary depends on a number of rows or on an address, and an argument that happens to be 1 stays an ordinary
integer. Numbers whose size or type the caller does not choose (strides, options) have their type in the kernel's
signature.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
from loss_core.backend import UnsupportedInput
from torch import Tensor
from triton.runtime import driver

_WARP = 64 if torch.version.hip else 32

_INTERPRETED = triton.knobs.runtime.interpret

# Called by a profiler around each launch.
_hooks = triton.knobs.runtime

# Versions whose launcher in C is called below as their own Python calls it.
_CALLS_C_ITSELF = triton.__version__.startswith(("3.5.", "3.6."))


class Launch:
    """A kernel with the values of its constants; called with a number of programs and the other arguments.

    The first call compiles. All calls must agree in the device, in the dtypes of tensors and in which are None.

    A kernel whose constant DEPENDENT is true may begin while the launch before it ends: it has to wait with
    ``gdc_wait`` before it reads or writes anything, on every path. See ``can_depend``.
    """

    __slots__ = (
        "_address", "_compiled", "_constants", "_device", "_front", "_jit", "_launch", "_options", "_stream_of",
    )  # fmt: skip

    def __init__(self, kernel: Kernel, constants: tuple[Any, ...], threads: int, registers: int | None = None) -> None:
        self._jit, self._constants = kernel.jit, constants
        self._options: dict[str, Any] = {"num_warps": max(1, threads // _WARP)}
        if registers is not None:
            self._options["maxnreg"] = registers
        # Read off the constants, so that no kernel is launched early that does not wait. Other backends than NVIDIA's
        # refuse the option, whatever its value.
        if dict(zip(kernel.constants, constants, strict=True)).get("DEPENDENT"):
            self._options["launch_pdl"] = True
        self._compiled: Any = None

    def __call__(self, programs: int, tensors: tuple[Tensor | None, ...], *numbers: float) -> None:
        compiled = self._compiled
        if compiled is None:
            self._compile(programs, tensors, numbers)
        elif _hooks.launch_enter_hook.calls or _hooks.launch_exit_hook.calls:
            compiled[programs, 1, 1](*tensors, *numbers, *self._constants)
        else:
            # What compiled[grid](...) does, without the hooks: half the time. Addresses, since given a tensor it would
            # ask the driver whether it may use its address.
            self._launch(
                programs, 1, 1, self._stream_of(self._device), *self._front,
                *map(self._address, tensors), *numbers, *self._constants,
            )  # fmt: skip

    def _compile(self, programs: int, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...]) -> None:
        """Compile, launch, and keep the binary."""
        compiled = self._jit[programs,](*tensors, *numbers, *self._constants, **self._options)
        # The interpreter has no binary to keep.
        if compiled is not None:
            self._launch, self._front = _launcher_of(compiled)
            self._address = _address_or_none if any(tensor is None for tensor in tensors) else Tensor.data_ptr
            self._stream_of, self._device = driver.active.get_current_stream, driver.active.get_current_device()
            self._compiled = compiled


# How often a program looks for what others tell, about a microsecond each, before it finds it out itself.
_PATIENCE = 2048


def patience(device: int | None) -> int:
    """The constant PATIENCE of a launch on the GPU of this index; None: the interpreter, whose programs take turns."""
    return 0 if device is None else _PATIENCE


def _address_or_none(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _launcher_of(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """What launches a binary, given a grid, a stream, these arguments and the kernel's own."""
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    no_hooks = None, None, None
    if (
        _CALLS_C_ITSELF and type(run).__name__ == "CudaLauncher"
        and not run.global_scratch_size and not run.profile_scratch_size
    ):  # fmt: skip
        # The function in C beneath it, where its arguments are known and there is no memory to allocate for it: the
        # Python in between takes as long as the launch when its caches are cold.
        return run.launch, (function, run.launch_cooperative_grid, run.launch_pdl, None, None, metadata, *no_hooks)
    # The same from Triton 3.5 to 3.9.
    return run, (function, metadata, *no_hooks)


@functools.cache
def prepared(
    kernel: Kernel, key: tuple[Any, ...], constants: tuple[Any, ...], threads: int, registers: int | None = None
) -> Launch:
    """The launch of a kernel with these constants and `threads` a program.

    `key` has to tell apart what makes another binary beside them: the device, the dtypes of tensors, which are None.
    `registers`: the most that a thread may have, where NVIDIA's backend compiles.
    """
    return Launch(kernel, constants, threads, registers)


@functools.cache
def can_depend(device: torch.device) -> bool:
    """Whether a kernel on `device`, the current one, can have the constant DEPENDENT (see ``Launch``)."""
    # The interpreter has neither a driver to ask nor the instruction.
    if _INTERPRETED:
        return False
    target = driver.active.get_current_target()
    # Of 12.x one report has such launches fail where a graph was captured.
    return target.backend == "cuda" and target.arch // 10 in (9, 10)


@functools.cache
def had_better_hold(device: torch.device) -> bool:
    """Whether rows on `device`, the current one, are to be held as a whole, by one program or several (``parts``)."""
    if _INTERPRETED:
        return False
    target = driver.active.get_current_target()
    # Measured on Hopper alone. Where memory is faster yet, more would have to be under way for the same latencies.
    return target.backend == "cuda" and target.arch // 10 == 9


class Kernel:
    """A Triton kernel that is specialised on dtypes and constants alone.

    Attributes:
        jit: what Triton makes of it.
        constants: names of its constants, its last parameters.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters
        # Annotations are strings where a module defers them.
        self.constants = [name for name, p in parameters.items() if "constexpr" in str(p.annotation)]
        self.jit = triton.jit(function, do_not_specialize=[name for name in parameters if name not in self.constants])
        self.__doc__ = function.__doc__


def kernel(function: Callable[..., Any]) -> Kernel:
    """Decorator for a kernel that a ``Launch`` launches."""
    return Kernel(function)


def refuse_float64(*dtypes: torch.dtype) -> None:
    """The kernels compute in float32."""
    for dtype in dtypes:
        if dtype == torch.float64:
            raise UnsupportedInput("the Triton kernels take float16, bfloat16 and float32, got float64")
