"""A ``CaseRunner`` in a process of its own, which a backend may crash, hang or leave with an unusable GPU context.

The worker says what it is about to do before it does it, so that whoever kills it is known by name. The parent never
touches the GPU.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from loss_bench.cases import Case
from loss_bench.compiling import one_triton_cache
from loss_bench.results import Row
from loss_bench.runner import Announce, BackendLostError, CaseRunner, Failure, Plan, first_line

_GOODBYE_S = 10.0


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
        self._process: Any = None
        self._start()

    def _start(self) -> None:
        # A forked process cannot use CUDA, and would inherit this one's threads in whatever state they are.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        # Not a daemon: those may have no children, and compilers have some. Without a parent it ends by itself.
        self._process = context.Process(target=_serve, args=(theirs, *self._arguments))
        self._process.start()
        theirs.close()
        try:
            hello = self._await("hello")
        except BackendLostError as error:
            self.close()
            raise WorkerError(f"the worker process did not start: {error.failure[1]}") from error
        if isinstance(hello, str):
            self.close()
            raise WorkerError(hello)
        self.environment, self.backends, self.ceilings = hello

    def run_case(self, case: Case, excluded: Mapping[str, Failure], seconds: float | None = None) -> list[Row]:
        """The rows of `case`; see ``CaseRunner.run_case``.

        Raises:
            BackendLostError: if a backend took the worker with it, or was silent for longer than the limit.
        """
        if self._process is None:
            self._start()
        self._connection.send((case, dict(excluded), seconds))
        return self._await("rows")

    def _await(self, kind: str) -> Any:
        """The worker's next answer of this kind; its announcements are passed on."""
        backend = None
        while True:
            if not self._connection.poll(self._time_limit_s):
                self.close()
                raise BackendLostError(backend, ("timeout", f"no sign of life for {self._time_limit_s:.0f} s"))
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                raise BackendLostError(backend, ("crashed", self._obituary())) from None
            if message[0] == kind:
                return message[1]
            if message[0] == "lost":
                self.close()
                raise BackendLostError(*message[1])
            _, text, backend = message
            self._announce(text, backend)

    def _obituary(self) -> str:
        self._process.join(_GOODBYE_S)
        code = self._process.exitcode
        self.close()
        if code is not None and code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with exit status {code}"

    def close(self) -> None:
        """End the worker."""
        if self._process is not None:
            self._process.kill()
            self._process.join(_GOODBYE_S)
            self._connection.close()
            self._process = None


def _serve(connection: Connection, plan: Plan, device: torch.device) -> None:
    # Ctrl-C goes to the whole group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def announce(text: str, backend: str | None) -> None:
        connection.send(("step", text, backend))

    one_triton_cache()
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
            connection.send(("rows", runner.run_case(case, excluded, seconds)))
        except BackendLostError as error:
            connection.send(("lost", (error.backend, error.failure)))
            return
