"""How far each backend is from float64, over inputs that are easy and inputs that are not.

Errors are counted in units of rounding, the distance between neighbouring numbers of the result's dtype: at the true
value, or, where that is a difference (most gradients), at the size of the terms, since no arithmetic in that dtype can
be held to more. A result that is rounded once is within half a unit; each further rounding on the way adds to that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from loss_bench.calls import BackendRow, make_call
from loss_bench.cases import Case, lacking
from loss_bench.inputs import IGNORE_INDEX
from loss_bench.measure import poison
from loss_bench.processes import Tell
from loss_bench.reference import CrossEntropyRows, mean_denominator, pieces, softmax_gradient, softmax_rows
from loss_bench.results import ERROR_KEY, Report, device_name, finite, from_pairs, with_others


@dataclass
class Accuracy:
    """The errors of one backend on one kind of input.

    Attributes:
        op, rows, classes, dtype, kind: the case.
        backend, distribution, version: who computed it.
        device: name of the device.
        status, reason: as in ``results.Row``; ``wrong`` where a result is NaN or infinite and the truth is not.
        result_dtype: of the loss or output.
        result_abs, result_ulp: largest error of the loss or output, absolute and in units of its rounding.
        result_ulp_mean: the same on average.
        grad_abs, grad_ulp, grad_ulp_mean: the same of the gradient.
    """

    op: str
    rows: int
    classes: int
    dtype: str
    kind: str
    backend: str
    distribution: str
    version: str
    device: str
    status: str = "ok"
    reason: str = ""
    result_dtype: str = ""
    result_abs: float | None = None
    result_ulp: float | None = None
    result_ulp_mean: float | None = None
    grad_abs: float | None = None
    grad_ulp: float | None = None
    grad_ulp_mean: float | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """What is one measurement, whenever it is made."""
        return tuple(getattr(self, name) for name in ERROR_KEY)

    def to_json(self) -> dict[str, Any]:
        """The row as a JSON object; NaN and infinity become null."""
        return finite(asdict(self))

    @classmethod
    def from_json(cls, pairs: dict[str, Any]) -> Accuracy:
        """The row of a JSON object; fields that are not known here are left out."""
        return from_pairs(cls, pairs)


def _normal(shape: tuple[int, int], scale: float, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator) * scale


def _ordinary(shape: tuple[int, int], target: Tensor, generator: torch.Generator) -> Tensor:
    return _normal(shape, 3.0, generator)


def _sure(shape: tuple[int, int], target: Tensor, generator: torch.Generator) -> Tensor:
    # The model is right and knows it: the loss is a small difference of large numbers.
    logits = _normal(shape, 1.0, generator)
    return logits.scatter_add_(1, target[:, None], torch.full((shape[0], 1), 20.0))


def _surely_mistaken(shape: tuple[int, int], target: Tensor, generator: torch.Generator) -> Tensor:
    logits = _normal(shape, 1.0, generator)
    other = ((target + 1) % shape[1])[:, None]
    return logits.scatter_add_(1, other, torch.full((shape[0], 1), 30.0))


def _shifted(shape: tuple[int, int], target: Tensor, generator: torch.Generator) -> Tensor:
    return _normal(shape, 3.0, generator) + 100.0


def _masked(shape: tuple[int, int], target: Tensor, generator: torch.Generator) -> Tensor:
    # A vocabulary padded with -inf, in blocks: whole tiles of a kernel see nothing else.
    logits = _normal(shape, 3.0, generator)
    allowed = torch.arange(shape[1]) < (shape[1] + 1) // 2
    allowed = allowed.repeat(shape[0], 1).scatter(1, target[:, None], True)
    # In half of the rows the first blocks are masked, not the last ones.
    flipped = allowed.flip(1).scatter(1, target[:, None], True)
    allowed[::2] = flipped[::2]
    return logits.masked_fill(~allowed, -math.inf)


def _equal(shape: tuple[int, int], target: Tensor, generator: torch.Generator) -> Tensor:
    # Every probability is 1 / classes: a sum that loses its small terms shows.
    return torch.full(shape, 0.5)


def _wide(shape: tuple[int, int], target: Tensor, generator: torch.Generator) -> Tensor:
    # Far beyond what exp of the raw logits could hold.
    return (torch.rand(shape, generator=generator) * 2 - 1) * 1000.0


def _rising(shape: tuple[int, int], target: Tensor, generator: torch.Generator) -> Tensor:
    # The maximum changes at every step of an online softmax.
    return torch.linspace(-20.0, 20.0, shape[1]).repeat(shape[0], 1)


KINDS: dict[str, Callable[[tuple[int, int], Tensor, torch.Generator], Tensor]] = {
    "ordinary": _ordinary,
    "sure": _sure,
    "mistaken": _surely_mistaken,
    "shifted": _shifted,
    "masked": _masked,
    "equal": _equal,
    "wide": _wide,
    "rising": _rising,
}
"""Kinds of logits: normal with deviation 3; the target surely right; surely wrong; normal around 100; half of the
vocabulary -inf; all equal; uniform within 1000; rising along the classes."""


def units_of_rounding(error: Tensor, truth: Tensor, dtype: torch.dtype) -> Tensor:
    """`error` (float64) in distances between neighbouring numbers of `dtype` at `truth`."""
    info = torch.finfo(dtype)
    # Two equal infinities have no error; the size that their distance would have does not matter.
    magnitude = truth.abs().clamp(min=info.smallest_normal, max=info.max)
    exponent = torch.floor(torch.log2(magnitude))
    return error / (torch.exp2(exponent) * info.eps)


@dataclass
class _Errors:
    """Errors over the pieces of a result."""

    dtype: torch.dtype
    largest: float = 0.0
    units: float = 0.0
    total: float = 0.0
    count: int = 0

    def add(self, got: Tensor, want: Tensor, terms: Tensor | None = None) -> None:
        error = (got.double() - want).abs()
        # The same infinity is right, and its difference is NaN.
        error = torch.where(got.double() == want, 0.0, error)
        units = units_of_rounding(error, want if terms is None else terms, self.dtype)
        units = torch.where(error == 0, 0.0, units)
        self.largest = _worst(self.largest, error)
        self.units = _worst(self.units, units)
        self.total += float(units.sum())
        self.count += units.numel()

    @property
    def mean(self) -> float:
        return self.total / max(1, self.count)


def _worst(so_far: float, values: Tensor) -> float:
    found = float(values.amax()) if values.numel() else 0.0
    return math.nan if math.isnan(found) or math.isnan(so_far) else max(found, so_far)


def make_inputs(case: Case, kind: str, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Logits of a kind, in the dtype of `case`, and targets, every eighth of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(case.classes, (case.rows,), generator=generator)
    logits = KINDS[kind]((case.rows, case.classes), target, generator).to(case.torch_dtype)
    target[1::8] = IGNORE_INDEX
    return logits.to(device), target.to(device)


@dataclass(frozen=True)
class AccuracyTask:
    """One backend on one kind of inputs of one case."""

    case: Case
    kind: str
    who: BackendRow
    seed: int

    @property
    def backend(self) -> str:
        """The backend's name."""
        return self.who.name

    def __str__(self) -> str:
        return f"{self.backend} {self.case} {self.kind}"

    @property
    def refusal(self) -> str:
        """Why this backend has no such errors, or ""."""
        if not self.who.available:
            return self.who.reason
        return "" if self.case.backend_op in self.who.ops else lacking(self.case.op)


