"""The conformance suite itself: it fails for backends that are wrong, each in one of the ways kernels have been."""

import sys
from unittest import SkipTest

import loss_core
import pytest
import torch
from loss_core import reference, registry
from loss_core.testing import Expected, assert_within, cases, check, make_inputs, nan_filled_empty
from support.plugins import add_distribution, run_python

WRONG = """
import torch
from loss_core import UnsupportedInput
from loss_core.reference import *
from loss_core.reference import API_VERSION, OPS, cross_entropy_backward as _backward, cross_entropy_forward as _forward
from loss_core.reference import softmax_forward as _softmax, log_softmax_forward as _log_softmax
from loss_core.reference import softmax_backward as _softmax_backward
"""

# What each does, as edits of the reference; and the op whose cases have to notice.
FAULTS = {
    "constant loss": ("cross_entropy", "return out._replace(loss=torch.full_like(out.loss, 6.0))"),
    "loss rounded to bfloat16": ("cross_entropy", "return out._replace(loss=out.loss.bfloat16().to(out.loss.dtype))"),
    "no gradient off the target": (
        "cross_entropy",
        "if grad is not None: grad[grad > 0] = 0\n    return out",
    ),
    "unwritten last class": ("cross_entropy", "if grad is not None: grad[:, -1] = torch.nan\n    return out"),
    "gradient half a percent off": ("cross_entropy", "if grad is not None: grad *= 1.005\n    return out"),
    "mean over all rows": (
        "cross_entropy",
        "if options.reduction == 'mean' and num_items is None and len(target):\n"
        "        out = out._replace(loss=out.loss * out.denominator[0] / len(target))\n    return out",
    ),
    "smoothing dropped": ("cross_entropy", None, "options = options._replace(label_smoothing=0.0)"),
    "z_loss dropped": ("cross_entropy", None, "options = options._replace(z_loss=0.0)"),
    "softcap dropped": ("cross_entropy", None, "options = options._replace(softcap=None)"),
    "scale dropped": ("cross_entropy", None, "options = options._replace(logit_scale=1.0)"),
    "weight dropped": ("cross_entropy", None, "weight = None"),
    "num_items dropped": ("cross_entropy", None, "num_items = None"),
    "bytes dropped": (
        "cross_entropy", None,
        "byte_lengths = None if byte_lengths is None else torch.ones_like(byte_lengths)",
    ),
    "ignore_index -100 only": ("cross_entropy", None, "options = options._replace(ignore_index=-100)"),
    "writes to the logits": ("cross_entropy", "logits[..., :1] = 0\n    return out"),
    "not repeatable": ("cross_entropy", "return out._replace(loss=out.loss * (1 + 1e-7 * torch.rand(())))"),
    "statistics of the last on ties": (
        "cross_entropy",
        "last = logits.shape[1] - 1 - logits.flip(-1).float().argmax(-1)\n"
        "    return out._replace(prediction=last) if stats else out",
    ),
    "correct where ignored": ("cross_entropy", "return out._replace(correct=out.correct | True) if stats else out"),
    "refuses what is not optional": ("cross_entropy", None, "if options.z_loss: raise UnsupportedInput('no z_loss')"),
}  # fmt: skip

