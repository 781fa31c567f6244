"""Backends that take their process with them, and runs that are taken up again."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import subprocess
import sys

import pytest
import torch
from loss_bench.accuracy import Accuracy
from loss_bench.calls import BackendRow
from loss_bench.cases import Case
from loss_bench.cli import app
from loss_bench.results import Report, merge, new_row, read_report
from loss_bench.runner import BackendLostError, Plan
from loss_bench.session import Session
from loss_bench.train import Curve
from loss_bench.worker import Worker, WorkerError
from typer.testing import CliRunner

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("quick_measurements")
CASES = [Case("cross_entropy", 4, 10, "float32"), Case("cross_entropy", 4, 12, "float32")]
SIGNATURE = "def cross_entropy(logits, target, weight, byte_lengths, num_items, options):\n"


def test_a_lost_backend_costs_nobody_else_a_row(install_backend, starts_take_their_time, tmp_path):
    install_backend("killed", SIGNATURE + "    import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n")
    install_backend("quits", SIGNATURE + "    import os; os._exit(7)\n")
    install_backend("hangs", SIGNATURE + "    import time; time.sleep(600)\n")
    path = tmp_path / "r.json"
    words = ["run", "--shape", "4x10", "-b", "torch-nn,killed,quits,hangs,torch", "--pass", "forward", "--iters", "2"]
    words += ["-q", "--device", "cpu", "--json", str(path), "--time-limit", "5"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1, result.output
    rows = {row.backend: row for row in read_report(path).rows}
    assert {name: (rows[name].status, rows[name].reason) for name in ("killed", "quits", "hangs")} == {
        "killed": ("crashed", "its process was ended by SIGKILL"),
        "quits": ("crashed", "its process ended with exit status 7"),
        "hangs": ("timeout", "no sign of life for 5 s"),
    }
    assert rows["torch-nn"].median_ms > 0
    assert rows["torch"].median_ms > 0


def test_a_worker_that_cannot_start_says_why():
    with pytest.raises(WorkerError, match="no backend named 'nobody'"):
        Worker(Plan(backends=("nobody",)), CPU)


def test_ctrl_c_while_the_worker_starts_ends_it(monkeypatch):
    started = []

    def interrupted(self, child, kind, keep=None):
        started.append(child._process)
        raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "_await", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Worker(Plan(backends=("torch",)), CPU)
    (process,) = started
    assert not process.is_alive()


class FakeExecutor:
    """Runs nothing; loses the backends that it is told to."""

    environment = {"device": "fake"}  # noqa: RUF012
    ceilings = {"copy_gb_s": 1.0}  # noqa: RUF012

    def __init__(self, losses=()):
        self.backends = [BackendRow(name, "d", "1", ("cross_entropy",), True, "") for name in ("a", "b", "c")]
        self.losses = list(losses)
        self.calls, self.seconds = [], []

    def run_case(self, case, excluded, seconds=None, keep=None):
        self.seconds.append(seconds)
        self.calls.append((case.classes, sorted(excluded)))
        loss = self.losses.pop(0) if self.losses else None
        if loss is not None:
            raise loss
        rows = [new_row(case, "forward", backend, "fake") for backend in self.backends]
        for row in rows:
            row.status, row.reason = excluded.get(row.backend, ("ok", ""))
        return rows

    def close(self): ...


PLAN = Plan(passes=("forward",))


def test_each_lost_backend_is_left_out_of_the_next_try():
    executor = FakeExecutor([BackendLostError("b", ("crashed", "x")), BackendLostError("a", ("timeout", "y"))])
    report = Session(executor, PLAN, CASES).run()
    assert executor.calls == [(10, []), (10, ["b"]), (10, ["a", "b"]), (12, [])]
    assert [row.status for row in report.rows] == ["timeout", "crashed", "ok"] + ["ok"] * 3


def test_what_is_left_of_the_time_is_shared_out_among_the_cases_that_are_left():
    executor, times = FakeExecutor(), iter([4.0, 9.0])
    Session(executor, PLAN, CASES, deadline=10.0, now=lambda: next(times)).run()
    assert executor.seconds == [3.0, 1.0]
    late = FakeExecutor()
    Session(late, PLAN, CASES[:1], deadline=10.0, now=lambda: 11.0).run()
    assert late.seconds == [0.0]


def test_a_backend_that_is_lost_twice_is_not_tried_a_third_time():
    cases = [*CASES, Case("cross_entropy", 4, 14, "float32")]
    losses = [BackendLostError("b", ("crashed", "x")), None, BackendLostError("b", ("crashed", "x")), None]
    executor = FakeExecutor(losses)
    report = Session(executor, PLAN, cases).run()
    assert executor.calls == [(10, []), (10, ["b"]), (12, []), (12, ["b"]), (14, ["b"])]
    assert [row.status for row in report.rows if row.backend == "b"] == ["crashed", "crashed", "error"]
    assert report.rows[-2].reason == "not tried again after it was lost 2 times"


def test_a_device_that_is_lost_without_a_culprit_ends_the_case_only():
    report = Session(FakeExecutor([BackendLostError(None, ("error", "gone"))]), PLAN, CASES).run()
    assert [row.status for row in report.rows] == ["error"] * 3 + ["ok"] * 3


def test_the_session_ends_even_if_everything_is_lost():
    losses = [BackendLostError(name, ("crashed", "x")) for name, _ in itertools.product("abc", range(2))]
    report = Session(FakeExecutor(losses), PLAN, CASES[:1]).run()
    assert len(report.rows) == 3


def test_resuming_takes_over_whole_cases_only():
    first = Session(FakeExecutor(), PLAN, CASES).run()
    first.rows = first.rows[:-1]
    executor = FakeExecutor()
    report = Session(executor, PLAN, CASES, earlier=first).run()
    assert executor.calls == [(12, [])]
    assert report.rows[0] is first.rows[0]
    assert len(report.rows) == 6


@pytest.mark.parametrize(
    "stale",
    [{"version": "0"}, {"status": "unavailable"}, {"interrupted": True}],
    ids=["version", "installed since", "interrupted"],
)
def test_resuming_measures_again_what_no_longer_holds(stale):
    first = Session(FakeExecutor(), PLAN, CASES).run()
    first.rows[1] = dataclasses.replace(first.rows[1], **stale)
    executor = FakeExecutor()
    report = Session(executor, PLAN, CASES, earlier=first).run()
    assert executor.calls == [(10, [])]
    assert [row.version for row in report.rows] == ["1"] * 6
    assert {row.status for row in report.rows} == {"ok"}


def test_resuming_keeps_the_rows_that_this_run_is_not_about():
    first = Session(FakeExecutor(), PLAN, CASES).run()
    seen = []
    other = Case("softmax", 4, 10, "float32")
    Session(
        FakeExecutor(), PLAN, [other, *CASES], earlier=first,
        after_case=lambda done, report: seen.append({(row.op, row.classes) for row in report.rows}),
    ).run()  # fmt: skip
    # The file is written over after the first case already, with the second and third still to come.
    assert seen[0] == {("softmax", 10), ("cross_entropy", 10), ("cross_entropy", 12)}


def test_resuming_over_a_merged_file_loses_nothing_of_it(tmp_path):
    first = Session(FakeExecutor(), PLAN, CASES).run()
    first.settings["preset"], first.ceilings, first.command = "seeds", {"copy_gb_s": 7.0}, ["first", "/home/me/x"]
    other = Report({"device": "other", "torch": "1"}, ceilings={"copy_gb_s": 9.0}, command=["second"])
    other.rows = [dataclasses.replace(first.rows[0], device="other")]
    who = ("cross_entropy", 4, 8, "float32", "ordinary", "ours", "d", "1", "other")
    other.accuracy = [Accuracy(*who).to_json()]
    other.train = [Curve("ours", "other", "a model", losses=[1.0]).to_json()]
    other.backends = [{"name": "gone", "distribution": "", "version": "", "ops": [], "available": False, "reason": ""}]
    path = tmp_path / "all.json"
    for _ in range(2):
        merge([other, first] if not path.exists() else [read_report(path)]).write(path)
        before = read_report(path)
        # The fake device is that of the second file.
        resumed = Session(FakeExecutor(), PLAN, CASES, earlier=before).run()
        resumed.command = ["resumed"]
        resumed.write(path)
        after = read_report(path)
        assert after.rows == [*before.rows[1:], before.rows[0]] or after.rows == before.rows
        assert (after.train, after.accuracy) == (other.train, other.accuracy)
        assert [b["name"] for b in after.backends] == ["gone", "a", "b", "c"]
        assert after.presets == {"seeds"}
    assert [source["command"] for source in after.sources] == [["resumed"], ["resumed"], ["second"], ["first", "x"]]
    assert [source["ceilings"]["copy_gb_s"] for source in after.sources] == [1.0, 1.0, 9.0, 7.0]
    assert after.environment == FakeExecutor.environment
    assert after.devices == ["fake", "other"]


def test_resuming_on_another_device_is_refused():
    with pytest.raises(ValueError, match="other"):
        Session(FakeExecutor(), PLAN, CASES, earlier=Report({"device": "other"}))


def test_resuming_with_another_seed_is_refused():
    first = Session(FakeExecutor(), PLAN, CASES).run()
    with pytest.raises(ValueError, match="the earlier rows are of seed 0, these of seed 7"):
        Session(FakeExecutor(), dataclasses.replace(PLAN, seed=7), CASES, earlier=first)


def test_every_finished_case_is_reported_at_once():
    seen = []
    Session(FakeExecutor(), PLAN, CASES, after_case=lambda done, report: seen.append((done, len(report.rows)))).run()
    assert seen == [(1, 3), (2, 6)]


def test_an_interrupted_run_is_resumed_from_its_file(tmp_path):
    path = tmp_path / "r.json"
    words = ["run", "--shape", "4x10", "-b", "torch-nn", "--pass", "forward", "--iters", "2", "-q", "--in-process"]
    words += ["--device", "cpu", "--json", str(path)]
    assert CliRunner().invoke(app, words).exit_code == 0
    first = read_report(path).rows
    resumed = CliRunner().invoke(app, [*words, "--shape", "4x12", "--resume", str(path)])
    assert resumed.exit_code == 0, resumed.output
    assert read_report(path).rows[0] == first[0]
    assert [row.classes for row in read_report(path).rows] == [10, 12]
    other = read_report(path)
    other.environment["device"] = "another"
    other.write(path)
    assert "another" in CliRunner().invoke(app, [*words, "--resume", str(path)]).output


def test_ctrl_c_keeps_the_finished_cases(install_backend, tmp_path):
    install_backend(
        "impatient",
        """
        def cross_entropy(logits, target, weight, byte_lengths, num_items, options):
            if logits.shape[1] == 12:
                raise KeyboardInterrupt
            return F.cross_entropy(logits, target, ignore_index=options.ignore_index)
        """,
    )
    path = tmp_path / "r.json"
    words = ["run", "--shape", "4x10,4x12,4x14", "-b", "impatient", "--pass", "forward", "--iters", "2", "-q"]
    result = CliRunner().invoke(app, [*words, "--in-process", "--device", "cpu", "--json", str(path)])
    assert result.exit_code == 130
    assert [row.classes for row in read_report(path).rows] == [10]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupted_process_keeps_the_finished_passes_of_its_case(install_backend, tmp_path, monkeypatch, number):
    install_backend(
        "sleepy",
        """
        def cross_entropy(logits, target, weight, byte_lengths, num_items, options):
            import os, time
            if not torch.is_grad_enabled():
                time.sleep(float(os.environ["NAP_S"]))
            return F.cross_entropy(logits, target, ignore_index=options.ignore_index)
        """,
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    path = tmp_path / "r.json"
    words = ["run", "--shape", "4x10", "-b", "torch-nn,sleepy", "--pass", "forward,no-grad", "--iters", "3"]
    words += ["--device", "cpu", "--json", str(path)]

    monkeypatch.setenv("NAP_S", "0.4")
    program = [sys.executable, "-m", "loss_bench", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(program, **pipes, text=True, start_new_session=True) as process:
        next(line for line in process.stderr if "no-grad: sleepy" in line)
        # To the worker too, as a terminal and many schedulers do.
        os.killpg(process.pid, number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the run ended within this case" in output
    kept = read_report(path).rows
    assert [(row.backend, row.pass_, row.status) for row in kept] == [
        ("torch-nn", "forward", "ok"), ("sleepy", "forward", "ok"),
    ]  # fmt: skip
    assert all(row.interrupted and row.median_ms > 0 and row.speedup > 0 for row in kept)

    monkeypatch.setenv("NAP_S", "0")
    resumed = CliRunner().invoke(app, [*words, "--in-process", "--quiet", "--resume", str(path)])
    assert resumed.exit_code == 0, resumed.output
    found = read_report(path).rows
    assert len(found) == 4
    assert not any(row.interrupted for row in found)
