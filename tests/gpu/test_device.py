"""What only a real device shows: streams, graphs, synchronisation, other devices, memory, unchecked targets."""

import contextlib
import threading

import loss_core
import pytest
import torch
from loss_core.memory import zeroed_words
from support.devices import skip_without

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("device")]

OPS = ["cross_entropy", "softmax", "log_softmax"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def loss_and_gradient(op, logits, target, backend, **options):
    """The result of `op` and the gradient of its sum, in which no two elements count alike."""
    if op == "cross_entropy":
        result = loss_core.cross_entropy(logits, target, backend=backend, **options)
    else:
        result = getattr(loss_core, op)(logits, backend=backend)
    upstream = torch.arange(result.numel(), device=result.device, dtype=result.dtype).add(1).sin().view(result.shape)
    return result.detach(), torch.autograd.grad(result, logits, upstream)[0]


def wanted_in_float64(op, logits, target, **options):
    reference = logits.detach().double().requires_grad_()
    return loss_and_gradient(op, reference, target, "torch", **options)


def assert_near(got, wanted, dtype):
    """To one rounding of the largest element; the conformance suite holds each to its own size."""
    for actual, truth in zip(got, wanted, strict=True):
        atol = max(torch.finfo(dtype).eps, 1e-5) * truth.abs().max().item()
        torch.testing.assert_close(actual.double(), truth.double(), atol=atol, rtol=0)


def dtype_for(op):
    # The gradient of a log_softmax is computed from its rounded result, which says little in bfloat16.
    return torch.bfloat16 if op == "cross_entropy" else torch.float32


def inputs(rows=64, classes=1000, dtype=torch.float32, device="cuda"):
    logits = torch.randn(rows, classes).to(device, dtype).requires_grad_()
    target = torch.randint(classes, (rows,))
    target[::5] = -100
    return logits, target.to(device)


# Streams and graphs


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("op", OPS)
def test_runs_on_the_current_stream(op, reduction, backend):
    skip_without(backend, op)
    logits, target = inputs(512, 4096)
    loss_and_gradient(op, logits, target, backend, reduction=reduction)  # compiles
    wanted = wanted_in_float64(op, logits, target, reduction=reduction)
    source = logits.detach().clone()
    logits.detach().zero_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # On any other stream the kernels would start before the logits are there.
        torch.cuda._sleep(50_000_000)
        logits.detach().copy_(source)
        got = loss_and_gradient(op, logits, target, backend, reduction=reduction)
    side.synchronize()
    assert_near(got, wanted, torch.float32)


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"label_smoothing": 0.1, "z_loss": 0.01}], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_captured_graph_computes_from_new_inputs(op, options, backend):
    skip_without(backend, op)
    if op != "cross_entropy" and options:
        pytest.skip("options are cross-entropy's")
    logits, target = inputs(dtype=dtype_for(op))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            loss_and_gradient(op, logits, target, backend, **options)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = loss_and_gradient(op, logits, target, backend, **options)
    for _ in range(2):
        with torch.no_grad():
            logits.copy_(torch.randn_like(logits))
            target.copy_(torch.randint(1000, target.shape))
        graph.replay()
        torch.cuda.synchronize()
        assert_near(got, wanted_in_float64(op, logits, target, **options), logits.dtype)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "none"},
        {"reduction": "sum", "inplace": True},
        {"reduction": "mean", "weight": True, "label_smoothing": 0.1},
        {"num_items": 7.0},
        {"num_items": torch.tensor(7.0)},
        {"num_items": "cuda"},
        {"reduction": "byte_mean", "byte_lengths": True},
        {"z_loss": 0.1, "softcap": 30.0, "logit_scale": 0.5},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_cross_entropy_never_waits_for_the_device(options, backend):
    logits, target = inputs(dtype=torch.bfloat16)
    options = dict(options)
    if options.get("weight"):
        options["weight"] = torch.rand(1000, device="cuda")
    if options.get("byte_lengths"):
        options["byte_lengths"] = torch.randint(1, 9, target.shape, device="cuda")
    if isinstance(options.get("num_items"), str):
        options["num_items"] = torch.tensor(7, device="cuda")
    # Compiling may wait; once compiled nothing does.
    for mode in ("default", "error"):
        with sync_debug_mode(mode):
            loss = loss_core.cross_entropy(logits.detach().clone().requires_grad_(), target, backend=backend, **options)
            loss.sum().backward()
            with torch.no_grad():
                loss_core.cross_entropy_with_stats(logits, target, backend=backend, **options)


