"""The command on a real GPU: numbers that can be true, and a context that a backend leaves unusable."""

from __future__ import annotations

import time

import pytest
import torch
from loss_bench import measure
from loss_bench.cli import app
from loss_bench.results import read_report
from typer.testing import CliRunner

pytestmark = pytest.mark.gpu


def run(path, *words, status=0):
    result = CliRunner().invoke(app, ["run", *words, "--iters", "9", "-q", "--json", str(path)])
    assert result.exit_code == status, result.output
    return {(row.op, row.backend, row.pass_): row for row in read_report(path).rows}


def test_numbers_are_plausible(tmp_path):
    rows = run(tmp_path / "r.json", "cross_entropy", "softmax", "--shape", "4096x16384", "-b", "torch-nn,torch")
    ceilings = read_report(tmp_path / "r.json").ceilings
    assert 100 < ceilings["copy_gb_s"] < 20_000
    logits_mib = 4096 * 16384 * 2 / 2**20
    for (op, backend, pass_), row in rows.items():
        assert row.status == "ok", (op, backend, pass_, row.reason)
        assert 0 < row.p20_ms <= row.median_ms <= row.p80_ms
        assert 1 < row.host_us < 200_000
        if row.copy_share is not None:
            # Reading alone may be a little faster than copying; other tests may have had the GPU during the copy.
            assert 0 < row.copy_share < 10
        if pass_ == "forward+backward":
            assert row.peak_mib >= logits_mib
        assert row.loss_error < 1e-2
    assert rows["cross_entropy", "torch-nn", "no-grad"].graph_ms > 0
    assert 0 < rows["softmax", "torch-nn", "forward+backward"].graph_share < 10


def test_memory_is_that_of_the_pass(install_backend, tmp_path):
    install_backend(
        "hungry",
        """
        OPS = ("linear_cross_entropy",)
        def linear_cross_entropy(input, linear_weight, target, linear_bias, weight, byte_lengths, num_items, options):
            torch.empty(96 << 20, dtype=torch.int8, device=input.device)
            return F.cross_entropy(input @ linear_weight.T, target, ignore_index=options.ignore_index)
        """,
    )
    words = ["linear_cross_entropy", "--shape", "64x64x512", "--dtype", "fp32", "-b", "hungry", "--no-graph"]
    rows = run(tmp_path / "r.json", *words)
    peaks = {pass_: row.peak_mib for (_, _, pass_), row in rows.items()}
    for pass_ in ("forward", "forward+backward", "no-grad"):
        assert 96 <= peaks[pass_] < 98
    # What the forward half took and gave back is not the backward half's; logits and gradients are a few 100 KiB.
    assert 0 < peaks["backward"] < 2


def test_a_linear_cross_entropy_is_compared_with_a_matrix_product(tmp_path):
    words = ["linear_cross_entropy", "--shape", "2048x512x16384", "--dtype", "bf16", "-b", "torch-nn"]
    rows = run(tmp_path / "r.json", *words)
    mib = {"logits": 2048 * 16384 * 2 / 2**20, "gradients": (2048 + 16384) * 512 * 2 / 2**20}
    for (_, _, pass_), row in rows.items():
        assert row.status == "ok", row.reason
        assert row.peak_mib >= mib["logits"] + (mib["gradients"] if "backward" in pass_ else 0)
        if pass_ != "backward":
            # Other tests may have had the GPU during either of the two measurements.
            assert 0 < row.matmul_share < 10
    assert rows["linear_cross_entropy", "torch-nn", "no-grad"].graph_matmul_share > 0


def test_the_host_is_no_part_of_the_time():
    device = torch.device("cuda", torch.cuda.current_device())
    timer = measure.make_timer(device)

    class Slow:
        x = torch.zeros(1024, device=device)

        def prepare(self, index): ...

        def run(self, index):
            for _ in range(20):
                self.x.add_(1)
                time.sleep(1e-4)

        def finish(self, index): ...

    # 2 ms of host, a few microseconds of GPU each time; other tests may take the GPU for some of the iterations.
    assert min(timer.time(Slow(), 15, 1)) < 1.0


def test_an_unusable_context_costs_nobody_else_a_row(install_backend, tmp_path):
    install_backend(
        "poison",
        """
        def cross_entropy(logits, target, weight, byte_lengths, num_items, options):
            beyond = torch.full((1,), 10**6, device=logits.device)
            return F.cross_entropy(logits, target) + logits.flatten()[:4][beyond].sum()
        """,
    )
    rows = run(tmp_path / "r.json", "--shape", "64x128", "-b", "torch-nn,poison,torch", "--pass", "forward", status=1)
    status = {backend: row.status for (_, backend, _), row in rows.items()}
    assert status == {"torch-nn": "ok", "poison": "crashed", "torch": "ok"}


def test_training_curves_agree(tmp_path):
    names = "torch-nn,torch"
    words = ["--steps", "20", "--batch", "4", "--context", "64", "-q", "--json", str(tmp_path / "c.json")]
    result = CliRunner().invoke(app, ["train", "-b", names, *words])
    assert result.exit_code == 0, result.output
    first, second = read_report(tmp_path / "c.json").train
    assert torch.cuda.is_available()
    assert first["peak_mib"] > 0
    assert second["loss_ms"] > 0
