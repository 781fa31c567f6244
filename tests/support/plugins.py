"""Throw-away distributions that bring backends, and fresh interpreters to look at them from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

GOOD = """
import torch
API_VERSION = 1
OPS = ("softmax",)
def unavailable_reason(device):
    return None
def softmax(input):
    return torch.softmax(input, -1) + {offset}
"""


def add_distribution(
    site: Path, distribution: str, backends: dict[str, str], *, version: str = "1.0", group: str = "loss_core.backends"
) -> None:
    """Put a distribution into the folder `site`, with one module of the given source for each backend's name."""
    site.mkdir(parents=True, exist_ok=True)
    module_of = {name: f"{distribution}_{name}".replace("-", "_") for name in backends}
    for name, source in backends.items():
        (site / f"{module_of[name]}.py").write_text(textwrap.dedent(source))
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    lines = [f"[{group}]", *(f"{name} = {module}" for name, module in module_of.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def unset() -> dict[str, str]:
    """The environment without the variables that choose or interpret backends, which the tests set.

    One thread: a fresh interpreter has no test worker's share of the cores to itself.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LOSS_", "TRITON_", "PYTEST_"))}
    return {**kept, "OMP_NUM_THREADS": "1"}


def run_python(program: str, *paths: Path, **environment: str) -> Any:
    """Run `program` in a fresh interpreter with `paths` on sys.path; what it passes to ``report`` comes back.

    The variables that choose or interpret backends are those of `environment` alone.
    """
    head = "import json\ndef report(value): print('\\nREPORT' + json.dumps(value))\n"
    path = os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(program)],
        env={**unset(), "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    reports = [line for line in done.stdout.splitlines() if line.startswith("REPORT")]
    return json.loads(reports[-1].removeprefix("REPORT")) if reports else None
