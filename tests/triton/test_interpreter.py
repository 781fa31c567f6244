"""What the tests change of Triton's interpreter; see ``support.devices``."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from support import devices
from support.plugins import run_python

# Before any kernel runs: the first one leaves stand-ins for some builtins, with Triton 3.5 for all.
PROGRAM = """
import inspect
from support import devices
devices.prepare()
import triton.language as tl
from triton.runtime import interpreter

def builtins(members):
    return [item for item in members if tl.core.is_builtin(item[1])]

def compare(package):
    found = builtins(interpreter.inspect.getmembers(package))
    return [package.__name__, len(found), found == builtins(inspect.getmembers(package))]

report([compare(package) for package in (tl, tl.core, tl.math, tl.tensor)])
"""


@pytest.mark.skipif(devices.HAS_GPU, reason="the kernels are compiled")
def test_it_finds_every_builtin():
    for package, found, all_of_them in run_python(PROGRAM, Path(__file__).parents[1]):
        assert all_of_them, package
        assert found, package
