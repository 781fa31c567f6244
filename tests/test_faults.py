"""Faults that users of comparable software reported, each with an input of its kind; on every backend.

The conformance cases cover the kinds of fault that are matters of values, dtypes, layouts and options; those that need
large tensors or a device are in ``gpu/``, those of autograd, registry and packaging in ``core/``. Here stand the ones
that are best shown by themselves.
"""

import loss_core
import pytest
import torch
from support.devices import skip_without
from torch.nn import functional


def loss_and_gradient(logits, target, backend, upstream=None, **options):
    loss = loss_core.cross_entropy(logits, target, backend=backend, **options)
    return loss.detach(), torch.autograd.grad(loss, logits, upstream)[0]


def leaf(values, device, dtype=torch.float32):
    return values.detach().clone().to(device, dtype).requires_grad_()


def test_ignore_index_that_is_a_class_keeps_the_class(backend, device):
    logits, target = torch.randn(2, 3), torch.tensor([1, 2])
    loss, _ = loss_and_gradient(leaf(logits, device), target.to(device), backend, ignore_index=0)
    torch.testing.assert_close(
        loss.cpu().double(), functional.cross_entropy(logits.double(), target), atol=1e-6, rtol=0
    )


def test_mean_counts_the_rows_that_are_not_ignored(backend, device):
    logits, target = torch.randn(64, 9), torch.randint(9, (64,))
    target[::2] = -100
    loss, grad = loss_and_gradient(leaf(logits, device), target.to(device), backend)
    reference = logits.double().requires_grad_()
    wanted = functional.cross_entropy(reference, target)
    wanted.backward()
    torch.testing.assert_close(loss.cpu().double(), wanted.detach(), atol=1e-6, rtol=0)
    torch.testing.assert_close(grad.cpu().double(), reference.grad, atol=1e-7, rtol=0)


