"""Schedules fit the machines they are for, and every launch asks for the shared memory that its kernel addresses."""

import ast
import inspect
import itertools

import pytest

pytest.importorskip("tvm_ffi", reason="cutedsl: apache-tvm-ffi is not installed")
pytest.importorskip("cutlass.cute", reason="cutedsl: nvidia-cutlass-dsl is not installed")

from cutlass import BFloat16
from loss_cutedsl import (
    _cross_entropy_backward,
    _cross_entropy_forward,
    _cross_entropy_plain,
    _cross_entropy_rows,
    _cross_entropy_total,
    _device,
    _meeting_rows,
    _schedule,
    _workspace,
    softmax,
)

CAPABILITIES = [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
# As torch reports them.
H100_L2, H200_L2 = 52428800, 62914560
VECTORS = [
    *(1, 2, 31, 193, 256, 257, 513, 767, 768, 1000, 1024, 1025, 2048, 2049, 3585, 4000, 4096, 4097, 6283, 7168, 8192),
    *(8193, 10000),
    *(14337, 16032, 18992, 24576, 24577, 32768, 65536, 131072, 262144),
]


@pytest.fixture(params=CAPABILITIES, ids=lambda capability: "sm_{}{}".format(*capability))
def machine(request):
    return _schedule.machine(request.param, 132, H200_L2)


def addressed(kernel, vectors, inputs, entry_words, whole_rows=True):
    """End of the shared memory that a kernel addresses, by the arithmetic of its own methods."""
    entries = kernel.warps * kernel.cluster
    # Two halves of the reduction's scratch, used in turn; a word per warp of the block where blocks add up; the notes.
    assert 2 * entries * 4 * entry_words <= kernel.notes
    assert 4 * (kernel.threads // 32) <= kernel.notes
    assert kernel.notes + _schedule.NOTE_BYTES == kernel.scratch_bytes
    assert kernel.notes % 4 == 0
    chunks = kernel.schedule.chunks(vectors) if whole_rows else 1
    stage_bytes = chunks * kernel.unroll * kernel.row_threads * _schedule.VECTOR_BYTES
    last_stage = kernel.scratch_bytes + (kernel.groups * inputs * kernel.stages - 1) * stage_bytes
    last_thread = last_stage + (kernel.row_threads - 1) * _schedule.VECTOR_BYTES
    return kernel.slot(last_thread, chunks * kernel.unroll - 1) + _schedule.VECTOR_BYTES


@pytest.mark.parametrize("width", [4, 8])
def test_a_row_reaches_every_slot_that_is_not_filled_but_the_last(width):
    """The kernels fill the slots from the most on once, and mask one slot behind a row's last."""
    for cols in range(1, 6 * width):
        touched = {(phase + cols + width - 1) // width for phase in range(width)}
        most = _schedule.most_vectors(cols, width, ragged=True)
        assert touched <= {most - 1, most}
        assert most in touched
    assert _schedule.most_vectors(6 * width, width, ragged=False) == 6


@pytest.mark.parametrize("ragged", [False, True], ids=["aligned", "ragged"])
def test_schedules_fit_their_machine(machine, ragged):
    for vectors in VECTORS:
        check_schedules(machine, vectors, ragged)


def check_schedules(machine, vectors, ragged):
    words = _cross_entropy_rows.ENTRY_WORDS
    gradient, soft = _schedule.MEASURED_GRADIENT, _schedule.MEASURED_SOFTMAX
    for inputs, measured in ((1, gradient), (1, soft), (2, soft)):
        schedule = _schedule.held(machine, vectors, inputs, words, ragged, measured)
        if schedule is None:
            continue
        requested = _schedule.shared_bytes(schedule, vectors, inputs, words)
        kernel = _device.StagedRows(BFloat16, schedule, ragged, words)
        assert addressed(kernel, vectors, inputs, words) <= requested <= machine.block_bytes
        assert schedule.chunks(vectors) * kernel.unroll * kernel.step >= vectors
        assert schedule.threads * schedule.blocks <= 1536
        assert schedule.row_threads in (32, schedule.threads)
        assert schedule.cluster == 1 or machine.clusters
    for element_bytes in (2, 4):
        schedule = _schedule.streamed(machine, vectors, ragged, element_bytes)
        requested = _schedule.shared_bytes(schedule, vectors, 1, words, whole_rows=False)
        kernel = _device.StagedRows(BFloat16, schedule, ragged, words)
        assert addressed(kernel, vectors, 1, words, whole_rows=False) <= requested <= machine.block_bytes
        assert schedule.chunks(vectors) * kernel.unroll * kernel.step >= vectors
        assert schedule.threads * schedule.blocks <= 1536
    schedule = _schedule.direct(machine, vectors)
    assert schedule.chunks(vectors) * schedule.unroll * schedule.row_threads >= vectors


def test_schedules_of_long_rows_use_clusters_where_there_are_some():
    rows = 151936 // 8
    assert _schedule.held(_schedule.machine((9, 0), 132, H200_L2), rows).cluster == 2
    assert _schedule.held(_schedule.machine((8, 0), 108, H200_L2), rows, measured=_schedule.MEASURED_GRADIENT) is None


@pytest.mark.parametrize("table", ["MEASURED_GRADIENT", "MEASURED_SOFTMAX"])
def test_measured_schedules_fit_over_all_widths_they_are_for(table):
    """And no width has two of them."""
    hopper = _schedule.machine((9, 0), 132, H200_L2)
    words = _cross_entropy_rows.ENTRY_WORDS
    measured = sorted(getattr(_schedule, table))
    for case in measured:
        assert case.least <= case.most
        for vectors in (case.least, case.most):
            assert _schedule.shared_bytes(case.schedule, vectors, case.inputs, words) <= hopper.block_bytes
            found = _schedule.held(hopper, vectors, case.inputs, words, case.ragged, tuple(measured))
            assert found == case.schedule
    for case, after in itertools.pairwise(measured):
        assert case[:2] != after[:2] or case.most < after.least


@pytest.mark.parametrize("at_most", [0, 1, 3])
@pytest.mark.parametrize(("cluster", "rows"), [(1, 1), (1, 100000), (2, 7), (2, 4096), (4, 66), (8, 4096), (16, 4096)])
def test_grid_is_whole_clusters_and_no_more_than_there_are_rows(cluster, rows, at_most):
    machine = _schedule.machine((9, 0), 132, H200_L2)
    schedule = _schedule.Schedule(512, 512, cluster, 1, 4, 1, at_most)
    most = _schedule.most_blocks(machine, schedule, 100 * 1024)
    blocks = schedule.grid(most, rows)
    assert blocks % cluster == 0
    assert blocks // cluster <= rows
    if cluster > 2:
        assert -(-rows // (blocks // cluster)) <= max(
            at_most or _schedule.ROWS_OF_LARGE_CLUSTER, -(-rows * cluster // most)
        )
    elif blocks > most:
        assert at_most
        assert blocks == -(-rows // at_most) * cluster


def test_few_rows_a_block_are_for_two_waves_and_more():
    """4096 x 8192 on a Hopper: a second wave that fills a third of the device takes as long as a whole one."""
    hopper = _schedule.machine((9, 0), 132, H200_L2)
    schedule = _schedule.held(hopper, 1024, measured=_schedule.MEASURED_GRADIENT)
    assert schedule.rows == 4
    most = 132 * schedule.blocks
    assert schedule.grid(most, 4096) == most
    assert schedule.grid(most, 8 * most) == 2 * most
    assert schedule.grid(most, 32768) == 8192


@pytest.mark.parametrize("blocks", [1, 2, 3, 1320])
def test_workspace_has_room_for_the_counters_and_for_every_sum_of_every_block(blocks):
    space, forward, total = _workspace, _cross_entropy_forward, _cross_entropy_total
    counters = {space.WORKSPACE_SLICES_DONE, space.WORKSPACE_DONE}
    assert len(counters) == 2
    assert min(counters) >= space.MOST_SLICES
    assert max(counters) < space.WORKSPACE_SUMS
    assert 2 * space.workspace_words(blocks) >= space.WORKSPACE_SUMS + space.SUMS_WORDS * blocks
    assert space.WORKSPACE_SUMS % space.SUMS_WORDS == 0
    notes = {forward.NOTE_COUNTED, forward.NOTE_DENOMINATOR, total.NOTE_DONE}
    assert len(notes) == 3
    assert max(notes) + 4 <= _schedule.NOTE_BYTES


def test_workspace_of_the_plain_case():
    space, plain, total = _workspace, _cross_entropy_plain, _cross_entropy_total
    # The count has a line of the L2 to itself, and is a word of 64 bits.
    assert space.WORKSPACE_COUNT % 2 == 0
    assert (space.WORKSPACE_PARTS - space.WORKSPACE_COUNT) * 4 >= 128
    # The last slice's sum is not told; a warp takes the others up, a vector a lane.
    assert space.WORKSPACE_PARTS + space.MOST_PARTS - 1 <= space.WORKSPACE_LOSSES
    assert space.MOST_PARTS - 1 <= 4 * 32
    assert space.WORKSPACE_PARTS % 4 == space.WORKSPACE_LOSSES % 4 == 0
    for rows in (1, 3, 4, 5, 1000):
        assert 2 * space.plain_workspace_words(rows) >= space.WORKSPACE_LOSSES + -(-rows // 4) * 4
    assert total.NOTE_DONE != plain.NOTE_FACTOR <= _schedule.NOTE_BYTES - 4
    # What is counted and the number of warps share a word.
    assert plain.MOST_COUNTED * 1024 // 32 < 2 ** (63 - plain.WARPS_SHIFT)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("l2_bytes", [H100_L2, H200_L2], ids=["smaller", "larger"])
def test_plain_schedules_fit_and_take_every_vector_of_a_row(l2_bytes, capability, gradient, ragged):
    machine = _schedule.machine(capability, 132, l2_bytes)
    most = 0
    for vectors in [*range(129, 40000, 7), _schedule.LARGEST // 4]:
        found = _schedule.plain(machine, vectors, ragged, gradient)
        if found is None:
            assert gradient
            continue
        most = vectors
        schedule, held = found
        assert held or found.at_once or not gradient
        if found.at_once:
            assert not held
            assert 64 <= schedule.threads == schedule.row_threads <= 1024
            assert schedule.cluster == 1
            assert schedule.blocks * schedule.threads <= 2048
            # What a thread has of a row, beside which it needs some two dozen more.
            assert 4 * -(-vectors // schedule.threads) + 24 <= 65536 // (schedule.blocks * schedule.threads)
            continue
        assert machine.clusters or schedule.cluster == 1
        assert schedule.cluster <= 8, "what every GPU with clusters allows"
        assert schedule.stages == schedule.groups == 1
        # The notes are seen through the exchange, which one warp has not.
        assert schedule.threads >= 64
        needed = _schedule.shared_bytes(schedule, vectors, int(held), _schedule.PLAIN_ENTRY_WORDS)
        assert needed <= machine.block_bytes
        assert (schedule.chunks(vectors) - 1) * schedule.unroll * schedule.threads * schedule.cluster < vectors
        if capability == (9, 0):
            assert (schedule.blocks - 1) * (needed + _schedule.RESERVED_BYTES) <= machine.processor_bytes, vectors
            assert schedule.blocks * schedule.threads <= 2048
    assert most >= (_schedule.LARGEST // 4 if not gradient else 32700 if machine.clusters else 5600)
    assert _schedule.plain(machine, 128, ragged, gradient) is None


# Classes in bf16: on an H200, and on an H100.
@pytest.mark.parametrize(
    ("cols", "held"),
    [
        # In registers.
        (4096, (False, False)),
        (8192, (False, False)),
        (16384, (False, False)),
        (32000, (False, False)),
        (32003, (False, False)),
        (50257, (False, False)),
        (65536, (True, True)),
        (128256, (False, True)),
        (128257, (False, True)),
        (151936, (False, True)),
        # More than fits.
        (10**6, (False, False)),
    ],
)
def test_more_of_the_loss_alone_is_held_where_the_l2_cache_is_smaller(cols, held):
    ragged = cols % 8 != 0
    vectors = _schedule.most_vectors(cols, 8, ragged)
    machines = [_schedule.machine((9, 0), 132, l2_bytes) for l2_bytes in (H200_L2, H100_L2)]
    larger, smaller = (_schedule.plain(machine, vectors, ragged, False) for machine in machines)
    with_gradient = {_schedule.plain(machine, vectors, ragged, True) for machine in machines}
    assert len(with_gradient) == 1
    assert (larger.held, smaller.held) == held
    if larger.held == smaller.held:
        # An H200 has a block more under way here.
        more = int(cols == 65536)
        assert larger.schedule == smaller.schedule._replace(blocks=smaller.schedule.blocks + more)
    else:
        assert smaller in with_gradient


def cross_entropy_in_registers(gradient):
    return lambda machine, vectors, ragged: _schedule.plain(machine, vectors, ragged, gradient).schedule


def softmax_in_registers(inputs):
    return lambda machine, vectors, ragged: _schedule.softmax_in_registers(machine, vectors, inputs, ragged)


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize(
    ("schedule_of", "vectors"),
    [
        *((cross_entropy_in_registers(False), vectors) for vectors in (129, 300, 640, 1024, 2048, 2049, 4096, 6283)),
        *((cross_entropy_in_registers(True), vectors) for vectors in (129, 300, 640, 1024, 2048, 2049, 3000, 4500)),
        *((softmax_in_registers(1), vectors) for vectors in (1, 2, 90, 128, 300, 1024, 1500)),
        *((softmax_in_registers(2), vectors) for vectors in (1, 2, 64, 128, 300, 1024, 1279)),
    ],
)
def test_vectors_of_rows_in_registers(schedule_of, vectors, width):
    """Wherever a row begins, each vector that is all of it has a place, and those that count as full are all of it."""
    machine = _schedule.machine((9, 0), 132, H200_L2)
    for cols in range(max(1, vectors * width - width + 1), vectors * width + width):
        ragged = cols % width != 0
        found = schedule_of(machine, _schedule.most_vectors(cols, width, ragged), ragged)
        assert found.unroll == 0
        schedule, full = _schedule.in_registers(found, cols * 16 // width)
        assert full in (schedule.unroll - 1, schedule.unroll)
        for phase in range(width if ragged else 1):
            whole = range(int(phase > 0), (phase + cols) // width)
            last = whole[-1] if whole else -1
            assert last < schedule.unroll * schedule.row_threads
            assert full * schedule.row_threads <= last + 1


def test_softmax_in_registers_has_room_over_all_widths_that_it_is_for():
    """And no width has two schedules; where there are no clusters none has been measured."""
    hopper, ampere = _schedule.machine((9, 0), 132, H200_L2), _schedule.machine((8, 0), 108, H200_L2)
    table = sorted(_schedule.SOFTMAX_IN_REGISTERS)
    assert table
    for case in table:
        inputs, ragged, least, most, schedule = case
        assert least <= most
        assert schedule.row_threads in (32, schedule.threads)
        assert (schedule.cluster, schedule.unroll) == (1, 0)
        for vectors in (least, most):
            assert _schedule.softmax_in_registers(hopper, vectors, inputs, ragged) == schedule
            assert _schedule.softmax_in_registers(ampere, vectors, inputs, ragged) is None
        # What a thread has of its rows, beside which it needs some two dozen more.
        assert 4 * inputs * -(-most // schedule.row_threads) + 16 <= 65536 // (schedule.blocks * schedule.threads)
    for case, after in itertools.pairwise(sorted((*table, *_schedule.MEASURED_SOFTMAX))):
        assert case[:2] != after[:2] or case.most < after.least


@pytest.mark.parametrize("cols", [4096, 32003, 50257, 128256])
def test_rows_that_only_a_cluster_could_hold_stream_as_ever_where_there_is_none(cols):
    ragged = cols % 8 != 0
    vectors = _schedule.most_vectors(cols, 8, ragged)
    smaller, larger = (_schedule.machine((8, 0), 108, l2_bytes) for l2_bytes in (H100_L2, H200_L2))
    assert _schedule.plain(smaller, vectors, ragged, False) == _schedule.plain(larger, vectors, ragged, False)


def test_wide_rows_are_not_evicted_first_where_the_l2_cache_is_smaller():
    smaller, larger = (_schedule.machine((9, 0), 132, l2_bytes) for l2_bytes in (H100_L2, H200_L2))
    for row_bytes, wanted in ((16384, (True, True)), (32768, (True, True)), (64000, (False, True))):
        assert tuple(_schedule.evicts_first(machine, row_bytes) for machine in (smaller, larger)) == wanted
    assert not _schedule.evicts_first(larger, 65552)


@pytest.mark.parametrize("rows", [1, 7, 8192, 10**6, _schedule.MOST_PLAIN_ROWS])
@pytest.mark.parametrize("processors", [1, 2, 132])
@pytest.mark.parametrize("vectors", [200, 4000, 32000])
def test_plain_grids(vectors, processors, rows):
    machine = _schedule.machine((9, 0), processors, H200_L2)
    form = _schedule.plain(machine, vectors, False, True)
    schedule = _schedule.in_registers(form.schedule, 16 * vectors)[0] if form.at_once else form.schedule
    resident = _schedule.most_blocks(
        machine, schedule, _schedule.shared_bytes(schedule, vectors, int(form.held), _schedule.PLAIN_ENTRY_WORDS)
    )
    assert _cross_entropy_plain.grid(schedule, resident, False, rows) == (rows * schedule.cluster, 0, 0)
    blocks, slices, words = _cross_entropy_plain.grid(schedule, resident, True, rows)
    parts = blocks // schedule.cluster - rows
    teams = resident // schedule.cluster
    assert blocks == (rows + parts) * schedule.cluster < 2**31
    # Neither those that wait for others nor those that others wait for are more than half of what runs at a time.
    assert 1 <= parts <= min(_workspace.MOST_PARTS, max(1, teams // 2))
    assert 1 <= slices <= min(rows, _cross_entropy_plain.MOST_COUNTED, max(1, teams // 2))
    assert words == _workspace.plain_workspace_words(rows)
    # What the loops over targets and over losses count to.
    assert rows + slices * schedule.threads * _cross_entropy_plain.TARGETS_UNROLL < 2**31
    assert rows + 4 * schedule.threads * _cross_entropy_plain.LOSSES_UNROLL < 2**31


def test_the_kernel_that_adds_up_weights_has_a_word_per_warp():
    backward = _cross_entropy_backward
    assert backward.WEIGHT_SUM_BYTES >= 4 * (backward.WEIGHT_SUM_THREADS // 32)


def methods_of(*modules):
    """By name all functions that have it."""
    methods = {}
    for module in modules:
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.FunctionDef):
                methods.setdefault(node.name, []).append(node)
    return methods


def uses_shared_memory(name, methods, seen=()):
    """Whether a kernel, or what it calls, asks where its dynamic shared memory is."""
    if name not in methods or name in seen:
        return False
    called = {
        call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        for method in methods[name]
        for call in ast.walk(method)
        if isinstance(call, ast.Call)
    }
    return "get_dyn_smem" in called or any(uses_shared_memory(other, methods, (*seen, name)) for other in called)


def launches(*modules):
    """(kernel's name, keywords of its launch) of each launch in the modules."""
    for module in modules:
        for call in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "launch":
                kernel = call.func.value
                assert isinstance(kernel, ast.Call)
                yield kernel.func.attr, {keyword.arg for keyword in call.keywords}


def test_launch_asks_for_shared_memory_where_its_kernel_uses_some():
    modules = (_cross_entropy_forward, _cross_entropy_plain, _cross_entropy_backward, softmax)
    methods = methods_of(*modules, _cross_entropy_rows, _device, _meeting_rows)
    found = dict(launches(*modules))
    assert len(found) == 7
    for kernel, keywords in found.items():
        assert ("smem" in keywords) == uses_shared_memory(kernel, methods), kernel
