"""Fixtures: throw-away distributions that bring backends which are wrong or broken."""

from __future__ import annotations

import gc
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("loss_bench", reason="loss-bench is not installed")
from loss_bench import measure, processes, results
from loss_bench.results import Row
from loss_bench.worker import Worker
from loss_core import registry

# Several test processes on few cores: threads that wait for each other cost more than they bring.
torch.set_num_threads(1)

HEAD = """
import torch
import torch.nn.functional as F
API_VERSION = 1
OPS = ("cross_entropy",)
def unavailable_reason(device):
    return None
"""

Install = Callable[..., None]

START_S = 120.0


@pytest.fixture(autouse=True, scope="module")
def libraries_stay_loaded() -> Iterator[None]:
    """A run collects garbage after each case, and need not look at all that the tests have imported."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def quick_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements as everywhere, but shorter: how precise they are is not the question. In this process only."""
    monkeypatch.setattr(results, "_MOMENT_S", 0.02)
    monkeypatch.setattr(measure, "_HOST_LIMIT_S", 0.01)
    monkeypatch.setattr(measure, "_CPU_CACHE_BYTES", 1 << 20)
    # The copy is of 64 of them.
    monkeypatch.setattr(measure, "_MIB", 1 << 14)


@pytest.fixture
def starts_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit is for what a process is given to do, so that a test of it need not allow for a slow start.

    To start a process takes seconds, and on a busy machine many.
    """
    start, create = Worker._start, processes._Process.__init__

    def start_worker(self):
        limit, self._time_limit_s = self._time_limit_s, START_S
        try:
            return start(self)
        finally:
            self._time_limit_s = limit

    def create_process(self, work, device):
        create(self, work, device)
        # No task at all: the work fails at once, and its process is there.
        self.child.connection.send(None)
        assert self.child.connection.poll(START_S)
        assert self.child.connection.recv()[0] == "done"

    monkeypatch.setattr(Worker, "_start", start_worker)
    monkeypatch.setattr(processes._Process, "__init__", create_process)


@pytest.fixture
def install_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a distribution on sys.path whose one backend is the given Python source."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = []

    def install(name: str, body: str) -> None:
        module = "bench_fixture_" + name.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(HEAD + textwrap.dedent(body))
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[loss_core.backends]\n{name} = {module}\n")
        names.append(module)
        registry.refresh()

    yield install
    monkeypatch.undo()
    for module in names:
        sys.modules.pop(module, None)
    registry.refresh()


@pytest.fixture
def bad_backends(install_backend: Install) -> None:
    """``off``: a gradient 10% too large; ``nan``; ``crash``; ``refuse``; ``quits`` while it is imported."""
    signature = "def cross_entropy(logits, target, weight, byte_lengths, num_items, options):\n"
    install_backend(
        "off",
        signature
        + "    loss = F.cross_entropy(logits, target, ignore_index=options.ignore_index)\n"
        + "    return loss + 0.1 * (loss - loss.detach())\n",
    )
    install_backend("nan", signature + "    return F.cross_entropy(logits, target) * float('nan')\n")
    install_backend("crash", signature + "    raise RuntimeError('no luck today\\nsecond line')\n")
    install_backend(
        "refuse",
        signature + "    from loss_core import UnsupportedInput\n    raise UnsupportedInput('only on Sundays')\n",
    )
    install_backend("quits", "raise SystemExit(3)\n")


@pytest.fixture
def make_row() -> Callable[..., Row]:
    """A ``Row`` with the given fields and some defaults."""

    def make(**fields: object) -> Row:
        defaults = {
            "op": "cross_entropy",
            "rows": 4,
            "classes": 8,
            "dtype": "float32",
            "options": "",
            "pass_": "forward+backward",
            "backend": "torch-nn",
            "distribution": "torch",
            "version": "2",
            "device": "fake",
        }
        return Row(**{**defaults, **fields})

    return make
