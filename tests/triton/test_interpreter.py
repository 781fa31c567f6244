"""What the tests change of Triton's interpreter; see ``support.devices``."""

import inspect

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl
from support import devices
from triton.runtime import interpreter


@pytest.mark.skipif(devices.HAS_GPU, reason="the kernels are compiled")
@pytest.mark.parametrize("package", [tl, tl.core, tl.math, tl.tensor], ids=lambda package: package.__name__)
def test_it_finds_every_builtin(package):
    def builtins(members):
        # The first kernel that runs leaves stand-ins for some, which are not replaced again.
        return [item for item in members if tl.core.is_builtin(item[1])]

    found = builtins(interpreter.inspect.getmembers(package))
    assert found == builtins(inspect.getmembers(package))
    assert found
