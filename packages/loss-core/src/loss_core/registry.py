"""Finding, loading and choosing backends; the only module that knows entry points.

Nothing is searched or imported when loss_core is imported. The first call that needs a backend reads the entry
points of the group ``loss_core.backends`` and imports the one module it wants; ``list_backends()`` imports all.
A backend that fails to import is remembered with its reason and stands in nobody else's way.

Which backend a call gets: its ``backend=`` argument, else the innermost ``use_backend`` of this thread (or asyncio
task), else ``set_default_backend``, else the environment variable ``LOSS_BACKEND``, else the first of
``AUTOMATIC_ORDER`` that can do the call. Only the last of these passes on to another backend when one cannot.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch

from loss_core.backend import API_VERSION, ENTRY_POINT_GROUP, OPS, REDUCTIONS, BackendUnavailable, UnsupportedInput
from loss_core.environment import variable

T = TypeVar("T")

AUTOMATIC_ORDER = ("triton", "cutedsl", "torch")
"""Backends tried, in this order, for a call that names none."""

OWN_AUTOGRAD = "brings its own autograd, which torch.compile does not see"
"""Why a ready-made op is refused inside torch.compile."""

# A plug-in that claims one of these names does not get it, wherever it stands on sys.path.
_OWNERS = {"torch": "loss-core", "triton": "loss-triton", "cutedsl": "loss-cutedsl"}


class BackendInfo(NamedTuple):
    """One row of ``list_backends()``.

    Attributes:
        name: what ``backend=`` takes.
        distribution: the installed distribution that brings it.
        version: that distribution's version.
        ops: the ops it provides (empty where it could not be imported).
        available: whether it can run on the device that was asked about.
        reason: why not, or "".
    """

    name: str
    distribution: str
    version: str
    ops: tuple[str, ...]
    available: bool
    reason: str


@dataclass
class Backend:
    """A backend found by its entry point; ``module`` and ``ops`` are filled when it is first asked for.

    Attributes:
        name: the entry point's name.
        distribution: name of the distribution that declares it.
        version: version of that distribution.
        module: the imported module, None before loading and after a failed one.
        error: why loading failed, or "".
        ops: the ops that the module provides.
        reductions: the reductions its cross-entropy knows.
    """

    name: str
    distribution: str
    version: str
    entry_point: EntryPoint = field(repr=False)
    module: ModuleType | None = None
    error: str = ""
    ops: tuple[str, ...] = ()
    reductions: tuple[str, ...] = REDUCTIONS
    _loaded: bool = field(default=False, repr=False)
    _reasons: dict[torch.device, str] = field(default_factory=dict, repr=False)

    def load(self) -> None:
        """Import the module once; a failure ends in ``error`` rather than in an exception."""
        if self._loaded:
            return
        with _load_lock:
            if self._loaded:
                return
            try:
                module = self.entry_point.load()
                self.error = _contract_error(module)
                if not self.error:
                    self.module, self.ops = module, tuple(module.OPS)
                    self.reductions = tuple(getattr(module, "REDUCTIONS", REDUCTIONS))
            except KeyboardInterrupt:
                raise
            # SystemExit too: a plug-in that quits while it is imported must not end the program.
            except BaseException as error:
                self.error = f"import failed: {type(error).__name__}: {error}"
            self._loaded = True

    def unavailable_reason(self, device: torch.device) -> str:
        """Why this backend cannot run on `device` here and now, or "" if it can. Asked once per device."""
        reason = self._reasons.get(device)
        if reason is None:
            self.load()
            reason = self.error or self._ask(device)
            self._reasons[device] = reason
        return reason

    def _ask(self, device: torch.device) -> str:
        try:
            return self.module.unavailable_reason(device) or ""  # type: ignore[union-attr]
        except KeyboardInterrupt:
            raise
        # SystemExit too, for it may be here that a plug-in imports what its kernels need.
        except BaseException as error:
            return f"unavailable_reason failed: {type(error).__name__}: {error}"


def _contract_error(module: object) -> str:
    """What keeps `module` from being a backend, or ""."""
    version = getattr(module, "API_VERSION", None)
    if version != API_VERSION:
        return f"speaks version {version} of the backend contract, loss-core speaks {API_VERSION}"
    ops = getattr(module, "OPS", None)
    if not isinstance(ops, (tuple, list)) or not set(ops) <= set(OPS):
        return f"OPS must be a subset of {OPS}, got {ops!r}"
    if not callable(getattr(module, "unavailable_reason", None)):
        return "does not define unavailable_reason(device)"
    return ""


class _Discovered(NamedTuple):
    """The entry points of one look: who has each name, and rows for those who do not get theirs."""

    by_name: dict[str, Backend]
    refused: list[BackendInfo]
    candidates: dict[tuple[str, torch.device, str | None], tuple[Backend, ...]]


_load_lock = threading.RLock()
_discovered: _Discovered | None = None
searches = 0
"""How often ``refresh`` was called: what is kept of an earlier search no longer holds."""
_default: str | None = None
_in_use: ContextVar[str | None] = ContextVar("loss_core_backend", default=None)


def _normalized(distribution: str) -> str:
    return distribution.lower().replace("_", "-").replace(".", "-")


def _described(entry_point: EntryPoint) -> tuple[str, str]:
    """Name and version of the distribution; "unknown" where its metadata are missing or broken."""
    dist: Any = entry_point.dist
    try:
        name, version = (dist.metadata.get(key) for key in ("Name", "Version"))
    # Half an uninstall leaves entry points without METADATA, of which each Python makes something else.
    except Exception:
        name = version = None
    return name or "unknown", version or "unknown"


def _discover() -> _Discovered:
    found: dict[tuple[str, str, str], Backend] = {}
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        distribution, version = _described(entry_point)
        # The same distribution seen twice (editable install, repeated path) is one backend.
        key = (entry_point.name, entry_point.value, _normalized(distribution))
        found.setdefault(key, Backend(entry_point.name, distribution, version, entry_point))
    by_name: dict[str, Backend] = {}
    refused = []
    for backend in found.values():
        owner = _OWNERS.get(backend.name, "")
        if owner and owner != _normalized(backend.distribution):
            reason = f"the name {backend.name!r} is taken by {owner}"
        else:
            holder = by_name.setdefault(backend.name, backend)
            if holder is backend:
                continue
            reason = f"the name {backend.name!r} is taken by {holder.distribution} {holder.version}"
        refused.append(BackendInfo(backend.name, backend.distribution, backend.version, (), False, reason))
    return _Discovered(by_name, refused, {})


def _state() -> _Discovered:
    global _discovered
    state = _discovered
    if state is None:
        with _load_lock:
            state = _discovered = _discovered or _discover()
    return state


def refresh() -> None:
    """Look for backends and ask for their availability again: after an install, or a change of the environment.

    Settings made by ``set_default_backend`` and ``use_backend`` stay. Modules that were imported stay imported.
    """
    global _discovered, searches
    with _load_lock:
        _discovered = None
        searches += 1


def named(name: str) -> Backend:
    """The backend of this name, not loaded.

    Raises:
        BackendUnavailable: if no such backend is installed; the message names those that are.
    """
    backend = _state().by_name.get(name)
    if backend is None:
        known = ", ".join(sorted(_state().by_name)) or "none"
        raise BackendUnavailable(f"no backend named {name!r} is installed; installed: {known}")
    return backend


def get_backend(name: str) -> Backend:
    """Return the loaded backend of this name.

    Args:
        name: the entry point's name, such as ``"torch"``.

    Raises:
        BackendUnavailable: if no such backend is installed or it cannot be imported. Whether it can run on a
            given device is for ``Backend.unavailable_reason`` to say.

    Example:
        >>> import loss_core
        >>> loss_core.get_backend("torch").distribution
        'loss-core'
    """
    backend = named(name)
    backend.load()
    if backend.error:
        raise BackendUnavailable(f"backend {name!r} of {backend.distribution} {backend.version}: {backend.error}")
    return backend


def list_backends(device: torch.device | str | None = None) -> list[BackendInfo]:
    """Describe every backend found, those that cannot run included.

    Args:
        device: what "available" refers to; by default the current accelerator, or the CPU where there is none.

    Returns:
        One ``BackendInfo`` a backend, in the order of automatic selection, then by name.

    Example:
        >>> import loss_core
        >>> [b.available for b in loss_core.list_backends("cpu") if b.name == "torch"]
        [True]
    """
    where = _indexed(torch.device(device)) if device is not None else _default_device()
    state = _state()
    rows = list(state.refused)
    for backend in state.by_name.values():
        reason = backend.unavailable_reason(where)
        rows.append(BackendInfo(backend.name, backend.distribution, backend.version, backend.ops, not reason, reason))
    order = {name: place for place, name in enumerate(AUTOMATIC_ORDER)}
    return sorted(rows, key=lambda row: (order.get(row.name, len(order)), row.name, not row.available))


def _default_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return _indexed(accelerator) if accelerator is not None else torch.device("cpu")


def _indexed(device: torch.device) -> torch.device:
    """`device` as tensors report theirs: with an index, except on the CPU."""
    if device.type in ("cpu", "meta") or device.index is not None or not torch.accelerator.is_available():
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def set_default_backend(name: str | None) -> None:
    """Make `name` the backend of calls that name none, in all threads; None goes back to the automatic choice.

    Raises:
        BackendUnavailable: if no backend of this name is installed.
    """
    global _default
    if name is not None:
        named(name)
    _default = name


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Make `name` the backend of calls that name none, inside a ``with`` block of this thread or asyncio task.

    What ``torch.compile`` compiled chooses when it runs, its backward too: there the block has to be around both. On a
    GPU autograd runs the backward in a thread of its own, which no block reaches; there ``backend=`` or
    ``set_default_backend`` is what a compiled backward follows.

    Raises:
        BackendUnavailable: if no backend of this name is installed.

    Example:
        >>> import torch, loss_core
        >>> with loss_core.use_backend("torch"):
        ...     loss_core.softmax(torch.zeros(2))
        tensor([0.5000, 0.5000])
    """
    named(name)
    token = _in_use.set(name)
    try:
        yield
    finally:
        _in_use.reset(token)


