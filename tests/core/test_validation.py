"""What is refused, and that the message names what was expected and what came."""

import loss_core
import pytest
import torch
from loss_core import UnsupportedInput, cross_entropy_arguments

LOGITS = torch.zeros(2, 3, 5)
TARGET = torch.zeros(2, 3, dtype=torch.int64)

REFUSED = [
    ({"input": [1.0]}, TypeError, "input must be a tensor of float16, bfloat16, float32, float64, got list"),
    ({"input": LOGITS.long()}, TypeError, "input must be a tensor of float16, .*, got torch.int64"),
    ({"input": torch.tensor(1.0)}, ValueError, "input must have a class dimension, got a scalar"),
    ({"input": torch.zeros(2, 3, 0)}, ValueError, r"at least one class, got shape \(2, 3, 0\) with classes in dim 2"),
    ({"target": [[0]]}, TypeError, "target must be a tensor, got list"),
    ({"target": TARGET.bool()}, TypeError, r"indices \(int32, int64, uint8\) or .* probabilities, got torch.bool"),
    ({"target": TARGET.short()}, TypeError, "got torch.int16"),
    ({"target": TARGET[0]}, ValueError, r"target must have shape \(2, 3\) for input of shape \(2, 3, 5\).*got \(3,\)"),
    ({"dim": 1}, ValueError, r"target must have shape \(2, 5\) .* with classes in dim 1, got \(2, 3\)"),
    ({"dim": 3}, IndexError, r"expected to be in \[-3, 2\] for input of shape \(2, 3, 5\), got 3"),
    ({"dim": 1.5}, TypeError, "dim must be an integer, got float"),
    ({"dim": None}, TypeError, "dim must be an integer, got NoneType"),
    ({"target": torch.zeros(2, 3)}, ValueError, r"target must have shape \(2, 3, 5\)"),
    ({"target": torch.zeros(2, 3, 5), "ignore_index": 1}, ValueError, "ignore_index is for class indices"),
    ({"target": TARGET.to("meta")}, ValueError, "target must be on input's device cpu, got meta"),
    ({"weight": torch.ones(4)}, ValueError, r"weight must have shape \(5,\), one per class, got \(4,\)"),
    (
        {"weight": torch.ones(5, dtype=torch.int64)},
        TypeError,
        "weight must be a floating-point tensor, got torch.int64",
    ),
    ({"weight": 2.0}, TypeError, "weight must be a floating-point tensor, got float"),
    ({"weight": torch.ones(5, device="meta")}, ValueError, "weight must be on input's device cpu, got meta"),
    ({"reduction": "avg"}, ValueError, "reduction must be one of 'none', 'mean', 'sum', 'byte_mean', got 'avg'"),
    ({"label_smoothing": 1.5}, ValueError, r"label_smoothing must be in \[0, 1\], got 1.5"),
    ({"label_smoothing": float("nan")}, ValueError, "label_smoothing"),
    ({"z_loss": -0.1}, ValueError, "z_loss must not be negative, got -0.1"),
    ({"softcap": 0.0}, ValueError, "softcap must be positive or None, got 0.0"),
    ({"softcap": -3}, ValueError, "softcap must be positive or None, got -3"),
    *(
        ({name: value}, ValueError, f"{name} must be finite, got {value}")
        for name in ("label_smoothing", "z_loss", "softcap", "logit_scale")
        for value in (float("inf"), float("nan"))
    ),
    ({"logit_scale": float("-inf")}, ValueError, "logit_scale must be finite, got -inf"),
    ({"logit_scale": "2"}, TypeError, "logit_scale must be a number, got str"),
    (
        {"byte_lengths": TARGET},
        ValueError,
        "byte_lengths go with reduction='byte_mean'.*got reduction='mean' with byte",
    ),
    ({"reduction": "byte_mean"}, ValueError, "got reduction='byte_mean' without byte_lengths"),
    ({"reduction": "byte_mean", "byte_lengths": TARGET[0]}, ValueError, r"target's shape \(2, 3\), got \(3,\)"),
    ({"reduction": "byte_mean", "byte_lengths": torch.ones(2, 3)}, TypeError, "tensor of integers, got torch.float32"),
    ({"reduction": "byte_mean", "byte_lengths": TARGET.to("meta")}, ValueError, "byte_lengths must be on input's dev"),
    *(
        (
            {"reduction": "byte_mean", "byte_lengths": TARGET.index_fill(1, torch.tensor([2]), length)},
            ValueError,
            rf"byte_lengths must be in \[0, 16777216\], got {length} in row \(0, 2\)",
        )
        for length in (-1, 2**24 + 1, 2**48)
    ),
    *(
        ({"reduction": "byte_mean", "byte_lengths": TARGET.to(dtype)}, TypeError, f"tensor of integers, got {dtype}")
        for dtype in (torch.bool, torch.complex64)
    ),
    ({"reduction": "byte_mean", "byte_lengths": [[1]]}, TypeError, "byte_lengths must be a tensor of integers, got li"),
    *(
        (
            {"weight": torch.ones(5, requires_grad=True), **more},
            ValueError,
            "weight gets no gradient and must not require one, got requires_grad=True",
        )
        for more in ({}, {"label_smoothing": 0.1}, {"input": LOGITS.clone().requires_grad_()})
    ),
    ({"num_items": torch.ones(1, requires_grad=True)}, ValueError, "num_items gets no gradient and must not require"),
    ({"num_items": 3, "reduction": "sum"}, ValueError, "num_items is the denominator of reduction='mean', got .*'sum'"),
    ({"num_items": torch.ones(2)}, ValueError, r"num_items must have one element, got shape \(2,\)"),
    ({"num_items": "3"}, TypeError, "num_items must be a number or a tensor of one element, got str"),
    ({"backend": "nobody"}, loss_core.BackendUnavailable, "no backend named 'nobody'"),
]


