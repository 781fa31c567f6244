"""Where the tests run, and on which backends."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
from types import SimpleNamespace

import pytest
import torch
from loss_core import BackendUnavailable, get_backend

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
BACKENDS = ("torch", "triton", "cutedsl")


def prepare() -> None:
    """Set what has to be set before Triton is imported; without a GPU its kernels run in its interpreter."""
    if not HAS_GPU:
        os.environ.setdefault("TRITON_INTERPRET", "1")
        # The automatic choice would be the interpreter, which is slow.
        os.environ.setdefault("LOSS_BACKEND", "torch")
        # The workers of pytest-xdist share the cores.
        if "PYTEST_XDIST_WORKER" in os.environ:
            torch.set_num_threads(1)
        if importlib.util.find_spec("triton"):
            _remember_builtins()


def _remember_builtins() -> None:
    """Spare Triton's interpreter its look through triton.language for builtins at each call of a jitted function.

    They are the same each time, and the look is a third of what its tests take.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    @functools.cache
    def builtins(package):
        return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]

    def getmembers(package):
        return [(name, getattr(package, name)) for name in builtins(package)]

    # Now, for the first kernel that runs replaces some of them for good.
    for package in (tl, tl.core, tl.math, tl.tensor):
        builtins(package)
    interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getmembers": getmembers})


def unavailable_reason(name: str) -> str:
    """Why the backend `name` cannot run on ``DEVICE``, or ""."""
    try:
        device = torch.device(DEVICE, 0) if HAS_GPU else torch.device(DEVICE)
        return get_backend(name).unavailable_reason(device)
    except BackendUnavailable as error:
        return str(error)


def lacks(name: str, op: str) -> str:
    """What to say if the backend `name` does not provide `op`, or ""."""
    needed = "cross_entropy" if op == "causal_lm_loss" else op
    ops = get_backend(name).ops
    return "" if needed in ops else f"provides {', '.join(ops)}, not {needed}"


def skip_without(name: str, op: str) -> None:
    """Skip the test that calls this if the backend `name` does not provide `op`."""
    reason = lacks(name, op)
    if reason:
        pytest.skip(f"{name} {reason}")


def free_memory_gib() -> float:
    """Memory of the device that a test may take."""
    if not HAS_GPU:
        return 0.0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / 2**30
