"""The linear cross-entropy: its cases, that wrong gradients are found, how peers are called, what the tables say."""

from __future__ import annotations

import json
import re
import sys
import types

import loss_core
import pytest
import torch
import torch.nn.functional as F
from loss_bench import cases, check, compiling, measure, reference, runner
from loss_bench import report as reporting
from loss_bench.calls import make_call
from loss_bench.cases import PRESETS, Case, Options, Size, minimal_bytes, minimal_flop
from loss_bench.choices import SizeWords, choose_cases
from loss_bench.cli import app
from loss_bench.inputs import random_inputs, sets_needed
from loss_bench.peers import requirements
from loss_bench.results import Report, merge, read_report
from loss_bench.runner import CaseRunner, Plan
from loss_bench.summary import summary_tables
from loss_core.backend import CrossEntropyOptions
from rich.console import Console
from typer.testing import CliRunner

CPU = torch.device("cpu")
OP = "linear_cross_entropy"
QUICK = ["--iters", "3", "--warmup", "0", "--quiet", "--device", "cpu", "--in-process"]
CASE = Case(OP, 48, 301, "float32", Options(bias=True), hidden=24)
pytestmark = pytest.mark.usefixtures("quick_measurements")


def invoke(*words, status=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == status, result.output
    return result


def plain(input, linear_weight, *rest, **options):
    *bias, target = rest
    return F.cross_entropy(F.linear(input, linear_weight, *bias), target, **options)


def verdict_of(case, call, *, grad=True):
    return check.check(case, call, random_inputs(case, CPU, seed=1, sets=1), grad=grad)


# Cases


def test_presets_have_the_sizes_of_models_and_small_ones_for_a_cpu():
    shapes = {
        name: [case.shape for case in cases.build_cases([OP], sizes)]
        for name, sizes in PRESETS.items()
        if name != "seeds"
    }
    assert shapes["llm"] == shapes["foundation"] == ["8192x4096x128256", "16384x2048x151936", "8192x2048x32768"]
    assert {size.dtype for size in PRESETS["llm"] if size.hidden} == {"bfloat16"}
    for case in cases.build_cases([OP], [*PRESETS["small"], *PRESETS["tiny"]]):
        assert minimal_flop(case, "forward+backward") < 4e9
        assert case.dtype == "float32"
    assert [case.shape for case in cases.build_cases(["cross_entropy"], PRESETS["tiny"])] == ["16x1000"]


@pytest.mark.parametrize(
    ("ops", "words", "shapes"),
    [
        ([OP], {"shape": ["8x4x16,8X6X16"]}, ["8x4x16", "8x6x16"]),
        ([OP], {"vocab": ["gpt2"], "hidden": ["5,7"]}, ["64x5x50257", "64x7x50257"]),
        ([OP], {"vocab": ["10"], "rows": ["3"]}, ["3x256x10"]),
        (["cross_entropy", OP], {"vocab": ["10"], "rows": ["3"], "hidden": ["5"]}, ["3x10", "3x5x10"]),
        (["cross_entropy", OP], {"shape": ["8x16,8x4x16"]}, ["8x16", "8x4x16"]),
        (["all"], {"shape": ["8x16"]}, ["8x16"] * 4),
        (["all"], {"shape": ["8x4x16"]}, ["8x4x16"]),
        (["all"], {"preset": "tiny"}, ["16x1000"] * 4 + ["16x32x1000"]),
        (["all"], {"preset": "seeds"}, ["4096x8192"] * 2 + ["4096x16384"] * 2),
        ([OP], {}, ["128x256x8192", "64x128x50257"]),
    ],
)
def test_every_op_takes_the_sizes_that_fit_it(ops, words, shapes):
    found = [case.shape for case in choose_cases(CPU, ops, SizeWords(**words), Options())]
    assert found == (shapes if words != {"preset": "seeds"} else shapes * 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([OP, "--shape", "8x16"], "a shape of linear_cross_entropy is ROWSxHIDDENxCLASSES"),
        ([OP, "--shape", "8x4x16x2"], "got '8x4x16x2'"),
        ([OP, "--shape", "8x0x16"], "got '8x0x16'"),
        (["cross_entropy", "--shape", "8x4x16"], "a shape of cross_entropy is ROWSxCLASSES"),
        (["cross_entropy", OP, "--shape", "8x16"], "no size for linear_cross_entropy among 8x16"),
        ([OP, "--preset", "seeds"], "no size for linear_cross_entropy among 4096x8192"),
        ([OP, "--hidden", "8"], "--hidden goes with --vocab"),
        ([OP, "--vocab", "10", "--hidden", "wide"], "hidden must be a positive number, got 'wide'"),
        (["--vocab", "10", "--hidden", "8"], "--hidden is for linear_cross_entropy, not for cross_entropy"),
        ([OP, "--inplace"], "inplace=True is for cross_entropy, causal_lm_loss, not for linear_cross_entropy"),
        (["--bias", "--weight"], "bias=True is for linear_cross_entropy, not for cross_entropy"),
        (["softmax", "--bias", "--z-loss", "0.1"], "causal_lm_loss, linear_cross_entropy; bias=True is for linear_cr"),
    ],
)  # fmt: skip
def test_mistakes_are_named(words, message):
    output = invoke("run", *words, "--device", "cpu", status=2).output
    assert message in re.sub(r"[\s│]+", " ", output)


