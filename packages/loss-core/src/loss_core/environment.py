"""Environment variables, read at every call, so that a program may change them."""

from __future__ import annotations

import os
from functools import lru_cache

# os.environ.get raises and catches a KeyError inside; a look into its dictionary is ten times as fast.
_values = getattr(os.environ, "_data", None)


@lru_cache
def _key(name: str) -> object:
    """The key of a variable in that dictionary."""
    return os.environ.encodekey(name)  # type: ignore[attr-defined]


def variable(name: str) -> str:
    """The value of an environment variable, "" without one."""
    if _values is not None and _key(name) not in _values:
        return ""
    return os.environ.get(name, "")
