"""torch.compile: one graph, the choice of the backend inside it, values of eager."""

import loss_core
import pytest
import torch
from loss_core import UnsupportedInput, registry
from support.plugins import add_distribution

OPS = ["cross_entropy", "softmax", "log_softmax"]
REDUCTIONS = ["none", "mean", "sum", "byte_mean"]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def both(function, *tensors, compiled, upstream=None):
    """Results of `function` and the gradients of its tensors that need one, eager and compiled."""
    results = []
    for run in (function, compiled):
        leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        result = run(*leaves)
        sent = torch.linspace(0.5, 2, result.numel(), dtype=result.dtype).view(result.shape)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        results.append((result.detach(), *torch.autograd.grad(result, wanted, sent)))
    return results


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_cross_entropy_in_one_graph(dynamic, reduction):
    def function(logits, target):
        lengths = target.clamp(0, 5) + 1 if reduction == "byte_mean" else None
        return loss_core.cross_entropy(
            logits * 2, target, reduction=reduction, label_smoothing=0.1, z_loss=0.01, byte_lengths=lengths
        )

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows, classes in ((4, 7), (6, 33)):
        logits, target = torch.randn(rows, classes, requires_grad=True), torch.randint(classes, (rows,))
        target[1] = -100
        eager, graph = both(function, logits, target, compiled=compiled)
        for a, b in zip(eager, graph, strict=True):
            torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dim", [-1, 0, 1])
