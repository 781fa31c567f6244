"""How a backend is called: as its own users call it.

A backend of ours, or a third party's, is called through ``loss_core`` with ``backend=``, dispatch included. A peer
(a module of ``loss_bench.peers``, known by its ``PEER``) wraps a library that has an interface of its own, so its
function is called directly: what loss-core adds would not be there for that library's users. So is that of an op which
loss-core does not offer itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import loss_core
import torch
import torch.nn.functional as F
from loss_core import registry
from loss_core.backend import CrossEntropyOptions, UnsupportedInput
from torch import Tensor

from loss_bench.cases import LINEAR, Case, Options, lacking
from loss_bench.inputs import IGNORE_INDEX

Call = Callable[..., Tensor]
"""(logits, target) -> loss or output; of a linear op (input, linear_weight, [linear_bias,] target) -> loss."""

_PUBLIC_OPTIONS = ("reduction", "label_smoothing", "z_loss", "softcap", "inplace")


@dataclass(frozen=True)
class BackendRow:
    """A backend as the benchmark shows it; for a peer, distribution and version are the wrapped library's.

    Attributes:
        name: what ``--backend`` takes.
        distribution: what has to be installed for it.
        version: the version installed, or "".
        ops: the ops it provides.
        available: whether it can run on the device.
        reason: why not, or "".
    """

    name: str
    distribution: str
    version: str
    ops: tuple[str, ...]
    available: bool
    reason: str

    def stands(self, version: str, status: str) -> bool:
        """Whether a result of this `version` and `status` is what would be found again now, as far as that is known."""
        return version == self.version and not (status == "unavailable" and self.available)


def find_backends(device: torch.device) -> list[BackendRow]:
    """Every backend that the registry knows, with its state on `device`."""
    return [_describe(info) for info in loss_core.list_backends(device)]


def check_installed(names: Iterable[str]) -> None:
    """Raise for a name that no backend has; none is imported.

    Raises:
        BackendUnavailable: naming those that are installed.
    """
    for name in names:
        registry.named(name)


def named_backends(names: Sequence[str], device: torch.device) -> list[BackendRow] | None:
    """The backends of these names without a look at the others, which take seconds to import.

    None if one of them cannot be loaded: the full list has the reason.
    """
    rows = []
    for name in names:
        try:
            found = loss_core.get_backend(name)
        except loss_core.BackendError:
            return None
        reason = found.unavailable_reason(device)
        info = loss_core.BackendInfo(name, found.distribution, found.version, found.ops, not reason, reason)
        rows.append(_describe(info))
    return rows


def _describe(info: loss_core.BackendInfo) -> BackendRow:
    peer = _peer_distribution(info.name)
    if peer is None:
        return BackendRow(info.name, info.distribution, info.version, info.ops, info.available, info.reason)
    return BackendRow(info.name, peer, installed_version(peer), info.ops, info.available, info.reason)


def installed_version(distribution: str) -> str:
    """The version of an installed distribution, or ""."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _peer_distribution(name: str) -> str | None:
    try:
        return getattr(loss_core.get_backend(name).module, "PEER", None)
    except loss_core.BackendError:
        return None


def make_call(case: Case, backend: str, weight: Tensor | None = None) -> Call:
    """The call of `case` on `backend`, with everything but the tensors bound.

    Raises:
        BackendUnavailable: if there is no such backend.
        UnsupportedInput: if it has no such op, or the peer is known not to take these options.
    """
    module: Any = loss_core.get_backend(backend).module
    if case.backend_op not in module.OPS:
        raise UnsupportedInput(lacking(case.op))
    if getattr(module, "PEER", None) is None and hasattr(loss_core, case.op):
        return _public_call(case, backend, weight)
    if case.op in LINEAR:
        return _linear_call(case, module, weight)
    if not case.is_loss:
        function = getattr(module, case.op)
        return lambda logits, target: function(logits)
    if case.options.inplace and not getattr(module, "INPLACE", False):
        raise UnsupportedInput("has no option to reuse the logits' memory")
    options = loss_options(case)
    if case.op == "cross_entropy":
        function = module.cross_entropy
        return lambda logits, target: function(logits, target, weight, None, None, options)
    if hasattr(module, "causal_lm_loss"):
        function = module.causal_lm_loss
        return lambda logits, labels: function(logits, labels, weight, options)
    function = module.cross_entropy
    return lambda logits, labels: function(
        logits.view(-1, logits.shape[-1]), shifted(labels), weight, None, None, options
    )


def _linear_call(case: Case, module: Any, weight: Tensor | None) -> Call:
    function, options = module.linear_cross_entropy, loss_options(case)
    if case.options.bias:
        return lambda input, linear_weight, linear_bias, target: function(
            input, linear_weight, target, linear_bias, weight, None, None, options
        )
    return lambda input, linear_weight, target: function(
        input, linear_weight, target, None, weight, None, None, options
    )


def shifted(labels: Tensor | None) -> Tensor:
    """The target of each position of (sequences, time) labels, flat: the next label, none for the last position.

    This is how model code does it around a cross-entropy, and it is timed with it.
    """
    assert labels is not None
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).reshape(-1)


def loss_options(case: Case) -> CrossEntropyOptions:
    """The options of `case` in the form of the backend contract."""
    chosen = case.options
    return CrossEntropyOptions(IGNORE_INDEX, chosen.reduction, chosen.label_smoothing, chosen.z_loss, chosen.softcap)


def _public_call(case: Case, backend: str, weight: Tensor | None) -> Call:
    function: Callable[..., Tensor] = getattr(loss_core, case.op)
    if not case.is_loss:
        return lambda logits, target: function(logits, backend=backend)
    given: dict[str, Any] = {name: value for name, value in asdict(case.options).items() if name in _PUBLIC_OPTIONS}
    default = asdict(Options())
    # Only what a user would write: defaults are left to the function.
    given = {name: value for name, value in given.items() if value != default[name]}
    if weight is not None:
        given["weight"] = weight
    if case.options.bias:
        return lambda input, linear_weight, linear_bias, target: function(
            input, linear_weight, target, linear_bias=linear_bias, backend=backend, **given
        )
    return lambda *tensors: function(*tensors, backend=backend, **given)
