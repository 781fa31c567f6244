"""The rows as tables for people: rich in a terminal, Markdown and CSV in files."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from loss_bench.accuracy import Accuracy
from loss_bench.cases import LINEAR, shape_title
from loss_bench.results import FAILURES, Report, Row, doubts
from loss_bench.summary import summary_tables
from loss_bench.tables import (
    NOTHING,
    TextTable,
    by_case,
    is_failure,
    joined,
    milliseconds,
    number,
    on_device,
    state,
    takes_no_part,
    text_tables,
    title_of,
)


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


def _spread(row: Row) -> str:
    return f"{milliseconds(row.p20_ms)} - {milliseconds(row.p80_ms)}"


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0%}"


def _error(row: Row) -> str:
    errors = [error for error in (row.loss_error, row.grad_error) if error is not None]
    return " / ".join(f"{error:.0e}" for error in errors) or NOTHING


_PEAK = "peak MiB"

COLUMNS = (
    Column("dtype", lambda row: row.dtype, numeric=False),
    Column("backend", lambda row: row.backend, numeric=False),
    Column("median ms", lambda row: milliseconds(row.median_ms)),
    Column("20-80% ms", _spread),
    Column("GB/s", lambda row: number(row.gb_s, ".0f")),
    Column("% of copy", lambda row: _share(row.copy_share)),
    Column("TFLOP/s", lambda row: number(row.tflop_s, ".3g")),
    Column("% of matmul", lambda row: _share(row.matmul_share)),
    Column("graph ms", lambda row: milliseconds(row.graph_ms)),
    Column("% of copy (graph)", lambda row: _share(row.graph_share)),
    Column("% of matmul (graph)", lambda row: _share(row.graph_matmul_share)),
    Column("host us", lambda row: number(row.host_us, ".0f")),
    Column("least host us", lambda row: number(row.host_least_us, ".0f")),
    Column(_PEAK, lambda row: number(row.peak_mib, ".1f")),
    Column("x torch", lambda row: number(row.speedup, ".2f")),
    Column("error loss / grad", _error),
)
"""Behind the first one, which is that of the shapes."""

_LABELS = 3
_DISPENSABLE = (
    "20-80% ms",
    "graph ms",
    "% of copy (graph)",
    "% of matmul (graph)",
    _PEAK,
    "GB/s",
    "TFLOP/s",
    "host us",
    "least host us",
    "error loss / grad",
    "% of copy",
    "% of matmul",
    "dtype",
)


def groups(report: Report) -> list[tuple[str, list[Row]]]:
    """Rows by op, options, pass and device, each with the title of its table, in order of appearance.

    Those of backends that take no part are left out.
    """
    found: dict[str, list[Row]] = {}
    for row in report.rows:
        if takes_no_part(row):
            continue
        found.setdefault(title_of(report, row), []).append(row)
    return [(title, by_case(members)) for title, members in found.items()]


def explanation(row: Row) -> str:
    """What stands in place of the numbers of a row that has none, or beside those that need a word."""
    if row.status == "ok":
        return "; ".join(filter(None, (row.note, "the run ended within this case" if row.interrupted else "")))
    text = row.reason if row.status == "unsupported" else f"{row.status}: {row.reason}"
    if row.status == "wrong":
        text += f" (error {_error(row)})"
    return text


def print_report(report: Report, console: Console) -> None:
    """Print every table of `report`, the backends that cannot run last."""
    for line in machines(report):
        console.print(Text(line))
    for line in warnings(report):
        console.print(Text(line, style="yellow"))
    for table in text_tables(report):
        console.print(Text(table.title, style="bold"))
        console.print(_rich_table(table))
        for line in table.notes:
            console.print(Text(f"  {line}", style="dim"))
    for title, rows in groups(report):
        console.print(Text(title, style="bold"))
        console.print(_fitting_table(rows, console))
        for line in notes(rows):
            console.print(Text(f"  {line}", style="dim"))
    for line in footnotes(report):
        console.print(Text(line, style="dim"))


def _rich_table(table: TextTable) -> Table:
    # A title of the table's own would be broken to its width.
    found = Table()
    for place, column in enumerate(table.columns):
        # Where the terminal is narrow, numbers are broken before names are cut.
        is_word = place in table.words
        found.add_column(column, justify="left" if is_word else "right", no_wrap=is_word)
    for line in table.lines:
        found.add_row(*(Text(cell, style="red" if is_failure(cell) else "") for cell in line))
    return found


def machines(report: Report) -> list[str]:
    """One line for every machine and set of versions that `report` has numbers from, with its ceilings."""
    found: dict[tuple[str, ...], list[dict[str, float]]] = {}
    for source in report.all_sources:
        found.setdefault(_machine(source["environment"]), []).append(source["ceilings"])
    return [" | ".join(filter(None, (*words, *_ceilings(ceilings)))) for words, ceilings in found.items()]


def warnings(report: Report) -> list[str]:
    """What makes the times unsafe, beside what their rows say."""
    if not report.rows and not report.train:
        return []
    environments = [source["environment"] for source in report.all_sources]
    found = [
        joined("unsafe", on_device(report, environment["device"])) + f": {doubt}"
        for environment in environments
        for doubt in doubts(environment)
    ]
    return list(dict.fromkeys(found))


def _machine(environment: Mapping[str, Any]) -> tuple[str, ...]:
    packages = environment.get("packages", {}).items()
    return (
        str(environment.get("device")),
        f"CUDA {environment['cuda']}" if environment.get("cuda") else "",
        f"torch {environment.get('torch')}",
        *(f"{name} {version}" for name, version in packages),
    )


def _ceilings(found: Sequence[Mapping[str, float]]) -> list[str]:
    """The ceilings of several processes, as a range where they differ."""
    words = []
    for name, title, unit in (("copy_gb_s", "copy", "GB/s"), ("matmul_tflop_s", "bf16 matrix product", "TFLOP/s")):
        values = [ceilings[name] for ceilings in found if name in ceilings]
        if values:
            ends = dict.fromkeys(f"{value:.0f}" for value in (min(values), max(values)))
            words.append(f"{title} {' to '.join(ends)} {unit}")
    return words


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    table = Table()
    for column in columns:
        table.add_column(column.title, justify="right" if column.numeric else "left", no_wrap=True)
    for _, members in groupby(rows, key=lambda row: row.case_key):
        for place, row in enumerate(members):
            table.add_row(*_cells(row, columns, first=place == 0), style=_status_style(row.status))
        table.add_section()
    return table


def _fitting_table(rows: Sequence[Row], console: Console) -> Table:
    """The table without the columns that matter least, as many as it takes to fit into the console."""
    columns = filled_columns(rows)
    table = _table(rows, columns)
    for name in _dispensable(rows):
        if _wanted_width(table, console) <= console.width:
            break
        columns = [column for column in columns if column.title != name]
        table = _table(rows, columns)
    return table


def _dispensable(rows: Sequence[Row]) -> Sequence[str]:
    """The titles of the columns that a narrow table does without, in the order in which they go."""
    if any(row.op in LINEAR for row in rows):
        # What the libraries that make the logits in pieces are there for.
        return [*(name for name in _DISPENSABLE if name != _PEAK), _PEAK]
    return _DISPENSABLE


def filled_columns(rows: Sequence[Row]) -> list[Column]:
    """The columns that hold anything, such as those that exist on a GPU only."""
    columns = (Column(shape_title(row.hidden for row in rows), lambda row: row.shape, numeric=False), *COLUMNS)
    cells = [[column.cell(row) for row in rows if row.status == "ok"] for column in columns]
    return [column for column, found in zip(columns, cells, strict=True) if not found or set(found) != {NOTHING}]


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
        cells = cells[:_LABELS] + [state(row.status)] + [""] * (len(columns) - _LABELS - 1)
    if not first:
        cells[0] = cells[1] = ""
    return cells


def _status_style(status: str) -> str:
    return "red" if status in FAILURES else "" if status == "ok" else "dim"


def footnotes(report: Report) -> list[str]:
    """How to read the tables of timings, and who is missing from all tables."""
    errors = map(Accuracy.from_json, report.accuracy)
    absent: list[Row | Accuracy] = [row for row in report.rows if takes_no_part(row)]
    absent += [row for row in errors if row.status == "unavailable"]
    missing = dict.fromkeys((row.backend, row.reason, on_device(report, row.device)) for row in absent)
    return [
        *_timing_footnotes(report),
        *(f"not run{where and ' ' + where}: {name}: {reason}" for name, reason, where in missing),
    ]


def _timing_footnotes(report: Report) -> list[str]:
    if not report.rows:
        return []
    return [
        (
            "GB/s: the fewest bytes that the pass has to move over its median; % of copy: against a copy in this "
            "process. graph: replayed as a CUDA graph, without the host. x torch: torch.nn.functional's median over "
            "this one. host us: of one call at 64 x 512, the median over batches of "
            "calls; least host us: of the quickest batch."
        ),
        *_linear_footnote(report),
        "error: against float64, relative (norm of the difference over the norm).",
    ]


def _linear_footnote(report: Report) -> list[str]:
    if not any(row.op in LINEAR for row in report.rows):
        return []
    return [
        (
            "TFLOP/s: the fewest operations of the pass's matrix products over its median; % of matmul: against a "
            "square matrix product in the same dtype and process. peak MiB: beyond the inputs, the gradients of input "
            "and weight included. host us: at 128 x 256 x 512."
        )
    ]


def to_markdown(report: Report) -> str:
    """The report as Markdown."""
    # Two spaces at the end of a line are Markdown's line break.
    lines = ["  \n".join(machines(report) + warnings(report)), ""]
    lines += _text_tables_markdown(text_tables(report))
    for title, rows in groups(report):
        kept = filled_columns(rows)
        alignment = ["---:" if column.numeric else "---" for column in kept]
        cells = [_cells(row, kept, first=True) for row in rows]
        lines += _markdown_table(title, [column.title for column in kept], alignment, cells, notes(rows))
    return "\n".join(lines + [f"- {line}" for line in footnotes(report)]) + "\n"


def summary_markdown(
    report: Report, passes: Sequence[str], backends: Sequence[str] = (), ops: Sequence[str] = ()
) -> str:
    """The tables of ``summary`` as Markdown; arguments and exceptions are those of ``summary_tables``."""
    return "\n".join(_text_tables_markdown(summary_tables(report, passes, backends, ops)))


def _text_tables_markdown(tables: Iterable[TextTable]) -> list[str]:
    lines = []
    for table in tables:
        alignment = ["---" if place in table.words else "---:" for place in range(len(table.columns))]
        lines += _markdown_table(table.title, table.columns, alignment, table.lines, table.notes)
    return lines


def _markdown_table(
    title: str,
    columns: Sequence[str],
    alignment: Sequence[str],
    lines: Iterable[Sequence[str]],
    below: Sequence[str],
) -> list[str]:
    found = [f"### {title}", "", *map(_markdown_line, (columns, alignment, *lines)), ""]
    return [*found, *(f"- {line}" for line in below), ""] if below else found


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
