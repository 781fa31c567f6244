"""The float64 reference, in pieces of rows.

It is written out here, apart from loss_core's own, so that the two do not share a mistake.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from loss_bench.cases import Case
from loss_bench.inputs import IGNORE_INDEX

PIECE_BYTES = 256 << 20
"""Size of a piece of the logits in float64."""


def pieces(case: Case) -> Iterator[slice]:
    """The rows of `case`, a few at a time."""
    step = max(1, PIECE_BYTES // (8 * case.classes))
    for start in range(0, case.rows, step):
        yield slice(start, min(case.rows, start + step))


def mean_denominator(case: Case, target: Tensor, weight: Tensor | None) -> float:
    """What the sum of the row losses is divided by."""
    if case.options.reduction != "mean":
        return 1.0
    kept = target[target != IGNORE_INDEX]
    return float(weight.double()[kept].sum()) if weight is not None else float(kept.numel())


class CrossEntropyRows:
    """The loss of some rows in float64, and its gradient with respect to the raw logits."""

    def __init__(self, case: Case, logits: Tensor, target: Tensor, weight: Tensor | None) -> None:
        self._options = case.options
        arithmetic = torch.float64 if case.dtype == "float64" else torch.float32
        self._arithmetic_units = torch.finfo(arithmetic).eps / torch.finfo(case.torch_dtype).eps
        x = logits.double()
        if case.options.softcap is not None:
            x = case.options.softcap * torch.tanh(x / case.options.softcap)
        self._x = x
        self._keep = target != IGNORE_INDEX
        self._target = target.long().where(self._keep, 0)[:, None]
        self._weight = torch.ones(case.classes, dtype=torch.float64, device=x.device) if weight is None else weight
        self._weight = self._weight.double()
        self._own_weight = self._weight[self._target[:, 0]]
        self.lse = torch.logsumexp(x, dim=1)
        self.loss = self._loss()

    def _loss(self) -> Tensor:
        smoothing, classes = self._options.label_smoothing, self._x.shape[1]
        loss = (1 - smoothing) * self._own_weight * (self.lse - self._x.gather(1, self._target)[:, 0])
        if smoothing:
            spread = self.lse * self._weight.sum() - self._x @ self._weight
            loss = loss + smoothing / classes * spread
        if self._options.z_loss:
            loss = loss + self._options.z_loss * self.lse.square()
        return loss.where(self._keep, 0)

    def loss_terms(self) -> Tensor:
        """The size of what each row's loss is the difference of: its log-sum-exp and its target's logit."""
        own = self._x.gather(1, self._target)[:, 0]
        return (self._own_weight * (self.lse.abs() + own.abs())).where(self._keep, 0)

    def gradient(self, upstream: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient d loss / d logits times `upstream` (rows,), and the sum of the absolute values of its terms."""
        smoothing, classes = self._options.label_smoothing, self._x.shape[1]
        upstream = upstream.where(self._keep, 0)
        mass = (1 - smoothing) * self._own_weight + smoothing / classes * self._weight.sum()
        if self._options.z_loss:
            mass = mass + 2 * self._options.z_loss * self.lse
        grad = torch.exp(self._x - self.lse[:, None]).mul_((mass * upstream)[:, None])
        terms = grad.abs()
        if smoothing:
            spread = smoothing / classes * self._weight * upstream[:, None]
            grad -= spread
            terms += spread.abs()
        own = ((1 - smoothing) * self._own_weight * upstream)[:, None]
        grad.scatter_add_(1, self._target, -own)
        # The target's element is p - 1: what p loses to rounding near 1 is no error of the difference.
        terms.scatter_add_(1, self._target, own.abs())
        if self._options.softcap is not None:
            slope = 1 - (self._x / self._options.softcap).square()
            # Near 0 it is the difference of two numbers near 1, in the arithmetic that the result is rounded from.
            grad, terms = grad * slope, terms * (slope + self._arithmetic_units)
        return grad, terms


class LinearPieces:
    """The matrix products of a linear op in float64, for some rows at a time.

    Of every gradient it also gives two sizes that errors are judged by, each element's: the norm of the terms (the
    logits' gradients, as ``CrossEntropyRows.gradient`` gives them) times the root mean square of the other factor, and
    the same for terms of 1, which is what a loss of 1 in each of them adds up to.

    Args:
        case: the case.
        leaves: input (rows, hidden), linear_weight (classes, hidden) and, if the case has one, linear_bias (classes,).
    """

    def __init__(self, case: Case, leaves: Sequence[Tensor]) -> None:
        self._case = case
        self._input, self._weight = leaves[0].double(), leaves[1].double()
        self._bias = leaves[2].double() if case.options.bias else None
        self._input_size = self._input.square().mean(0).sqrt()
        self._weight_size = self._weight.square().mean(0).sqrt()
        self._weight_gradient: Tensor | None = None
        self._bias_gradient = torch.zeros(case.classes, dtype=torch.float64, device=self._input.device)
        self._squares = torch.zeros_like(self._bias_gradient)

    def logits(self, rows: slice) -> Tensor:
        """The logits of `rows`."""
        product = self._input[rows] @ self._weight.T
        return product if self._bias is None else product.add_(self._bias)

    def add(self, rows: slice, grad: Tensor, terms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Add `rows` to the gradients of weight and bias; their gradient of the input with its two sizes.

        `grad` and `terms` are those of the logits, (rows, classes); `terms` is used up.
        """
        if self._weight_gradient is None:
            self._weight_gradient = torch.zeros_like(self._weight)
        self._weight_gradient.addmm_(grad.T, self._input[rows])
        self._bias_gradient += grad.sum(0)
        squares = terms.square_()
        self._squares += squares.sum(0)
        scale = squares.sum(1).sqrt()[:, None] * self._weight_size
        return grad @ self._weight, scale, self._weight_size * math.sqrt(self._case.classes)

    def class_pieces(self) -> Iterator[slice]:
        """The classes, a few at a time."""
        step = max(1, PIECE_BYTES // (8 * self._weight.shape[1]))
        for start in range(0, self._case.classes, step):
            yield slice(start, min(self._case.classes, start + step))

    def weight_gradient(self, classes: slice) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of these rows of the weight, over all that was added, with its two sizes."""
        assert self._weight_gradient is not None
        scale = self._squares[classes].sqrt()[:, None] * self._input_size
        return self._weight_gradient[classes], scale, self._input_size * math.sqrt(self._case.rows)

    def bias_gradient(self, classes: slice) -> tuple[Tensor, Tensor, Tensor]:
        """That of the bias, the same way."""
        scale = self._squares[classes].sqrt()
        return self._bias_gradient[classes], scale, torch.full_like(scale, math.sqrt(self._case.rows))


def softmax_rows(case: Case, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax or log-softmax of some rows in float64, and the size of the terms of each element."""
    x = logits.double()
    lse = torch.logsumexp(x, dim=1, keepdim=True)
    if case.op == "log_softmax":
        return x - lse, x.abs() + lse.abs()
    output = torch.exp(x - lse)
    return output, output.clone()


def softmax_gradient(case: Case, output: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of softmax or log-softmax from its output, and the size of the terms of each element."""
    if case.op == "log_softmax":
        probability = output.exp()
        total = outer.sum(1, keepdim=True)
        terms = outer.abs() + probability * outer.abs().sum(1, keepdim=True)
        return outer - probability * total, terms
    total = (outer * output).sum(1, keepdim=True)
    terms = output * (outer.abs() + (outer * output).abs().sum(1, keepdim=True))
    return output * (outer - total), terms
