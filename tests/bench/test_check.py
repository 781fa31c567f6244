"""The verdict: right results pass, wrong ones do not."""

from __future__ import annotations

import itertools

import loss_core
import pytest
import torch
import torch.nn.functional as F
from loss_bench import reference
from loss_bench.calls import make_call
from loss_bench.cases import Case, Options
from loss_bench.check import check
from loss_bench.inputs import random_inputs

CPU = torch.device("cpu")
OPTIONS = [
    Options(),
    Options(reduction="sum", label_smoothing=0.1),
    Options(reduction="none", weight=True),
    Options(z_loss=1e-3, softcap=15.0),
    Options(label_smoothing=0.2, weight=True, ignored=0.3),
]


def verdict_of(case, call, *, grad=True):
    return check(case, call, random_inputs(case, CPU, seed=1, sets=1), grad=grad)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("options", OPTIONS, ids=Options.describe)
def test_the_reference_backend_is_right(dtype, options):
    case = Case("cross_entropy", 40, 333, dtype, options)
    inputs = random_inputs(case, CPU, seed=1, sets=1)
    verdict = check(case, make_call(case, "torch", inputs.weight), inputs, grad=True)
    assert verdict.right, verdict.reason
    assert not verdict.overwrites
    assert inputs.input[0].grad is None


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("options", OPTIONS, ids=Options.describe)
def test_plain_torch_has_every_option(dtype, options):
    case = Case("cross_entropy", 16, 333, dtype, options)
    inputs = random_inputs(case, CPU, seed=1, sets=1)
    if dtype == "bfloat16":
        # On a CPU torch adds up half-precision losses in half precision; the command shows that as wrong.
        inputs.input[0].data.mul_(0.25)
    verdict = check(case, make_call(case, "torch-nn", inputs.weight), inputs, grad=True)
    assert verdict.right, verdict.reason


def test_the_check_has_a_reference_of_its_own_that_agrees_with_torch_to_float64():
    case = Case("cross_entropy", 12, 70, "float64", Options(label_smoothing=0.1, weight=True))
    inputs = random_inputs(case, CPU, seed=1, sets=1)
    verdict = check(case, make_call(case, "torch-nn", inputs.weight), inputs, grad=True)
    assert verdict.right
    assert verdict.loss_error < 1e-14
    assert verdict.grad_error < 1e-14


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_torch_softmax_is_right(op, dtype):
    verdict = verdict_of(Case(op, 16, 777, dtype), lambda x, y: getattr(F, op)(x, dim=-1))
    assert verdict.right, verdict.reason


def test_softmax_of_probabilities_below_the_smallest_normal_is_right():
    """On an H200 every backend was called wrong for 8192 classes in float16, torch's own too."""
    verdict = verdict_of(Case("softmax", 64, 16384, "float16"), lambda x, y: F.softmax(x, dim=-1))
    assert verdict.right, verdict.reason
    # And an error of some of these spacings still shows.
    wrong = verdict_of(Case("softmax", 64, 16384, "float16"), lambda x, y: F.softmax(x, dim=-1) * 1.05)
    assert not wrong.right


def test_pieces_give_the_same_verdict(monkeypatch):
    case = Case("cross_entropy", 40, 333, "float32")
    whole = verdict_of(case, F.cross_entropy)
    monkeypatch.setattr(reference, "PIECE_BYTES", 8 * 333 * 7)
    assert len(list(reference.pieces(case))) == 6
    pieced = verdict_of(case, F.cross_entropy)
    assert pieced.right
    assert pieced.worst == pytest.approx(whole.worst)
    assert pieced.grad_error == pytest.approx(whole.grad_error)


def _tampered(change):
    """A cross-entropy whose gradient passes through `change`."""

    def call(logits, target):
        tampered = logits.clone()
        tampered.register_hook(change)
        return F.cross_entropy(tampered, target)

    return call


def _one_element(grad):
    grad = grad.clone()
    grad[3, 5] *= 1.5
    return grad


def _one_unwritten(grad):
    grad = grad.clone()
    grad[39, -1] = float("nan")
    return grad


def _ignored_row_touched(grad):
    grad = grad.clone()
    grad[0, 0] = 1e-6
    return grad


@pytest.mark.parametrize(
    "change",
    [lambda g: g * 1.01, _one_element, _one_unwritten, _ignored_row_touched, lambda g: g.roll(1, 0), torch.zeros_like],
    ids=["scaled", "element", "unwritten", "ignored", "rows", "zero"],
)
def test_a_wrong_gradient_is_found(change):
    verdict = verdict_of(Case("cross_entropy", 40, 333, "float32"), _tampered(change))
    assert not verdict.right
    assert "gradient" in verdict.reason


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("factor", [1.05, float("nan"), float("inf")])
def test_a_wrong_loss_is_found(factor, dtype):
    case = Case("cross_entropy", 40, 333, dtype)
    for grad in (False, True):
        verdict = verdict_of(case, lambda x, y: F.cross_entropy(x.float(), y) * factor, grad=grad)
        assert not verdict.right
        assert "result" in verdict.reason


