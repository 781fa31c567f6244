"""One case on every backend, in this process.

Every backend is checked against float64, then the backends that were right take turns, a part of the iterations each
time, so that a drift of the clocks hits all of them alike.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from loss_core.backend import BackendUnavailable, UnsupportedInput
from torch import Tensor

from loss_bench import measure
from loss_bench.calls import BackendRow, Call, check_installed, find_backends, make_call, named_backends
from loss_bench.cases import LINEAR, PASSES, Case, minimal_bytes, minimal_flop
from loss_bench.check import Verdict, check
from loss_bench.inputs import Inputs, random_inputs, read_logits, sets_needed
from loss_bench.results import INPUTS_TOO_LARGE, OUT_OF_MEMORY, Row, add_speedups, device_name, environment, new_row

BASELINE = "torch-nn"
"""What speed-ups refer to: plain ``torch.nn.functional``."""

Result = TypeVar("Result")

_TINY_CALLS = 20
_ROUNDS = 3
_MOST_ITERATIONS = 60
_DRIFT = 0.05
# Of what is left of a case's seconds once its results are checked; the rest is for memory and host time.
_TIMED_SHARE = 0.7
# A capture takes a tenth of a second or more; these two passes say what there is to say.
_GRAPH_PASSES = ("forward+backward", "no-grad")

Announce = Callable[[str, "str | None"], None]
"""(what is being done, the backend that is being run, if any)."""

Failure = tuple[str, str]
"""(status, reason) of ``results.Row``."""

Keep = Callable[[list[Row]], None]
"""Takes the rows of a case that are finished while others are still to come."""


def keep_nothing(rows: list[Row]) -> None:
    """A ``Keep`` for those who wait for the whole case."""


@dataclass(frozen=True)
class Plan:
    """What is done with each case.

    Attributes:
        backends: names to run; empty for all.
        passes: of ``cases.PASSES``.
        iterations: timed iterations of each pass; None for as many as fit ``budget_ms``.
        warmup: iterations before them.
        budget_ms: time for one pass of one backend, where `iterations` is None.
        seed: of the inputs.
        logits: file of logits and labels to use in place of random ones.
        graph: whether passes are timed as CUDA graphs too, on a GPU.
    """

    backends: tuple[str, ...] = ()
    passes: tuple[str, ...] = PASSES
    iterations: int | None = None
    warmup: int = 5
    budget_ms: float = 300.0
    seed: int = 0
    logits: Path | None = None
    graph: bool = True


class BackendLostError(Exception):
    """A backend took its process or the GPU's context with it, or did not come back.

    Args:
        backend: its name; None if no backend was being run.
        failure: what to record for it.
    """

    def __init__(self, backend: str | None, failure: Failure) -> None:
        super().__init__(f"{backend}: {': '.join(failure)}")
        self.backend = backend
        self.failure = failure


@dataclass
class _Contestant:
    """A backend on the case in hand."""

    backend: BackendRow
    call: Call
    inputs: Inputs
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    pristine: list[tuple[Tensor, ...]] | None = None
    samples: dict[str, list[float]] = field(default_factory=dict)
    failure: tuple[str, str] | None = None

    def work(self, pass_: str) -> measure.PassWork:
        overwrites = any(verdict.overwrites for verdict in self.verdicts.values())
        return measure.PassWork(self.call, self.inputs, pass_, self.pristine if overwrites else None)


class CaseRunner:
    """Runs cases by a ``Plan``.

    Args:
        plan: how.
        device: where.
        announce: told of every step.
        timer: replaces the device's own clock, for tests.

    Attributes:
        environment: see ``results.environment``.
        backends: those of the plan, with their state on the device.
        ceilings: measured in this process.

    Raises:
        BackendUnavailable: if the plan names a backend that is not installed.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        announce: Announce = lambda text, backend: None,
        *,
        timer: measure.Timer | None = None,
    ) -> None:
        self._plan = plan
        self._device = device
        self._announce = announce
        self._device_name = device_name(device)
        # First of all: what this process does to the device itself must not count as somebody else's work.
        self.environment = environment(device)
        if device.type == "cuda":
            # Events, allocations and peers' launches all go to the current device.
            torch.cuda.set_device(device)
        self._timer = timer or measure.make_timer(device)
        self._real = read_logits(plan.logits) if plan.logits else None
        self._pass_ms: float | None = None
        self._matmul_rates: dict[torch.dtype, float] = {}
        self._host_us: dict[tuple[str, Case, str], measure.HostTime | None] = {}
        announce("loading the backends", None)
        self.backends = chosen_backends(plan.backends, device)
        announce("copy bandwidth", None)
        self.ceilings = {"copy_gb_s": measure.copy_gb_s(device, self._timer)}
        if device.type == "cuda":
            self.ceilings["matmul_tflop_s"] = self._matmul_tflop_s(torch.bfloat16)
            self._release()

    def close(self) -> None:
        """Nothing is held but memory."""

    def run_case(
        self,
        case: Case,
        excluded: Mapping[str, Failure],
        seconds: float | None = None,
        keep: Keep = keep_nothing,
    ) -> list[Row]:
        """The rows of `case`; a backend that is `excluded` is not run and has that recorded.

        If `seconds` is given, there are as few iterations as it takes to keep to them. The checks are never cut.
        `keep` is given the rows of those that cannot take part, and of each pass once it is timed.

        Raises:
            BackendLostError: if a backend left the GPU's context unusable. This process can then run nothing more.
        """
        rows: list[Row] = []
        begin = time.monotonic()
        self._announce(f"{case}: inputs", None)
        try:
            inputs = self._inputs(case)
        except (RuntimeError, MemoryError) as error:
            if _lacks_memory(error):
                self._release()
                failure = ("unsupported", INPUTS_TOO_LARGE)
                return [row for backend in self.backends for row in self._failed(case, backend, failure)]
            # No backend has run yet: the device itself is unusable.
            raise BackendLostError(None, ("error", first_line(error))) from error
        contestants = []
        for backend in self.backends:
            self._announce(f"{case}: checking {backend.name}", backend.name)
            entered = self._enter(case, backend, inputs, excluded)
            if isinstance(entered, _Contestant):
                contestants.append(entered)
            else:
                rows += self._failed(case, backend, entered)
                self._release()
        self._pass_ms = None
        if seconds is not None:
            left = max(0.0, seconds - (time.monotonic() - begin))
            self._pass_ms = _TIMED_SHARE * left * 1e3 / max(1, len(contestants) * len(self._plan.passes))
        keep(rows)
        for pass_ in self._plan.passes:
            timed = self._time_pass(case, pass_, contestants)
            add_speedups(timed, BASELINE)
            keep(timed)
            rows += timed
        self._release()
        self._note_drift(rows)
        return rows

    def _note_drift(self, rows: list[Row]) -> None:
        """Say so in every row if a copy no longer runs as it did: a clock moved, or somebody else is on the GPU."""
        if self._device.type != "cuda":
            return
        ratio = measure.copy_gb_s(self._device, self._timer) / self.ceilings["copy_gb_s"]
        self._release()
        if abs(ratio - 1) > _DRIFT:
            for row in rows:
                row.add_note(f"a copy ran at {ratio:.0%} of its first speed")

    def _inputs(self, case: Case) -> Inputs:
        sets = sets_needed(case, measure.l2_bytes(self._device))
        if self._real is not None:
            return self._real.to_inputs(case, self._device, seed=self._plan.seed, sets=sets)
        return random_inputs(case, self._device, seed=self._plan.seed, sets=sets)

    def _release(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _failed(self, case: Case, backend: BackendRow, failure: Failure) -> list[Row]:
        rows = [new_row(case, pass_, backend, self._device_name) for pass_ in self._plan.passes]
        for row in rows:
            row.status, row.reason = failure
        return rows

    def _enter(
        self, case: Case, backend: BackendRow, inputs: Inputs, excluded: Mapping[str, Failure]
    ) -> _Contestant | Failure:
        """`backend` checked on `case`, or why it cannot take part."""
        failure = excluded.get(backend.name) or (None if backend.available else ("unavailable", backend.reason))
        if failure is not None:
            return failure
        contestant, failure = self._attempt(backend, partial(self._checked, case, backend, inputs))
        return contestant or failure or ("error", "")

    def _attempt(self, backend: BackendRow, action: Callable[[], Result]) -> tuple[Result | None, Failure | None]:
        """``attempt``, and a look at whether the GPU is still there after a failure."""
        result, failure = attempt(action)
        if failure is not None and failure[0] == "error" and self._device.type == "cuda":
            try:
                torch.cuda.synchronize(self._device)
            except RuntimeError as error:
                raise BackendLostError(backend.name, ("crashed", f"{failure[1]}; {first_line(error)}")) from error
        return result, failure

    def _checked(self, case: Case, backend: BackendRow, inputs: Inputs) -> _Contestant:
        contestant = _Contestant(backend, make_call(case, backend.name, inputs.weight), inputs)
        for kind, grad in (("grad", True), ("no-grad", False)):
            if any((pass_ == "no-grad") != grad for pass_ in self._plan.passes):
                contestant.verdicts[kind] = check(case, contestant.call, inputs, grad=grad, seed=self._plan.seed)
        if any(verdict.overwrites for verdict in contestant.verdicts.values()):
            sets = range(len(inputs))
            contestant.pristine = [tuple(leaf.detach().clone() for leaf in inputs.leaves(which)) for which in sets]
        return contestant

    def _time_pass(self, case: Case, pass_: str, contestants: list[_Contestant]) -> list[Row]:
        kind = "no-grad" if pass_ == "no-grad" else "grad"
        timed = [c for c in contestants if c.verdicts[kind].right and c.failure is None]
        counts = {}
        for contestant in timed:
            self._announce(f"{case} {pass_}: {contestant.backend.name}", contestant.backend.name)
            action = partial(self._iterations, contestant, pass_)
            count, contestant.failure = self._attempt(contestant.backend, action)
            counts[contestant.backend.name] = count or 0
        for turn in range(_ROUNDS):
            for contestant in timed:
                if contestant.failure is None:
                    self._turn(case, contestant, pass_, turn, counts[contestant.backend.name])
        self._time_host(case.tiny, pass_, [c.backend for c in timed if c.failure is None])
        return [self._finished(case, pass_, kind, contestant) for contestant in contestants]

    def _iterations(self, contestant: _Contestant, pass_: str) -> int:
        estimate = self._timer.estimate(contestant.work(pass_))
        wanted = self._plan.iterations
        if wanted is None:
            budget = self._plan.budget_ms
            wanted = measure.planned_iterations(estimate, budget, least=2 * _ROUNDS, most=_MOST_ITERATIONS)
        if self._pass_ms is None:
            return wanted
        return measure.planned_iterations(estimate, self._pass_ms, least=min(wanted, _ROUNDS), most=wanted)

    def _turn(self, case: Case, contestant: _Contestant, pass_: str, turn: int, count: int) -> None:
        self._announce(f"{case} {pass_}: {contestant.backend.name}", contestant.backend.name)
        part = count * (turn + 1) // _ROUNDS - count * turn // _ROUNDS
        if part == 0:
            return
        # Few iterations leave the first turns without any.
        warmup = 1 if contestant.samples.get(pass_) else self._plan.warmup
        action = partial(self._timer.time, contestant.work(pass_), part, warmup)
        samples, contestant.failure = self._attempt(contestant.backend, action)
        contestant.samples.setdefault(pass_, []).extend(samples or ())

    def _finished(self, case: Case, pass_: str, kind: str, contestant: _Contestant) -> Row:
        row = new_row(case, pass_, contestant.backend, self._device_name)
        verdict = contestant.verdicts[kind]
        row.loss_error = verdict.loss_error
        row.grad_error = verdict.grad_error
        if verdict.overwrites:
            row.note = "overwrites its inputs" if case.op in LINEAR else "overwrites the logits"
        if not verdict.right:
            row.status, row.reason = "wrong", verdict.reason
        elif contestant.failure is not None:
            row.status, row.reason = contestant.failure
        else:
            self._fill(case, row, contestant)
        return row

    def _fill(self, case: Case, row: Row, contestant: _Contestant) -> None:
        self._announce(f"{case} {row.pass_}: memory of {row.backend}", row.backend)
        summary = measure.summarize(contestant.samples[row.pass_])
        row.median_ms, row.samples = summary.median, summary.samples
        row.p20_ms, row.p80_ms, row.low_ms, row.high_ms = summary.p20, summary.p80, summary.low, summary.high
        if summary.unsteady:
            row.add_note("unsteady: compare with care")
        if self._plan.graph and self._device.type == "cuda" and row.pass_ in _GRAPH_PASSES:
            self._fill_graph(row, contestant, summary.samples)
        self._fill_shares(case, row, contestant.inputs.kept_rows(case))
        row.peak_mib, _ = attempt(lambda: measure.peak_mib(contestant.work(row.pass_), self._device))
        host = self._host_us.get((row.backend, case.tiny, row.pass_))
        if host is not None:
            row.host_us, row.host_least_us = host.median, host.least

    def _fill_shares(self, case: Case, row: Row, kept_rows: float | None) -> None:
        """How near the times come to what bounds the pass."""
        copy, bytes_ = self.ceilings["copy_gb_s"], minimal_bytes(case, row.pass_, kept_rows)
        if bytes_ is not None and row.median_ms:
            row.gb_s = gb_per_second(bytes_, row.median_ms)
            row.copy_share = row.gb_s / copy
            row.graph_share = gb_per_second(bytes_, row.graph_ms) / copy if row.graph_ms else None
        flop = minimal_flop(case, row.pass_, kept_rows)
        if flop is not None and row.median_ms:
            most = self._matmul_tflop_s(case.torch_dtype)
            row.tflop_s = tflop_per_second(flop, row.median_ms)
            row.matmul_share = row.tflop_s / most
            row.graph_matmul_share = tflop_per_second(flop, row.graph_ms) / most if row.graph_ms else None

    def _matmul_tflop_s(self, dtype: torch.dtype) -> float:
        """The rate of a matrix product in `dtype`, measured once."""
        if dtype not in self._matmul_rates:
            self._matmul_rates[dtype] = measure.matmul_tflop_s(self._device, self._timer, dtype)
        return self._matmul_rates[dtype]

    def _fill_graph(self, row: Row, contestant: _Contestant, iterations: int) -> None:
        def replay() -> float:
            work = measure.GraphWork(contestant.work(row.pass_))
            return measure.summarize(self._timer.time(work, iterations, 2)).median

        row.graph_ms, failure = self._attempt(contestant.backend, replay)
        if failure is not None:
            row.add_note("cannot be captured in a CUDA graph")
            self._release()

    def _time_host(self, tiny: Case, pass_: str, backends: list[BackendRow]) -> None:
        """The host time of those of `backends` whose time on this tiny case is not known yet, side by side."""
        names = [backend.name for backend in backends if (backend.name, tiny, pass_) not in self._host_us]
        if not names:
            return
        inputs = random_inputs(tiny, self._device, seed=self._plan.seed, sets=_TINY_CALLS)
        works = {}
        for name in names:
            self._announce(f"{tiny} {pass_}: host time of {name}", name)
            call, _ = attempt(partial(make_call, tiny, name, inputs.weight))
            # What was overwritten is not restored: only the host is timed, and the values do not matter to it.
            work = None if call is None else measure.PassWork(call, inputs, pass_)
            # Alone first, so that it is known who crashes or hangs.
            if work and measure.host_microseconds({name: work}, self._device, calls=_TINY_CALLS, batches=1):
                works[name] = work
        self._announce(f"{tiny} {pass_}: host time", None)
        found = measure.host_microseconds(works, self._device, calls=_TINY_CALLS)
        # None is kept too: what raised here would raise again with the next case.
        self._host_us |= {(name, tiny, pass_): found.get(name) for name in names}


def chosen_backends(names: Sequence[str], device: torch.device) -> list[BackendRow]:
    """The backends of these names, or all, with their state on `device`.

    Raises:
        BackendUnavailable: if one of the names is not installed.
    """
    check_installed(names)
    if names and (rows := named_backends(names, device)) is not None:
        return rows
    found = find_backends(device)
    by_name = {backend.name: backend for backend in found}
    return [by_name[name] for name in names] or found


def gb_per_second(bytes_: float, milliseconds: float) -> float:
    """Bytes over a time, in units of 10**9 bytes a second."""
    return bytes_ / (milliseconds * 1e-3) / 1e9


def tflop_per_second(flop: float, milliseconds: float) -> float:
    """Operations over a time, in units of 10**12 a second."""
    return flop / (milliseconds * 1e-3) / 1e12


def attempt(action: Callable[[], Result]) -> tuple[Result | None, Failure | None]:
    """The result of `action` and None, or None and the status and reason of its exception."""
    try:
        return action(), None
    except (UnsupportedInput, NotImplementedError) as error:
        return None, ("unsupported", first_line(error))
    except BackendUnavailable as error:
        return None, ("unavailable", first_line(error))
    except Exception as error:
        if _lacks_memory(error):
            return None, ("unsupported", OUT_OF_MEMORY)
        return None, ("error", f"{type(error).__name__}: {first_line(error)}")


def _lacks_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # On a CPU, and for sizes beyond 64 bits, torch has no exception of its own.
    words = ("DefaultCPUAllocator", "Storage size calculation overflowed")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def first_line(error: BaseException) -> str:
    """The first line of an exception's message that says something."""
    # Compilers colour what they say for a terminal.
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
