"""What the ops do within autograd: once, twice, in place, without a gradient; and how much memory they take."""

import gc
import sys
import warnings
import weakref

import loss_core
import pytest
import torch
from loss_core import UnsupportedInput, registry
from loss_core.reference.pieces import PIECE
from support.devices import skip_without
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

OPS = ["cross_entropy", "softmax", "log_softmax"]
REDUCTIONS = ["none", "mean", "sum", "byte_mean"]


def inputs(rows=6, classes=11, dtype=torch.float32):
    target = torch.randint(classes, (rows,))
    target[1] = -100
    return torch.randn(rows, classes).to(dtype).requires_grad_(), target


def call(op, logits, target, **options):
    if options.get("reduction") == "byte_mean":
        options["byte_lengths"] = torch.ones_like(target) + 2
    if op == "cross_entropy":
        return loss_core.cross_entropy(logits, target, **options)
    return getattr(loss_core, op)(logits)


def same_in_torch(op, logits, target, reduction="mean"):
    if op != "cross_entropy":
        return getattr(torch, op)(logits, -1)
    if reduction == "byte_mean":
        return functional.cross_entropy(logits, target, reduction="mean") / 3
    return functional.cross_entropy(logits, target, reduction=reduction)


# Second derivatives


@pytest.mark.parametrize(
    ("op", "options"),
    [("softmax", {}), ("log_softmax", {})]
    + [("cross_entropy", {"reduction": r, "inplace": i}) for r in REDUCTIONS for i in (False, True)],
    ids=str,
)
def test_second_derivatives_raise(op, options):
    """A gradient penalty: silently a constant would be the worst answer."""
    leaf, target = inputs()
    result = call(op, leaf * 1.0, target, **options)
    message = rf"loss_core\.{op} has no second derivative"
    if options.get("inplace"):
        message += "|modified by an inplace operation"
    with pytest.raises(RuntimeError, match=message):  # noqa: PT012 - in place the first line may notice already
        (grad,) = torch.autograd.grad(result.sum(), leaf, create_graph=True)
        (grad.square().sum() + leaf.sum()).backward()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("of", ["logits", "target", "both"])
def test_second_derivatives_of_probabilities_raise(of, reduction):
    logits, target = torch.randn(4, 5, dtype=torch.float64), torch.rand(4, 5, dtype=torch.float64)
    leaves = [leaf.requires_grad_() for name, leaf in (("logits", logits), ("target", target)) if of in (name, "both")]
    loss = loss_core.cross_entropy(logits, target, reduction=reduction).sum()
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    wanted = torch.autograd.grad(functional.cross_entropy(logits, target, reduction=reduction).sum(), leaves)
    for grad, truth in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad.detach(), truth, atol=1e-12, rtol=1e-12)
        with pytest.raises(RuntimeError, match=r"loss_core\.cross_entropy has no second derivative"):
            (grad.square().sum() + sum(leaf.sum() for leaf in leaves)).backward(retain_graph=True)