@pytest.mark.parametrize("num_items", [None, 7, torch.tensor(7), "cuda"], ids=str)
def test_causal_lm_loss_never_waits_for_the_device(num_items, backend):
    logits, labels = inputs(dtype=torch.bfloat16)
    num_items = torch.tensor(7, device="cuda") if isinstance(num_items, str) else num_items
    for mode in ("default", "error"):
        with sync_debug_mode(mode):
            loss_core.causal_lm_loss(
                logits[None], labels[None], num_items_in_batch=num_items, backend=backend
            ).backward()


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_softmax_never_waits_for_the_device(op, backend):
    skip_without(backend, op)
    logits, target = inputs(dtype=torch.bfloat16)
    for mode in ("default", "error"):
        with sync_debug_mode(mode):
            getattr(loss_core, op)(logits, backend=backend).sum().backward()


@contextlib.contextmanager
def sync_debug_mode(mode):
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_threads_compute_at_once(backend):
    calls = [inputs(33, 500 + 300 * i, DTYPES[i % 3]) for i in range(6)]
    got = [None] * len(calls)

    def compute(i):
        logits, target = calls[i]
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                got[i] = loss_and_gradient("cross_entropy", logits, target, backend)
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=compute, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (logits, target), result in zip(calls, got, strict=True):
        assert result is not None, "the thread raised"
        assert_near(result, wanted_in_float64("cross_entropy", logits, target), logits.dtype)


# The words that a launch counts in: 0 before it and after it, whatever runs beside it


CALLS = [
    {},
    {"reduction": "sum"},
    {"num_items": 7.0},
    {"weight": True},
    {"byte_lengths": True, "reduction": "byte_mean"},
    {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0},
]


@pytest.mark.parametrize("options", CALLS, ids=lambda options: ",".join(options) or "plain")
def test_launches_leave_their_counters_at_zero(options, backend):
    for rows, classes in ((1, 50257), (5000, 33), (300, 4096), (40, 128256)):
        logits, target = inputs(rows, classes, torch.bfloat16)
        target[0] = 3
        of_call = dict(options)
        if of_call.pop("weight", False):
            of_call["weight"] = torch.rand(classes, device="cuda")
        if of_call.pop("byte_lengths", False):
            of_call["byte_lengths"] = torch.randint(1, 9, (rows,), device="cuda")
        for grad in (True, False):
            logits.requires_grad_(grad)
            calls = [loss_core.cross_entropy(logits, target, backend=backend, **of_call) for _ in range(5)]
            assert len({loss.item() for loss in calls}) == 1, (rows, classes, grad)
            assert not zeroed_words(1, logits.device).any(), (rows, classes, grad)


def test_graphs_replayed_beside_calls(backend):
    calls = [inputs(97, 3000 + i, torch.bfloat16) for i in range(3)]
    wanted = [wanted_in_float64("cross_entropy", *call) for call in calls]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graphs, results = [], []
    # All captured on one stream; a graph that counted in that stream's words would meet the others there.
    for call in calls[:2]:
        with torch.cuda.stream(stream):
            loss_and_gradient("cross_entropy", *call, backend)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results.append(loss_and_gradient("cross_entropy", *call, backend))
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, own in zip(graphs, streams, strict=True):
            with torch.cuda.stream(own):
                graph.replay()
        with torch.cuda.stream(stream):
            eager = loss_and_gradient("cross_entropy", *calls[2], backend)
    torch.cuda.synchronize()
    for got, truth in zip([*results, eager], wanted, strict=True):
        assert_near(got, truth, torch.bfloat16)


def test_words_of_streams_and_graphs():
    device = torch.device("cuda", torch.cuda.current_device())
    here, other = zeroed_words(3, device), torch.cuda.Stream()
    assert zeroed_words(3, device) is here
    assert zeroed_words(10**6, device).numel() == 10**6
    with torch.cuda.stream(other):
        there = zeroed_words(3, device)
    assert there.data_ptr() != here.data_ptr()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=other):
        captured = zeroed_words(3, device)
    assert captured.data_ptr() != there.data_ptr()


