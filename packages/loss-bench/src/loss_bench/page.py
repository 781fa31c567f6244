"""One self-contained HTML page of a report; needs jinja2 and matplotlib (``loss-bench[report]``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loss_bench import report as reporting
from loss_bench.plots import plots, to_svg
from loss_bench.results import Report, Row
from loss_bench.tables import TextTable, is_failure, state, text_tables


@dataclass
class _Cell:
    """A cell and what it is sorted by: a number, or its text where there is none."""

    text: str
    key: float | str = ""
    kind: str = ""


@dataclass
class _Section:
    """A table, with its plots above and its notes below."""

    title: str
    columns: list[tuple[str, bool]]
    lines: list[list[_Cell]]
    notes: list[str] = field(default_factory=list)
    plots: list[str] = field(default_factory=list)


def to_html(report: Report) -> str:
    """The page; nothing in it is loaded from elsewhere."""
    from jinja2 import Environment, PackageLoader, select_autoescape

    environment = Environment(loader=PackageLoader("loss_bench", "templates"), autoescape=select_autoescape(["jinja"]))
    return environment.get_template("page.html.jinja").render(
        report=report,
        devices=", ".join(report.devices),
        machines=reporting.machines(report),
        sources=[_facts(source) for source in report.all_sources],
        warnings=reporting.warnings(report),
        sections=[*map(_text_section, text_tables(report)), *_timing_sections(report)],
        footnotes=reporting.footnotes(report),
    )


def _facts(source: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The environment of one run, a line a fact."""
    facts: dict[str, Any] = {**source["environment"], **source["environment"].get("packages", {})}
    facts.pop("packages", None)
    facts |= {name: f"{value:.0f}" for name, value in source["ceilings"].items()}
    facts |= {"command": " ".join(source["command"]), "created": source["created"]}
    return [(name, str(value)) for name, value in facts.items() if value not in (None, "")]


def _timing_sections(report: Report) -> list[_Section]:
    drawn: dict[str, list[str]] = {}
    for plot in plots(report):
        drawn.setdefault(plot.table, []).append(to_svg(plot.figure))
    sections = []
    for title, rows in reporting.groups(report):
        columns = reporting.filled_columns(rows)
        lines = [[_timing_cell(row, column) for column in columns] for row in rows]
        titles = [(column.title, column.numeric) for column in columns]
        sections.append(_Section(title, titles, lines, reporting.notes(rows), drawn.get(title, [])))
    return sections


def _timing_cell(row: Row, column: reporting.Column) -> _Cell:
    if row.status == "ok":
        text = column.cell(row)
        return _Cell(text, _sort_key(text) if column.numeric else text)
    if not column.numeric:
        text = column.cell(row)
        return _Cell(text, text)
    is_time = column.title == "median ms"
    return _Cell(state(row.status) if is_time else "", kind=row.status)


def _sort_key(text: str) -> float | str:
    """The first number of a cell, if it begins with one."""
    first = text.split()[0].rstrip("%") if text.split() else ""
    try:
        return float(first)
    except ValueError:
        return ""


def _text_section(table: TextTable) -> _Section:
    titles = [(column, place not in table.words) for place, column in enumerate(table.columns)]
    lines = [
        [
            _Cell(text, _sort_key(text) if numeric else text, "wrong" if is_failure(text) else "")
            for text, (_, numeric) in zip(line, titles, strict=True)
        ]
        for line in table.lines
    ]
    return _Section(table.title, titles, lines, list(table.notes))
