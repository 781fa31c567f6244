"""The usual calls, whose functions a backend prepares and loss-core keeps."""

import pytest
import torch
from loss_core import cross_entropy, cross_entropy_with_stats, log_softmax, reference, registry, softmax, use_backend
from loss_core.backend import CrossEntropyOptions, PreparedCrossEntropy, PreparedSoftmax, UnsupportedInput

ROWS, CLASSES = 6, 5


class Preparing:
    """A backend that notes what it is asked to prepare and what of it is called."""

    API_VERSION = 1
    OPS = ("cross_entropy", "softmax", "log_softmax")

    def __init__(self):
        self.asked, self.called, self.refusing, self.nothing = [], [], False, False
        self.cross_entropy_forward = reference.cross_entropy_forward
        self.cross_entropy_backward = reference.cross_entropy_backward
        for op in ("softmax", "log_softmax"):
            for direction in ("forward", "backward"):
                setattr(self, f"{op}_{direction}", getattr(reference, f"{op}_{direction}"))

    def unavailable_reason(self, device):
        return None

    def cross_entropy_prepare(self, *facts, gradient):
        self.asked.append((*facts, gradient))
        if self.refusing:
            raise UnsupportedInput("not today")
        if self.nothing:
            return None
        rows, options = facts[3], facts[-1]

        def forward(logits, target, grad):
            self.called.append("forward")
            assert (grad is not None) == gradient
            result = reference.cross_entropy_forward(
                in_rows(logits), target.view(-1), None, None, None, options, grad=in_rows(grad), stats=False
            )
            if not gradient:
                return result.loss, None
            behind = torch.full((3,), float("nan"), dtype=result.lse.dtype)
            divides = [] if result.denominator is None else [result.denominator]
            return result.loss, torch.cat([result.lse, *divides, behind])

        def backward(grad_loss, logits, target, saved, grad, skip_if_one):
            self.called.append(f"backward {skip_if_one}")
            denominator = saved[rows : rows + 1] if options.reduction == "mean" else None
            reference.cross_entropy_backward(
                grad_loss, in_rows(logits), target.view(-1), None, saved[:rows], denominator, options,
                grad=in_rows(grad), skip_if_one=skip_if_one,
            )  # fmt: skip

        return PreparedCrossEntropy(forward, backward if gradient else None)

    def softmax_prepare(self, *facts):
        return self.prepared_softmax("softmax", *facts)

    def log_softmax_prepare(self, *facts):
        return self.prepared_softmax("log_softmax", *facts)

    def prepared_softmax(self, op, *facts):
        self.asked.append(facts)
        if self.refusing:
            raise UnsupportedInput("not today")
        if self.nothing:
            return None

        def forward(input, output):
            self.called.append("forward")
            getattr(reference, f"{op}_forward")(in_rows(input), in_rows(output))

        def backward(*tensors):
            self.called.append("backward")
            assert all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in tensors)
            getattr(reference, f"{op}_backward")(*map(in_rows, tensors))

        return PreparedSoftmax(forward, backward)


def in_rows(tensor):
    return tensor if tensor is None or tensor.dim() == 2 else tensor.view(-1, tensor.shape[-1])


@pytest.fixture
def preparing():
    backend = Preparing()

    class Entry:
        def load(self):
            return backend

    search = registry._discover

    def discover():
        found = search()
        found.by_name["preparing"] = registry.Backend("preparing", "tests", "1.0", Entry())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_discover", discover)
        registry.refresh()
        yield backend
    registry.refresh()


def logits_and_target(rows=ROWS, classes=CLASSES, dtype=torch.float32):
    target = torch.arange(rows) % classes
    target[1] = -100
    return torch.randn(rows, classes, dtype=dtype).requires_grad_(), target


