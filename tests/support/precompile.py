"""Fills the cache of compiled kernels for a GPU that is elsewhere, so that none of its time goes to compiling.

As a plugin of pytest it has the tests of the backend "cutedsl" run on a machine without a GPU, on tensors of the CPU:
each kernel that they need is compiled for the machines below and kept, none is launched. As a program it does the same
with the calls that loss-bench measures::

    export LOSS_CUTEDSL_CACHE=FOLDER PYTHONPATH=tests
    pytest -q -p support.precompile -p no:cacheprovider -n 2 -k cutedsl tests/test_*.py tests/cutedsl/test_widths.py
    python -m support.precompile

Wrong numbers fail no test here, so one that fails has not made its kernels. The files serve wherever the key is the
one that is printed at the end (``python -m support.precompile key`` prints it alone): it is of the sources of
loss-cutedsl, the versions of the DSL, its libraries and apache-tvm-ffi, and the host's kind of processor. Python, torch
and the driver are not in it, nor is it another for an installed wheel.
"""

from __future__ import annotations

import importlib
import itertools
import platform
import sys
from concurrent.futures import ProcessPoolExecutor

import loss_core
import loss_core.testing
import pytest
import torch
from cutlass._mlir import ir
from cutlass.cutlass_dsl import tvm_ffi_provider
from loss_cutedsl import _compile, _environment, _schedule, cross_entropy, softmax

CAPABILITY, PROCESSORS = (9, 0), 132
L2_BYTES = {"H100": 50 * 2**20, "H200": 60 * 2**20}

# The sizes that loss-bench measures, and the small one of the host's time. Rows count where a schedule asks for them.
# 4096 columns are for a test, too, that looks at its first result before it calls the next op.
SIZES = (
    (4096, 8192), (4096, 16384), (8192, 32000), (32768, 8192), (4096, 128256), (8192, 151936), (8192, 50257),
    (4096, 32768), (32768, 2048), (32768, 4096), (64, 512),
)  # fmt: skip
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def machines() -> list[_schedule.Machine]:
    """The machines that kernels are made for, each once."""
    return [_schedule.machine(CAPABILITY, PROCESSORS, size) for size in L2_BYTES.values()]


def pretend() -> None:
    """Let the backend take tensors of the CPU, compile for all machines, and launch nothing."""
    if _compile.cache_folder() is None:
        raise pytest.UsageError("LOSS_CUTEDSL_CACHE has to name the folder that is to be filled")
    made_for = machines()
    _environment._device_reason = lambda device: None
    _environment._driver_reason = lambda: None
    _compile._load = lambda path, symbol: lambda *arguments: None
    if platform.machine() == "x86_64":
        tvm_ffi_provider._aot_support.export_module_to_bytes = _export
    for module in (cross_entropy, softmax):
        module.machine_of = made_for.__getitem__
        module.stream_of = lambda index: 0
        for name, plan in list(vars(module).items()):
            if name.startswith("_") and name.endswith("_plan"):
                setattr(module, name, _for_each(len(made_for), plan))


def _for_each(count, plan):
    """`plan` with the numbers of all machines in the place of the device's; the last one's plan serves."""
    return lambda index, *rest: [plan(number, *rest) for number in range(count)][-1]


_export_natively = tvm_ffi_provider._aot_support.export_module_to_bytes


def _export(module, **options):
    """The object file, its host code for any x86-64: the DSL writes that for the very processor it runs on."""
    with module.context:
        features = ir.Attribute.parse('#llvm.target_features<["+sse2"]>')
        for operation in module.body.operations:
            if operation.operation.name == "llvm.func":
                operation.attributes["target_cpu"] = ir.StringAttr.get("x86-64")
                operation.attributes["target_features"] = features
    return _export_natively(module, **options)


def _summary(before: int) -> str:
    folder = _compile.cache_folder()
    count = _count()
    return f"{count} kernels in {folder}, {count - before} of them new; key {_compile._sources()}"


def _count() -> int:
    return len(list(_compile.cache_folder().glob("[!.]*.o")))


# The plugin


def pytest_configure(config):
    pretend()
    config.stash[_BEFORE] = _count()
    torch.Tensor.to = _sent
    # What is compared with the truth has run to its end, backward included; other tests go on after a comparison.
    importlib.import_module("loss_core.testing.check").expected = lambda *call: {}
    torch.testing.assert_close = lambda *tensors, **tolerances: None


_BEFORE = pytest.StashKey[int]()
_to = torch.Tensor.to


def _sent(tensor, *where, **how):
    """``Tensor.to``, where a tensor that is sent to the device lies in memory of its own, as it does on a GPU.

    Whether rows start with a vector is part of what kernels are compiled for.
    """
    if "device" in how or (where and isinstance(where[0], (str, torch.device))):
        how["copy"] = True
    return _to(tensor, *where, **how)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call():
    try:
        return (yield)
    except AssertionError:
        return True


def pytest_terminal_summary(terminalreporter, config):
    terminalreporter.write_line(_summary(config.stash[_BEFORE]))


# The program


def _call(size_and_dtype) -> None:
    """What loss-bench calls. No memory is touched, so the rows may be as many as they are."""
    (rows, classes), dtype = size_and_dtype
    input = torch.empty(rows, classes, dtype=dtype, requires_grad=True)
    target = torch.zeros(rows, dtype=torch.int64)
    torch.autograd.grad(loss_core.cross_entropy(input, target, backend="cutedsl"), input)
    with torch.no_grad():
        loss_core.cross_entropy(input, target, backend="cutedsl")
    for op in (loss_core.softmax, loss_core.log_softmax):
        output = op(input, backend="cutedsl")
        torch.autograd.grad(output, input, torch.empty_like(output))


def main() -> None:
    if sys.argv[1:] == ["key"]:
        print(_compile._sources())
        return
    pretend()
    before = _count()
    with ProcessPoolExecutor() as processes:
        list(processes.map(_call, itertools.product(SIZES, DTYPES)))
    print(_summary(before))


if __name__ == "__main__":
    main()
