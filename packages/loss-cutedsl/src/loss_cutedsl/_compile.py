"""From a kernel class to something that can be called: compile, keep, keep on disk.

A compiled kernel is looked for in this process, then in the cache folder, and compiled only if neither has it. The
key holds everything that changes machine code: the class and its compile-time facts, the architecture, the versions
of the DSL, of its libraries and of its call interface, what the host's processor executes, and a digest of this
package's sources. The host's part of a kernel is machine code too, which the DSL writes for the processor it runs on.
Files appear by an atomic rename and are only ever replaced, so processes may race for one: each then has a whole file,
and the last one stays.

``LOSS_CUTEDSL_CACHE`` names the folder (default ``~/.cache/loss-cutedsl``); empty for none.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import platform
import tempfile
import threading
from importlib import metadata
from pathlib import Path

from cutlass import cute

from ._environment import CALL_INTERFACE, DSL, PARTS

_lock = threading.RLock()
_kept: dict[tuple, object] = {}

compilations = 0
"""How many kernels this process has compiled, cached ones not counted."""


CPUINFO = Path("/proc/cpuinfo")

# What the levels x86-64-v2, v3 and v4 consist of, as Linux names it: System V ABI, AMD64 supplement, table
# "Micro-Architecture Levels".
LEVELS = frozenset(
    "cx16 lahf_lm pni popcnt sse4_1 sse4_2 ssse3"
    " abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"
    " avx512bw avx512cd avx512dq avx512f avx512vl".split()
)


def _processor() -> str:
    """What the host's processor executes: on x86-64 what levels consist of, elsewhere all features.

    Code made where there is more dies of an illegal instruction where there is less. What is in no level is left out,
    or hardly two kinds would share a file: the code moves words and converts numbers. A level alone would not do:
    processors with AVX, but without AVX2, are of the level of those that have neither.
    """
    machine = platform.machine()
    told = _cpuinfo()
    if machine == "x86_64" and "flags" in told:
        features = LEVELS.intersection(told["flags"].split())
    else:
        features = frozenset((told.get("Features") or platform.processor()).split())
    return " ".join([machine, *sorted(features)])


def _cpuinfo() -> dict[str, str]:
    """What Linux tells of the first processor; nothing where there is no Linux."""
    try:
        with CPUINFO.open(errors="replace") as lines:
            # To read on takes long where there are many.
            pairs = [line.partition(":") for line in itertools.takewhile(str.strip, lines)]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in pairs}


@functools.cache
def _sources() -> str:
    """Digest of the sources that kernels are made of, of the versions of what compiles them, and of the processor.

    Which libraries there are counts: those of a newer CUDA make code that an older driver does not load, and finds out
    at the launch. Machines of several kinds may share a home.
    """
    digest = hashlib.sha256(_processor().encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    for distribution in (DSL, CALL_INTERFACE, *PARTS):
        try:
            version = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        digest.update(f"{distribution} {version}\n".encode())
    return digest.hexdigest()


def cache_folder() -> Path | None:
    """Where compiled kernels are kept between processes, or None."""
    named = os.environ.get("LOSS_CUTEDSL_CACHE")
    if named is not None:
        return Path(named) if named else None
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    # Of a user without a home "~" is left, which would be a folder of that name wherever the process is.
    return Path(root) / "loss-cutedsl" if os.path.isabs(root) else None


def compiled(kernel_class, facts: tuple, make, arguments, architecture: str):
    """The compiled form of ``make()``, an instance of ``kernel_class`` with these compile-time ``facts``.

    Args:
        kernel_class: class with a host ``__call__``.
        facts: everything that ``make`` depends on, of types whose repr says all (numbers, strings, tuples).
        make: makes the instance; called only to compile.
        arguments: ``make() -> arguments`` of ``__call__`` to compile for, without the stream.
        architecture: such as "sm_90a".

    Returns:
        A function of ``__call__``'s arguments as Python numbers, the last one the stream's address.
    """
    key = (kernel_class.__name__, facts, architecture)
    found = _kept.get(key)
    if found is None:
        with _lock:
            found = _kept.get(key)
            if found is None:
                found = _kept[key] = _load_or_compile(key, make, arguments)
    return found


def _load_or_compile(key, make, arguments):
    name, facts, architecture = key
    digest = hashlib.sha256(f"{_sources()} {key!r}".encode()).hexdigest()[:32]
    # The name of the exported function; objects in one process must not share it.
    symbol = f"loss_cutedsl_{digest}"
    folder = cache_folder()
    path = folder / f"{name}-{architecture}-{digest}.o" if folder is not None else None
    # Path.is_file raises where the folder may not be looked into.
    if path is not None and os.path.isfile(path):
        try:
            return _load(path, symbol)
        except Exception:
            # A damaged file, or one of an incompatible loader. It is replaced below, and not removed here: another
            # process may have replaced it meanwhile, or nothing here may be changed.
            pass
    global compilations
    compilations += 1
    function = cute.compile(
        make(),
        *arguments(),
        cute.runtime.make_fake_stream(),
        options=f"--enable-tvm-ffi --opt-level 3 --gpu-arch {architecture}",
    )
    if path is None:
        return function
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{digest[:8]}-", suffix=".o")
        os.close(handle)
        try:
            function.export_to_c(temporary, function_name=symbol)
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
        return _load(path, symbol)
    except Exception:
        # A read-only or full disk, or a cache that is cleared just now, costs the next process a compilation, no more.
        return function


def _load(path: Path, symbol: str):
    return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), symbol)
