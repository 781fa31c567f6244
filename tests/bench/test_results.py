"""The JSON form and the tables."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import fields
from importlib import resources

import pytest
from loss_bench import report as reporting
from loss_bench.accuracy import Accuracy
from loss_bench.results import SCHEMA, STATUSES, Report, Row, read_report
from loss_bench.train import Curve
from rich.console import Console

SCHEMA_FILE = json.loads((resources.files("loss_bench") / "schema.json").read_text())


@pytest.fixture
def report(make_row):
    rows = [
        make_row(median_ms=6.0, p20_ms=5.5, p80_ms=6.5, gb_s=100.0, copy_share=0.25, speedup=1.0, samples=20),
        make_row(backend="ours", median_ms=2.0, p20_ms=1.9, p80_ms=2.1, gb_s=300.0, copy_share=0.75, speedup=3.0),
        make_row(backend="off", status="wrong", reason="gradient is NaN", loss_error=float("nan")),
        make_row(backend="picky", status="unsupported", reason="only | on Sundays"),
        make_row(backend="absent", status="unavailable", reason="not installed"),
    ]
    return Report({"device": "fake", "torch": "2"}, ceilings={"copy_gb_s": 400.0}, rows=rows)


def test_schema_file_names_every_field():
    row_fields = {field.name.replace("pass_", "pass") for field in fields(Row)}
    assert set(SCHEMA_FILE["$defs"]["row"]["required"]) == row_fields == set(SCHEMA_FILE["$defs"]["row"]["properties"])
    curve_fields = {field.name for field in fields(Curve)}
    assert set(SCHEMA_FILE["$defs"]["curve"]["required"]) == curve_fields
    accuracy_fields = {field.name for field in fields(Accuracy)}
    assert set(SCHEMA_FILE["$defs"]["accuracy"]["required"]) == accuracy_fields
    assert set(SCHEMA_FILE["required"]) == {field.name for field in fields(Report)} | {"schema"}
    assert SCHEMA_FILE["$id"] == SCHEMA_FILE["properties"]["schema"]["const"] == SCHEMA
    assert tuple(SCHEMA_FILE["$defs"]["status"]["enum"]) == STATUSES


def test_json_round_trip(report, tmp_path):
    report.write(tmp_path / "deep" / "r.json")
    text = (tmp_path / "deep" / "r.json").read_text()
    assert json.loads(text)["rows"][2]["loss_error"] is None
    found = read_report(tmp_path / "deep" / "r.json")
    assert found.rows[1] == report.rows[1]
    assert found.created == report.created
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["r.json"]


def test_unknown_fields_are_left_out_and_unknown_schemas_refused(report, tmp_path):
    pairs = report.to_json()
    pairs["rows"][0]["colour"] = pairs["mood"] = "blue"
    path = tmp_path / "r.json"
    path.write_text(json.dumps(pairs))
    assert read_report(path).rows[0] == report.rows[0]
    path.write_text(json.dumps({**pairs, "schema": "loss-bench/99"}))
    with pytest.raises(ValueError, match=r"loss-bench/99.*loss-bench/1"):
        read_report(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        read_report(path)


def test_wrong_and_broken_set_the_exit_status_but_missing_does_not(report):
    assert report.has_wrong
    report.rows = [row for row in report.rows if row.status != "wrong"]
    assert not report.has_wrong
    report.train = [Curve("x", "wrong").to_json()]
    assert report.has_wrong


def test_markdown_shows_the_fastest_first_and_every_reason(report):
    text = reporting.to_markdown(report)
    lines = [line for line in text.splitlines() if line.startswith("| 4x8")]
    assert [line.split(" | ")[2] for line in lines] == ["ours", "torch-nn", "off", "picky"]
    assert "75%" in lines[0]
    assert "3.00" in lines[0]
    assert "wrong" in lines[2]
    assert "n/a" in lines[3]
    assert "gradient is NaN" in text
    assert "not run: absent: not installed" in text
    assert len({line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("|")}) == 1


@pytest.mark.parametrize("width", [60, 80, 200])
def test_table_fits_the_console_and_keeps_what_matters(report, width):
    console = Console(width=width, file=io.StringIO())
    reporting.print_report(report, console)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "6.000" in text
    assert "x torch" in text
    assert "…" not in text
    assert ("20-80% ms" in text) == (width == 200)
    assert "peak MiB" not in text


def test_csv_has_the_names_of_the_json_fields(report):
    rows = list(csv.DictReader(io.StringIO(reporting.to_csv(report))))
    assert rows[1]["median_ms"] == "2.0"
    assert rows[1]["pass"] == "forward+backward"


def test_no_path_of_the_machine_is_published(tmp_path):
    file = tmp_path / "found.json"
    report = Report(environment={}, settings={}, ceilings={}, backends=[])
    report.command = ["loss-bench", "run", "cross_entropy", "--json", str(file), "--shape", "4x8"]
    report.write(file)
    assert read_report(file).command == ["loss-bench", "run", "cross_entropy", "--json", "found.json", "--shape", "4x8"]
    assert str(tmp_path) not in file.read_text()
