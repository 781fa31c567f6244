"""The kernels' loops, run in Python thread by thread over a memory that knows what may be touched.

What a kernel computes is left out; which element goes where is the kernels' own.
"""

import inspect
import math
from types import SimpleNamespace

import pytest

pytest.importorskip("tvm_ffi", reason="cutedsl: apache-tvm-ffi is not installed")
pytest.importorskip("cutlass.cute", reason="cutedsl: nvidia-cutlass-dsl is not installed")

from cutedsl.plain import plain
from cutlass import BFloat16, Float32
from loss_cutedsl import (
    _cross_entropy_backward,
    _cross_entropy_forward,
    _cross_entropy_rows,
    _device,
    _schedule,
)

MODULES = (_device, _cross_entropy_rows, _cross_entropy_forward, _cross_entropy_backward)
VECTOR = _schedule.VECTOR_BYTES
IGNORED = -100
TARGET = -5.0
FAR = 1 << 20


class Memory:
    """Elements by address, of one size: tensors in global memory, and the shared memory of a thread's block."""

    def __init__(self, size):
        self.size, self.width = size, VECTOR // size
        self.words, self.readable, self.writable = {}, set(), set()
        self.shared, self.on_the_way, self.group = {}, [], []

    def tensor(self, place, rows, cols, stride, offset, values=None):
        """The address of a tensor; without values one that is only written."""
        begin = FAR * place + offset * self.size
        if values is not None:
            # What lies between rows may be read, and must not be used.
            for element in range((rows - 1) * stride + cols if rows else 0):
                self.readable.add(begin + element * self.size)
        for row in range(rows):
            for col in range(cols):
                address = begin + (row * stride + col) * self.size
                if values is None:
                    self.writable.add(address)
                else:
                    self.words[address] = values(row, col)
        return begin

    def take(self, begin, row, col, stride):
        return self.words.get(begin + (row * stride + col) * self.size)

    # Global memory

    def read(self, address):
        assert address in self.readable, "read outside the tensors"
        return self.words.get(address, math.nan)

    def write(self, address, value):
        assert address in self.writable, "written outside the rows"
        self.words[address] = value

    def read_vector(self, address):
        assert address % VECTOR == 0
        return [self.read(address + lane * self.size) for lane in range(self.width)]

    def write_vector(self, address, values, wanted=True):
        if wanted:
            assert address % VECTOR == 0
            for lane, value in enumerate(self.elements(values)):
                self.write(address + lane * self.size, value)

    def elements(self, words):
        """Of a vector: kernels make words of elements by ``pack``, which here leaves them, or all words alike."""
        return words if len(words) == self.width else words[:1] * self.width

    # Shared memory

    def copy_async(self, s_address, g_address, wanted, policy):
        if wanted:
            self.group.append((s_address, self.read_vector(g_address)))
            # May be there from now on or not.
            self.store_shared(s_address, [math.nan] * self.width)

    def commit(self):
        self.on_the_way.append(self.group)
        self.group = []

    def wait(self, pending):
        while len(self.on_the_way) > pending:
            for s_address, values in self.on_the_way.pop(0):
                self.store_shared(s_address, values)

    def store_shared(self, s_address, values):
        for lane, value in enumerate(self.elements(values)):
            self.shared[s_address + lane * self.size] = value

    def load_shared(self, s_address):
        return [self.shared.get(s_address + lane * self.size, math.nan) for lane in range(self.width)]

    def store_element(self, dtype, address, value, space="global", predicate=True):
        if predicate and space == "shared":
            self.shared[address] = value
        elif predicate:
            self.write(address, value)

    def primitives(self):
        return {
            "Int32": int, "Int64": int, "Uint32": float, "Boolean": bool,
            "copy_async": self.copy_async,
            "l2_policy": lambda eviction: eviction,
            "commit": self.commit,
            "wait": self.wait,
            "store_shared": self.store_shared,
            "load_shared": self.load_shared,
            "load_global": lambda g, wanted: self.read_vector(g) if wanted else [math.nan] * self.width,
            "load_global_or": lambda g, wanted, word: self.read_vector(g) if wanted else [word] * self.width,
            "store_global": self.write_vector,
            "unpack": lambda dtype, words: list(words),
            "pack": lambda dtype, values: values,
            "load_element": lambda dtype, g: self.read(g),
            "load_element_below": lambda dtype, g, index, bound: self.read(g) if 0 <= index < bound else 0.0,
            "select_below": lambda index, bound, inside, outside: inside if 0 <= index < bound else outside,
            "store_element": self.store_element,
            "load_float": lambda g: 1.0,
            "store_float": lambda g, value: None,
            "divide": lambda a, b: 1.0,
            "fma": lambda a, b, c: 1.0,
            "log2": lambda x: 1.0,
            **dict.fromkeys(("show_mbarriers", "cluster_barrier", "cluster_arrive", "cluster_wait"), lambda: None),
        }  # fmt: skip


