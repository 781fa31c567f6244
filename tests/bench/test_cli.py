"""The command, run for real on the CPU at tiny sizes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import warnings

import pytest
import torch
from loss_bench.cases import Case, Options
from loss_bench.cli import app
from loss_bench.inputs import read_logits
from loss_bench.results import Report, read_report
from loss_bench.tokens import encode
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

QUICK = ["--iters", "3", "--warmup", "0", "--quiet", "--device", "cpu", "--in-process"]
pytestmark = pytest.mark.usefixtures("quick_measurements")


def invoke(*words, status=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == status, result.output
    return result


def rows_of(path, **wanted):
    rows = read_report(path).rows
    return [row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())]


def test_list_shows_peers_and_why_they_cannot_run():
    output = invoke("list", "--device", "cpu").output
    for words in ("torch-nn", "quack-kernels", "available", "needs a CUDA device"):
        assert words in output


def test_run_measures_every_pass_and_writes_both_files(tmp_path):
    json_file, markdown = tmp_path / "r.json", tmp_path / "r.md"
    result = invoke(
        "run", "cross_entropy", "causal_lm_loss", "softmax", "--shape", "16x100,8x33", "-b", "torch-nn,torch", *QUICK,
        "--json", json_file, "--markdown", markdown,
    )  # fmt: skip
    rows = rows_of(json_file)
    assert len(rows) == 3 * 2 * 4 * 2
    assert {row.status for row in rows} == {"ok"}
    assert all(row.samples == 3 and row.median_ms > 0 and row.host_us > 0 and row.speedup > 0 for row in rows)
    assert all(row.loss_error < 1e-5 for row in rows)
    for row in rows:
        if row.gb_s is not None:
            assert 0 < row.gb_s < 2000
    assert "cross_entropy forward+backward" in result.output
    assert "### softmax backward" in markdown.read_text()


def test_wrong_crashing_and_picky_backends_do_not_end_the_run(bad_backends, tmp_path):
    path = tmp_path / "r.json"
    names = "torch-nn,off,nan,crash,refuse,quits"
    result = invoke("run", "--preset", "tiny", "-b", names, *QUICK, "--json", path, status=1)
    status = {row.backend: (row.status, row.reason) for row in rows_of(path, pass_="forward+backward")}
    assert status["torch-nn"][0] == "ok"
    assert status["off"][0] == "wrong"
    assert "gradient" in status["off"][1]
    assert status["nan"][0] == "wrong"
    assert status["crash"] == ("error", "RuntimeError: no luck today")
    assert status["refuse"] == ("unsupported", "only on Sundays")
    assert status["quits"][0] == "unavailable"
    assert all(row.median_ms is None and row.speedup is None for row in rows_of(path) if row.status != "ok")
    assert rows_of(path, backend="off", pass_="no-grad")[0].status == "ok"
    for words in ("no luck today", "only on Sundays", "import failed: SystemExit"):
        assert words in result.output


def test_unavailable_alone_is_no_failure(tmp_path):
    result = invoke("run", "--preset", "tiny", "-b", "torch-nn,quack", *QUICK)
    assert "not run: quack: needs a CUDA device" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "4by5"], "ROWSxCLASSES"),
        (["--shape", "0x5"], "ROWSxCLASSES"),
        (["--dtype", "int8"], "unknown dtype"),
        (["--backend", "nobody", "--in-process"], "no backend named 'nobody'"),
        (["--pass", "sideways"], "unknown pass"),
        (["--preset", "huge"], "unknown preset"),
        (["--vocab", "gpt9"], "unknown vocabulary"),
        (["--rows", "8"], "--rows goes with --vocab"),
        (["--reduction", "max"], "unknown reduction"),
        (["--device", "tpu"], "tpu"),
        (["tanh"], "unknown op"),
        (["causal_lm_loss", "--reduction", "none"], "scalar reduction"),
        (["--softcap", "-1"], "softcap must be positive, got -1.0"),
        (["--softcap", "inf"], "softcap must be a finite number, got inf"),
        (["--softcap", "nan"], "softcap must be a finite number, got nan"),
        (["--z-loss", "inf"], "z_loss must be a finite number, got inf"),
        (["--device", "gpu-of-my-friend"], "no device is called"),
        (
            ["softmax", "--preset", "tiny", "--weight", "--label-smoothing", "0.1"],
            "label_smoothing=0.1 weight=True is for cross_entropy",
        ),
        (["--resume", "/proc"], "is a directory"),
    ],
)
def test_mistakes_are_named(words, message):
    assert message in invoke("run", *words, status=2).output


WRITES = {
    "run": ["--json", "--markdown"],
    "accuracy": ["--json", "--markdown"],
    "train": ["--json", "--markdown", "--save-logits"],
    "report": ["--json", "--markdown", "--csv", "--html", "--summary", "--plots"],
}


@pytest.mark.parametrize(("command", "option"), [(name, option) for name in WRITES for option in WRITES[name]])
@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("/proc/x", errno.ENOENT),
        ("/proc/version", errno.ENOENT),
        ("/proc/x/deep/r", errno.ENOENT),
        ("{tmp}", errno.EISDIR),
        ("{tmp}/file/r", errno.ENOTDIR),
        ("{tmp}/file/deep/r", errno.ENOTDIR),
        ("{tmp}/" + 300 * "r", errno.ENAMETOOLONG),
        ("{tmp}/link", errno.ENOENT),
    ],
    ids=["proc", "there", "below", "folder", "file", "file-below", "long", "link"],
)
def test_a_file_that_cannot_be_written_is_named_before_anything_is_done(place, reason, command, option, tmp_path):
    """The mistake is all that the command says: no progress, no table."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("/proc/x")
    if option == "--plots":
        # That is a folder, in which there may be files already.
        if place == "{tmp}":
            return
        reason = {"/proc/version": errno.ENOTDIR, "{tmp}/link": errno.EEXIST}.get(place, reason)
    before = tmp_path / "before.json"
    Report({"device": "fake"}).write(before)
    words = {"run": ["--preset", "tiny"], "report": [before], "accuracy": ["-s", "2x3"], "train": ["--steps", "1"]}
    path = place.format(tmp=tmp_path)
    output = invoke(command, *words[command], option, path, status=2).output
    assert output.startswith("error: ")
    said = "".join(output.split())
    assert path in said
    assert said.endswith("cannotbewritten:" + os.strerror(reason).replace(" ", ""))
    assert sorted(found.name for found in tmp_path.iterdir()) == ["before.json", "file", "link"]