def test_logits_of_a_file_are_not_for_it(tmp_path):
    from safetensors.torch import save_file

    file = tmp_path / "l.safetensors"
    save_file({"logits": torch.randn(4, 6), "labels": torch.arange(4)}, file)
    output = invoke("run", OP, "--logits", file, status=2).output
    assert "logits=l.safetensors is for cross_entropy" in output


@pytest.mark.parametrize(
    ("pass_", "products"), [("forward", 1), ("no-grad", 1), ("forward+backward", 3), ("backward", None)]
)
def test_operations_of_a_pass(pass_, products):
    case = Case(OP, 10, 30, "bfloat16", hidden=20)
    assert minimal_flop(case, pass_) == (None if products is None else products * 2 * 10 * 20 * 30)
    assert minimal_bytes(case, pass_) is None
    assert minimal_flop(Case("cross_entropy", 10, 30, "bfloat16"), pass_) is None


# Inputs


def test_inputs_make_logits_like_those_of_the_other_ops():
    case = Case(OP, 256, 2000, "float32", Options(weight=True, ignored=0.5), hidden=64)
    inputs = random_inputs(case, CPU, seed=0, sets=2)
    input, linear_weight = inputs.leaves(1)
    assert (input.shape, linear_weight.shape) == ((256, 64), (2000, 64))
    assert float(F.linear(input, linear_weight).detach().std()) == pytest.approx(3.0, rel=0.1)
    assert not torch.equal(linear_weight, inputs.leaves(0)[1])
    assert inputs.weight.shape == (2000,)
    assert 90 < int((inputs.target[1] == -100).sum()) < 166
    assert len(random_inputs(CASE, CPU, seed=0, sets=1).leaves(0)) == 3


def test_large_cases_have_one_set():
    assert sets_needed(Case(OP, 8192, 128256, "bfloat16", hidden=4096), 50 << 20) == 1
    assert sets_needed(Case(OP, 64, 512, "bfloat16", hidden=256), 50 << 20) == 8


@pytest.mark.parametrize("pass_", cases.PASSES)
def test_both_gradients_are_cleared_before_each_iteration_and_all_sets_used(pass_):
    inputs = random_inputs(CASE, CPU, seed=0, sets=2)
    for leaf in inputs.leaves(0):
        leaf.grad = torch.ones_like(leaf)
    seen = []

    def call(*tensors):
        seen.append(([tensor.grad for tensor in tensors], tensors[1].data_ptr()))
        return plain(*tensors)

    measure.CpuTimer(flush=lambda: None).time(measure.PassWork(call, inputs, pass_), 4, 0)
    assert all(grad is None for grads, _ in seen for grad in grads)
    assert [place for _, place in seen] == [weight.data_ptr() for weight in inputs.linear_weight] * 2
    assert all(leaf.grad is None for which in (0, 1) for leaf in inputs.leaves(which))


# The verdict

