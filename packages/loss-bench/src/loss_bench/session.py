"""A whole run: all cases, what is resumed, what becomes of a backend that was lost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

from loss_bench.calls import BackendRow
from loss_bench.cases import Case
from loss_bench.processes import MOST_LOSSES, not_again
from loss_bench.results import Report, Row, new_row
from loss_bench.runner import BASELINE, BackendLostError, Failure, Keep, Plan, keep_nothing


class Executor(Protocol):
    """``CaseRunner`` or ``Worker``."""

    environment: dict[str, Any]
    backends: list[BackendRow]
    ceilings: dict[str, float]

    def run_case(
        self,
        case: Case,
        excluded: Mapping[str, Failure],
        seconds: float | None = None,
        keep: Keep = keep_nothing,
    ) -> list[Row]:
        """The rows of `case`, in about `seconds`; `keep` is given those that are finished before the others."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class Session:
    """Runs cases and keeps their ``report``, which is whole after each of them.

    In between it holds the finished rows of the case in hand too, as ``interrupted``, for whoever ends the run there.

    Args:
        executor: what runs a case.
        plan: how.
        cases: in order.
        earlier: a report whose finished cases are taken over rather than measured again. Whatever else it holds stays
            in the report too, so that it can be written over the file that it was read from.
        after_case: called with the number of cases done and the report.
        deadline: moment of `now` at which all cases should be done. What is left is shared out evenly among the cases
            that are left, and becomes fewer iterations.
        now: seconds of a clock.

    Raises:
        ValueError: if `earlier` is of another device, or its rows of inputs of another seed.
    """

    def __init__(
        self,
        executor: Executor,
        plan: Plan,
        cases: Sequence[Case],
        *,
        earlier: Report | None = None,
        after_case: Callable[[int, Report], None] = lambda done, report: None,
        deadline: float | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._plan = plan
        self._cases = cases
        self._after_case = after_case
        self._deadline = deadline
        self._now = now
        self._losses: Counter[str] = Counter()
        self.report = Report(executor.environment, ceilings=executor.ceilings)
        self.report.backends = [asdict(backend) for backend in executor.backends]
        self.report.settings = {**_settings(plan), "baseline": BASELINE}
        self._earlier = self._fitting(earlier)
        if earlier is not None:
            self.report.take_over(earlier)
        self._found: dict[tuple[object, ...], Row] = {}
        self._add([])

    def _fitting(self, earlier: Report | None) -> dict[tuple[object, ...], Row]:
        if earlier is None:
            return {}
        earlier.check_device(self.report.environment["device"])
        earlier.check_seed("warmup", self._plan.seed, "rows")
        return {row.key: row for row in earlier.rows}

    def run(self) -> Report:
        """Measure what is not there yet."""
        for done, case in enumerate(self._cases):
            rows = self._taken_over(case) or self._measured(case, len(self._cases) - done)
            self._add(rows)
            self._after_case(done + 1, self.report)
        return self.report

    def _add(self, rows: Sequence[Row]) -> None:
        self._found |= {row.key: row for row in rows}
        others = (row for key, row in self._earlier.items() if key not in self._found)
        self.report.rows = [*self._found.values(), *others]

    def _add_unfinished(self, rows: Sequence[Row]) -> None:
        self._add([replace(row, interrupted=True) for row in rows])

    def _blank_rows(self, case: Case) -> list[Row]:
        device = self.report.environment["device"]
        return [new_row(case, pass_, b, device) for b in self._executor.backends for pass_ in self._plan.passes]

    def _taken_over(self, case: Case) -> list[Row]:
        """The earlier rows of `case`, if all of them are there and still hold."""
        rows = [self._earlier.get(row.key) for row in self._blank_rows(case)]
        held = [row for row in rows if row is not None and self._holds(row)]
        return held if len(held) == len(rows) else []

    def _holds(self, row: Row) -> bool:
        """Whether a new measurement would be of the same thing: another version, or one that can run now, is not.

        A row of an interrupted case never does: its case is measured again as a whole.
        """
        backend = next(backend for backend in self._executor.backends if backend.name == row.backend)
        return backend.stands(row.version, row.status) and not row.interrupted

    def _measured(self, case: Case, cases_left: int) -> list[Row]:
        excluded: dict[str, Failure] = {
            name: not_again(count) for name, count in self._losses.items() if count >= MOST_LOSSES
        }
        # Each turn of the loop but the last loses one backend.
        for _ in range(len(self._executor.backends) + 1):
            try:
                return self._executor.run_case(case, excluded, self._seconds(cases_left), self._add_unfinished)
            except BackendLostError as error:
                if error.backend is None or error.backend in excluded:
                    return self._all_failed(case, excluded, error.failure)
                excluded[error.backend] = error.failure
                self._losses[error.backend] += 1
        return self._all_failed(case, excluded, ("error", "every backend was lost"))

    def _seconds(self, cases_left: int) -> float | None:
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - self._now()) / cases_left

    def _all_failed(self, case: Case, excluded: Mapping[str, Failure], failure: Failure) -> list[Row]:
        rows = self._blank_rows(case)
        for row in rows:
            row.status, row.reason = excluded.get(row.backend, failure)
        return rows


def _settings(plan: Plan) -> dict[str, Any]:
    pairs = asdict(plan)
    return {name: str(value) if name == "logits" and value else value for name, value in pairs.items()}
