"""Runs a case on a backend and compares."""

from __future__ import annotations

from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor

import loss_core
from loss_core.backend import UnsupportedInput
from loss_core.testing.case import Case
from loss_core.testing.inputs import Inputs, make_inputs, upstream
from loss_core.testing.memory import nan_filled_empty
from loss_core.testing.truth import assert_within, expected


def check(case: Case, backend: str, device: torch.device | str = "cpu") -> None:
    """Run `case` on `backend` and compare every result with float64.

    Beside the numbers it checks dtypes and shapes, that logits which were not given away keep their bits, that those
    which were have a new version, and, for ``twice``, that the call repeated gives the same bits.

    Args:
        case: one of ``loss_core.testing.cases(op)``.
        backend: its name.
        device: where the tensors are.

    Raises:
        AssertionError: a result is wrong; the message says where, with the values of the backend, PyTorch and float64.
        unittest.SkipTest: the backend refuses a case that is optional. Test runners report it as skipped.
        UnsupportedInput: it refuses one that is not.
        BackendUnavailable: the backend is not installed or cannot run on this device.
    """
    inputs = make_inputs(case, device)
    before, version = inputs.logits.detach().clone(), inputs.logits._version
    try:
        results, gradients, sent = _run(case, inputs, backend)
    except UnsupportedInput as error:
        if case.optional:
            raise SkipTest(f"{backend} refuses {case.optional}: {error}") from None
        raise
    changed = not torch.equal(_bits(inputs.logits), _bits(before))
    if changed and not case.inplace:
        raise AssertionError(f"{case.op} wrote to the logits without inplace=True")
    if changed and inputs.logits._version == version:
        raise AssertionError("the logits' memory was given away, but their version counter did not move")
    inputs.logits = before.as_strided(before.shape, before.stride())
    for i, upstream_gradient in enumerate(sent):
        for name, wanted in expected(case, inputs, upstream_gradient).items():
            assert_within(name, gradients[i] if name == "gradient" else results[name], wanted)
    if case.twice:
        _assert_repeatable(case, make_inputs(case, device), backend, results | {"gradient": gradients[0]})


def _run(case: Case, inputs: Inputs, backend: str) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
    """The results by name, the gradient of each backward, and the upstream gradients that were sent."""
    gradients: list[Tensor] = []
    with nan_filled_empty():
        results = _call(case, inputs, backend)
        result = results.get("loss", results.get("output"))
        assert result is not None
        first = upstream(case, result)
        sent = [first, -0.5 * first] if case.twice else [first]
        if case.grad:
            for gradient in sent:
                gradients += torch.autograd.grad(result, inputs.logits, gradient, retain_graph=case.twice)
    return results, gradients, sent


def _call(case: Case, inputs: Inputs, backend: str) -> dict[str, Tensor]:
    if case.op in ("softmax", "log_softmax"):
        function = getattr(loss_core, case.op)
        return {"output": function(inputs.logits, inputs.dim, dtype=case.result_dtype, backend=backend)}
    options: dict[str, Any] = {
        "weight": inputs.weight,
        "ignore_index": case.ignore_index,
        "reduction": case.reduction,
        "label_smoothing": case.label_smoothing,
        "z_loss": case.z_loss,
        "softcap": case.softcap,
        "logit_scale": case.logit_scale,
        "byte_lengths": inputs.byte_lengths,
        "num_items": inputs.num_items,
        "inplace": case.inplace,
        "backend": backend,
    }
    if case.op == "causal_lm_loss":
        if case.shift_labels:
            options["shift_labels"] = inputs.target
        return {"loss": loss_core.causal_lm_loss(inputs.logits, inputs.target, **options)}
    if case.stats:
        return loss_core.cross_entropy_with_stats(inputs.logits, inputs.target, dim=inputs.dim, **options)._asdict()
    return {"loss": loss_core.cross_entropy(inputs.logits, inputs.target, dim=inputs.dim, **options)}


def _assert_repeatable(case: Case, inputs: Inputs, backend: str, first: dict[str, Tensor]) -> None:
    results, gradients, _ = _run(case, inputs, backend)
    for name, again in (results | {"gradient": gradients[0]}).items():
        if not torch.equal(_bits(again), _bits(first[name])):
            raise AssertionError(f"{name} differs in its bits between two runs with the same inputs")


def _bits(tensor: Tensor) -> Tensor:
    """`tensor` such that equal bits compare equal, NaN included."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size())
    tensor = tensor.detach()
    return tensor.view(integer) if tensor.is_floating_point() and integer is not None else tensor