OPTIONS = [
    Options(),
    Options(bias=True, reduction="sum", label_smoothing=0.1),
    Options(reduction="none", weight=True),
    Options(bias=True, z_loss=1e-3, softcap=15.0),
    Options(label_smoothing=0.2, weight=True, ignored=0.3),
]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("options", OPTIONS, ids=Options.describe)
def test_plain_torch_is_right(dtype, options):
    case = Case(OP, 48, 301, dtype, options, hidden=24)
    inputs = random_inputs(case, CPU, seed=1, sets=1)
    for grad in (True, False):
        verdict = check.check(case, make_call(case, "torch-nn", inputs.weight), inputs, grad=grad)
        assert verdict.right, verdict.reason
        assert verdict.loss_error < (1e-13 if dtype == "float64" else 1e-5)
        assert (verdict.grad_error is None) == (not grad)
    if dtype == "float64":
        assert check.check(case, make_call(case, "torch-nn", inputs.weight), inputs, grad=True).grad_error < 1e-13
    assert all(leaf.grad is None for leaf in inputs.leaves(0))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "hidden", "classes"), [(64, 32, 1000), (256, 128, 8192), (24, 64, 50257)])
def test_logits_in_half_precision_are_right(dtype, rows, hidden, classes):
    """As on a GPU: rounded products and log-probabilities, row losses added up in float32."""

    def call(input, linear_weight, target):
        rows = F.cross_entropy(F.linear(input, linear_weight), target, reduction="none")
        return rows.float().sum() / (target != -100).sum()

    case = Case(OP, rows, classes, dtype, hidden=hidden)
    verdict = verdict_of(case, call)
    assert verdict.right, verdict.reason
    # Not because anything is: the same with a gradient that is off by as much as counting the ignored rows makes it.
    wrong = verdict_of(
        case, lambda *tensors: call(*tensors).detach() + 1.066 * (call(*tensors) - call(*tensors).detach())
    )
    assert "gradient of input is off" in wrong.reason
    assert "gradient of linear_weight is off" in wrong.reason


def test_pieces_give_the_same_verdict_and_never_hold_all_logits(monkeypatch):
    whole = verdict_of(CASE, plain)
    monkeypatch.setattr(reference, "PIECE_BYTES", 8 * 301 * 7)
    seen = []
    original = reference.LinearPieces.logits
    monkeypatch.setattr(reference.LinearPieces, "logits", lambda self, rows: seen.append(rows) or original(self, rows))
    pieced = verdict_of(CASE, plain)
    assert len(seen) == 7
    assert all(rows.stop - rows.start <= 7 for rows in seen)
    assert pieced.right
    assert pieced.worst == pytest.approx(whole.worst, rel=1e-6)
    assert pieced.grad_error == pytest.approx(whole.grad_error, rel=1e-6)


def tampered(which, change):
    """A call in which the gradient of one of the leaves passes through `change`."""

    def call(*tensors):
        changed = [tensor.clone() if place == which else tensor for place, tensor in enumerate(tensors)]
        changed[which].register_hook(change)
        return plain(*changed)

    return call


def one_row_missing(grad):
    grad = grad.clone()
    grad[5] = 0
    return grad


def one_unwritten(grad):
    grad = grad.clone()
    grad.view(-1)[-1] = float("nan")
    return grad


@pytest.mark.parametrize(("which", "name"), [(0, "input"), (1, "linear_weight"), (2, "linear_bias")])
@pytest.mark.parametrize(
    "change",
    [lambda g: g * 1.001, one_row_missing, one_unwritten, lambda g: g.roll(1, 0), torch.zeros_like],
    ids=["scaled", "row", "unwritten", "rows", "zero"],
)
def test_a_wrong_gradient_is_found_and_named(which, name, change):
    verdict = verdict_of(CASE, tampered(which, change))
    assert not verdict.right
    assert verdict.reason.startswith(f"gradient of {name} ")
    assert verdict.reason.count("gradient") == 1


