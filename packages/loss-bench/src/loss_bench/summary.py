"""One pass of a run at a glance: a line for each case, a column for each backend."""

from __future__ import annotations

import re
from collections.abc import Sequence

from loss_bench.cases import LINEAR, shape_title, written_shape
from loss_bench.results import INPUTS_TOO_LARGE, OUT_OF_MEMORY, Report, Row
from loss_bench.tables import NOTHING, TextTable, number, takes_no_part, title_of

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


def summary_tables(report: Report, pass_: str, backends: Sequence[str] = ()) -> list[TextTable]:
    """A table for each op, options and device that has rows of `pass_`.

    Args:
        report: what was measured.
        pass_: of ``cases.PASSES``.
        backends: the columns; none for all that can run somewhere, in order of appearance.

    Raises:
        ValueError: if there is no row of `pass_`, or none of one of `backends`.
    """
    rows = [row for row in report.rows if row.pass_ == pass_]
    if not rows:
        there = ", ".join(dict.fromkeys(row.pass_ for row in report.rows)) or "none"
        raise ValueError(f"no rows of pass {pass_!r} to summarize; there are: {there}")
    columns = _columns(rows, backends)
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(title_of(report, row), []).append(row)
    return [_table(title, members, columns) for title, members in found.items()]


def _columns(rows: Sequence[Row], wanted: Sequence[str]) -> list[str]:
    there = list(dict.fromkeys(row.backend for row in rows))
    for name in wanted:
        if name not in there:
            raise ValueError(f"no rows of backend {name!r} to summarize; there are: {', '.join(there)}")
    return list(wanted) or list(dict.fromkeys(row.backend for row in rows if not takes_no_part(row)))


def _table(title: str, rows: Sequence[Row], backends: Sequence[str]) -> TextTable:
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        shape = written_shape(row.rows, row.classes, row.hidden, " x ")
        cases.setdefault((shape, row.dtype), {})[row.backend] = row
    lines = [[*labels, *(_cell(members.get(name)) for name in backends)] for labels, members in cases.items()]
    columns = [shape_title(row.hidden for row in rows), "dtype", *backends]
    if all(row.limit_share is None for row in rows):
        return TextTable(f"{title}: median ms", columns, lines, words=(0, 1))
    linear = rows[0].op in LINEAR
    what = "median ms (share of the limit)" + ("; peak MiB" if linear else "")
    return TextTable(f"{title}: {what}", columns, lines, words=(0, 1), notes=[_LINEAR_LIMIT if linear else _LIMIT])


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
