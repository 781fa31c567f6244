"""Tasks in processes of their own, which a backend may crash, hang or leave with an unusable GPU context."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from loss_bench.measure import synchronize
from loss_bench.runner import Failure, attempt

MOST_LOSSES = 2
"""A backend that took a process with it this often is not tried again: a new process takes many seconds."""

_GOODBYE_S = 10.0
_MOST_JOBS = 8


class Task(Protocol):
    """Something that one backend has to do; has to be picklable."""

    @property
    def backend(self) -> str:
        """The backend's name."""
        ...


AnyTask = TypeVar("AnyTask", bound=Task)
Result = TypeVar("Result")

Tell = Callable[[str, float], None]
"""(what is being done, the share of the task that is done)."""

Work = Callable[[AnyTask, torch.device, Tell], Result]


@dataclass(frozen=True)
class Done(Generic[AnyTask, Result]):
    """What became of a task.

    Attributes:
        task: the task.
        seconds: that it took.
        result: what the work returned; None if it failed.
        failure: status and reason, as in ``results.Row``; None if it did not fail.
    """

    task: AnyTask
    seconds: float
    result: Result | None
    failure: Failure | None


class Child:
    """A process at the other end of ``connection``, which leaves Ctrl-C to this one and has Triton's usual cache.

    Args:
        target: called with the other end and with `arguments`.
        arguments: what it gets.
    """

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        # A forked process cannot use CUDA, and would inherit this one's threads in whatever state they are.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        # Not a daemon: those may have no children, and compilers have some. Without a parent it ends by itself.
        self._process = context.Process(target=_live, args=(target, theirs, *arguments))
        self._process.start()
        theirs.close()

    def obituary(self) -> str:
        """End the process if it has not ended, and say how it did."""
        self._process.join(_GOODBYE_S)
        code = self._process.exitcode
        self.end()
        if code is not None and code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with exit status {code}"

    def end(self, *, idle: bool = False) -> None:
        """Stop it, whatever it does; one that is `idle` may end by itself, which it does without a connection."""
        self.connection.close()
        if idle:
            self._process.join(_GOODBYE_S)
        self._process.kill()
        self._process.join(_GOODBYE_S)


def _live(target: Callable[..., None], *arguments: Any) -> None:
    # Ctrl-C goes to the whole group; the parent decides what it means, and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    one_triton_cache()
    target(*arguments)


def one_triton_cache() -> None:
    """Let all of this process use Triton's usual cache.

    Inductor moves ``TRITON_CACHE_DIR`` to a folder of its own when it is first used, if nobody has set it: the kernels
    of others would then be looked for in one folder before that and in another one after it.
    """
    home = os.environ.get("TRITON_HOME") or str(Path.home())
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(home) / ".triton" / "cache"))


