"""The JSON form and the tables."""

from __future__ import annotations

import csv
import io
import json

import pytest
from loss_bench import report as reporting
from loss_bench.accuracy import KINDS, Accuracy
from loss_bench.cli import app
from loss_bench.results import SCHEMA, Report, merge, read_report
from loss_bench.summary import summary_tables
from loss_bench.tables import seeds_tables, text_tables
from loss_bench.train import Curve
from rich.console import Console
from typer.testing import CliRunner


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
    for data in (b"{", b"\xff\xfe{}", b""):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"r.json is not JSON"):
            read_report(path)


ROW = {
    "op": "softmax", "rows": 4, "classes": 8, "dtype": "float32", "options": "", "pass": "forward", "backend": "b",
    "distribution": "d", "version": "1", "device": "fake",
}  # fmt: skip


ERRORS = {name: value for name, value in ROW.items() if name not in ("options", "pass")} | {"kind": "ordinary"}
CURVE = {"backend": "b", "device": "fake", "setup": "a model", "losses": [1.0, None]}
SOURCE = {"environment": {}, "settings": {}, "ceilings": {}, "command": [], "created": ""}


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"environment": {}, "rows": [{"op": "x"}]},
        {"environment": {}, "rows": [3]},
        *({"environment": {}, "rows": [], name: 3} for name in ("environment", "rows", "settings", "train", "sources")),
        *(
            {"environment": {}, "rows": [{**ROW, name: value}]}
            for name, value in (
                ("median_ms", "fast"), ("rows", 4.5), ("device", None), ("status", "fine"), ("hidden", "8"),
                ("interrupted", "no"), ("samples", None), ("reason", ["x"]),
            )
        ),
        *(
            {"environment": {"device": "fake"}, "rows": [], **part}
            for part in (
                {"accuracy": [{"backend": "b"}]}, {"accuracy": [{**ERRORS, "grad_ulp": "large"}]},
                {"accuracy": [{**ERRORS, "status": "fine"}]}, {"accuracy": [None]},
                {"train": [{"device": "fake", "setup": "a model"}]}, {"train": [{**CURVE, "losses": "falling"}]},
                {"train": [{**CURVE, "losses": [[1.0]]}]}, {"train": [{**CURVE, "status": None}]},
                {"sources": [{}]}, {"sources": ["a.json"]}, {"sources": [{**SOURCE, "settings": None}]},
                {"backends": [{}]}, {"backends": ["torch"]},
            )
        ),
    ],
    ids=str,
)  # fmt: skip
def test_a_file_that_breaks_the_schema_is_named(broken, tmp_path):
    path = tmp_path / "broken.json"
    parts = {"accuracy": [ERRORS], "train": [CURVE], "sources": [SOURCE], "backends": [{"name": "b", "version": "1"}]}
    path.write_text(json.dumps({"schema": SCHEMA, "environment": {"device": "fake"}, "rows": [ROW], **parts}))
    assert read_report(path).rows[0].op == "softmax"
    path.write_text(json.dumps({"schema": SCHEMA, **broken}))
    with pytest.raises(ValueError, match=r"broken.json does not follow 'loss-bench/1'"):
        read_report(path)
    result = CliRunner().invoke(app, ["report", str(path)])
    assert result.exit_code == 2
    assert "does not follow" in result.output


def test_wrong_and_broken_set_the_exit_status_but_missing_does_not(report):
    assert report.has_wrong
    report.rows = [row for row in report.rows if row.status != "wrong"]
    assert not report.has_wrong
    report.train = [Curve("x", "fake", "a model", "wrong").to_json()]
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


def test_a_backend_that_lacks_the_op_is_a_note_and_no_line(make_row):
    """One that does not do the case alone stays in the table, with the reason."""
    rows = [
        make_row(op="softmax", backend="ours", speedup=1.0),
        make_row(op="softmax", backend="other", status="unsupported", reason="has no softmax"),
        make_row(op="softmax", backend="picky", status="unsupported", reason="the library has no float32"),
    ]
    report = Report({"device": "fake"}, rows=rows)
    text = reporting.to_markdown(report)
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert not any("other" in line for line in lines)
    assert any("picky" in line and "n/a" in line for line in lines)
    assert "not run: other: has no softmax" in text
    (table,) = summary_tables(report, ["forward+backward"])
    assert "other" not in table.columns
    assert "picky" in table.columns