def test_links_pipes_and_devices_stay_what_they_are(make_row, tmp_path):
    """To replace a file is to remove what was there, /dev/null as well."""
    before, target, link, pipe = (tmp_path / name for name in ("before.json", "target", "link", "pipe"))
    Report({"device": "fake"}, rows=[make_row(median_ms=1.0)]).write(before)
    target.touch()
    link.symlink_to(target)
    os.mkfifo(pipe)
    for option, first in (("--json", "{"), ("--csv", "op,"), ("--markdown", "")):
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        invoke("report", before, "-q", option, pipe)
        text = os.read(reader, 1 << 16).decode()
        os.close(reader)
        assert pipe.is_fifo()
        invoke("report", before, "-q", option, link)
        assert link.is_symlink()
        assert target.read_text() == text
        assert text.startswith(first)
        assert "torch-nn" in text
    words = ["train", "-b", "torch-nn", "--steps", "1", "--device", "cpu", "--save-logits", pipe]
    assert "pipe cannot be written: it is a pipe or a device" in " ".join(invoke(*words, status=2).output.split())
    assert pipe.is_fifo()


@pytest.mark.parametrize("command", [["run"], ["run", "--in-process"], ["warm"], ["train"], ["accuracy"]], ids=" ".join)
def test_a_misspelt_backend_is_named_and_costs_nothing(command):
    words = [*command, "--backend", "torch-nn,torch-mm", "--device", "cpu"]
    output = " ".join(invoke(*words, status=2).output.split())
    assert "no backend named 'torch-mm' is installed; installed: cce, " in output
    assert "torch-nn" in output


def test_what_is_named_twice_is_measured_once(tmp_path):
    path, twice = tmp_path / "r.json", ["-b", "torch-nn, torch-nn", "-b", "torch-nn"]
    here = ["--quiet", "--device", "cpu", "--in-process", "--json", path]
    invoke("run", "softmax", "softmax", "-s", "4x9,4x9", "--pass", "no-grad,no-grad", *twice, "--iters", "3", *here)
    assert [pairs["name"] for pairs in read_report(path).backends] == ["torch-nn"]
    assert len(rows_of(path)) == 1
    invoke("train", "--steps", "2", "--batch", "2", "--context", "8", *twice, *here)
    assert [curve["backend"] for curve in read_report(path).train] == ["torch-nn"]
    invoke("accuracy", "softmax", "-s", "4x9", "--kind", "equal,equal", "-d", "fp32,float32", *twice, *here)
    assert len(read_report(path).accuracy) == 1


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_train_gives_the_loss_logits_of_the_dtype_that_it_names(dtype, tmp_path):
    saved, path = tmp_path / "step.safetensors", tmp_path / "t.json"
    words = ["train", "-b", "torch", "--steps", "2", "--batch", "2", "--context", "8", "--dtype", dtype]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        invoke(*words, "--quiet", "--device", "cpu", "--in-process", "--save-logits", saved, "--json", path)
    assert load_file(saved)["logits"].dtype == getattr(torch, dtype)
    assert dtype in read_report(path).train[0]["setup"]