CROSS_ENTROPY = """
def cross_entropy_forward(logits, target, weight, byte_lengths, num_items, options, *, grad, stats):
    {before}
    out = _forward(logits, target, weight, byte_lengths, num_items, options, grad=grad, stats=stats)
    {after}
"""
BACKWARD = """
def cross_entropy_backward(grad_loss, logits, target, weight, lse, denominator, options, *, grad, skip_if_one):
    {edit}
"""
BACKWARD_FAULTS = {
    "only the first upstream": "_backward(grad_loss.reshape(-1)[:1], logits, target, weight, lse, denominator, options,"
    " grad=grad, skip_if_one=skip_if_one)",
    "upstream not applied": "_backward(torch.ones_like(grad_loss), logits, target, weight, lse, denominator, options,"
    " grad=grad, skip_if_one=skip_if_one)",
    "nothing written": "pass",
    "rescaled after rounding": "grad.mul_(grad_loss) if skip_if_one else _backward(grad_loss, logits, target, weight,"
    " lse, denominator, options, grad=grad, skip_if_one=False)",
}
SOFTMAX_FAULTS = {
    "no maximum subtracted": "def softmax_forward(input, output):\n    e = input.double().exp().float()\n"
    "    output.copy_(e / e.sum(-1, keepdim=True))",
    "sum in half precision": "def softmax_forward(input, output):\n"
    "    e = (input.float() - input.float().amax(-1, True)).exp().half()\n"
    "    output.copy_(e / e.sum(-1, keepdim=True, dtype=torch.float32).half())",
    "NaN hidden by the maximum": "def softmax_forward(input, output):\n    _softmax(input.nan_to_num(nan=0.0, "
    "neginf=-torch.inf), output)",
    "gradient without its inner product": "def softmax_backward(grad_output, output, grad_input):\n"
    "    grad_input.copy_(grad_output * output)",
    "log_softmax by way of the log-sum-exp": "def log_softmax_forward(input, output):\n"
    "    output.copy_(input.float() - torch.logsumexp(input.float(), -1, keepdim=True))",
}