def of_torch(logits, target, **options):
    reference = logits.detach().double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(reference, target, **options)
    return loss.detach(), torch.autograd.grad(0.7 * loss, reference)[0]


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"label_smoothing": 0.1, "ignore_index": 2}])
def test_it_is_asked_once_and_gives_the_loss_and_the_gradient(preparing, options):
    for _ in range(3):
        logits, target = logits_and_target()
        target[1] = 2
        loss = cross_entropy(logits, target, backend="preparing", **options)
        (0.7 * loss).backward()
        wanted_loss, wanted_grad = of_torch(logits, target, **options)
        torch.testing.assert_close(loss.detach().double(), wanted_loss, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(logits.grad.double(), wanted_grad, atol=1e-6, rtol=1e-6)
    (facts,) = preparing.asked
    assert facts == (
        torch.device("cpu"), torch.float32, torch.int64, ROWS, CLASSES, CLASSES, 0, CrossEntropyOptions(**options), True
    )  # fmt: skip
    assert preparing.called == ["forward", "backward True"] * 3


@pytest.mark.parametrize("reason", ["no_grad", "inference_mode", "not required"])
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}])
def test_without_a_gradient_it_is_asked_for_the_loss_alone(preparing, options, reason):
    for _ in range(3):
        logits, target = logits_and_target()
        if reason == "not required":
            loss = cross_entropy(logits.detach(), target, backend="preparing", **options)
        else:
            with getattr(torch, reason)():
                loss = cross_entropy(logits, target, backend="preparing", **options)
        assert not loss.requires_grad
        torch.testing.assert_close(loss.double(), of_torch(logits, target, **options)[0], atol=1e-6, rtol=1e-6)
    (facts,) = preparing.asked
    assert facts[-2:] == (CrossEntropyOptions(**options), False)
    assert preparing.called == ["forward"] * 3


@pytest.mark.parametrize("shape", [(2, 3), (2, 1, 3), ()], ids=str)
def test_more_dimensions_are_rows_too(preparing, shape):
    logits = torch.randn(*shape, CLASSES).requires_grad_()
    target = torch.randint(CLASSES, shape)
    wanted_loss, wanted_grad = of_torch(logits.reshape(-1, CLASSES), target.reshape(-1))
    loss = cross_entropy(logits, target, backend="preparing")
    for _ in range(2):
        (grad,) = torch.autograd.grad(0.7 * loss, logits, retain_graph=True)
        torch.testing.assert_close(grad.double(), wanted_grad.view(logits.shape), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(loss.detach().double(), wanted_loss, atol=1e-6, rtol=1e-6)
    (facts,) = preparing.asked
    assert facts[3:6] == (max(1, target.numel()), CLASSES, CLASSES)
    assert preparing.called == ["forward", "backward True", "backward False"]


def test_it_is_asked_again_for_what_is_not_the_same(preparing):
    memory = torch.randn(ROWS * 9 + 1)
    target = torch.arange(ROWS) % CLASSES
    views = [
        memory[: ROWS * CLASSES].view(ROWS, CLASSES),
        memory[1 : ROWS * CLASSES + 1].view(ROWS, CLASSES),
        memory[: ROWS * 9].view(ROWS, 9)[:, :CLASSES],
        memory[: ROWS * CLASSES].view(ROWS, CLASSES).double(),
        memory[: (ROWS - 1) * CLASSES].view(ROWS - 1, CLASSES),
        memory[: ROWS * 9].view(ROWS, 9),
    ]
    calls = [(view, target[: len(view)], {}) for view in views]
    calls += [
        (views[0], target.int(), {}),
        (views[0], target, {"reduction": "sum"}),
        (views[0], target, {"z_loss": 0.5}),
    ]
    for number, (logits, labels, options) in enumerate(calls):
        for _ in range(2):
            cross_entropy(logits.detach().requires_grad_(), labels, backend="preparing", **options)
        assert len(preparing.asked) == number + 1
    assert len(set(preparing.asked)) == len(calls)


def test_a_second_backward_computes_the_gradient_again(preparing):
    logits, target = logits_and_target()
    loss = cross_entropy(logits, target, backend="preparing")
    _, wanted = of_torch(logits, target)
    first, second = (torch.autograd.grad(0.7 * loss, logits, retain_graph=True)[0] for _ in range(2))
    assert preparing.called == ["forward", "backward True", "backward False"]
    assert first.data_ptr() != second.data_ptr()
    for grad in (first, second):
        torch.testing.assert_close(grad.double(), wanted, atol=1e-6, rtol=1e-6)


def test_logits_that_change_after_the_call_are_reported(preparing):
    logits, target = logits_and_target()
    middle = logits * 1.0
    loss = cross_entropy(middle, target, backend="preparing")
    middle.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert preparing.called == ["forward"]


@pytest.mark.parametrize("layout", ["padded", "offset", "transposed", "three dims"])
def test_a_hook_may_give_back_saved_tensors_that_lie_otherwise(preparing, layout):
    """As ``torch.autograd.graph.save_on_cpu`` does, and checkpointing may."""
    _, target = logits_and_target()
    memory = torch.randn(ROWS * 9 + 1)
    logits = (memory[1:] if layout == "offset" else memory[:-1]).view(ROWS, 9)[:, :CLASSES]
    if layout == "three dims":
        logits, target = logits.contiguous().view(2, 3, CLASSES), target.view(2, 3)
    logits.requires_grad_()

    def give_back(tensor):
        if not tensor.is_floating_point():
            return tensor.repeat_interleave(2).view(*tensor.shape, 2)[..., 0]
        return tensor.contiguous() if layout in ("padded", "offset") else tensor.mT.contiguous().mT

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), give_back):
        loss = cross_entropy(logits, target, backend="preparing")
    _, wanted = of_torch(in_rows(logits), target.reshape(-1))
    for again in (False, True):
        (grad,) = torch.autograd.grad(0.7 * loss, logits, retain_graph=not again)
        torch.testing.assert_close(in_rows(grad).double(), wanted, atol=1e-6, rtol=1e-6)
    assert preparing.called == ["forward"]