def test_options_and_sweeps_reach_the_rows(tmp_path):
    path = tmp_path / "r.json"
    words = ["--vocab", "gpt2,100", "--rows", "2,4", "--dtype", "fp32", "--label-smoothing", "0.1", "--weight"]
    invoke("run", *words, "-b", "torch-nn", "--pass", "no-grad", *QUICK, "--json", path)
    rows = rows_of(path)
    assert [row.shape for row in rows] == ["2x50257", "4x50257", "2x100", "4x100"]
    assert {row.options for row in rows} == {"label_smoothing=0.1 weight=True"}


def test_what_a_peer_lacks_is_shown_in_its_cell(install_backend, tmp_path):
    install_backend(
        "plain",
        """
        from loss_bench.peers.requirements import cross_entropy_with
        PEER = "plain-losses"
        @cross_entropy_with("ignore_index")
        def cross_entropy(logits, target, weight, options):
            return F.cross_entropy(logits, target, ignore_index=options.ignore_index)
        """,
    )
    path = tmp_path / "r.json"
    invoke("run", "--preset", "tiny", "--z-loss", "0.001", "-b", "torch-nn,plain", *QUICK, "--json", path)
    (row,) = rows_of(path, backend="plain", pass_="forward")
    assert (row.status, row.reason) == ("unsupported", "the library has no z_loss")
    assert row.distribution == "plain-losses"
    assert rows_of(path, backend="torch-nn", pass_="forward")[0].status == "ok"


def test_train_agrees_and_its_logits_can_be_timed(tmp_path):
    logits, path, curves = tmp_path / "l.safetensors", tmp_path / "r.json", tmp_path / "c.json"
    words = ["--steps", "6", "--batch", "2", "--context", "16", "--device", "cpu", "-q"]
    invoke("train", "-b", "torch-nn,torch", *words, "--in-process", "--save-logits", logits, "--json", curves)
    first, second = json.loads(curves.read_text())["train"]
    assert len(first["losses"]) == 6
    assert first["losses"][-1] < first["losses"][0]
    assert second["difference"] < 1e-5
    assert load_file(logits)["logits"].shape == (32, 256)
    invoke("run", "--logits", logits, "-b", "torch-nn,torch", *QUICK, "--json", path)
    assert {(row.shape, row.status, row.options) for row in rows_of(path)} == {("32x256", "ok", "logits=l.safetensors")}


def test_real_logits_take_every_option(tmp_path):
    logits = torch.randn(40, 30)
    save_file({"logits": logits, "labels": torch.arange(40) % 30}, tmp_path / "l.safetensors")
    real = read_logits(tmp_path / "l.safetensors")
    case = Case("cross_entropy", 40, 30, "float16", Options(weight=True, ignored=0.5, reduction="none"))
    inputs = real.to_inputs(case, torch.device("cpu"), seed=3, sets=2)
    assert torch.equal(inputs.input[1].detach(), logits.half())
    assert inputs.weight.shape == (30,)
    assert 5 < (inputs.target[0] == -100).sum() < 35
    assert inputs.grad_output[1].shape == (40,)
    words = ["--logits", tmp_path / "l.safetensors", "-b", "torch-nn", "--pass", "no-grad", *QUICK]
    for void in (["--shape", "4x4"], ["--preset", "llm"], ["--vocab", "gpt2", "--rows", "4"]):
        assert "brings a shape of its own" in invoke("run", *words, *void, status=2).output
    invoke("run", "softmax", "cross_entropy", *words, "--dtype", "fp32,fp64", "--json", tmp_path / "r.json")
    assert [row.dtype for row in rows_of(tmp_path / "r.json")] == ["float32", "float64"] * 2
    assert {row.options for row in rows_of(tmp_path / "r.json")} == {"logits=l.safetensors"}