class Parts:
    """What the kernels are made of, but for arithmetic and what threads tell one another."""

    def lowest(self):
        return -math.inf

    def absorb_values(self, t, power, highest, total):
        self.seen += [x for x in t if x != -math.inf]
        return 0.0, 1.0

    def reduce_row(self, *rest):
        return 0.0, 1.0, [], None

    def copy_elements(self, s_slot, g_vectors, vector, phase, cols):
        for lane in range(self.width):
            if 0 <= vector * self.width + lane - phase < cols:
                at = lane * self.element_bytes
                self.memory.shared[s_slot + at] = self.memory.read(g_vectors + vector * VECTOR + at)

    def gradient_values(self, facts, raw, col, highest, pull, scale):
        return raw

    def target_gradient(self, facts, y, x_y, w_y, g_out, out_phase, highest, pull, scale):
        self.memory.write(g_out + (out_phase + y) * self.element_bytes, TARGET)

    def load_target(self, g_target, row, wanted, otherwise):
        return self.targets[row] if wanted else otherwise

    def column(self, facts, target):
        return target if 0 <= target < facts.cols else facts.cols

    def target_logit(self, g_vectors, phase, y, cols):
        return self.memory.read(g_vectors + (phase + (y if y < cols else 0)) * self.element_bytes)

    def nothing(self, *rest):
        return 0.0

    count_slice = denominator = announce = finish_sum = write_stats = or_nan = first_column = nothing

    def row_loss(self, *rest):
        return (0.0,) * 4


class Forward(Parts, _cross_entropy_forward.CrossEntropyForward):
    share_of_denominator = Parts.nothing


class Backward(Parts, _cross_entropy_backward.CrossEntropyBackward):
    pass


class Rescale(Parts, _cross_entropy_backward.CrossEntropyRescale):
    pass


def in_python(kernel_class):
    """The class with what the compiler translates as the plain functions that they were."""
    methods = {}
    for base in reversed(kernel_class.__mro__):
        for key, value in vars(base).items():
            if callable(value) and hasattr(value, "__wrapped__"):
                methods[key] = plain(value)
            else:
                methods.pop(key, None)
    return type(kernel_class.__name__, (kernel_class,), methods)


def run(monkeypatch, kernel, name, memory, grid, **arguments):
    """All threads of all blocks, one after the other; arguments that are not given are 0."""
    function = getattr(kernel, name)
    arguments = {**dict.fromkeys(inspect.signature(function).parameters, 0), **arguments}
    place = SimpleNamespace(block=0, thread=0)
    arch = SimpleNamespace(
        thread_idx=lambda: (place.thread, 0, 0),
        block_idx=lambda: (place.block, 0, 0),
        grid_dim=lambda: (grid, 1, 1),
        get_dyn_smem=lambda kind, alignment: SimpleNamespace(toint=lambda: 0),
    )
    stand_in = SimpleNamespace(
        const_expr=bool, range_constexpr=range, range=lambda *bounds, unroll: range(*map(int, bounds))
    )
    primitives = {**memory.primitives(), "cutlass": stand_in, "cute": SimpleNamespace(arch=arch)}
    for module in MODULES:
        for key, value in primitives.items():
            if hasattr(module, key):
                monkeypatch.setattr(module, key, value)
    kernel.memory, kernel.seen = memory, []
    for place.block in range(grid):
        memory.shared = {}
        for place.thread in range(kernel.threads):
            memory.on_the_way = []
            function(**arguments)
    monkeypatch.undo()