def chosen() -> str | None:
    """The backend that a call has to use which names none, or None for the first that can."""
    return _in_use.get() or _default or variable("LOSS_BACKEND") or None


def candidates(op: str, device: torch.device, name: str | None) -> tuple[Backend, ...]:
    """The backends to try for a call of `op` on `device`, in order: one if the choice is explicit.

    Raises:
        BackendUnavailable: if the backend that was named is not installed or cannot run on `device`, with the
            reason; or if none at all provides the op.
        UnsupportedInput: if the backend that was named lacks `op`.
    """
    name = name or chosen()
    state = _discovered or _state()
    found = state.candidates.get((op, device, name))
    if found is None:
        found = state.candidates[op, device, name] = _find(state, op, device, name)
    return found


def _find(state: _Discovered, op: str, device: torch.device, name: str | None) -> tuple[Backend, ...]:
    if name is not None:
        return (_explicit(op, device, name),)
    found = tuple(
        backend
        for backend in map(state.by_name.get, AUTOMATIC_ORDER)
        if backend is not None and not backend.unavailable_reason(device) and op in backend.ops
    )
    if not found:
        raise BackendUnavailable(f"no installed backend provides {op} on {device}")
    return found


def first_that_can(
    op: str, device: torch.device, name: str | None, call: Callable[..., T], *arguments: Any, compiled: bool = False
) -> T:
    """`call` of the first candidate that does not raise UnsupportedInput, and of the arguments.

    Args:
        op, device, name: as for ``candidates``.
        call: runs the op on a backend, raising UnsupportedInput before anything is written if it does not do the case.
        arguments: what it takes after the backend.
        compiled: whether this is inside torch.compile, where nothing but the message tells which backend it was.

    Raises:
        UnsupportedInput: that of the backend which was named, or one with the reason of every candidate.
        BackendUnavailable: as ``candidates``.
    """
    refused = ""
    for backend in candidates(op, device, name):
        try:
            return call(backend, *arguments)
        except UnsupportedInput as error:
            if name is not None and not compiled:
                raise
            refused += f"\n  {backend.name}: {error}"
    where = " inside torch.compile" if compiled else ""
    raise UnsupportedInput(f"no backend does this {op}{where}:{refused}")


def _explicit(op: str, device: torch.device, name: str) -> Backend:
    backend = named(name)
    reason = backend.unavailable_reason(device)
    if reason:
        raise BackendUnavailable(f"backend {name!r} cannot run on {device}: {reason}")
    if op not in backend.ops:
        raise UnsupportedInput(f"backend {name!r} does not provide {op}; it provides {', '.join(backend.ops)}")
    return backend