@pytest.mark.parametrize("classes", [255, 256, 257, 300, 50257])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_more_classes_than_the_targets_dtype_counts(reduction, classes, backend, device):
    """In a comparison with a uint8, a number of classes beyond 255 wraps round."""
    logits, target = torch.randn(5, classes), torch.tensor([0, 1, 44, 200, 254], dtype=torch.uint8)
    upstream = torch.rand(5) + 0.5 if reduction == "none" else torch.tensor(0.7)
    loss, grad = loss_and_gradient(
        leaf(logits, device), target.to(device), backend, upstream.to(device), reduction=reduction
    )
    reference = logits.double().requires_grad_()
    wanted = functional.cross_entropy(reference, target.long(), reduction=reduction)
    (truth,) = torch.autograd.grad(wanted, reference, upstream.double())
    torch.testing.assert_close(loss.cpu().double(), wanted.detach(), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(grad.cpu().double(), truth, atol=1e-6, rtol=1e-5)


def test_a_masked_logit_with_no_share_in_the_target(backend, device):
    logits = leaf(torch.tensor([[-torch.inf, 0.0]]), device)
    loss, grad = loss_and_gradient(logits, torch.tensor([1], device=device), backend)
    assert loss.item() == 0
    assert grad.tolist() == [[0, 0]]


def test_probabilities_of_a_masked_logit(device):
    logits = leaf(torch.tensor([[-torch.inf, 0.0], [1.0, 2.0]]), device)
    target = torch.tensor([[0.0, 1.0], [0.0, 0.0]], device=device)
    loss, grad = loss_and_gradient(logits, target, "torch", torch.ones(2, device=device), reduction="none")
    # A row whose probabilities are all zero has neither loss nor gradient.
    assert loss.tolist() == [0, 0]
    assert grad.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("classes", [40, 1003, 9001])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("shift", [3000.0, -2e4])
def test_gradients_keep_their_digits_far_from_zero(shift, reduction, classes, backend, device):
    """There an lse has lost the digits that every probability takes from it."""
    logits, target = 2 * torch.randn(4, classes) + shift, torch.tensor([0, classes - 1, -100, classes // 2])
    logits[1, : classes // 2] = -torch.inf
    upstream = torch.rand(4) + 0.5 if reduction == "none" else torch.tensor(0.7)
    _, grad = loss_and_gradient(
        leaf(logits, device), target.to(device), backend, upstream.to(device), reduction=reduction
    )
    reference = logits.double().requires_grad_()
    wanted = functional.cross_entropy(reference, target, reduction=reduction)
    (truth,) = torch.autograd.grad(wanted, reference, upstream.double())
    torch.testing.assert_close(grad.cpu().double(), truth, rtol=1e-5, atol=1e-6 * truth.abs().max().item())


@pytest.mark.parametrize("classes", [12, 1003, 50257])
def test_a_prediction_among_nan(classes, backend, device):
    """NaN is the largest, as in torch.argmax, above inf too, and the first of several is the prediction."""
    inf, nan = torch.inf, torch.nan
    rows = [{0.2: inf, 0.8: nan}, {0.2: nan, 0.8: inf}, {0.3: nan, 0.9: nan}, {0.9: nan}, {0.0: nan, 0.5: 7.0}]
    logits = torch.full((len(rows), classes), -1.0)
    for row, places in zip(logits, rows, strict=True):
        for share, value in places.items():
            row[int(share * classes)] = value
    wanted = logits.double().argmax(-1)
    target = torch.where(torch.arange(len(rows)) % 2 == 0, -100, wanted)
    result = loss_core.cross_entropy_with_stats(logits.to(device), target.to(device), reduction="none", backend=backend)
    assert result.prediction.tolist() == wanted.tolist()
    assert result.correct.tolist() == (target != -100).tolist()


def test_blocks_of_masked_logits(backend, device):
    logits = torch.full((1, 100_000), -torch.inf)
    logits[0, 50_000] = 10
    loss, grad = loss_and_gradient(leaf(logits, device), torch.tensor([50_000], device=device), backend)
    assert loss.item() == 0
    assert not grad.any()


@pytest.mark.parametrize("special", [torch.nan, torch.inf])
def test_a_diverged_row_is_not_hidden(special, backend, device):
    logits, target = torch.randn(3, 1000), torch.tensor([1, 2, 3])
    logits[1, 999] = special
    loss, grad = loss_and_gradient(
        leaf(logits, device), target.to(device), backend, torch.ones(3, device=device), reduction="none"
    )
    assert loss.isnan().tolist() == [False, True, False]
    assert grad.isnan().all(-1).tolist() == [False, True, False]
    assert grad.isnan().any(-1).tolist() == [False, True, False]


def test_a_cap_bounds_every_log_probability(backend, device):
    logits = 124 * torch.randn(8, 300).sign()
    target = torch.randint(300, (8,))
    loss, _ = loss_and_gradient(
        leaf(logits, device), target.to(device), backend, torch.ones(8, device=device), reduction="none", softcap=30.0
    )
    capped = 30 * torch.tanh(logits.double() / 30)
    wanted = functional.cross_entropy(capped, target, reduction="none")
    torch.testing.assert_close(loss.cpu().double(), wanted, atol=1e-4, rtol=0)
    assert loss.max() < 60 + 6


def test_padding_gains_nothing_from_a_cap(backend, device):
    logits = torch.randn(2, 65537) - 100
    target = torch.tensor([3, 65536])
    loss, _ = loss_and_gradient(leaf(logits, device), target.to(device), backend, softcap=30.0)
    wanted = functional.cross_entropy(30 * torch.tanh(logits.double() / 30), target)
    torch.testing.assert_close(loss.cpu().double(), wanted, atol=1e-4, rtol=0)


def test_the_loss_of_half_precision_is_float32(backend, device):
    """A mean near 36, where bfloat16 moves in steps of a quarter."""
    logits = (6 * torch.randn(32, 1000)).bfloat16()
    target = logits.float().argmin(-1)
    loss, _ = loss_and_gradient(leaf(logits, device, torch.bfloat16), target.to(device), backend)
    wanted = functional.cross_entropy(logits.double(), target)
    assert 30 < wanted < 50
    assert abs(wanted.bfloat16() - wanted) > 1e-2
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.cpu().double(), wanted, atol=1e-3, rtol=0)


def test_the_gradient_of_bfloat16_is_that_of_float32_rounded_once(backend, device):
    logits, target = torch.randn(8, 6400).bfloat16(), torch.randint(6400, (8,))
    upstream = torch.randn(8).to(device)
    results = [
        loss_and_gradient(leaf(logits, device, dtype), target.to(device), backend, upstream, reduction="none")
        for dtype in (torch.bfloat16, torch.float32)
    ]
    (low, low_grad), (full, full_grad) = results
    torch.testing.assert_close(low, full, atol=1e-3, rtol=0)
    # Triton's interpreter truncates where its kernels round.
    rounding = 2**-7 if (backend, device) == ("triton", "cpu") else 2**-8
    torch.testing.assert_close(low_grad.float(), full_grad, atol=1e-30, rtol=rounding)


@pytest.mark.parametrize("stride", ["row", "transposed batch"])
def test_sequence_first_logits(stride, backend, device):
    if stride == "row":
        logits = torch.randn(2, 5, 8).to(device).view(10, 8)[::2]
    else:
        logits = torch.randn(4, 2, 8).to(device).transpose(0, 1)
    logits = logits.detach().requires_grad_()
    target = torch.randint(8, logits.shape[:-1]).to(device)
    upstream = torch.randn(target.shape).to(device)
    loss, grad = loss_and_gradient(logits, target, backend, upstream, reduction="none")
    copy = logits.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    wanted_loss, wanted = loss_and_gradient(copy, target, backend, upstream, reduction="none")
    assert torch.equal(loss, wanted_loss)
    assert torch.equal(grad, wanted)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduce", [torch.sum, torch.mean], ids=["sum", "mean"])
def test_stride_0_upstream_gradients(reduce, weighted, backend, device):
    logits, target = torch.randn(20, 100), torch.randint(100, (20,))
    weight = torch.rand(100) + 0.1 if weighted else None
    ours = leaf(logits, device)
    reduce(
        loss_core.cross_entropy(
            ours, target.to(device), weight.to(device) if weighted else None, reduction="none", backend=backend
        )
    ).backward()
    reference = logits.double().requires_grad_()
    reduce(
        functional.cross_entropy(reference, target, weight.double() if weighted else None, reduction="none")
    ).backward()
    torch.testing.assert_close(ours.grad.cpu().double(), reference.grad, atol=1e-6, rtol=1e-5)


def test_softmax_then_cross_entropy(backend, device):
    x, target = torch.randn(6, 50), torch.randint(50, (6,))
    ours = leaf(x, device)
    p = torch.softmax(ours, -1)
    before = p.detach().clone()
    loss_core.cross_entropy(p, target.to(device), backend=backend).backward()
    assert torch.equal(p, before)
    reference = x.double().requires_grad_()
    functional.cross_entropy(torch.softmax(reference, -1), target).backward()
    torch.testing.assert_close(ours.grad.cpu().double(), reference.grad, atol=1e-7, rtol=1e-4)


@pytest.fixture
def float64_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("stats", [False, True], ids=["loss", "stats"])
@pytest.mark.parametrize(
    ("reduction", "options", "wanted"),
    [("none", {}, []), ("sum", {}, 0.0), ("mean", {}, torch.nan), ("mean", {"num_items": 3}, 0.0),
     ("mean", {"weight": True}, torch.nan), ("byte_mean", {"byte_lengths": True}, torch.nan)],
)  # fmt: skip
def test_cross_entropy_of_no_rows(reduction, options, wanted, stats, backend, device, float64_by_default):
    """It has the dtypes of a result of rows, and a gradient."""
    logits = torch.zeros(0, 7, dtype=torch.float32, device=device, requires_grad=True)
    target = torch.zeros(0, dtype=torch.int64, device=device)
    options = dict(options)
    if "weight" in options:
        options["weight"] = torch.ones(7, device=device)
    if "byte_lengths" in options:
        options["byte_lengths"] = target
    function = loss_core.cross_entropy_with_stats if stats else loss_core.cross_entropy
    result = function(logits, target, reduction=reduction, backend=backend, **options)
    loss = result.loss if stats else result
    wanted = torch.tensor(wanted, dtype=torch.float32)
    for part in (loss, result.z_loss) if stats else (loss,):
        assert part.dtype == torch.float32
        assert part.shape == wanted.shape
    torch.testing.assert_close(loss.detach().cpu(), wanted, equal_nan=True)
    if stats:
        assert [part.dtype for part in result[2:]] == [torch.float32, torch.int64, torch.bool]
    loss.sum().backward()
    assert logits.grad.shape == (0, 7)
    with torch.no_grad():
        alone = loss_core.cross_entropy(logits, target, reduction=reduction, backend=backend, **options)
    assert alone.dtype == torch.float32


# Softmax


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_zero_rows(op, backend, device):
    skip_without(backend, op)
    for shape in ((0, 2), (3, 0), (2, 0, 5)):
        x = leaf(torch.zeros(shape), device)
        getattr(loss_core, op)(x, backend=backend).sum().backward()
        assert x.grad.shape == shape


def test_far_from_zero(backend, device):
    skip_without(backend, "log_softmax")
    x = torch.rand(4, 3) - 1e7
    y = loss_core.log_softmax(x.to(device), backend=backend)
    torch.testing.assert_close(y.cpu().double(), torch.log_softmax(x.double(), -1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{"weight": True}, {"label_smoothing": 0.1}, {"logit_scale": 0.5}], ids=str)
@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_options_far_from_zero(shift, options, backend, device):
    """An lse of that size has no digits beyond a thousandth."""
    logits, target = torch.randn(9, 40) + shift, torch.randint(40, (9,))
    options = {**options, "weight": torch.rand(40)} if "weight" in options else dict(options)
    exact = logits.double().requires_grad_()
    weight = options["weight"].double() if "weight" in options else None
    wanted = functional.cross_entropy(
        exact * options.get("logit_scale", 1.0), target, weight, label_smoothing=options.get("label_smoothing", 0.0)
    )
    (wanted_grad,) = torch.autograd.grad(wanted, exact)
    options = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    loss, grad = loss_and_gradient(leaf(logits, device), target.to(device), backend, **options)
    torch.testing.assert_close(loss.cpu().double(), wanted.detach(), atol=5e-5, rtol=0)
    torch.testing.assert_close(grad.cpu().double(), wanted_grad, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sign", [-1, 1])
def test_large_logits_of_either_sign(sign, dtype, backend, device):
    skip_without(backend, "softmax")
    x = (sign * torch.linspace(85, 100, 64).view(4, 16)).to(dtype)
    y = loss_core.softmax(x.to(device), backend=backend)
    torch.testing.assert_close(y.float().sum(-1).cpu(), torch.ones(4), atol=8 * torch.finfo(dtype).eps, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_sum_of_4096_equal_terms(dtype, backend, device):
    skip_without(backend, "softmax")
    x = torch.zeros(1, 4096, dtype=dtype, device=device)
    assert (loss_core.softmax(x, backend=backend) == 1 / 4096).all()
    torch.testing.assert_close(
        loss_core.log_softmax(x, backend=backend, dtype=torch.float32),
        torch.full((1, 4096), -8.317766166719343).to(device),
        atol=2e-6,
        rtol=0,
    )
    loss = loss_core.cross_entropy(x, torch.tensor([7], device=device), backend=backend)
    assert loss.item() == pytest.approx(8.317766166719343, abs=2e-6)


def test_rows_sum_to_one_within_four_ulp(backend, device):
    skip_without(backend, "softmax")
    x = torch.arange(32.0).view(32, 1).expand(32, 32)
    for dim in (0, 1):
        total = loss_core.softmax(x.to(device), dim, backend=backend).double().sum(dim)
        assert (total - 1).abs().max().item() <= 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dim", [-1, 0])
def test_a_transposed_matrix(dim, op, backend, device):
    skip_without(backend, op)
    x = torch.randn(32, 32).t()
    ours, reference = x.to(device).detach().requires_grad_(), x.double().detach().requires_grad_()
    y, wanted = getattr(loss_core, op)(ours, dim, backend=backend), getattr(torch, op)(reference, dim)
    torch.testing.assert_close(y.cpu().double(), wanted, atol=1e-6, rtol=0)
    upstream = torch.randn(32, 32)
    (grad,) = torch.autograd.grad(y, ours, upstream.to(device))
    (truth,) = torch.autograd.grad(wanted, reference, upstream.double())
    torch.testing.assert_close(grad.cpu().double(), truth, atol=1e-6, rtol=0)


@pytest.mark.parametrize("padding", [0, 3, 8])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_saved_logits_that_come_back_lying_otherwise(reduction, padding, backend, device):
    """Hooks that move saved tensors to the CPU and back give the backward rows that are packed, at another address."""
    padded = torch.randn(6, 40 + padding)
    target = torch.tensor([3, -100, 39, 0, 7, 7])
    logits = leaf(padded, device)
    # No leaf, so that what is kept is the view.
    view = (logits * 1.0)[:, :40]
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (tensor.device, tensor.detach().cpu().clone()), lambda packed: packed[1].to(packed[0])
    ):
        loss = loss_core.cross_entropy(view, target.to(device), reduction=reduction, backend=backend)
    upstream = torch.rand(loss.shape) + 0.5
    reference = padded.double().requires_grad_()
    wanted = functional.cross_entropy(reference[:, :40], target, reduction=reduction)
    (truth,) = torch.autograd.grad(wanted, reference, upstream.double())
    for again in (False, True):
        (grad,) = torch.autograd.grad(loss, logits, upstream.to(device), retain_graph=not again)
        torch.testing.assert_close(grad.cpu().double(), truth, atol=1e-6, rtol=1e-5)


def negative_view(values):
    """A tensor of these values whose memory holds them with the other sign."""
    # As z.conj().imag is one, but contiguous.
    return torch._neg_view(-values)


@pytest.mark.parametrize(
    ("what", "reduction"),
    [("logits", "mean"), ("logits", "none"), ("upstream", "mean"), ("upstream", "none"), ("weight", "mean"),
     ("num_items", "mean")],
)  # fmt: skip
def test_negative_views_in_cross_entropy(reduction, what, backend, device):
    logits, target = torch.randn(5, 7), torch.tensor([1, -100, 0, 6, 3])
    upstream = torch.randn((5,) if reduction == "none" else ())
    options = {"weight": {"weight": torch.rand(7)}, "num_items": {"num_items": torch.tensor([2.0])}}.get(what, {})
    exact = logits.double().requires_grad_()
    weight = options["weight"].double() if what == "weight" else None
    wanted = functional.cross_entropy(exact, target, weight, reduction=reduction) * (2 if what == "num_items" else 1)
    (wanted_grad,) = torch.autograd.grad(wanted, exact, upstream.double())
    tensors = {"logits": logits, "upstream": upstream, **options}
    tensors = {name: (negative_view if name == what else torch.clone)(of.to(device)) for name, of in tensors.items()}
    logits, upstream, target = tensors.pop("logits").requires_grad_(), tensors.pop("upstream"), target.to(device)
    loss, grad = loss_and_gradient(logits, target, backend, upstream, reduction=reduction, **tensors)
    alone = loss_core.cross_entropy(logits.detach(), target, backend=backend, reduction=reduction, **tensors)
    for result in (loss, alone):
        torch.testing.assert_close(result.cpu().double(), wanted.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grad.cpu().double(), wanted_grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("what", ["input", "upstream"])
def test_negative_views_in_softmax(what, dim, op, backend, device):
    input, upstream = torch.randn(6, 40), torch.randn(6, 40)
    exact = input.double().requires_grad_()
    wanted = getattr(torch, op)(exact, dim)
    (wanted_grad,) = torch.autograd.grad(wanted, exact, upstream.double())
    input, upstream = input.to(device), upstream.to(device)
    input, upstream = (negative_view(input), upstream) if what == "input" else (input, negative_view(upstream))
    output = getattr(loss_core, op)(input.requires_grad_(), dim, backend=backend)
    (grad,) = torch.autograd.grad(output, input, upstream)
    torch.testing.assert_close(output.detach().cpu().double(), wanted.detach(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(grad.cpu().double(), wanted_grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("inplace", [False, True], ids=["apart", "inplace"])
@pytest.mark.parametrize("upstream", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize(
    ("reduction", "classes", "dtype", "options"),
    [
        ("mean", 37, torch.float32, {}),
        ("sum", 64, torch.bfloat16, {}),
        ("none", 37, torch.float16, {}),
        ("byte_mean", 37, torch.bfloat16, {"byte_lengths": torch.tensor([3, 1, 4, 1, 5])}),
        ("mean", 37, torch.float16, {"weight": torch.arange(37) / 37}),
        ("sum", 37, torch.float32, {"weight": torch.arange(37) / 37, "label_smoothing": 0.1}),
        ("mean", 37, torch.float32, {"ignore_index": 5}),
    ],
    ids=["mean", "sum", "none", "bytes", "weight", "smoothing", "class"],
)
def test_an_upstream_that_is_not_finite_leaves_ignored_rows_alone(
    reduction, classes, dtype, options, upstream, inplace, backend, device
):
    """Zero times infinity is NaN; that of a row with weight 0 too, which is not ignored."""
    ignored = options.get("ignore_index", -100)
    logits, target = torch.randn(5, classes).to(dtype), torch.tensor([3, ignored, 0, ignored, 36])
    leaves = leaf(logits, device, dtype)
    sent = torch.full((5,) if reduction == "none" else (), upstream)
    on_device = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()
    }
    _, grad = loss_and_gradient(
        leaves * 1.0 if inplace else leaves, target.to(device), backend, sent.to(device), reduction=reduction,
        inplace=inplace, **on_device,
    )  # fmt: skip
    exact = logits.double().requires_grad_()
    of_torch = {name: value for name, value in options.items() if name != "byte_lengths"}
    if "weight" in of_torch:
        of_torch["weight"] = of_torch["weight"].double()
    reduced = "sum" if reduction == "byte_mean" else reduction
    wanted = functional.cross_entropy(exact, target, reduction=reduced, **of_torch)
    (truth,) = torch.autograd.grad(wanted, exact, sent.double())
    # PyTorch has inf - inf = NaN at a target, where a kernel that forms the difference first has an infinity.
    assert torch.equal(grad.cpu().isfinite(), truth.isfinite())
    assert not grad[[1, 3]].any()
    assert truth.isfinite().sum() == 2 * classes
    if "weight" in options and "label_smoothing" not in options:
        assert truth[2].isnan().all()
        assert grad[2].isnan().all()
