"""Environment variables, read at every call, so that a program may change them."""

from __future__ import annotations

import os

# os.environ.get raises and catches a KeyError inside; a look into its dictionary is ten times as fast.
_values = getattr(os.environ, "_data", os.environ)
_key_of = getattr(os.environ, "encodekey", str) if _values is not os.environ else str
_keys = {name: _key_of(name) for name in ("LOSS_BACKEND", "LOSS_VALIDATE")}

# Whether a variable is there, given its key: a function in C, for the way of the usual call.
has = _values.__contains__
VALIDATE = _keys["LOSS_VALIDATE"]


def variable(name: str) -> str:
    """The value of one of loss-core's environment variables, "" without one."""
    return os.environ.get(name, "") if has(_keys[name]) else ""


def is_on(name: str) -> bool:
    """Whether one of them is there, and neither empty nor 0."""
    return variable(name) not in ("", "0")
