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
    return sorted(name for name, member in members if tl.core.is_builtin(member))

packages = (tl, tl.core, tl.math, tl.tensor)
report([[builtins(of.getmembers(package)) for of in (interpreter.inspect, inspect)] for package in packages])
"""


@pytest.mark.skipif(devices.HAS_GPU, reason="the kernels are compiled")
def test_it_finds_every_builtin():
    for found, there in run_python(PROGRAM, Path(__file__).parents[1]):
        assert found == there
        assert found
