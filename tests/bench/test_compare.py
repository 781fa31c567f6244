"""Merging and comparing runs."""

from __future__ import annotations

import io

import pytest
from loss_bench.cli import app
from loss_bench.compare import compare, comparison_table
from loss_bench.results import Report, merge
from rich.console import Console
from typer.testing import CliRunner


def report(*rows):
    return Report({"device": "fake", "torch": "2"}, rows=list(rows))


def timed(median, half=0.0):
    return {"median_ms": median, "low_ms": median - half, "high_ms": median + half, "samples": 9}


@pytest.fixture
def pair(make_row):
    """A function that makes a change of one row from its old and new median and half-width."""

    def make(old, new, half=0.0, **fields):
        rows = [make_row(**{**timed(t, half), **(fields if t is new else {})}) for t in (old, new)]
        (change,) = compare(report(rows[0]), report(rows[1]))
        return change

    return make


def test_ratio_and_interval(pair):
    change = pair(2.0, 3.0, half=0.5)
    assert change.ratio == 1.5
    assert (change.low, change.high) == (2.5 / 2.5, 3.5 / 1.5)
    assert change.word == "same"


@pytest.mark.parametrize(
    ("old", "new", "half", "above", "fails", "word"),
    [
        (2.0, 3.0, 0.1, 1.2, True, "slower"),
        (2.0, 3.0, 0.1, 1.6, False, "slower"),
        (2.0, 3.0, 1.0, 1.2, False, "same"),
        (3.0, 2.0, 0.1, 1.2, False, "faster"),
    ],
)
def test_failing_takes_both_the_ratio_and_certainty(pair, old, new, half, above, fails, word):
    change = pair(old, new, half)
    assert change.fails(above) is fails
    assert change.word == word


@pytest.mark.parametrize(
    "few", [{"samples": 1}, {"samples": 5}, {"low_ms": None, "high_ms": None}, {"low_ms": None, "high_ms": 3.0}]
)
def test_nothing_is_sure_without_an_interval(pair, few):
    change = pair(2.0, 3.0, 0.1, **few)
    assert (change.ratio, change.low, change.high) == (1.5, None, None)
    assert change.word == "fewer than 6 samples"
    assert not change.fails(1.2)
    assert pair(2.0, 3.0, 0.1, samples=6).fails(1.2)


def test_measurements_that_differ_in_options_or_device_alone_can_be_told_apart(make_row):
    def lines(*rows):
        console = Console(width=200, record=True, file=io.StringIO())
        console.print(comparison_table(compare(report(*rows), report(*rows)), None))
        return console.export_text()

    plain, smooth = make_row(**timed(1.0)), make_row(**timed(2.0), options="label_smoothing=0.1")
    other = make_row(**timed(3.0), device="[other]")
    shown = lines(plain, smooth, other)
    for words in ("options", "label_smoothing=0.1", "device", "fake", "[other]"):
        assert words in shown
    assert "options" not in lines(plain)
    assert "device" not in lines(plain, smooth)


def test_a_row_that_broke_fails(make_row):
    (change,) = compare(report(make_row(median_ms=1.0)), report(make_row(status="wrong", reason="NaN")))
    assert change.fails(float("inf"))
    assert change.word == "now wrong"


def test_only_the_same_measurement_is_compared(make_row):
    old = report(make_row(median_ms=1.0), make_row(median_ms=1.0, dtype="bfloat16"))
    new = report(make_row(median_ms=2.0, device="other"), make_row(median_ms=4.0, dtype="bfloat16"))
    assert [change.ratio for change in compare(old, new)] == [4.0]


def test_merge_keeps_the_last_and_all_devices(make_row):
    old = report(make_row(median_ms=1.0), make_row(median_ms=5.0, backend="ours"))
    merged = merge([old, report(make_row(median_ms=2.0)), report(make_row(median_ms=3.0, device="other"))])
    assert [(row.backend, row.device, row.median_ms) for row in merged.rows] == [
        ("torch-nn", "fake", 2.0),
        ("ours", "fake", 5.0),
        ("torch-nn", "other", 3.0),
    ]


def test_commands(make_row, tmp_path):
    old, new, merged = tmp_path / "old.json", tmp_path / "new.json", tmp_path / "merged.json"
    report(make_row(**timed(1.0))).write(old)
    report(make_row(**timed(2.0))).write(new)

    def invoke(*words):
        return CliRunner().invoke(app, [str(word) for word in words])

    assert invoke("compare", old, new).exit_code == 0
    assert invoke("compare", old, new, "--fail-above", "1.5").exit_code == 1
    assert invoke("compare", new, old, "--fail-above", "1.5").exit_code == 0
    shown = invoke("report", old, new, "--markdown", tmp_path / "r.md", "--csv", tmp_path / "r.csv", "--json", merged)
    assert "2.000" in shown.output
    assert "2.000" in (tmp_path / "r.md").read_text()
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 2
    report(make_row(median_ms=2.0, op="softmax")).write(new)
    assert "no measurement in common" in invoke("compare", old, new).output
