"""Whether the CuTe DSL can work here: driver, architecture, and the wheels that are installed."""

from __future__ import annotations

import importlib
import re
from importlib import metadata

import torch

OLDEST_DSL = (4, 7)
DSL = "nvidia-cutlass-dsl"
PARTS = (
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
)
CALL_INTERFACE = "apache-tvm-ffi"
OLDEST_CALL_INTERFACE = (0, 1, 10)


def unavailable_reason(device: torch.device) -> str | None:
    """Why the kernels cannot run on ``device`` here and now, or None if they can."""
    return _device_reason(device) or wheels_reason() or _driver_reason() or import_reason()


def _device_reason(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"needs an NVIDIA GPU, got device {device.type!r}"
    if torch.version.hip is not None:
        return "needs an NVIDIA GPU; this torch is built for ROCm"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device (no driver, no device, or a torch built for the CPU)"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        name = torch.cuda.get_device_name(device)
        return f"needs compute capability 8.0 or later, {name} has {major}.{minor}"
    return None


def wheels_reason() -> str | None:
    """What is wrong with the installed wheels of the DSL, or None."""
    try:
        version = metadata.version(DSL)
    except metadata.PackageNotFoundError:
        return f"{DSL} is not installed"
    if _numbers(version) < OLDEST_DSL:
        return _too_old(DSL, OLDEST_DSL, version)
    parts = {}
    for name in PARTS:
        try:
            parts[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
    others = [f"{name} {part.version}" for name, part in parts.items() if part.version != version]
    if others:
        return f"wheels at odds: {DSL} is {version}, but {', '.join(others)}; reinstall one version of all of them"
    # Wheels of one version may still hold different builds of the same file; the one installed last has won.
    owners: dict[str, tuple[str, str]] = {}
    for name, part in parts.items():
        for path in part.files or ():
            if path.hash is None:
                continue
            owner = owners.setdefault(str(path), (name, path.hash.value))
            if owner[1] != path.hash.value:
                return f"wheels at odds: {owner[0]} and {name} both install {path}; uninstall both, then install one"
    try:
        version = metadata.version(CALL_INTERFACE)
    except metadata.PackageNotFoundError:
        return f"{CALL_INTERFACE} is not installed"
    if _numbers(version) < OLDEST_CALL_INTERFACE:
        # The DSL would say, once it has compiled a kernel, that a function of it has no such argument.
        return _too_old(CALL_INTERFACE, OLDEST_CALL_INTERFACE, version)
    return None


def _too_old(name: str, oldest: tuple[int, ...], version: str) -> str:
    return f"needs {name} {'.'.join(map(str, oldest))} or later, {version} is installed"


def _driver_reason() -> str | None:
    """The libraries compile for their own CUDA release; a driver loads code of its own major or an older one."""
    needed = 12
    try:
        metadata.version(PARTS[2])
    except metadata.PackageNotFoundError:
        try:
            metadata.version(PARTS[3])
            needed = 13
        except metadata.PackageNotFoundError:
            pass
    try:
        from cuda.bindings import driver

        error, version = driver.cuDriverGetVersion()
    except Exception as error:
        return f"cannot ask the CUDA driver for its version: {type(error).__name__}: {error}"
    if int(error) != 0:
        return f"cannot ask the CUDA driver for its version: error {int(error)}"
    if version // 1000 < needed:
        installed = f"{version // 1000}.{version % 1000 // 10}"
        return f"the installed {DSL} needs a driver for CUDA {needed}, this one is for {installed}"
    return None


def import_reason() -> str | None:
    """Why the kernels cannot be imported, or None. The first call imports the DSL."""
    try:
        for name in ("tvm_ffi", "loss_cutedsl._compile", "loss_cutedsl.cross_entropy", "loss_cutedsl.softmax"):
            importlib.import_module(name)
    except Exception as error:
        # Whatever a missing, broken or changed DSL raises: the backend is then unavailable, and nothing else.
        return f"the kernels cannot be imported with {DSL} {_version_or_none()}: {type(error).__name__}: {error}"
    return None


def _version_or_none() -> str:
    try:
        return metadata.version(DSL)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0]))
