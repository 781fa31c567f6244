"""Two runs of the same cases: ratios of the medians, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from loss_bench.cases import shape_title
from loss_bench.results import FAILURES, Report, Row
from loss_bench.tables import milliseconds


@dataclass(frozen=True)
class Change:
    """One row of the old run and its like in the new one.

    Attributes:
        old, new: the rows.
        ratio: new median over old median; above 1 is slower. None unless both were timed.
        low, high: what the ratio may be, given the intervals of both medians.
        broken: the old row was timed and the new one is wrong or failed.
    """

    old: Row
    new: Row
    ratio: float | None
    low: float | None
    high: float | None
    broken: bool

    @property
    def word(self) -> str:
        """``slower`` or ``faster`` where the interval leaves no doubt, else ``same``; or what became of the row."""
        if self.broken:
            return f"now {self.new.status}"
        if self.low is None or self.high is None:
            return "not timed"
        return "slower" if self.low > 1 else "faster" if self.high < 1 else "same"

    def fails(self, above: float) -> bool:
        """Whether the new row is broken, or slower by more than `above` and surely slower."""
        if self.broken:
            return True
        return self.ratio is not None and self.low is not None and self.ratio > above and self.low > 1


def compare(old: Report, new: Report) -> list[Change]:
    """The rows that both runs have, in the order of the new one."""
    before = {row.key: row for row in old.rows}
    return [_change(before[row.key], row) for row in new.rows if row.key in before]


def _change(old: Row, new: Row) -> Change:
    broken = old.status == "ok" and new.status in FAILURES
    if not (old.median_ms and new.median_ms):
        return Change(old, new, None, None, None, broken)
    old_low, old_high = old.low_ms or old.median_ms, old.high_ms or old.median_ms
    new_low, new_high = new.low_ms or new.median_ms, new.high_ms or new.median_ms
    return Change(old, new, new.median_ms / old.median_ms, new_low / old_high, new_high / old_low, broken)


def comparison_table(changes: Sequence[Change], above: float | None) -> Table:
    """The changes as a table, those that fail in red."""
    table = Table(title="new over old", title_justify="left", title_style="bold")
    for title in ("op", shape_title(change.new.hidden for change in changes), "dtype", "pass", "backend"):
        table.add_column(title)
    for title in ("old ms", "new ms", "ratio", "interval"):
        table.add_column(title, justify="right")
    table.add_column("")
    for change in changes:
        row = change.new
        labels = (row.op, row.shape, row.dtype, row.pass_, row.backend)
        times = (milliseconds(change.old.median_ms), milliseconds(row.median_ms))
        table.add_row(*labels, *times, *_ratio_cells(change), change.word, style=_style(change, above))
    return table


def _ratio_cells(change: Change) -> tuple[str, str]:
    if change.ratio is None:
        return "-", "-"
    return f"{change.ratio:.3f}", f"{change.low:.3f} - {change.high:.3f}"


def _style(change: Change, above: float | None) -> str:
    if change.broken or (above is not None and change.fails(above)):
        return "red"
    return "green" if change.word == "faster" else ""