def test_half_of_the_rows_missing_from_the_weights_gradient_is_found_in_bfloat16():
    def call(input, linear_weight, target):
        half = len(target) // 2
        logits = torch.cat([input[:half] @ linear_weight.T, input[half:] @ linear_weight.detach().T])
        return F.cross_entropy(logits.float(), target)

    verdict = verdict_of(Case(OP, 64, 301, "bfloat16", hidden=24), call)
    assert verdict.reason.startswith("gradient of linear_weight is off by")
    assert "input" not in verdict.reason


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda x, w, b, y: plain(x, w, y), "no gradient of linear_bias; result is off by"),
        (lambda x, w, b, y: plain(x, w.detach(), b, y), "no gradient of linear_weight"),
        (lambda x, w, b, y: plain(x.detach(), w, b, y), "no gradient of input"),
        (lambda x, w, b, y: plain(x, w, b, y) * float("nan"), "result is NaN; gradient of input is NaN"),
        (lambda x, w, b, y: plain(x, w, b, y, reduction="sum") / len(y), "result is off by"),
    ],
    ids=["bias dropped", "weight frozen", "input frozen", "nan", "ignored rows counted"],
)
def test_a_wrong_call_is_found(call, reason):
    verdict = verdict_of(CASE, call)
    assert not verdict.right
    assert verdict.reason.startswith(reason)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_loss_is_found_without_grad(dtype):
    case = Case(OP, 48, 301, dtype, Options(bias=True), hidden=24)

    def call(x, w, b, y, bias=1.0):
        return F.cross_entropy((x.float() @ w.float().T + bias * b.float()), y)

    assert verdict_of(case, call, grad=False).right
    assert not verdict_of(case, lambda *tensors: call(*tensors, bias=0.0), grad=False).right
    assert not verdict_of(case, lambda *tensors: call(*tensors) * 1.02, grad=False).right


def test_overwritten_inputs_are_noticed_and_put_back():
    class Overwrites(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            with torch.enable_grad():
                leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors[:-1]]
                loss = plain(*leaves, tensors[-1])
                ctx.grads = torch.autograd.grad(loss, leaves)
            tensors[1].zero_()
            return loss.detach()

        @staticmethod
        def backward(ctx, outer):
            return *(grad * outer for grad in ctx.grads), None

    inputs = random_inputs(CASE, CPU, seed=1, sets=1)
    before = [leaf.detach().clone() for leaf in inputs.leaves(0)]
    verdict = check.check(CASE, Overwrites.apply, inputs, grad=True)
    assert verdict.right, verdict.reason
    assert verdict.overwrites
    assert all(torch.equal(leaf.detach(), value) for leaf, value in zip(inputs.leaves(0), before, strict=True))


# Backends


def test_loss_core_offers_no_such_op_yet_and_its_backends_say_so():
    assert OP in loss_core.backend.OPS
    assert not hasattr(loss_core, OP)
    assert all(OP not in info.ops for info in loss_core.list_backends("cpu") if info.distribution in OURS)
    rows = CaseRunner(Plan(("torch",), ("forward",), 3), CPU, timer=FakeTimer()).run_case(CASE, {})
    assert [(row.status, row.reason) for row in rows] == [("unsupported", "has no linear_cross_entropy")]


OURS = ("loss-core", "loss-triton", "loss-cutedsl")


class FakeTimer:
    """Every pass takes 2 ms."""

    def estimate(self, work):
        return 2.0

    def time(self, work, iterations, warmup):
        return [2.0] * iterations


def test_a_third_partys_op_is_called_directly_until_loss_core_has_it(install_backend, monkeypatch):
    install_backend(
        "other",
        """
        OPS = ("linear_cross_entropy",)
        def linear_cross_entropy(input, linear_weight, target, linear_bias, weight, byte_lengths, num_items, options):
            return F.cross_entropy(input @ linear_weight.T + linear_bias, target)
        """,
    )
    tensors = [*random_inputs(CASE, CPU, seed=0, sets=1).leaves(0), torch.arange(48)]
    assert torch.allclose(make_call(CASE, "other")(*tensors), plain(*tensors))

    def public(input, linear_weight, target, *, linear_bias=None, weight=None, label_smoothing=0.0, backend=None):
        assert backend == "other"
        return plain(input, linear_weight, linear_bias, target, weight=weight, label_smoothing=label_smoothing)

    monkeypatch.setattr(loss_core, OP, public, raising=False)
    case = Case(OP, 48, 301, "float32", Options(bias=True, label_smoothing=0.25), hidden=24)
    weight = torch.rand(301)
    expected = plain(*tensors, weight=weight, label_smoothing=0.25)
    assert torch.equal(make_call(case, "other", weight)(*tensors), expected)


