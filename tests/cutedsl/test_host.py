"""What the host hands to a kernel, and what it returns, with a kernel that does nothing."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("tvm_ffi", reason="cutedsl: apache-tvm-ffi is not installed")
pytest.importorskip("cutlass.cute", reason="cutedsl: nvidia-cutlass-dsl is not installed")

from loss_core.backend import REDUCTIONS, CrossEntropyOptions, UnsupportedInput
from loss_cutedsl import _launch, _schedule, cross_entropy, softmax

PROCESSORS = 132
L2_BYTES = 60 * 2**20


@pytest.fixture
def launches(monkeypatch):
    """The arguments of every launch: (name of the kernel's class, arguments)."""
    made = []

    def compiled(kernel_class, facts, make, arguments, architecture):
        expected = len(arguments())

        def launch(*values):
            assert len(values) == expected + 1, "a kernel takes what it was compiled for, and the stream"
            made.append((kernel_class.__name__, values))

        return launch

    for module in (cross_entropy, softmax):
        monkeypatch.setattr(module, "compiled", compiled)
        monkeypatch.setattr(module, "machine_of", lambda index: _schedule.machine((9, 0), PROCESSORS, L2_BYTES))
        monkeypatch.setattr(module, "stream_of", lambda index: 0)
    monkeypatch.setattr(softmax, "_plans", {})
    forget_plans()
    yield made
    forget_plans()


def forget_plans():
    for plans in (cross_entropy._forward_plan, cross_entropy._backward_plan, cross_entropy._rescale_plan):
        plans.cache_clear()


def operands(rows, cols, reduction, dtype=torch.bfloat16):
    lengths = torch.ones(rows, dtype=torch.int32) if reduction == "byte_mean" else None
    return torch.zeros(rows, cols, dtype=dtype), torch.zeros(rows, dtype=torch.int64), None, lengths


@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_results_have_the_shapes_of_the_contract(launches, reduction, rows, stats):
    options = CrossEntropyOptions(reduction=reduction, z_loss=0.1)
    items = [None, 3.0, torch.tensor([3.0])] if reduction == "mean" else [None]
    for num_items in items:
        logits, *rest = operands(rows, 7, reduction)
        grad = torch.zeros_like(logits) if reduction != "none" else None
        result = cross_entropy.forward(logits, *rest, num_items, options, grad=grad, stats=stats)
        assert result.loss.shape == ((rows,) if reduction == "none" else ())
        assert result.lse.shape == (rows,)
        assert result.loss.dtype == result.lse.dtype == torch.float32
        assert (result.denominator is not None) == (reduction in ("mean", "byte_mean"))
        if result.denominator is not None:
            assert result.denominator.shape == (1,)
        if stats:
            assert result.z_loss.shape == result.loss.shape
            assert (result.prediction.shape, result.prediction.dtype) == ((rows,), torch.int64)
            assert (result.correct.shape, result.correct.dtype) == ((rows,), torch.bool)
        # Tensors of their own: changing one in place must not touch another that is saved.
        pointers = [t.untyped_storage().data_ptr() for t in result if t is not None and t.numel()]
        assert len(set(pointers)) == len(pointers)
    assert len(launches) == (len(items) if rows else 0)


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("rows", "cols", "padding", "offset"),
    [(5, 8, 0, 0), (5, 8, 3, 0), (8192, 8192, 8, 0), (7, 9, 0, 1), (3, 2**17, 0, 0), (3, 2**20, 0, 0)],
)
def test_prepared_calls_launch_what_calls_launch(launches, gradient, reduction, rows, cols, padding, offset):
    """The same arguments but for the addresses of what is allocated; or nothing is prepared."""
    # In two bytes an element a row of 2**20 would fit into a cluster of sixteen blocks.
    dtype = torch.float32 if cols == 2**20 else torch.bfloat16
    memory = torch.zeros(offset + rows * (cols + padding), dtype=dtype)
    logits = memory[offset:].view(rows, cols + padding)[:, :cols]
    target, options = torch.zeros(rows, dtype=torch.int64), CrossEntropyOptions(reduction=reduction, z_loss=0.1)
    upstream, grad = torch.ones(()), torch.zeros(rows, cols, dtype=dtype) if gradient else None
    prepared = cross_entropy.prepare(
        logits.device, logits.dtype, target.dtype, rows, cols, logits.stride(0), logits.data_ptr() % 16, options,
        gradient=gradient,
    )  # fmt: skip
    if gradient and cols == 2**20:
        assert prepared is None, "such rows fit nowhere, and their gradient takes another launch"
        return
    loss, results = prepared.forward(logits, target, grad)
    result = cross_entropy.forward(logits, target, None, None, None, options, grad=grad, stats=False)
    one, other = launches
    allocated = {8, 9, 10, 14, 15}  # loss, lse and denominator; the workspace, and losses of rows
    assert [value for i, value in enumerate(one[1]) if i not in allocated] == [
        value for i, value in enumerate(other[1]) if i not in allocated
    ]
    lse, denominator = results[:rows], results[rows : rows + 1] if reduction == "mean" else None
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (loss, lse, denominator)]
    assert list(one[1][8:11]) == addresses
    for got, wanted in zip((loss, lse, denominator), result[:3], strict=True):
        assert (got is None) == (wanted is None)
        assert got is None or (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    if not gradient:
        assert prepared.backward is None
        return
    for skip in (False, True):
        launches.clear()
        prepared.backward(upstream, logits, target, results, grad, skip)
        cross_entropy.backward(upstream, logits, target, None, lse, denominator, options, grad=grad, skip_if_one=skip)
        assert launches[0] == launches[1]


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize(
    ("rows", "cols", "padding", "offset"),
    [(5, 8, 0, 0), (5, 8, 3, 0), (4096, 8192, 8, 0), (7, 9, 0, 1), (3, 2**17, 0, 0), (2, 2**20, 0, 0)],
)
def test_prepared_softmax_launches_what_softmax_launches(launches, op, rows, cols, padding, offset):
    memory = torch.zeros(offset + rows * (cols + padding), dtype=torch.bfloat16)
    input = memory[offset:].view(rows, cols + padding)[:, :cols]
    new = [torch.zeros(rows, cols, dtype=torch.bfloat16) for _ in range(3)]
    prepared = getattr(softmax, f"{op}_prepare")(
        input.device, input.dtype, rows, cols, input.stride(0), input.data_ptr() % 16
    )
    prepared.forward(input, new[0])
    getattr(softmax, f"{op}_forward")(input, new[0])
    prepared.backward(*new)
    getattr(softmax, f"{op}_backward")(*new)
    assert launches[0] == launches[1]
    assert launches[2] == launches[3]
    assert softmax._prepare(input.device, torch.float64, rows, cols, cols, 0, False) is None


def test_no_rows_give_what_a_sum_over_nothing_gives(launches):
    def loss(reduction, num_items=None):
        options = CrossEntropyOptions(reduction=reduction)
        return cross_entropy.forward(*operands(0, 7, reduction), num_items, options, grad=None, stats=False).loss

    assert loss("sum") == 0
    assert loss("mean").isnan()
    assert loss("byte_mean").isnan()
    assert loss("mean", 2.0) == 0


def test_backward_that_may_have_nothing_to_do_is_a_small_launch(launches):
    logits, target, *_ = operands(4096, 8192, "mean")
    lse, one = torch.zeros(4096), torch.ones(())
    plan = cross_entropy._backward_plan(-1, logits.dtype, 8192, False, target.dtype, False, CrossEntropyOptions())
    tiles = 4096 * plan.tiles
    for options, upstream, skip, blocks in (
        (CrossEntropyOptions(), one, False, tiles),
        (CrossEntropyOptions(), one, True, 4 * PROCESSORS),
        # An upstream gradient for each row cannot be skipped as a whole.
        (CrossEntropyOptions(reduction="none"), one.expand(4096), True, tiles),
    ):
        cross_entropy.backward(
            upstream, logits, target, None, lse, None, options, grad=torch.empty_like(logits), skip_if_one=skip
        )
        name, values = launches[-1]
        assert name == "CrossEntropyBackward"
        assert values[1] == 0
        assert values[12:14] == (blocks, int(skip and blocks != tiles))
    cross_entropy.rescale_live(one, logits, target, -7)
    assert launches[-1][1][3:9] == (target.data_ptr(), 4096, 4 * PROCESSORS, 8192, plan.tiles, -7)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("rows", [2**30, 2**30 + 1, _schedule.LARGEST])
def test_no_loop_counts_beyond_32_bits(launches, rows, reduction, skip):
    """A loop's counter, 32-bit and signed, goes a step beyond its end."""
    logits = torch.zeros((), dtype=torch.bfloat16).expand(rows, 1)
    target, lse = torch.zeros((), dtype=torch.int64).expand(rows), torch.zeros(())
    upstream = torch.ones(()).expand(rows) if reduction == "none" else torch.ones(())
    options = CrossEntropyOptions(reduction=reduction)
    cross_entropy.backward(upstream, logits, target, None, lse, None, options, grad=logits, skip_if_one=skip)
    cross_entropy.rescale_live(torch.ones(()), logits, target, -100)
    grids = [values[{"CrossEntropyBackward": 12, "CrossEntropyRescale": 5}[name]] for name, values in launches]
    if reduction == "mean":
        prepared = cross_entropy.prepare(
            logits.device, logits.dtype, target.dtype, rows, 1, 0, 0, options, gradient=True
        )
        prepared.backward(upstream, logits, target, lse, logits, skip)
        assert launches[-1][1][12] == grids[0]
    groups = cross_entropy._backward_plan(-1, logits.dtype, 1, True, target.dtype, False, options).groups
    for grid in grids:
        assert rows - 1 + grid * groups < 2**31


@pytest.mark.parametrize("layout", ["aligned", "offset", "odd stride", "expanded", "one class"])
def test_every_layout_has_a_kernel(launches, layout):
    zeros = torch.zeros(1000, dtype=torch.bfloat16)
    tensor = {
        "aligned": zeros[: 6 * 64].view(6, 64),
        "offset": zeros[1 : 6 * 64 + 1].view(6, 64),
        "odd stride": zeros[: 6 * 67].view(6, 67)[:, :64],
        "expanded": zeros[:64].expand(6, 64),
        "one class": zeros[:18].view(6, 3)[:, 1:2],
    }[layout]
    output = torch.empty(tensor.shape, dtype=tensor.dtype)
    softmax.softmax_forward(tensor, output)
    softmax.log_softmax_backward(tensor, output, output.clone())
    (_, forward), (_, backward) = launches
    assert forward[:4] == (tensor.data_ptr(), tensor.stride(0), output.data_ptr(), output.stride(0))
    assert backward[:2] == (tensor.data_ptr(), tensor.stride(0))
    (*_, ragged, _, _) = next(iter(softmax._plans))
    assert ragged == (layout in ("offset", "odd stride", "one class"))


@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
@pytest.mark.parametrize("result", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_kernel_sees_one_dtype(launches, monkeypatch, dtype, result, log):
    """Its vectors are of one width; a kernel that computes what it is handed stands in for it."""
    handed = []

    def run_plan(plan, *tensors):
        handed.extend(tensor.dtype for tensor in tensors)
        *read, written = (tensor for tensor in tensors)
        if len(read) == 1:
            written.copy_(torch.log_softmax(read[0], -1) if log else torch.softmax(read[0], -1))
        else:
            g, y = read
            written.copy_(g - y.exp() * g.sum(-1, True) if log else y * (g - (g * y).sum(-1, True)))

    monkeypatch.setattr(softmax, "run_plan", run_plan)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 129, generator=generator).to(dtype)[:, :120]
    g = torch.randn(5, 120, generator=generator).to(result)
    y = torch.full((5, 120), torch.nan, dtype=result)
    dx = torch.full((5, 120), torch.nan, dtype=dtype)
    forward, backward = (
        ("log_softmax_forward", "log_softmax_backward") if log else ("softmax_forward", "softmax_backward")
    )
    getattr(softmax, forward)(x, y)
    getattr(softmax, backward)(g, y, dx)
    exact_y = (torch.log_softmax if log else torch.softmax)(x.double(), -1)
    torch.testing.assert_close(y.double(), exact_y, rtol=2 * torch.finfo(result).eps, atol=1e-6)
    y64, g64 = y.double(), g.double()
    exact_dx = g64 - y64.exp() * g64.sum(-1, True) if log else y64 * (g64 - (g64 * y64).sum(-1, True))
    torch.testing.assert_close(
        dx.double(), exact_dx, rtol=4 * torch.finfo(dtype).eps, atol=4e-3 if dtype != result else 1e-2
    )
    assert len(set(handed)) == 1


def test_a_wider_result_than_the_kernels_have_is_refused(launches):
    with pytest.raises(UnsupportedInput, match="float64"):
        softmax.softmax_forward(torch.zeros(2, 8), torch.zeros(2, 8, dtype=torch.float64))
    assert not launches


def test_what_the_kernels_do_not_do_is_refused(launches):
    options = CrossEntropyOptions()

    def forward(dtype, target_dtype):
        logits, target, *rest = operands(2, 7, "mean", dtype)
        return cross_entropy.forward(logits, target.to(target_dtype), *rest, None, options, grad=None, stats=False)

    for dtype, target_dtype in (
        (torch.float64, torch.int64),
        (torch.float32, torch.int16),
        (torch.float32, torch.float32),
    ):
        # Twice: a refusal is not remembered as a plan.
        for _ in range(2):
            with pytest.raises(UnsupportedInput, match="cutedsl: "):
                forward(dtype, target_dtype)
    with pytest.raises(UnsupportedInput, match="float64"):
        softmax.softmax_forward(torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64))
    assert not launches


