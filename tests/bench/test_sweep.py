"""The tool that compares variants of a backend's sources."""

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("sweep", Path(__file__).parents[2] / "benchmarks" / "sweep.py")
sweep = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sweep)

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


@pytest.mark.parametrize(("name", "moved"), list(zip(CELLS, (6400, 1600, 3200, 9600), strict=True)))
def test_the_limit_is_of_the_bytes_that_a_pass_moves(name, moved):
    assert sweep.Cell(name, "torch", "cpu").bytes == moved


def test_the_options_reach_the_loss():
    plain, smooth = (
        sweep.Cell(f"cross_entropy:none:8x100:fp32{more}", "torch", "cpu") for more in ("", ":label_smoothing=0.5")
    )
    smooth.inputs = plain.inputs
    for cell in (plain, smooth):
        cell.run(0)
    assert plain.result != smooth.result
