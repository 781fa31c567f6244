"""Environment variables as they are at the moment of the call."""

import os

import pytest
from loss_core.environment import variable


@pytest.mark.parametrize("name", ["LOSS_BACKEND", "LOSS_VALIDATE", "LOSS_CORE_TEST_OF_ANOTHER"])
def test_a_variable_is_read_anew(name, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    assert variable(name) == ""
    monkeypatch.setenv(name, "1")
    assert variable(name) == "1"
    os.environ[name] = "ü"
    assert variable(name) == "ü"
    del os.environ[name]
    assert variable(name) == ""