def two_machines(make_row, tmp_path):
    """Files of one run each on two devices, written and merged: the seeds' preset, training and errors."""
    found = []
    for device, copy, ms in (("fast card", 4000.0, 1.0), ("slow card", 3000.0, 2.0)):
        rows = [
            make_row(rows=4096, classes=8192, dtype="float16", pass_=pass_, device=device, median_ms=ms, speedup=1.0,
                     copy_share=0.5)
            for pass_ in ("forward", "backward")
        ]  # fmt: skip
        rows.append(make_row(rows=4096, classes=8192, dtype="float16", pass_="forward", device=device, backend="off",
                             status="wrong", reason="NaN"))  # fmt: skip
        rows.append(make_row(device=device, backend="absent", status="unavailable", reason=f"not on the {device}"))
        who = ("cross_entropy", 4, 8, "float32", "ordinary", "ours", "d", "1")
        report = Report({"device": device, "torch": "2"}, {"preset": "seeds"}, {"copy_gb_s": copy}, rows=rows)
        report.accuracy = [
            Accuracy(
                *who, device, result_ulp=ms, result_abs=1e-9, result_ulp_mean=ms, grad_ulp=0.5, grad_ulp_mean=0.1
            ).to_json()
        ]
        report.train = [Curve("ours", device, "a model", losses=[3.0, 2.0], tokens_per_s=1000 / ms).to_json()]
        path = tmp_path / f"{device}.json"
        report.write(path)
        found.append(read_report(path))
    return merge(found)


def test_results_of_two_machines_stay_apart(make_row, tmp_path):
    text = reporting.to_markdown(two_machines(make_row, tmp_path))
    titles = [line for line in text.splitlines() if line.startswith("### ")]
    for title in (
        "training curves: a model",
        "accuracy: worst error against float64, in units of rounding",
        "cross_entropy, forward and backward",
        "cross_entropy forward",
    ):
        assert [t for t in titles if t.startswith(f"### {title} on")] == [
            f"### {title} on fast card", f"### {title} on slow card",
        ]  # fmt: skip
    for words in ("fast card | torch 2 | copy 4000 GB/s", "slow card | torch 2 | copy 3000 GB/s"):
        assert words in text
    assert "not run on slow card: absent: not on the slow card" in text
    assert text.count("| ours | 3.0000 |") == 2


def test_names_stay_whole_in_a_narrow_terminal():
    who = ("cross_entropy", 4, 8, "float32")
    errors = [
        Accuracy(*who, kind, "torch-compile", "d", "1", "fake", result_ulp=1.0, result_ulp_mean=0.5, grad_ulp=20.0,
                 grad_ulp_mean=2.0, result_abs=1e-9, grad_abs=1e-9).to_json()
        for kind in KINDS
    ]  # fmt: skip
    console = Console(width=80, file=io.StringIO())
    reporting.print_report(Report({"device": "fake"}, accuracy=errors), console)
    assert console.file.getvalue().count("torch-compile") == 3


def test_a_table_of_one_of_the_machines_says_of_which(make_row):
    trained = Report({"device": "slow card"}, train=[Curve("ours", "slow card", "a model", losses=[1.0]).to_json()])
    timed = Report({"device": "fast card"}, rows=[make_row(median_ms=1.0, device="fast card")])
    text = reporting.to_markdown(merge([timed, trained]))
    assert "### training curves: a model on slow card" in text
    assert "### cross_entropy forward+backward on fast card" in text


def test_merged_files_can_be_read_and_merged_again(make_row, tmp_path):
    merged = two_machines(make_row, tmp_path)
    merged.write(tmp_path / "merged.json")
    again = merge([read_report(tmp_path / "merged.json"), read_report(tmp_path / "slow card.json")])
    assert [source["environment"]["device"] for source in again.sources] == ["fast card", "slow card", "slow card"]
    assert len(again.rows) == len(merged.rows)
    assert len(again.train) == len(again.accuracy) == 2
    assert len(reporting.machines(again)) == 2


