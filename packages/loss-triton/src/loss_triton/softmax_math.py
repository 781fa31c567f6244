"""The arithmetic of softmax and log-softmax, which their kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

from loss_triton.rows import LOG2_E, argument_of, fused


@triton.jit
def exp(x):
    """e**x: three instructions fewer than ``tl.exp``, which keeps results below 2**-126 from becoming 0."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def normalizer_of(total, LOG: tl.constexpr):
    """What ``normalized`` needs of the sum of exponentials: once per row, so it may be the exact division."""
    if LOG:
        return tl.log(total)
    else:
        return tl.div_rn(tl.full(total.shape, 1.0, tl.float32), total)


@triton.jit
def normalized(shifted, normalizer, LOG: tl.constexpr):
    """The result from x - max(x)."""
    if LOG:
        return shifted - normalizer
    else:
        return exp(shifted) * normalizer


@triton.jit
def normalization(peak, total, LOG: tl.constexpr, FUSED: tl.constexpr):
    """What ``normalized_row`` needs of a row's maximum and sum; FUSED: with the argument that ``rows`` makes."""
    normalizer = normalizer_of(total, LOG)
    power = LOG2_E
    bias = peak
    if FUSED:
        power, bias, factor = argument_of(peak, LOG2_E)
        normalizer *= factor
    return power, bias, normalizer


@triton.jit
def normalized_row(x, power, bias, normalizer, LOG: tl.constexpr, FUSED: tl.constexpr):
    """The result from x."""
    if FUSED:
        return tl.exp2(fused(x, power, bias)) * normalizer
    else:
        return normalized(x - bias, normalizer, LOG)


@triton.jit
def summand(g, y, LOG: tl.constexpr):
    """What the backward sums over a row: the gradient's share along the output."""
    if LOG:
        return g
    else:
        return g * y


@triton.jit
def input_gradient(g, y, total, LOG: tl.constexpr):
    if LOG:
        return g - exp(y) * total
    else:
        return y * (g - total)
