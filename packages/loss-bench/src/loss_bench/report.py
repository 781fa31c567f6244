"""The rows as tables for people: rich in a terminal, Markdown and CSV in files."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from loss_bench.results import Report, Row

Cell = str


@dataclass(frozen=True)
class Column:
    """A column of the tables.

    Attributes:
        title: with the unit.
        cell: the text for a row that was timed.
        numeric: whether it stands to the right.
    """

    title: str
    cell: Callable[[Row], Cell]
    numeric: bool = True


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def milliseconds(value: float | None) -> str:
    """Three significant digits or more."""
    if value is None:
        return "–"
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}" if value < 100 else f"{value:.1f}"


def _spread(row: Row) -> str:
    return f"{milliseconds(row.p20_ms)}–{milliseconds(row.p80_ms)}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _error(row: Row) -> str:
    errors = [error for error in (row.loss_error, row.grad_error) if error is not None]
    return " / ".join(f"{error:.0e}" for error in errors) or "–"


COLUMNS = (
    Column("rows x classes", lambda row: row.shape, numeric=False),
    Column("dtype", lambda row: row.dtype, numeric=False),
    Column("backend", lambda row: row.backend, numeric=False),
    Column("median ms", lambda row: milliseconds(row.median_ms)),
    Column("20–80% ms", _spread),
    Column("GB/s", lambda row: _number(row.gb_s, ".0f")),
    Column("% of copy", lambda row: _share(row.copy_share)),
    Column("host us", lambda row: _number(row.host_us, ".0f")),
    Column("peak MiB", lambda row: _number(row.peak_mib, ".1f")),
    Column("x torch", lambda row: _number(row.speedup, ".2f")),
    Column("error loss / grad", _error),
)
_LABELS = 3


def groups(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Rows by op, options and pass, each with the title of its table, in order of appearance."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        title = " ".join(filter(None, (row.op, row.pass_, row.options)))
        found.setdefault(title, []).append(row)
    return [(title, by_case(members)) for title, members in found.items()]


def by_case(rows: Sequence[Row]) -> list[Row]:
    """Cases in order of appearance; in each the fastest backend first, then those without a time."""
    order = {key: place for place, key in enumerate(dict.fromkeys(row.case_key for row in rows))}
    return sorted(rows, key=lambda row: (order[row.case_key], row.median_ms is None, row.median_ms or 0.0))


def explanation(row: Row) -> str:
    """What stands in place of the numbers of a row that has none, or beside those that need a word."""
    if row.status == "ok":
        return row.note
    text = row.reason if row.status == "unsupported" else f"{row.status}: {row.reason}"
    if row.status == "wrong":
        text += f" (error {_error(row)})"
    return text


def _without_silent(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.status != "unavailable"]


def print_report(report: Report, console: Console) -> None:
    """Print every table of `report`, the backends that cannot run last."""
    console.print(header(report))
    for title, rows in groups(_without_silent(report.rows)):
        console.print(_table(title, rows))
    for line in footnotes(report):
        console.print(Text(line, style="dim"))


def header(report: Report) -> str:
    """Device, versions and ceilings in one line."""
    found = report.environment
    packages = " | ".join(f"{name} {version}" for name, version in found.get("packages", {}).items())
    ceiling = report.ceilings.get("copy_gb_s")
    parts = [
        str(found.get("device")),
        f"CUDA {found['cuda']}" if "cuda" in found else "",
        f"torch {found.get('torch')}",
        packages,
        f"copy {ceiling:.0f} GB/s" if ceiling else "",
    ]
    return " | ".join(part for part in parts if part)


def _table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in COLUMNS:
        table.add_column(column.title, justify="right" if column.numeric else "left", no_wrap=True)
    explained = any(explanation(row) for row in rows)
    if explained:
        table.add_column("note", overflow="fold")
    for _, members in groupby(rows, key=lambda row: row.case_key):
        for place, row in enumerate(members):
            table.add_row(*_cells(row, first=place == 0), *([explanation(row)] if explained else []), style=_style(row))
        table.add_section()
    return table


def _cells(row: Row, *, first: bool) -> list[str]:
    cells = [column.cell(row) for column in COLUMNS]
    if row.status != "ok":
        cells = cells[:_LABELS] + ["wrong" if row.status == "wrong" else "n/a"] + [""] * (len(COLUMNS) - _LABELS - 1)
    if not first:
        cells[0] = cells[1] = ""
    return cells


def _style(row: Row) -> str:
    return {"ok": "", "wrong": "red", "error": "red"}.get(row.status, "dim")


def footnotes(report: Report) -> list[str]:
    """How to read the tables, and who is missing from them."""
    lines = [
        "GB/s: the fewest bytes that the pass has to move over its median; % of copy: against a copy in this "
        "process. x torch: torch.nn.functional's median over this one. host us: of one call at 64 x 512.",
        "error: against float64, relative (norm of the difference over the norm).",
    ]
    missing = dict.fromkeys((row.backend, row.reason) for row in report.rows if row.status == "unavailable")
    return lines + [f"not run: {name}: {reason}" for name, reason in missing]


def to_markdown(report: Report) -> str:
    """The report as Markdown."""
    lines = [header(report), ""]
    for title, rows in groups(_without_silent(report.rows)):
        explained = any(explanation(row) for row in rows)
        titles = [column.title for column in COLUMNS] + (["note"] if explained else [])
        rule = ["---:" if column.numeric else "---" for column in COLUMNS] + (["---"] if explained else [])
        lines += [f"### {title}", "", _markdown_line(titles), _markdown_line(rule)]
        for row in rows:
            lines.append(_markdown_line(_cells(row, first=True) + ([explanation(row)] if explained else [])))
        lines.append("")
    return "\n".join(lines + [f"- {line}" for line in footnotes(report)]) + "\n"


def _markdown_line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def to_csv(report: Report) -> str:
    """The rows of `report` as CSV, with the names of the JSON fields."""
    rows: list[dict[str, Any]] = [row.to_json() for row in report.rows]
    out = io.StringIO()
    if rows:
        writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return out.getvalue()
