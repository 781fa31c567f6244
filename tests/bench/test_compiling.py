"""Compilation ahead of time: who gets which task, and what a failure costs."""

from __future__ import annotations

import types

import pytest
import torch
from loss_bench import compiling, processes
from loss_bench.cases import Case
from loss_bench.cli import app
from loss_bench.compiling import CompileTask, make_tasks
from typer.testing import CliRunner

CPU = torch.device("cpu")
SIGNATURE = "def cross_entropy(logits, target, weight, byte_lengths, num_items, options):\n"


def case(classes, dtype="float32"):
    return Case("cross_entropy", 4096, classes, dtype)


def test_the_cases_that_the_host_time_is_measured_on_are_compiled_too():
    tasks = make_tasks(["a", "b"], [case(10), case(20), case(10, "float16")])
    assert [task.case.shape for task in tasks if task.backend == "b"] == [
        "4096x10", "4096x20", "4096x10", "64x512", "64x512",
    ]  # fmt: skip


def test_a_process_stays_at_its_backend_and_a_new_one_goes_where_most_is_left():
    waiting = [CompileTask("a", case(n)) for n in range(1, 6)] + [CompileTask("b", case(n)) for n in range(1, 4)]
    busy = []
    for expected in ("a", "b", "a"):
        task = processes._next(waiting, busy)
        assert task.backend == expected
        busy.append(types.SimpleNamespace(task=task))
    assert processes._next(waiting, busy, "b").backend == "b"
    waiting = [CompileTask("a", case(1))]
    assert processes._next(waiting, busy, "b").backend == "a"
    assert waiting == []


@pytest.mark.parametrize(("rows", "few"), [(64, 64), (513, 513), (8192, 512), (8193, 513), (4103, 519)])
def test_few_rows_have_the_same_remainder(rows, few):
    assert compiling._few(rows, 512) == few


def test_a_failure_costs_its_own_task_alone(install_backend, starts_take_their_time):
    install_backend(
        "deadly",
        SIGNATURE
        + "    if logits.shape[1] == 10:\n        import os; os._exit(7)\n"
        + "    if logits.shape[1] == 11:\n        raise RuntimeError('no luck')\n"
        + "    if logits.shape[1] == 12:\n        import time; time.sleep(600)\n"
        + "    return F.cross_entropy(logits, target)\n",
    )
    words = ["warm", "--shape", "4x10,4x11,4x12", "-b", "deadly", "--jobs", "2", "--time-limit", "5"]
    result = CliRunner().invoke(app, [*words, "--device", "cpu"])
    assert result.exit_code == 1, result.output
    assert result.stdout.count("did not compile: deadly") == 3
    assert "its process ended with exit status 7" in result.output
    assert "no luck" in result.output
    assert "no sign of life for 5 s" in result.output
    assert "1 of 4 compiled" in result.output


def test_a_refusal_is_no_failure_and_quiet_still_names_failures(install_backend):
    install_backend(
        "picky", SIGNATURE + "    from loss_core import UnsupportedInput\n    raise UnsupportedInput('no')\n"
    )
    install_backend("absent", "def unavailable_reason(device):\n    return 'not here'\n" + SIGNATURE + "    ...\n")
    install_backend("broken", SIGNATURE + "    raise RuntimeError('no valid IR')\n")
    words = ["warm", "--shape", "64x512", "--jobs", "1", "--device", "cpu", "--quiet", "-b"]
    refused = CliRunner().invoke(app, [*words, "picky,absent"])
    assert refused.exit_code == 0, refused.output
    assert "0 of 2 compiled" in refused.stdout
    assert "did not compile" not in refused.output
    failed = CliRunner().invoke(app, [*words, "picky,broken"])
    assert failed.exit_code == 1, failed.output
    (line,) = (line for line in failed.stdout.splitlines() if "did not compile" in line)
    assert line.startswith("did not compile: broken")
    assert line.endswith("RuntimeError: no valid IR")
