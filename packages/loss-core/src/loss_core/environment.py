"""Environment variables, read at every call, so that a program may change them."""

from __future__ import annotations

import os

# os.environ.get raises and catches a KeyError inside; a look into its dictionary is ten times as fast.
_values = getattr(os.environ, "_data", None)


class _Keys(dict[str, object]):
    """The key of a variable in that dictionary."""

    def __missing__(self, name: str) -> object:
        key = self[name] = os.environ.encodekey(name)  # type: ignore[attr-defined]
        return key


_keys = _Keys()


def variable(name: str) -> str:
    """The value of an environment variable, "" without one."""
    if _values is not None and _keys[name] not in _values:
        return ""
    return os.environ.get(name, "")