def shard_options(**changes):
    return CrossEntropyOptions(**{"reduction": "none", "first_class": 16, "total_classes": 64, **changes})


@pytest.mark.parametrize(
    ("changes", "weighted", "stats", "word"),
    [
        ({"reduction": "mean"}, False, False, "mean"),
        ({"z_loss": 0.1}, False, False, "z_loss"),
        ({"label_smoothing": 0.1}, False, False, "smoothing"),
        ({}, True, False, "weight"),
        ({}, False, True, "statistics"),
    ],
)
def test_what_one_shard_does_not_know_is_refused(launches, changes, weighted, stats, word):
    logits, target, *_ = operands(2, 8, "none")
    weight = torch.ones(8) if weighted else None
    with pytest.raises(UnsupportedInput, match=word):
        cross_entropy.forward(logits, target, weight, None, None, shard_options(**changes), grad=None, stats=stats)
    if weighted or "label_smoothing" in changes:
        with pytest.raises(UnsupportedInput, match="shard"):
            cross_entropy.backward(
                torch.ones(2), logits, target, weight, torch.zeros(2), None, shard_options(**changes),
                grad=torch.empty_like(logits), skip_if_one=False,
            )  # fmt: skip
    assert not launches


def test_a_shard_and_a_whole_vocabulary_differ_in_two_numbers(launches):
    logits, target, *_ = operands(2, 8, "none")
    for options in (shard_options(), CrossEntropyOptions(reduction="none")):
        cross_entropy.forward(logits, target, None, None, None, options, grad=None, stats=False)
        cross_entropy.backward(
            torch.ones(2), logits, target, None, torch.zeros(2), None, options,
            grad=torch.empty_like(logits), skip_if_one=False,
        )  # fmt: skip
    assert [values[-7:-5] for _, values in launches] == [(16, 64), (16, 64), (0, 8), (0, 8)]


