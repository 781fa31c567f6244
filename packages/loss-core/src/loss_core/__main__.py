"""``python -m loss_core`` prints the table of installed backends."""

from loss_core.registry import BackendInfo, list_backends


def main() -> None:
    """Print name, distribution, version, ops and availability of every backend."""
    header = ("backend", "distribution", "ops", "available")
    rows = [
        (b.name, f"{b.distribution} {b.version}", ", ".join(b.ops) or "-", _availability(b)) for b in list_backends()
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _availability(backend: BackendInfo) -> str:
    # A reason may be the message of an import error, which often has several lines.
    return "yes" if backend.available else " ".join(f"no: {backend.reason}".split())


if __name__ == "__main__":
    main()
