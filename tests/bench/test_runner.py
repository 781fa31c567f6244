"""The order of things within a case, on a fake timer; and how peers are called, on fake libraries."""

from __future__ import annotations

import statistics
import sys
import types

import loss_core
import pytest
import torch
import torch.nn.functional as F
from loss_bench import measure, runner
from loss_bench.calls import make_call
from loss_bench.cases import Case, Options
from loss_bench.check import check
from loss_bench.inputs import random_inputs, sets_needed
from loss_bench.peers import requirements
from loss_bench.results import INPUTS_TOO_LARGE, OUT_OF_MEMORY
from loss_bench.runner import CaseRunner, Plan, chosen_backends, first_line

CPU = torch.device("cpu")
CASE = Case("cross_entropy", 4, 10, "float32")
pytestmark = pytest.mark.usefixtures("quick_measurements")


class FakeTimer:
    """Every pass takes as many milliseconds as its turn; remembers who was timed."""

    def __init__(self):
        self.log = []

    def estimate(self, work):
        return 1.0

    def time(self, work, iterations, warmup):
        self.log.append((getattr(work, "pass_", "copy"), iterations, warmup))
        return [float(len(self.log))] * iterations


def run(names, *, plan=None, case=CASE):
    announced = []
    timer = FakeTimer()
    plan = plan or Plan(backends=names, passes=("forward",), iterations=9, warmup=4)
    runner = CaseRunner(plan, CPU, lambda text, backend: announced.append((text, backend)), timer=timer)
    return runner.run_case(case, {}), announced, timer.log[1:]


def test_backends_take_turns_and_share_the_iterations():
    rows, announced, log = run(("torch-nn", "torch"))
    turns = [backend for text, backend in announced if "forward: torch" in text]
    assert turns == ["torch-nn", "torch"] * 4
    assert log == [("forward", 3, 4)] * 2 + [("forward", 3, 1)] * 4
    assert [row.samples for row in rows] == [9, 9]
    # torch-nn had turns 2, 4, 6 of the clock, torch 3, 5, 7; the first was the copy.
    assert [row.median_ms for row in rows] == [4.0, 5.0]
    assert [row.speedup for row in rows] == [1.0, 4.0 / 5.0]


@pytest.mark.parametrize(("seconds", "samples"), [(None, 9), (1000.0, 9), (0.0, 3)])
def test_a_case_that_is_short_of_time_has_fewer_iterations_and_every_check(seconds, samples):
    plan = Plan(backends=("torch-nn", "torch"), passes=("forward", "no-grad"), iterations=9)
    rows = CaseRunner(plan, CPU, timer=FakeTimer()).run_case(CASE, {}, seconds)
    assert [row.samples for row in rows] == [samples] * 4
    assert all(row.loss_error is not None for row in rows)


def test_a_host_that_could_not_be_timed_is_not_timed_again_with_the_next_case(monkeypatch):
    asked = []

    def raising(works, device, **options):
        asked.append(list(works))
        return {}

    monkeypatch.setattr(measure, "host_microseconds", raising)
    plan = Plan(backends=("torch-nn", "torch"), passes=("forward",), iterations=9)
    cases = CaseRunner(plan, CPU, timer=FakeTimer())
    rows = [row for classes in (10, 11) for row in cases.run_case(Case("cross_entropy", 4, classes, "float32"), {})]
    assert [row.host_us for row in rows] == [None] * 4
    # Each alone, then together those that could be: none.
    assert asked == [["torch-nn"], ["torch"], []]


def test_backends_that_are_not_named_are_not_imported(install_backend):
    install_backend("costly", "raise AssertionError('imported')\n")
    assert [row.name for row in chosen_backends(("torch",), CPU)] == ["torch"]
    assert "bench_fixture_costly" not in sys.modules


def test_every_backend_is_checked_before_any_is_timed_and_wrong_ones_never_are(bad_backends):
    rows, announced, log = run(("off", "torch-nn", "nan"))
    kinds = ["check" if "checking" in text else "time" for text, backend in announced if backend]
    assert kinds == sorted(kinds)
    assert len(log) == 3
    assert {row.backend: row.status for row in rows} == {"off": "wrong", "torch-nn": "ok", "nan": "wrong"}