def test_train_finds_a_backend_that_leaves_the_curve(bad_backends, tmp_path):
    words = ["--steps", "8", "--batch", "2", "--context", "16", "--device", "cpu", "-q", "--in-process"]
    result = invoke("train", "-b", "torch-nn,nan,crash", *words, "--json", tmp_path / "c.json", status=1)
    assert " wrong " in result.output
    assert "no luck today" in result.output


def test_training_goes_on_after_a_backend_that_took_its_process_with_it(install_backend, tmp_path):
    signature = "def cross_entropy(logits, target, weight, byte_lengths, num_items, options):\n"
    install_backend("deadly", signature + "    import os; os._exit(7)\n")
    path, logits = tmp_path / "c.json", tmp_path / "l.safetensors"
    words = ["--steps", "3", "--batch", "2", "--context", "16", "--device", "cpu", "-q", "--save-logits", logits]
    invoke("train", "-b", "deadly,torch-nn,torch", *words, "--json", path, status=1)
    curves = json.loads(path.read_text())["train"]
    assert [(curve["backend"], curve["status"]) for curve in curves] == [
        ("deadly", "crashed"), ("torch-nn", "ok"), ("torch", "ok"),
    ]  # fmt: skip
    assert curves[0]["reason"] == "its process ended with exit status 7"
    assert curves[1]["difference"] == 0
    assert load_file(logits)["labels"].shape == (32,)


def test_train_on_tokens_keeps_the_encoding(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers", reason="the extra loss-bench[tokens] is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "t.txt"
    text.write_text("the cat sat on the mat and the dog sat on the cat\n" * 200)
    words = ["train", "-b", "torch-nn,torch", "--text", text, "--vocabulary", "300", "--steps", "3", "--batch", "2"]
    words += ["--context", "8", "--device", "cpu", "-q", "--in-process", "--json", tmp_path / "c.json"]
    invoke(*words)
    (kept,) = (tmp_path / "cache" / "loss-bench").iterdir()
    before = kept.stat().st_mtime_ns
    invoke(*words)
    assert kept.stat().st_mtime_ns == before
    curve = json.loads((tmp_path / "c.json").read_text())["train"][1]
    assert curve["status"] == "ok"
    assert curve["loss_ms"] > 0


def test_tokens_that_cannot_be_kept_are_learnt_again(monkeypatch):
    pytest.importorskip("tokenizers", reason="the extra loss-bench[tokens] is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/x")
    text = b"the cat sat on the mat and the dog sat on the cat\n" * 20
    first = encode(text, 300)
    assert first.max() >= 256
    assert torch.equal(encode(text, 300), first)


def test_text_of_ones_own(tmp_path):
    text = tmp_path / "t.txt"
    text.write_bytes(b"short")
    assert "4096" in invoke("train", "--text", text, "--device", "cpu", status=2).output
    text.write_bytes(bytes(range(256)) * 40)
    words = ["--context", "20000", "--device", "cpu", "-q"]
    assert (
        "has 10240 tokens; more than the context of 20000" in invoke("train", "--text", text, *words, status=2).output
    )
    words = ["--steps", "2", "--batch", "2", "--context", "16", "--device", "cpu", "-q", "--in-process"]
    invoke("train", "--text", text, "-b", "torch-nn", *words)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"logits": torch.zeros(2, 3)}, "no tensor labels"),
        ({"logits": torch.zeros(2, 3), "labels": torch.zeros(3, dtype=torch.long)}, r"\(2, 3\)"),
        ({"logits": torch.zeros(2, 3), "labels": torch.tensor([-100, 3])}, "labels must be -100 or from 0 to 2, got 3"),
    ],
)
def test_files_that_do_not_fit_are_refused(tensors, message, tmp_path):
    save_file(tensors, tmp_path / "l.safetensors")
    output = invoke("run", "--logits", tmp_path / "l.safetensors", status=2).output
    assert message.replace("\\", "") in output.replace("\n", "")


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "l.txt").write_text("logits")
    assert "no safetensors file" in invoke("run", "--logits", tmp_path / "l.txt", status=2).output.replace("\n", "")


def test_results_are_written_though_nobody_reads_the_tables(tmp_path):
    path = tmp_path / "r.json"
    words = [sys.executable, "-m", "loss_bench", "run", "--preset", "tiny", "-b", "torch-nn", "--pass", "no-grad"]
    with subprocess.Popen([*words, *QUICK, "--json", str(path)], stdout=subprocess.PIPE) as process:
        process.stdout.close()
    assert len(rows_of(path)) == 1
    assert path.read_text().count('"budget_s"') == 1


def test_the_version_is_said():
    assert invoke("--version").stdout.startswith("loss-bench 0.")
