"""Whose curve the others are held to, and training that is taken up again."""

from __future__ import annotations

import math

import pytest
from loss_bench.cli import app
from loss_bench.results import Report, read_report
from loss_bench.train import SIZES, Curve, compare_curves
from safetensors.torch import load_file
from typer.testing import CliRunner

SMALL = SIZES["small"]
pytestmark = pytest.mark.usefixtures("quick_measurements")


def curve(backend, *losses):
    return Curve(backend, "fake", "a model", losses=list(losses))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_curve_that_is_not_finite_makes_no_other_one_wrong(bad, place):
    curves = [curve("a", 3.0, 2.0), curve("b", 3.0, 2.0005)]
    curves.insert(place, curve("broken", 3.0, bad))
    compare_curves(curves, SMALL)
    found = {each.backend: (each.status, each.reason) for each in curves}
    assert found == {"a": ("ok", ""), "b": ("ok", ""), "broken": ("wrong", "a loss is NaN or infinite")}
    assert [each.difference for each in curves if each.backend != "broken"] == [0, pytest.approx(5e-4, rel=1e-3)]


def test_all_are_wrong_if_none_is_finite():
    curves = [curve("a", math.nan), curve("b", math.inf)]
    compare_curves(curves, SMALL)
    assert [each.status for each in curves] == ["wrong", "wrong"]


def test_curves_are_held_to_that_of_plain_torch_wherever_it_stands():
    """Each new curve brings a new verdict on all."""
    curves = [curve("astray", 3.0, 2.5)]
    for backend in ("right", "torch-nn"):
        compare_curves(curves, SMALL)
        curves.append(curve(backend, 3.0, 2.0))
    compare_curves(curves, SMALL)
    assert [(each.backend, each.status) for each in curves] == [
        ("astray", "wrong"),
        ("right", "ok"),
        ("torch-nn", "ok"),
    ]
    assert curves[0].reason == "the curve is 0.5 away from torch-nn's"


def test_one_that_did_not_train_is_left_as_it_is():
    curves = [Curve("gone", "fake", "a model", "crashed", "boom"), curve("a", 3.0)]
    compare_curves(curves, SMALL)
    assert (curves[0].status, curves[0].reason, curves[0].difference) == ("crashed", "boom", None)
    assert curves[1].difference == 0


def train(path, *words, status=0):
    """What the command writes; its output if it fails."""
    words = ["train", "--batch", "2", "--context", "8", *words, "-q", "--device", "cpu", "--in-process"]
    result = CliRunner().invoke(app, [*map(str, words), "--json", str(path)])
    assert result.exit_code == status, result.output
    return " ".join(result.output.split()) if status == 2 else read_report(path)


def test_an_interrupted_training_goes_on_with_the_next_backend(install_backend, tmp_path, monkeypatch):
    install_backend(
        "impatient",
        """
        def cross_entropy(logits, target, weight, byte_lengths, num_items, options):
            import os
            if "HURRY" in os.environ:
                raise KeyboardInterrupt
            return F.cross_entropy(logits, target, ignore_index=options.ignore_index)
        """,
    )
    path = tmp_path / "t.json"
    words = ["--steps", "3", "-b", "torch,impatient,torch-nn"]
    monkeypatch.setenv("HURRY", "1")
    before = train(path, *words, status=130)
    assert [curve["backend"] for curve in before.train] == ["torch"]
    before.train[0]["tokens_per_s"] = 0.125
    before.write(path)
    monkeypatch.delenv("HURRY")
    after = train(path, *words, "--resume", path).train
    assert [(curve["backend"], curve["status"]) for curve in after] == [
        ("torch", "ok"), ("impatient", "ok"), ("torch-nn", "ok"),
    ]  # fmt: skip
    assert after[0]["tokens_per_s"] == 0.125
    assert after[0]["losses"] == before.train[0]["losses"]
    assert after[1]["difference"] == after[2]["difference"] == 0


@pytest.mark.parametrize(("stale", "again"), [({}, False), ({"version": "0"}, True)], ids=str)
def test_resuming_trains_again_what_no_longer_holds_and_keeps_the_others(stale, again, make_row, tmp_path):
    path = tmp_path / "t.json"
    before = train(path, "--steps", "2", "-b", "torch")
    before.rows = [make_row()]
    before.backends[0] |= stale
    before.train[0]["tokens_per_s"] = 0.125
    before.write(path)
    train(path, "--steps", "3", "-b", "torch-nn", "--resume", path)
    after = train(path, "--steps", "2", "-b", "torch,torch-nn", "--resume", path)
    found = [(curve["backend"], len(curve["losses"])) for curve in after.train]
    assert found == [("torch", 2), ("torch-nn", 2), ("torch-nn", 3)]
    assert (after.train[0]["tokens_per_s"] > 1) == again
    assert after.rows == before.rows
    assert {source["settings"]["steps"] for source in after.sources} == {2, 3}


def test_a_curve_that_was_wrong_stays_so(bad_backends, tmp_path):
    path = tmp_path / "t.json"
    words = ["--steps", "2", "-b", "torch-nn,nan,crash"]
    before = train(path, *words, status=1)
    after = train(path, *words, "--resume", path, status=1)
    assert after.train == before.train
    assert [curve["status"] for curve in after.train] == ["ok", "wrong", "error"]


def test_curves_that_cannot_be_compared_are_not_taken_over(tmp_path):
    path, text = tmp_path / "t.json", tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 20)
    words = ["--steps", "2", "-b", "torch", "--text", text, "--resume", path]
    before = train(path, *words[:-2])
    kept = path.read_bytes()
    assert "the earlier curves are of seed 0, these of seed 1" in train(path, *words, "--seed", "1", status=2)
    text.write_bytes(bytes(range(255, -1, -1)) * 20)
    assert "the earlier curves are of text_sha256 " in train(path, *words, status=2)
    assert path.read_bytes() == kept
    # Another model is not compared with them.
    assert [len(curve["losses"]) for curve in train(path, *words, "--steps", "1").train] == [1, 2]
    # Files from before the digest name their text alone.
    del before.settings["text_sha256"]
    before.write(path)
    train(path, *words)
    text.rename(tmp_path / "other")
    words[words.index(text)] = tmp_path / "other"
    assert "the earlier curves are of text text, these of text other" in train(path, *words, status=2)
    Report({"device": "another"}).write(path)
    assert "the earlier run is of another, this one of " in train(path, *words, status=2)


def test_logits_are_saved_by_a_training_or_the_command_is_refused(tmp_path):
    path, logits = tmp_path / "t.json", tmp_path / "l.safetensors"
    words = ["--steps", "2", "--save-logits", logits, "-b"]
    train(path, *words, "torch")
    logits.write_text("of before")
    output = train(path, *words, "torch", "--resume", path, status=2)
    assert "no backend is left to train for --save-logits" in output
    assert logits.read_text() == "of before"
    train(path, *words, "torch,torch-nn", "--resume", path)
    assert load_file(logits)["logits"].shape == (16, 256)
