"""The tool that says what of CuTe's kernels spills."""

import re
import subprocess
import sys

import pytest

pytest.importorskip("cutlass.cute", reason="cutedsl: nvidia-cutlass-dsl is not installed")

import spills

try:
    spills.cuobjdump()
except (FileNotFoundError, ImportError) as reason:
    pytest.skip(f"no cuobjdump: {reason}", allow_module_level=True)


def test_registers_of_a_schedule():
    """In a process of its own, for the DSL keeps binaries only if it is told so before it is imported."""
    of_one = "cross_entropy gradient False torch.bfloat16 256 vectors, ragged False"
    command = [sys.executable, spills.__file__, "--all", "--only", of_one]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert said.startswith(of_one)
    # Its 16 blocks of 64 threads are to have 4 vectors a thread.
    ((registers, spilled),) = re.findall(r": (\d+) registers, (\d+) bytes\n", said)
    assert 4 * 4 < int(registers) <= 65536 // (16 * 64)
    assert int(spilled) == 0


def test_every_schedule_has_a_name_of_its_own():
    names = [name for name, _ in spills.schedules()]
    assert len(names) == len(set(names)) > 100
