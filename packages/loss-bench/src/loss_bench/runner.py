"""The loop over cases, backends and passes.

For each case: every backend is checked against float64, then the backends that were right take turns, a part of the
iterations each time, so that a drift of the clocks hits all of them alike.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TypeVar

import torch
from loss_core.backend import BackendUnavailable, UnsupportedInput
from torch import Tensor

from loss_bench import measure
from loss_bench.calls import BackendRow, Call, find_backends, make_call
from loss_bench.cases import PASSES, Case, minimal_bytes
from loss_bench.check import Verdict, check
from loss_bench.inputs import Inputs, RealInputs, random_inputs, sets_needed
from loss_bench.results import Report, Row, add_speedups, device_name, environment, new_row

BASELINE = "torch-nn"
"""What speed-ups refer to: plain ``torch.nn.functional``."""

Result = TypeVar("Result")

TINY_ROWS, TINY_CLASSES = 64, 512
_TINY_CALLS = 20
_ROUNDS = 3

Progress = Callable[[str, float], None]
"""(what is being done, share of the run that is done)."""


@dataclass
class Plan:
    """What a run does.

    Attributes:
        cases: in order.
        backends: names to run; empty for all that are available.
        passes: of ``cases.PASSES``.
        iterations: timed iterations of each pass; None for as many as fit ``budget_ms``.
        warmup: iterations before them.
        budget_ms: time for one pass of one backend, where `iterations` is None.
        seed: of the inputs.
        real: logits and labels to use in place of random ones.
    """

    cases: Sequence[Case]
    backends: Sequence[str] = ()
    passes: Sequence[str] = PASSES
    iterations: int | None = None
    warmup: int = 5
    budget_ms: float = 300.0
    seed: int = 0
    real: RealInputs | None = None


@dataclass
class _Contestant:
    """A backend on the case in hand."""

    backend: BackendRow
    call: Call
    inputs: Inputs
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    pristine: list[Tensor] | None = None
    samples: dict[str, list[float]] = field(default_factory=dict)
    failure: tuple[str, str] | None = None

    def work(self, pass_: str) -> measure.PassWork:
        overwrites = any(verdict.overwrites for verdict in self.verdicts.values())
        return measure.PassWork(self.call, self.inputs, pass_, self.pristine if overwrites else None)


class Runner:
    """Runs a ``Plan`` and keeps its ``Report``, which is whole after every case.

    Args:
        plan: what to do.
        device: where.
        timer: replaces the device's own clock, for tests.
        progress: told of every step.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        *,
        timer: measure.Timer | None = None,
        progress: Progress = lambda text, share: None,
    ) -> None:
        self._plan = plan
        self._device = device
        self._progress = progress
        self._device_name = device_name(device)
        self._timer = timer or measure.make_timer(device)
        self._host_us: dict[tuple[str, Case, str], float | None] = {}
        self._backends = self._chosen(find_backends(device))
        self.report = Report(environment(device))
        self.report.backends = [asdict(backend) for backend in self._backends]
        self.report.settings = {
            name: getattr(plan, name) for name in ("iterations", "warmup", "budget_ms", "seed", "passes")
        } | {"baseline": BASELINE, "real_inputs": plan.real is not None}

    def _chosen(self, found: list[BackendRow]) -> list[BackendRow]:
        if not self._plan.backends:
            return found
        by_name = {backend.name: backend for backend in found}
        missing = BackendRow("", "", "", (), False, "not installed")
        return [
            by_name.get(name) or BackendRow(name, *list(asdict(missing).values())[1:]) for name in self._plan.backends
        ]

    def run(self) -> Report:
        """Measure everything."""
        self._progress("copy bandwidth", 0.0)
        self.report.ceilings = {"copy_gb_s": measure.copy_gb_s(self._device, self._timer)}
        for index, case in enumerate(self._plan.cases):
            self._run_case(case, index / len(self._plan.cases))
            add_speedups(self.report.rows, BASELINE)
        self._progress("done", 1.0)
        return self.report

    def _run_case(self, case: Case, share: float) -> None:
        self._progress(f"{case}: inputs", share)
        try:
            inputs = self._inputs(case)
        except torch.OutOfMemoryError:
            self._skip_all(case, "the inputs do not fit into the device's memory")
            return
        contestants = []
        for backend in self._backends:
            self._progress(f"{case}: checking {backend.name}", share)
            contestant = self._enter(case, backend, inputs)
            if contestant is not None:
                contestants.append(contestant)
        for pass_ in self._plan.passes:
            self._time_pass(case, pass_, contestants, share)
        self._release()

    def _inputs(self, case: Case) -> Inputs:
        sets = sets_needed(case, measure.l2_bytes(self._device))
        if self._plan.real is not None:
            return self._plan.real.to_inputs(case, self._device, sets=sets)
        return random_inputs(case, self._device, seed=self._plan.seed, sets=sets)

    def _skip_all(self, case: Case, reason: str) -> None:
        for backend in self._backends:
            self._record(case, self._plan.passes, backend, "unsupported", reason)
        self._release()

    def _release(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _record(self, case: Case, passes: Iterable[str], backend: BackendRow, status: str, reason: str) -> None:
        for pass_ in passes:
            row = new_row(case, pass_, backend, self._device_name)
            row.status, row.reason = status, reason
            self.report.rows.append(row)

    def _enter(self, case: Case, backend: BackendRow, inputs: Inputs) -> _Contestant | None:
        """`backend` checked on `case`, or None with its reason recorded."""
        failure = self._known_failure(case, backend)
        if failure is None:
            contestant, failure = attempt(lambda: self._checked(case, backend, inputs))
            if contestant is not None:
                return contestant
        assert failure is not None
        self._record(case, self._plan.passes, backend, *failure)
        self._release()
        return None

    def _known_failure(self, case: Case, backend: BackendRow) -> tuple[str, str] | None:
        if not backend.available:
            return "unavailable", backend.reason
        if case.op not in backend.ops:
            return "unsupported", f"has no {case.op}"
        return None

    def _checked(self, case: Case, backend: BackendRow, inputs: Inputs) -> _Contestant:
        contestant = _Contestant(backend, make_call(case, backend.name, inputs.weight), inputs)
        for kind, grad in (("grad", True), ("no-grad", False)):
            if any((pass_ == "no-grad") != grad for pass_ in self._plan.passes):
                contestant.verdicts[kind] = check(case, contestant.call, inputs, grad=grad, seed=self._plan.seed)
        if any(verdict.overwrites for verdict in contestant.verdicts.values()):
            contestant.pristine = [logits.detach().clone() for logits in inputs.logits]
        return contestant

    def _time_pass(self, case: Case, pass_: str, contestants: list[_Contestant], share: float) -> None:
        kind = "no-grad" if pass_ == "no-grad" else "grad"
        timed = [c for c in contestants if c.verdicts[kind].right and c.failure is None]
        counts = {}
        for contestant in list(timed):
            self._progress(f"{case} {pass_}: {contestant.backend.name}", share)
            count, contestant.failure = attempt(partial(self._iterations, contestant, pass_))
            counts[contestant.backend.name] = count or 0
        for turn in range(_ROUNDS):
            for contestant in timed:
                if contestant.failure is None:
                    self._turn(contestant, pass_, turn, counts[contestant.backend.name])
        for contestant in contestants:
            self._finish(case, pass_, kind, contestant)

    def _iterations(self, contestant: _Contestant, pass_: str) -> int:
        estimate = self._timer.estimate(contestant.work(pass_))
        if self._plan.iterations is not None:
            return self._plan.iterations
        return measure.planned_iterations(estimate, self._plan.budget_ms, least=2 * _ROUNDS, most=60)

    def _turn(self, contestant: _Contestant, pass_: str, turn: int, count: int) -> None:
        part = count * (turn + 1) // _ROUNDS - count * turn // _ROUNDS
        if part == 0:
            return
        warmup = self._plan.warmup if turn == 0 else 1
        samples, contestant.failure = attempt(lambda: self._timer.time(contestant.work(pass_), part, warmup))
        contestant.samples.setdefault(pass_, []).extend(samples or ())

    def _finish(self, case: Case, pass_: str, kind: str, contestant: _Contestant) -> None:
        row = new_row(case, pass_, contestant.backend, self._device_name)
        verdict = contestant.verdicts[kind]
        row.loss_error = verdict.loss_error
        row.grad_error = verdict.grad_error
        row.note = "overwrites the logits" if verdict.overwrites else ""
        if not verdict.right:
            row.status, row.reason = "wrong", verdict.reason
        elif contestant.failure is not None:
            row.status, row.reason = contestant.failure
        else:
            self._fill(case, row, contestant)
        self.report.rows.append(row)

    def _fill(self, case: Case, row: Row, contestant: _Contestant) -> None:
        summary = measure.summarize(contestant.samples[row.pass_])
        row.median_ms, row.samples = summary.median, summary.samples
        row.p20_ms, row.p80_ms, row.low_ms, row.high_ms = summary.p20, summary.p80, summary.low, summary.high
        bytes_ = minimal_bytes(case, row.pass_)
        if bytes_ is not None and summary.median > 0:
            row.gb_s = gb_per_second(bytes_, summary.median)
            row.copy_share = row.gb_s / self.report.ceilings["copy_gb_s"]
        row.peak_mib, _ = attempt(lambda: measure.peak_mib(contestant.work(row.pass_), self._device))
        row.host_us = self._host_time(case, row.pass_, contestant.backend)

    def _host_time(self, case: Case, pass_: str, backend: BackendRow) -> float | None:
        tiny = Case(case.op, TINY_ROWS, TINY_CLASSES, case.dtype, case.options)
        key = (backend.name, tiny, pass_)
        if key not in self._host_us:
            self._host_us[key], _ = attempt(lambda: self._measure_host(tiny, pass_, backend))
        return self._host_us[key]

    def _measure_host(self, tiny: Case, pass_: str, backend: BackendRow) -> float:
        inputs = random_inputs(tiny, self._device, seed=self._plan.seed, sets=_TINY_CALLS)
        # Restoring overwritten logits is not needed: only the host is timed, and the values do not matter to it.
        work = measure.PassWork(make_call(tiny, backend.name, inputs.weight), inputs, pass_)
        return measure.host_microseconds(work, self._device, calls=_TINY_CALLS)


def gb_per_second(bytes_: int, milliseconds: float) -> float:
    """Bytes over a time, in units of 10**9 bytes a second."""
    return bytes_ / (milliseconds * 1e-3) / 1e9


def attempt(action: Callable[[], Result]) -> tuple[Result | None, tuple[str, str] | None]:
    """The result of `action` and None, or None and the status and reason of its exception."""
    try:
        return action(), None
    except (UnsupportedInput, NotImplementedError) as error:
        return None, ("unsupported", _first_line(error))
    except BackendUnavailable as error:
        return None, ("unavailable", _first_line(error))
    except torch.OutOfMemoryError:
        return None, ("unsupported", "out of memory")
    except Exception as error:
        return None, ("error", f"{type(error).__name__}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