def test_bandwidth_comes_from_the_same_process(bad_backends):
    rows, *_ = run(("torch-nn",))
    copied = 2 * 64 * measure._MIB / 1e-3 / 1e9
    assert rows[0].gb_s == pytest.approx((4 * 10 * 4 + 4 * 8) / (rows[0].median_ms * 1e-3) / 1e9)
    assert rows[0].copy_share == pytest.approx(rows[0].gb_s / copied)


@pytest.mark.parametrize("op", ["cross_entropy", "causal_lm_loss", "linear_cross_entropy", "softmax"])
def test_rows_that_are_ignored_need_not_be_read_and_are_no_operations(op):
    case = Case(op, 40, 10, "float32", Options(ignored=0.4).fitting(op), 16 if op == "linear_cross_entropy" else None)
    plan = Plan(backends=("torch-nn",), passes=("forward", "forward+backward", "no-grad"), iterations=3)
    rows = CaseRunner(plan, CPU, timer=FakeTimer()).run_case(case, {})
    sets = random_inputs(case, CPU, seed=0, sets=sets_needed(case, 32 << 20)).target
    labels = [labels[0, 1:] if op == "causal_lm_loss" else labels for labels in sets]
    kept = statistics.mean(sum(label >= 0 for label in each.tolist()) for each in labels or [torch.zeros(40)])
    assert op == "softmax" or 15 < kept < 30
    moved = {
        "forward": kept * 10 * 4 + 40 * 8,
        "no-grad": kept * 10 * 4 + 40 * 8,
        "forward+backward": kept * 10 * 4 + 40 * 10 * 4 + 40 * 8,
    }
    if op == "softmax":
        moved = {"forward": 2 * 1600, "no-grad": 2 * 1600, "forward+backward": 5 * 1600}
    for row in rows:
        if op == "linear_cross_entropy":
            products = 3 if row.pass_ == "forward+backward" else 1
            assert row.tflop_s * row.median_ms * 1e9 == pytest.approx(products * 2 * kept * 16 * 10)
            assert row.gb_s is None
        else:
            assert row.gb_s * row.median_ms * 1e6 == pytest.approx(moved[row.pass_])


@pytest.mark.parametrize(("iterations", "turns"), [(1, [(1, 4)]), (2, [(1, 4), (1, 1)]), (3, [(1, 4), (1, 1), (1, 1)])])
def test_the_first_iterations_are_warmed_up_however_few_there_are(iterations, turns):
    plan = Plan(backends=("torch-nn",), passes=("forward", "no-grad"), iterations=iterations, warmup=4)
    *_, log = run((), plan=plan)
    assert log == [(pass_, *turn) for pass_ in ("forward", "no-grad") for turn in turns]


@pytest.mark.parametrize("shape", [(1 << 24, 1 << 24), (1 << 40, 1 << 40)], ids=["pages", "64 bits"])
@pytest.mark.parametrize("names", [("torch-nn", "torch"), ("torch-nn",)], ids=" ".join)
def test_inputs_that_do_not_fit_are_nobodys_failure(names, shape):
    rows, *_ = run(names, case=Case("cross_entropy", *shape, "float32"))
    assert {(row.status, row.reason) for row in rows} == {("unsupported", INPUTS_TOO_LARGE)}


def test_a_backend_that_asks_for_too_much_is_out_of_memory(install_backend):
    signature = "def cross_entropy(logits, target, weight, byte_lengths, num_items, options):\n"
    install_backend("greedy", signature + "    return logits.new_empty(1 << 24, 1 << 24).sum()\n")
    install_backend("python", signature + "    raise MemoryError\n")
    rows, *_ = run(("greedy", "python", "torch-nn"))
    assert [(row.status, row.reason) for row in rows] == [("unsupported", OUT_OF_MEMORY)] * 2 + [("ok", "")]