class Deaf(torch.autograd.Function):
    """A loss whose gradient is that for an upstream of 1, whatever it is."""

    @staticmethod
    def forward(ctx, logits, target):
        with torch.enable_grad():
            x = logits.detach().requires_grad_()
            loss = F.cross_entropy(x, target)
            (ctx.grad,) = torch.autograd.grad(loss, x)
        return loss.detach()

    @staticmethod
    def backward(ctx, outer):
        return ctx.grad, None


def test_ignoring_the_upstream_gradient_is_found():
    assert not verdict_of(Case("cross_entropy", 40, 333, "float32"), Deaf.apply).right


def _scaling(op, factor_of_output, factor_of_gradient):
    """`op` in float32, one of whose results is off by a factor that all elements have in common."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, target):
            with torch.enable_grad():
                ctx.logits = logits.detach().float().requires_grad_()
                ctx.output = F.cross_entropy(ctx.logits, target) if target is not None else op(ctx.logits, -1)
            return (ctx.output * factor_of_output).to(logits.dtype if target is None else torch.float32)

        @staticmethod
        def backward(ctx, outer):
            (grad,) = torch.autograd.grad(ctx.output, ctx.logits, outer.float())
            return (grad * factor_of_gradient).to(outer.dtype), None

    return lambda logits, target: Scaled.apply(logits, target).to(logits.dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("op", "which"),
    [(op, "gradient") for op in ("cross_entropy", "softmax", "log_softmax")]
    + [(op, "result") for op in ("softmax", "log_softmax")],
)
def test_a_factor_that_all_elements_have_in_common_is_found(op, which, dtype):
    """What counting the ignored rows, one in sixteen, would do to every element; half precision hid it."""
    factor = 15 / 16
    case, function = Case(op, 64, 1000, dtype), getattr(F, op)
    right = verdict_of(case, _scaling(function, 1.0, 1.0))
    assert right.right, right.reason
    wrong = verdict_of(case, _scaling(function, *((1.0, factor) if which == "gradient" else (factor, 1.0))))
    assert not wrong.right
    assert which in wrong.reason


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_ignoring_the_upstream_gradient_is_found_with_any_seed(dtype):
    case = Case("cross_entropy", 32, 100, dtype)
    inputs = random_inputs(case, CPU, seed=1, sets=1)
    for seed in range(100):
        assert not check(case, lambda x, y: Deaf.apply(x.float(), y), inputs, grad=True, seed=seed).right


@pytest.mark.parametrize(
    "case",
    [
        Case("cross_entropy", 4, 9, "float32", Options(ignored=0.999)),
        Case("causal_lm_loss", 1, 9, "bfloat16"),
        Case("linear_cross_entropy", 4, 9, "float32", Options(ignored=0.999), hidden=8),
    ],
    ids=str,
)
def test_a_mean_over_no_rows_is_nan_or_nothing_and_its_gradient_zero(case):
    inputs = random_inputs(case, CPU, seed=0, sets=1)
    if case.op != "causal_lm_loss":
        assert (inputs.target[0] == -100).all()
    for name, value in (("torch-nn", None), ("torch-nn", 0.0), ("torch-nn", 1.0)):
        plain = make_call(case, name)
        call = plain if value is None else lambda *t, p=plain, v=value: p(*t).nan_to_num(v)
        for grad in (False, True):
            verdict = check(case, call, inputs, grad=grad)
            assert verdict.right is (value != 1.0), verdict.reason
            assert "NaN" not in verdict.reason


@pytest.mark.parametrize("op", ["cross_entropy", "softmax", "log_softmax"])
@pytest.mark.parametrize("options", [Options(), Options(label_smoothing=0.1), Options(reduction="none")], ids=str)
def test_a_truth_that_is_infinite_or_nan_is_right_and_a_number_in_its_place_is_not(op, options):
    """Logits of a file with a masked vocabulary, a row of it throughout; torch is right about them."""
    case = Case(op, 8, 50, "float32", options.fitting(op))
    inputs = random_inputs(case, CPU, seed=0, sets=1)
    with torch.no_grad():
        inputs.input[0][:, 40:] = -torch.inf
        inputs.input[0][3] = -torch.inf
        if inputs.target:
            inputs.target[0].remainder_(40)[3] = -100
    plain = make_call(case, "torch-nn")
    for grad in (False, True):
        verdict = check(case, plain, inputs, grad=grad)
        assert verdict.right, verdict.reason
    if not torch.isfinite(plain(inputs.input[0].detach(), inputs.target[0] if inputs.target else None)).all():
        assert not check(case, lambda *t: plain(*t).nan_to_num(1.0, 1.0, 1.0), inputs, grad=False).right


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("softcap", [0.3, 1.0, 3.0, 15.0])
@pytest.mark.parametrize("hidden", [None, 32], ids=["logits", "linear"])
def test_a_softcap_that_saturates_leaves_right_gradients_right(dtype, softcap, hidden):
    """Its slope is 1 minus a number near 1 there, which no arithmetic has to more than its own rounding."""

    def capped(bend):
        def call(*tensors):
            *leaves, target = tensors
            logits = F.linear(*leaves).double() if hidden else leaves[0].double()
            return F.cross_entropy(bend(logits), target)

        return call

    def flat(logits):
        return logits + (softcap * torch.tanh(logits / softcap) - logits).detach()

    case = Case("linear_cross_entropy" if hidden else "cross_entropy", 48, 300, dtype, Options(softcap=softcap), hidden)
    for call in (make_call(case, "torch-nn"), capped(lambda logits: softcap * torch.tanh(logits / softcap))):
        verdict = verdict_of(case, call)
        assert "gradient" not in verdict.reason, verdict.reason
    assert "gradient" in verdict_of(case, capped(flat)).reason


def test_counting_ignored_rows_in_the_mean_is_found():
    def call(logits, target):
        return F.cross_entropy(logits, target, reduction="sum") / len(target)

    assert not verdict_of(Case("cross_entropy", 40, 333, "float32"), call).right


def test_no_gradient_is_found():
    verdict = verdict_of(Case("cross_entropy", 4, 9, "float32"), lambda x, y: F.cross_entropy(x.detach(), y) + 0 * W)
    assert verdict.reason.startswith("no gradient")


W = torch.zeros((), requires_grad=True)


def test_overwritten_logits_are_noticed_and_put_back():
    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, target):
            with torch.enable_grad():
                x = logits.detach().clone().requires_grad_()
                loss = F.cross_entropy(x, target)
                (grad,) = torch.autograd.grad(loss, x)
            ctx.grad = logits.detach().copy_(grad)
            return loss.detach()

        @staticmethod
        def backward(ctx, outer):
            return ctx.grad.mul_(outer), None

    case = Case("cross_entropy", 40, 333, "float32")
    inputs = random_inputs(case, CPU, seed=1, sets=1)
    before = inputs.input[0].detach().clone()
    verdict = check(case, InPlace.apply, inputs, grad=True)
    assert verdict.right, verdict.reason
    assert verdict.overwrites
    assert torch.equal(inputs.input[0].detach(), before)


@pytest.mark.parametrize(
    "peer", ["torch-nn", "torch-compile", "quack", "liger", "liger-cute", "fla", "crossentropy-triton"]
)
def test_peers_refuse_what_they_lack_rather_than_ignore_it(peer):
    function = loss_core.get_backend(peer).module.cross_entropy
    options = loss_core.backend.CrossEntropyOptions(logit_scale=2.0, reduction="byte_mean")
    tensors = (torch.zeros(2, 4), torch.zeros(2, dtype=torch.long), None, torch.ones(2, dtype=torch.long), None)
    with pytest.raises(loss_core.UnsupportedInput, match=r"byte_lengths.*byte_mean"):
        function(*tensors, options)


@pytest.mark.parametrize("name", ["torch", "torch-nn"])
def test_causal_loss_is_judged_with_shifted_labels(name):
    case = Case("causal_lm_loss", 40, 33, "float32", Options(label_smoothing=0.1))
    inputs = random_inputs(case, CPU, seed=2, sets=1)
    assert inputs.input[0].shape == (1, 40, 33)
    assert check(case, make_call(case, name), inputs, grad=True).right

    def unshifted(logits, labels):
        return F.cross_entropy(logits.view(-1, 33), labels.view(-1), label_smoothing=0.1)

    assert not check(case, unshifted, inputs, grad=True).right


def test_every_pair_of_reduction_and_weight_is_judged():
    for reduction, weight in itertools.product(("mean", "sum", "none"), (False, True)):
        case = Case("cross_entropy", 17, 31, "float32", Options(reduction=reduction, weight=weight))
        inputs = random_inputs(case, CPU, seed=2, sets=1)
        assert check(case, make_call(case, "torch-nn", inputs.weight), inputs, grad=True).right