def make_tasks(
    cases: Sequence[Case], kinds: Sequence[str], backends: Sequence[BackendRow], seed: int
) -> list[AccuracyTask]:
    """Every backend on every kind of every case."""
    return [AccuracyTask(case, kind, who, seed) for case in cases for kind in kinds for who in backends]


def new_accuracy(task: AccuracyTask, device: str, status: str = "ok", reason: str = "") -> Accuracy:
    """A row without errors."""
    case, who = task.case, task.who
    return Accuracy(
        case.op, case.rows, case.classes, case.dtype, task.kind, who.name, who.distribution, who.version, device,
        status, reason,
    )  # fmt: skip


def earlier_errors(
    earlier: Report, tasks: Sequence[AccuracyTask], device: str, seed: int
) -> dict[AccuracyTask, Accuracy]:
    """The errors that need not be measured again, since `earlier` has them.

    Raises:
        ValueError: if `earlier` is of another device, or of inputs of another seed.
    """
    earlier.check_device(device)
    earlier.check_seed("shape", seed, "errors")
    known = {row.key: row for row in map(Accuracy.from_json, earlier.accuracy)}
    rows = {task: known.get(new_accuracy(task, device).key) for task in tasks}
    return {task: row for task, row in rows.items() if row and task.who.stands(row.version, row.status)}


