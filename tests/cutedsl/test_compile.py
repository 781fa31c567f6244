"""Every kernel compiles for every architecture, without a GPU."""

import pytest
import torch

pytest.importorskip("tvm_ffi", reason="cutedsl: apache-tvm-ffi is not installed")
pytest.importorskip("cutlass.cute", reason="cutedsl: nvidia-cutlass-dsl is not installed")

from loss_cutedsl import _schedule, cross_entropy, softmax

CAPABILITIES = [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.setenv("LOSS_CUTEDSL_CACHE", "")
    monkeypatch.setattr("loss_cutedsl._compile._kept", {})


@pytest.fixture(params=CAPABILITIES, ids=lambda capability: "sm_{}{}".format(*capability))
def machine(request):
    return _schedule.machine(request.param, 132)


def dtype_for(machine, shift):
    """A dtype that changes with the architecture, so that few compilations cover all pairs of kernel and dtype."""
    number = [_schedule.machine(capability, 132).architecture for capability in CAPABILITIES].index(
        machine.architecture
    )
    return DTYPES[(number + shift) % len(DTYPES)]


# Widths: a warp to a row; a block; a cluster, where there are clusters; aligned and ragged.
@pytest.mark.parametrize(("cols", "shift"), [(500, 0), (8192, 1), (128256, 2), (50257, 0)])
def test_forward_with_gradient(machine, cols, shift):
    dtype = dtype_for(machine, shift)
    ragged = cols * dtype.itemsize % 16 != 0
    vectors = cross_entropy.most_vectors(cols, dtype.itemsize, ragged)
    schedule = _schedule.held(machine, vectors, 1, cross_entropy.ENTRY_WORDS, ragged)
    if schedule is None:
        assert not machine.clusters
        pytest.skip(f"rows of {cols} {dtype} do not fit; they take the forward without gradient and the backward")
    plan = cross_entropy._make_forward_plan(
        machine, dtype, vectors, schedule, ragged, 64, True, True, False, False, "linear", False
    )
    assert callable(plan.launch)
    assert plan.shared_bytes <= machine.block_bytes
    assert plan.most_blocks % schedule.cluster == 0


@pytest.mark.parametrize("gradient", [False, True])
def test_forward_with_every_option(machine, gradient):
    dtype = dtype_for(machine, int(gradient))
    vectors = cross_entropy.most_vectors(1001, dtype.itemsize, True)
    schedule = (
        _schedule.held(machine, vectors, 1, cross_entropy.ENTRY_WORDS, True)
        if gradient
        else _schedule.streamed(machine, vectors, True)
    )
    plan = cross_entropy._make_forward_plan(
        machine, dtype, vectors, schedule, True, 8, gradient, gradient, True, True, "softcap", True
    )
    assert callable(plan.launch)


def test_backward_and_rescale(machine):
    vectors = cross_entropy.most_vectors(1001, 2, True)
    direct = _schedule.direct(machine, vectors)
    architecture = machine.architecture
    from loss_cutedsl._compile import compiled
    from loss_cutedsl._launch import DTYPES as KERNEL_DTYPES

    kernel_dtype = KERNEL_DTYPES[dtype_for(machine, 0)]
    facts = {"target_bits": 32, "weighted": True, "smoothing": True, "logits": "scaled"}
    assert callable(
        compiled(
            cross_entropy.CrossEntropyBackward,
            ("test",),
            lambda: cross_entropy.CrossEntropyBackward(kernel_dtype, direct, True, **facts),
            cross_entropy.backward_arguments,
            architecture,
        )
    )
    assert callable(
        compiled(
            cross_entropy.CrossEntropyRescale,
            ("test",),
            lambda: cross_entropy.CrossEntropyRescale(kernel_dtype, direct, True),
            cross_entropy.rescale_arguments,
            architecture,
        )
    )


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("cols", "held"), [(501, True), (16384, True), (50257, False)])
def test_softmax(machine, cols, held, backward):
    dtype = dtype_for(machine, cols)
    ragged = cols * dtype.itemsize % 16 != 0
    vectors = softmax.most_vectors(cols, dtype.itemsize, ragged)
    schedule = (
        _schedule.held(machine, vectors, 1 + backward, softmax.ENTRY_WORDS, ragged)
        if held
        else _schedule.direct(machine, vectors)
    )
    if schedule is None:
        assert not machine.clusters
        pytest.skip(f"rows of {cols} {dtype} do not fit in one block's shared memory")
    plan = softmax.make_plan(machine, dtype, vectors, schedule, ragged, backward, cols % 2 == 1, held)
    assert callable(plan.launch)
    assert plan.shared_bytes <= machine.block_bytes


@pytest.mark.parametrize("vectors", [1, 2, 31, 255, 256, 257, 1000, 4000, 6283, 16032, 18992, 131072, 262144])
@pytest.mark.parametrize("ragged", [False, True])
def test_schedules_fit_their_machine(machine, vectors, ragged):
    for inputs in (1, 2):
        schedule = _schedule.held(machine, vectors, inputs, 8, ragged)
        if schedule is None:
            continue
        groups = schedule.threads // schedule.row_threads
        held = inputs * groups * schedule.stages * schedule.slot_bytes(schedule.chunks(vectors))
        assert schedule.scratch_bytes(8) + held <= machine.block_bytes
        assert schedule.threads * schedule.blocks <= 1536
        assert schedule.row_threads in (32, schedule.threads)
        assert schedule.cluster == 1 or machine.clusters
    for schedule in (_schedule.streamed(machine, vectors, ragged), _schedule.direct(machine, vectors)):
        assert schedule.chunks(vectors) * schedule.unroll * schedule.row_threads >= vectors
