"""One pass of a run at a glance, or several: a line for each case, a column for each backend."""

from __future__ import annotations

import re
from collections.abc import Sequence

from loss_bench.cases import LINEAR, shape_title, written_shape
from loss_bench.results import INPUTS_TOO_LARGE, OUT_OF_MEMORY, Report, Row
from loss_bench.tables import NOTHING, TextTable, joined, number, on_device, takes_no_part

_WORDS = {
    "wrong": "wrong",
    "unsupported": "refuses",
    "unavailable": "cannot run",
    "error": "fails",
    "crashed": "crashes",
    "timeout": "hangs",
}
_LIMIT = "limit: the fewest bytes that the pass has to move, at the speed of a copy in the same process"
_LINEAR_LIMIT = (
    "limit: the matrix products that the pass consists of, at the rate of a square one in the same dtype and process; "
    "MiB: the peak beyond the inputs, gradients included"
)


def summary_tables(
    report: Report, passes: Sequence[str], backends: Sequence[str] = (), ops: Sequence[str] = ()
) -> list[TextTable]:
    """A table for each op, options and device that has rows of `passes`: of one its times, of several their shares.

    Args:
        report: what was measured.
        passes: of ``cases.PASSES``.
        backends: the columns; none for all that can run somewhere, in order of appearance.
        ops: of ``cases.OPS``; none for all.

    Raises:
        ValueError: if there is no row of one of `ops`, `passes` or `backends`.
    """
    rows = _only(report.rows, "op", "op", ops)
    rows = _only(rows, "pass", "pass_", passes)
    columns = _columns(rows, backends)
    found: dict[str, list[Row]] = {}
    for row in rows:
        title = joined(row.op, " / ".join(passes), row.options, on_device(report, row.device))
        found.setdefault(title, []).append(row)
    return [_table(title, members, columns, passes) for title, members in found.items()]


def _check_there(rows: Sequence[Row], what: str, field: str, wanted: Sequence[str]) -> None:
    there = list(dict.fromkeys(getattr(row, field) for row in rows))
    for name in wanted:
        if name not in there:
            raise ValueError(f"no rows of {what} {name!r} to summarize; there are: {', '.join(there) or 'none'}")


def _only(rows: Sequence[Row], what: str, field: str, wanted: Sequence[str]) -> list[Row]:
    _check_there(rows, what, field, wanted)
    return [row for row in rows if not wanted or getattr(row, field) in wanted]


def _columns(rows: Sequence[Row], wanted: Sequence[str]) -> list[str]:
    _check_there(rows, "backend", "backend", wanted)
    return list(wanted) or list(dict.fromkeys(row.backend for row in rows if not takes_no_part(row)))


def _table(title: str, rows: Sequence[Row], backends: Sequence[str], passes: Sequence[str]) -> TextTable:
    cases: dict[tuple[str, str], dict[tuple[str, str], Row]] = {}
    for row in rows:
        shape = written_shape(row.rows, row.classes, row.hidden, " x ")
        cases.setdefault((shape, row.dtype), {})[row.backend, row.pass_] = row
    cell = _cell if len(passes) == 1 else _shares
    lines = [
        [*labels, *(cell(*(members.get((name, pass_)) for pass_ in passes)) for name in backends)]
        for labels, members in cases.items()
    ]
    columns = [shape_title(row.hidden for row in rows), "dtype", *backends]
    linear = rows[0].op in LINEAR
    notes = [_LINEAR_LIMIT if linear else _LIMIT]
    if len(passes) > 1:
        what = "share of the limit"
    elif all(row.limit_share is None for row in rows):
        what, notes = "median ms", []
    else:
        what = "median ms (share of the limit)" + ("; peak MiB" if linear else "")
    return TextTable(f"{title}: {what}", columns, lines, words=(0, 1), notes=notes)


def _shares(*rows: Row | None) -> str:
    """Those of a case's passes, or what is the same of all."""
    cells = [_share(row) for row in rows]
    return cells[0] if len(set(cells)) == 1 and "%" not in cells[0] else " / ".join(cells)


def _share(row: Row | None) -> str:
    if row is None:
        return NOTHING
    if row.status != "ok":
        return _in_a_word(row)
    return NOTHING if row.limit_share is None else f"{row.limit_share:.0%}"


def _cell(row: Row | None) -> str:
    if row is None:
        return NOTHING
    if row.status != "ok":
        return _in_a_word(row)
    share = "" if row.limit_share is None else f" ({row.limit_share:.0%})"
    # Without the logits as a whole, memory is what the libraries differ in most.
    peak = f"; {row.peak_mib:.0f}" if row.op in LINEAR and row.peak_mib is not None else ""
    return number(row.median_ms, ".3f") + share + peak


def _in_a_word(row: Row) -> str:
    """Why there is no time."""
    if row.status == "wrong" and "NaN" in row.reason:
        return "NaN"
    # What a compiler said is all that tells its failures from others.
    if row.status == "error" and re.search("compil", row.reason, re.IGNORECASE):
        return "does not compile"
    if row.reason in (OUT_OF_MEMORY, INPUTS_TOO_LARGE):
        return "out of memory"
    return _WORDS[row.status]