def test_upstream_of_any_shape(launches):
    logits, target, *_ = operands(2, 8, "mean")
    for shape in ((), (1,), (1, 1, 1)):
        upstream = torch.ones(shape)
        cross_entropy.backward(
            upstream, logits, target, None, torch.zeros(2), torch.ones(1), CrossEntropyOptions(),
            grad=torch.empty_like(logits), skip_if_one=True,
        )  # fmt: skip
        assert launches[-1][1][:2] == (upstream.data_ptr(), 0)


def test_plans_of_softmax_do_not_pile_up(launches):
    for cols in range(1, 2 * softmax.MOST_PLANS):
        input = torch.zeros(1, cols)
        softmax.softmax_forward(input, torch.empty_like(input))
        assert len(softmax._plans) <= softmax.MOST_PLANS
        assert launches[-1][1][5] == cols


def test_one_kernel_for_options_that_are_numbers(launches):
    logits, target, *_ = operands(2, 8, "mean")
    for step in range(2 * cross_entropy.MOST_PLANS):
        options = CrossEntropyOptions(z_loss=step / 1000)
        cross_entropy.forward(logits, target, None, None, None, options, grad=None, stats=False)
    assert cross_entropy._forward_plan.cache_info().currsize == cross_entropy.MOST_PLANS
    assert len(launches) == 2 * cross_entropy.MOST_PLANS