def errors_json(
    tasks: Sequence[AccuracyTask], found: Mapping[AccuracyTask, Accuracy], earlier: Report | None
) -> list[dict[str, Any]]:
    """What is `found`, in the order of `tasks`, and behind it what an `earlier` report has of others."""
    rows = [found[task].to_json() for task in tasks if task in found]
    return rows if earlier is None else with_others(rows, earlier.accuracy, ERROR_KEY)


def measure_accuracy(task: AccuracyTask, device: torch.device, tell: Tell = lambda text, share: None) -> Accuracy:
    """The errors of the task's backend."""
    row = new_accuracy(task, device_name(device))
    _fill(row, task.case, task.kind, device, task.seed)
    if any(value is not None and not math.isfinite(value) for value in (row.result_ulp, row.grad_ulp)):
        row.status, row.reason = "wrong", "NaN or infinite where the truth is a number"
    return row


def _fill(row: Accuracy, case: Case, kind: str, device: torch.device, seed: int) -> None:
    logits, target = make_inputs(case, kind, device, seed)
    # Some backends write their gradient over what they are given.
    leaf = logits.clone().requires_grad_()
    poison(device, case.logits_bytes)
    output = make_call(case, row.backend)(leaf, target)
    upstream = torch.ones_like(output) if output.dim() == 0 else _upstream(output, seed)
    output.backward(upstream)
    assert leaf.grad is not None, "no gradient"
    result, grad = _Errors(output.dtype), _Errors(leaf.grad.dtype)
    if case.is_loss:
        _add_cross_entropy(case, logits, target, output.detach(), leaf.grad, result, grad)
    else:
        _add_softmax(case, logits, output.detach(), leaf.grad, upstream, result, grad)
    row.result_dtype = str(output.dtype).removeprefix("torch.")
    row.result_abs, row.result_ulp, row.result_ulp_mean = result.largest, result.units, result.mean
    row.grad_abs, row.grad_ulp, row.grad_ulp_mean = grad.largest, grad.units, grad.mean


def _upstream(output: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn(output.shape, generator=generator).to(output)


def _add_cross_entropy(
    case: Case, logits: Tensor, target: Tensor, loss: Tensor, gradient: Tensor, result: _Errors, grad: _Errors
) -> None:
    denominator = mean_denominator(case, target, None)
    total, terms = torch.zeros(2, dtype=torch.float64, device=logits.device)
    for rows in pieces(case):
        reference = CrossEntropyRows(case, logits[rows], target[rows], None)
        total += reference.loss.sum()
        terms += reference.loss_terms().sum()
        factor = torch.full_like(reference.loss, 1 / denominator)
        grad.add(gradient[rows], *reference.gradient(factor))
    result.add(loss, total / denominator, terms / denominator)


def _add_softmax(
    case: Case, logits: Tensor, output: Tensor, gradient: Tensor, upstream: Tensor, result: _Errors, grad: _Errors
) -> None:
    for rows in pieces(case):
        want, terms = softmax_rows(case, logits[rows])
        result.add(output[rows], want, terms)
        grad.add(gradient[rows], *softmax_gradient(case, want, upstream[rows].double()))
