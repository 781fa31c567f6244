"""Cross-entropy: the ops of the contract, and how their kernels are chosen and launched.

The kernels are in ``_cross_entropy_forward``, ``_cross_entropy_backward`` and, what both use, ``_cross_entropy_rows``.

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

from typing import NamedTuple

import torch
from loss_core.backend import CrossEntropyForward as ForwardResult
from loss_core.backend import UnsupportedInput

from . import _schedule
from ._compile import compiled
from ._cross_entropy_backward import CrossEntropyBackward, CrossEntropyRescale, backward_arguments, rescale_arguments
from ._cross_entropy_forward import (
    COUNT_BLOCKS,
    COUNT_UNROLL,
    DENOMINATOR_BYTES,
    DENOMINATOR_ONE,
    DENOMINATOR_POINTER,
    DENOMINATOR_ROWS,
    DENOMINATOR_VALUE,
    DENOMINATOR_WEIGHTS,
    WORKSPACE_PARTIALS,
    CrossEntropyForward,
    forward_arguments,
)
from ._cross_entropy_rows import COUNT_THREADS, ENTRY_WORDS
from ._launch import DTYPES, is_ragged, machine_of, most_vectors, require, stream_of
from ._schedule import Schedule

TARGET_BITS = {torch.int64: 64, torch.int32: 32, torch.uint8: 8}


class ForwardPlan(NamedTuple):
    """A compiled forward and how it is launched.

    Attributes:
        launch: the compiled kernel.
        schedule: what it was compiled for.
        chunks: steps over a row.
        shared_bytes: of a block.
        most_blocks: blocks that the device holds at a time, a multiple of the cluster.
        gradient: whether the kernel writes the gradient; False for rows that fit nowhere.
    """

    launch: object
    schedule: Schedule
    chunks: int
    shared_bytes: int
    most_blocks: int
    gradient: bool


class BackwardPlan(NamedTuple):
    """A compiled backward or rescale and how it is launched.

    Attributes:
        launch: the compiled kernel.
        tiles: of a row.
        groups: of threads in a block; each has a tile at a time.
        few_blocks: blocks that keep the device busy, for launches that mostly have nothing to do: a block per tile
            would take longer to start and end than the whole check takes.
    """

    launch: object
    tiles: int
    groups: int
    few_blocks: int


# By everything that a plan depends on, the number of classes included and the number of rows not.
_forward_plans: dict[tuple, ForwardPlan] = {}
_backward_plans: dict[tuple, BackwardPlan] = {}
_rescale_plans: dict[tuple, BackwardPlan] = {}


# Forward


def forward(logits, target, weight, byte_lengths, num_items, options, *, grad, stats):
    """``cross_entropy_forward`` of the contract in loss_core.backend."""
    rows, cols = logits.shape
    ragged = is_ragged(cols, logits) if grad is None else is_ragged(cols, logits, grad)
    smoothing = options.label_smoothing != 0.0
    scalar = options.reduction != "none"
    key = (
        logits.get_device(), logits.dtype, cols, ragged, target.dtype, grad is not None, scalar, weight is not None,
        smoothing, _logits_kind(options), stats,
    )  # fmt: skip
    plan = _forward_plans.get(key)
    if plan is None or rows > _schedule.LARGEST:
        _require(logits, target)
        if rows == 0:
            return _empty_forward(logits.device, num_items, options.reduction, stats)
        plan = _forward_plans[key] = _forward_plan(*key)
    elif rows == 0:
        return _empty_forward(logits.device, num_items, options.reduction, stats)
    return run_forward(plan, logits, target, weight, byte_lengths, num_items, options, grad, stats)


def run_forward(plan, logits, target, weight, byte_lengths, num_items, options, grad, stats):
    """Launch a plan: allocate what it returns, and hand over addresses and numbers."""
    launch, schedule, chunks, shared_bytes, most_blocks, with_gradient = plan
    rows, cols = logits.shape
    device = logits.device
    reduction = options.reduction
    float32 = torch.float32
    grid = _schedule.grid_blocks(schedule, most_blocks, rows)
    denominator = z_part = prediction = correct = None
    denominator_kind = DENOMINATOR_ONE
    items = 1.0
    items_address = workspace_address = 0
    count_grid = 1
    # Results are tensors of their own, not views of one: who changes the loss in place must not touch what is saved.
    if reduction == "none":
        lse = torch.empty(rows, dtype=float32, device=device)
        loss = torch.empty(rows, dtype=float32, device=device)
    else:
        blocks = grid // schedule.cluster
        buffer = torch.empty(rows + WORKSPACE_PARTIALS + 2 * blocks, dtype=float32, device=device)
        workspace_address = buffer.data_ptr() + 4 * rows
        lse = buffer[:rows]
        loss = torch.empty((), dtype=float32, device=device)
        if reduction != "sum":
            if reduction == "byte_mean":
                denominator_kind = DENOMINATOR_BYTES
            elif num_items is None:
                denominator_kind = DENOMINATOR_ROWS if weight is None else DENOMINATOR_WEIGHTS
            elif isinstance(num_items, torch.Tensor):
                denominator_kind = DENOMINATOR_POINTER
                items_address = num_items.data_ptr()
            else:
                denominator_kind = DENOMINATOR_VALUE
                items = float(num_items)
            denominator = torch.empty(1, dtype=float32, device=device)
            if denominator_kind <= DENOMINATOR_BYTES:
                count_grid = min(COUNT_BLOCKS, -(-rows // (COUNT_THREADS * COUNT_UNROLL)))
    if stats:
        z_part = torch.empty_like(loss)
        prediction = torch.empty(rows, dtype=torch.int64, device=device)
        correct = torch.empty(rows, dtype=torch.bool, device=device)
    launch(
        logits.data_ptr(),
        logits.stride(0),
        0 if grad is None else grad.data_ptr(),
        0 if grad is None else grad.stride(0),
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
        workspace_address,
        rows,
        cols,
        chunks,
        grid,
        shared_bytes,
        count_grid,
        denominator_kind,
        64 if byte_lengths is not None and byte_lengths.dtype == torch.int64 else 32,
        items,
        options.ignore_index,
        *_numbers(options),
        stream_of(logits.get_device()),
    )
    if grad is not None and not with_gradient:
        # Rows that fit nowhere: the gradient is recomputed from the logits.
        _run_backward(None, 0, logits, target, weight, lse, denominator, options, grad, False)
    return ForwardResult(loss, lse, denominator, z_part, prediction, correct)


def _forward_plan(index, dtype, cols, ragged, target_dtype, gradient, scalar, weighted, smoothing, logits, stats):
    machine = machine_of(index)
    vectors = most_vectors(cols, dtype.itemsize, ragged)
    schedule = _schedule.held(machine, vectors, 1, ENTRY_WORDS, ragged) if gradient else None
    gradient = schedule is not None
    if schedule is None:
        schedule = _schedule.streamed(machine, vectors, ragged, dtype.itemsize)
    return make_forward_plan(
        machine, dtype, vectors, schedule, ragged, TARGET_BITS[target_dtype], gradient, scalar, weighted, smoothing,
        logits, stats,
    )  # fmt: skip


def make_forward_plan(
    machine, dtype, vectors, schedule, ragged, target_bits, gradient, scalar, weighted, smoothing, logits, stats
):
    """Compile a forward for rows of at most ``vectors`` vectors."""
    facts = {
        "target_bits": target_bits,
        "gradient": gradient,
        "scalar": scalar,
        "weighted": weighted,
        "smoothing": smoothing,
        "logits": logits,
        "stats": stats,
        "overlap": machine.overlap,
    }
    launch = compiled(
        CrossEntropyForward,
        (str(dtype), tuple(schedule), ragged, *facts.items()),
        lambda: CrossEntropyForward(DTYPES[dtype], schedule, ragged, **facts),
        forward_arguments,
        machine.architecture,
    )
    shared_bytes = _schedule.shared_bytes(schedule, vectors, 1, ENTRY_WORDS, whole_rows=gradient)
    most_blocks = _schedule.most_blocks(machine, schedule, shared_bytes)
    return ForwardPlan(launch, schedule, schedule.chunks(vectors), shared_bytes, most_blocks, gradient)


def _logits_kind(options):
    """How a raw logit becomes what the kernels work with; see ``CrossEntropyRows``."""
    if options.softcap is not None:
        return "softcap"
    return "linear" if options.logit_scale > 0 else "scaled"


def _numbers(options):
    """The options that kernels take as numbers."""
    softcap = options.softcap
    return (
        float(options.label_smoothing),
        float(options.z_loss),
        float(options.logit_scale),
        1.0 if softcap is None else float(softcap),
    )


def _require(logits, target):
    require(logits)
    if logits.shape[1] == 0:
        raise UnsupportedInput("cutedsl: at least one class expected, got 0")
    if target.dtype not in TARGET_BITS:
        raise UnsupportedInput(f"cutedsl: targets of int64, int32 or uint8 expected, got {target.dtype}")


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
    """``cross_entropy_backward`` of the contract in loss_core.backend."""
    _require(logits, target)
    if logits.shape[0] == 0:
        return
    # One upstream gradient for all rows, or one for each; only the former can be skipped as a whole.
    scalar = options.reduction != "none"
    stride = 0 if scalar else grad_loss.stride(0)
    _run_backward(grad_loss, stride, logits, target, weight, lse, denominator, options, grad, skip_if_one and scalar)


def _run_backward(grad_loss, upstream_stride, logits, target, weight, lse, denominator, options, grad, skip_if_one):
    """Launch the backward; ``grad_loss``: None for 1."""
    rows, cols = logits.shape
    index = logits.get_device()
    weighted = weight is not None
    smoothing = options.label_smoothing != 0.0
    ragged = is_ragged(cols, logits, grad)
    key = (index, logits.dtype, cols, ragged, target.dtype, weighted, smoothing, _logits_kind(options))
    plan = _backward_plans.get(key)
    if plan is None:
        plan = _backward_plans[key] = _backward_plan(*key)
    launch, tiles, groups, few_blocks = plan
    grid = -(-rows * tiles // groups)
    if skip_if_one:
        grid = min(grid, few_blocks)
    workspace = torch.empty(1, dtype=torch.float32, device=logits.device) if smoothing and weighted else None
    launch(
        0 if grad_loss is None else grad_loss.data_ptr(),
        upstream_stride,
        logits.data_ptr(),
        logits.stride(0),
        grad.data_ptr(),
        grad.stride(0),
        target.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        lse.data_ptr(),
        0 if denominator is None else denominator.data_ptr(),
        0 if workspace is None else workspace.data_ptr(),
        rows,
        cols,
        tiles,
        grid,
        int(skip_if_one),
        options.ignore_index,
        *_numbers(options),
        stream_of(index),
    )


def _backward_plan(index, dtype, cols, ragged, target_dtype, weighted, smoothing, logits):
    machine = machine_of(index)
    vectors = most_vectors(cols, dtype.itemsize, ragged)
    schedule = _schedule.direct(machine, vectors)
    return make_backward_plan(
        machine, dtype, vectors, schedule, ragged, TARGET_BITS[target_dtype], weighted, smoothing, logits
    )


def make_backward_plan(machine, dtype, vectors, schedule, ragged, target_bits, weighted, smoothing, logits):
    """Compile a backward for rows of at most ``vectors`` vectors."""
    facts = {"target_bits": target_bits, "weighted": weighted, "smoothing": smoothing, "logits": logits}
    launch = compiled(
        CrossEntropyBackward,
        (str(dtype), tuple(schedule), ragged, *facts.items()),
        lambda: CrossEntropyBackward(DTYPES[dtype], schedule, ragged, **facts),
        backward_arguments,
        machine.architecture,
    )
    return _tiled(machine, launch, schedule, vectors)


def rescale(grad_loss, grad):
    """``cross_entropy_rescale`` of the contract in loss_core.backend."""
    rows, cols = grad.shape
    if rows == 0 or cols == 0:
        return
    ragged = is_ragged(cols, grad)
    index = grad.get_device()
    key = (index, grad.dtype, cols, ragged)
    plan = _rescale_plans.get(key)
    if plan is None:
        require(grad)
        machine = machine_of(index)
        vectors = most_vectors(cols, grad.dtype.itemsize, ragged)
        schedule = _schedule.direct(machine, vectors)
        plan = _rescale_plans[key] = make_rescale_plan(machine, grad.dtype, vectors, schedule, ragged)
    launch, tiles, groups, few_blocks = plan
    grid = min(-(-rows * tiles // groups), few_blocks)
    launch(grad_loss.data_ptr(), grad.data_ptr(), grad.stride(0), rows, cols, tiles, grid, stream_of(index))


def make_rescale_plan(machine, dtype, vectors, schedule, ragged):
    """Compile a rescale for rows of at most ``vectors`` vectors."""
    launch = compiled(
        CrossEntropyRescale,
        (str(dtype), tuple(schedule), ragged),
        lambda: CrossEntropyRescale(DTYPES[dtype], schedule, ragged),
        rescale_arguments,
        machine.architecture,
    )
    return _tiled(machine, launch, schedule, vectors)


def _tiled(machine, launch, schedule, vectors):
    groups = schedule.threads // schedule.row_threads
    return BackwardPlan(launch, schedule.chunks(vectors), groups, machine.processors * schedule.blocks)