def test_a_backend_that_breaks_later_loses_the_rest_only(install_backend):
    install_backend(
        "tired",
        """
        calls = []
        def cross_entropy(logits, target, weight, byte_lengths, num_items, options):
            calls.append(1)
            if len(calls) > 3:
                raise RuntimeError("too tired")
            return F.cross_entropy(logits, target, ignore_index=options.ignore_index)
        """,
    )
    plan = Plan(backends=("tired", "torch-nn"), passes=("forward", "no-grad"), iterations=3)

    class Working(FakeTimer):
        def time(self, work, iterations, warmup):
            for index in range(iterations if hasattr(work, "call") else 0):
                work.prepare(index)
                work.run(index)
            return super().time(work, iterations, warmup)

    runner = CaseRunner(plan, CPU, timer=Working())
    rows = {(row.backend, row.pass_): row for row in runner.run_case(CASE, {})}
    assert rows["tired", "forward"].reason == "RuntimeError: too tired"
    assert rows["tired", "no-grad"].status == "error"
    assert rows["torch-nn", "forward"].status == rows["torch-nn", "no-grad"].status == "ok"


def test_the_environment_is_looked_at_before_this_process_uses_the_device(monkeypatch):
    timer = FakeTimer()
    seen = []
    monkeypatch.setattr(runner, "environment", lambda device: seen.append(list(timer.log)) or {})
    monkeypatch.setattr(measure, "make_timer", lambda device: seen.append("timer") or timer)
    CaseRunner(Plan(backends=("torch",)), CPU)
    assert seen == [[], "timer"]


@pytest.mark.parametrize(("times", "note"), [((1.0, 1.0, 1.05), ""), ((1.0, 1.0, 2.0), "unsteady: compare with care")])
def test_samples_that_are_spread_widely_are_said(times, note):
    class Spread(FakeTimer):
        def time(self, work, iterations, warmup):
            return list(times)

    rows = CaseRunner(Plan(backends=("torch-nn",), passes=("forward",), iterations=3), CPU, timer=Spread()).run_case(
        CASE, {}
    )
    assert [row.note for row in rows] == [note]


@pytest.mark.parametrize(("later", "note"), [(0.97, ""), (0.8, "a copy ran at 80% of its first speed")])
def test_a_gpu_that_slows_down_during_a_case_is_said(later, note, monkeypatch):
    cases = CaseRunner(Plan(backends=("torch-nn",), passes=("forward",), iterations=3), CPU, timer=FakeTimer())
    rows = cases.run_case(CASE, {})
    # Only a GPU's clocks are looked at.
    assert [row.note for row in rows] == ["unsteady: compare with care"]
    rows[0].note = ""
    monkeypatch.setattr(cases, "_device", torch.device("cuda"))
    monkeypatch.setattr(cases, "_release", lambda: None)
    monkeypatch.setattr(measure, "copy_gb_s", lambda device, timer: later * cases.ceilings["copy_gb_s"])
    cases._note_drift(rows)
    assert [row.note for row in rows] == [note]


def test_excluded_backends_are_not_run():
    runner = CaseRunner(Plan(backends=("torch", "torch-nn"), passes=("forward",)), CPU, timer=FakeTimer())
    rows = runner.run_case(CASE, {"torch": ("crashed", "boom")})
    assert [(row.backend, row.status) for row in rows] == [("torch", "crashed"), ("torch-nn", "ok")]


def _quack(x, target, lse_partial=None, weight=None, ignore_index=-100, reduction="mean", inplace_backward=False):
    return F.cross_entropy(x, target, weight, ignore_index=ignore_index, reduction=reduction)


def _liger(
    input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean",
    label_smoothing=0.0, lse_square_scale=0.0, softcap=None, return_z_loss=False,
):  # fmt: skip
    return loss_core.cross_entropy(
        input, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing,
        z_loss=lse_square_scale, softcap=softcap, backend="torch",
    )  # fmt: skip


class _LigerCute:
    @staticmethod
    def apply(x, target, weight, ignore_index=-100, z=0.0, smoothing=0.0, reduction="mean", softcap=None, *returns):
        return _liger(x, target, weight, None, ignore_index, None, reduction, smoothing, z, softcap), None, None, None