@pytest.mark.parametrize("op", OPS)
def test_second_derivatives_with_respect_to_the_upstream_gradient_raise(op):
    leaf, target = inputs()
    result = call(op, leaf, target)
    upstream = torch.ones_like(result).requires_grad_()
    (grad,) = torch.autograd.grad(result, leaf, upstream, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(grad.sum(), upstream)


@pytest.mark.parametrize("op", OPS)
def test_create_graph_gives_the_right_first_derivative(op):
    leaf, target = inputs(dtype=torch.float64)
    (grad,) = torch.autograd.grad(call(op, leaf, target)[..., :1].sum() if op != "cross_entropy" else
                                  call(op, leaf, target), leaf, create_graph=True)  # fmt: skip
    wanted = same_in_torch(op, leaf, target)
    (wanted,) = torch.autograd.grad(wanted[..., :1].sum() if op != "cross_entropy" else wanted, leaf)
    torch.testing.assert_close(grad.detach(), wanted, atol=1e-12, rtol=0)


# Forward mode


@pytest.mark.parametrize("transform", ["dual numbers", "torch.func.jvp"])
@pytest.mark.parametrize("op", OPS)
def test_a_tangent_is_right_or_refused(op, transform, backend, device, monkeypatch):
    """A kernel would drop it, which makes the derivative zero."""
    skip_without(backend, op)
    x, tangent = torch.randn(6, 11), torch.randn(6, 11)
    target = torch.randint(11, (6,))

    def derivative(function, *tensors):
        if transform == "torch.func.jvp":
            return torch.func.jvp(function, tensors[:1], tensors[1:])[1]
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(function(forward_ad.make_dual(*tensors))).tangent

    def ours(x, **backend):
        arguments = (x, target.to(device)) if op == "cross_entropy" else (x,)
        return getattr(loss_core, op)(*arguments, **backend)

    wanted = derivative(lambda x: same_in_torch(op, x, target), x.double(), tangent.double())
    monkeypatch.delenv("LOSS_BACKEND", raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(registry, "AUTOMATIC_ORDER", (backend, "torch"))
        registry.refresh()
        try:
            got = derivative(ours, x.to(device), tangent.to(device))
        finally:
            registry.refresh()
    torch.testing.assert_close(got.cpu().double(), wanted, atol=1e-6, rtol=1e-5)
    if backend != "torch":
        with pytest.raises(UnsupportedInput, match=f"'{backend}' has no forward-mode derivative"):
            derivative(lambda x: ours(x, backend=backend), x.to(device), tangent.to(device))
    # Without a tangent it is no matter.
    with forward_ad.dual_level():
        torch.testing.assert_close(ours(x.to(device), backend=backend), ours(x.to(device), backend="torch"))


@pytest.mark.parametrize("op", OPS)
def test_forward_over_reverse_raises(op, backend, device):
    skip_without(backend, op)
    x = torch.randn(6, 11, device=device, requires_grad=True)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward (mode )?AD"):
        call(op, forward_ad.make_dual(x, torch.ones_like(x)), torch.zeros(6, dtype=torch.int64, device=device))


# Backward more than once


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_backward_twice_through_a_retained_graph(reduction):
    leaf, target = inputs()
    loss = call("cross_entropy", leaf, target, reduction=reduction)
    upstreams = [torch.randn_like(loss) for _ in range(3)]
    grads = [torch.autograd.grad(loss, leaf, up, retain_graph=True)[0] for up in upstreams]
    wanted = same_in_torch("cross_entropy", leaf.double(), target, reduction)
    for grad, up in zip(grads, upstreams, strict=True):
        (truth,) = torch.autograd.grad(wanted, leaf, up.double(), retain_graph=True)
        torch.testing.assert_close(grad, truth, atol=1e-6, rtol=1e-5)
    assert len({grad.data_ptr() for grad in grads}) == 3, "two gradients share their memory"


def test_gradients_accumulate_over_two_backwards():
    leaf, target = inputs()
    loss = call("cross_entropy", leaf, target)
    loss.backward(retain_graph=True)
    once = leaf.grad.clone()
    loss.backward()
    torch.testing.assert_close(leaf.grad, 2 * once)


def test_without_retain_graph_the_second_backward_raises():
    leaf, target = inputs()
    loss = call("cross_entropy", leaf, target)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_inplace_refuses_a_second_backward(reduction):
    leaf, target = inputs()
    loss = call("cross_entropy", leaf * 1.0, target, inplace=True, reduction=reduction)
    loss.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace=False|modified by an inplace operation"):
        loss.sum().backward()


# Memory given away


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_inplace_gives_the_same_gradient(reduction):
    leaf, target = inputs()
    upstream = torch.tensor(0.37) if reduction != "none" else torch.randn(6)
    (wanted,) = torch.autograd.grad(call("cross_entropy", leaf * 1.0, target, reduction=reduction), leaf, upstream)
    loss = call("cross_entropy", leaf * 1.0, target, reduction=reduction, inplace=True)
    (grad,) = torch.autograd.grad(loss, leaf, upstream)
    torch.testing.assert_close(grad, wanted, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_inplace_takes_the_memory_of_the_logits(reduction):
    leaf, target = inputs()
    logits = leaf * 1.0
    loss = call("cross_entropy", logits, target, reduction=reduction, inplace=True)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert grad.data_ptr() == logits.data_ptr()
    loss = call("cross_entropy", leaf, target, reduction=reduction)
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    assert grad.data_ptr() != leaf.data_ptr()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_an_upstream_op_that_saved_the_logits_notices(reduction):
    """softmax saves its output, which the gradient overwrites."""
    leaf, target = inputs()
    probabilities = torch.softmax(leaf, -1)
    before = probabilities.detach().clone()
    version = probabilities._version
    loss = call("cross_entropy", probabilities, target, reduction=reduction, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()
    assert probabilities._version > version
    # Without inplace nothing of the kind.
    probabilities = torch.softmax(leaf, -1)
    call("cross_entropy", probabilities, target, reduction=reduction).sum().backward()
    assert torch.equal(probabilities, before)
    reference = leaf.detach().double().requires_grad_()
    same_in_torch("cross_entropy", torch.softmax(reference, -1), target, reduction).sum().backward()
    torch.testing.assert_close(leaf.grad.double(), reference.grad, atol=1e-6, rtol=1e-5)


def test_inplace_is_not_taken_where_rows_share_memory():
    row = torch.randn(1, 7)
    logits = row.expand(4, 7).detach().requires_grad_()
    target = torch.tensor([0, 1, 2, 3])
    (grad,) = torch.autograd.grad(call("cross_entropy", logits, target, inplace=True), logits)
    wanted = torch.softmax(row, -1).expand(4, 7) - functional.one_hot(target, 7)
    torch.testing.assert_close(grad, wanted / 4)
    overlapping = torch.randn(10).as_strided((4, 7), (1, 1)).detach().requires_grad_()
    before = overlapping.detach().clone()
    call("cross_entropy", overlapping, target, inplace=True).backward()
    assert torch.equal(overlapping.detach(), before)


def test_inplace_without_a_gradient_writes_nothing():
    logits, target = inputs()
    before = logits.detach().clone()
    with torch.no_grad():
        call("cross_entropy", logits, target, inplace=True)
    call("cross_entropy", logits.detach(), target, inplace=True)
    assert torch.equal(logits.detach(), before)


def test_the_gradient_keeps_its_values_when_the_logits_change_later():
    """Saved in the forward, read in the backward: autograd has to notice a change between the two."""
    leaf, target = inputs()
    logits = leaf * 1.0
    loss = call("cross_entropy", logits, target, reduction="none")
    logits.detach().add_(1)
    with torch.no_grad():
        logits.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


# What is kept alive, and what is made


@pytest.mark.parametrize(
    ("op", "options"),
    [("softmax", {}), ("log_softmax", {})]
    + [("cross_entropy", {"reduction": r, "inplace": i}) for r in REDUCTIONS for i in (False, True)],
    ids=str,
)
@pytest.mark.parametrize("backward", [False, True])
def test_no_reference_cycle_keeps_memory_alive(op, options, backward):
    gc.collect()
    gc.disable()
    try:
        leaf, target = inputs()
        logits = leaf * 1.0
        result = call(op, logits, target, **options)
        if backward:
            result.sum().backward()
        dead = [weakref.ref(logits), weakref.ref(result), weakref.ref(leaf)]
        del logits, result, leaf
        assert [ref() is None for ref in dead] == [True] * 3
    finally:
        gc.enable()


class Allocations(TorchDispatchMode):
    """The sizes, in elements, of the results of every op that runs inside, views left out."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves((args, kwargs))
                 if isinstance(t, torch.Tensor) and t.device.type != "meta"}  # fmt: skip
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.sizes.append((tensor.numel(), tensor.dtype))
        return result

    def largest(self):
        return max((n for n, _ in self.sizes), default=0)


@pytest.fixture
def one_row_at_a_time(monkeypatch):
    """The pieces of the reference made small, so that whatever is large is not one of them."""
    monkeypatch.setattr(sys.modules["loss_core.reference.pieces"], "PIECE", 1)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "no requires_grad"])
def test_without_a_gradient_nothing_of_the_logits_size_is_made(how, reduction, one_row_at_a_time):
    logits, target = inputs(32, 500, torch.bfloat16)
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(how, torch.enable_grad)
    if how == "no requires_grad":
        logits = logits.detach()
    with context(), Allocations() as made:
        call("cross_entropy", logits, target, reduction=reduction)
    assert made.largest() <= 500


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("inplace", [False, True])
def test_with_a_gradient_the_gradient_alone_is_of_the_logits_size(inplace, reduction, one_row_at_a_time):
    leaf, target = inputs(32, 500, torch.bfloat16)
    logits = leaf.clone()
    with Allocations() as made:
        call("cross_entropy", logits, target, reduction=reduction, inplace=inplace).sum().backward()
    large = [(n, dtype) for n, dtype in made.sizes if n > 500]
    # One gradient; and a copy that autograd makes for the leaf's .grad where the memory was the logits'.
    assert set(large) <= {(leaf.numel(), torch.bfloat16)}
    assert len(large) <= 1


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_softmax_makes_its_result_and_its_gradient(op, one_row_at_a_time):
    leaf, target = inputs(32, 500, torch.bfloat16)
    with Allocations() as made:
        result = call(op, leaf, target)
        upstream = torch.ones_like(result)
        torch.autograd.grad(result, leaf, upstream)
    assert [n for n, _ in made.sizes if n > 500] == [leaf.numel()] * 3
    assert all(dtype == torch.bfloat16 for n, dtype in made.sizes if n > 500)


def test_the_reference_holds_no_more_than_it_states(monkeypatch):
    """Five temporaries of PIECE elements, as loss_core.reference says."""
    assert PIECE == 2**22
    assert "80 MiB in all" in sys.modules["loss_core.reference"].__doc__
    monkeypatch.setattr(sys.modules["loss_core.reference.pieces"], "PIECE", 64 * 1024)
    leaf, target = inputs(512, 1024, torch.bfloat16)
    alive = Peak()
    with alive:
        loss_core.cross_entropy(
            leaf, target, backend="torch", label_smoothing=0.1, z_loss=0.1, softcap=5.0, weight=torch.ones(1024)
        )
    gradient, small = leaf.numel() * 2, 64 * 1024
    assert alive.peak <= gradient + 5 * 64 * 1024 * 4 + small


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_reference_holds_no_more_than_it_states_for_probabilities(dtype, direction, monkeypatch):
    assert "with class probabilities as target two more" in sys.modules["loss_core.reference"].__doc__
    piece = 64 * 1024
    monkeypatch.setattr(sys.modules["loss_core.reference.pieces"], "PIECE", piece)
    leaf, probabilities = (torch.rand(512, 1024).to(dtype).requires_grad_() for _ in range(2))
    with Peak() as forward:
        loss = loss_core.cross_entropy(
            leaf, probabilities, backend="torch", label_smoothing=0.1, z_loss=0.1, softcap=5.0, weight=torch.ones(1024)
        )
    with Peak() as backward:
        torch.autograd.grad(loss, (leaf, probabilities))
    temporaries = 7 * piece * (8 if dtype == torch.float64 else 4)
    if direction == "forward":
        assert forward.peak <= temporaries + piece
    else:
        assert backward.peak <= 2 * leaf.nbytes + temporaries + piece


class Peak(TorchDispatchMode):
    """Bytes of the storages that ops made inside and that live at the same time."""

    def __init__(self):
        super().__init__()
        self.live, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves((args, kwargs))
                 if isinstance(t, torch.Tensor)}  # fmt: skip
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in known:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage):
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, size)

    def _forget(self, size):
        self.now -= size


# Where autograd meets other things


def test_a_frozen_input_gives_a_loss_without_a_graph():
    logits, target = inputs()
    assert not loss_core.cross_entropy(logits.detach(), target).requires_grad


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_ignored_still_has_a_graph(reduction):
    logits, target = inputs()
    loss = loss_core.cross_entropy(logits, torch.full_like(target, -100), reduction=reduction)
    loss.sum().backward()
    assert logits.grad is not None
    assert not logits.grad.any()
    assert loss.isnan().item() if reduction == "mean" else not loss.any()


def test_statistics_carry_no_gradient():
    logits, target = inputs()
    stats = loss_core.cross_entropy_with_stats(logits, target, z_loss=0.1)
    assert stats.loss.requires_grad
    assert not any(part.requires_grad for part in stats[1:])
    assert stats.prediction.dtype == torch.int64
    assert stats.correct.dtype == torch.bool
    assert torch.equal(stats.prediction, logits.argmax(-1))
    plain = loss_core.cross_entropy(logits, target, z_loss=0.1)
    assert torch.equal(stats.loss, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    hidden, head = torch.randn(8, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    target = torch.randint(50, (8,))
    with torch.autocast("cpu", dtype=dtype):
        logits = hidden @ head.t()
        loss = loss_core.cross_entropy(logits, target)
        probabilities = loss_core.softmax(logits)
        assert probabilities.dtype == torch.float32
    assert logits.dtype == dtype
    assert loss.dtype == torch.float32
    assert torch.equal(loss, loss_core.cross_entropy(logits, target))
    loss.backward()
    reference = logits.detach().double().requires_grad_()
    functional.cross_entropy(reference, target).backward()
    torch.testing.assert_close(hidden.grad.double(), reference.grad @ head.double(), atol=2e-2, rtol=2e-2)


def test_deterministic_algorithms_are_allowed():
    logits, target = inputs(64, 500)
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            loss = loss_core.cross_entropy(logits, target, weight=torch.ones(500), label_smoothing=0.1)
            runs.append((loss.detach(), *torch.autograd.grad(loss, logits)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_anomaly_mode_and_hooks_see_the_gradient():
    leaf, target = inputs()
    seen = []
    logits = leaf * 1.0
    logits.register_hook(lambda grad: seen.append(grad.clone()))
    with torch.autograd.detect_anomaly(check_nan=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss_core.cross_entropy(logits, target).backward()
    assert torch.equal(seen[0], leaf.grad)
    assert seen[0].abs().sum() > 0


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant, inplace, reduction):
    hidden, head = torch.randn(4, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    target = torch.tensor([0, 5, -100, 10])

    def loss_of(hidden):
        return call("cross_entropy", hidden @ head.t(), target, inplace=inplace, reduction=reduction).sum()

    checkpoint(loss_of, hidden, use_reentrant=reentrant).backward()
    wanted = torch.autograd.grad(loss_of(hidden), (hidden, head))
    torch.testing.assert_close((hidden.grad, head.grad), wanted)


def test_saved_tensors_may_be_moved_away():
    logits, target = inputs()
    with torch.autograd.graph.save_on_cpu():
        loss = loss_core.cross_entropy(logits, target, reduction="none")
    upstream = torch.randn(6)
    wanted = loss_core.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(*(torch.autograd.grad(x, logits, upstream)[0] for x in (loss, wanted)))