def library(input, linear_weight, target, bias, weight=None, z_loss=0.0, softcap=None, **options):
    logits = F.linear(input, linear_weight, bias)
    return loss_core.cross_entropy(logits, target, weight, z_loss=z_loss, softcap=softcap, backend="torch", **options)


def _quack(x, weight, target, chunk_size=4096, ignore_index=-100, reduction="mean", tuned=True, use_scaled_exp=None):
    return library(x, weight, target, None, ignore_index=ignore_index, reduction=reduction)


def _liger(
    input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
    reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None,
):  # fmt: skip
    return library(
        input, weight, target, bias, ce_weight, lse_square_scale, softcap, ignore_index=ignore_index,
        label_smoothing=label_smoothing, reduction=reduction,
    )  # fmt: skip


def _liger_cute(_input, weight, target, ignore_index=-100, reduction="mean"):
    return library(_input, weight, target, None, ignore_index=ignore_index, reduction=reduction)


def _fla(
    ignore_index=-100, label_smoothing=0.0, logit_scale=1.0, logit_softcapping=None, num_chunks=8, reduction="mean"
):
    return lambda x, target, weight, bias=None: library(
        x, weight, target, bias, softcap=logit_softcapping, ignore_index=ignore_index, reduction=reduction,
        label_smoothing=label_smoothing, logit_scale=logit_scale,
    )  # fmt: skip


def _cce(e, c, targets, ignore_index=-100, softcap=None, reduction="mean", shift=False, filter_eps="high", impl="cce"):
    assert filter_eps is None, "its default drops small gradients"
    return library(e, c, targets, None, softcap=softcap, ignore_index=ignore_index, reduction=reduction)


LIBRARIES = {
    "quack": ("quack.linear_cross_entropy", "chunked_linear_cross_entropy", _quack),
    "liger": ("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy", _liger),
    "liger-cute": (
        "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90", "liger_fused_linear_cross_entropy_sm90",
        _liger_cute,
    ),
    "fla": ("fla.modules.fused_linear_cross_entropy", "FusedLinearCrossEntropyLoss", _fla),
    "cce": ("cut_cross_entropy", "linear_cross_entropy", _cce),
    "torch-linear": ("torch.nn.functional", "linear_cross_entropy", None),
}  # fmt: skip
LACKING = {
    "quack": {"reduction 'none'", "linear_bias", "label_smoothing", "z_loss", "softcap", "weight"},
    "liger": set(),
    "liger-cute": {"reduction 'none'", "linear_bias", "label_smoothing", "z_loss", "softcap", "weight"},
    "fla": {"reduction 'none'", "z_loss", "weight"},
    "cce": {"linear_bias", "label_smoothing", "z_loss", "weight"},
    "torch-linear": {"label_smoothing", "z_loss", "softcap"},
}
EACH_OPTION = {
    "": Options(),
    "reduction 'none'": Options(reduction="none"),
    "sum": Options(reduction="sum", ignored=0.4),
    "linear_bias": Options(bias=True),
    "label_smoothing": Options(label_smoothing=0.2),
    "z_loss": Options(z_loss=1e-3),
    "softcap": Options(softcap=5.0),
    "weight": Options(weight=True),
}


@pytest.mark.parametrize("peer", LIBRARIES)
@pytest.mark.parametrize("option", EACH_OPTION)
def test_peers_pass_every_option_on_and_refuse_what_the_library_lacks(peer, option, monkeypatch):
    module, name, function = LIBRARIES[peer]
    if function is not None:
        stub = types.ModuleType(module)
        setattr(stub, name, function)
        monkeypatch.setitem(sys.modules, module, stub)
    elif not hasattr(F, name):
        pytest.skip("torch has no linear_cross_entropy")
    requirements.lazily.cache_clear()
    if hasattr(loss_core.get_backend(peer).module, "_linear_loss"):
        loss_core.get_backend(peer).module._linear_loss.cache_clear()
    # These take nothing but half precision; what they do with it is not the question here.
    dtype = "bfloat16" if peer in ("quack", "liger-cute", "cce") else "float32"
    case = Case(OP, 24, 40, dtype, EACH_OPTION[option], hidden=16)
    inputs = random_inputs(case, CPU, seed=0, sets=1)
    call = make_call(case, peer, inputs.weight)
    if option in LACKING[peer]:
        with pytest.raises(loss_core.UnsupportedInput, match=option):
            check.check(case, call, inputs, grad=True)
    else:
        verdict = check.check(case, call, inputs, grad=True)
        assert verdict.right, verdict.reason
    requirements.lazily.cache_clear()


