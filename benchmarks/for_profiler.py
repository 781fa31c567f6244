"""Runs a cell of ``sweep`` three times, with a cold L2 and other inputs each time, for a profiler of kernels.

    ncu --clock-control none --cache-control none -k 'regex:plain|fwd' --launch-skip 2 --set detailed \
        python benchmarks/for_profiler.py cutedsl cross_entropy:none:8192x32000:bf16

That shows the forward's kernel of the last run. Without the first two options the profiler flushes the caches itself,
and sets the clocks, which loss-bench does not.
"""

from __future__ import annotations

import argparse

import torch
from loss_bench.calls import make_call
from loss_bench.inputs import random_inputs
from loss_bench.measure import PassWork, l2_bytes
from sweep import parse


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend")
    parser.add_argument("cell", help="as in benchmarks/sweep.py")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    case, pass_ = parse(arguments.cell)
    inputs = random_inputs(case, device, seed=0, sets=2)
    work = PassWork(make_call(case, arguments.backend, inputs.weight), inputs, pass_)
    # As loss-bench's timer has it.
    flush = torch.empty(4 * l2_bytes(device), dtype=torch.int8, device=device)
    for index in range(3):
        work.prepare(index)
        flush.zero_()
        work.run(index)
        work.finish(index)


if __name__ == "__main__":
    main()
