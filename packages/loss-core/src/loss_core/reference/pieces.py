"""Rows a few at a time, so that what is converted to float32 is small beside the whole."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

PIECE = 2**22
"""Elements converted at a time on a CPU: 16 MiB in float32, which stays in caches."""

ON_DEVICES = 4
"""So many times more elsewhere, where a piece has to outlast the launches of the next: 64 MiB."""


def pieces(rows: Tensor) -> Iterator[slice]:
    """Slices of `rows` (rows, classes) of at most that many elements, or of one row."""
    count, classes = rows.shape
    elements = PIECE if rows.device.type == "cpu" else PIECE * ON_DEVICES
    step = max(1, elements // max(1, classes))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))
