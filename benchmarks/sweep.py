"""Compares variants of a backend's sources on the same calls: what to keep of a change, and which schedule is best.

    python benchmarks/sweep.py cutedsl cross_entropy:both:8192x32000:bf16 softmax:backward:4096x8192:bf16 \
        --tree here=packages/loss-cutedsl/src --tree other=FOLDER

A tree is a folder that holds the package, changed or not; what is installed is the tree ``.``. Each has a process of
its own in every round, in turns. Shown is the median of the rounds of the share of the limit that the memory sets:
whole calls by loss-bench's clock, against the speed of a copy in the same process. The first round only compiles.

A cell is OP:PASS:ROWSxCLASSES:DTYPE, with PASS one of forward, backward, both and none (without a gradient); after
another colon options of the loss, as in label_smoothing=0.1,z_loss=1e-4.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loss_bench.cases import Case
    from loss_bench.inputs import Inputs
    from loss_bench.measure import Timer

PASSES = {"forward": "forward", "backward": "backward", "both": "forward+backward", "none": "no-grad"}


def parse(name: str) -> tuple[Case, str]:
    """The case and the pass of a cell."""
    from loss_bench.cases import Case, Options, parse_dtype, parse_shape

    op, pass_, shape, dtype, *options = name.split(":")
    pairs = (option.split("=") for text in options for option in text.split(","))
    rows, classes, hidden = parse_shape(shape, [op])
    of_options = Options(**{option: float(value) for option, value in pairs})
    return Case(op, rows, classes, parse_dtype(dtype), of_options, hidden), PASSES[pass_]


def share_of_limit(backend: str, case: Case, pass_: str, inputs: Inputs, timer: Timer, copy: float) -> float:
    """In per cent. `copy`: what ``copy_gb_s`` found in this process."""
    from loss_bench.calls import make_call
    from loss_bench.cases import minimal_bytes
    from loss_bench.measure import PassWork, summarize

    work = PassWork(make_call(case, backend, inputs.weight), inputs, pass_)
    milliseconds = summarize(timer.time(work, 15, 2)).median
    # Of the half of a loss that is held to nothing there is no share.
    moved = minimal_bytes(case, pass_, inputs.kept_rows(case)) or math.nan
    return 100 * moved / milliseconds * 1e-6 / copy


def measure(backend: str, names: list[str], device: str) -> dict[str, float]:
    """Shares of the limit, in per cent."""
    import torch
    from loss_bench.inputs import random_inputs
    from loss_bench.measure import copy_gb_s, make_timer

    where = torch.device(device)
    timer = make_timer(where)
    copy = copy_gb_s(where, timer)
    shares = {}
    for name in names:
        case, pass_ = parse(name)
        inputs = random_inputs(case, where, seed=0, sets=2)
        shares[name] = share_of_limit(backend, case, pass_, inputs, timer, copy)
    return shares


def in_tree(tree: str, arguments: argparse.Namespace) -> dict[str, float]:
    """``measure`` in a process that finds the package in `tree` first."""
    path = os.pathsep.join(filter(None, ["" if tree == "." else os.path.abspath(tree), os.environ.get("PYTHONPATH")]))
    words = [sys.executable, __file__, arguments.backend, *arguments.cells, "--device", arguments.device, "--here"]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend")
    parser.add_argument("cells", nargs="+", metavar="CELL")
    parser.add_argument("--tree", action="append", metavar="NAME=FOLDER", help="default: here=.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(measure(arguments.backend, arguments.cells, arguments.device)))
        return
    trees = dict(tree.split("=", 1) for tree in arguments.tree or ["here=."])
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for number in range(arguments.rounds + 1):
        for name, tree in trees.items():
            shares = in_tree(tree, arguments)
            if number:
                rounds[name].append(shares)
    width = max(map(len, arguments.cells))
    print(" " * width, *(f"{name:>10}" for name in trees))
    for cell in arguments.cells:
        medians = (statistics.median(shares[cell] for shares in rounds[name]) for name in trees)
        print(f"{cell:<{width}}", *(f"{median:9.1f}%" for median in medians), flush=True)


if __name__ == "__main__":
    main()
