"""The record of the last session on a GPU belongs to the kernels that are here."""

import json
from pathlib import Path

import pytest
from support.record import GpuRecord, kernel_digest


@pytest.mark.parametrize(
    ("name", "backends"), [("gpu-record", ("triton", "cutedsl")), ("gpu-record-oldest-dsl", ("cutedsl",))]
)
def test_the_record_is_of_these_kernels(name, backends):
    file = Path(__file__).with_name(f"{name}.json")
    if not file.exists():
        pytest.skip(f"tests/{name}.json does not exist: the kernels have not been tested on a GPU")
    record = json.loads(file.read_text())
    if record["kernel_sources_sha256"] != kernel_digest():
        pytest.skip(
            "THE KERNELS WERE CHANGED after they were tested on a GPU, with "
            f"{record['total']['failed']} failures then: run the tests there and record again"
        )
    assert record["total"]["failed"] == 0
    assert record["total"]["passed"] > 0
    for backend in backends:
        assert record["tests"]["tests/test_cross_entropy.py"][backend]["passed"] > 0


class Report:
    def __init__(self, nodeid, outcome, when="call", backend=None):
        self.nodeid, self.outcome, self.when = nodeid, outcome, when
        self.passed = outcome == "passed"
        self.user_properties = [("backend", backend)] if backend else []


def test_the_record_counts_each_outcome_once():
    record = GpuRecord()
    for report in (
        Report("tests/a.py::one", "passed", "setup", "triton"),
        Report("tests/a.py::one", "passed", "call", "triton"),
        Report("tests/a.py::one", "passed", "teardown", "triton"),
        Report("tests/a.py::two", "skipped", "setup", "triton"),
        Report("tests/a.py::two", "passed", "teardown", "triton"),
        Report("tests/a.py::three", "failed", "call", "torch"),
        Report("tests/b.py::four", "failed", "setup"),
    ):
        record.pytest_runtest_logreport(report)
    assert {file: {b: dict(c) for b, c in by.items()} for file, by in record._counts.items()} == {
        "tests/a.py": {"triton": {"passed": 1, "skipped": 1}, "torch": {"failed": 1}},
        "tests/b.py": {"-": {"failed": 1}},
    }


def test_the_record_is_written_before_the_workers_are_ended():
    """What ends them, of pytest-xdist, may wait for one until the session itself is ended."""

    class Workers:
        def pytest_sessionfinish(self):
            """In their place; registered last, it would be called first."""

    manager, record = pytest.PytestPluginManager(), GpuRecord()
    manager.register(record)
    manager.register(Workers())
    # They are called from the last to the first.
    assert manager.hook.pytest_sessionfinish.get_hookimpls()[-1].plugin is record


def test_the_digest_changes_with_a_kernel(tmp_path, monkeypatch):
    package = tmp_path / "loss_triton"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "loss_triton", raising=False)
    digests = []
    for source in ("a = 1\n", "a = 2\n", "a = 1\n"):
        (package / "kernel.py").write_text(source)
        digests.append(kernel_digest())
    assert digests[0] == digests[2] != digests[1]