# Threads of a block, of a row, blocks of a cluster, stages, vectors a step.
SCHEDULES = [(2, 2, 1, 1, 1), (3, 3, 1, 2, 2), (4, 2, 1, 2, 2), (2, 2, 2, 1, 2)]
# The same for kernels that hold no rows.
SINGLE = [(2, 2, 1, 1, 1), (3, 3, 1, 1, 2), (4, 2, 1, 1, 2)]
# Classes, elements from row to row (of what is read, of what is written) beyond them, offsets.
LAYOUTS = [
    (8, 0, 0, 0, 0), (24, 8, 0, 0, 0), (64, 0, 0, 0, 0),
    (1, 0, 0, 0, 0), (1, 0, 0, 3, 3), (2, 5, 5, 7, 7), (7, 0, 0, 0, 0), (9, 0, 0, 1, 1), (15, 1, 1, 0, 0),
    (16, 0, 0, 5, 5), (17, 2, 2, 6, 6), (31, 0, 0, 0, 0), (33, 0, 0, 2, 2), (47, 0, 1, 0, 4), (50, 3, 0, 1, 0),
]  # fmt: skip
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout)))
schedules = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda facts: "-".join(map(str, facts)))
dtypes = pytest.mark.parametrize("dtype", [BFloat16, Float32], ids=["2 bytes", "4 bytes"])