@pytest.mark.parametrize(
    ("change", "error", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
@pytest.mark.parametrize("function", [loss_core.cross_entropy, loss_core.cross_entropy_with_stats])
def test_cross_entropy_refuses(function, change, error, message):
    with pytest.raises(error, match=message):
        function(**{"input": LOGITS, "target": TARGET, **change})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize(("bad", "classes"), [(5, 5), (156, 5), (255, 200)])
def test_a_target_out_of_range_names_its_row(dtype, bad, classes):
    target = torch.zeros(2, 3, dtype=dtype)
    target[1, 2] = bad
    message = rf"target {bad} in row \(1, 2\) is outside \[0, {classes}\) and is not ignore_index \(-100\)"
    with pytest.raises(IndexError, match=message):
        loss_core.cross_entropy(torch.zeros(2, 3, classes), target)
    with pytest.raises(IndexError, match="in row 5 is outside"):
        loss_core.cross_entropy(torch.zeros(6, classes), target.view(6))
    # As ignore_index the same value is none of that.
    loss_core.cross_entropy(torch.zeros(6, classes), target.view(6), ignore_index=bad)


def test_a_negative_target_is_out_of_range():
    with pytest.raises(IndexError, match="target -1 in row 0"):
        loss_core.cross_entropy(torch.zeros(1, 5), torch.tensor([-1]))


def test_an_ignore_index_that_the_targets_dtype_does_not_hold_ignores_nothing():
    """Wrapped round to 32 bits it would be the target."""
    logits, target = torch.randn(2, 5), torch.tensor([3, -1], dtype=torch.int32)
    with pytest.raises(IndexError, match="target -1 in row 1"):
        loss_core.cross_entropy(logits, target, ignore_index=2**32 - 1)
    loss = loss_core.cross_entropy(logits, target.abs(), ignore_index=2**32 + 1, backend="torch")
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, target.abs().long()))


def test_weights_of_probabilities_that_want_a_gradient_are_refused():
    """torch has one there, which nobody may silently take for zero."""
    weight = torch.rand(3).requires_grad_()
    with pytest.raises(ValueError, match="weight gets no gradient"):
        loss_core.cross_entropy(torch.zeros(2, 3), torch.rand(2, 3), weight)


