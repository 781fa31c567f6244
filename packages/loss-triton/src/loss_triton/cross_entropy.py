"""Cross-entropy in Triton: the kernels of the plain case, and the launches of every case.

The floor is memory: the logits are read once and their gradient is written once. A program takes a row in blocks. The
first sweep keeps each lane's running maximum and sum; the second runs backwards over the row and writes the gradient,
so that what it reads again was read last. The end of the row stays in registers between the sweeps and is not read
again; a row that fits there is read once in every sense, another once from memory and in part from L2. Where that sets
the pace, all of a row is held, by one program or several: ``cross_entropy_parts``.

Options of the loss (class weights, smoothing, z-loss, softcap, statistics) are in ``cross_entropy_options``; the
schedule that goes with a width is in ``schedules``.
"""

from __future__ import annotations

import functools
from types import NoneType
from typing import Any, NamedTuple

import torch
import triton.language as tl
from loss_core.backend import CrossEntropyForward, CrossEntropyOptions, PreparedCrossEntropy, refuse_shard
from loss_core.memory import allocator, zeroed_words
from torch import Tensor

from loss_triton.cross_entropy_options import (
    cross_entropy_bwd_kernel,
    cross_entropy_options_fwd_kernel,
    cross_entropy_rescale_live_kernel,
    numbers_of,
)
from loss_triton.cross_entropy_parts import cross_entropy_fwd_grad_parts_kernel, cross_entropy_fwd_whole_kernel
from loss_triton.denominator import (
    BYTES,
    NUMBER,
    TENSOR,
    WEIGHTS,
    Denominator,
    denominator_of,
    denominator_of_gradient,
    end_counting,
    start_counting,
    sum_and_count,
    supply,
)
from loss_triton.launch import Launch, can_depend, had_better_hold, kernel, patience, prepared, refuse_float64
from loss_triton.parts import SECTOR, parts_words
from loss_triton.reduction import store_loss, store_row
from loss_triton.rows import (
    LOG2_E,
    argument_of,
    block_columns,
    edge_columns,
    finite_or_zero,
    fused,
    online_sum,
    row_of,
    vectors,
    zero_row,
)
from loss_triton.schedules import (
    FORWARD_PARTS,
    GRADIENT_PARTS,
    alignment,
    backward_schedule,
    evicts_first,
    few_programs,
    forward_schedule,
    gradient_schedule,
    l2_cache_size,
    options_schedule,
    parts_of,
)
from loss_triton.total import publish, sum_slice, words_of, workspace_words