def _fla(ignore_index, reduction, label_smoothing, logit_scale, lse_square_scale, logit_softcapping):
    return lambda x, y: _liger(
        x, y, None, None, ignore_index, None, reduction, label_smoothing, lse_square_scale, logit_softcapping
    )


LIBRARIES = {
    "quack": ("quack.cross_entropy", "cross_entropy", _quack),
    "liger": ("liger_kernel.transformers.functional", "liger_cross_entropy", _liger),
    "liger-cute": ("liger_kernel.ops.cutedsl.ops.cross_entropy", "LigerCrossEntropyFunction", _LigerCute),
    "fla": ("fla.modules.fused_cross_entropy", "FusedCrossEntropyLoss", _fla),
}


@pytest.mark.parametrize("peer", LIBRARIES)
@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(reduction="sum"),
        Options(weight=True),
        Options(label_smoothing=0.1, z_loss=1e-3, softcap=20.0),
    ],
    ids=Options.describe,
)
def test_peers_pass_every_option_on(peer, options, monkeypatch):
    module, name, function = LIBRARIES[peer]
    stub = types.ModuleType(module)
    setattr(stub, name, function)
    monkeypatch.setitem(sys.modules, module, stub)
    requirements.lazily.cache_clear()
    case = Case("cross_entropy", 20, 30, "float32", options)
    inputs = random_inputs(case, CPU, seed=0, sets=1)
    # Adapters decide by the options alone; whether the library can run is the registry's question.
    call = make_call(case, peer, inputs.weight)
    if (peer == "quack" and options.z_loss) or (peer == "fla" and options.weight):
        with pytest.raises(loss_core.UnsupportedInput):
            check(case, call, inputs, grad=True)
    else:
        verdict = check(case, call, inputs, grad=True)
        assert verdict.right, verdict.reason
    requirements.lazily.cache_clear()


@pytest.mark.parametrize(
    ("name", "op"), [("fla", "softmax"), ("torch-linear", "causal_lm_loss"), ("torch", "linear_cross_entropy")]
)
def test_an_op_that_a_backend_lacks_is_refused_by_name(name, op):
    """In a run and in warm alike, ours and peers."""
    with pytest.raises(loss_core.UnsupportedInput, match=f"has no {op}"):
        make_call(Case(op, 4, 10, "float32"), name)


GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("installed", "body", "reason"),
    [
        (None, "", "a-peer is not installed; pip install 'loss-bench[extra]'"),
        ("1.9", "", "a-peer 1.9 is too old; 1.10 or newer is needed"),
        ("1.10", "raise ImportError('libfoo.so.7')", "import of fake_peer failed: ImportError: libfoo.so.7"),
        ("1.10", "import json.nothing", "import of fake_peer failed: ModuleNotFoundError: No module named"),
        ("1.10", "None.kernel", "import of fake_peer failed: AttributeError: "),
        ("1.10", "", None),
    ],
    ids=["missing", "old", "broken", "incomplete", "changed", "well"],
)  # fmt: skip
def test_why_a_peer_cannot_run(installed, body, reason, tmp_path, monkeypatch):
    if installed is not None:
        info = tmp_path / f"a_peer-{installed}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: a-peer\nVersion: {installed}\n")
    (tmp_path / "fake_peer.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "fake_peer", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    arguments = {"at_least": "1.10", "device": GPU}
    found = requirements.missing_reason("a-peer", "fake_peer", "extra", **arguments, capability=(8, 0))
    sys.modules.pop("fake_peer", None)
    assert found == reason if reason is None else found.startswith(reason)
    if installed == "1.10":
        found = requirements.missing_reason("a-peer", "fake_peer", "extra", **arguments, capability=(9, 0))
        assert found == "needs compute capability 9.0 or newer"


def test_reasons_are_plain_text():
    error = RuntimeError("\x1b[91m\x1b[1merror[INTERNAL]:\x1b[0m no valid IR\n  at kernel.py")
    assert first_line(error) == "error[INTERNAL]: no valid IR"
