"""The tables beside those of timings: the seeds', training's, accuracy's. Their cells are text already."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from loss_bench.accuracy import Accuracy
from loss_bench.cases import PRESETS, Size, lacking
from loss_bench.results import FAILURES, Report, Row

NOTHING = "-"
"""Stands where there is no number."""


@dataclass(frozen=True)
class TextTable:
    """A table of text.

    Attributes:
        title: what stands above it.
        columns: their titles, with units.
        lines: the cells.
        words: the places of the columns that hold words; the others hold numbers.
        notes: what stands below it.
    """

    title: str
    columns: Sequence[str]
    lines: Sequence[Sequence[str]]
    words: Collection[int] = (0,)
    notes: Sequence[str] = ()


def number(value: float | None, form: str) -> str:
    """`value` in this format, or ``NOTHING``."""
    return NOTHING if value is None else format(value, form)


def milliseconds(value: float | None) -> str:
    """Three significant digits or more."""
    if value is None:
        return NOTHING
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}" if value < 100 else f"{value:.1f}"


def state(status: str) -> str:
    """What stands in a cell in place of a number."""
    return "n/a" if status == "unsupported" else status


def takes_no_part(row: Row) -> bool:
    """Whether a backend cannot run at all, or does not provide the op: then it is a note below, no line."""
    return row.status == "unavailable" or (row.status == "unsupported" and row.reason == lacking(row.op))


def is_failure(cell: str) -> bool:
    """Whether a cell says that something was wrong."""
    return not set(FAILURES).isdisjoint(cell.split())


def on_device(report: Report, device: str) -> str:
    """``"on <device>"`` if `report` has numbers of others beside it."""
    return f"on {device}" if len(report.devices) > 1 else ""


def joined(*parts: str) -> str:
    """Those of `parts` that say something, with spaces between."""
    return " ".join(filter(None, parts))


def title_of(report: Report, row: Row) -> str:
    """What stands above the table that `row` is in: the op, pass, options and, where there are several, device."""
    return joined(row.op, row.pass_, row.options, on_device(report, row.device))


def by_case(rows: Sequence[Row]) -> list[Row]:
    """Cases in order of appearance; in each the fastest backend first, then those without a time."""
    order = {key: place for place, key in enumerate(dict.fromkeys(row.case_key for row in rows))}
    return sorted(rows, key=lambda row: (order[row.case_key], row.median_ms is None, row.median_ms or 0.0))


def text_tables(report: Report) -> list[TextTable]:
    """All of them that `report` has something for."""
    return [*seeds_tables(report), *train_tables(report), *accuracy_tables(report)]


SEEDS_COLUMNS = (
    "Backend", "Batch", "Vocab", "Dtype", "Forward (ms)", "Speedup", "Backward (ms)", "Speedup",
)  # fmt: skip


def seeds_tables(report: Report) -> list[TextTable]:
    """The forward and backward times of each op side by side, at the sizes of the preset, if it was run."""
    if "seeds" not in report.presets:
        return []
    wanted = [row for row in report.rows if _size(row) in PRESETS["seeds"] and not row.options]
    halves = {row.key: row for row in wanted}
    found: dict[str, list[list[str]]] = {}
    for row in by_case([row for row in wanted if row.pass_ == "forward"]):
        if row.status in ("unsupported", "unavailable"):
            continue
        backward = halves.get((*row.case_key, "backward", row.backend, row.device))
        cells = [row.backend, str(row.rows), str(row.classes), row.dtype, *_half(row), *_half(backward)]
        title = joined(f"{row.op}, forward and backward", on_device(report, row.device))
        found.setdefault(title, []).append(cells)
    return [TextTable(title, SEEDS_COLUMNS, lines, words=(0, 3)) for title, lines in found.items()]


def _size(row: Row) -> Size:
    return Size(row.rows, row.classes, row.dtype, row.hidden)


def _half(row: Row | None) -> tuple[str, str]:
    if row is None:
        return NOTHING, NOTHING
    if row.status != "ok":
        return state(row.status), NOTHING
    return milliseconds(row.median_ms), number(row.speedup, ".2f")


TRAIN_COLUMNS = (
    "backend", "loss at start", "at 1/2", "at end", "max distance", "allowed", "tokens/s", "loss ms", "peak MiB",
)  # fmt: skip


def train_tables(report: Report) -> list[TextTable]:
    """One table for each model and device that was trained."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for curve in report.train:
        found.setdefault((curve["setup"], curve["device"]), []).append(curve)
    tables = []
    for (setup, device), members in found.items():
        title = joined(f"training curves: {setup}", on_device(report, device))
        reasons = [f"{curve['backend']}: {curve['reason']}" for curve in members if curve["reason"]]
        tables.append(TextTable(title, TRAIN_COLUMNS, [_train_line(curve) for curve in members], notes=reasons))
    return tables


