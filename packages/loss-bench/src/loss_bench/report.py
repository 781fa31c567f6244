"""The rows as tables for people: rich in a terminal, Markdown and CSV in files."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from loss_bench.accuracy import Accuracy
from loss_bench.results import FAILURES, Report, Row

NOTHING = "-"
"""Stands where there is no number."""


@dataclass(frozen=True)
class Column:
    """A column of the tables.

    Attributes:
        title: with the unit.
        cell: the text for a row that was timed.
        numeric: whether it stands to the right.
    """

    title: str
    cell: Callable[[Row], str]
    numeric: bool = True


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else format(value, form)


def milliseconds(value: float | None) -> str:
    """Three significant digits or more."""
    if value is None:
        return NOTHING
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}" if value < 100 else f"{value:.1f}"


def _spread(row: Row) -> str:
    return f"{milliseconds(row.p20_ms)} - {milliseconds(row.p80_ms)}"


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0%}"


def _error(row: Row) -> str:
    errors = [error for error in (row.loss_error, row.grad_error) if error is not None]
    return " / ".join(f"{error:.0e}" for error in errors) or NOTHING


COLUMNS = (
    Column("rows x classes", lambda row: row.shape, numeric=False),
    Column("dtype", lambda row: row.dtype, numeric=False),
    Column("backend", lambda row: row.backend, numeric=False),
    Column("median ms", lambda row: milliseconds(row.median_ms)),
    Column("20-80% ms", _spread),
    Column("GB/s", lambda row: _number(row.gb_s, ".0f")),
    Column("% of copy", lambda row: _share(row.copy_share)),
    Column("graph ms", lambda row: milliseconds(row.graph_ms)),
    Column("% of copy (graph)", lambda row: _share(row.graph_share)),
    Column("host us", lambda row: _number(row.host_us, ".0f")),
    Column("peak MiB", lambda row: _number(row.peak_mib, ".1f")),
    Column("x torch", lambda row: _number(row.speedup, ".2f")),
    Column("error loss / grad", _error),
)
_LABELS = 3
_DISPENSABLE = (
    "20-80% ms",
    "graph ms",
    "% of copy (graph)",
    "peak MiB",
    "GB/s",
    "host us",
    "error loss / grad",
    "% of copy",
    "dtype",
)


def groups(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Rows by op, options and pass, each with the title of its table, in order of appearance."""
    rows = list(rows)
    several = len({row.device for row in rows}) > 1
    found: dict[str, list[Row]] = {}
    for row in rows:
        title = " ".join(filter(None, (row.op, row.pass_, row.options, f"on {row.device}" if several else "")))
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


SEEDS_TITLES = (
    "Backend", "Batch", "Vocab", "Dtype", "Forward (ms)", "Speedup", "Backward (ms)", "Speedup",
)  # fmt: skip


def seeds_rows(rows: Iterable[Row]) -> list[tuple[str, list[list[str]]]]:
    """The forward and backward times of each op side by side, in the columns of ``SEEDS_TITLES``."""
    rows = list(rows)
    times = {row.key: row for row in rows}
    found: dict[str, list[list[str]]] = {}
    for row in by_case([row for row in rows if row.pass_ == "forward" and row.median_ms is not None]):
        backward = times.get((*row.case_key, "backward", row.backend, row.device))
        cells = [row.backend, str(row.rows), str(row.classes), row.dtype]
        for half in (row, backward):
            cells.append(milliseconds(half.median_ms if half else None))
            cells.append(_number(half.speedup if half else None, ".2f"))
        found.setdefault(row.op, []).append(cells)
    return list(found.items())


def _seeds_table(op: str, lines: Iterable[Sequence[str]]) -> Table:
    table = Table(title=op, title_justify="left", title_style="bold")
    for place, title in enumerate(SEEDS_TITLES):
        table.add_column(title, justify="right" if place in (1, 2) or place > 3 else "left")
    for cells in lines:
        table.add_row(*cells)
    return table


TRAIN_TITLES = (
    "backend", "loss at start", "at 1/2", "at end", "max distance", "allowed", "tokens/s", "loss ms", "peak MiB",
)  # fmt: skip