def test_where_no_gradient_is_wanted_weights_may_require_one():
    weight, items = torch.rand(5).requires_grad_(), torch.tensor(7.0, requires_grad=True)
    with torch.no_grad():
        loss = loss_core.cross_entropy(LOGITS, TARGET, weight, num_items=items)
        assert loss == loss_core.cross_entropy(LOGITS, TARGET, weight.detach(), num_items=7)


def test_statistics_of_probabilities_are_refused():
    with pytest.raises(UnsupportedInput, match="takes class indices, got a floating-point target"):
        loss_core.cross_entropy_with_stats(torch.zeros(2, 3), torch.zeros(2, 3))


@pytest.mark.parametrize("op", [loss_core.softmax, loss_core.log_softmax])
def test_softmax_refuses(op):
    with pytest.raises(TypeError, match="input must be a tensor of float16, .*, got torch.int64"):
        op(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(TypeError, match="dtype must be one of float16, .*, got torch.int32"):
        op(torch.zeros(3), dtype=torch.int32)
    for dim, got in ((1.0, "float"), (None, "NoneType"), ([0], "list")):
        with pytest.raises(TypeError, match=f"dim must be an integer, got {got}"):
            op(torch.zeros(3), dim)
    with pytest.raises(IndexError, match=r"expected to be in \[-1, 0\] for input of shape \(3,\), got 1"):
        op(torch.zeros(3), 1)


def test_causal_lm_loss_refuses():
    logits, labels = torch.zeros(1, 3, 5), torch.zeros(1, 3, dtype=torch.int64)
    for change, error, message in (
        ({"cu_seqlen": 1}, TypeError, "unexpected keyword argument 'cu_seqlen'"),
        ({"num_items": 1, "num_items_in_batch": 2}, ValueError, "are the same argument"),
        ({"logits": [1.0]}, TypeError, "logits must be a tensor of float16, .*, got list"),
        ({"logits": torch.zeros(5)}, ValueError, r"logits must have shape \(..., tokens, classes\), got \(5,\)"),
        ({"vocab_size": 6}, ValueError, "vocab_size must be the logits' last dimension 5, got 6"),
        ({"labels": labels[0]}, ValueError, r"labels must have shape \(1, 3\) for logits of .*, got \(3,\)"),
        ({"labels": labels.float()}, TypeError, "labels must be a tensor of int32, int64, uint8, got torch.float32"),
        ({"shift_labels": labels[0]}, ValueError, "shift_labels must have shape"),
        *(
            ({"reduction": "byte_mean", "byte_lengths": lengths}, error, message)
            for lengths, error, message in (
                ([[1, 2, 3]], TypeError, "byte_lengths must be a tensor of integers, got list"),
                (torch.tensor(1), ValueError, r"byte_lengths must have target's shape \(1, 3\), got \(\)"),
                (labels[:, 1:], ValueError, r"byte_lengths must have target's shape \(1, 3\), got \(1, 2\)"),
                (labels.bool(), TypeError, "byte_lengths must be a tensor of integers, got torch.bool"),
            )
        ),
    ):
        with pytest.raises(error, match=message):
            loss_core.causal_lm_loss(**{"logits": logits, "labels": labels, **change})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_byte_lengths_of_ignored_rows_may_be_anything(dtype):
    target, lengths = torch.tensor([1, -100, 2]), torch.tensor([3, -7, 2**24], dtype=dtype)
    logits = torch.randn(3, 5)
    loss = loss_core.cross_entropy(logits, target, reduction="byte_mean", byte_lengths=lengths)
    total = torch.nn.functional.cross_entropy(logits.double(), target, reduction="sum")
    torch.testing.assert_close(loss.double(), total / (3 + 2**24))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_byte_lengths_that_nobody_looks_at_are_cut_off(dtype):
    given = torch.tensor([-(2**31), -1, 0, 9, 2**24, 2**24 + 1, 2**31 - 1], dtype=dtype)
    target = torch.zeros(7, dtype=torch.int64)
    bounded = cross_entropy_arguments.bounded_byte_lengths(given, target, -100, target.shape, looked_at=False)
    assert bounded.tolist() == [0, 0, 0, 9, 2**24, 2**24, 2**24]
    assert bounded.dtype == dtype
    assert given[0] == -(2**31), "the caller's are not changed"