def test_second_derivatives_are_refused(preparing):
    logits, target = logits_and_target()
    loss = cross_entropy(logits, target, backend="preparing")
    (grad,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.sum().backward()


def test_a_target_out_of_range_is_found_before_anything_runs(preparing):
    logits, target = logits_and_target()
    target[3] = CLASSES
    for _ in range(2):
        with pytest.raises(IndexError, match="row 3"):
            cross_entropy(logits, target, backend="preparing")
    assert preparing.called == []


@pytest.mark.parametrize("refusing", [True, False])
def test_what_it_does_not_prepare_goes_the_general_way(preparing, refusing):
    preparing.refusing, preparing.nothing = refusing, True
    logits, target = logits_and_target()
    loss = cross_entropy(logits, target, backend="preparing")
    (0.7 * loss).backward()
    wanted_loss, wanted_grad = of_torch(logits, target)
    torch.testing.assert_close(loss.detach().double(), wanted_loss, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(logits.grad.double(), wanted_grad, atol=1e-6, rtol=1e-6)
    alone = cross_entropy(logits.detach(), target, backend="preparing")
    torch.testing.assert_close(alone.double(), wanted_loss, atol=1e-6, rtol=1e-6)
    assert [facts[-1] for facts in preparing.asked] == [True, False]
    assert preparing.called == []


class Labelled(torch.Tensor):
    """A subclass, which may have no memory of its own."""


@pytest.mark.parametrize(
    "unusual",
    ["none", "weight", "num_items", "byte_mean", "inplace", "stats", "class dim", "strided dims", "strided target",
     "class stride", "no rows", "subclass", "torch.func"],
)  # fmt: skip
def test_unusual_calls_are_not_prepared(preparing, unusual):
    logits, target = logits_and_target()
    call = {"backend": "preparing"}
    if unusual == "stats":
        cross_entropy_with_stats(logits, target, **call)
    elif unusual == "torch.func":
        with pytest.raises(RuntimeError, match="setup_context"):
            torch.func.grad(lambda x: cross_entropy(x, target, **call))(logits.detach())
    else:
        logits, target, options = {
            "none": (logits, target, {"reduction": "none"}),
            "weight": (logits, target, {"weight": torch.ones(CLASSES)}),
            "num_items": (logits, target, {"num_items": 3}),
            "byte_mean": (logits, target, {"reduction": "byte_mean", "byte_lengths": torch.ones(ROWS).long()}),
            "inplace": (logits * 1, target, {"inplace": True}),
            "class dim": (logits.t(), target, {"dim": 0}),
            "strided dims": (logits.view(2, 3, CLASSES)[:, :2], target.view(2, 3)[:, :2], {}),
            "strided target": (logits, target.repeat_interleave(2)[::2], {}),
            "class stride": (torch.randn(CLASSES, ROWS).t().requires_grad_(), target, {}),
            "no rows": (logits[:0], target[:0], {}),
            "subclass": (logits.detach().as_subclass(Labelled).requires_grad_(), target, {}),
        }[unusual]
        loss = cross_entropy(logits, target, **options, **call)
        if loss.dim() == 0:
            loss.backward()
    assert preparing.asked == []


def test_the_choice_of_the_backend_is_not_kept(preparing):
    logits, target = logits_and_target()
    for _ in range(2):
        with use_backend("preparing"):
            cross_entropy(logits, target)
        cross_entropy(logits, target, backend="torch")
    assert len(preparing.asked) == 1
    assert preparing.called == ["forward"] * 2
    registry.refresh()
    cross_entropy(logits, target, backend="preparing")
    assert len(preparing.asked) == 2


# Softmax

SOFTMAXES = pytest.mark.parametrize("op", [softmax, log_softmax], ids=lambda op: op.__name__)


def softmax_of_torch(op, input, upstream):
    exact = input.detach().double().requires_grad_()
    output = getattr(torch, op.__name__)(exact, -1)
    return output.detach(), torch.autograd.grad(output, exact, upstream.double())[0]


@SOFTMAXES
@pytest.mark.parametrize("shape", [(ROWS, CLASSES), (2, 3, CLASSES), (CLASSES,)], ids=str)
def test_a_softmax_is_asked_once_and_gives_result_and_gradient(preparing, op, shape):
    for dim in (-1, -1, len(shape) - 1):
        input, upstream = torch.randn(shape).requires_grad_(), torch.randn(shape)
        output = op(input, dim, backend="preparing")
        wanted, wanted_grad = softmax_of_torch(op, input, upstream)
        for _ in range(2):
            (grad,) = torch.autograd.grad(output, input, upstream, retain_graph=True)
            torch.testing.assert_close(grad.double(), wanted_grad, atol=1e-6, rtol=1e-5)
        alone = op(input.detach(), dim, backend="preparing")
        for result in (output.detach(), alone):
            torch.testing.assert_close(result.double(), wanted, atol=1e-6, rtol=1e-5)
        assert not alone.requires_grad
    device, rows = torch.device("cpu"), max(1, input.numel() // CLASSES)
    # The dimension has two names.
    assert preparing.asked == [(device, torch.float32, rows, CLASSES, CLASSES, 0)] * 2
    assert preparing.called == ["forward", "backward", "backward", "forward"] * 3


@SOFTMAXES
@pytest.mark.parametrize("what", ["upstream", "saved"])
@pytest.mark.parametrize("layout", ["expanded", "transposed", "offset"])
def test_a_softmax_whose_gradient_or_saved_result_lies_otherwise(preparing, op, what, layout):
    def otherwise(tensor):
        if layout == "expanded":
            return tensor[:1].clone().expand_as(tensor)
        if layout == "transposed":
            return tensor.t().contiguous().t()
        memory = torch.empty(tensor.numel() + 1)
        memory[1:] = tensor.reshape(-1)
        return memory[1:].view(tensor.shape)

    input, upstream = torch.randn(1, CLASSES).repeat(ROWS, 1).requires_grad_(), torch.randn(ROWS, CLASSES)
    wanted_of = otherwise(upstream) if what == "upstream" else upstream
    unpack = otherwise if what == "saved" else (lambda tensor: tensor)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), unpack):
        output = op(input, backend="preparing")
    (grad,) = torch.autograd.grad(output, input, wanted_of)
    torch.testing.assert_close(grad.double(), softmax_of_torch(op, input, wanted_of)[1], atol=1e-6, rtol=1e-5)
    assert preparing.called == ["forward"]


@SOFTMAXES
@pytest.mark.parametrize(
    "unusual",
    ["dtype", "autocast", "class dim", "class stride", "strided dims", "empty", "scalar", "subclass", "refusing",
     "nothing"],
)  # fmt: skip
def test_an_unusual_softmax_goes_the_general_way(preparing, op, unusual):
    preparing.refusing, preparing.nothing = unusual == "refusing", unusual == "nothing"
    input, dim, options = torch.randn(ROWS, CLASSES), -1, {}
    if unusual == "dtype":
        options = {"dtype": torch.float64}
    input = {
        "autocast": input.bfloat16(),
        "class dim": input.t(),
        "class stride": torch.randn(CLASSES, ROWS).t(),
        "strided dims": torch.randn(2, ROWS, 3, CLASSES)[:, :, 1],
        "empty": input[:0],
        "scalar": torch.tensor(1.0),
        "subclass": input.as_subclass(Labelled),
    }.get(unusual, input)
    dim = 0 if unusual == "class dim" else -1
    input.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=unusual == "autocast"):
        output = op(input, dim, backend="preparing", **options)
    assert output.dtype == (torch.float32 if unusual == "autocast" else options.get("dtype", torch.float32))
    exact = getattr(torch, op.__name__)(input.detach().double(), dim)
    torch.testing.assert_close(output.detach().as_subclass(torch.Tensor).double(), exact, atol=1e-6, rtol=1e-5)
    assert preparing.called == []


@SOFTMAXES
def test_second_derivatives_of_a_softmax_are_refused(preparing, op):
    input = torch.randn(ROWS, CLASSES, requires_grad=True)
    (grad,) = torch.autograd.grad(op(input, backend="preparing")[:, 0].sum(), input, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.sum().backward()
