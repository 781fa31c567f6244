"""Cross-entropy: the ops of the contract, and how their kernels are chosen and launched.

The kernels are in ``_cross_entropy_plain``, ``_cross_entropy_forward``, ``_cross_entropy_backward`` and, what they use,
``_cross_entropy_rows``.

With x the logits after scale and softcap, and for a row of V classes with target y, maximum m = max x and
total = sum_c exp(x[c] - m)::

    lse    = m + log(total)
    loss   = (1 - e) * w[y] * (lse - x[y]) + e / V * sum_c w[c] * (lse - x[c]) + z * lse ** 2
    d loss / d x[c] = p[c] * ((1 - e) * w[y] + e / V * sum w + 2 z lse) - (1 - e) * w[y] * [c = y] - e / V * w[c]

All in float32, differences to the maximum before anything else, so that large logits lose nothing. The sum runs
online, with a running maximum (Milakov and Gimelshein 2018). The gradient in the same pass as the loss, for
scalar reductions whose denominator is known before the logits are read, is as in Liger (Hsu et al. 2024).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from loss_core.backend import CrossEntropyForward as ForwardResult
from loss_core.backend import PreparedCrossEntropy, UnsupportedInput, refuse_shard
from loss_core.memory import allocator, zeroed_words

from . import _cross_entropy_forward, _cross_entropy_plain, _schedule
from ._compile import compiled
from ._cross_entropy_backward import CrossEntropyBackward, CrossEntropyRescale, backward_arguments, rescale_arguments
from ._cross_entropy_forward import CrossEntropyForward, forward_arguments
from ._cross_entropy_plain import CrossEntropyHeld, CrossEntropyInRegisters, CrossEntropyStreamed
from ._cross_entropy_rows import ENTRY_WORDS
from ._cross_entropy_total import (
    DENOMINATOR_BYTES_32,
    DENOMINATOR_BYTES_64,
    DENOMINATOR_ONE,
    DENOMINATOR_POINTER,
    DENOMINATOR_ROWS,
    DENOMINATOR_VALUE,
    DENOMINATOR_WEIGHTS,
)
from ._launch import DTYPES, machine_of, require, stream_of
from ._schedule import LARGEST, MOST_AT_A_TIME, MOST_PLAIN_ROWS, VECTOR_BYTES, most_vectors

TARGET_BITS = {torch.int64: 64, torch.int32: 32, torch.uint8: 8}

# Plans that are kept at a time. A schedule of some option over training steps makes one a step; making one whose
# kernel is compiled takes some tens of microseconds.
MOST_PLANS = 512


class ForwardPlan(NamedTuple):
    """A compiled forward and how it is launched: everything that does not change between calls of one kind.

    Attributes:
        launch: the compiled kernel.
        grid: for so many rows the blocks of a launch, the slices of the targets that are counted, and the 64-bit words
            of the workspace.
        denominator_kind: what the sum is divided by where no ``num_items`` says it.
        gradient: whether the kernel writes the gradient; False for rows that fit nowhere.
        constants: the kernel's last arguments.
    """

    launch: object
    grid: Callable[[int], tuple[int, int, int]]
    denominator_kind: int
    gradient: bool
    constants: tuple


class TiledPlan(NamedTuple):
    """A compiled backward or rescale and how it is launched.

    Attributes:
        launch: the compiled kernel.
        tiles: of a row.
        groups: of threads in a block; each has a tile at a time.
        few_blocks: blocks that keep the device busy, for launches that mostly have nothing to do: a block per tile
            would take longer to start and end than the whole check takes.
        scalar: whether one upstream gradient is for all rows.
        weight_sum: whether the kernel needs a word for the sum of the class weights.
        constants: the kernel's last arguments.
    """

    launch: object
    tiles: int
    groups: int
    few_blocks: int
    scalar: bool
    weight_sum: bool
    constants: tuple


# Forward


def forward(logits, target, weight, byte_lengths, num_items, options, *, grad, stats):
    """``cross_entropy_forward`` of the contract in loss_core.backend."""
    rows, cols = logits.shape
    dtype = logits.dtype
    index = logits.get_device()
    address, stride = logits.data_ptr(), logits.stride(0)
    grad_address, grad_stride = (0, 0) if grad is None else (grad.data_ptr(), grad.stride(0))
    size = dtype.itemsize
    plan = _forward_plan(
        index,
        dtype,
        cols,
        (address | grad_address | (cols | stride | grad_stride) * size) % VECTOR_BYTES != 0,
        grad is None or (address ^ grad_address | (stride ^ grad_stride) * size) % VECTOR_BYTES == 0,
        target.dtype,
        grad is not None,
        weight is not None,
        None if byte_lengths is None else byte_lengths.dtype,
        stats,
        rows <= MOST_PLAIN_ROWS,
        options,
    )
    if not 0 < rows <= LARGEST:
        require(logits)
        return _empty_forward(logits.device, num_items, options.reduction, stats)
    float32 = torch.float32
    device = logits.device
    new = allocator(device)
    stream = stream_of(index)
    blocks, slices, words = plan.grid(rows)
    denominator_kind = plan.denominator_kind
    items_address = 0
    items = 1.0
    denominator = z_part = prediction = correct = None
    # Results are tensors of their own, not views of one: who changes the loss in place must not touch what is saved.
    lse = new((rows,), (1,), float32)
    workspace = zeroed_words(words, device, stream) if words else None
    if options.reduction == "none":
        loss = new((rows,), (1,), float32)
    else:
        loss = new((), (), float32)
        if options.reduction != "sum":
            denominator = new((1,), (1,), float32)
        if num_items is not None:
            if isinstance(num_items, torch.Tensor):
                denominator_kind = DENOMINATOR_POINTER
                items_address = num_items.data_ptr()
            else:
                denominator_kind = DENOMINATOR_VALUE
                items = float(num_items)
    if stats:
        z_part = torch.empty_like(loss)
        prediction = new((rows,), (1,), torch.int64)
        correct = new((rows,), (1,), torch.bool)
    plan.launch(
        address,
        stride,
        grad_address,
        grad_stride,
        target.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        0 if byte_lengths is None else byte_lengths.data_ptr(),
        items_address,
        loss.data_ptr(),
        lse.data_ptr(),
        0 if denominator is None else denominator.data_ptr(),
        0 if z_part is None else z_part.data_ptr(),
        0 if prediction is None else prediction.data_ptr(),
        0 if correct is None else correct.data_ptr(),
        0 if workspace is None else workspace.data_ptr(),
        rows,
        blocks,
        slices,
        denominator_kind,
        items,
        *plan.constants,
        stream,
    )
    if grad is not None and not plan.gradient:
        # Rows that fit nowhere: the gradient is recomputed from the logits.
        backward(None, logits, target, weight, lse, denominator, options, grad=grad, skip_if_one=False)
    return ForwardResult(loss, lse, denominator, z_part, prediction, correct)


def prepare(device, dtype, target_dtype, rows, cols, stride, offset, options, *, gradient):
    """``cross_entropy_prepare`` of the contract in loss_core.backend."""
    index = device.index
    size = dtype.itemsize
    ragged = (offset | (cols | stride) * size) % VECTOR_BYTES != 0
    # A gradient of its own starts with a vector.
    alike = not gradient or (offset | (stride ^ cols) * size) % VECTOR_BYTES == 0
    plan = _forward_plan(
        index, dtype, cols, ragged, alike, target_dtype, gradient, False, None, False, rows <= MOST_PLAIN_ROWS, options
    )
    if plan.gradient != gradient or rows > LARGEST:
        return None
    launch, denominator_kind, constants = plan.launch, plan.denominator_kind, plan.constants
    blocks, slices, words = plan.grid(rows)
    new, float32 = allocator(device), torch.float32
    # The lse of the rows, and the denominator.
    results_like = (rows + 1,), (1,), float32
    divides = options.reduction != "sum"
    grad_stride = cols if gradient else 0

    def forward(logits, target, grad):
        results, loss = new(*results_like), new((), (), float32)
        lse, stream = results.data_ptr(), stream_of(index)
        launch(
            logits.data_ptr(), stride, grad.data_ptr() if gradient else 0, grad_stride, target.data_ptr(), 0, 0, 0,
            loss.data_ptr(), lse, lse + 4 * rows if divides else 0, 0, 0, 0,
            zeroed_words(words, device, stream).data_ptr(),
            rows, blocks, slices, denominator_kind, 1.0,
            *constants, stream,
        )  # fmt: skip
        return loss, results

    if not gradient:
        return PreparedCrossEntropy(forward, None)
    after, tiles, groups, few_blocks, _, _, after_constants = _backward_plan(
        index, dtype, cols, ragged, target_dtype, False, options
    )
    tile_blocks = -(-rows * tiles // groups)
    few_blocks = min(tile_blocks, few_blocks)
    grids = tile_blocks if rows <= MOST_AT_A_TIME else few_blocks, few_blocks

    def backward(grad_loss, logits, target, results, grad, skip_if_one):
        lse = results.data_ptr()
        after(
            grad_loss.data_ptr(), 0, logits.data_ptr(), stride, grad.data_ptr(), cols, target.data_ptr(), 0,
            lse, lse + 4 * rows if divides else 0, 0, rows, grids[skip_if_one],
            int(skip_if_one), *after_constants, stream_of(index),
        )  # fmt: skip

    return PreparedCrossEntropy(forward, backward)


@functools.lru_cache(MOST_PLANS)
def _forward_plan(
    index, dtype, cols, ragged, alike, target_dtype, gradient, weighted, byte_dtype, stats, a_block_each, options
):
    """The plan for a call.

    Args:
        alike: whether rows of the gradient start as far into a vector as those of the logits.
        a_block_each: whether there may be as many blocks as rows.
    """
    _require(dtype, cols, target_dtype)
    refuse_shard(weighted or None, options, stats=stats, forward=True)
    machine = machine_of(index)
    vectors = most_vectors(cols, VECTOR_BYTES // dtype.itemsize, ragged)
    plain = not (weighted or stats or options.label_smoothing or options.total_classes is not None)
    if plain and alike and a_block_each and _logits_kind(options) == "linear":
        form = _schedule.plain(machine, vectors, ragged, gradient)
        if form is not None:
            return make_plain_plan(machine, dtype, cols, form, ragged, target_dtype, gradient, byte_dtype, options)
    schedule = None
    if gradient:
        schedule = _schedule.held(machine, vectors, 1, ENTRY_WORDS, ragged, _schedule.MEASURED_GRADIENT)
    gradient = schedule is not None
    if schedule is None:
        schedule = _schedule.streamed(machine, vectors, ragged, dtype.itemsize)
    return make_forward_plan(
        machine, dtype, cols, schedule, ragged, target_dtype, gradient, weighted, byte_dtype, stats, options
    )


def make_forward_plan(
    machine, dtype, cols, schedule, ragged, target_dtype, gradient, weighted, byte_dtype, stats, options
):
    """Compile a forward and prepare its launch; ``gradient``: in the form that holds rows and writes the gradient."""
    facts = {
        "target_bits": TARGET_BITS[target_dtype],
        "gradient": gradient,
        "scalar": options.reduction != "none",
        "weighted": weighted,
        "smoothing": options.label_smoothing != 0.0,
        "logits": _logits_kind(options),
        "stats": stats,
        "shard": options.total_classes is not None,
    }
    launch = compiled(
        CrossEntropyForward,
        (str(dtype), tuple(schedule), ragged, *facts.items()),
        lambda: CrossEntropyForward(DTYPES[dtype], schedule, ragged, **facts),
        forward_arguments,
        machine.architecture,
    )
    vectors = most_vectors(cols, VECTOR_BYTES // dtype.itemsize, ragged)
    shared_bytes = _schedule.shared_bytes(schedule, vectors, 1, ENTRY_WORDS, whole_rows=gradient)
    resident = _schedule.most_blocks(machine, schedule, shared_bytes)
    return ForwardPlan(
        launch=launch,
        grid=functools.partial(_cross_entropy_forward.grid, schedule, resident, options.reduction != "none"),
        denominator_kind=_denominator_kind(options.reduction, weighted, byte_dtype),
        gradient=gradient,
        constants=(cols, schedule.chunks(vectors), shared_bytes, *_numbers(options, cols)),
    )


def make_plain_plan(machine, dtype, cols, form, ragged, target_dtype, gradient, byte_dtype, options):
    """Compile a forward of the plain case and prepare its launch."""
    scalar = options.reduction != "none"
    kernel_class, schedule, facts = _plain_kernel(machine, cols * dtype.itemsize, form, gradient, scalar)
    facts |= {"target_bits": TARGET_BITS[target_dtype], "scalar": scalar}
    launch = compiled(
        kernel_class,
        (str(dtype), tuple(schedule), ragged, *facts.items()),
        lambda: kernel_class(DTYPES[dtype], schedule, ragged, **facts),
        forward_arguments,
        machine.architecture,
    )
    vectors = most_vectors(cols, VECTOR_BYTES // dtype.itemsize, ragged)
    shared_bytes = _schedule.shared_bytes(schedule, vectors, int(form.held), _schedule.PLAIN_ENTRY_WORDS)
    resident = _schedule.most_blocks(machine, schedule, shared_bytes)
    return ForwardPlan(
        launch=launch,
        grid=functools.partial(_cross_entropy_plain.grid, schedule, resident, scalar),
        denominator_kind=_denominator_kind(options.reduction, False, byte_dtype),
        gradient=gradient,
        constants=(cols, 1 if form.at_once else schedule.chunks(vectors), shared_bytes, *_numbers(options, cols)),
    )


def _plain_kernel(machine, row_bytes, form, gradient, scalar):
    """The kernel of a form, its schedule, and the compile-time facts that others do not have."""
    if not (form.held or form.at_once):
        return CrossEntropyStreamed, form.schedule, {}
    eviction = _schedule.eviction(machine, row_bytes, gradient=gradient, scalar=scalar)
    if form.held:
        return CrossEntropyHeld, form.schedule, {"gradient": gradient, "eviction": eviction}
    schedule, full = _schedule.in_registers(form.schedule, row_bytes)
    early = _schedule.asked_early(schedule, gradient)
    return CrossEntropyInRegisters, schedule, {"gradient": gradient, "full": full, "early": early, "eviction": eviction}


def _denominator_kind(reduction, weighted, byte_dtype):
    """What the sum is divided by, without ``num_items``."""
    if reduction == "mean":
        return DENOMINATOR_WEIGHTS if weighted else DENOMINATOR_ROWS
    if reduction == "byte_mean":
        return DENOMINATOR_BYTES_64 if byte_dtype == torch.int64 else DENOMINATOR_BYTES_32
    return DENOMINATOR_ONE


def _logits_kind(options):
    """How a raw logit becomes what the kernels work with; see ``CrossEntropyRows``."""
    if options.softcap is not None:
        return "softcap"
    return "linear" if options.logit_scale > 0 else "scaled"


def _numbers(options, cols):
    """The options that kernels take as numbers, in the order of their last arguments."""
    total = options.total_classes
    softcap = options.softcap
    return (
        options.ignore_index,
        options.first_class,
        cols if total is None else total,
        float(options.label_smoothing),
        float(options.z_loss),
        float(options.logit_scale),
        1.0 if softcap is None else float(softcap),
    )


def _require(dtype, cols, target_dtype):
    if dtype not in DTYPES:
        raise UnsupportedInput(f"cutedsl: float16, bfloat16 or float32 expected, got {dtype}")
    if not 0 < cols <= LARGEST:
        raise UnsupportedInput(f"cutedsl: 1 to {LARGEST} classes expected, got {cols}")
    if target_dtype not in TARGET_BITS:
        raise UnsupportedInput(f"cutedsl: targets of int64, int32 or uint8 expected, got {target_dtype}")


def _empty_forward(device, num_items, reduction, stats):
    """The result for no rows: what a sum over nothing gives, divided as the reduction says."""
    float32 = torch.float32
    lse = torch.empty(0, dtype=float32, device=device)
    denominator = None
    if reduction == "none":
        loss = torch.empty(0, dtype=float32, device=device)
    elif reduction == "sum":
        loss = torch.zeros((), dtype=float32, device=device)
    else:
        denominator = torch.zeros(1, dtype=float32, device=device)
        if isinstance(num_items, torch.Tensor):
            denominator.copy_(num_items.reshape(1))
        elif num_items is not None:
            denominator.fill_(float(num_items))
        loss = (torch.zeros(1, dtype=float32, device=device) / denominator).reshape(())
    if not stats:
        return ForwardResult(loss, lse, denominator)
    prediction = torch.empty(0, dtype=torch.int64, device=device)
    return ForwardResult(
        loss, lse, denominator, loss.clone(), prediction, torch.empty(0, dtype=torch.bool, device=device)
    )


# Backward


def backward(grad_loss, logits, target, weight, lse, denominator, options, *, grad, skip_if_one):
    """``cross_entropy_backward`` of the contract in loss_core.backend; ``grad_loss`` may be None for 1."""
    # Short, since autograd runs it in a thread of its own whose caches are cold: every line counts threefold there.
    rows, cols = logits.shape
    dtype = logits.dtype
    index = logits.get_device()
    address, stride, grad_address, grad_stride = logits.data_ptr(), logits.stride(0), grad.data_ptr(), grad.stride(0)
    ragged = (address | grad_address | (cols | stride | grad_stride) * dtype.itemsize) % VECTOR_BYTES != 0
    plan = _backward_plan(index, dtype, cols, ragged, target.dtype, weight is not None, options)
    launch, tiles, groups, few_blocks, scalar, weight_sum, constants = plan
    grid = -(-rows * tiles // groups)
    # One upstream gradient for all rows can be skipped as a whole, one for each row cannot.
    if skip_if_one and scalar:
        grid = min(grid, few_blocks)
    if not 0 < rows <= MOST_AT_A_TIME:
        require(logits)
        if rows == 0:
            return
        grid = few_blocks
    word = allocator(logits.device)((1,), (1,), torch.float32) if weight_sum else None
    launch(
        0 if grad_loss is None else grad_loss.data_ptr(),
        0 if scalar else grad_loss.stride(0),
        address,
        stride,
        grad_address,
        grad_stride,
        target.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        lse.data_ptr(),
        0 if denominator is None else denominator.data_ptr(),
        0 if word is None else word.data_ptr(),
        rows,
        grid,
        1 if skip_if_one and scalar else 0,
        *constants,
        stream_of(index),
    )


@functools.lru_cache(MOST_PLANS)
def _backward_plan(index, dtype, cols, ragged, target_dtype, weighted, options):
    _require(dtype, cols, target_dtype)
    refuse_shard(weighted or None, options, stats=False, forward=False)
    machine = machine_of(index)
    schedule = _schedule.direct(machine, most_vectors(cols, VECTOR_BYTES // dtype.itemsize, ragged))
    return make_backward_plan(machine, dtype, cols, schedule, ragged, target_dtype, weighted, options)


def make_backward_plan(machine, dtype, cols, schedule, ragged, target_dtype, weighted, options):
    """Compile a backward and prepare its launch."""
    smoothing = options.label_smoothing != 0.0
    facts = {
        "target_bits": TARGET_BITS[target_dtype],
        "weighted": weighted,
        "smoothing": smoothing,
        "logits": _logits_kind(options),
        "early": machine.early,
    }
    launch = compiled(
        CrossEntropyBackward,
        (str(dtype), tuple(schedule), ragged, *facts.items()),
        lambda: CrossEntropyBackward(DTYPES[dtype], schedule, ragged, **facts),
        backward_arguments,
        machine.architecture,
    )
    tiles = schedule.chunks(most_vectors(cols, VECTOR_BYTES // dtype.itemsize, ragged))
    return TiledPlan(
        launch=launch,
        tiles=tiles,
        groups=schedule.groups,
        few_blocks=machine.processors * schedule.blocks,
        scalar=options.reduction != "none",
        weight_sum=weighted and smoothing,
        constants=(cols, tiles, *_numbers(options, cols)),
    )


def rescale_live(grad_loss, grad, target, ignore_index):
    """``cross_entropy_rescale_live`` of the contract in loss_core.backend."""
    rows, cols = grad.shape
    if rows == 0 or cols == 0:
        return
    index = grad.get_device()
    address, stride = grad.data_ptr(), grad.stride(0)
    ragged = (address | (cols | stride) * grad.itemsize) % VECTOR_BYTES != 0
    require(grad)
    launch, tiles, groups, few_blocks, _, _, constants = _rescale_plan(index, grad.dtype, cols, ragged, target.dtype)
    grid = min(-(-rows * tiles // groups), few_blocks)
    launch(
        grad_loss.data_ptr(), address, stride, target.data_ptr(), rows, grid, *constants, ignore_index,
        stream_of(index),
    )  # fmt: skip


@functools.lru_cache(MOST_PLANS)
def _rescale_plan(index, dtype, cols, ragged, target_dtype):
    _require(dtype, cols, target_dtype)
    machine = machine_of(index)
    schedule = _schedule.direct(machine, most_vectors(cols, VECTOR_BYTES // dtype.itemsize, ragged))
    return make_rescale_plan(machine, dtype, cols, schedule, ragged, target_dtype)


def make_rescale_plan(machine, dtype, cols, schedule, ragged, target_dtype):
    """Compile a rescale and prepare its launch."""
    facts = {"target_bits": TARGET_BITS[target_dtype], "early": machine.early}
    launch = compiled(
        CrossEntropyRescale,
        (str(dtype), tuple(schedule), ragged, *facts.items()),
        lambda: CrossEntropyRescale(DTYPES[dtype], schedule, ragged, **facts),
        rescale_arguments,
        machine.architecture,
    )
    tiles = schedule.chunks(most_vectors(cols, VECTOR_BYTES // dtype.itemsize, ragged))
    return TiledPlan(
        launch=launch,
        tiles=tiles,
        groups=schedule.groups,
        few_blocks=machine.processors * schedule.blocks,
        scalar=True,
        weight_sum=False,
        constants=(cols, tiles),
    )
