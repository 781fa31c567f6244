"""Errors in units of rounding."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from loss_bench import accuracy
from loss_bench.accuracy import KINDS, AccuracyTask, make_inputs, units_of_rounding
from loss_bench.calls import BackendRow
from loss_bench.cases import Case
from loss_bench.cli import app
from loss_bench.results import Report, read_report
from typer.testing import CliRunner

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("quick_measurements")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_neighbour_is_one_unit_away(dtype):
    values = torch.tensor([1.0, 1.5, 0.37, 1e-3, 200.0, -3.0], dtype=dtype)
    neighbours = torch.nextafter(values.float(), torch.tensor(9e9)) if dtype == torch.float32 else None
    if neighbours is None:
        bits = values.view(torch.int16) + 1
        neighbours = bits.view(dtype)
    error = (neighbours.double() - values.double()).abs()
    assert units_of_rounding(error, values.double(), dtype).tolist() == pytest.approx([1.0] * 6)


def test_rounding_once_is_within_half_a_unit():
    truth = torch.randn(1000, dtype=torch.float64)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        units = units_of_rounding((truth.to(dtype).double() - truth).abs(), truth, dtype)
        assert 0.4 < units.max() <= 0.5


def test_equal_infinities_are_right_and_other_infinities_are_not():
    errors = accuracy._Errors(torch.float32)
    want = torch.tensor([-torch.inf, 1.0], dtype=torch.float64)
    errors.add(torch.tensor([-torch.inf, 1.0]), want)
    assert errors.units == 0
    errors.add(torch.tensor([0.0, 1.0]), want)
    assert errors.units == torch.inf


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_is_a_difference_is_held_to_the_rounding_of_its_terms(kind):
    row = accuracy.measure_accuracy(task("torch", kind, (32, 101)), CPU)
    assert row.result_ulp < 4
    assert row.device


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_finite_but_for_the_mask(kind):
    case = Case("cross_entropy", 16, 101, "float16")
    logits, target = make_inputs(case, kind, CPU, 0)
    assert not logits.isnan().any()
    assert (logits == -torch.inf).any() == (kind == "masked")
    kept = target >= 0
    assert kept.sum() == 14
    assert logits[kept].gather(1, target[kept, None]).isfinite().all()


def task(backend, kind="ordinary", shape=(8, 20)):
    who = BackendRow(backend, "d", "1", ("cross_entropy",), True, "")
    return AccuracyTask(Case("cross_entropy", *shape, "float32"), kind, who, 0)


def test_a_nan_is_called_wrong(bad_backends):
    row = accuracy.measure_accuracy(task("nan"), CPU)
    assert row.status == "wrong"
    assert row.to_json()["grad_ulp"] is None


def test_command(bad_backends, tmp_path):
    path = tmp_path / "a.json"
    words = ["accuracy", "cross_entropy", "log_softmax", "-b", "torch,torch-nn,nan", "-s", "8x50", "-d", "bf16,fp32"]
    result = CliRunner().invoke(app, [*words, "-q", "--device", "cpu", "--in-process", "--json", str(path)])
    assert result.exit_code == 1, result.output
    assert " wrong " in result.output
    rows = json.loads(path.read_text())["accuracy"]
    assert len(rows) == 2 * 2 * len(KINDS) * 3
    ours = [r for r in rows if r["backend"] == "torch" and r["dtype"] == "bfloat16" and r["op"] == "cross_entropy"]
    assert all(row["grad_ulp"] < 1.01 for row in ours)
    assert result.output.count("error in units of rounding") == 8
    overview = [line for line in result.output.splitlines() if line.startswith("│ cross_entropy │ 8x50")]
    assert len(overview) == 2 * 3


@pytest.mark.parametrize("others", ["", ",torch-nn"])
def test_a_backend_that_has_no_errors_is_named_with_the_reason(others, tmp_path):
    markdown = tmp_path / "a.md"
    words = ["accuracy", "softmax", "-b", "quack,torch-linear" + others, "-s", "8x20", "-d", "fp32", "-q"]
    result = CliRunner().invoke(app, [*words, "--device", "cpu", "--in-process", "--markdown", str(markdown)])
    assert result.exit_code == 0, result.output
    for shown in (result.output, markdown.read_text()):
        assert "not run: quack: needs a CUDA device" in shown
        # Or that this torch has no such loss at all.
        assert "not run: torch-linear: " in shown
        assert shown.count("worst error against float64") == bool(others)


def test_a_backend_that_takes_its_process_with_it_costs_nobody_else_a_row(install_backend, tmp_path):
    signature = "def cross_entropy(logits, target, weight, byte_lengths, num_items, options):\n"
    install_backend("deadly", signature + "    import os; os._exit(7)\n")
    path = tmp_path / "a.json"
    words = ["accuracy", "cross_entropy", "-b", "deadly,torch-nn", "-s", "8x20", "-d", "fp32", "-q", "--device", "cpu"]
    # In one process: with several the third task may be under way when the second is lost.
    words += ["--jobs", "1", "--kind", "ordinary,equal,wide"]
    result = CliRunner().invoke(app, [*words, "--json", str(path)])
    assert result.exit_code == 1, result.output
    rows = json.loads(path.read_text())["accuracy"]
    assert [(row["kind"], row["backend"], row["status"]) for row in rows] == [
        ("ordinary", "deadly", "crashed"), ("ordinary", "torch-nn", "ok"),
        ("equal", "deadly", "crashed"), ("equal", "torch-nn", "ok"),
        ("wide", "deadly", "error"), ("wide", "torch-nn", "ok"),
    ]  # fmt: skip
    assert rows[0]["reason"] == "its process ended with exit status 7"
    assert rows[4]["reason"] == "not tried again after it was lost 2 times"


def test_a_backend_that_hangs_is_given_up_and_the_rest_goes_on(install_backend, starts_take_their_time, tmp_path):
    """So it is in all that runs task by task: accuracy, train and warm."""
    install_backend(
        "sleepy",
        """
        def cross_entropy(logits, target, weight, byte_lengths, num_items, options):
            import time
            if (logits == 0.5).all():
                time.sleep(600)
            return F.cross_entropy(logits, target, ignore_index=options.ignore_index)
        """,
    )
    path = tmp_path / "a.json"
    words = ["accuracy", "cross_entropy", "-b", "sleepy,torch-nn", "-s", "8x20", "-d", "fp32", "-q", "--device", "cpu"]
    words += ["--kind", "equal,wide", "--jobs", "1", "--time-limit", "5", "--json", str(path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1, result.output
    assert [(row["kind"], row["backend"], row["status"], row["reason"]) for row in read_report(path).accuracy] == [
        ("equal", "sleepy", "timeout", "no sign of life for 5 s"), ("equal", "torch-nn", "ok", ""),
        ("wide", "sleepy", "ok", ""), ("wide", "torch-nn", "ok", ""),
    ]  # fmt: skip


def test_ctrl_c_keeps_what_was_measured(install_backend, tmp_path):
    install_backend(
        "impatient",
        """
        def cross_entropy(logits, target, weight, byte_lengths, num_items, options):
            if (logits == 0.5).all():
                raise KeyboardInterrupt
            return F.cross_entropy(logits, target, ignore_index=options.ignore_index)
        """,
    )
    path = tmp_path / "a.json"
    words = ["accuracy", "cross_entropy", "-b", "impatient", "-s", "8x20", "-d", "fp32", "-q", "--device", "cpu"]
    words += ["--in-process", "--kind", "ordinary,equal,wide", "--json", str(path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 130
    assert [row["kind"] for row in json.loads(path.read_text())["accuracy"]] == ["ordinary"]
    assert "interrupted; what was finished follows" in result.output


def test_a_command_that_is_killed_leaves_what_was_measured(install_backend, tmp_path, monkeypatch):
    """Without a chance to do anything at its end."""
    install_backend(
        "deadly",
        """
        def cross_entropy(logits, target, weight, byte_lengths, num_items, options):
            import os, signal
            if (logits == 0.5).all():
                os.kill(os.getpid(), signal.SIGKILL)
            return F.cross_entropy(logits, target, ignore_index=options.ignore_index)
        """,
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    path = tmp_path / "a.json"
    words = ["accuracy", "cross_entropy", "-b", "deadly", "-s", "8x20", "-d", "fp32", "--kind", "ordinary,wide,equal"]
    words += ["-q", "--device", "cpu", "--in-process", "--json", str(path)]
    done = subprocess.run([sys.executable, "-m", "loss_bench", *words], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [row["kind"] for row in read_report(path).accuracy] == ["ordinary", "wide"]


def accuracy_of(path, *words, status=0):
    """What the command writes; its output if it fails."""
    words = ["accuracy", "cross_entropy", "-s", "8x20", "-d", "fp32", *words, "-q", "--device", "cpu", "--in-process"]
    result = CliRunner().invoke(app, [*words, "--json", str(path)])
    assert result.exit_code == status, result.output
    return result.output if status else read_report(path)


def test_an_interrupted_command_goes_on_where_it_was(install_backend, tmp_path, monkeypatch):
    install_backend(
        "impatient",
        """
        def cross_entropy(logits, target, weight, byte_lengths, num_items, options):
            import os
            if (logits == 0.5).all() and "HURRY" in os.environ:
                raise KeyboardInterrupt
            return F.cross_entropy(logits, target, ignore_index=options.ignore_index)
        """,
    )
    path = tmp_path / "a.json"
    words = ["-b", "impatient,quack", "--kind", "ordinary,equal,wide"]
    monkeypatch.setenv("HURRY", "1")
    accuracy_of(path, *words, status=130)
    report = read_report(path)
    report.accuracy[0]["result_abs"] = 0.125
    report.write(path)
    monkeypatch.delenv("HURRY")
    found = accuracy_of(path, *words, "--resume", str(path)).accuracy
    kinds = ["ordinary", "equal", "wide"]
    assert [(row["kind"], row["backend"]) for row in found] == [(k, b) for k in kinds for b in ("impatient", "quack")]
    assert [row["status"] for row in found] == ["ok", "unavailable"] * 3
    assert found[0]["result_abs"] == 0.125
    assert all(row["result_abs"] < 1e-3 for row in found[2::2])


@pytest.mark.parametrize(
    ("stale", "again"), [({}, False), ({"version": "0"}, True), ({"status": "unavailable"}, True)], ids=str
)
def test_resuming_measures_again_what_no_longer_holds_and_keeps_the_others(stale, again, make_row, tmp_path):
    path = tmp_path / "a.json"
    accuracy_of(path, "-b", "torch,torch-nn", "--kind", "ordinary")
    before = read_report(path)
    before.rows = [make_row()]
    before.accuracy[0] |= {"result_abs": 0.125, **stale}
    other = {**before.accuracy[0], "kind": "sure"}
    before.accuracy.append(other)
    before.write(path)
    after = accuracy_of(path, "-b", "torch,torch-nn", "--kind", "ordinary,equal", "--resume", str(path))
    assert (after.accuracy[0]["result_abs"] < 1e-5) == again
    assert after.accuracy[0]["status"] == "ok"
    assert after.accuracy[1] == before.accuracy[1]
    assert [row["kind"] for row in after.accuracy] == ["ordinary", "ordinary", "equal", "equal", "sure"]
    assert after.accuracy[-1] == other
    assert after.rows == before.rows
    assert {source["settings"]["shape"] for source in after.sources} == {"8x20"}


def test_errors_of_another_device_or_seed_are_not_taken_over(tmp_path):
    path = tmp_path / "a.json"
    accuracy_of(path, "-b", "torch", "--kind", "ordinary", "--seed", "3")
    kept = path.read_bytes()
    words = ["-b", "torch", "--kind", "ordinary", "--resume", str(path)]
    assert "the earlier errors are of seed 3, these of seed 0" in accuracy_of(path, *words, status=2)
    Report({"device": "another"}).write(tmp_path / "b.json")
    words[-1] = str(tmp_path / "b.json")
    assert "the earlier run is of another, this one of " in accuracy_of(path, *words, status=2)
    assert path.read_bytes() == kept