@kernel
def cross_entropy_fwd_kernel(
    logits_ptr, target_ptr, workspace_ptr, of_row_ptr, denominator_ptr, lse_ptr, loss_ptr,
    rows, classes, logits_stride: tl.int64, denominator_at, ignore_index: tl.int64,
    logit_scale: tl.float32, number: tl.float32,
    REDUCE: tl.constexpr, KIND: tl.constexpr, EVICT: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    """loss = lse - x[target], x = logit_scale * logits, logit_scale > 0. One program per row.

    With REDUCE, the sum of that over the rows / denominator; see ``total``.

    logits_ptr: (rows, classes), float; row stride logits_stride, unit stride along classes.
    target_ptr: (rows,), int32, int64 or uint8. lse_ptr: (rows,), float32. loss_ptr: (rows,) float32, with REDUCE ().
    With REDUCE workspace_ptr: int64 at 0, see ``total``; KIND, of_row_ptr, number and denominator_ptr as in ``supply``.
    denominator_at: elements of its to leave out at the start.
    EVICT: whether the caches are told to evict first what has been read.
    """
    row = tl.program_id(0)
    target, live, row_ptr, head, body = row_of(
        logits_ptr, target_ptr, row, classes, logits_stride, ignore_index, VECTOR, EDGES
    )
    # The row's end is asked for before the target has come, and used last.
    # The blocks before the held part are read without a mask, so they may not reach beyond it.
    tl.static_assert(BLOCK <= HOLD)
    EVICTION: tl.constexpr = "evict_first" if EVICT else ""
    blocks = tl.cdiv(tl.maximum(body - HOLD, 0), BLOCK)
    held_columns = block_columns(blocks * BLOCK, HOLD, LANES * VECTOR)
    held = tl.load(
        vectors(row_ptr + head, held_columns, VECTOR), mask=held_columns < body, other=float("-inf"),
        eviction_policy=EVICTION,
    )  # fmt: skip
    loss = 0.0
    lse = 0.0
    if live:
        valid = (target >= 0) & (target < classes)
        # A target out of range reads nothing and makes its row NaN.
        x_target = tl.load(row_ptr + target, mask=valid, other=float("nan")).to(tl.float32)
        log2_scale = logit_scale * LOG2_E
        peaks = tl.full((LANES,), float("-inf"), tl.float32)
        totals = tl.zeros((LANES,), tl.float32)
        for block in range(blocks):
            columns = block_columns(block * BLOCK, BLOCK, LANES * VECTOR)
            x = tl.load(vectors(row_ptr + head, columns, VECTOR), eviction_policy=EVICTION).to(tl.float32)
            peaks, totals = online_sum(x, peaks, totals, log2_scale, LANES, VECTOR)
        peaks, totals = online_sum(held.to(tl.float32), peaks, totals, log2_scale, LANES, VECTOR)
        peak = tl.max(peaks, 0)
        if EDGES:
            columns, in_edge = edge_columns(head, body, classes, VECTOR)
            x_edge = tl.load(row_ptr + columns, mask=in_edge, other=float("-inf")).to(tl.float32)
            peak = tl.maximum(peak, tl.max(tl.max(x_edge, 1), 0))
        peak = finite_or_zero(peak)
        total = tl.sum(totals * tl.exp2((peaks - peak) * log2_scale), 0)
        if EDGES:
            total += tl.sum(tl.sum(tl.exp2((x_edge - peak) * log2_scale), 1), 0)
        lse = peak * logit_scale + tl.log(total)
        loss = tl.log(total) - (x_target - peak) * logit_scale
    tl.store(lse_ptr + row, lse)
    store_row(
        row, loss, live, workspace_ptr, target_ptr, of_row_ptr, denominator_ptr, denominator_at, loss_ptr,
        number, rows, classes, ignore_index, REDUCE, KIND, LANES,
    )  # fmt: skip


@kernel
def cross_entropy_fwd_grad_kernel(
    logits_ptr, target_ptr, workspace_ptr, of_row_ptr, denominator_ptr, lse_ptr, grad_ptr, loss_ptr,
    rows, classes, logits_stride: tl.int64, grad_stride: tl.int64, denominator_at,
    ignore_index: tl.int64, logit_scale: tl.float32, number: tl.float32,
    KIND: tl.constexpr, PATIENCE: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr, HOLD: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """grad = logit_scale * (softmax(x) - onehot(target)) / denominator, and loss as in the forward kernel with REDUCE.

    logits_ptr, grad_ptr: (rows, classes), float, may be the same memory. Others as in the forward kernel.
    AHEAD: whether the second sweep asks for a block before it writes the one before that.
    """
    row = tl.program_id(0)
    target, live, row_ptr, head, body = row_of(
        logits_ptr, target_ptr, row, classes, logits_stride, ignore_index, VECTOR, EDGES
    )
    grad_row_ptr = grad_ptr + tl.cast(row, tl.int64) * grad_stride
    # The blocks before the held part are read without a mask, so they may not reach beyond it.
    tl.static_assert(BLOCK <= HOLD)
    blocks = tl.cdiv(tl.maximum(body - HOLD, 0), BLOCK)
    held_columns = block_columns(blocks * BLOCK, HOLD, LANES * VECTOR)
    in_held = held_columns < body
    held_ptr = vectors(row_ptr + head, held_columns, VECTOR)
    # The row's end stays in registers between the sweeps. It is asked for before the target has come, except where 1024
    # lanes have 64 registers each: the loop over the blocks would spill them.
    HELD_FIRST: tl.constexpr = LANES < 1024
    if HELD_FIRST:
        held = tl.load(held_ptr, mask=in_held, other=float("-inf"), eviction_policy="evict_last")
    else:
        held = tl.full(held_columns.shape, float("-inf"), logits_ptr.dtype.element_ty)
    words = start_counting(workspace_ptr, target_ptr, rows, ignore_index, KIND, LANES)
    loss = 0.0
    lse = 0.0
    peak = 0.0
    x_target = 0.0
    of_target = 0.0
    of_softmax = 0.0
    power = 0.0
    bias = 0.0
    of_power = 0.0
    valid = (target >= 0) & (target < classes)
    log2_scale = logit_scale * LOG2_E
    if EDGES:
        edges, in_edge = edge_columns(head, body, classes, VECTOR)
        x_edge = tl.load(row_ptr + edges, mask=in_edge, other=float("-inf")).to(tl.float32)
    if live:
        # A target out of range reads nothing and makes its row NaN, the gradient too.
        x_target = tl.load(row_ptr + target, mask=valid, other=float("nan")).to(tl.float32)
        peaks = tl.full((LANES,), float("-inf"), tl.float32)
        totals = tl.zeros((LANES,), tl.float32)
        for block in range(blocks):
            columns = block_columns(block * BLOCK, BLOCK, LANES * VECTOR)
            x = tl.load(vectors(row_ptr + head, columns, VECTOR), eviction_policy="evict_last").to(tl.float32)
            peaks, totals = online_sum(x, peaks, totals, log2_scale, LANES, VECTOR)
        if not HELD_FIRST:
            held = tl.load(held_ptr, mask=in_held, other=float("-inf"), eviction_policy="evict_first")
        peaks, totals = online_sum(held.to(tl.float32), peaks, totals, log2_scale, LANES, VECTOR)
        peak = tl.max(peaks, 0)
        if EDGES:
            peak = tl.maximum(peak, tl.max(tl.max(x_edge, 1), 0))
        peak = finite_or_zero(peak)
        total, counted = sum_and_count(totals * tl.exp2((peaks - peak) * log2_scale), words, rows, KIND)
        if EDGES:
            total += tl.sum(tl.sum(tl.exp2((x_edge - peak) * log2_scale), 1), 0)
        lse = peak * logit_scale + tl.log(total)
        loss = tl.log(total) - (x_target - peak) * logit_scale
        of_target = logit_scale / denominator_of_gradient(
            counted, workspace_ptr, target_ptr, of_row_ptr, number, rows, ignore_index, KIND, PATIENCE, LANES
        )
        of_softmax = tl.where(valid, of_target / total, float("nan"))
        power, bias, factor = argument_of(peak, log2_scale)
        of_power = of_softmax * factor
    tl.store(lse_ptr + row, lse)
    # After the count was read, which is taken back once all rows are known.
    losses_ptr = words_of(workspace_ptr, rows, 0)
    publish(losses_ptr, row, loss, live)
    if live:
        if AHEAD:
            columns = block_columns((blocks - 1) * BLOCK, BLOCK, LANES * VECTOR)
            ahead = tl.load(
                vectors(row_ptr + head, columns, VECTOR), mask=columns >= 0, other=0.0, eviction_policy="evict_first"
            )
        held_grad = tl.exp2(fused(held.to(tl.float32), power, bias)) * of_power
        tl.store(
            vectors(grad_row_ptr + head, held_columns, VECTOR), held_grad.to(grad_ptr.dtype.element_ty), mask=in_held,
            eviction_policy="evict_first",
        )  # fmt: skip
        for block in range(blocks):
            columns = block_columns((blocks - 1 - block) * BLOCK, BLOCK, LANES * VECTOR)
            if AHEAD:
                x = ahead.to(tl.float32)
                next_ptr = vectors(row_ptr + head, columns - BLOCK, VECTOR)
                ahead = tl.load(next_ptr, mask=columns >= BLOCK, other=0.0, eviction_policy="evict_first")
            else:
                x = tl.load(vectors(row_ptr + head, columns, VECTOR), eviction_policy="evict_first").to(tl.float32)
            grad = (tl.exp2(fused(x, power, bias)) * of_power).to(grad_ptr.dtype.element_ty)
            tl.store(vectors(grad_row_ptr + head, columns, VECTOR), grad, eviction_policy="evict_first")
        if EDGES:
            edge_grad = (tl.exp2(fused(x_edge, power, bias)) * of_power).to(grad_ptr.dtype.element_ty)
            tl.store(grad_row_ptr + edges, edge_grad, mask=in_edge)
        # The target's element once more, which spares every other one the comparison.
        tl.debug_barrier()
        target_grad = tl.exp2((x_target - peak) * log2_scale) * of_softmax - of_target
        tl.store(grad_row_ptr + target, target_grad.to(grad_ptr.dtype.element_ty), mask=valid)
    else:
        zero_row(grad_row_ptr, classes, head, body, VECTOR, EDGES, LANES, BLOCK)
    sum_slice(losses_ptr, row, rows, LANES)
    if row == rows - 1:
        live_rows, _ = store_loss(
            losses_ptr, target_ptr, of_row_ptr, denominator_ptr, denominator_at, loss_ptr,
            number, rows, classes, ignore_index, KIND, LANES,
        )  # fmt: skip
        end_counting(workspace_ptr, live_rows, rows, KIND)


class _Plan(NamedTuple):
    """What a forward's dtypes, options and alignment say.

    Attributes:
        launch: of the kernel.
        plain: whether that is one of the plain kernels.
        denominator: of the reduction.
        parts: of a row, each a program's; 0 for a kernel that knows none.
    """

    launch: Launch
    plain: bool
    denominator: Denominator
    parts: int = 0


def cross_entropy_forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    byte_lengths: Tensor | None,
    num_items: Tensor | float | None,
    options: CrossEntropyOptions,
    *,
    grad: Tensor | None,
    stats: bool,
) -> CrossEntropyForward:
    """See ``loss_core.backend``. One launch; two where class weights or bytes have to be summed before a gradient."""
    rows, classes = logits.shape
    device, stride = logits.device, logits.stride(0)
    grad_place, grad_stride = (None, 0) if grad is None else (grad.data_ptr() % 16, grad.stride(0))
    launch, plain, denominator, parts = _plan(
        device, logits.dtype, target.dtype, classes, rows.bit_length(), options, stats, weight is not None,
        None if byte_lengths is None else byte_lengths.dtype, type(num_items),
        logits.data_ptr() % 16, stride, grad_place, grad_stride,
    )  # fmt: skip
    new, float32 = allocator(device), torch.float32
    of_row, number, stored, result = supply(
        denominator, target, weight, byte_lengths, num_items, classes, options.ignore_index
    )
    if not rows:
        return _of_no_rows(device, denominator.kind, result, number, options.reduction != "none", stats)
    lse = new((rows,), (1,), float32)
    workspace: Tensor | None = None
    like: tuple[tuple[int, ...], tuple[int, ...]] = (rows,), (1,)
    if options.reduction != "none":
        words, of_parts = _workspace(rows, 1 + stats, parts)
        workspace, like = zeroed_words(words, device), ((), ())
    loss = new(*like, float32)
    if not plain:
        return _forward_options(
            launch, logits, target, weight, options, grad, stats, workspace, of_row, number, stored, result, lse, loss
        )
    if grad is None:
        launch(
            rows, (logits, target, workspace, of_row, stored, lse, loss),
            rows, classes, stride, 0, options.ignore_index, options.logit_scale, number,
        )  # fmt: skip
    else:
        launch(
            rows * max(parts, 1), (logits, target, workspace, of_row, stored, lse, grad, loss),
            rows, classes, stride, grad_stride, 0, options.ignore_index, options.logit_scale, number, *of_parts,
        )  # fmt: skip
    return CrossEntropyForward(loss, lse, result)


def _workspace(rows: int, values: int, parts: int) -> tuple[int, tuple[int, ...]]:
    """Words of a launch, and the numbers that a kernel whose rows have parts takes last."""
    words = workspace_words(rows, values)
    if parts <= 1:
        return words, (1, 0) if parts else ()
    parts_at = -(-words // SECTOR.value) * SECTOR.value
    return parts_at + parts_words(rows, parts), (parts, parts_at)


@functools.lru_cache(4096)
def _plan(
    device: torch.device,
    dtype: torch.dtype,
    target_dtype: torch.dtype,
    classes: int,
    rows_bits: int,
    options: CrossEntropyOptions,
    stats: bool,
    weighted: bool,
    byte_dtype: torch.dtype | None,
    num_items: type,
    place: int,
    stride: int,
    grad_place: int | None,
    grad_stride: int,
) -> _Plan:
    refuse_float64(dtype)
    refuse_shard(weighted or None, options, stats=stats, forward=True)
    gradient = grad_place is not None
    index, reduce = device.index, options.reduction != "none"
    denominator = denominator_of(
        options.reduction, weighted, byte_dtype, num_items, target_dtype, rows_bits, index, gradient=gradient
    )
    kind = denominator.kind
    places = (place, stride) if grad_place is None else (place, stride, grad_place, grad_stride)
    vector, edges = alignment(dtype.itemsize, classes, *places)
    of_row = {WEIGHTS.value: torch.float32, BYTES.value: byte_dtype, TENSOR.value: torch.float32}.get(
        kind, target_dtype
    )
    key = index, dtype, target_dtype, of_row
    plain = not weighted and not stats and _is_plain(options)
    if plain:
        launch, parts = _plain_launch(device, key, classes, rows_bits, vector, edges, reduce, kind, gradient=gradient)
        return _Plan(launch, plain, denominator, parts)
    lanes, block, hold, _ = options_schedule(classes, vector)
    constants = (
        reduce, kind, patience(index), weighted, options.label_smoothing > 0, options.softcap is not None,
        options.total_classes is not None, stats, gradient, vector, edges, lanes, block, hold,
    )  # fmt: skip
    return _Plan(prepared(cross_entropy_options_fwd_kernel, key, constants, lanes), plain, denominator)


def _plain_launch(
    device: torch.device,
    key: tuple[Any, ...],
    classes: int,
    rows_bits: int,
    vector: int,
    edges: bool,
    reduce: bool,
    kind: int,
    *,
    gradient: bool,
) -> tuple[Launch, int]:
    """The launch of a plain kernel, and the parts of a row; 0 for a kernel that knows none."""
    size = key[1].itemsize
    table = (GRADIENT_PARTS if gradient else FORWARD_PARTS)[size]
    how = parts_of(table, classes, size, vector) if had_better_hold(device) else None
    constants: tuple[Any, ...]
    if gradient:
        if how is not None:
            constants = kind, patience(device.index), vector, edges, how.lanes, how.chunks, how.early, how.programs > 1
            return prepared(cross_entropy_fwd_grad_parts_kernel, key, constants, how.lanes, how.registers), how.programs
        lanes, block, hold, ahead = gradient_schedule(classes, size, vector, l2_cache_size(device))
        constants = kind, patience(device.index), vector, edges, lanes, block, hold, ahead
        return prepared(cross_entropy_fwd_grad_kernel, key, constants, lanes), 0
    evicts = evicts_first(rows_bits, classes, size, held=how is not None)
    if how is not None:
        constants = reduce, kind, evicts, vector, edges, how.lanes, how.chunks
        return prepared(cross_entropy_fwd_whole_kernel, key, constants, how.lanes, how.registers), 0
    lanes, block, hold, _ = forward_schedule(classes, size, vector)
    constants = reduce, kind, evicts, vector, edges, lanes, block, hold
    return prepared(cross_entropy_fwd_kernel, key, constants, lanes), 0


def cross_entropy_prepare(
    device: torch.device,
    dtype: torch.dtype,
    target_dtype: torch.dtype,
    rows: int,
    classes: int,
    stride: int,
    offset: int,
    options: CrossEntropyOptions,
    *,
    gradient: bool,
) -> PreparedCrossEntropy | None:
    """See ``loss_core.backend``."""
    launch, plain, of, parts = _plan(
        device, dtype, target_dtype, classes, rows.bit_length(), options, False, False, None, NoneType,
        offset, stride, *((0, classes) if gradient else (None, 0)),
    )  # fmt: skip
    if not plain or of.before is not None:
        return None
    new, float32 = allocator(device), torch.float32
    # One tensor for what is known of rows: their lse and the denominator.
    results_like = (rows + 1,), (1,), float32
    words, of_parts = _workspace(rows, 1, parts)
    programs = rows * max(parts, 1)
    divides = options.reduction != "sum"
    strides = (stride, classes) if gradient else (stride,)
    numbers = rows, classes, *strides, rows, options.ignore_index, options.logit_scale, 1.0, *of_parts

    def loss_alone(logits: Tensor, target: Tensor, grad: None) -> tuple[Tensor, None]:
        results, loss = new(*results_like), new((), (), float32)
        stored = results if divides else None
        launch(rows, (logits, target, zeroed_words(words, device), target, stored, results, loss), *numbers)
        return loss, None

    if not gradient:
        return PreparedCrossEntropy(loss_alone, None)
    plans = [
        _backward_plan(
            device, dtype, target_dtype, torch.float32, classes, options, False, not divides, skip_if_one,
            offset, stride, 0, classes,
        )
        for skip_if_one in (False, True)
    ]  # fmt: skip
    (again, most_programs, options_numbers), (unless_one, _, _) = plans
    backward_numbers = rows, classes, 0, stride, classes, rows, *options_numbers
    backward_programs = min(rows, most_programs)

    def forward(logits: Tensor, target: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        results, loss = new(*results_like), new((), (), float32)
        stored = results if divides else None
        launch(programs, (logits, target, zeroed_words(words, device), target, stored, results, grad, loss), *numbers)
        return loss, results

    def backward(
        grad_loss: Tensor, logits: Tensor, target: Tensor, results: Tensor, grad: Tensor, skip_if_one: bool
    ) -> None:
        launch = unless_one if skip_if_one else again
        launch(
            backward_programs,
            (grad_loss, logits, target, results, results, results if divides else None, grad),
            *backward_numbers,
        )

    return PreparedCrossEntropy(forward, backward)


def _is_plain(options: CrossEntropyOptions) -> bool:
    """Whether the plain kernels do these options."""
    _, _, label_smoothing, z_loss, softcap, logit_scale, _, total_classes = options
    return logit_scale > 0 and not label_smoothing and not z_loss and softcap is None and total_classes is None


def _of_no_rows(
    device: torch.device, kind: int, denominator: Tensor | None, number: float, reduce: bool, stats: bool
) -> CrossEntropyForward:
    none = torch.empty(0, dtype=torch.float32, device=device)
    # A tensor of its own: autograd differentiates it, and not the lse.
    loss = torch.empty_like(none)
    if reduce:
        if denominator is not None and kind != TENSOR.value:
            denominator.fill_(number if kind == NUMBER.value else 0.0)
        loss = loss.sum() if denominator is None else (0.0 / denominator).reshape(())
    if not stats:
        return CrossEntropyForward(loss, none, denominator)
    return CrossEntropyForward(loss, none, denominator, loss.clone(), none.to(torch.int64), none.to(torch.bool))


def _forward_options(
    launch: Launch,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: CrossEntropyOptions,
    grad: Tensor | None,
    stats: bool,
    workspace: Tensor | None,
    of_row: Tensor,
    number: float,
    stored: Tensor | None,
    denominator: Tensor | None,
    lse: Tensor,
    loss: Tensor,
) -> CrossEntropyForward:
    rows, classes = logits.shape
    z_loss = prediction = correct = None
    if stats:
        new = allocator(logits.device)
        z_loss = torch.empty_like(loss)
        prediction, correct = new((rows,), (1,), torch.int64), new((rows,), (1,), torch.bool)
    launch(
        rows, (logits, target, weight, workspace, of_row, stored, lse, grad, loss, z_loss, prediction, correct),
        rows, classes, logits.stride(0), 0 if grad is None else grad.stride(0), *numbers_of(options, classes), number,
    )  # fmt: skip
    return CrossEntropyForward(loss, lse, denominator, z_loss, prediction, correct)


def cross_entropy_backward(
    grad_loss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    lse: Tensor,
    denominator: Tensor | None,
    options: CrossEntropyOptions,
    *,
    grad: Tensor,
    skip_if_one: bool,
) -> None:
    """See ``loss_core.backend``. One launch."""
    rows, classes = logits.shape
    stride, grad_stride = logits.stride(0), grad.stride(0)
    launch, most_programs, numbers = _backward_plan(
        logits.device, logits.dtype, target.dtype, grad_loss.dtype, classes, options, weight is not None,
        denominator is None, skip_if_one, logits.data_ptr() % 16, stride, grad.data_ptr() % 16, grad_stride,
    )  # fmt: skip
    if rows:
        # Without weights the kernel looks at none, and any tensor will do.
        weight = lse if weight is None else weight
        launch(
            min(rows, most_programs), (grad_loss, logits, target, weight, lse, denominator, grad),
            rows, classes, grad_loss.stride(0) if options.reduction == "none" else 0, stride, grad_stride, 0, *numbers,
        )  # fmt: skip


@functools.lru_cache(4096)
def _backward_plan(
    device: torch.device,
    dtype: torch.dtype,
    target_dtype: torch.dtype,
    grad_loss_dtype: torch.dtype,
    classes: int,
    options: CrossEntropyOptions,
    weighted: bool,
    whole: bool,
    skip_if_one: bool,
    *places: int,
) -> tuple[Launch, int, tuple[float, ...]]:
    """The launch, how many programs it takes at most, and the last of its numbers."""
    refuse_float64(dtype)
    refuse_shard(weighted or None, options, stats=False, forward=False)
    vector, edges = alignment(dtype.itemsize, classes, *places)
    lanes, block = backward_schedule(classes, vector)
    constants = (
        weighted, options.label_smoothing > 0, options.softcap is not None, options.total_classes is not None,
        skip_if_one, vector, edges, lanes, block, can_depend(device),
    )  # fmt: skip
    key = device.index, dtype, target_dtype, grad_loss_dtype, whole
    return prepared(cross_entropy_bwd_kernel, key, constants, lanes), few_programs(device), numbers_of(options, classes)


def cross_entropy_rescale_live(grad_loss: Tensor, grad: Tensor, target: Tensor, ignore_index: int) -> None:
    """See ``loss_core.backend``. One launch."""
    refuse_float64(grad.dtype)
    rows, classes = grad.shape
    if not rows:
        return
    vector, edges = alignment(grad.element_size(), classes, grad.data_ptr(), grad.stride(0))
    lanes, block = backward_schedule(classes, vector)
    key = grad.device.index, grad.dtype, grad_loss.dtype, target.dtype
    constants = vector, edges, lanes, block, can_depend(grad.device)
    launch = prepared(cross_entropy_rescale_live_kernel, key, constants, lanes)
    programs = min(rows, few_programs(grad.device))
    launch(programs, (grad_loss, grad, target), rows, classes, grad.stride(0), ignore_index)
