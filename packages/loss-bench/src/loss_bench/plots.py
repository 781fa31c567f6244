"""Bars against the ceiling, and sweeps over the vocabulary; needs matplotlib (``loss-bench[report]``)."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from loss_bench.cases import LINEAR
from loss_bench.report import groups
from loss_bench.results import Report, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Distinguishable with a colour-vision deficiency and on a dark page.
_COLOURS = (
    "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#ee8866", "#77aadd", "#332288",
    "#999933", "#882255", "#000000", "#44aa99",
)  # fmt: skip
_SWEEP_LEAST = 3


class Plot(NamedTuple):
    """A figure, its title, and the title of the table whose rows it shows."""

    title: str
    table: str
    figure: Figure


def plots(report: Report) -> list[Plot]:
    """The plots of every table that has something to draw."""
    colours = _colours(row for row in report.rows if row.status == "ok")
    found = []
    for table, members in groups(report):
        rows = [row for row in members if row.status == "ok"]
        shares = [row for row in rows if row.limit_share is not None]
        if shares:
            found.append(Plot(table, table, _bars(table, shares, colours)))
        for (count, hidden, dtype), swept in _sweeps(shares or rows).items():
            width = "" if hidden is None else f"hidden {hidden}, "
            title = f"{table} sweep, {count} rows, {width}{dtype}"
            found.append(Plot(title, table, _sweep(title, swept, colours)))
    return found


def _colours(rows: Iterable[Row]) -> dict[str, str]:
    """One colour a backend, the same in all plots."""
    names = dict.fromkeys(row.backend for row in rows)
    return {name: _COLOURS[place % len(_COLOURS)] for place, name in enumerate(names)}


def _figure(title: str, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _bars(title: str, rows: Sequence[Row], colours: dict[str, str]) -> Figure:
    names = list(dict.fromkeys(row.backend for row in rows))
    cases = list(dict.fromkeys(f"{row.shape}\n{row.dtype}" for row in rows))
    figure, axes = _figure(title, 1.2 + 0.17 * len(names) * len(cases) + 0.2 * len(cases))
    thickness = 0.84 / len(names)
    for place, name in enumerate(names):
        own = {f"{row.shape}\n{row.dtype}": 100 * (row.limit_share or 0) for row in rows if row.backend == name}
        offsets = [index - 0.42 + (place + 0.5) * thickness for index, case in enumerate(cases) if case in own]
        bars = axes.barh(offsets, [own[case] for case in cases if case in own], thickness, color=colours[name])
        axes.bar_label(bars, fmt="%.0f", fontsize=7, padding=2)
        bars.set_label(name)
    axes.axvline(100, color="#888888", linestyle="--", linewidth=1, label=_limit(rows))
    axes.set_yticks(range(len(cases)), cases, fontsize=8)
    axes.set_ylim(len(cases) - 0.4, -0.6)
    axes.set_xlabel(f"{_percent(rows)} (more is better)")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def _limit(rows: Sequence[Row]) -> str:
    """What bounds the op of `rows`."""
    return "matrix product" if rows[0].op in LINEAR else "copy"


def _percent(rows: Sequence[Row]) -> str:
    return "% of the rate of a matrix product" if rows[0].op in LINEAR else "% of the copy bandwidth"


def _sweeps(rows: Sequence[Row]) -> dict[tuple[int, int | None, str], list[Row]]:
    """The rows by number of rows, width and dtype, where they have several vocabularies."""
    found: dict[tuple[int, int | None, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.rows, row.hidden, row.dtype), []).append(row)
    return {key: members for key, members in found.items() if len({r.classes for r in members}) >= _SWEEP_LEAST}


def _sweep(title: str, rows: Sequence[Row], colours: dict[str, str]) -> Figure:
    shares = all(row.limit_share is not None for row in rows)
    figure, axes = _figure(title, 4.0)
    for name in dict.fromkeys(row.backend for row in rows):
        own = sorted((row for row in rows if row.backend == name), key=lambda row: row.classes)
        values = [100 * (row.limit_share or 0) if shares else (row.median_ms or 0.0) for row in own]
        axes.plot([row.classes for row in own], values, marker="o", markersize=4, color=colours[name], label=name)
    classes = sorted({row.classes for row in rows})
    axes.set_xscale("log")
    axes.set_xticks(classes, [str(number) for number in classes], fontsize=8, rotation=45, ha="right")
    axes.minorticks_off()
    axes.set_xlabel("classes")
    axes.set_ylabel(_percent(rows) if shares else "median ms")
    if shares:
        axes.axhline(100, color="#888888", linestyle="--", linewidth=1, label=_limit(rows))
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def to_svg(figure: Figure) -> str:
    """The figure as an ``<svg>`` element, to be put into a page."""
    import matplotlib as mpl

    out = io.StringIO()
    # Text as text: smaller, and can be searched. No date, so that the same results give the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "loss-bench"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def write_plots(report: Report, folder: Path) -> list[Path]:
    """Write every plot as PNG and SVG; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for title, _, figure in plots(report):
        stem = "-".join("".join(c if c.isalnum() else " " for c in title).split())
        for ending in ("png", "svg"):
            files.append(folder / f"{stem}.{ending}")
            figure.savefig(files[-1], dpi=160)
    return files