def test_numbers_of_either_type_in_turn(backend):
    """A binary that took an option for an integer would refuse or cut the next call's."""
    logits, target = inputs()
    for options in (
        {"logit_scale": 1, "label_smoothing": 0, "z_loss": 0},
        {"logit_scale": 0.5},
        {"softcap": 3, "z_loss": 1},
        {"softcap": 2.5, "z_loss": 0.25},
        {"ignore_index": -(2**40)},
        {"num_items": 3},
        {"num_items": 2.5},
    ):
        target_ = torch.where(target == -100, options["ignore_index"], target) if "ignore_index" in options else target
        got = loss_and_gradient("cross_entropy", logits, target_, backend, **options)
        assert_near(got, wanted_in_float64("cross_entropy", logits, target_, **options), torch.float32)


@pytest.mark.parametrize("op", OPS)
def test_deterministic_algorithms(op, backend):
    skip_without(backend, op)
    logits, target = inputs(dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [loss_and_gradient(op, logits, target, backend) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


# Devices


@pytest.mark.parametrize("op", OPS)
def test_second_device(op, backend):
    skip_without(backend, op)
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device, needs two")
    logits, target = inputs(dtype=dtype_for(op), device="cuda:1")
    assert torch.cuda.current_device() == 0
    got = loss_and_gradient(op, logits, target, backend)
    assert torch.cuda.current_device() == 0
    assert {tensor.device for tensor in got} == {torch.device("cuda", 1)}
    assert_near(got, wanted_in_float64(op, logits, target), logits.dtype)
    if op == "cross_entropy":
        items = [loss_core.cross_entropy(logits, target, num_items=torch.tensor(9, device=d), backend=backend)
                 for d in ("cpu", "cuda:0", "cuda:1")]  # fmt: skip
        assert [item.item() for item in items] == pytest.approx([items[0].item()] * 3)


@pytest.mark.parametrize("threads", [True, False])
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"inplace": True}], ids=["usual", "none", "inplace"])
def test_backward_while_another_device_is_current(options, threads, backend):
    """Autograd runs it on the forward's device, in a thread of that device or in the caller's."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device, needs two")
    logits, target = inputs(device="cuda:1")
    upstream = torch.rand(target.shape if "reduction" in options else (), device="cuda:1") + 0.5
    reference = logits.detach().double().requires_grad_()
    torch.nn.functional.cross_entropy(reference, target, reduction=options.get("reduction", "mean")).backward(
        upstream.double()
    )
    with torch.cuda.device(1):
        given = logits * 1.0 if "inplace" in options else logits
        loss = loss_core.cross_entropy(given, target, backend=backend, **options)
    with torch.autograd.set_multithreading_enabled(threads):
        loss.backward(upstream.to(loss.dtype))
    assert torch.cuda.current_device() == 0
    assert logits.grad.device == torch.device("cuda", 1)
    torch.testing.assert_close(logits.grad.double(), reference.grad, atol=1e-7, rtol=1e-4)


def test_num_items_anywhere(backend):
    logits, labels = inputs()
    everywhere = [9, 9.0, torch.tensor(9), torch.tensor([9.0]), torch.tensor(9, device="cuda")]
    losses = [
        loss_core.causal_lm_loss(logits[None], labels[None], num_items_in_batch=items, backend=backend).item()
        for items in everywhere
    ]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-6)
    one = loss_core.causal_lm_loss(logits[None], labels[None], reduction="sum", backend=backend)
    assert losses[0] == pytest.approx(one.item() / 9, rel=1e-6)


# Targets out of range, and memory


OUTSIDE = [20, 19, -1, 2**31 - 1, 2**40, -(2**40)]


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"weight": torch.ones(19)}], ids=["plain", "e", "w"])
def test_target_out_of_range_gives_nan_in_its_row_alone(outside, options, backend):
    logits = torch.randn(64, 19, device="cuda", requires_grad=True)
    target = torch.randint(19, (64,), device="cuda")
    bad = torch.zeros(64, dtype=torch.bool, device="cuda")
    bad[::7] = True
    target[bad] = outside
    target[1] = 255
    options = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    loss = loss_core.cross_entropy(logits, target, reduction="none", ignore_index=255, backend=backend, **options)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert torch.equal(loss.isnan(), bad)
    assert torch.equal(grad.isnan(), bad[:, None].expand_as(grad))
    inside = torch.where(bad, 0, target)
    wanted = loss_core.cross_entropy(
        logits.double(), inside, reduction="none", ignore_index=255, backend="torch", **options
    )
    torch.testing.assert_close(loss[~bad].double(), wanted[~bad], atol=1e-5, rtol=0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none", "byte_mean"])
@pytest.mark.parametrize("outside", [10, -1, 11, 2**40])
def test_target_out_of_range_touches_nothing_else(outside, reduction, backend):
    """Neighbours of the gradient, which takes the place of a tensor freed between others, keep their values."""
    target = torch.randint(10, (10,), device="cuda")
    target[-1] = outside
    lengths = torch.ones(10, dtype=torch.int64, device="cuda") if reduction == "byte_mean" else None
    row = [torch.full((10, 10), 7.0, device="cuda") for _ in range(65)]
    logits = row.pop(33)
    logits = logits.normal_().requires_grad_()
    del row[31]
    loss = loss_core.cross_entropy(logits, target, reduction=reduction, byte_lengths=lengths, backend=backend)
    loss.sum().backward()
    torch.cuda.synchronize()
    assert all((neighbour == 7.0).all() for neighbour in row)
    assert logits.grad[-1].isnan().all()
    assert loss.isnan().any()
    if reduction == "none":
        assert not logits.grad[:-1].isnan().any()


def test_uint8_target_out_of_range(backend):
    logits = torch.randn(210, 6, device="cuda", requires_grad=True)
    target = torch.randint(6, (210,), dtype=torch.uint8, device="cuda")
    same = loss_core.cross_entropy(logits, target, backend=backend)
    assert same.item() == loss_core.cross_entropy(logits, target.long(), backend=backend).item()
    # 156 is -100 in eight bits, and yet no ignore_index.
    target[5], target[7] = 156, 6
    loss = loss_core.cross_entropy(logits, target, reduction="none", backend=backend)
    assert loss.isnan().nonzero().flatten().tolist() == [5, 7]


@pytest.mark.parametrize("classes", [1000, 32000])
@pytest.mark.parametrize("length", [-1, 2**48, -(2**62)])
def test_byte_lengths_out_of_range_are_cut_off_and_waited_for_by_nobody(length, classes, backend, monkeypatch):
    """A sum of bytes may share a word with a count that kernels wait for."""
    monkeypatch.delenv("LOSS_VALIDATE", raising=False)
    logits = torch.randn(300, classes, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(classes, (300,), device="cuda")
    losses = []
    for value in (length, min(max(length, 0), 2**24)):
        x = logits.clone().requires_grad_()
        lengths = torch.full((300,), value, device="cuda").index_fill(0, torch.tensor([7], device="cuda"), 5)
        loss = loss_core.cross_entropy(x, target, reduction="byte_mean", byte_lengths=lengths, backend=backend)
        loss.backward()
        losses.append((loss, x.grad))
    for got, wanted in zip(*losses, strict=True):
        assert torch.equal(got, wanted)
    monkeypatch.setenv("LOSS_VALIDATE", "1")
    with pytest.raises(ValueError, match=r"byte_lengths must be in \[0, 16777216\], got"):
        loss_core.cross_entropy(logits, target, reduction="byte_mean", byte_lengths=lengths * 2**25, backend=backend)


def test_validation_that_waits(backend, monkeypatch):
    monkeypatch.setenv("LOSS_VALIDATE", "1")
    logits, target = inputs()
    target[3] = 1000
    with pytest.raises(IndexError, match=r"target 1000 in row 3 is outside \[0, 1000\)"):
        loss_core.cross_entropy(logits, target, backend=backend)


def peak_over(call):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


# What the reference keeps beside its result; kernels keep a few numbers a row.
SLACK = {"torch": 4 * 112 * 2**20}


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_peak_memory(reduction, backend):
    rows, classes = 4096, 50257
    logits = torch.randn(rows, classes, device="cuda", dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(classes, (rows,), device="cuda")
    of_logits, slack = logits.numel() * 2, SLACK.get(backend, 4 * 2**20)

    def compute(logits=logits, inplace=False):
        return loss_core.cross_entropy(logits, target, reduction=reduction, inplace=inplace, backend=backend)

    compute()
    with torch.no_grad():
        assert peak_over(compute) <= slack
    assert peak_over(lambda: torch.autograd.grad(compute().sum(), logits)) <= of_logits + slack
    given = logits.detach().clone().requires_grad_()
    assert peak_over(lambda: torch.autograd.grad(compute(given, True).sum(), given)) <= slack


def test_causal_lm_makes_no_float32_copy(backend):
    batch, tokens, classes = 4, 2048, 50000
    logits = torch.randn(batch, tokens, classes, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(classes, (batch, tokens), device="cuda")
    labels[torch.rand(batch, tokens, device="cuda") < 0.9] = -100
    half_a_copy = logits.numel() * 4 // 2
    loss_core.causal_lm_loss(logits, labels, backend=backend)
    assert peak_over(lambda: loss_core.causal_lm_loss(logits, labels, backend=backend)) < half_a_copy
    logits.requires_grad_()

    def train(inplace):
        loss = loss_core.causal_lm_loss(logits, labels, inplace=inplace, backend=backend)
        return torch.autograd.grad(loss, logits)

    # The gradient is half a float32 copy by itself; nothing else is of that size.
    slack = SLACK.get(backend, 4 * 2**20)
    assert peak_over(lambda: train(False)) <= half_a_copy + slack
    assert peak_over(lambda: train(True)) <= slack


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unaligned_base_and_odd_width(dtype, backend):
    buffer = torch.randn(1 + 8 * 1027, device="cuda", dtype=dtype)
    target = torch.randint(1024, (8,), device="cuda")
    for view in (buffer[1 : 1 + 8 * 1024].view(8, 1024), buffer[1:].view(8, 1027)[:, 1:1025]):
        logits = view.detach().requires_grad_()
        got = loss_and_gradient("cross_entropy", logits, target, backend)
        assert_near(got, wanted_in_float64("cross_entropy", logits, target), dtype)


# torch.compile and autocast


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_compiles_without_a_graph_break(op, dynamic, backend):
    skip_without(backend, op)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=dynamic)
    def compiled(logits, target):
        logits = logits * 1.5
        if op == "cross_entropy":
            return loss_core.cross_entropy(logits, target, label_smoothing=0.1, backend=backend) * 2
        return getattr(loss_core, op)(logits, backend=backend) * 2

    for rows, classes in ((16, 257), (24, 1000)):
        logits, target = inputs(rows, classes)
        result = compiled(logits, target)
        upstream = torch.randn_like(result)
        (grad,) = torch.autograd.grad(result, logits, upstream)
        reference = logits.detach().double().requires_grad_()
        if op == "cross_entropy":
            wanted = 2 * torch.nn.functional.cross_entropy(1.5 * reference, target, label_smoothing=0.1)
        else:
            wanted = 2 * getattr(torch, op)(1.5 * reference, -1)
        torch.testing.assert_close(result.double(), wanted, atol=1e-5, rtol=1e-5)
        (wanted,) = torch.autograd.grad(wanted, reference, upstream.double())
        torch.testing.assert_close(grad.double(), wanted, atol=1e-5, rtol=1e-5)


def test_autocast(backend):
    hidden = torch.randn(32, 64, device="cuda", requires_grad=True)
    head = torch.randn(500, 64, device="cuda", requires_grad=True)
    target = torch.randint(500, (32,), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = hidden @ head.t()
        loss = loss_core.cross_entropy(logits, target, backend=backend)
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    reference = logits.detach().double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(reference, target)
    torch.testing.assert_close(loss.double(), wanted.detach(), atol=1e-6, rtol=1e-6)
    loss.backward()
    (of_logits,) = torch.autograd.grad(wanted, reference)
    torch.testing.assert_close(hidden.grad.double(), of_logits @ head.double(), atol=2e-3, rtol=2e-2)
