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
import os
import statistics
import subprocess
import sys
from typing import Any

# Bytes of the limit over those of the input.
MOVED = {"forward": 2, "backward": 3, "both": 2, "none": 1}


class Cell:
    """A call, with two sets of inputs that take turns; see ``loss_bench.measure.Work``."""

    def __init__(self, name: str, backend: str, device: Any) -> None:
        import torch

        self.op, self.pass_, shape, dtype, *options = name.split(":")
        self.backend = backend
        self.is_loss = self.op == "cross_entropy"
        pairs = (option.split("=") for text in options for option in text.split(","))
        self.options = {option: float(value) for option, value in pairs}
        rows, classes = map(int, shape.split("x"))
        of_dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
        self.bytes = rows * classes * of_dtype.itemsize * MOVED[self.pass_]
        self.result: Any = None
        self.inputs = []
        for _ in range(2):
            x = torch.randn(rows, classes, device=device, dtype=of_dtype).requires_grad_()
            beside = torch.randint(classes, (rows,), device=device) if self.is_loss else torch.randn_like(x)
            self.inputs.append((x, beside))

    def _call(self, index: int) -> Any:
        import loss_core

        x, beside = self.inputs[index % 2]
        beside = (beside,) if self.is_loss else (-1,)
        return getattr(loss_core, self.op)(x, *beside, backend=self.backend, **self.options)

    def prepare(self, index: int) -> None:
        """What is not timed."""
        self.inputs[index % 2][0].grad = None
        if self.pass_ == "backward":
            self.result = self._call(index)

    def run(self, index: int) -> None:
        """What is timed."""
        import torch

        upstream = None if self.is_loss else self.inputs[index % 2][1]
        if self.pass_ == "none":
            with torch.no_grad():
                self.result = self._call(index)
        elif self.pass_ == "backward":
            self.result.backward(upstream)
        else:
            self.result = self._call(index)
            if self.pass_ == "both":
                self.result.backward(upstream)

    def finish(self, index: int) -> None:
        """Let go of what was made."""
        self.result = self.inputs[index % 2][0].grad = None


def measure(backend: str, names: list[str], device: str) -> dict[str, float]:
    """Shares of the limit, in per cent."""
    import torch
    from loss_bench.measure import copy_gb_s, make_timer, summarize

    where = torch.device(device)
    timer = make_timer(where)
    copy = copy_gb_s(where, timer)
    shares = {}
    for name in names:
        cell = Cell(name, backend, where)
        milliseconds = summarize(timer.time(cell, 15, 2)).median
        shares[name] = 100 * cell.bytes / milliseconds * 1e-6 / copy
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