def default_jobs() -> int:
    """Half the cores, so that compilers that start helpers have the other half; not more than fit on a GPU."""
    return max(1, min(_MOST_JOBS, (os.cpu_count() or 1) // 2))


def run_here(
    work: Work[AnyTask, Result], tasks: Sequence[AnyTask], device: torch.device, *, tell: Callable[..., None]
) -> Generator[Done[AnyTask, Result], None, None]:
    """Run `tasks` one after the other in this process; for the rest see ``run_tasks``."""
    for task in tasks:
        begin = time.monotonic()
        result, failure = attempt(partial(work, task, device, partial(tell, task)))
        release(device)
        yield Done(task, time.monotonic() - begin, result, failure)


def run_tasks(
    work: Work[AnyTask, Result],
    tasks: Sequence[AnyTask],
    device: torch.device,
    *,
    jobs: int,
    time_limit_s: float,
    tell: Callable[[AnyTask, str, float], None] = lambda task, text, share: None,
) -> Generator[Done[AnyTask, Result], None, None]:
    """Run `tasks` in `jobs` processes, in whatever order keeps a process at one backend; yields each when it is done.

    Args:
        work: what is done with a task; a function of a module, since the processes import it.
        tasks: what there is to do.
        device: where.
        jobs: how many processes.
        time_limit_s: how long a process may go without a word about its task.
        tell: told of what the work tells of its task.
    """
    waiting, losses = list(tasks), Counter[str]()
    busy: list[_Process[AnyTask]] = []
    idle: list[_Process[AnyTask]] = []
    try:
        while waiting or busy:
            while waiting and len(busy) < jobs:
                busy.append(_Process(work, device))
                busy[-1].give(_next(waiting, busy))
            for process, message in _heard(busy, time_limit_s):
                assert process.task is not None
                if message[0] == "step":
                    process.heard_at = time.monotonic()
                    tell(process.task, *message[1:])
                    continue
                _, result, failure, alive = message
                yield Done(process.task, time.monotonic() - process.begin, result, failure)
                losses[process.task.backend] += not alive
                if not alive:
                    busy.remove(process)
                    process.child.end()
                    yield from _given_up(waiting, losses)
                elif waiting and losses[process.task.backend] < MOST_LOSSES:
                    process.give(_next(waiting, busy, process.task.backend))
                else:
                    busy.remove(process)
                    idle.append(process)
                    process.child.connection.close()
    finally:
        for process in busy:
            process.child.end()
        for process in idle:
            process.child.end(idle=not busy)


def _given_up(waiting: list[AnyTask], losses: Counter[str]) -> Iterator[Done[AnyTask, Any]]:
    """Take the tasks of backends that were lost too often out of `waiting`."""
    for task in [task for task in waiting if losses[task.backend] >= MOST_LOSSES]:
        waiting.remove(task)
        yield Done(task, 0.0, None, not_again(losses[task.backend]))


def not_again(count: int) -> Failure:
    """What is recorded for a backend that was lost `count` times, in place of another try."""
    return "error", f"not tried again after it was lost {count} times"


class _Process(Generic[AnyTask]):
    """A process that runs one task after the other."""

    def __init__(self, work: Work[AnyTask, Any], device: torch.device) -> None:
        self.child = Child(_serve, work, device)
        self.task: AnyTask | None = None
        self.begin = self.heard_at = 0.0

    def give(self, task: AnyTask) -> None:
        """Hand over the next task."""
        self.task = task
        self.begin = self.heard_at = time.monotonic()
        try:
            self.child.connection.send(task)
        except OSError:
            # It has died meanwhile: the end of its answers says so.
            return


def _next(waiting: list[AnyTask], busy: Sequence[_Process[AnyTask]], last: str | None = None) -> AnyTask:
    """Takes the next task out of `waiting`.

    That is one of the backend that the process had `last`, since that is loaded; otherwise of the one with the most
    left for each process that is at it.
    """
    left = Counter(task.backend for task in waiting)
    at_it = Counter(process.task.backend for process in busy if process.task is not None)
    chosen = last if last in left else max(left, key=lambda name: left[name] / (1 + at_it[name]))
    return waiting.pop(next(place for place, task in enumerate(waiting) if task.backend == chosen))


def _heard(busy: Sequence[_Process[AnyTask]], time_limit_s: float) -> list[tuple[_Process[AnyTask], tuple[Any, ...]]]:
    """Wait for a process; those that have something to say or have gone silent, with the message."""
    by_connection = {process.child.connection: process for process in busy}
    oldest = min(process.heard_at for process in busy)
    ready = wait(list(by_connection), timeout=max(0.0, oldest + time_limit_s - time.monotonic()))
    found: list[tuple[_Process[AnyTask], tuple[Any, ...]]] = []
    for connection in ready:
        process = by_connection[connection]  # type: ignore[index]
        try:
            found.append((process, process.child.connection.recv()))
        except (EOFError, OSError):
            found.append((process, ("done", None, ("crashed", process.child.obituary()), False)))
    if not ready:
        failure = ("timeout", f"no sign of life for {time_limit_s:.0f} s")
        late = [process for process in busy if time.monotonic() - process.heard_at >= time_limit_s]
        found += [(process, ("done", None, failure, False)) for process in late]
    return found


def _serve(connection: Connection, work: Work[Any, Any], device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)

    def tell(text: str, share: float) -> None:
        connection.send(("step", text, share))

    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        result, failure = attempt(partial(work, task, device, tell))
        usable = release(device)
        if not usable and failure is not None:
            failure = ("crashed", f"{failure[1]}; the device is unusable")
        connection.send(("done", result, failure, usable))
        if not usable:
            return


def release(device: torch.device) -> bool:
    """Give the device's memory back; False if its context is lost."""
    try:
        synchronize(device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True
