"""The tensors of a case: random ones, or logits and labels read from a file."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from loss_bench.cases import Case

IGNORE_INDEX = -100

_MOST_SETS = 8
_DEVIATION = 3.0


@dataclass
class Inputs:
    """Several sets of the same kind, so that one call does not find the data of the last one in a cache.

    Attributes:
        input: leaves that require grad, one a set: the logits, for a linear op what they are made of (rows x hidden).
        target: the target classes of each set; empty for softmax and log-softmax.
        weight: class weights, or None.
        grad_output: the upstream gradient where the result is no scalar, one a set.
        linear_weight: of a linear op, leaves (classes x hidden) that require grad, one a set; empty for the others.
        linear_bias: of a linear op with a bias, the same with (classes,).
    """

    input: list[Tensor]
    target: list[Tensor] = field(default_factory=list)
    weight: Tensor | None = None
    grad_output: list[Tensor] = field(default_factory=list)
    linear_weight: list[Tensor] = field(default_factory=list)
    linear_bias: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.input)

    def leaves(self, which: int) -> tuple[Tensor, ...]:
        """What a call on set `which` is given in front of the target, and has a gradient."""
        return tuple(kind[which] for kind in (self.input, self.linear_weight, self.linear_bias) if kind)

    def kept_rows(self, case: Case) -> float | None:
        """How many rows have a target that is not ignored, on average over the sets; None for an op without targets."""
        if not self.target:
            return None
        # A causal loss has no target for the last position, and none that is the first label.
        targets = [target[:, 1:] if case.op == "causal_lm_loss" else target for target in self.target]
        return sum(int((target != IGNORE_INDEX).sum()) for target in targets) / len(targets)


def sets_needed(case: Case, cache_bytes: int) -> int:
    """How many sets make at least twice the cache, between 2 and 8; one may do for a linear op."""
    # With its gradients a set of a linear op is gigabytes, and the memory is wanted for what the libraries need.
    least = 1 if case.hidden else 2
    return min(_MOST_SETS, max(least, math.ceil(2 * cache_bytes / max(1, case.input_bytes))))


def random_inputs(case: Case, device: torch.device, *, seed: int, sets: int) -> Inputs:
    """Random sets of `case` on `device`.

    The logits have a standard deviation of 3, which gives rows in which some classes are likely and most are not,
    as a model's are; with less, every probability would drown in the rounding of a half-precision gradient. Those of a
    linear op come to that from inputs of deviation 1, as behind a model's last normalisation.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(shape: tuple[int, ...], deviation: float) -> list[Tensor]:
        blanks = (torch.empty(shape, dtype=case.torch_dtype, device=device) for _ in range(sets))
        return [blank.normal_(0.0, deviation, generator=generator).requires_grad_() for blank in blanks]

    if case.hidden is None:
        inputs = Inputs(normal(case.logits_shape, _DEVIATION))
    else:
        inputs = Inputs(normal((case.rows, case.hidden), 1.0))
        inputs.linear_weight = normal((case.classes, case.hidden), _DEVIATION * case.hidden**-0.5)
        inputs.linear_bias = normal((case.classes,), 1.0) if case.options.bias else []
    if case.is_loss:
        positions = case.logits_shape[:-1]
        inputs.target = [
            _ignoring(case, torch.randint(case.classes, positions, device=device, generator=generator), generator)
            for _ in range(sets)
        ]
    _add_rest(case, inputs, generator)
    return inputs


def _add_rest(case: Case, inputs: Inputs, generator: torch.Generator) -> None:
    """Class weights and upstream gradients, which are random whatever the logits are."""
    device = inputs.input[0].device
    if case.options.weight:
        inputs.weight = torch.rand(case.classes, device=device, generator=generator) + 0.5
    size = _result_shape(case)
    if size is not None:
        inputs.grad_output = [
            torch.empty(size, dtype=case.torch_dtype, device=device).normal_(generator=generator) for _ in inputs.input
        ]


def _result_shape(case: Case) -> tuple[int, ...] | None:
    """The shape of a result that is no scalar."""
    if not case.is_loss:
        return case.logits_shape
    return (case.rows,) if case.options.reduction == "none" else None


def _ignoring(case: Case, target: Tensor, generator: torch.Generator) -> Tensor:
    """`target`, in which the share of the rows that the options name is ignored."""
    if case.options.ignored:
        chosen = torch.rand(target.shape, device=target.device, generator=generator) < case.options.ignored
        target[chosen] = IGNORE_INDEX
    return target


@dataclass(frozen=True)
class RealInputs:
    """Logits (rows x classes) and labels (rows) of a real model, on the CPU."""

    logits: Tensor
    labels: Tensor

    def to_inputs(self, case: Case, device: torch.device, *, seed: int, sets: int) -> Inputs:
        """The file's tensors on `device`, in the dtype of `case` and with its options; every set is a copy."""
        generator = torch.Generator(device).manual_seed(seed)
        given = self.logits.view(case.logits_shape)
        inputs = Inputs([given.to(device, case.torch_dtype, copy=True).requires_grad_() for _ in range(sets)])
        if case.is_loss:
            labels = self.labels.view(case.logits_shape[:-1])
            inputs.target = [_ignoring(case, labels.to(device, copy=True), generator) for _ in range(sets)]
        _add_rest(case, inputs, generator)
        return inputs


def read_logits(path: Path) -> RealInputs:
    """Read ``logits`` and ``labels`` from a safetensors file; leading dimensions are joined.

    Raises:
        ValueError: if the file does not hold the two tensors, in shapes and with labels that fit.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from error
    missing = {"logits", "labels"} - tensors.keys()
    if missing:
        raise ValueError(f"{path} has no tensor {' and no '.join(sorted(missing))}; it has {', '.join(tensors)}")
    logits, labels = tensors["logits"], tensors["labels"]
    if logits.shape[:-1] != labels.shape or not logits.is_floating_point() or labels.is_floating_point():
        raise ValueError(
            f"{path}: logits must be floating point (..., classes) and labels integers (...), "
            f"got {logits.dtype} {tuple(logits.shape)} and {labels.dtype} {tuple(labels.shape)}"
        )
    valid = (labels == IGNORE_INDEX) | ((labels >= 0) & (labels < logits.shape[-1]))
    if not valid.all():
        raise ValueError(
            f"{path}: labels must be {IGNORE_INDEX} or from 0 to {logits.shape[-1] - 1}, got {labels[~valid][0]}"
        )
    return RealInputs(logits.reshape(-1, logits.shape[-1]).contiguous(), labels.reshape(-1).contiguous())
