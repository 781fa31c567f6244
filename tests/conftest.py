"""Settings of all tests.

    pytest                      what this machine can: PyTorch, Triton's interpreter; the kernels with a GPU
    pytest --backend triton     one backend, which then has to run: its skips become failures
    LOSS_GPU_RECORD=FILE        where a session on a GPU writes its record (default: tests/gpu-record.json)

A test that takes ``backend`` runs once for each backend that runs here; one that takes ``case`` too, in a module that
names its ``OP``, for each conformance case of that op.
"""

from __future__ import annotations

import pytest
import torch
from loss_core.testing import cases, nan_filled_empty
from support import devices
from support.record import GpuRecord

devices.prepare()


def pytest_addoption(parser):
    parser.addoption("--backend", action="append", choices=devices.BACKENDS, help="test only this backend")


def pytest_configure(config):
    # The workers of pytest-xdist send their reports to the main process, which writes.
    if devices.HAS_GPU and not hasattr(config, "workerinput"):
        config.pluginmanager.register(GpuRecord(), "gpu-record")


def pytest_generate_tests(metafunc):
    if "backend" not in metafunc.fixturenames:
        return
    if not devices.HAS_GPU and any(mark.name == "gpu" for mark in metafunc.definition.iter_markers()):
        # One skip for the test, not one for each of its parameters.
        metafunc.parametrize("backend", [pytest.param(None, marks=pytest.mark.skip(reason="no CUDA device"), id="-")])
        return
    named = metafunc.config.getoption("backend")
    names, skipped = [], []
    op = getattr(metafunc.module, "OP", None)
    for name in named or devices.BACKENDS:
        reason = devices.unavailable_reason(name) or (op and devices.lacks(name, op))
        if not reason:
            names.append(name)
        elif named:
            raise pytest.UsageError(f"--backend {name}: {reason}")
        else:
            skipped.append((name, pytest.mark.skip(reason=f"{name}: {reason}")))
    if "case" not in metafunc.fixturenames:
        metafunc.parametrize("backend", names + [pytest.param(name, marks=mark) for name, mark in skipped])
        return
    # One skip for a backend that cannot run, not one for each case.
    pairs = [pytest.param(name, None, marks=mark, id=name) for name, mark in skipped]
    for name in names:
        pairs += [pytest.param(name, case, id=f"{name}-{case}") for case in cases(op)]
    metafunc.parametrize(("backend", "case"), pairs)


def pytest_collection_modifyitems(items):
    for item in items:
        params = getattr(item, "callspec", None)
        if params is not None and "backend" in params.params:
            item.user_properties.append(("backend", params.params["backend"]))
        if not devices.HAS_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def device():
    """The device that the tests of kernels run on."""
    return devices.DEVICE


@pytest.fixture(autouse=True)
def seeded():
    """The same random numbers in every run and every order."""
    torch.manual_seed(0)


@pytest.fixture
def nan_filled_memory():
    """``torch.empty`` gives NaN, so that an element which is never written shows."""
    with nan_filled_empty():
        yield


@pytest.fixture
def need_memory():
    """``need_memory(gib)`` skips the test where the device has less."""

    def need(gib):
        free = devices.free_memory_gib()
        if free < gib:
            pytest.skip(f"needs {gib:.0f} GiB on the device, {free:.0f} GiB are free")

    return need