@pytest.mark.parametrize(
    ("peer", "dtype", "shape", "reason"),
    [
        ("quack", torch.float32, (8, 8, 8), "no float32"),
        ("quack", torch.bfloat16, (9, 8, 8), "multiples of 8"),
        ("quack", torch.bfloat16, (8, 8, 12), "multiples of 8"),
        ("liger-cute", torch.float16, (8, 8, 8), "no float16"),
        ("cce", torch.float32, (8, 8, 8), "no float32"),
    ],
)
def test_peers_refuse_cases_that_would_end_in_an_assertion(peer, dtype, shape, reason):
    rows, hidden, classes = shape
    tensors = (
        torch.zeros(rows, hidden, dtype=dtype),
        torch.zeros(classes, hidden, dtype=dtype),
        torch.arange(rows) % 8,
    )
    function = loss_core.get_backend(peer).module.linear_cross_entropy
    with pytest.raises(loss_core.UnsupportedInput, match=reason):
        function(*tensors, None, None, None, None, CrossEntropyOptions())


@pytest.mark.parametrize(("hidden", "chunk"), [(4096, 2048), (2048, 4096)])
def test_quacks_chunk_is_never_the_width_of_the_input(hidden, chunk, monkeypatch):
    seen = []
    stub = types.ModuleType("quack.linear_cross_entropy")
    stub.chunked_linear_cross_entropy = lambda *tensors, chunk_size, **options: seen.append(chunk_size)
    monkeypatch.setitem(sys.modules, "quack.linear_cross_entropy", stub)
    requirements.lazily.cache_clear()
    tensors = (torch.zeros(8, hidden, dtype=torch.bfloat16), torch.zeros(8, hidden, dtype=torch.bfloat16))
    function = loss_core.get_backend("quack").module.linear_cross_entropy
    function(*tensors, torch.arange(8), None, None, None, None, CrossEntropyOptions())
    assert seen == [chunk]
    requirements.lazily.cache_clear()


def test_an_older_torch_is_named(monkeypatch):
    module = loss_core.get_backend("torch-linear").module
    assert module.unavailable_reason(CPU) is None or not hasattr(F, OP)
    monkeypatch.delattr(F, OP, raising=False)
    assert re.fullmatch(
        r"torch \S+ has no linear_cross_entropy; 2.13 or newer is needed", module.unavailable_reason(CPU)
    )


# Runs


def test_run_report_compare_and_resume(bad_backends, tmp_path):
    path, merged = tmp_path / "r.json", tmp_path / "m.json"
    words = ["run", OP, "--shape", "16x8x100,16x12x100", "-b", "torch-nn,torch", "--bias", "--label-smoothing", "0.1"]
    result = invoke(*words, *QUICK, "--json", path, "--markdown", tmp_path / "r.md")
    rows = read_report(path).rows
    assert [(row.shape, row.hidden) for row in rows[:2]] == [("16x8x100", 8)] * 2
    assert {row.options for row in rows} == {"label_smoothing=0.1 bias=True"}
    timed = [row for row in rows if row.backend == "torch-nn"]
    assert len(timed) == 8
    for row in timed:
        assert (row.status, row.gb_s, row.copy_share) == ("ok", None, None)
        assert row.host_us > 0
        assert (row.tflop_s is None) == (row.matmul_share is None) == (row.pass_ == "backward")
        assert row.grad_error is None if row.pass_ == "no-grad" else row.grad_error < 1e-5
    assert {row.reason for row in rows if row.backend == "torch"} == {"has no linear_cross_entropy"}
    assert "rows x hidden x classes" in result.output
    assert "| 16x12x100 | float32 | torch-nn |" in (tmp_path / "r.md").read_text()

    more = invoke(*words, *QUICK, "--shape", "16x8x50", "--resume", path, "--json", merged)
    again = read_report(merged).rows
    assert {row.key: row for row in again if row.classes == 100} == {row.key: row for row in rows}
    assert len(again) == len(rows) * 3 // 2
    assert "16x8x50" in more.output

    invoke("report", path, merged, "--quiet", "--csv", tmp_path / "r.csv", "--json", tmp_path / "all.json",
           "--summary", tmp_path / "s.md", "--html", tmp_path / "p.html", "--plots", tmp_path / "plots")  # fmt: skip
    assert len(read_report(tmp_path / "all.json").rows) == len(again)
    assert ",16x" not in (tmp_path / "r.csv").read_text()
    assert "| 16 x 12 x 100 | float32 |" in (tmp_path / "s.md").read_text()
    assert "rows x hidden x classes" in (tmp_path / "p.html").read_text()
    assert any("linear" in file.name for file in (tmp_path / "plots").iterdir())
    assert "16x12x100" in invoke("compare", path, merged).output