@pytest.mark.parametrize("dynamic", [False, True])
def test_softmax_in_one_graph(dynamic, dim, op):
    def function(x):
        return getattr(loss_core, op)(x + 1, dim) * 3

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for shape in ((4, 7, 5), (6, 33, 2)):
        eager, graph = both(function, torch.randn(shape, requires_grad=True), compiled=compiled)
        for a, b in zip(eager, graph, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_inductor_compiles_a_head_and_its_loss():
    """The whole way, code generation included; hidden states and head are trained."""

    def function(hidden, head, target):
        return loss_core.causal_lm_loss(hidden @ head.t(), target, num_items=7)

    compiled = torch.compile(function, fullgraph=True)
    hidden, head = torch.randn(2, 5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    eager, graph = both(function, hidden, head, torch.randint(11, (2, 5)), compiled=compiled)
    for a, b in zip(eager, graph, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("layout", ["torch", "transposed", "one row"])
def test_layouts_in_one_graph(layout):
    def function(logits, target):
        if layout == "transposed":
            logits = logits.t()
        return loss_core.cross_entropy(logits, target, dim=1 if layout == "torch" else -1, reduction="none")

    shapes = {"torch": ((2, 7, 3), (2, 3)), "transposed": ((7, 4), (4,)), "one row": ((7,), ())}[layout]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    logits, target = torch.randn(shapes[0], requires_grad=True), torch.randint(7, shapes[1])
    eager, graph = both(function, logits, target, compiled=compiled)
    for a, b in zip(eager, graph, strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-6)


def test_weight_num_items_and_half_precision():
    def function(logits, target, weight, items):
        return loss_core.cross_entropy(logits, target, weight, num_items=items)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    logits = torch.randn(5, 9).bfloat16().requires_grad_()
    eager, graph = both(function, logits, torch.randint(9, (5,)), torch.rand(9), torch.tensor(12), compiled=compiled)
    assert graph[0].dtype == torch.float32
    assert graph[1].dtype == torch.bfloat16
    for a, b in zip(eager, graph, strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_probabilities_in_one_graph(reduction):
    def function(logits, target):
        return loss_core.cross_entropy(logits, target, torch.arange(7.0), dim=1, reduction=reduction, z_loss=0.1)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    logits, target = torch.randn(2, 7, 3, requires_grad=True), torch.rand(2, 7, 3, requires_grad=True)
    eager, graph = both(function, logits, target, compiled=compiled)
    for a, b in zip(eager, graph, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_statistics_in_one_graph():
    def function(logits, target):
        return loss_core.cross_entropy_with_stats(logits, target, z_loss=0.1)

    logits, target = torch.randn(5, 9, requires_grad=True), torch.tensor([0, 1, -100, 8, 3])
    graph = torch.compile(function, fullgraph=True, backend="aot_eager")(logits, target)
    for a, b in zip(function(logits, target), graph, strict=True):
        torch.testing.assert_close(a, b)


def test_a_target_out_of_range_raises_when_the_graph_runs():
    compiled = torch.compile(lambda x, y: loss_core.cross_entropy(x, y), fullgraph=True, backend="aot_eager")
    with pytest.raises(IndexError, match="target 9 in row 1"):
        compiled(torch.randn(2, 9), torch.tensor([0, 9]))


@pytest.fixture
def none_only(tmp_path, monkeypatch):
    """A backend that knows the reduction "none" alone."""
    source = (
        "from loss_core.reference import *\nfrom loss_core.reference import API_VERSION\n"
        'OPS = ("cross_entropy",)\nREDUCTIONS = ("none",)\n'
    )
    add_distribution(tmp_path, "only", {"none-only": source})
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.refresh()
    yield "none-only"
    monkeypatch.undo()
    registry.refresh()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_reduction_that_a_backend_lacks(none_only, reduction):
    def function(logits, target):
        lengths = torch.ones_like(target) + 1 if reduction == "byte_mean" else None
        return loss_core.cross_entropy(logits, target, reduction=reduction, byte_lengths=lengths, backend=none_only)

    logits, target = torch.randn(3, 5, requires_grad=True), torch.tensor([0, -100, 4])
    wanted = loss_core.cross_entropy(logits, target, reduction="none", backend="torch")
    divided = {"none": wanted, "sum": wanted.sum(), "mean": wanted.sum() / 2, "byte_mean": wanted.sum() / 4}[reduction]
    torch.testing.assert_close(function(logits, target), divided)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    if reduction == "none":
        torch.testing.assert_close(compiled(logits, target), divided)
    else:
        # Refused, not computed as if it were "none".
        with pytest.raises(UnsupportedInput, match=f"none-only: knows the reductions none, got '{reduction}'"):
            compiled(logits, target)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("dtype", "ignore_index"), [(torch.uint8, -100), (torch.uint8, 44), (torch.int32, 2**32 + 44)], ids=str
)
def test_the_denominator_that_a_backend_lacks(none_only, dtype, ignore_index, weighted):
    """More classes than a uint8 counts, and an ignore_index that an int32 does not hold."""
    logits, target = torch.randn(4, 300, dtype=torch.float64), torch.tensor([0, 44, 200, 254])
    weight = torch.rand(300, dtype=torch.float64) if weighted else None
    loss = loss_core.cross_entropy(logits, target.to(dtype), weight, ignore_index=ignore_index, backend=none_only)
    wanted = torch.nn.functional.cross_entropy(logits, target, weight, ignore_index=ignore_index)
    torch.testing.assert_close(loss, wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("wants_gradient", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_exported_program_holds_one_op(op, strict, wants_gradient):
    """Whether Dynamo traces (strict) or not, nothing of the kernels or of their choice gets into the program."""

    class Model(torch.nn.Module):
        def forward(self, logits, target):
            if op == "cross_entropy":
                return loss_core.cross_entropy(logits, target)
            return getattr(loss_core, op)(logits)

    logits, target = torch.randn(4, 7, requires_grad=wants_gradient), torch.randint(7, (4,))
    program = torch.export.export(Model(), (logits, target), strict=strict)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert called - {"<built-in function getitem>"} == {
        "loss_core.cross_entropy.default" if op == "cross_entropy" else "loss_core.softmax.default"
    }
    with torch.no_grad():
        torch.testing.assert_close(program.module()(logits, target), Model()(logits, target))
