"""The small tables of passes, and that the READMEs' are those of the committed results."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from loss_bench.cli import app
from loss_bench.results import Report
from loss_bench.summary import summary_tables
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]


def table_lines(text):
    return [line for line in text.splitlines() if line.startswith("|")]


def summarize(*words, status=0):
    result = CliRunner().invoke(app, ["report", "--quiet", *(str(word) for word in words)])
    assert result.exit_code == status, result.output
    return result


@pytest.fixture
def report(make_row):
    rows = [
        make_row(rows=64, classes=512, median_ms=1.23456, copy_share=0.246),
        make_row(rows=64, classes=512, backend="ours", median_ms=0.04567, copy_share=1.004),
        make_row(rows=64, classes=512, backend="off", status="wrong", reason="gradient is off by 3.0 times"),
        make_row(rows=64, classes=512, backend="absent", status="unavailable", reason="not installed"),
        make_row(rows=8, classes=9, dtype="float16", median_ms=0.5),
        make_row(rows=8, classes=9, dtype="float16", backend="off", status="crashed", reason="SIGSEGV"),
        make_row(rows=8, classes=9, pass_="no-grad", median_ms=7.0),
    ]
    return Report({"device": "fake"}, rows=rows)


def test_a_line_for_each_case_and_a_column_for_each_backend(report, tmp_path):
    report.write(tmp_path / "r.json")
    summarize(tmp_path / "r.json", "--summary", tmp_path / "s.md")
    text = (tmp_path / "s.md").read_text()
    assert text.startswith("### cross_entropy forward+backward: median ms (share of the limit)\n")
    assert table_lines(text) == [
        "| rows x classes | dtype | torch-nn | ours | off |",
        "| --- | --- | ---: | ---: | ---: |",
        "| 64 x 512 | float32 | 1.235 (25%) | 0.046 (100%) | wrong |",
        "| 8 x 9 | float16 | 0.500 | - | crashes |",
    ]


def test_pass_and_columns_are_chosen(report, tmp_path):
    report.write(tmp_path / "r.json")
    words = [tmp_path / "r.json", "--summary", tmp_path / "s.md"]
    summarize(*words, "--backends", "absent,ours")
    lines = table_lines((tmp_path / "s.md").read_text())
    assert lines[0] == "| rows x classes | dtype | absent | ours |"
    assert lines[2] == "| 64 x 512 | float32 | cannot run | 0.046 (100%) |"
    summarize(*words, "--pass", "no-grad")
    text = (tmp_path / "s.md").read_text()
    assert text.startswith("### cross_entropy no-grad: median ms\n")
    assert table_lines(text)[2:] == ["| 8 x 9 | float32 | 7.000 |"]


@pytest.mark.parametrize(
    ("status", "reason", "word"),
    [
        ("wrong", "result is NaN; gradient is NaN", "NaN"),
        ("wrong", "no gradient", "wrong"),
        ("error", "DSLRuntimeError: error[INTERNAL]: The compiler could not build valid IR", "does not compile"),
        ("error", "CompilationError: at 12:4", "does not compile"),
        ("error", "RuntimeError: no luck", "fails"),
        ("unsupported", "out of memory", "out of memory"),
        ("unsupported", "the inputs do not fit into the device's memory", "out of memory"),
        ("unsupported", "only on Sundays", "refuses"),
        ("unsupported", "has no option to reuse the logits' memory", "refuses"),
        ("unsupported", "needs more shared memory than there is", "refuses"),
        ("timeout", "no sign of life for 300 s", "hangs"),
    ],
)
def test_reasons_in_a_word(make_row, status, reason, word):
    (table,) = summary_tables(
        Report({"device": "fake"}, rows=[make_row(status=status, reason=reason)]), ["forward+backward"]
    )
    assert table.lines == [["4 x 8", "float32", word]]


def test_what_is_not_the_same_measurement_has_a_table_of_its_own(make_row):
    rows = [
        make_row(median_ms=1.0),
        make_row(median_ms=2.0, options="z_loss=0.1"),
        make_row(median_ms=3.0, op="softmax"),
        make_row(median_ms=4.0, device="other"),
    ]
    tables = summary_tables(Report({"device": "fake"}, rows=rows), ["forward+backward"])
    assert [(table.title, table.lines[0][2]) for table in tables] == [
        ("cross_entropy forward+backward on fake: median ms", "1.000"),
        ("cross_entropy forward+backward z_loss=0.1 on fake: median ms", "2.000"),
        ("softmax forward+backward on fake: median ms", "3.000"),
        ("cross_entropy forward+backward on other: median ms", "4.000"),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pass", "no-grad"], "--pass, --op and --backends go with --summary"),
        (["--backends", "ours"], "--pass, --op and --backends go with --summary"),
        (["--summary", "s.md", "--pass", "sideways"], "unknown pass 'sideways'"),
        (["--summary", "s.md", "--pass", "backward"], "no rows of pass 'backward' to summarize; there are: forward+"),
        (
            ["--summary", "s.md", "--op", "softmax"],
            "no rows of op 'softmax' to summarize; there are: cross_entropy",
        ),
        (["--summary", "s.md", "--op", "sigmoid"], "unknown op 'sigmoid'"),
        (
            ["--summary", "s.md", "--backends", "nobody"],
            "no rows of backend 'nobody' to summarize; there are: torch-nn",
        ),
    ],
)
def test_mistakes_are_named(report, words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report.write(tmp_path / "r.json")
    assert message in summarize("r.json", *words, status=2).output
    assert not (tmp_path / "s.md").exists()


def test_several_passes_side_by_side_are_shares(make_row, tmp_path):
    rows = [
        make_row(copy_share=0.246),
        make_row(pass_="no-grad", copy_share=1.004),
        make_row(backend="off", status="wrong", reason="gradient is NaN"),
        make_row(backend="off", pass_="no-grad", status="wrong", reason="result is NaN"),
        make_row(backend="half", copy_share=0.5),
        make_row(backend="half", pass_="no-grad", status="crashed", reason="SIGSEGV"),
        make_row(backend="alone", copy_share=0.75),
        make_row(op="softmax", copy_share=0.9),
    ]
    Report({"device": "fake"}, rows=rows).write(tmp_path / "r.json")
    words = [tmp_path / "r.json", "--summary", tmp_path / "s.md", "--pass", "forward+backward,no-grad"]
    summarize(*words, "--op", "cross_entropy")
    text = (tmp_path / "s.md").read_text()
    assert text.startswith("### cross_entropy forward+backward / no-grad: share of the limit\n")
    assert table_lines(text) == [
        "| rows x classes | dtype | torch-nn | off | half | alone |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        "| 4 x 8 | float32 | 25% / 100% | NaN | 50% / crashes | 75% / - |",
    ]


def load_tables():
    spec = importlib.util.spec_from_file_location("benchmarks_tables", ROOT / "benchmarks" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["README.md", "packages/loss-triton/README.md", "packages/loss-cutedsl/README.md"])
def test_the_tables_of_a_readme_are_those_of_the_committed_results(name):
    tables, path = load_tables(), ROOT / name
    assert path in tables.READMES
    text = path.read_text()
    assert tables.remade(text) == text, "python benchmarks/tables.py makes them again"
    # Nothing is said of a card without such a table.
    assert text.count("<!-- loss-bench report") == text.count("| rows x classes |") >= 4


def test_a_table_that_is_not_of_the_results_is_made_again():
    tables = load_tables()
    text = (ROOT / "README.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("| 8192 x 32000 |"))
    assert tables.remade(text.replace(line, line.replace("0.", "9."))) == text
