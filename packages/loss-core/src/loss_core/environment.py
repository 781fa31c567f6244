"""Environment variables, read at every call, so that a program may change them."""

from __future__ import annotations

import os

# os.environ.get raises and catches a KeyError inside; a look into its dictionary is ten times as fast.
_values = getattr(os.environ, "_data", None)
_key_of = getattr(os.environ, "encodekey", None)
_keys = {name: _key_of(name) for name in ("LOSS_BACKEND", "LOSS_VALIDATE")} if _key_of else {}


def variable(name: str) -> str:
    """The value of an environment variable, "" without one."""
    if _values is not None and name in _keys and _keys[name] not in _values:
        return ""
    return os.environ.get(name, "")