def geometry(dtype, layout, schedule):
    """What kernels of one layout have in common: memory, whether rows are ragged, the schedule, chunks of a row."""
    memory = Memory(dtype.width // 8)
    cols, gap, out_gap, offset, out_offset = layout
    ragged = (offset | out_offset | cols | gap | out_gap) % memory.width != 0
    schedule = _schedule.Schedule(*schedule, 1)
    return memory, ragged, schedule, schedule.chunks(_schedule.most_vectors(cols, memory.width, ragged))


def value(row, col):
    return 1.0 + 100 * row + col


@schedules
@layouts
@dtypes
@pytest.mark.parametrize("form", ["in place", "held", "streamed"])
@pytest.mark.parametrize("rows", [1, 5])
def test_cross_entropy_forward(monkeypatch, rows, form, dtype, layout, schedule):
    memory, ragged, schedule, chunks = geometry(dtype, layout, schedule)
    cols, gap, out_gap, offset, out_offset = layout
    gradient = form != "streamed"
    kernel = in_python(Forward)(
        dtype, schedule, ragged, target_bits=64, gradient=gradient, scalar=True, weighted=False, smoothing=False,
        logits="linear", stats=False, shard=False,
    )  # fmt: skip
    kernel.targets = [(IGNORED, 0, cols - 1, cols // 2, cols)[(row + 1) % 5] for row in range(rows)]
    stride, out_stride = cols + gap, cols + out_gap
    logits = memory.tensor(1, rows, cols, stride, offset, value)
    if form == "in place":
        grad, out_stride = logits, stride
        memory.tensor(1, rows, cols, stride, offset)
    else:
        grad = memory.tensor(2, rows, cols, out_stride, out_offset)
    run(
        monkeypatch, kernel, "cross_entropy_forward_kernel", memory, 2 * schedule.cluster, g_logits=logits,
        logits_stride=stride, g_grad=grad, grad_stride=out_stride, rows=rows, cols=cols, chunks=chunks,
        ignore_index=IGNORED, slices=1, denominator_kind=0,
    )  # fmt: skip
    live = [row for row in range(rows) if kernel.targets[row] != IGNORED]
    assert sorted(kernel.seen) == [value(row, col) for row in live for col in range(cols)]
    for row in range(rows if gradient else 0):
        for col in range(cols):
            wanted = 0.0 if row not in live else TARGET if col == kernel.targets[row] else value(row, col)
            assert memory.take(grad, row, col, out_stride) == wanted


@pytest.mark.parametrize("schedule", SINGLE, ids=lambda facts: "-".join(map(str, facts)))
@layouts
@dtypes
@pytest.mark.parametrize("form", ["in place", "apart"])
def test_cross_entropy_backward(monkeypatch, form, dtype, layout, schedule):
    rows = 5
    memory, ragged, schedule, tiles = geometry(dtype, layout, schedule)
    cols, gap, out_gap, offset, out_offset = layout
    stride, out_stride = cols + gap, cols + out_gap
    grad = logits = memory.tensor(1, rows, cols, stride, offset, value)
    if form == "apart":
        grad = memory.tensor(2, rows, cols, out_stride, out_offset)
    else:
        out_stride = stride
        memory.tensor(1, rows, cols, stride, offset)
    kernel = in_python(Backward)(
        dtype, schedule, ragged, target_bits=64, weighted=False, smoothing=False, logits="linear", early=False
    )
    kernel.targets = [(IGNORED, 0, cols - 1, cols // 2, cols)[row] for row in range(rows)]
    run(
        monkeypatch, kernel, "cross_entropy_backward_kernel", memory, 3, g_logits=logits, logits_stride=stride,
        g_grad=grad, grad_stride=out_stride, rows=rows, cols=cols, tiles=tiles, ignore_index=IGNORED,
    )  # fmt: skip
    for row in range(rows):
        for col in range(cols):
            wanted = value(row, col)
            if kernel.targets[row] == IGNORED:
                wanted = 0.0
            elif kernel.targets[row] == col:
                wanted = TARGET
            assert memory.take(grad, row, col, out_stride) == wanted


@pytest.mark.parametrize("schedule", SINGLE, ids=lambda facts: "-".join(map(str, facts)))
@layouts
@dtypes
@pytest.mark.parametrize("upstream", [2.0, math.inf, -math.inf, math.nan])
def test_cross_entropy_rescale(monkeypatch, upstream, dtype, layout, schedule):
    """Of rows that are not ignored zeros too, which may become NaN: they do in torch."""
    rows = 5
    memory, ragged, schedule, tiles = geometry(dtype, layout, schedule)
    cols, gap, _, offset, _ = layout
    stride = cols + gap
    targets = [IGNORED, 0, IGNORED, cols, IGNORED]

    def before(row, col):
        return 0.0 if targets[row] == IGNORED or col % 3 == 1 else value(row, col)

    grad = memory.tensor(1, rows, cols, stride, offset, before)
    memory.tensor(1, rows, cols, stride, offset)
    kernel = in_python(Rescale)(dtype, schedule, ragged, target_bits=64, early=False)
    kernel.targets = targets
    memory.primitives = lambda of=memory.primitives: {**of(), "load_float": lambda g: upstream}
    run(
        monkeypatch, kernel, "cross_entropy_rescale_kernel", memory, 3, g_grad=grad, grad_stride=stride, rows=rows,
        cols=cols, tiles=tiles, ignore_index=IGNORED,
    )  # fmt: skip
    for row in range(rows):
        for col in range(cols):
            wanted = 0.0 if targets[row] == IGNORED else before(row, col) * upstream
            assert memory.take(grad, row, col, stride) == pytest.approx(wanted, abs=0, rel=0, nan_ok=True)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("kernel_class", [Backward, Rescale])
def test_nothing_is_read_before_the_launches_ahead_have_ended(monkeypatch, kernel_class, early):
    memory, ragged, schedule, tiles = geometry(Float32, (8, 0, 0, 0, 0), SINGLE[0])
    facts = {"weighted": False, "smoothing": False, "logits": "linear"} if kernel_class is Backward else {}
    kernel = in_python(kernel_class)(Float32, schedule, ragged, target_bits=64, early=early, **facts)
    events = []
    memory.primitives = lambda of=memory.primitives: {
        **of(),
        "wait_for_launches": lambda: events.append("wait"),
        "load_float": lambda g: events.append("read") or 1.0,
    }
    grad = memory.tensor(1, 1, 8, 8, 0)
    given = {"skip_if_one": 1, "g_upstream": 1} if kernel_class is Backward else {"g_upstream": 1}
    name = "cross_entropy_backward_kernel" if kernel_class is Backward else "cross_entropy_rescale_kernel"
    run(monkeypatch, kernel, name, memory, 1, g_grad=grad, grad_stride=8, rows=1, cols=8, tiles=tiles, **given)
    assert events == (["wait", "read"] if early else ["read"]) * schedule.threads
