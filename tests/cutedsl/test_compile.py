"""Every kind of kernel compiles for every architecture, without a GPU; options and dtypes are spread over them."""

import pytest
import torch

pytest.importorskip("tvm_ffi", reason="cutedsl: apache-tvm-ffi is not installed")
pytest.importorskip("cutlass.cute", reason="cutedsl: nvidia-cutlass-dsl is not installed")

from cutlass import BFloat16
from loss_core.backend import CrossEntropyOptions
from loss_cutedsl import _schedule, cross_entropy, softmax

CAPABILITIES = [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
H100_L2, H200_L2 = 50 * 2**20, 60 * 2**20
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.setenv("LOSS_CUTEDSL_CACHE", "")
    monkeypatch.setattr("loss_cutedsl._compile._kept", {})


def on_every_architecture(*variants):
    """One variant an architecture: as many compilations as architectures, whatever the number of options."""
    assert len(variants) == len(CAPABILITIES)
    names = ["sm_{}{}".format(*capability) for capability in CAPABILITIES]
    machines = [_schedule.machine(capability, 132, H200_L2) for capability in CAPABILITIES]
    return pytest.mark.parametrize(("machine", "variant"), list(zip(machines, variants, strict=True)), ids=names)


def shape(cols, dtype):
    ragged = cols * dtype.itemsize % 16 != 0
    return _schedule.most_vectors(cols, _schedule.VECTOR_BYTES // dtype.itemsize, ragged), ragged


TARGETS = {64: torch.int64, 32: torch.int32, 8: torch.uint8}
LOGITS = {"linear": {}, "scaled": {"logit_scale": -1.0}, "softcap": {"softcap": 30.0}}


def options(smoothing, logits, reduction="mean"):
    return CrossEntropyOptions(reduction=reduction, label_smoothing=0.1 if smoothing else 0.0, **LOGITS[logits])


def make_forward(machine, variant, schedule, gradient):
    dtype, cols, target_bits, scalar, weighted, smoothing, logits, stats = variant
    plan = cross_entropy.make_forward_plan(
        machine, dtype, cols, schedule, shape(cols, dtype)[1], TARGETS[target_bits], gradient, weighted, None, stats,
        options(smoothing, logits, "mean" if scalar else "none"),
    )  # fmt: skip
    assert callable(plan.launch)
    assert plan.constants[:2] == (cols, schedule.chunks(shape(cols, dtype)[0]))
    assert plan.constants[2] <= machine.block_bytes
    return plan


# Widths: a warp to a row, a block, a cluster of two and of four; aligned and ragged.
# dtype, classes, bits of a target, scalar (always, for the gradient), weight, smoothing, logits, statistics
@on_every_architecture(
    (FP16, 500, 64, True, False, False, "linear", False),
    (FP32, 8192, 32, True, True, False, "scaled", False),
    (BF16, 128256, 64, True, False, False, "linear", False),
    (BF16, 50257, 64, True, False, False, "linear", True),
    (FP32, 128256, 64, True, False, True, "linear", False),
    (BF16, 1001, 8, True, True, True, "softcap", True),
)
def test_forward_with_gradient(machine, variant):
    vectors, ragged = shape(variant[1], variant[0])
    schedule = _schedule.held(machine, vectors, 1, cross_entropy.ENTRY_WORDS, ragged, _schedule.MEASURED_GRADIENT)
    plan = make_forward(machine, variant, schedule, True)
    assert plan.grid(10**6)[0] % schedule.cluster == 0


# dtype, classes, bits of a target, scalar, gradient
PLAIN = [
    (BF16, 2048, 64, True, True),
    (FP16, 8192, 32, True, True),
    (BF16, 16001, 8, True, True),
    (BF16, 32000, 64, True, False),
    (FP32, 50257, 64, True, True),
    (BF16, 50257, 64, True, False),
    (FP16, 151936, 64, False, False),
]


@pytest.mark.parametrize(
    ("capability", "l2_bytes"),
    [((8, 0), H200_L2), ((9, 0), H200_L2), ((9, 0), H100_L2), ((10, 0), H200_L2), ((12, 0), H200_L2)],
)
@pytest.mark.parametrize("variant", PLAIN)
def test_plain_forward(capability, l2_bytes, variant):
    dtype, cols, target_bits, scalar, gradient = variant
    machine = _schedule.machine(capability, 132, l2_bytes)
    vectors, ragged = shape(cols, dtype)
    form = _schedule.plain(machine, vectors, ragged, gradient)
    if form is None:
        assert not machine.clusters
        assert vectors > 2048
        return
    plan = cross_entropy.make_plain_plan(
        machine, dtype, cols, form, ragged, TARGETS[target_bits], gradient, None,
        options(False, "linear", "mean" if scalar else "none"),
    )  # fmt: skip
    assert callable(plan.launch)
    assert plan.constants[:2] == (cols, 1 if form.at_once else form.schedule.chunks(vectors))
    assert plan.constants[2] <= machine.block_bytes


@on_every_architecture(
    (BF16, 50257, 64, True, False, False, "linear", False),
    (FP16, 1001, 8, False, True, True, "softcap", True),
    (BF16, 32000, 64, True, True, False, "linear", False),
    (FP32, 32768, 32, False, False, True, "scaled", False),
    (BF16, 128256, 64, True, False, False, "linear", True),
    (BF16, 200, 64, False, False, False, "linear", False),
)
def test_forward_without_gradient(machine, variant):
    vectors, ragged = shape(variant[1], variant[0])
    make_forward(machine, variant, _schedule.streamed(machine, vectors, ragged, variant[0].itemsize), False)


@pytest.mark.parametrize(
    ("cols", "gradient", "reduction", "l2_bytes", "wanted"),
    [
        (32768, False, "mean", H200_L2, "evict_first"),
        (32776, False, "mean", H200_L2, None),
        (16384, False, "mean", H100_L2, "evict_first"),
        (16392, False, "mean", H100_L2, None),
        (4096, False, "mean", H200_L2, "evict_first"),
        # Too wide; and these stream.
        (32776, False, "sum", H100_L2, None),
        (10**6, False, "mean", H200_L2, None),
        (16384, True, "mean", H200_L2, "evict_last"),
        (16384, True, "none", H100_L2, "evict_last"),
        # A backward may read the logits again.
        (16384, False, "none", H200_L2, None),
    ],
)
def test_what_is_evicted_first_and_last_in_the_plain_case(monkeypatch, cols, gradient, reduction, l2_bytes, wanted):
    kernels, compiled = [], cross_entropy.compiled

    def seen(kernel_class, facts, make, *rest):
        kernels.append((facts, make().eviction))
        return compiled(kernel_class, facts, make, *rest)

    monkeypatch.setattr(cross_entropy, "compiled", seen)
    machine = _schedule.machine((9, 0), 132, l2_bytes)
    form = _schedule.plain(machine, cols // 8, False, gradient)
    of = CrossEntropyOptions(reduction=reduction)
    cross_entropy.make_plain_plan(machine, BF16, cols, form, False, torch.int64, gradient, None, of)
    ((facts, eviction),) = kernels
    assert eviction == wanted
    # What the cache knows the binary by; what streams has none.
    assert (("eviction", wanted) in facts) == (form.held or form.at_once)


def test_what_is_evicted_last_elsewhere():
    """Where a result as large is written, and nothing else is copied: rows that stream through registers are not."""
    of = {"target_bits": 64, "scalar": True, "weighted": False, "smoothing": True, "stats": False, "shard": False}
    schedule = _schedule.Schedule(64, 64, 1, 1, 1, 1)
    for gradient, wanted in ((True, "evict_last"), (False, None)):
        kernel = cross_entropy.CrossEntropyForward(BFloat16, schedule, False, gradient=gradient, logits="linear", **of)
        assert kernel.eviction == wanted
    for kernel_class in (softmax.SoftmaxForward, softmax.SoftmaxBackward):
        for held, wanted in ((True, "evict_last"), (False, None)):
            assert kernel_class(BFloat16, schedule, False, log=False, held=held).eviction == wanted


@on_every_architecture(
    (BF16, 8192, 64, False, False, "linear"),
    (FP32, 1001, 32, True, True, "scaled"),
    (FP16, 50257, 64, True, False, "linear"),
    (BF16, 1001, 8, True, True, "softcap"),
    (FP32, 200, 64, False, True, "softcap"),
    (FP16, 8192, 32, False, False, "scaled"),
)
def test_backward(machine, variant):
    dtype, cols, target_bits, weighted, smoothing, logits = variant
    vectors, ragged = shape(cols, dtype)
    plan = cross_entropy.make_backward_plan(
        machine, dtype, cols, _schedule.direct(machine, vectors), ragged, TARGETS[target_bits], weighted,
        options(smoothing, logits),
    )  # fmt: skip
    assert callable(plan.launch)


@on_every_architecture(
    (BF16, 8192, 64), (FP16, 1001, 32), (FP32, 50257, 64), (BF16, 1, 8), (FP16, 8192, 32), (FP32, 200, 64)
)
def test_rescale(machine, variant):
    dtype, cols, target_bits = variant
    vectors, ragged = shape(cols, dtype)
    schedule = _schedule.direct(machine, vectors)
    plan = cross_entropy.make_rescale_plan(machine, dtype, cols, schedule, ragged, TARGETS[target_bits])
    assert callable(plan.launch)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_launches_begin_early_where_the_hardware_lets_them(monkeypatch, capability):
    kernels = []
    monkeypatch.setattr(
        cross_entropy, "compiled", lambda kernel, facts, make, *rest: kernels.append((facts, make().early))
    )
    machine = _schedule.machine(capability, 132, H200_L2)
    schedule = _schedule.direct(machine, 100)
    cross_entropy.make_backward_plan(machine, BF16, 800, schedule, False, torch.int64, False, options(False, "linear"))
    cross_entropy.make_rescale_plan(machine, BF16, 800, schedule, False, torch.int64)
    for facts, early in kernels:
        assert early == (capability[0] in (9, 10))
        assert ("early", early) in facts


# dtype, classes, log, whether rows are held in shared memory
SOFTMAX = on_every_architecture(
    (BF16, 16384, False, True),
    (FP16, 501, True, True),
    (BF16, 128256, True, True),
    (FP32, 50257, False, False),
    (FP16, 4096, False, True),
    (BF16, 200000, True, False),
)


def make_softmax(machine, variant, backward):
    dtype, cols, log, held = variant
    vectors, ragged = shape(cols, dtype)
    schedule = (
        _schedule.held(machine, vectors, 1 + backward, softmax.ENTRY_WORDS, ragged, _schedule.MEASURED_SOFTMAX)
        if held
        else _schedule.direct(machine, vectors)
    )
    plan = softmax.make_plan(machine, dtype, vectors, schedule, ragged, backward, log, held)
    assert callable(plan.launch)
    assert plan.shared_bytes <= machine.block_bytes


@on_every_architecture(
    (BF16, 8192, False, 5),
    (FP16, 8191, True, 5),
    (FP32, 4096, True, 4),
    (FP32, 1001, False, 5),
    (BF16, 12000, True, 3),
    (FP16, 4100, False, 4),
)
@pytest.mark.parametrize("backward", [False, True])
def test_softmax_in_registers(machine, variant, backward):
    dtype, cols, log, blocks = variant
    schedule = _schedule.Schedule(256, 256, 1, 1, 0, blocks)
    ragged = shape(cols, dtype)[1]
    plan = softmax.make_plan_in_registers(machine, dtype, cols, schedule, ragged, backward, log)
    assert callable(plan.launch)
    # A block a row, however many there are, of which each thread has a share.
    for rows in (1, 2000, _schedule.LARGEST):
        assert softmax._numbers(plan, rows, cols)[3] == rows
    assert plan.schedule.unroll * schedule.threads * _schedule.VECTOR_BYTES >= cols * dtype.itemsize


@SOFTMAX
def test_softmax_forward(machine, variant):
    make_softmax(machine, variant, False)


@SOFTMAX
def test_softmax_backward(machine, variant):
    make_softmax(machine, variant, True)
