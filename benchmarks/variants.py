"""Compares schedules of a backend's kernels in one process, in turns: a hundred in two minutes.

    echo "cross_entropy:both:8192x32000:bf16 now 8,16,96 4,32,160" > list.txt
    for share in 1 2 3 4; do python benchmarks/variants.py triton list.txt --compile $share/4 & done; wait
    python benchmarks/variants.py triton list.txt

A line of the list is a cell of ``sweep`` and its variants. ``now`` is what the tables choose.
Of triton WARPS,CHUNKS,REGISTERS: rows held, by as many programs as that makes; for 0 as many registers as the compiler
takes. ``loop``: rows held by none.
Of cutedsl THREADS,CLUSTER,VECTORS,BLOCKS: rows that a block or a cluster each holds; with an ``s`` before, streamed, or
for 0 VECTORS all of a row in registers. THREADS/32: a row a warp (softmax).

Shown is of each round the share of the limit that the memory sets, as in ``sweep``. With --compile a share of the
variants is only compiled, and what each makes of a few rows is compared with float64; kernels are found again through
the caches on disk.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from loss_bench.calls import make_call
from loss_bench.check import check
from loss_bench.inputs import random_inputs
from loss_bench.measure import copy_gb_s, make_timer
from sweep import parse, share_of_limit

# Modules of loss_core and of each backend.
OPS = ("cross_entropy", "softmax")
# Of what is compared with float64: more than run at a time.
FEW_ROWS = 600


@contextlib.contextmanager
def variant(backend: str, name: str) -> Iterator[None]:
    """In which calls of the backend have that schedule."""
    with contextlib.ExitStack() as patches:
        if name != "now":
            {"triton": _of_triton, "cutedsl": _of_cutedsl}[backend](patches, name)
        _forget(backend)
        yield
    _forget(backend)


def _of_triton(patches: contextlib.ExitStack, name: str) -> None:
    from loss_triton.schedules import FORWARD_PARTS, Parts

    modules = [importlib.import_module(f"loss_triton.{op}") for op in OPS]
    for module in modules:
        patches.enter_context(mock.patch.object(module, "had_better_hold", return_value=name != "loop"))
    if name == "loop":
        return
    warps, chunks, registers = map(int, name.split(","))

    def parts_of(table: object, classes: int, held: int, vector: int) -> Parts:
        needed = -(-classes // (32 * warps * vector))
        if needed < chunks:
            raise ValueError(
                f"{name}: {classes} classes are {needed} chunks, and kernels rely on no fewer than there are"
            )
        programs = -(-needed // chunks)
        if programs > 1 and any(table is other for other in FORWARD_PARTS.values()):
            raise ValueError(
                f"{name}: {classes} classes are {programs} programs, and one holds a row of the loss alone"
            )
        return Parts(programs, 32 * warps, chunks, registers or None)

    for module in modules:
        patches.enter_context(mock.patch.object(module, "parts_of", parts_of))


def _of_cutedsl(patches: contextlib.ExitStack, name: str) -> None:
    from loss_cutedsl import _schedule

    of_block, *rest = name.removeprefix("s").split(",")
    threads, _, of_row = of_block.partition("/")
    cluster, unroll, blocks = map(int, rest)
    # In softmax a block ends with its row if it is told so.
    schedule = _schedule.Schedule(int(threads), int(of_row or threads), cluster, 1, unroll, blocks, rows=1)
    form = _schedule.Form(schedule._replace(rows=0), not name.startswith("s"))
    at_once = form.schedule if form.at_once else None
    patches.enter_context(mock.patch.object(_schedule, "plain", return_value=form))
    patches.enter_context(mock.patch.object(_schedule, "held", return_value=schedule))
    patches.enter_context(mock.patch.object(_schedule, "softmax_in_registers", return_value=at_once))


def _forget(backend: str) -> None:
    """What is kept of calls that had another schedule. Kernels are kept by schedule."""
    for op in OPS:
        importlib.import_module(f"loss_core.{op}")._usual.cache_clear()
    of_loss, of_softmax = (importlib.import_module(f"loss_{backend}.{op}") for op in OPS)
    if backend == "triton":
        of_loss._plan.cache_clear()
    else:
        of_loss._forward_plan.cache_clear()
        of_softmax._plans.clear()


def compile_and_check(backend: str, cell: str, name: str, device: torch.device) -> None:
    """Raises: ValueError: if the result is wrong."""
    case, pass_ = parse(cell)
    case = dataclasses.replace(case, rows=min(case.rows, FEW_ROWS))
    inputs = random_inputs(case, device, seed=0, sets=1)
    with variant(backend, name):
        verdict = check(case, make_call(case, backend, inputs.weight), inputs, grad=pass_ not in ("forward", "no-grad"))
    if not verdict.right:
        raise ValueError(f"{cell} {name}: {verdict.reason}")


def measure(backend: str, lines: list[list[str]], device: torch.device, rounds: int) -> Iterator[tuple[str, str, list]]:
    """Of each variant of each cell the shares of the limit in per cent, a round each."""
    timer = make_timer(device)
    copy = copy_gb_s(device, timer)
    for cell, *names in lines:
        case, pass_ = parse(cell)
        inputs = random_inputs(case, device, seed=0, sets=2)
        shares: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds):
            for name in names:
                with variant(backend, name):
                    shares[name].append(share_of_limit(backend, case, pass_, inputs, timer, copy))
        for name in names:
            yield cell, name, shares[name]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=("triton", "cutedsl"))
    parser.add_argument("list", type=Path)
    parser.add_argument("--compile", metavar="I/N")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    lines = [line.split() for line in arguments.list.read_text().splitlines() if line.strip()]
    if arguments.compile:
        share, of = map(int, arguments.compile.split("/"))
        for cell, name in [(cell, name) for cell, *names in lines for name in names][share - 1 :: of]:
            compile_and_check(arguments.backend, cell, name, device)
        return
    for cell, name, shares in measure(arguments.backend, lines, device, arguments.rounds):
        print(f"{cell} {name:>16}", *(f"{share:6.1f}%" for share in shares), flush=True)


if __name__ == "__main__":
    main()
