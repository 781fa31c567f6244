"""The tables of results in READMEs, each made by the command in the comment above it.

    <!-- loss-bench report FILES --summary --backends ours,theirs -->

FILES are of ``benchmarks/results``. ``python benchmarks/tables.py`` makes them again; a test compares.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from loss_bench.cli import app

ROOT = Path(__file__).parents[1]
READMES = [ROOT / name for name in ("README.md", "packages/loss-triton/README.md", "packages/loss-cutedsl/README.md")]

_TABLE = re.compile(r"(<!-- loss-bench report (.*?) --summary(.*?) -->\n\n)((?:\|[^\n]*\n)*)", re.DOTALL)


def remade(text: str) -> str:
    """The text with its tables made again."""
    return _TABLE.sub(lambda found: found[1] + _table(found[2].split(), found[3].split()), text)


def _table(names: list[str], options: list[str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "table.md"
        files = [str(ROOT / "benchmarks" / "results" / name) for name in names]
        app(["report", *files, "--quiet", "--summary", str(written), *options], standalone_mode=False)
        return "".join(f"{line}\n" for line in written.read_text().splitlines() if line.startswith("|"))


if __name__ == "__main__":
    for readme in READMES:
        readme.write_text(remade(readme.read_text()))