def _train_line(curve: dict[str, Any]) -> list[str]:
    losses, wrong = curve["losses"], curve["status"] == "wrong"
    if not losses:
        return [curve["backend"], state(curve["status"]), *[""] * (len(TRAIN_COLUMNS) - 2)]
    return [
        curve["backend"],
        *("nan" if loss is None else f"{loss:.4f}" for loss in (losses[0], losses[len(losses) // 2], losses[-1])),
        number(curve["difference"], ".1e") + (" wrong" if wrong else ""),
        number(curve["allowed"], ".1e"),
        number(curve["tokens_per_s"], ".0f"),
        milliseconds(curve["loss_ms"]),
        number(curve["peak_mib"], ".1f"),
    ]


def accuracy_tables(report: Report) -> list[TextTable]:
    """For each device one table of everything, then for each op, dtype and result the worst and the mean errors."""
    rows = [Accuracy.from_json(pairs) for pairs in report.accuracy]
    tables: list[TextTable] = []
    for device in dict.fromkeys(row.device for row in rows):
        where = on_device(report, device)
        members = [row for row in rows if row.device == device and row.status != "unavailable"]
        tables += [_overview(members, where), *_details(members, where)] if members else []
    return tables


def _overview(rows: Sequence[Accuracy], where: str) -> TextTable:
    """Who is right where: the worse of result and gradient on each kind of input."""
    kinds = list(dict.fromkeys(row.kind for row in rows))
    found: dict[tuple[str, ...], dict[str, Accuracy]] = {}
    for row in rows:
        found.setdefault((row.op, f"{row.rows}x{row.classes}", row.dtype, row.backend), {})[row.kind] = row
    lines = []
    for labels, members in found.items():
        cells = [_overview_cell(members.get(kind)) for kind in kinds]
        largest = [_largest(members.values(), name) for name in ("result_abs", "grad_abs")]
        lines.append([*labels, *cells, *largest])
    columns = ("op", "rows x classes", "dtype", "backend", *kinds, "result, absolute", "gradient, absolute")
    title = joined("accuracy: worst error against float64, in units of rounding", where)
    return TextTable(title, columns, lines, words=range(4), notes=_accuracy_notes(rows))


def _overview_cell(row: Accuracy | None) -> str:
    if row is None:
        return ""
    if row.status != "ok":
        return state(row.status)
    found = [value for value in (row.result_ulp, row.grad_ulp) if value is not None]
    return short(max(found)) if found else NOTHING


def _largest(rows: Iterable[Accuracy], name: str) -> str:
    found = [value for row in rows if row.status == "ok" and (value := getattr(row, name)) is not None]
    return f"{max(found):.1e}" if found else NOTHING


def _details(rows: Sequence[Accuracy], where: str) -> list[TextTable]:
    found: dict[tuple[str, ...], list[Accuracy]] = {}
    for row in rows:
        found.setdefault((row.op, f"{row.rows}x{row.classes}", row.dtype), []).append(row)
    tables = []
    for key, members in found.items():
        kinds = list(dict.fromkeys(row.kind for row in members))
        names = list(dict.fromkeys(row.backend for row in members))
        cells = {(row.backend, row.kind): row for row in members}
        for part, name in (("result", "loss" if key[0] == "cross_entropy" else "output"), ("grad", "gradient")):
            title = joined(*key, where) + f": {name}, error in units of rounding, worst (mean)"
            lines = [[b, *(_detail_cell(cells.get((b, kind)), part) for kind in kinds)] for b in names]
            tables.append(TextTable(title, ["backend", *kinds], lines))
    return tables


def _detail_cell(row: Accuracy | None, part: str) -> str:
    if row is None:
        return ""
    worst, mean = getattr(row, f"{part}_ulp"), getattr(row, f"{part}_ulp_mean")
    if row.status not in ("ok", "wrong"):
        return state(row.status)
    if worst is None and row.status == "ok":
        return NOTHING
    if worst is None or not math.isfinite(worst):
        return "wrong"
    return short(worst) if worst == mean else f"{short(worst)} ({short(mean)})"


def short(value: float) -> str:
    """Three digits at the most, or a power of ten."""
    return f"{value:.2f}" if value < 10 else f"{value:.0f}" if value < 1e4 else f"{value:.0e}"


def _accuracy_notes(rows: Iterable[Accuracy]) -> list[str]:
    """One line for every reason that a cell holds no number."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.reason:
            where = found.setdefault((row.backend, row.reason), [])
            if (place := f"{row.op} {row.dtype} {row.kind}") not in where:
                where.append(place)
    return [f"{backend} ({', '.join(where)}): {reason}" for (backend, reason), where in found.items()]
