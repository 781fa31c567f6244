"""Two runs of the same cases: ratios of the medians, with intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from loss_bench.cases import shape_title
from loss_bench.measure import LEAST_SAMPLES
from loss_bench.results import FAILURES, Report, Row
from loss_bench.tables import NOTHING, milliseconds


@dataclass(frozen=True)
class Change:
    """One row of the old run and its like in the new one.

    Attributes:
        old, new: the rows.
        ratio: new median over old median; above 1 is slower. None unless both were timed.
        low, high: what the ratio may be, given the intervals of both medians; None where one of them has no interval.
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
        """``slower`` or ``faster`` where the interval leaves no doubt, else ``same``; or why there is neither."""
        if self.broken:
            return f"now {self.new.status}"
        if self.ratio is None:
            return "not timed"
        if self.low is None or self.high is None:
            return f"fewer than {LEAST_SAMPLES} samples"
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
    ratio, before, now = new.median_ms / old.median_ms, _interval(old), _interval(new)
    if before is None or now is None:
        return Change(old, new, ratio, None, None, broken)
    return Change(old, new, ratio, now[0] / before[1], now[1] / before[0], broken)


def _interval(row: Row) -> tuple[float, float] | None:
    """The 95% interval of the median."""
    # Files from before have the least and the largest of a few samples there, which is less sure.
    if not row.low_ms or not row.high_ms or row.samples < LEAST_SAMPLES:
        return None
    return row.low_ms, row.high_ms


def comparison_table(changes: Sequence[Change], above: float | None) -> Table:
    """The changes as a table, those that fail in red."""
    table = Table(title="new over old", title_justify="left", title_style="bold")
    labels = _labels([change.new for change in changes])
    for title in labels:
        table.add_column(title)
    for title in ("old ms", "new ms", "ratio", "interval"):
        table.add_column(title, justify="right")
    table.add_column("")
    for change in changes:
        row = change.new
        words = (label(row) for label in labels.values())
        times = (milliseconds(change.old.median_ms), milliseconds(row.median_ms))
        cells = (*words, *times, *_ratio_cells(change), change.word)
        table.add_row(*(Text(cell) for cell in cells), style=_style(change, above))
    return table


def _labels(rows: Sequence[Row]) -> dict[str, Callable[[Row], str]]:
    """The titles and cells of the columns that tell measurements apart."""
    found: dict[str, Callable[[Row], str]] = {
        "op": lambda row: row.op,
        shape_title(row.hidden for row in rows): lambda row: row.shape,
        "dtype": lambda row: row.dtype,
        "options": lambda row: row.options,
        "pass": lambda row: row.pass_,
        "backend": lambda row: row.backend,
        "device": lambda row: row.device,
    }
    alike = [name for name in ("options", "device") if len({found[name](row) for row in rows}) == 1]
    return {title: label for title, label in found.items() if title not in alike}


def _ratio_cells(change: Change) -> tuple[str, str]:
    if change.ratio is None:
        return NOTHING, NOTHING
    if change.low is None or change.high is None:
        return f"{change.ratio:.3f}", NOTHING
    return f"{change.ratio:.3f}", f"{change.low:.3f} - {change.high:.3f}"


def _style(change: Change, above: float | None) -> str:
    if change.broken or (above is not None and change.fails(above)):
        return "red"
    return "green" if change.word == "faster" else ""