def test_what_makes_times_unsafe_is_said_first(report, make_row):
    report.environment |= {"device_type": "cuda", "busy_before": 0.28, "processors_busy_before": 0.4}
    lines = reporting.to_markdown(report).splitlines()
    assert lines[1] == "unsafe: the GPU was 28% busy before the run: somebody else is on it  "
    assert "40% busy before the run: host times" in lines[2]
    calm = Report({"device": "calm", "busy_before": 0.02, "processors_busy_before": 0.1}, rows=[make_row()])
    assert reporting.warnings(calm) == []
    assert reporting.warnings(merge([calm, report]))[0].startswith("unsafe on fake: the GPU")


def test_the_seeds_tables_have_their_columns_and_show_what_was_wrong(make_row, tmp_path):
    first, second = seeds_tables(two_machines(make_row, tmp_path))
    assert list(first.columns) == [
        "Backend", "Batch", "Vocab", "Dtype", "Forward (ms)", "Speedup", "Backward (ms)", "Speedup",
    ]  # fmt: skip
    assert first.lines == [
        ["torch-nn", "4096", "8192", "float16", "1.000", "1.00", "1.000", "1.00"],
        ["off", "4096", "8192", "float16", "wrong", "-", "-", "-"],
    ]
    assert second.title.endswith("on slow card")


def test_the_seeds_tables_appear_wherever_the_file_with_their_preset_stands(make_row):
    llm = Report({"device": "fake"}, {"preset": "llm"}, rows=[make_row(median_ms=1.0)])
    seeds = Report({"device": "fake"}, {"preset": "seeds"}, rows=[
        make_row(rows=4096, classes=16384, dtype="bfloat16", pass_="forward", median_ms=1.0)
    ])  # fmt: skip
    for order in ((llm, seeds), (seeds, llm)):
        (table,) = text_tables(merge(order))
        assert [line[:4] for line in table.lines] == [["torch-nn", "4096", "16384", "bfloat16"]]
    assert text_tables(llm) == []


def test_what_a_curve_or_an_error_does_not_say_is_the_default(tmp_path):
    path = tmp_path / "r.json"
    parts = {"rows": [], "accuracy": [ERRORS], "train": [CURVE]}
    path.write_text(json.dumps({"schema": SCHEMA, "environment": {"device": "fake"}, **parts}))
    found = read_report(path)
    assert not found.has_wrong
    assert (found.accuracy[0]["status"], found.train[0]["reason"]) == ("ok", "")
    assert found.train[0]["losses"] == [1.0, None]
    result = CliRunner().invoke(app, ["report", str(path)])
    assert result.exit_code == 0, result.output
    assert "training curves: a model" in result.output


def test_files_from_before_curves_named_their_device_are_read(tmp_path):
    curve, error = Curve("ours", "", "").to_json(), Accuracy("x", 1, 2, *("x" * 5), "").to_json()
    del curve["device"], curve["setup"], error["device"]
    settings = {"steps": 3, "batch": 4, "context": 5, "vocabulary": 256, "layers": 2, "width": 6, "dtype": "float32"}
    Report({"device": "fake"}, settings, train=[curve], accuracy=[error]).write(tmp_path / "old.json")
    found = read_report(tmp_path / "old.json")
    assert found.train[0]["setup"] == "3 steps of 4 x 5 tokens, vocabulary 256, 2 layers of width 6, float32"
    assert found.train[0]["device"] == found.accuracy[0]["device"] == "fake"


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
    report = Report({"device": "fake"}, settings={"logits": str(tmp_path / "step.safetensors"), "seed": 0})
    report.command = ["loss-bench", "run", "cross_entropy", "--json", str(file), "--shape", "4x8"]
    report.write(file)
    assert read_report(file).command == ["loss-bench", "run", "cross_entropy", "--json", "found.json", "--shape", "4x8"]
    assert read_report(file).settings == {"logits": "step.safetensors", "seed": 0}
    assert str(tmp_path) not in file.read_text()
