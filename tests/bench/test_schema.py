"""The JSON Schema of the files: one, complete, and followed by what is written and by what is committed."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from loss_bench.accuracy import Accuracy
from loss_bench.cli import app
from loss_bench.results import SCHEMA, STATUSES, Report, Row, environment, merge, schema_text
from loss_bench.train import Curve
from typer.testing import CliRunner

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema, of the development environment, is not installed")

SCHEMA_FILE = json.loads(schema_text())
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
pytestmark = pytest.mark.usefixtures("quick_measurements")


@pytest.fixture
def report(make_row):
    return Report(environment(torch.device("cpu")), rows=[make_row(median_ms=1.0, loss_error=float("nan"))])


def test_schema_file_names_every_field():
    row_fields = {field.name.replace("pass_", "pass") for field in fields(Row)}
    assert set(SCHEMA_FILE["$defs"]["row"]["properties"]) == row_fields
    assert set(SCHEMA_FILE["$defs"]["curve"]["properties"]) == {field.name for field in fields(Curve)}
    assert set(SCHEMA_FILE["$defs"]["accuracy"]["properties"]) == {field.name for field in fields(Accuracy)}
    assert set(SCHEMA_FILE["properties"]) == {field.name for field in fields(Report)} | {"schema"}
    for part in (SCHEMA_FILE, *(SCHEMA_FILE["$defs"][name] for name in ("row", "curve", "accuracy", "source"))):
        # What was added later is no duty of the files that are there.
        assert set(part["required"]) <= set(part["properties"])
    assert SCHEMA_FILE["$id"] == SCHEMA_FILE["properties"]["schema"]["const"] == SCHEMA
    assert tuple(SCHEMA_FILE["$defs"]["status"]["enum"]) == STATUSES


def validate(path):
    jsonschema.Draft202012Validator(SCHEMA_FILE).validate(json.loads(path.read_text()))


def test_the_schema_is_one_and_is_printed():
    jsonschema.Draft202012Validator.check_schema(SCHEMA_FILE)
    result = CliRunner().invoke(app, ["schema"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == SCHEMA_FILE


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_follow_the_schema(path):
    validate(path)


@pytest.mark.parametrize(
    "words",
    [
        ["run", "cross_entropy", "softmax", "--shape", "4x10", "--iters", "2", "-b", "torch-nn,off,refuse,quack"],
        ["accuracy", "--shape", "4x10", "--dtype", "fp16", "-b", "torch-nn,nan,crash"],
        ["train", "--steps", "3", "--batch", "2", "--context", "16", "-b", "torch-nn,nan,crash"],
    ],
    ids=lambda words: words[0],
)
def test_what_the_commands_write_follows_the_schema(bad_backends, words, tmp_path):
    path = tmp_path / "r.json"
    result = CliRunner().invoke(app, [*words, "--device", "cpu", "--in-process", "--quiet", "--json", str(path)])
    assert result.exit_code == 1, result.output
    validate(path)


def test_merged_files_follow_the_schema(report, tmp_path):
    merge([report, report]).write(tmp_path / "merged.json")
    validate(tmp_path / "merged.json")


def test_the_schema_refuses_what_no_file_may_hold(report, tmp_path):
    report.rows[0].median_ms = -1.0
    report.write(tmp_path / "r.json")
    with pytest.raises(jsonschema.ValidationError, match="-1.0 is less than the minimum of 0"):
        validate(tmp_path / "r.json")
