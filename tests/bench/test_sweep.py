"""The tool that compares variants of a backend's sources."""

import subprocess
import sys
from pathlib import Path

import pytest
import sweep
import torch
from loss_bench.calls import make_call
from loss_bench.cases import minimal_bytes
from loss_bench.inputs import random_inputs

CELLS = [
    "cross_entropy:both:8x100:fp32",
    "cross_entropy:none:8x100:bf16:label_smoothing=0.1,z_loss=1e-4",
    "softmax:forward:8x100:fp16",
    "log_softmax:backward:8x100:fp32",
]


def test_every_pass_is_measured():
    shares = sweep.measure("torch", CELLS, "cpu")
    assert list(shares) == CELLS
    assert all(share > 0 for share in shares.values())


# A loss reads a target of 8 bytes for each of the 8 rows too.
@pytest.mark.parametrize(("name", "moved"), list(zip(CELLS, (6464, 1664, 3200, 9600), strict=True)))
def test_the_limit_is_of_the_bytes_that_a_pass_moves(name, moved):
    assert minimal_bytes(*sweep.parse(name)) == moved


def test_the_options_reach_the_loss():
    results = []
    for more in ("", ":label_smoothing=0.5"):
        case, _ = sweep.parse(f"cross_entropy:none:8x100:fp32{more}")
        inputs = random_inputs(case, torch.device("cpu"), seed=0, sets=1)
        results.append(make_call(case, "torch")(*inputs.leaves(0), inputs.target[0]))
    assert results[0] != results[1]


def test_what_a_profiler_looks_at_runs():
    tool = Path(sweep.__file__).with_name("for_profiler.py")
    subprocess.run([sys.executable, tool, "torch", CELLS[3], "--device", "cpu"], check=True)
    wrong = subprocess.run(
        [sys.executable, tool, "none", CELLS[3], "--device", "cpu"], stderr=subprocess.PIPE, text=True, check=False
    )
    assert wrong.returncode != 0
    assert "'none'" in wrong.stderr