def train_cells(curve: dict[str, Any]) -> list[str]:
    """The cells of a trained backend, or of one that was not."""
    losses = curve["losses"]
    if not losses:
        return [curve["backend"], f"{curve['status']}: {curve['reason']}", *[""] * (len(TRAIN_TITLES) - 2)]
    return [
        curve["backend"],
        *("nan" if loss is None else f"{loss:.4f}" for loss in (losses[0], losses[len(losses) // 2], losses[-1])),
        _number(curve["difference"], ".1e") + (" WRONG" if curve["status"] == "wrong" else ""),
        _number(curve["allowed"], ".1e"),
        _number(curve["tokens_per_s"], ".0f"),
        milliseconds(curve["loss_ms"]),
        _number(curve["peak_mib"], ".1f"),
    ]


def _train_table(report: Report) -> Table:
    table = Table(title="training curves", title_justify="left", title_style="bold")
    for place, title in enumerate(TRAIN_TITLES):
        table.add_column(title, justify="right" if place else "left")
    for curve in report.train:
        table.add_row(*train_cells(curve), style=_status_style(curve["status"]))
    return table


def accuracy_tables(report: Report) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, column titles, lines): for each op, size, dtype and result the backends against the kinds of input."""
    rows = [Accuracy.from_json(pairs) for pairs in report.accuracy]
    found: dict[tuple[str, ...], list[Accuracy]] = {}
    for row in rows:
        found.setdefault((row.op, f"{row.rows}x{row.classes}", row.dtype), []).append(row)
    tables = []
    for key, members in found.items():
        kinds = list(dict.fromkeys(row.kind for row in members))
        names = list(dict.fromkeys(row.backend for row in members if row.status != "unavailable"))
        cells = {(row.backend, row.kind): row for row in members}
        for part, name in (("result", "loss" if key[0] == "cross_entropy" else "output"), ("grad", "gradient")):
            title = f"{' '.join(key)}: {name}, error in units of rounding, worst (mean)"
            lines = [[b, *(_accuracy_cell(cells[b, kind], part) for kind in kinds)] for b in names]
            tables.append((title, ["backend", *kinds], lines))
    return tables


def _accuracy_cell(row: Accuracy, part: str) -> str:
    worst, mean = getattr(row, f"{part}_ulp"), getattr(row, f"{part}_ulp_mean")
    if row.status == "wrong" and worst is None:
        return "WRONG"
    if row.status not in ("ok", "wrong"):
        return "n/a" if row.status == "unsupported" else row.status
    if not math.isfinite(worst):
        return "WRONG"
    single = worst == mean
    return _short(worst) if single else f"{_short(worst)} ({_short(mean)})"


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}" if value < 1e4 else f"{value:.0e}"


def accuracy_notes(report: Report) -> list[str]:
    """One line for every reason that a cell holds no number."""
    found: dict[tuple[str, str], list[str]] = {}
    for pairs in report.accuracy:
        if pairs["reason"] and pairs["status"] != "unavailable":
            where = found.setdefault((pairs["backend"], pairs["reason"]), [])
            if (place := f"{pairs['dtype']} {pairs['kind']}") not in where:
                where.append(place)
    return [f"{backend} ({', '.join(where)}): {reason}" for (backend, reason), where in found.items()]


def _accuracy_table(title: str, columns: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    for line in lines:
        table.add_row(*(Text(cell, style="red" if cell == "WRONG" else "") for cell in line))
    return table


def print_report(report: Report, console: Console) -> None:
    """Print every table of `report`, the backends that cannot run last."""
    console.print(header(report), highlight=False)
    if report.train:
        console.print(_train_table(report))
    for table in accuracy_tables(report):
        console.print(_accuracy_table(*table))
    for line in accuracy_notes(report):
        console.print(Text(f"  {line}", style="dim"))
    if report.settings.get("preset") == "seeds":
        for op, lines in seeds_rows(report.rows):
            console.print(_seeds_table(op, lines))
    if not report.rows:
        return
    for title, rows in groups(_without_silent(report.rows)):
        console.print(_fitting_table(title, rows, console))
        for line in notes(rows):
            console.print(Text(f"  {line}", style="dim"))
    for line in footnotes(report):
        console.print(Text(line, style="dim"))


def header(report: Report) -> str:
    """Device, versions and ceilings in one line."""
    found = report.environment
    packages = " | ".join(f"{name} {version}" for name, version in found.get("packages", {}).items())
    ceiling, rate = report.ceilings.get("copy_gb_s"), report.ceilings.get("matmul_tflop_s")
    parts = [
        str(found.get("device")),
        f"CUDA {found['cuda']}" if "cuda" in found else "",
        f"torch {found.get('torch')}",
        packages,
        f"copy {ceiling:.0f} GB/s" if ceiling else "",
        f"bf16 matrix product {rate:.0f} TFLOP/s" if rate else "",
    ]
    return " | ".join(part for part in parts if part)


def _table(title: str, rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column.title, justify="right" if column.numeric else "left", no_wrap=True)
    for _, members in groupby(rows, key=lambda row: row.case_key):
        for place, row in enumerate(members):
            table.add_row(*_cells(row, columns, first=place == 0), style=_status_style(row.status))
        table.add_section()
    return table


def _fitting_table(title: str, rows: Sequence[Row], console: Console) -> Table:
    """The table without the columns that matter least, as many as it takes to fit into the console."""
    columns = filled_columns(rows)
    table = _table(title, rows, columns)
    for name in _DISPENSABLE:
        if _wanted_width(table, console) <= console.width:
            break
        columns = [column for column in columns if column.title != name]
        table = _table(title, rows, columns)
    return table


def filled_columns(rows: Sequence[Row]) -> list[Column]:
    """The columns that hold anything, such as those that exist on a GPU only."""
    cells = [[column.cell(row) for row in rows if row.status == "ok"] for column in COLUMNS]
    return [column for column, found in zip(COLUMNS, cells, strict=True) if not found or set(found) != {NOTHING}]


def _wanted_width(table: Table, console: Console) -> int:
    # Asked with the console's own width, a table never wants more than that.
    return console.measure(table, options=console.options.update(width=10_000)).maximum


def notes(rows: Sequence[Row]) -> list[str]:
    """One line for every explanation, with the cases that it holds for."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if explanation(row):
            found.setdefault((row.backend, explanation(row)), []).append(f"{row.shape} {row.dtype}")
    return [f"{backend} ({', '.join(where)}): {text}" for (backend, text), where in found.items()]


def _cells(row: Row, columns: Sequence[Column], *, first: bool) -> list[str]:
    cells = [column.cell(row) for column in columns]
    if row.status != "ok":
        state = {"unsupported": "n/a"}.get(row.status, row.status)
        cells = cells[:_LABELS] + [state] + [""] * (len(columns) - _LABELS - 1)
    if not first:
        cells[0] = cells[1] = ""
    return cells


def _status_style(status: str) -> str:
    return "red" if status in FAILURES else "" if status == "ok" else "dim"


def footnotes(report: Report) -> list[str]:
    """How to read the tables, and who is missing from them."""
    lines = [
        (
            "GB/s: the fewest bytes that the pass has to move over its median; % of copy: against a copy in this "
            "process. graph: replayed as a CUDA graph, without the host. x torch: torch.nn.functional's median over "
            "this one. host us: of one call at 64 x 512."
        ),
        "error: against float64, relative (norm of the difference over the norm).",
    ]
    missing = dict.fromkeys((row.backend, row.reason) for row in report.rows if row.status == "unavailable")
    return lines + [f"not run: {name}: {reason}" for name, reason in missing]


def to_markdown(report: Report) -> str:
    """The report as Markdown."""
    lines = [header(report), ""]
    if report.train:
        lines += [_markdown_line(TRAIN_TITLES), _markdown_line(["---", *["---:"] * (len(TRAIN_TITLES) - 1)])]
        lines += [*(_markdown_line(train_cells(curve)) for curve in report.train), ""]
    for title, columns, table in accuracy_tables(report):
        lines += [f"### {title}", "", _markdown_line(columns), _markdown_line(["---"] + ["---:"] * (len(columns) - 1))]
        lines += [*map(_markdown_line, table), ""]
    lines += [*(f"- {line}" for line in accuracy_notes(report)), ""]
    if report.settings.get("preset") == "seeds":
        for op, cells in seeds_rows(report.rows):
            lines += [f"### {op}", "", _markdown_line(SEEDS_TITLES), _markdown_line(["---"] * len(SEEDS_TITLES))]
            lines += [*map(_markdown_line, cells), ""]
    if not report.rows:
        return "\n".join(lines)
    for title, rows in groups(_without_silent(report.rows)):
        kept = filled_columns(rows)
        lines += [f"### {title}", "", _markdown_line([column.title for column in kept])]
        lines.append(_markdown_line(["---:" if column.numeric else "---" for column in kept]))
        lines += [_markdown_line(_cells(row, kept, first=True)) for row in rows]
        lines += ["", *(f"- {line}" for line in notes(rows)), ""]
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
