"""Files that a command writes: refused before it spends its time if they cannot be, and then whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def write(path: Path, content: str | bytes) -> None:
    """Write a file, and its folder; a link, a pipe or a device is written to, any other file is replaced."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    if _stays(path):
        path.write_bytes(data)
        return
    unfinished = _unfinished(path)
    unfinished.write_bytes(data)
    os.replace(unfinished, path)


def check(path: Path) -> None:
    """Make the folder of a file, and see whether ``write`` could write it.

    Raises:
        OSError: if not.
    """
    if path.parent.exists() and not path.parent.is_dir():
        raise _error(errno.ENOTDIR)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise _error(errno.EISDIR)
    if not _stays(path):
        # What a folder says of itself is not enough: root may write to all of /proc, and cannot make a file there.
        unfinished = _unfinished(path)
        unfinished.touch()
        unfinished.unlink()
    elif not path.exists():
        check(path.resolve())
    elif not os.access(path, os.W_OK):
        raise _error(errno.EACCES)


def check_replaceable(path: Path) -> None:
    """``check``, for a file that is removed before it is written.

    Raises:
        OSError: if it cannot be written, or is a pipe or a device.
    """
    check(path)
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is a pipe or a device")


def _stays(path: Path) -> bool:
    return path.is_symlink() or (path.exists() and not path.is_file())


def _unfinished(path: Path) -> Path:
    # Processes may write one file at a time: each then writes a whole one, and the last one stays.
    return path.with_name(f"{path.name}.{os.getpid()}.part")


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