@pytest.fixture
def wrong_backend(tmp_path, monkeypatch):
    """Installs a backend made of the reference and the given source under the name ``wrong``."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(source):
        add_distribution(tmp_path, "wrong", {"wrong": WRONG + source})
        registry.refresh()

    yield install
    sys.modules.pop("wrong_wrong", None)
    monkeypatch.undo()
    registry.refresh()


def noticed(op):
    """The first case, of the small ones, that fails for the backend ``wrong``."""
    for case in cases(op):
        if case.classes > 5000 or case.target == "probabilities":
            continue
        try:
            check(case, "wrong")
        except (AssertionError, loss_core.UnsupportedInput) as error:
            return f"{case}: {error}"
    return None


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_forward_is_noticed(fault, wrong_backend):
    op, after, *before = FAULTS[fault]
    source = CROSS_ENTROPY.format(before=before[0] if before else "", after=after or "return out")
    if before:
        # An option that is dropped is dropped in both directions.
        edit = f"num_items = byte_lengths = None; {before[0]}" if "raise" not in before[0] else ""
        source += BACKWARD.format(
            edit=f"{edit}\n    _backward(grad_loss, logits, target, weight, lse, denominator, options, grad=grad,"
            " skip_if_one=skip_if_one)"
        )
    wrong_backend(source)
    assert noticed(op)


@pytest.mark.parametrize("fault", BACKWARD_FAULTS)
def test_a_wrong_backward_is_noticed(fault, wrong_backend):
    wrong_backend(BACKWARD.format(edit=BACKWARD_FAULTS[fault]))
    assert noticed("cross_entropy")


def test_a_rescale_that_makes_ignored_rows_nan_is_noticed(wrong_backend):
    wrong_backend("def cross_entropy_rescale_live(grad_loss, grad, target, ignore_index): grad.mul_(grad_loss)")
    assert "upstream=nan,inplace" in noticed("cross_entropy")


@pytest.mark.parametrize(
    "source",
    ["", "def cross_entropy_rescale(grad_loss, grad): grad.copy_(torch.where(grad == 0, 0, grad.float() * grad_loss))"],
    ids=["none", "without targets"],
)
def test_a_rescale_is_optional_and_may_be_of_the_older_form(source, wrong_backend):
    wrong_backend("del cross_entropy_rescale_live\n" + source)
    scaled = [case for case in cases("cross_entropy", quick=True) if case.inplace and case.reduction != "none"]
    assert {"random", "one", "nan"} <= {case.upstream for case in scaled}
    for case in scaled:
        check(case, "wrong")


@pytest.mark.parametrize("fault", SOFTMAX_FAULTS)
def test_a_wrong_softmax_is_noticed(fault, wrong_backend):
    wrong_backend(SOFTMAX_FAULTS[fault])
    assert noticed("log_softmax" if fault.startswith("log_softmax") else "softmax")


def test_the_reference_renamed_is_not_noticed(wrong_backend):
    wrong_backend(CROSS_ENTROPY.format(before="", after="return out"))
    quick = [case for case in cases("cross_entropy", quick=True) if case.target != "probabilities"]
    for case in quick[::5]:
        check(case, "wrong")


def test_a_refusal_is_a_skip_where_it_may_be(wrong_backend):
    wrong_backend(CROSS_ENTROPY.format(before="if True: raise UnsupportedInput('not today')", after="return out"))
    optional = next(case for case in cases("cross_entropy") if case.optional == "float64")
    with pytest.raises(SkipTest, match="wrong refuses float64: not today"):
        check(optional, "wrong")
    with pytest.raises(loss_core.UnsupportedInput, match="not today"):
        check(next(case for case in cases("cross_entropy") if not case.optional), "wrong")


def test_a_message_names_the_place_and_three_values():
    truth = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    wanted = Expected(truth, truth.float(), torch.full_like(truth, 0.01), torch.float32)
    assert_within("gradient", truth.float() + 0.009, wanted)
    actual = truth.float()
    actual[1, 0] = 3.5
    with pytest.raises(
        AssertionError, match=r"gradient\[1, 0\] = 3.5, PyTorch 3.0, float64 3.0: off by 0.5, allowed 0"
    ):
        assert_within("gradient", actual, wanted)
    with pytest.raises(AssertionError, match="must have dtype torch.float32 and shape"):
        assert_within("gradient", actual.half(), wanted)
    actual[1, 0] = torch.nan
    with pytest.raises(AssertionError, match=r"gradient\[1, 0\] = nan"):
        assert_within("gradient", actual, wanted)


@pytest.mark.parametrize("op", ["cross_entropy", "causal_lm_loss", "softmax", "log_softmax"])
def test_cases_have_distinct_readable_ids(op):
    names = [str(case) for case in cases(op)]
    assert len(set(names)) == len(names)
    assert all(name.isprintable() and " " not in name and len(name) < 120 for name in names)
    quick = cases(op, quick=True)
    assert set(quick) < set(cases(op))
    assert max(case.classes for case in quick) <= 65537
    with pytest.raises(ValueError, match="op must be one of 'cross_entropy', .*, got 'softmin'"):
        cases("softmin")


def test_inputs_are_the_same_in_every_process():
    case = cases("cross_entropy")[40]
    program = """
    from loss_core.testing import cases, make_inputs
    inputs = make_inputs(cases("cross_entropy")[40])
    report([inputs.logits.double().nan_to_num(7.0).sum().item(), inputs.target.tolist()])
    """
    inputs = make_inputs(case)
    here = [inputs.logits.double().nan_to_num(7.0).sum().item(), inputs.target.tolist()]
    assert run_python(program, PYTHONHASHSEED="1") == here


def test_unwritten_memory_shows():
    with nan_filled_empty():
        made = [
            torch.empty(3),
            torch.empty_like(torch.ones(3)),
            torch.ones(3).new_empty(3),
            torch.empty_strided((3,), (1,)),
        ]
        assert all(tensor.isnan().all() for tensor in made)
        assert torch.empty(2, dtype=torch.int64).tolist() == [2**63 - 1] * 2
    assert torch.empty is not None
    assert "nan" not in repr(torch.empty)


def test_importing_the_suite_needs_no_test_framework():
    program = (
        "import sys, loss_core.testing\nreport(sorted({'pytest', '_pytest', 'triton', 'cutlass'} & set(sys.modules)))"
    )
    assert run_python(program) == []


def test_the_reference_module_states_its_contract():
    assert reference.API_VERSION == 1
    assert set(reference.OPS) == {"cross_entropy", "softmax", "log_softmax"}
