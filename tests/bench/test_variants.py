"""The tool that compares schedules in one process: it puts all back that it patches, and tells of a wrong result."""

import sys

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import variants
from loss_bench.check import Verdict
from loss_triton import cross_entropy, schedules, softmax
from support import devices

needs_triton = pytest.mark.skipif(
    bool(devices.unavailable_reason("triton")), reason=f"triton: {devices.unavailable_reason('triton')}"
)


def test_triton_has_the_schedule_meanwhile():
    before = [(module.parts_of, module.had_better_hold) for module in (cross_entropy, softmax)]
    with variants.variant("triton", "2,12,96"):
        for module in (cross_entropy, softmax):
            assert module.parts_of({}, 50257, 2, 8) == schedules.Parts(9, 64, 12, 96)
            assert module.had_better_hold(None)
        # Its kernel knows no others, and would give the loss of the row's first part.
        with pytest.raises(ValueError, match="50257 classes are 9 programs"):
            cross_entropy.parts_of(schedules.FORWARD_PARTS[2], 50257, 2, 8)
        assert cross_entropy.parts_of(schedules.GRADIENT_PARTS[2], 50257, 2, 8).programs == 9
    with variants.variant("triton", "8,16,0"):
        assert softmax.parts_of({}, 32000, 2, 8) == schedules.Parts(1, 256, 16, None)
    with variants.variant("triton", "loop"):
        assert not cross_entropy.had_better_hold(None)
    assert [(module.parts_of, module.had_better_hold) for module in (cross_entropy, softmax)] == before


def test_cutedsl_has_the_schedule_meanwhile():
    pytest.importorskip("cutlass.cute", reason="cutedsl: nvidia-cutlass-dsl is not installed")
    from loss_cutedsl import _schedule

    before = _schedule.plain, _schedule.held, _schedule.softmax_in_registers
    for name, held in (("256,2,1,6", True), ("s256,2,1,6", False), ("s256,2,0,6", False)):
        with variants.variant("cutedsl", name):
            form = _schedule.plain("machine", 4000, False, True)
            at_once = name == "s256,2,0,6"
            assert form == _schedule.Form(_schedule.Schedule(256, 256, 2, 1, int(not at_once), 6), held)
            assert _schedule.held("machine", 4000) == form.schedule._replace(rows=1)
            assert _schedule.softmax_in_registers("machine", 4000, 1, False) == (form.schedule if at_once else None)
    assert (_schedule.plain, _schedule.held, _schedule.softmax_in_registers) == before


CELL = "cross_entropy:both:2x300:fp32"


@needs_triton
def test_what_is_compiled_is_compared(monkeypatch):
    variants.compile_and_check("triton", CELL, "1,2,0", torch.device(devices.DEVICE))
    with pytest.raises(ValueError, match="300 classes are 3 chunks"):
        variants.compile_and_check("triton", CELL, "1,4,0", torch.device(devices.DEVICE))
    monkeypatch.setattr(
        variants, "check", lambda *call, grad: Verdict(False, 1.0, 1.0, 9.0, "the gradient is off", False)
    )
    with pytest.raises(ValueError, match="1,2,0: the gradient is off"):
        variants.compile_and_check("triton", CELL, "1,2,0", torch.device(devices.DEVICE))


@needs_triton
def test_every_variant_is_measured_in_every_round(tmp_path, monkeypatch, capsys):
    given = tmp_path / "list.txt"
    given.write_text(f"{CELL} now 1,2,0\n\nsoftmax:forward:2x100:fp16 loop\n")
    command = ["variants.py", "triton", str(given), "--device", devices.DEVICE, "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", [*command, "--compile", "2/2"])
    variants.main()
    assert not capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", command)
    variants.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines] == [[CELL, "now"], [CELL, "1,2,0"], ["softmax:forward:2x100:fp16", "loop"]]
    assert all(len(line) == 4 and line[-1].endswith("%") for line in lines)