def test_wrong_ones_are_not_timed(install_backend, tmp_path):
    install_backend(
        "off",
        """
        OPS = ("linear_cross_entropy",)
        def linear_cross_entropy(input, linear_weight, target, linear_bias, weight, byte_lengths, num_items, options):
            return F.cross_entropy(input @ linear_weight.detach().T, target, ignore_index=options.ignore_index)
        """,
    )
    path = tmp_path / "r.json"
    invoke("run", OP, "--preset", "tiny", "-b", "off", "--pass", "forward,no-grad", *QUICK, "--json", path, status=1)
    forward, evaluation = read_report(path).rows
    assert (forward.status, forward.reason, forward.median_ms) == ("wrong", "no gradient of linear_weight", None)
    assert evaluation.status == "ok"


def test_the_share_is_that_of_a_matrix_product_in_the_cases_dtype():
    def rate(timer, dtype):
        return measure.matmul_tflop_s(CPU, timer, dtype)

    timer = FakeTimer()
    plan = Plan(("torch-nn",), ("forward+backward",), 3)
    (row,) = CaseRunner(plan, CPU, timer=timer).run_case(CASE, {})
    assert row.tflop_s == pytest.approx(6 * 48 * 24 * 301 / 2e-3 / 1e12)
    assert row.matmul_share == pytest.approx(row.tflop_s / rate(timer, torch.float32))
    assert rate(timer, torch.float32) == pytest.approx(2 * 1024**3 / 2e-3 / 1e12)
    assert row.limit_share == row.matmul_share


def test_the_dtype_of_the_product_is_measured_once(monkeypatch):
    seen = []
    monkeypatch.setattr(runner.measure, "matmul_tflop_s", lambda device, timer, dtype: seen.append(dtype) or 1.0)
    run = CaseRunner(Plan(("torch-nn",), ("forward", "no-grad"), 3), CPU, timer=FakeTimer())
    for dtype in ("float32", "float64", "float32"):
        run.run_case(Case(OP, 8, 12, dtype, hidden=4), {})
    assert seen == [torch.float32, torch.float64]


def test_rows_that_differ_in_hidden_alone_are_not_one(make_row, tmp_path):
    rows = [make_row(op=OP, hidden=hidden, median_ms=1.0) for hidden in (4, 8)]
    report = Report({"device": "fake"}, rows=rows)
    report.write(tmp_path / "r.json")
    assert read_report(tmp_path / "r.json").rows == rows
    assert len(merge([report, read_report(tmp_path / "r.json")]).rows) == 2
    # Files from before know nothing of it.
    pairs = make_row(median_ms=1.0).to_json()
    for name in ("hidden", "tflop_s", "matmul_share", "graph_matmul_share"):
        del pairs[name]
    (tmp_path / "old.json").write_text(json.dumps({**report.to_json(), "rows": [pairs]}))
    assert read_report(tmp_path / "old.json").rows == [make_row(median_ms=1.0)]