@pytest.mark.parametrize("gradient", [True, False])
def test_more_rows_than_there_can_be_blocks_are_taken_by_blocks_that_stay(launches, gradient):
    most = _schedule.MOST_PLAIN_ROWS
    for rows, each in ((most, True), (most + 1, False)):
        plan = cross_entropy._forward_plan(
            -1, torch.bfloat16, 32000, False, True, torch.uint8, gradient, False, None, False, rows <= most,
            CrossEntropyOptions(),
        )  # fmt: skip
        assert (plan.grid(rows)[0] > rows) == each


def test_the_machine_is_that_of_the_device(monkeypatch):
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=PROCESSORS, L2_cache_size=L2_BYTES)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert _launch.machine_of.__wrapped__(0) == _schedule.machine((9, 0), PROCESSORS, L2_BYTES)


def test_a_device_of_one_multiprocessor_gets_a_whole_cluster(launches, monkeypatch):
    monkeypatch.setattr(cross_entropy, "machine_of", lambda index: _schedule.machine((9, 0), 1, L2_BYTES))
    plan = cross_entropy._forward_plan(
        -1, torch.bfloat16, 128256, False, True, torch.int64, True, False, None, False, True, CrossEntropyOptions()
    )
    assert plan.grid(5)[:2] == (8 * 6, 1)
