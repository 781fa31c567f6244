"""Environment variables as they are at the moment of the call."""

import os

import pytest
from loss_core.environment import is_on, variable


@pytest.mark.parametrize("name", ["LOSS_BACKEND", "LOSS_VALIDATE"])
def test_a_variable_is_read_anew(name, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    assert variable(name) == ""
    monkeypatch.setenv(name, "1")
    assert variable(name) == "1"
    os.environ[name] = "ü"
    assert variable(name) == "ü"
    del os.environ[name]
    assert variable(name) == ""


def test_a_variable_is_on_unless_it_is_empty_or_0(monkeypatch):
    monkeypatch.delenv("LOSS_VALIDATE", raising=False)
    assert not is_on("LOSS_VALIDATE")
    for value, on in (("1", True), ("0", False), ("", False), ("yes", True)):
        monkeypatch.setenv("LOSS_VALIDATE", value)
        assert is_on("LOSS_VALIDATE") == on
