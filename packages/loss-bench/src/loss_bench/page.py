"""One self-contained HTML page of a report; needs jinja2 and matplotlib (``loss-bench[report]``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from loss_bench import report as reporting
from loss_bench.plots import plots, to_svg
from loss_bench.results import Report, Row


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
        header=reporting.header(report),
        facts=_facts(report),
        sections=[*_timing_sections(report), *_accuracy_sections(report), *_train_sections(report)],
        footnotes=reporting.footnotes(report) if report.rows else [],
    )


def _facts(report: Report) -> list[tuple[str, str]]:
    """The environment, a line a fact."""
    facts: dict[str, Any] = {**report.environment, **report.environment.get("packages", {})}
    facts.pop("packages", None)
    facts |= {name: f"{value:.0f}" for name, value in report.ceilings.items()}
    facts["command"] = " ".join(report.command)
    return [(name, str(value)) for name, value in facts.items() if value not in (None, "")]


def _timing_sections(report: Report) -> list[_Section]:
    drawn: dict[str, list[str]] = {}
    for title, figure in plots(report):
        drawn.setdefault(title.split(" sweep, ")[0], []).append(to_svg(figure))
    sections = []
    for title, rows in reporting.groups(row for row in report.rows if row.status != "unavailable"):
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
    return _Cell(("n/a" if row.status == "unsupported" else row.status) if is_time else "", kind=row.status)


def _sort_key(text: str) -> float | str:
    """The first number of a cell, if it begins with one."""
    first = text.split()[0].rstrip("%") if text.split() else ""
    try:
        return float(first)
    except ValueError:
        return ""


def _accuracy_sections(report: Report) -> list[_Section]:
    notes = reporting.accuracy_notes(report)
    tables = reporting.accuracy_tables(report)
    return [
        _Section(title, _titles(columns), _plain_lines(lines), notes if place == len(tables) - 1 else [])
        for place, (title, columns, lines) in enumerate(tables)
    ]


def _train_sections(report: Report) -> list[_Section]:
    if not report.train:
        return []
    lines = [reporting.train_cells(curve) for curve in report.train]
    return [_Section("training curves", _titles(reporting.TRAIN_TITLES), _plain_lines(lines))]


def _titles(columns: list[str] | tuple[str, ...]) -> list[tuple[str, bool]]:
    return [(column, place > 0) for place, column in enumerate(columns)]


def _plain_lines(lines: list[list[str]]) -> list[list[_Cell]]:
    return [
        [
            _Cell(text, _sort_key(text) if place else text, "wrong" if "WRONG" in text else "")
            for place, text in enumerate(line)
        ]
        for line in lines
    ]
