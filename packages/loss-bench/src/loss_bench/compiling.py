"""Compilation ahead of time: every backend runs every case once, in several processes, to fill the caches on disk.

A process that times compiles one kernel after the other. Here N processes compile at once, and the process that times
afterwards finds the kernels in the caches that their compilers keep: Inductor's, Triton's, Quack's, loss-cutedsl's.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import loss_core
import torch

from loss_bench.calls import make_call
from loss_bench.cases import Case
from loss_bench.inputs import random_inputs
from loss_bench.measure import PassWork, synchronize
from loss_bench.runner import TINY_CLASSES, TINY_ROWS, attempt

_GOODBYE_S = 10.0
_MOST_JOBS = 8
# Kernels that take any number of rows are compiled on few, so that N processes fit on the device.
_MOST_ROWS = 512
_ALIGNMENT = 16

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Task:
    """One backend on one case."""

    backend: str
    case: Case


@dataclass(frozen=True)
class Outcome:
    """What became of a task.

    Attributes:
        task: the task.
        seconds: that it took.
        problem: why it failed, or "".
    """

    task: Task
    seconds: float
    problem: str


def one_triton_cache() -> None:
    """Let all of this process use Triton's usual cache.

    Inductor moves ``TRITON_CACHE_DIR`` to a folder of its own when it is first used, if nobody has set it: the kernels
    of others would then be looked for in one folder before that and in another one after it.
    """
    home = os.environ.get("TRITON_HOME") or str(Path.home())
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(home) / ".triton" / "cache"))


def make_tasks(backends: Sequence[str], cases: Sequence[Case]) -> list[Task]:
    """Every backend with every case, and with the small ones that the host time is measured on."""
    small = [Case(case.op, TINY_ROWS, TINY_CLASSES, case.dtype, case.options) for case in cases]
    return [Task(backend, case) for backend in backends for case in dict.fromkeys([*cases, *small])]


def compile_ahead(
    tasks: Sequence[Task],
    device: torch.device,
    *,
    jobs: int,
    progress: Progress = lambda text, share: None,
    time_limit_s: float = 120.0,
) -> list[Outcome]:
    """Run `tasks` in `jobs` processes, in whatever order keeps a process at one backend.

    A process that dies, or takes longer than `time_limit_s` over a task, costs that task alone.
    """
    waiting, outcomes = list(tasks), list[Outcome]()
    busy: list[_Process] = []
    finished: list[_Process] = []
    try:
        while waiting or busy:
            while waiting and len(busy) < jobs:
                busy.append(_Process(device))
                busy[-1].give(_next(waiting, busy))
            done = _first_done(busy, time_limit_s)
            for process, seconds, problem, alive in done:
                assert process.task is not None
                outcomes.append(Outcome(process.task, seconds, problem))
                text = f"{process.task.backend} {process.task.case}: {problem or f'{seconds:.1f} s'}"
                progress(text, len(outcomes) / len(tasks))
                if alive and waiting:
                    process.give(_next(waiting, busy, process.task.backend))
                else:
                    busy.remove(process)
                    if alive:
                        finished.append(process)
                        process.connection.close()
                    else:
                        process.end()
    finally:
        for process in busy:
            process.end()
        for process in finished:
            process.end(idle=not busy)
    return outcomes


def default_jobs() -> int:
    """Half the cores, so that compilers that start helpers have the other half; not more than fit on a GPU."""
    return max(1, min(_MOST_JOBS, (os.cpu_count() or 1) // 2))


def seconds_by_backend(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """What the tasks of each backend took together."""
    found: dict[str, float] = {}
    for outcome in outcomes:
        found[outcome.task.backend] = found.get(outcome.task.backend, 0.0) + outcome.seconds
    return found


class _Process:
    """A process that runs one task after the other."""

    def __init__(self, device: torch.device) -> None:
        # A forked process cannot use CUDA.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.task: Task | None = None
        self.begin = 0.0
        self._process: Any = context.Process(target=_serve, args=(theirs, device))
        self._process.start()
        theirs.close()

    def give(self, task: Task) -> None:
        """Hand over the next task."""
        self.task, self.begin = task, time.monotonic()
        try:
            self.connection.send(task)
        except OSError:
            # It has died meanwhile: the end of its answers says so.
            return

    def end(self, *, idle: bool = False) -> None:
        """Stop it, whatever it does; one that is `idle` may end by itself, which it does without a connection."""
        self.connection.close()
        if idle:
            self._process.join(_GOODBYE_S)
        self._process.kill()
        self._process.join(_GOODBYE_S)


def _next(waiting: list[Task], busy: Sequence[_Process], last: str | None = None) -> Task:
    """Takes the next task out of `waiting`.

    That is one of the backend that the process had `last`, since that is loaded; otherwise of the one with the most
    left for each process that is at it.
    """
    left = Counter(task.backend for task in waiting)
    at_it = Counter(process.task.backend for process in busy if process.task is not None)
    chosen = last if last in left else max(left, key=lambda name: left[name] / (1 + at_it[name]))
    return waiting.pop(next(place for place, task in enumerate(waiting) if task.backend == chosen))


def _first_done(busy: Sequence[_Process], time_limit_s: float) -> list[tuple[_Process, float, str, bool]]:
    """Wait for a process; (process, seconds, problem, whether it lives) of those that have something to say."""
    by_connection = {process.connection: process for process in busy}
    oldest = min(process.begin for process in busy)
    ready = wait(list(by_connection), timeout=max(0.0, oldest + time_limit_s - time.monotonic()))
    found = []
    for connection in ready:
        process = by_connection[connection]  # type: ignore[index]
        seconds = time.monotonic() - process.begin
        try:
            found.append((process, seconds, *process.connection.recv()))
        except (EOFError, OSError):
            found.append((process, seconds, "its process died", False))
    if not ready:
        late = [process for process in busy if time.monotonic() - process.begin >= time_limit_s]
        found += [(process, time_limit_s, f"not done after {time_limit_s:.0f} s", False) for process in late]
    return found


def _serve(connection: Connection, device: torch.device) -> None:
    # Ctrl-C goes to the whole group; the parent ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    one_triton_cache()
    # Each of several processes would start as many compilers as there are cores.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        _, failure = attempt(partial(_run_once, task, device))
        usable = _released(device)
        connection.send((": ".join(failure) if failure else "", usable))
        if not usable:
            return


def _released(device: torch.device) -> bool:
    """Give the device's memory back; False if its context is lost."""
    try:
        synchronize(device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def _run_once(task: Task, device: torch.device) -> None:
    case = task.case
    if not getattr(loss_core.get_backend(task.backend).module, "STATIC_SHAPES", False):
        case = replace(case, rows=_few(case.rows))
    inputs = random_inputs(case, device, seed=0, sets=1)
    call = make_call(case, task.backend, inputs.weight)
    for pass_ in ("forward+backward", "no-grad"):
        work = PassWork(call, inputs, pass_)
        work.prepare(0)
        work.run(0)
        work.finish(0)
    synchronize(device)


def _few(rows: int) -> int:
    # Triton has one kernel for multiples of 16 and one for the rest.
    return rows if rows <= _MOST_ROWS else _MOST_ROWS + rows % _ALIGNMENT
