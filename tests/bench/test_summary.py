"""The small table of one pass, and that the README's is the one of the committed results."""

from __future__ import annotations

import json
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
        Report({"device": "fake"}, rows=[make_row(status=status, reason=reason)]), "forward+backward"
    )
    assert table.lines == [["4 x 8", "float32", word]]


def test_what_is_not_the_same_measurement_has_a_table_of_its_own(make_row):
    rows = [
        make_row(median_ms=1.0),
        make_row(median_ms=2.0, options="z_loss=0.1"),
        make_row(median_ms=3.0, op="softmax"),
        make_row(median_ms=4.0, device="other"),
    ]
    tables = summary_tables(Report({"device": "fake"}, rows=rows), "forward+backward")
    assert [(table.title, table.lines[0][2]) for table in tables] == [
        ("cross_entropy forward+backward on fake: median ms", "1.000"),
        ("cross_entropy forward+backward z_loss=0.1 on fake: median ms", "2.000"),
        ("softmax forward+backward on fake: median ms", "3.000"),
        ("cross_entropy forward+backward on other: median ms", "4.000"),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pass", "no-grad"], "--pass and --backends go with --summary"),
        (["--backends", "ours"], "--pass and --backends go with --summary"),
        (["--summary", "s.md", "--pass", "sideways"], "unknown pass 'sideways'"),
        (["--summary", "s.md", "--pass", "backward"], "no rows of pass 'backward' to summarize; there are: forward+"),
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


@pytest.mark.parametrize("card", ["h100", "h200"])
def test_the_tables_of_the_readme_are_those_of_the_committed_results(card, tmp_path):
    written = tmp_path / "table.md"
    columns = "torch-nn,torch-compile,quack,triton,cutedsl"
    files = [f"benchmarks/results/cross_entropy-{name}{card}.json" for name in ("", "8192-")]
    summarize(*[ROOT / file for file in files], "--summary", written, "--backends", columns)
    of_card = next(part for part in speed_of_the_readme().split("\nOn an ") if part.startswith(card.upper()))
    of_card = of_card.split("\nSoftmax, ")[0]
    assert table_lines(of_card) == table_lines(written.read_text()), (
        f"make it again: loss-bench report {' '.join(files)} --quiet --summary FILE --backends {columns}"
    )


def test_the_softmax_table_of_the_readme_is_that_of_the_committed_results():
    """Shares of the limit in whole per cent, forward / backward, of bfloat16."""
    shares = {}
    for card in ("h200", "h100"):
        for name in ("seeds", "softmax"):
            data = json.loads((ROOT / f"benchmarks/results/{name}-{card}.json").read_text())
            for row in data["rows"]:
                if (row["op"], row["dtype"]) == ("softmax", "bfloat16") and row["copy_share"]:
                    key = f"{row['rows']} x {row['classes']}", card, row["backend"], row["pass"]
                    shares[key] = 100 * row["copy_share"]
    columns = [
        (card, backend) for card in ("h200", "h100") for backend in ("torch-compile", "quack", "triton", "cutedsl")
    ]
    table = table_lines(speed_of_the_readme().split("\nSoftmax, ")[1])
    assert len(table) == 7
    for line in table[2:]:
        case, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for (card, backend), cell in zip(columns, cells, strict=True):
            forward, backward = (shares[case, card, backend, direction] for direction in ("forward", "backward"))
            assert cell == f"{forward:.0f} / {backward:.0f}%", (case, card, backend)


def speed_of_the_readme():
    return (ROOT / "README.md").read_text().split("\n## Speed\n")[1].split("\n## ")[0]
