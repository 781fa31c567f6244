"""The cache of compiled kernels: one file a kernel, whatever races for it, and nothing compiled twice."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("tvm_ffi", reason="cutedsl: apache-tvm-ffi is not installed")
pytest.importorskip("cutlass.cute", reason="cutedsl: nvidia-cutlass-dsl is not installed")

COMPILE_ONE = """
import sys
from loss_cutedsl import _compile, _schedule, softmax
import torch
machine = _schedule.machine((9, 0), 132)
for cols in map(int, sys.argv[1:]):
    schedule = _schedule.held(machine, cols // 8, 1, softmax.ENTRY_WORDS)
    softmax.make_plan(machine, torch.bfloat16, cols // 8, schedule, False, False, False, True)
print(_compile.compilations)
"""


def start(folder, *cols):
    environment = {**os.environ, "LOSS_CUTEDSL_CACHE": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", COMPILE_ONE, *map(str, cols)], env=environment, stdout=subprocess.PIPE, text=True
    )


def compilations(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return int(output)


def test_processes_race_and_the_next_one_compiles_nothing(tmp_path):
    folder = tmp_path / "not there yet"
    counts = [compilations(process) for process in [start(folder, 1024) for _ in range(2)]]
    assert max(counts) == 1
    # One name, so no address or other chance is in the key; nothing half-written is left.
    assert len(list(folder.iterdir())) == 1
    # The number of rows is not in the key, and a width of the same class is not either.
    assert compilations(start(folder, 1024, 1000)) == 0


def test_damaged_file_is_replaced(monkeypatch, tmp_path):
    import torch
    from loss_cutedsl import _compile, _schedule, softmax

    monkeypatch.setenv("LOSS_CUTEDSL_CACHE", str(tmp_path))
    monkeypatch.setattr(_compile, "_kept", {})
    monkeypatch.setattr(_compile, "_load", lambda path, symbol: path.read_bytes().index(b"ELF"))
    machine = _schedule.machine((9, 0), 132)
    schedule = _schedule.held(machine, 128, 1, softmax.ENTRY_WORDS)

    def load():
        return softmax.make_plan(machine, torch.bfloat16, 128, schedule, False, False, False, True)

    load()
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"not an object")
    before = _compile.compilations
    monkeypatch.setattr(_compile, "_kept", {})
    load()
    assert _compile.compilations == before + 1
    assert file.read_bytes() != b"not an object"


def test_folder_that_cannot_be_written(monkeypatch, tmp_path):
    import torch
    from loss_cutedsl import _compile, _schedule, softmax

    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("LOSS_CUTEDSL_CACHE", str(blocked))
    monkeypatch.setattr(_compile, "_kept", {})
    machine = _schedule.machine((9, 0), 132)
    schedule = _schedule.held(machine, 128, 1, softmax.ENTRY_WORDS)
    plan = softmax.make_plan(machine, torch.bfloat16, 128, schedule, False, False, False, True)
    assert callable(plan.launch)


def test_key_changes_with_what_changes_the_kernel(monkeypatch, tmp_path):
    import torch
    from loss_cutedsl import _compile, _schedule, softmax

    monkeypatch.setenv("LOSS_CUTEDSL_CACHE", str(tmp_path))
    monkeypatch.setattr(_compile, "_kept", {})
    machine = _schedule.machine((9, 0), 132)
    schedule = _schedule.held(machine, 128, 1, softmax.ENTRY_WORDS)

    def files(machine, dtype, schedule, log):
        softmax.make_plan(machine, dtype, 128, schedule, False, False, log, True)
        return len(list(tmp_path.iterdir()))

    assert files(machine, torch.bfloat16, schedule, False) == 1
    assert files(machine, torch.float16, schedule, False) == 2
    assert files(machine, torch.bfloat16, schedule._replace(stages=1), False) == 3
    assert files(_schedule.machine((8, 0), 108), torch.bfloat16, schedule, True) == 4
    assert files(machine, torch.bfloat16, schedule, False) == 4
    monkeypatch.setattr(_compile, "_kept", {})
    monkeypatch.setattr(_compile, "_sources", lambda: "other sources")
    assert files(machine, torch.bfloat16, schedule, False) == 5


def test_threads_do_not_pile_up(monkeypatch, tmp_path):
    import torch
    from loss_cutedsl import _compile, _schedule, softmax

    monkeypatch.setenv("LOSS_CUTEDSL_CACHE", str(tmp_path))
    monkeypatch.setattr(_compile, "_kept", {})
    machine = _schedule.machine((9, 0), 132)

    def threads():
        return len(os.listdir("/proc/self/task"))

    counts = []
    for stages in range(1, 5):
        schedule = _schedule.Schedule(64, 64, 1, stages, 1, 2)
        softmax.make_plan(machine, torch.bfloat16, 64, schedule, False, False, False, True)
        counts.append(threads())
    assert counts[-1] <= counts[0] + 1
