"""The record of a test session on a GPU, ``tests/gpu-record.json``: what ran where, on which kernels."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import subprocess
from collections import Counter, defaultdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

PATH = Path(os.environ.get("LOSS_GPU_RECORD") or Path(__file__).parent.parent / "gpu-record.json")
KERNEL_PACKAGES = ("loss_triton", "loss_cutedsl")
_DISTRIBUTIONS = (
    "torch", "triton", "nvidia-cutlass-dsl", "pytest", "loss-core", "loss-triton", "loss-cutedsl", "loss-bench"
)  # fmt: skip


def kernel_digest() -> str:
    """SHA-256 over the names and contents of the installed kernel packages' sources."""
    digest = hashlib.sha256()
    for package in KERNEL_PACKAGES:
        spec = importlib.util.find_spec(package)
        for root in spec.submodule_search_locations or () if spec else ():
            for path in sorted(Path(root).rglob("*.py")):
                digest.update(f"{package}/{path.relative_to(root).as_posix()}\0".encode())
                digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


class GpuRecord:
    """A pytest plug-in that counts outcomes by file and backend and writes them when the session ends."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count the call, or the phase before it that ended the test, or an error after it."""
        if report.when != "call" and report.passed:
            return
        backend = dict(report.user_properties).get("backend", "-")
        self._counts[report.nodeid.partition("::")[0]][backend][report.outcome] += 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: Any) -> None:
        """Write the record, unless it was a session about something else.

        First of all: what ends the workers of pytest-xdist may wait for one for as long as there is time.
        """
        if "tests/test_cross_entropy.py" in self._counts:
            PATH.write_text(json.dumps(self._record(), indent=2) + "\n")

    def _record(self) -> dict[str, Any]:
        import torch

        total: Counter[str] = Counter()
        for by_backend in self._counts.values():
            for counts in by_backend.values():
                total += counts
        major, minor = torch.cuda.get_device_capability(0)
        return {
            "device": torch.cuda.get_device_name(0),
            "devices": torch.cuda.device_count(),
            "compute_capability": f"{major}.{minor}",
            "driver": _driver(),
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "versions": {name: _version(name) for name in _DISTRIBUTIONS},
            "kernel_sources_sha256": kernel_digest(),
            "total": {outcome: total[outcome] for outcome in ("passed", "failed", "skipped")},
            "tests": {
                file: {backend: dict(sorted(counts.items())) for backend, counts in sorted(by_backend.items())}
                for file, by_backend in sorted(self._counts.items())
            },
        }


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
