"""Tests that share what is made once, or a device, run in one process: pytest and pytest-xdist agree on groups."""

import subprocess
import sys

import pytest

pytest.importorskip("xdist", reason="pytest-xdist is not installed")

PROGRAM = """
import os, pathlib, pytest

def note(group):
    with open(pathlib.Path(__file__).with_name(group), "a") as file:
        file.write(f"{os.getpid()}\\n")

@pytest.mark.xdist_group("function")
@pytest.mark.parametrize("number", range(6))
def test_marked(number):
    note("function")

@pytest.fixture(params=[pytest.param(0, marks=pytest.mark.xdist_group("fixture"))])
def made(request):
    pass

@pytest.mark.parametrize("number", range(6))
def test_by_its_fixture(number, made):
    note("fixture")
"""


def test_tests_of_a_group_share_a_process(tmp_path):
    (tmp_path / "test_some.py").write_text(PROGRAM)
    # Without a configuration of ours, and without what this process was told of its own run.
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    for group in ("function", "fixture"):
        processes = (tmp_path / group).read_text().split()
        assert len(processes) == 6
        assert len(set(processes)) == 1, group
