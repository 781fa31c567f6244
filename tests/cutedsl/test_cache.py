"""The cache of compiled kernels: one file a kernel, whatever races for it, and nothing compiled twice."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tvm_ffi", reason="cutedsl: apache-tvm-ffi is not installed")
pytest.importorskip("cutlass.cute", reason="cutedsl: nvidia-cutlass-dsl is not installed")

L2_BYTES = 60 * 2**20

COMPILE_ONE = """
import sys
from loss_cutedsl import _compile, _schedule, softmax
import torch
machine = _schedule.machine((9, 0), 132, 60 * 2**20)
for cols in map(int, sys.argv[1:]):
    schedule = _schedule.held(machine, cols // 8, 1, softmax.ENTRY_WORDS)
    softmax.make_plan(machine, torch.bfloat16, cols // 8, schedule, False, False, False, True)
print(_compile.compilations)
"""


def start(folder, *cols):
    environment = {**os.environ, "LOSS_CUTEDSL_CACHE": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", COMPILE_ONE, *map(str, cols)], env=environment, stdout=subprocess.PIPE, text=True
    )


def compilations(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return int(output)


def test_processes_race_and_the_next_one_compiles_nothing(tmp_path):
    folder = tmp_path / "not there yet"
    counts = [compilations(process) for process in [start(folder, 1024) for _ in range(2)]]
    assert max(counts) == 1
    # One name, so no address or other chance is in the key; nothing half-written is left.
    assert len(list(folder.iterdir())) == 1
    # The number of rows is not in the key, and a width of the same class is not either.
    assert compilations(start(folder, 1024, 1000)) == 0


def test_damaged_file_is_replaced(monkeypatch, tmp_path):
    import torch
    from loss_cutedsl import _compile, _schedule, softmax

    monkeypatch.setenv("LOSS_CUTEDSL_CACHE", str(tmp_path))
    monkeypatch.setattr(_compile, "_kept", {})
    monkeypatch.setattr(_compile, "_load", lambda path, symbol: path.read_bytes().index(b"ELF"))
    machine = _schedule.machine((9, 0), 132, L2_BYTES)
    schedule = _schedule.held(machine, 128, 1, softmax.ENTRY_WORDS)

    def load():
        return softmax.make_plan(machine, torch.bfloat16, 128, schedule, False, False, False, True)

    load()
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"not an object")
    before = _compile.compilations
    monkeypatch.setattr(_compile, "_kept", {})
    load()
    assert _compile.compilations == before + 1
    assert file.read_bytes() != b"not an object"


def test_folder_that_cannot_be_written(monkeypatch, tmp_path):
    import torch
    from loss_cutedsl import _compile, _schedule, softmax

    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("LOSS_CUTEDSL_CACHE", str(blocked))
    monkeypatch.setattr(_compile, "_kept", {})
    machine = _schedule.machine((9, 0), 132, L2_BYTES)
    schedule = _schedule.held(machine, 128, 1, softmax.ENTRY_WORDS)
    plan = softmax.make_plan(machine, torch.bfloat16, 128, schedule, False, False, False, True)
    assert callable(plan.launch)


def plan_with_a_kernel_that_is_a_word(monkeypatch, load=lambda path, symbol: path.read_text()):
    """What a call would launch, where compiling gives a word and exporting writes it to the file."""
    import torch
    from loss_cutedsl import _compile, _schedule, softmax

    class Word(str):
        def export_to_c(self, path, function_name):
            Path(path).write_text(self)

    machine = _schedule.machine((9, 0), 132, L2_BYTES)
    schedule = _schedule.held(machine, 128, 1, softmax.ENTRY_WORDS)
    monkeypatch.setattr(_compile, "_kept", {})
    monkeypatch.setattr(_compile.cute, "compile", lambda *arguments, options: Word("compiled"))
    monkeypatch.setattr(_compile, "_load", load)
    return softmax.make_plan(machine, torch.bfloat16, 128, schedule, False, False, False, True).launch


def test_damaged_file_that_stays(monkeypatch, tmp_path):
    """Nothing can be replaced where nothing can be written, or another process is quicker."""
    from loss_cutedsl import _compile

    monkeypatch.setenv("LOSS_CUTEDSL_CACHE", str(tmp_path))
    assert plan_with_a_kernel_that_is_a_word(monkeypatch) == "compiled"
    (file,) = tmp_path.iterdir()

    def refuse(*arguments, **options):
        raise PermissionError

    def never_loads(path, symbol):
        raise RuntimeError("not an object")

    assert plan_with_a_kernel_that_is_a_word(monkeypatch, never_loads) == "compiled"
    assert list(tmp_path.iterdir()) == [file]
    with monkeypatch.context() as read_only:
        read_only.setattr(_compile.tempfile, "mkstemp", refuse)
        read_only.setattr(_compile.Path, "unlink", refuse)
        assert plan_with_a_kernel_that_is_a_word(read_only, never_loads) == "compiled"
    assert file.read_text() == "compiled"


def test_folder_that_cannot_be_looked_into(monkeypatch, tmp_path):
    """As a home that is another user's: to ask what is in it is an error of its own."""
    # Too long a name gives one to every user, a missing permission none to root.
    monkeypatch.setenv("LOSS_CUTEDSL_CACHE", str(tmp_path / ("x" * 300)))
    assert plan_with_a_kernel_that_is_a_word(monkeypatch) == "compiled"


def test_user_without_a_home(monkeypatch):
    from loss_cutedsl import _compile

    for name in ("LOSS_CUTEDSL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert _compile.cache_folder() is None


def test_key_changes_with_the_libraries_and_the_processor(monkeypatch):
    """Code of a newer CUDA is found out at the launch, too late to compile anew; homes are shared between machines."""
    from loss_cutedsl import _compile, _environment

    def digest(machine="x86_64", **versions):
        installed = {_environment.DSL: "4.8.1", _environment.CALL_INTERFACE: "0.1.15", **versions}

        def version(name):
            if name not in installed:
                raise _compile.metadata.PackageNotFoundError(name)
            return installed[name]

        monkeypatch.setattr(_compile.metadata, "version", version)
        monkeypatch.setattr(_compile.platform, "machine", lambda: machine)
        return _compile._sources.__wrapped__()

    digests = [
        digest(),
        digest(machine="aarch64"),
        digest(**{_environment.DSL: "4.9.0"}),
        digest(**{_environment.CALL_INTERFACE: "0.2.0"}),
        *(digest(**{part: "4.8.1"}) for part in _environment.PARTS),
    ]
    assert len(set(digests)) == len(digests)
    assert digest() == digests[0]


V2 = "cx16 lahf_lm pni popcnt sse4_1 sse4_2 ssse3"
V3 = "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave " + V2
V4 = "avx512bw avx512cd avx512dq avx512f avx512vl " + V3


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "wanted"),
    [
        ("x86_64", "flags\t\t: fpu sse2", "x86_64"),
        ("x86_64", f"model name\t: a: b\nflags\t\t: fpu {V2} tsc", f"x86_64 {V2}"),
        # Of many processors the first.
        ("x86_64", f"flags\t\t: {V2}\n\nflags\t\t: {V4}", f"x86_64 {V2}"),
        ("aarch64", "Features\t: sve fp asimd", "aarch64 asimd fp sve"),
        ("aarch64", "processor\t: 0", "aarch64 unknown"),
        ("x86_64", None, "x86_64 unknown"),
    ],
)
def test_what_a_processor_executes(monkeypatch, tmp_path, machine, cpuinfo, wanted):
    from loss_cutedsl import _compile

    told = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        told.write_text(cpuinfo)
    monkeypatch.setattr(_compile, "CPUINFO", told)
    monkeypatch.setattr(_compile.platform, "machine", lambda: machine)
    monkeypatch.setattr(_compile.platform, "processor", lambda: "unknown")
    assert _compile._processor() == wanted


def test_processors_of_one_level_share_files(monkeypatch, tmp_path):
    """Code for another level would die of an illegal instruction, with a message that names nothing."""
    from loss_cutedsl import _compile

    monkeypatch.setenv("LOSS_CUTEDSL_CACHE", str(tmp_path))
    monkeypatch.setattr(_compile.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(_compile, "_sources", _compile._sources.__wrapped__)

    def files(flags):
        monkeypatch.setattr(_compile, "_cpuinfo", lambda: {"flags": flags})
        assert plan_with_a_kernel_that_is_a_word(monkeypatch) == "compiled"
        return {file.name for file in tmp_path.iterdir()}

    newer = files(V4)
    assert len(newer) == 1
    assert files(V4 + " gfni vaes") == newer
    assert len(files(V3)) == 2
    assert len(files(V2)) == 3
    assert len(files("fpu sse2")) == 4
    # Between two levels.
    assert len(files(V2 + " avx")) == 5
    assert len(files(V4)) == 5


def test_key_changes_with_what_changes_the_kernel(monkeypatch, tmp_path):
    import torch
    from loss_cutedsl import _compile, _schedule, softmax

    monkeypatch.setenv("LOSS_CUTEDSL_CACHE", str(tmp_path))
    monkeypatch.setattr(_compile, "_kept", {})
    machine = _schedule.machine((9, 0), 132, L2_BYTES)
    schedule = _schedule.held(machine, 128, 1, softmax.ENTRY_WORDS)

    def files(machine, dtype, schedule, log):
        softmax.make_plan(machine, dtype, 128, schedule, False, False, log, True)
        return len(list(tmp_path.iterdir()))

    assert files(machine, torch.bfloat16, schedule, False) == 1
    assert files(machine, torch.float16, schedule, False) == 2
    assert files(machine, torch.bfloat16, schedule._replace(stages=1), False) == 3
    assert files(_schedule.machine((8, 0), 108, L2_BYTES), torch.bfloat16, schedule, True) == 4
    assert files(machine, torch.bfloat16, schedule, False) == 4
    monkeypatch.setattr(_compile, "_kept", {})
    monkeypatch.setattr(_compile, "_sources", lambda: "other sources")
    assert files(machine, torch.bfloat16, schedule, False) == 5


def test_threads_do_not_pile_up(monkeypatch, tmp_path):
    import torch
    from loss_cutedsl import _compile, _schedule, softmax

    monkeypatch.setenv("LOSS_CUTEDSL_CACHE", str(tmp_path))
    monkeypatch.setattr(_compile, "_kept", {})
    machine = _schedule.machine((9, 0), 132, L2_BYTES)

    def threads():
        return len(os.listdir("/proc/self/task"))

    counts = []
    for stages in range(1, 5):
        schedule = _schedule.Schedule(64, 64, 1, stages, 1, 2)
        softmax.make_plan(machine, torch.bfloat16, 64, schedule, False, False, False, True)
        counts.append(threads())
    assert counts[-1] <= counts[0] + 1