@pytest.fixture
def report(make_row):
    size = {"op": OP, "rows": 8192, "hidden": 4096, "classes": 128256, "dtype": "bfloat16"}
    rows = [
        make_row(**size, median_ms=39.2, tflop_s=659.0, matmul_share=0.82, graph_ms=39.0, graph_matmul_share=0.83,
                 peak_mib=4946.0, host_us=400.0, speedup=1.0, p20_ms=39.0, p80_ms=39.5, grad_error=1e-3),
        make_row(**size, backend="lean", median_ms=45.1, tflop_s=573.0, matmul_share=0.71, peak_mib=1068.0,
                 host_us=90.0, speedup=0.87, p20_ms=45.0, p80_ms=45.5, grad_error=1e-3),
        make_row(**size, backend="ours", status="unsupported", reason="has no linear_cross_entropy"),
    ]  # fmt: skip
    return Report({"device": "fake", "torch": "2"}, rows=rows)


def test_tables_have_the_rate_in_place_of_the_bandwidth(report):
    text = reporting.to_markdown(report)
    header = next(line for line in text.splitlines() if "median ms" in line)
    titles = [cell.strip() for cell in header.strip("|").split("|")]
    assert titles == [
        "rows x hidden x classes", "dtype", "backend", "median ms", "20-80% ms", "TFLOP/s", "% of matmul", "graph ms",
        "% of matmul (graph)", "host us", "peak MiB", "x torch", "error loss / grad",
    ]  # fmt: skip
    assert "| 659 | 82% | 39.000 | 83% | 400 | 4946.0 | 1.00 |" in text
    assert "% of matmul: against a square matrix product" in text


@pytest.mark.parametrize("width", [90, 120])
def test_a_narrow_table_keeps_the_memory(report, width):
    from io import StringIO

    console = Console(width=width, file=StringIO())
    reporting.print_report(report, console)
    assert "peak MiB" in console.file.getvalue()
    assert "4946.0" in console.file.getvalue()


def test_the_summary_has_time_share_and_memory(report):
    (table,) = summary_tables(report, ["forward+backward"])
    assert table.title == "linear_cross_entropy forward+backward: median ms (share of the limit); peak MiB"
    assert table.columns[0] == "rows x hidden x classes"
    cells = ["8192 x 4096 x 128256", "bfloat16", "39.200 (82%); 4946", "45.100 (71%); 1068"]
    assert table.lines == [cells]
    # One that lacks the op has no column unless it is named.
    (named,) = summary_tables(report, ["forward+backward"], ["torch-nn", "lean", "ours"])
    assert named.lines == [[*cells, "refuses"]]
    assert "MiB: the peak beyond the inputs" in table.notes[0]


def test_kernels_are_compiled_for_the_tiny_case_and_for_several_chunks(monkeypatch):
    large = Case(OP, 16384, 151936, "bfloat16", hidden=2048)
    tasks = compiling.make_tasks(["a"], [large])
    assert [task.case.shape for task in tasks] == ["16384x2048x151936", "128x256x512"]
    seen = []
    monkeypatch.setattr(compiling, "random_inputs", lambda case, *rest, **options: seen.append(case) or 1 / 0)
    for backend, rows in (("torch-nn", 8192), ("torch-compile", 16384)):
        with pytest.raises(ZeroDivisionError):
            compiling.compile_case(compiling.CompileTask(backend, large), CPU, lambda text, share: None)
        assert seen[-1].rows == rows
        assert seen[-1].shape.endswith("x2048x151936")


def test_warm_compiles_it(install_backend):
    install_backend(
        "picky",
        """
        OPS = ("linear_cross_entropy",)
        def linear_cross_entropy(input, linear_weight, target, linear_bias, weight, byte_lengths, num_items, options):
            assert linear_bias.requires_grad == torch.is_grad_enabled()
            return F.cross_entropy(input @ linear_weight.T + linear_bias, target)
        """,
    )
    result = invoke("warm", OP, "--shape", "16x8x100", "--bias", "-b", "picky", "--jobs", "1", "--device", "cpu", "-q")
    assert "2 of 2 compiled" in result.output


def test_sizes_know_whose_they_are():
    assert Size(1, 2, "float32", 3).fits(OP)
    assert not Size(1, 2, "float32").fits(OP)
    assert Size(1, 2, "float32").fits("softmax")
