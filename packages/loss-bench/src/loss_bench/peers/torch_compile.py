"""``torch.compile`` of plain ``torch.nn.functional``.

Shapes are static, which is what gives the compiler its best case, so it compiles anew for every shape, dtype and grad
mode. Its default limit of 8 compilations a function would then send later shapes back to the interpreter without a
word: the limit is raised for the process, and ``fullgraph=True`` makes reaching it an error.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable

import torch
from loss_core.backend import CrossEntropyOptions
from torch import Tensor

from loss_bench.peers import torch_nn
from loss_bench.peers.requirements import cross_entropy_with, linear_cross_entropy_with

API_VERSION = 1
OPS = ("cross_entropy", "softmax", "log_softmax", "linear_cross_entropy")
PEER = "torch"
STATIC_SHAPES = True
"""What is compiled holds for one shape."""

_COMPILATIONS = 1024


def unavailable_reason(device: torch.device) -> str | None:
    """Inductor needs a C++ compiler for the CPU and Triton for a GPU."""
    if device.type == "cpu":
        compilers = (os.environ.get("CXX", ""), "g++", "clang++", "cl")
        if not any(name and shutil.which(name) for name in compilers):
            return "torch.compile needs a C++ compiler for the CPU"
    return None


@cross_entropy_with(*torch_nn.KNOWN)
def cross_entropy(logits: Tensor, target: Tensor, weight: Tensor | None, options: CrossEntropyOptions) -> Tensor:
    """``F.cross_entropy``, compiled."""
    return _compiled(torch_nn.functional_cross_entropy)(logits, target, weight, options)


@linear_cross_entropy_with(*torch_nn.KNOWN, "linear_bias")
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    options: CrossEntropyOptions,
) -> Tensor:
    """``F.linear`` and ``F.cross_entropy``, compiled together."""
    compiled = _compiled(torch_nn.functional_linear_cross_entropy)
    return compiled(input, linear_weight, target, linear_bias, weight, options)


def softmax(input: Tensor) -> Tensor:
    """``F.softmax``, compiled."""
    return _compiled(torch_nn.softmax)(input)


def log_softmax(input: Tensor) -> Tensor:
    """``F.log_softmax``, compiled."""
    return _compiled(torch_nn.log_softmax)(input)


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # Takes seconds to import, which a table of backends need not wait for.
    import torch._dynamo
    import torch._inductor.config

    # One kernel a call leaves a pool of compiling processes nothing to do, and a worker that ends leaks its semaphore.
    torch._inductor.config.compile_threads = 1
    torch._dynamo.config.recompile_limit = _COMPILATIONS
    torch._dynamo.config.accumulated_recompile_limit = _COMPILATIONS
    return torch.compile(function, fullgraph=True, dynamic=False)
