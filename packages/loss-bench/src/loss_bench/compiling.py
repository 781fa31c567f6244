"""Compilation ahead of time: every backend runs every case once, in several processes, to fill the caches on disk.

A process that times compiles one kernel after the other. Here N processes compile at once, and the process that times
afterwards finds the kernels in the caches that their compilers keep: Inductor's, Triton's, Quack's, loss-cutedsl's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import loss_core
import torch

from loss_bench.calls import make_call
from loss_bench.cases import LINEAR, Case
from loss_bench.inputs import random_inputs
from loss_bench.measure import PassWork, synchronize
from loss_bench.processes import Done, Tell
from loss_bench.results import FAILURES

# Kernels that take any number of rows are compiled on few, so that N processes fit on the device. A linear op goes
# through the rows in chunks, with kernels of their own for the first, the others and a single one: Quack's are of 4096.
_MOST_ROWS, _MOST_LINEAR_ROWS = 512, 8192
_ALIGNMENT = 16


@dataclass(frozen=True)
class CompileTask:
    """One backend on one case."""

    backend: str
    case: Case

    def __str__(self) -> str:
        return f"{self.backend} {self.case}"


def make_tasks(backends: Sequence[str], cases: Sequence[Case]) -> list[CompileTask]:
    """Every backend with every case, and with the small ones that the host time is measured on."""
    wanted = dict.fromkeys([*cases, *(case.tiny for case in cases)])
    return [CompileTask(backend, case) for backend in backends for case in wanted]


def seconds_by_backend(outcomes: Iterable[Done[CompileTask, None]]) -> dict[str, float]:
    """What the tasks of each backend took together."""
    found: dict[str, float] = {}
    for outcome in outcomes:
        found[outcome.task.backend] = found.get(outcome.task.backend, 0.0) + outcome.seconds
    return found


def broken(outcomes: Iterable[Done[CompileTask, None]]) -> list[str]:
    """What should have compiled and did not, with the reason; a refusal of a case or of the machine is no failure."""
    failed = ((outcome.task, outcome.failure) for outcome in outcomes if outcome.failure is not None)
    return [f"{task}: {status}: {reason}" for task, (status, reason) in failed if status in FAILURES]


def compile_case(task: CompileTask, device: torch.device, tell: Tell) -> None:
    """Run every pass once that has a kernel of its own."""
    # Each of several processes would start as many compilers as there are cores.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch.set_num_threads(1)
    case = task.case
    if not getattr(loss_core.get_backend(task.backend).module, "STATIC_SHAPES", False):
        case = replace(case, rows=_few(case.rows, _MOST_LINEAR_ROWS if case.op in LINEAR else _MOST_ROWS))
    inputs = random_inputs(case, device, seed=0, sets=1)
    call = make_call(case, task.backend, inputs.weight)
    for pass_ in ("forward+backward", "no-grad"):
        work = PassWork(call, inputs, pass_)
        work.prepare(0)
        work.run(0)
        work.finish(0)
    synchronize(device)


def _few(rows: int, most: int) -> int:
    # Triton has one kernel for multiples of 16 and one for the rest.
    return rows if rows <= most else most + rows % _ALIGNMENT
