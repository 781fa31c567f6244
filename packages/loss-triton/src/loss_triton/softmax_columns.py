"""Softmax and log-softmax over (outer, classes, inner), forward and backward: the classes do not lie side by side.

A program takes BLOCK_INNER neighbouring columns through all classes, tile by tile, so that what it reads at once lies
side by side; nothing is transposed. Its sweeps are those of softmax's long rows: running maximum and sum per lane, the
last tile stays in registers, the others are read again, latest first.

A tile of (BLOCK, BLOCK_INNER) is summed as (rounds, LANES, BLOCK_INNER): a thread has the same columns of every round,
so that only the lanes have to be brought together, once, after the first sweep.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton
import triton.language as tl
from loss_core.backend import UnsupportedInput
from torch import Tensor

from loss_triton.launch import Kernel, kernel, prepared, refuse_float64
from loss_triton.rows import finite_or_zero, vectors
from loss_triton.softmax_math import (
    exp,
    input_gradient,
    normalized,
    normalizer_of,
    summand,
)


@triton.jit
def _columns_of_program(inner, BLOCK_INNER: tl.constexpr, VECTOR: tl.constexpr):
    """Which outer index the program has, its columns as (1, BLOCK_INNER), and which of them there are."""
    programs = tl.cdiv(inner, BLOCK_INNER)
    outer = tl.program_id(0) // programs
    columns = tl.program_id(0) % programs * BLOCK_INNER + tl.arange(0, BLOCK_INNER)[None, :]
    # Rounding changes nothing; it shows the compiler that the mask does not cut vectors.
    return outer.to(tl.int64), columns, columns < inner // VECTOR * VECTOR


@triton.jit
def _tile(start, SIZE: tl.constexpr):
    """SIZE classes from start as (SIZE, 1), in 64 bits, since a stride is multiplied by them."""
    return start + tl.arange(0, SIZE)[:, None].to(tl.int64)


@triton.jit
def _read(pointers, inside, other: tl.constexpr, EVICTION: tl.constexpr, LANES: tl.constexpr):
    """A tile as (rounds, LANES, BLOCK_INNER), in float32."""
    tile = tl.load(pointers, mask=inside, other=other, eviction_policy=EVICTION)
    return tl.reshape(tile, (tile.shape[0] // LANES, LANES, tile.shape[1])).to(tl.float32)


@triton.jit
def _as_tile(x, like_ptr):
    """The tile that (rounds, LANES, BLOCK_INNER) was, in the dtype of what like_ptr points to."""
    return tl.reshape(x.to(like_ptr.dtype.element_ty), (x.shape[0] * x.shape[1], x.shape[2]))


@kernel
def softmax_columns_fwd_kernel(
    input_ptr, output_ptr,
    classes, inner, input_outer_stride: tl.int64, input_stride: tl.int64,
    output_outer_stride: tl.int64, output_stride: tl.int64,
    LOG: tl.constexpr, BLOCK: tl.constexpr, BLOCK_INNER: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """y = exp(x - max(x)) / sum(exp(x - max(x))), or its logarithm, along the classes.

    input_ptr, output_ptr: (outer, classes, inner), floating point, stride 1 along inner.
    BLOCK classes are a tile, LANES divides BLOCK. VECTOR elements have 16 bytes, or it is 1 where rows start anywhere.
    """
    outer, columns, inside = _columns_of_program(inner, BLOCK_INNER, VECTOR)
    x_ptr = input_ptr + outer * input_outer_stride
    y_ptr = output_ptr + outer * output_outer_stride
    blocks = tl.cdiv(tl.maximum(classes - BLOCK, 0), BLOCK)

    lane_peak = tl.full((LANES, BLOCK_INNER), float("-inf"), tl.float32)
    lane_total = tl.zeros((LANES, BLOCK_INNER), tl.float32)
    for block in range(blocks):
        tile = _tile(block * BLOCK, BLOCK)
        x = _read(vectors(x_ptr + tile * input_stride, columns, VECTOR), inside, float("-inf"), "evict_last", LANES)
        larger = tl.maximum(lane_peak, tl.max(x, 0))
        shift = finite_or_zero(larger)
        lane_total = lane_total * exp(lane_peak - shift) + tl.sum(exp(x - shift[None, :, :]), 0)
        lane_peak = larger

    held_tile = _tile(blocks * BLOCK, BLOCK)
    in_held = inside & (held_tile < classes)
    held = _read(
        vectors(x_ptr + held_tile * input_stride, columns, VECTOR), in_held, float("-inf"), "evict_first", LANES
    )
    peak = tl.max(tl.maximum(lane_peak, tl.max(held, 0)), 0)[None, :]
    # A column of -inf has -inf - -inf = NaN here, as it should; so has one with +inf or NaN.
    total = tl.sum(lane_total * exp(lane_peak - peak) + tl.sum(exp(held - peak[None, :, :]), 0), 0)[None, None, :]
    peak = peak[None, :, :]
    normalizer = normalizer_of(total, LOG)

    held_y = _as_tile(normalized(held - peak, normalizer, LOG), output_ptr)
    tl.store(vectors(y_ptr + held_tile * output_stride, columns, VECTOR), held_y, mask=in_held)
    for block in range(blocks):
        tile = _tile((blocks - 1 - block) * BLOCK, BLOCK)
        x = _read(vectors(x_ptr + tile * input_stride, columns, VECTOR), inside, 0.0, "evict_first", LANES)
        y = _as_tile(normalized(x - peak, normalizer, LOG), output_ptr)
        tl.store(vectors(y_ptr + tile * output_stride, columns, VECTOR), y, mask=inside)


@kernel
def softmax_columns_bwd_kernel(
    grad_output_ptr, output_ptr, grad_input_ptr,
    classes, inner, grad_output_outer_stride: tl.int64, grad_output_stride: tl.int64,
    output_outer_stride: tl.int64, output_stride: tl.int64,
    grad_input_outer_stride: tl.int64, grad_input_stride: tl.int64,
    LOG: tl.constexpr, BLOCK: tl.constexpr, BLOCK_INNER: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """dx = y * (g - sum(g * y)), or for the logarithm g - exp(y) * sum(g), along the classes.

    grad_output_ptr, output_ptr, grad_input_ptr: (outer, classes, inner), floating point, stride 1 along inner.
    Constants as in softmax_columns_fwd_kernel.
    """
    outer, columns, inside = _columns_of_program(inner, BLOCK_INNER, VECTOR)
    g_ptr = grad_output_ptr + outer * grad_output_outer_stride
    y_ptr = output_ptr + outer * output_outer_stride
    dx_ptr = grad_input_ptr + outer * grad_input_outer_stride
    blocks = tl.cdiv(tl.maximum(classes - BLOCK, 0), BLOCK)

    lane_total = tl.zeros((LANES, BLOCK_INNER), tl.float32)
    for block in range(blocks):
        tile = _tile(block * BLOCK, BLOCK)
        g = _read(vectors(g_ptr + tile * grad_output_stride, columns, VECTOR), inside, 0.0, "evict_last", LANES)
        if LOG:
            lane_total += tl.sum(g, 0)
        else:
            y = _read(vectors(y_ptr + tile * output_stride, columns, VECTOR), inside, 0.0, "evict_last", LANES)
            lane_total += tl.sum(g * y, 0)

    held_tile = _tile(blocks * BLOCK, BLOCK)
    in_held = inside & (held_tile < classes)
    held_g = _read(vectors(g_ptr + held_tile * grad_output_stride, columns, VECTOR), in_held, 0.0, "evict_first", LANES)
    held_y = _read(vectors(y_ptr + held_tile * output_stride, columns, VECTOR), in_held, 0.0, "evict_first", LANES)
    total = tl.sum(lane_total + tl.sum(summand(held_g, held_y, LOG), 0), 0)[None, None, :]

    held_dx = _as_tile(input_gradient(held_g, held_y, total, LOG), grad_input_ptr)
    tl.store(vectors(dx_ptr + held_tile * grad_input_stride, columns, VECTOR), held_dx, mask=in_held)
    for block in range(blocks):
        tile = _tile((blocks - 1 - block) * BLOCK, BLOCK)
        g = _read(vectors(g_ptr + tile * grad_output_stride, columns, VECTOR), inside, 0.0, "evict_first", LANES)
        y = _read(vectors(y_ptr + tile * output_stride, columns, VECTOR), inside, 0.0, "evict_first", LANES)
        dx = _as_tile(input_gradient(g, y, total, LOG), grad_input_ptr)
        tl.store(vectors(dx_ptr + tile * grad_input_stride, columns, VECTOR), dx, mask=inside)


class Schedule(NamedTuple):
    """Classes and columns of a tile, lanes that its threads make of its classes, and those threads."""

    block: int
    block_inner: int
    lanes: int
    threads: int


# Reasoned, not yet measured. A tile is 256 bytes wide, or less where that makes too few programs, two per
# multiprocessor being enough, but never less than the 32 bytes that memory is read by. A thread holds 32 elements of
# it, 16 of each of the backward's two tensors.
_NARROWEST, _WIDEST = 32, 256
_PROGRAMS = 256
_THREADS = 256
# Fewer programs than half the multiprocessors take longer over many classes than a copy to rows would.
_TOO_FEW, _MANY_CLASSES = 64, 4096
# So does starting a program for each of many outer indices with fewer elements.
_FEW_ELEMENTS, _MANY_PROGRAMS = 64, 4096


@functools.lru_cache(1024)
def _schedule(outer: int, classes: int, inner: int, vector: int, size: int, held: int) -> Schedule:
    """For `size` bytes per element of the narrowest tensor, and `held` elements of each tensor per thread."""
    if classes * inner < _FEW_ELEMENTS and outer > _MANY_PROGRAMS:
        raise UnsupportedInput(f"{classes} x {inner} are few elements for each of {outer} programs")
    block_inner = min(triton.next_power_of_2(inner), _WIDEST // size)
    while block_inner > _NARROWEST // size and outer * triton.cdiv(inner, block_inner) < _PROGRAMS:
        block_inner //= 2
    if outer * triton.cdiv(inner, block_inner) < _TOO_FEW and classes > _MANY_CLASSES:
        raise UnsupportedInput(f"{outer} x {inner} columns are too few to do {classes} classes each in parallel")
    block = min(triton.next_power_of_2(classes), max(1, _THREADS * held // block_inner))
    threads = min(_THREADS, max(32, block * block_inner // held))
    return Schedule(block, block_inner, min(block, max(1, threads * vector // block_inner)), threads)


def _vector(inner: int, tensors: tuple[Tensor, ...]) -> int:
    """Elements of the narrowest tensor in 16 bytes if all can be read so, else 1."""
    vector = max(16 // tensor.element_size() for tensor in tensors)
    for tensor in tensors:
        if tensor.data_ptr() % 16 or tensor.stride(0) % vector or tensor.stride(1) % vector:
            return 1
    return 1 if inner % vector else vector


def softmax_columns_forward(input: Tensor, output: Tensor) -> None:
    """``output <- softmax(input)`` over (outer, classes, inner)."""
    _forward(input, output, LOG=False)


def log_softmax_columns_forward(input: Tensor, output: Tensor) -> None:
    """``output <- log_softmax(input)`` over (outer, classes, inner)."""
    _forward(input, output, LOG=True)


def softmax_columns_backward(grad_output: Tensor, output: Tensor, grad_input: Tensor) -> None:
    """``grad_input <- d softmax`` from the gradient of its result and the result itself."""
    _backward(grad_output, output, grad_input, LOG=False)


def log_softmax_columns_backward(grad_output: Tensor, output: Tensor, grad_input: Tensor) -> None:
    """``grad_input <- d log_softmax`` from the gradient of its result and the result itself."""
    _backward(grad_output, output, grad_input, LOG=True)


def _forward(input: Tensor, output: Tensor, LOG: bool) -> None:
    refuse_float64(input.dtype, output.dtype)
    _launch(softmax_columns_fwd_kernel, (input, output), LOG, held=32)


def _backward(grad_output: Tensor, output: Tensor, grad_input: Tensor, LOG: bool) -> None:
    refuse_float64(grad_output.dtype, output.dtype, grad_input.dtype)
    _launch(softmax_columns_bwd_kernel, (grad_output, output, grad_input), LOG, held=16)


def _launch(kernel_: Kernel, tensors: tuple[Tensor, ...], LOG: bool, held: int) -> None:
    outer, classes, inner = tensors[0].shape
    if not tensors[0].numel():
        return
    vector = _vector(inner, tensors)
    if vector == 1:
        # Then there is an address for each element to hold, too.
        held //= 2
    size = min(tensor.element_size() for tensor in tensors)
    block, block_inner, lanes, threads = _schedule(outer, classes, inner, vector, size, held)
    strides = [stride for tensor in tensors for stride in tensor.stride()[:2]]
    key = tensors[0].device.index, *(tensor.dtype for tensor in tensors)
    launch = prepared(kernel_, key, (LOG, block, block_inner, lanes, vector), threads)
    launch(outer * -(-inner // block_inner), tensors, classes, inner, *strides)
