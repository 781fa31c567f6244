"""What of CuTe's kernels spills: registers and bytes of local memory for each schedule of the tables, without a GPU.

    python benchmarks/spills.py            # those that spill
    python benchmarks/spills.py --all --share 1/2

Each is compiled for the widest rows that it is for, with cuobjdump of the CUDA toolkit or of triton to look at it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

# As cuobjdump prints it.
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) .*? LOCAL:(\d+)")
# Where a table has no bound.
WIDEST = 40000


def cuobjdump() -> str:
    """Raises: FileNotFoundError: if there is none."""
    found = shutil.which("cuobjdump")
    if found is None:
        import triton

        found = str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
    if not Path(found).is_file():
        raise FileNotFoundError(f"cuobjdump expected on PATH or in triton, not found at {found}")
    return found


def columns(vectors: int, width: int, ragged: bool) -> int:
    """Of rows that touch so many vectors, of ``width`` elements, at most: all of them full, or not."""
    return max(1, vectors * width - (2 * width - 3 if ragged else 0))


def schedules() -> Iterator[tuple[str, Callable[[], object]]]:
    """Of each entry of a table, for each dtype and option that makes another kernel, its name and what compiles it."""
    import torch
    from loss_core.backend import CrossEntropyOptions
    from loss_cutedsl import _schedule, cross_entropy, softmax

    machine = _schedule.machine((9, 0), 132, 60 * 2**20)
    for dtype in (torch.bfloat16, torch.float32):
        width = _schedule.VECTOR_BYTES // dtype.itemsize
        for case in (*_schedule.MEASURED_SOFTMAX, *_schedule.SOFTMAX_IN_REGISTERS):
            for log in (False, True):
                backward = case.inputs == 2
                name = f"{'log_' * log}softmax {'backward' if backward else 'forward'} {dtype} {tuple(case.schedule)}"
                if case.schedule.unroll:
                    size, make, more = case.most, softmax.make_plan, (True,)
                else:
                    size, make, more = columns(case.most, width, case.ragged), softmax.make_plan_in_registers, ()
                yield (
                    f"{name} {case.most} vectors, ragged {case.ragged}",
                    partial(make, machine, dtype, size, case.schedule, case.ragged, backward, log, *more),
                )
        for (gradient, ragged), table in _schedule.PLAIN.items():
            for most, form in table:
                vectors = min(most, WIDEST)
                yield (
                    f"cross_entropy gradient {gradient} {dtype} {vectors} vectors, ragged {ragged}, {form}",
                    partial(
                        cross_entropy.make_plain_plan, machine, dtype, columns(vectors, width, ragged), form, ragged,
                        torch.int64, gradient, None, CrossEntropyOptions(),
                    ),
                )  # fmt: skip


def usage(folder: Path, tool: str) -> list[tuple[int, int]]:
    """Registers, and bytes of stack and local memory, of the kernels that the DSL left in a folder; it is emptied."""
    found = []
    for path in folder.rglob("*.cubin"):
        said = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
        found += [(int(registers), int(stack) + int(local)) for registers, stack, local in USAGE.findall(said)]
        path.unlink()
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="those that do not spill, too")
    parser.add_argument("--share", default="1/1", metavar="I/N", help="of the kernels every N-th")
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose name has the text")
    arguments = parser.parse_args()
    tool = cuobjdump()
    with tempfile.TemporaryDirectory() as folder:
        # The DSL reads these when it is imported.
        os.environ.update(
            LOSS_CUTEDSL_CACHE="", CUTE_DSL_ARCH="sm_90a", CUTE_DSL_KEEP_CUBIN="1", CUTE_DSL_DUMP_DIR=folder
        )
        share, of = map(int, arguments.share.split("/"))
        for name, compile_ in [pair for pair in schedules() if arguments.only in pair[0]][share - 1 :: of]:
            compile_()
            for registers, spilled in usage(Path(folder), tool):
                if spilled or arguments.all:
                    print(f"{name}: {registers} registers, {spilled} bytes", flush=True)


if __name__ == "__main__":
    main()
