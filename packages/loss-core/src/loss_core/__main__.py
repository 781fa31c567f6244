"""``python -m loss_core`` prints the table of installed backends."""

from loss_core.registry import list_backends


def main() -> None:
    """Print name, distribution, version, ops and availability of every backend."""
    header = ("backend", "distribution", "ops", "available")
    rows = [
        (b.name, f"{b.distribution} {b.version}", ", ".join(b.ops) or "-", "yes" if b.available else f"no: {b.reason}")
        for b in list_backends()
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
