"""A ``CaseRunner`` in a process of its own, which a backend may crash, hang or leave with an unusable GPU context.

The worker says what it is about to do before it does it, so that whoever kills it is known by name. The parent never
touches the GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from loss_bench.cases import Case
from loss_bench.processes import Child
from loss_bench.results import Row
from loss_bench.runner import Announce, BackendLostError, CaseRunner, Failure, Keep, Plan, first_line, keep_nothing


class WorkerError(RuntimeError):
    """The worker process could not start."""


class Worker:
    """Has the interface of ``CaseRunner``; started again by the next case after a backend was lost.

    Args:
        plan: as of ``CaseRunner``.
        device: where.
        announce: told of every step.
        time_limit_s: how long the worker may go without a word.

    Raises:
        WorkerError: if the worker cannot start, with its reason.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        announce: Announce = lambda text, backend: None,
        *,
        time_limit_s: float = 300.0,
    ) -> None:
        self._arguments = (plan, device)
        self._announce = announce
        self._time_limit_s = time_limit_s
        self._child: Child | None = None
        self._start()

    def _start(self) -> Child:
        child = self._child = Child(_serve, *self._arguments)
        try:
            hello = self._await(child, "hello")
        except BackendLostError as error:
            self.close()
            raise WorkerError(f"the worker process did not start: {error.failure[1]}") from error
        except BaseException:
            # After Ctrl-C it would go on loading, and this process would wait for it.
            self.close()
            raise
        if isinstance(hello, str):
            self.close()
            raise WorkerError(hello)
        self.environment, self.backends, self.ceilings = hello
        return child

    def run_case(
        self,
        case: Case,
        excluded: Mapping[str, Failure],
        seconds: float | None = None,
        keep: Keep = keep_nothing,
    ) -> list[Row]:
        """The rows of `case`; see ``CaseRunner.run_case``.

        Raises:
            BackendLostError: if a backend took the worker with it, or was silent for longer than the limit.
        """
        child = self._child or self._start()
        child.connection.send((case, dict(excluded), seconds))
        return self._await(child, "rows", keep)

    def _await(self, child: Child, kind: str, keep: Keep = keep_nothing) -> Any:
        """The worker's next answer of this kind; its announcements and the rows finished before it are passed on."""
        backend = None
        while True:
            if not child.connection.poll(self._time_limit_s):
                self.close()
                raise BackendLostError(backend, ("timeout", f"no sign of life for {self._time_limit_s:.0f} s"))
            try:
                message = child.connection.recv()
            except (EOFError, OSError):
                self._child = None
                raise BackendLostError(backend, ("crashed", child.obituary())) from None
            if message[0] == kind:
                return message[1]
            if message[0] == "lost":
                self.close()
                raise BackendLostError(*message[1])
            if message[0] == "finished":
                keep(message[1])
                continue
            _, text, backend = message
            self._announce(text, backend)

    def close(self) -> None:
        """End the worker."""
        if self._child is not None:
            self._child.end()
            self._child = None


def _serve(connection: Connection, plan: Plan, device: torch.device) -> None:
    def announce(text: str, backend: str | None) -> None:
        connection.send(("step", text, backend))

    def keep(rows: list[Row]) -> None:
        connection.send(("finished", rows))

    try:
        runner = CaseRunner(plan, device, announce)
    except Exception as error:
        connection.send(("hello", first_line(error)))
        return
    # Libraries stay loaded; the collection before each capture of a graph need not look at all of their objects.
    gc.freeze()
    connection.send(("hello", (runner.environment, runner.backends, runner.ceilings)))
    while True:
        try:
            case, excluded, seconds = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("rows", runner.run_case(case, excluded, seconds, keep)))
        except BackendLostError as error:
            connection.send(("lost", (error.backend, error.failure)))
            return
