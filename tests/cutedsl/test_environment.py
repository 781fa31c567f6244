"""What is wrong with an installation is a reason, never an error of the import."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from loss_cutedsl import _environment
from packaging.requirements import Requirement
from packaging.version import Version

# One import of torch for all of the stubs: each is looked at by a child of that process.
PROBE = """
import os, sys
import loss_cutedsl
assert "cutlass" not in sys.modules, "importing the package imported the DSL"
from loss_cutedsl import _environment
for folder in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        sys.path.insert(0, folder)
        if not os.path.isdir(folder + "/cutlass"):
            sys.modules["cutlass"] = None
        print(_environment.import_reason(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""

STUBS = {
    "missing": (None, "ModuleNotFoundError"),
    "older, without the names": ("", "ImportError"),
    "broken": ("raise RuntimeError('no MLIR here')", "RuntimeError: no MLIR here"),
    "without its library": ("raise OSError('libcute.so: cannot open shared object file')", "OSError"),
    "changed": (
        "class _Any:\n    def __getattr__(self, name):\n        raise AttributeError(name)\n"
        "BFloat16 = Boolean = Float16 = Float32 = Int32 = Int64 = Uint32 = cute = _Any()\nConstexpr = int\n",
        "AttributeError",
    ),
}


def test_dsl_that_does_not_fit(tmp_path):
    folders = []
    for name, (source, _) in STUBS.items():
        folder = tmp_path / name
        folder.mkdir()
        folders.append(str(folder))
        (folder / "tvm_ffi.py").write_text("")
        if source is not None:
            (folder / "cutlass").mkdir()
            (folder / "cutlass" / "__init__.py").write_text(source)
    run = subprocess.run(
        [sys.executable, "-c", PROBE, *folders], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    reasons = run.stdout.splitlines()
    assert len(reasons) == len(STUBS), run.stderr
    for reason, (_, expected) in zip(reasons, STUBS.values(), strict=True):
        assert "the kernels cannot be imported with nvidia-cutlass-dsl" in reason
        assert expected in reason


def install(monkeypatch, versions, files=()):
    """Make importlib.metadata see these distributions; ``files``: (distribution, path, hash)."""

    def distribution(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        records = []
        for owner, path, digest in files:
            if owner == name:
                record = metadata.PackagePath(path)
                record.hash = metadata.FileHash(f"sha256={digest}")
                records.append(record)
        return SimpleNamespace(version=versions[name], files=records)

    monkeypatch.setattr(_environment.metadata, "distribution", distribution)
    monkeypatch.setattr(_environment.metadata, "version", lambda name: distribution(name).version)


BASE = "nvidia-cutlass-dsl-libs-base"
CU12 = "nvidia-cutlass-dsl-libs-cu12"
CU13 = "nvidia-cutlass-dsl-libs-cu13"
WHOLE = {"nvidia-cutlass-dsl": "4.8.1", BASE: "4.8.1", CU12: "4.8.1", "apache-tvm-ffi": "0.1.15"}


def test_wheels_that_agree(monkeypatch):
    install(monkeypatch, WHOLE, [(BASE, "a.py", "1"), (CU12, "b.py", "2"), (CU12, "a.py", "1")])
    assert _environment.wheels_reason() is None
    oldest = {"nvidia-cutlass-dsl": "4.7.0", BASE: "4.7.0", CU12: "4.7.0", "apache-tvm-ffi": "0.1.10"}
    install(monkeypatch, oldest)
    assert _environment.wheels_reason() is None
    install(monkeypatch, {**WHOLE, "nvidia-cutlass-dsl": "5.0.0", BASE: "5.0.0", CU12: "5.0.0"})
    assert _environment.wheels_reason() is None


@pytest.mark.parametrize(
    ("versions", "files", "expected"),
    [
        ({}, (), "nvidia-cutlass-dsl is not installed"),
        ({**WHOLE, "nvidia-cutlass-dsl": "4.6.2"}, (), "needs nvidia-cutlass-dsl 4.7 or later, 4.6.2 is installed"),
        ({**WHOLE, CU13: "4.7.0"}, (), f"wheels at odds: nvidia-cutlass-dsl is 4.8.1, but {CU13} 4.7.0"),
        (
            {**WHOLE, CU13: "4.8.1"},
            [(CU12, "lib/libcute.so", "1"), (CU13, "lib/libcute.so", "2")],
            f"wheels at odds: {CU12} and {CU13} both install lib/libcute.so",
        ),
        ({k: v for k, v in WHOLE.items() if k != "apache-tvm-ffi"}, (), "apache-tvm-ffi is not installed"),
        ({**WHOLE, "apache-tvm-ffi": "0.1.9"}, (), "needs apache-tvm-ffi 0.1.10 or later, 0.1.9 is installed"),
    ],
)
def test_wheels_that_do_not(monkeypatch, versions, files, expected):
    install(monkeypatch, versions, files)
    assert _environment.wheels_reason().startswith(expected)


def test_the_oldest_versions_are_the_same_wherever_they_stand():
    """What the backend asks for is what the package requires, and what CI compiles with."""
    requirements = [Requirement(line) for line in metadata.requires("loss-cutedsl")]
    workspace = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for name, oldest in (
        (_environment.DSL, _environment.OLDEST_DSL),
        (_environment.CALL_INTERFACE, _environment.OLDEST_CALL_INTERFACE),
    ):
        bounds = {str(requirement.specifier) for requirement in requirements if requirement.name == name}
        assert bounds == {">=" + ".".join(map(str, oldest))}
        (pin,) = re.findall(rf'"{name}==([\d.]+)"', workspace)
        assert Version(pin) == Version(".".join(map(str, oldest)))


def test_device_without_cuda():
    assert _environment.unavailable_reason(torch.device("cpu")) == "needs an NVIDIA GPU, got device 'cpu'"


def test_old_architecture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    monkeypatch.setattr(torch.version, "hip", None)
    reason = _environment.unavailable_reason(torch.device("cuda", 0))
    assert reason == "needs compute capability 8.0 or later, T4 has 7.5"


@pytest.mark.parametrize(
    ("driver", "wheels", "fits"), [(12080, WHOLE, True), (11080, WHOLE, False), (13000, WHOLE, True)]
)
def test_driver_for_cu12(monkeypatch, driver, wheels, fits):
    check_driver(monkeypatch, driver, wheels, fits)


@pytest.mark.parametrize(("driver", "fits"), [(12080, False), (13000, True)])
def test_driver_for_cu13(monkeypatch, driver, fits):
    wheels = {name: version for name, version in WHOLE.items() if name != CU12} | {CU13: "4.8.1"}
    check_driver(monkeypatch, driver, wheels, fits)


def check_driver(monkeypatch, version, wheels, fits):
    bindings = pytest.importorskip("cuda.bindings.driver", reason="cutedsl: cuda-bindings is not installed")
    install(monkeypatch, wheels)
    monkeypatch.setattr(bindings, "cuDriverGetVersion", lambda: (0, version))
    reason = _environment._driver_reason()
    assert (reason is None) == fits
    if not fits:
        assert f"this one is for {version // 1000}.{version % 1000 // 10}" in reason
