"""Finding, loading and choosing backends."""

import asyncio
import builtins
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import loss_core
import pytest
import torch
from loss_core import BackendUnavailable, UnsupportedInput, registry
from support.plugins import GOOD, add_distribution, run_python

CHOOSES = "import torch, loss_core\ndef chosen(**k): return round(loss_core.softmax(torch.zeros(1), **k).item())\n"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on sys.path, in which distributions are found after ``refresh``."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("LOSS_BACKEND", raising=False)
    registry.refresh()
    yield tmp_path
    monkeypatch.undo()
    loss_core.set_default_backend(None)
    registry.refresh()


@pytest.fixture
def numbered(site):
    """Backends one, two, three: their softmax of a single class is 1, 2, 3 plus one."""
    add_distribution(
        site, "numbered", {name: GOOD.format(offset=i) for i, name in enumerate(("one", "two", "three"), start=1)}
    )
    registry.refresh()


def chosen(**backend):
    return round(loss_core.softmax(torch.zeros(1), **backend).item()) - 1


def rows():
    return {row.name: row for row in loss_core.list_backends("cpu")}


# Choice


def test_an_argument_beats_a_context_beats_a_default_beats_the_environment(numbered, monkeypatch):
    automatic = chosen()
    assert automatic == 0
    monkeypatch.setenv("LOSS_BACKEND", "one")
    assert chosen() == 1
    loss_core.set_default_backend("two")
    assert chosen() == 2
    with loss_core.use_backend("three"):
        assert chosen() == 3
        assert chosen(backend="one") == 1
        with loss_core.use_backend("one"):
            assert chosen() == 1
        assert chosen() == 3
    assert chosen() == 2
    loss_core.set_default_backend(None)
    assert chosen() == 1
    monkeypatch.delenv("LOSS_BACKEND")
    assert chosen() == 0


def test_the_context_ends_with_an_exception(numbered):
    with pytest.raises(KeyError), loss_core.use_backend("one"):
        raise KeyError
    assert chosen() == 0


def test_the_context_is_of_one_thread_and_the_default_of_all(numbered):
    seen = []
    loss_core.set_default_backend("two")
    with loss_core.use_backend("one"):
        thread = threading.Thread(target=lambda: seen.append(chosen()))
        thread.start()
        thread.join()
    assert seen == [2]


def test_the_context_is_of_one_asyncio_task(numbered):
    async def with_backend(name):
        with loss_core.use_backend(name):
            await asyncio.sleep(0)
            return chosen()

    async def both():
        return await asyncio.gather(with_backend("one"), with_backend("two"))

    assert asyncio.run(both()) == [1, 2]
    assert chosen() == 0


def test_threads_that_ask_at_once_load_a_backend_once(site):
    slow = "import time, builtins\ntime.sleep(0.05)\nbuiltins.loaded = getattr(builtins, 'loaded', 0) + 1\n"
    add_distribution(site, "slow", {"slow": slow + GOOD.format(offset=3)})
    registry.refresh()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: chosen(backend="slow"), range(8))) == [3] * 8
    assert builtins.__dict__.pop("loaded") == 1


def test_the_environment_is_read_in_a_fresh_process(tmp_path):
    add_distribution(tmp_path, "fresh", {"mine": GOOD.format(offset=4)})
    both = "both = [chosen()]\nimport os; del os.environ['LOSS_BACKEND']\nreport([*both, chosen()])"
    assert run_python(CHOOSES + both, tmp_path, LOSS_BACKEND="mine") == [5, 1]


def test_a_third_party_is_not_chosen_unasked(numbered):
    assert chosen() == 0
    assert {"one", "two", "three"} <= rows().keys()


REFUSES = """
from loss_core import UnsupportedInput
API_VERSION = 1
OPS = ("softmax", "cross_entropy")
def unavailable_reason(device):
    return None
def softmax(input):
    raise UnsupportedInput("not on Sundays")
def cross_entropy(*arguments):
    raise UnsupportedInput("not on Mondays")
"""


def test_an_explicit_choice_never_falls_back(site, monkeypatch):
    add_distribution(site, "refusing", {"refuses": REFUSES})
    registry.refresh()
    logits, target = torch.zeros(2, 3), torch.tensor([0, 1])
    for op, arguments, reason in (
        (loss_core.softmax, (logits,), "not on Sundays"),
        (loss_core.cross_entropy, (logits, target), "not on Mondays"),
    ):
        with pytest.raises(UnsupportedInput, match=reason):
            op(*arguments, backend="refuses")
        with loss_core.use_backend("refuses"), pytest.raises(UnsupportedInput, match=reason):
            op(*arguments)
        loss_core.set_default_backend("refuses")
        with pytest.raises(UnsupportedInput, match=reason):
            op(*arguments)
        loss_core.set_default_backend(None)
        monkeypatch.setenv("LOSS_BACKEND", "refuses")
        with pytest.raises(UnsupportedInput, match=reason):
            op(*arguments)
        monkeypatch.delenv("LOSS_BACKEND")
    with pytest.raises(UnsupportedInput, match="'refuses' does not provide log_softmax; it provides softmax, cross_en"):
        loss_core.log_softmax(logits, backend="refuses")


def test_a_chosen_backend_that_takes_no_probabilities_is_named(site, monkeypatch):
    add_distribution(site, "refusing", {"refuses": REFUSES})
    registry.refresh()
    message = "backend 'refuses' takes class indices as target, got probabilities"
    arguments = torch.zeros(2, 3), torch.ones(2, 3)
    with pytest.raises(UnsupportedInput, match=message):
        loss_core.cross_entropy(*arguments, backend="refuses")
    with loss_core.use_backend("refuses"), pytest.raises(UnsupportedInput, match=message):
        loss_core.cross_entropy(*arguments)
    monkeypatch.setenv("LOSS_BACKEND", "refuses")
    with pytest.raises(UnsupportedInput, match=message):
        loss_core.cross_entropy(*arguments)


def test_the_automatic_choice_passes_on_from_one_that_refuses(site, monkeypatch):
    add_distribution(site, "refusing", {"refuses": REFUSES})
    registry.refresh()
    monkeypatch.setattr(registry, "AUTOMATIC_ORDER", ("refuses", "torch"))
    logits = torch.zeros(2, 4, requires_grad=True)
    assert loss_core.softmax(logits)[0, 0].item() == 0.25
    loss_core.cross_entropy(logits, torch.tensor([0, 1])).backward()
    assert logits.grad[0].tolist() == [-0.375, 0.125, 0.125, 0.125]


def test_the_automatic_choice_says_what_each_one_refused(site, monkeypatch):
    add_distribution(site, "refusing", {"refuses": REFUSES})
    registry.refresh()
    monkeypatch.setattr(registry, "AUTOMATIC_ORDER", ("refuses",))
    with pytest.raises(UnsupportedInput, match=r"no backend does this softmax:\n  refuses: not on Sundays"):
        loss_core.softmax(torch.zeros(3))


def test_unknown_names_are_refused_everywhere(site, monkeypatch):
    message = r"no backend named 'nobody' is installed; installed: .*torch"
    with pytest.raises(BackendUnavailable, match=message):
        loss_core.get_backend("nobody")
    with pytest.raises(BackendUnavailable, match=message):
        loss_core.set_default_backend("nobody")
    with pytest.raises(BackendUnavailable, match=message), loss_core.use_backend("nobody"):
        pass
    with pytest.raises(BackendUnavailable, match=message):
        chosen(backend="nobody")
    monkeypatch.setenv("LOSS_BACKEND", "nobody")
    with pytest.raises(BackendUnavailable, match=message):
        chosen()


def test_a_device_that_a_backend_cannot_run_on(site):
    source = GOOD.format(offset=0).replace("return None", "return 'needs the moon, got ' + device.type")
    add_distribution(site, "lunar", {"moon": source})
    registry.refresh()
    assert rows()["moon"] == ("moon", "lunar", "1.0", ("softmax",), False, "needs the moon, got cpu")
    with pytest.raises(BackendUnavailable, match="'moon' cannot run on cpu: needs the moon, got cpu"):
        chosen(backend="moon")


# Plug-ins that break


BROKEN = {
    "no-import": ("import a_module_that_nobody_has", "ModuleNotFoundError: No module named 'a_module_that_nobody_has'"),
    "import-error": ("raise ImportError('libfoo.so.3 is missing')", "ImportError: libfoo.so.3 is missing"),
    "runtime-error": ("raise RuntimeError('no driver')", "RuntimeError: no driver"),
    "quits": ("raise SystemExit(3)", "SystemExit: 3"),
    "base": ("class Odd(BaseException): pass\nraise Odd('odd')", "Odd: odd"),
    "syntax": ("def f(:", "SyntaxError"),
    "old": (GOOD.format(offset=0).replace("API_VERSION = 1", "API_VERSION = 0"), "speaks version 0 of the backend"),
    "new": (GOOD.format(offset=0).replace("API_VERSION = 1", "API_VERSION = 99"), "loss-core speaks 1"),
    "unversioned": (GOOD.format(offset=0).replace("API_VERSION = 1", ""), "speaks version None"),
    "odd-ops": (GOOD.format(offset=0).replace('("softmax",)', '("teleport",)'), "OPS must be a subset of"),
    "silent": ("API_VERSION = 1\nOPS = ()", "does not define unavailable_reason"),
    "asks-and-quits": (
        GOOD.format(offset=0).replace("return None", "raise SystemExit(3)", 1),
        "unavailable_reason failed: SystemExit: 3",
    ),
    "asks-badly": (GOOD.format(offset=0).replace("return None", "return 1 / 0", 1), "unavailable_reason failed: Zero"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plug_in_breaks_itself_alone(name, site):
    source, reason = BROKEN[name]
    add_distribution(site, "broken", {name: source})
    add_distribution(site, "sound", {"sound": GOOD.format(offset=7)})
    registry.refresh()
    row = rows()[name]
    assert not row.available
    assert (row.distribution, row.version) == ("broken", "1.0")
    assert reason in row.reason
    assert rows()["sound"].available
    assert chosen(backend="sound") == 7
    assert chosen() == 0
    with pytest.raises(BackendUnavailable) as error:
        chosen(backend=name)
    assert reason in str(error.value)
    if not name.startswith("asks"):
        with pytest.raises(BackendUnavailable, match="broken 1.0"):
            loss_core.get_backend(name)


def test_a_plug_in_interrupted_by_the_user_is_interrupted(site):
    add_distribution(site, "broken", {"stops": "raise KeyboardInterrupt"})
    registry.refresh()
    with pytest.raises(KeyboardInterrupt):
        rows()


def test_our_names_belong_to_our_distributions(site):
    add_distribution(site, "aaa-thief", {"torch": GOOD.format(offset=5), "fine": GOOD.format(offset=6)})
    registry.refresh()
    assert chosen(backend="torch") == 0
    assert chosen(backend="fine") == 6
    refused = [row for row in loss_core.list_backends("cpu") if row.distribution == "aaa-thief" and row.name == "torch"]
    assert [(row.available, row.reason) for row in refused] == [(False, "the name 'torch' is taken by loss-core")]


def test_our_names_are_taken_where_our_distributions_are_not_installed(tmp_path):
    """Else a stranger would be the first of the automatic choice."""
    owners = {"cutedsl": "loss-cutedsl", "triton": "loss-triton"}
    add_distribution(tmp_path, "stranger", {name: GOOD.format(offset=5) for name in owners})
    program = """
    import importlib.metadata as metadata
    original = metadata.entry_points
    def entry_points(**selection):
        return [e for e in original(**selection) if e.dist.name not in ("loss-triton", "loss-cutedsl")]
    metadata.entry_points = entry_points
    """
    listed = f"report([chosen(), [b for b in loss_core.list_backends('cpu') if b.name in {list(owners)}]])"
    value, listing = run_python(textwrap.dedent(program) + CHOOSES + listed, tmp_path)
    assert value == 1
    assert sorted(listing) == [
        [name, "stranger", "1.0", [], False, f"the name '{name}' is taken by {owner}"] for name, owner in owners.items()
    ]


@pytest.mark.parametrize(
    "metadata", [None, "", "Metadata-Version: 2.1\n", "Metadata-Version: 2.1\nName: half\n"], ids=str
)
def test_a_distribution_without_metadata_breaks_nothing(metadata, site):
    """What an interrupted uninstall leaves behind."""
    add_distribution(site, "half", {"half": GOOD.format(offset=3)})
    path = site / "half-1.0.dist-info" / "METADATA"
    path.unlink() if metadata is None else path.write_text(metadata)
    registry.refresh()
    assert chosen() == 0
    assert chosen(backend="half") == 3
    assert rows()["half"][1:3] == ("half" if metadata and "Name" in metadata else "unknown", "unknown")


def named_same():
    return [row for row in loss_core.list_backends("cpu") if row.name == "same"]


def test_a_name_claimed_twice_goes_to_the_first(site, monkeypatch):
    first, second = site / "first", site / "second"
    add_distribution(first, "first-dist", {"same": GOOD.format(offset=1)})
    add_distribution(second, "second-dist", {"same": GOOD.format(offset=2)})
    path = list(sys.path)
    monkeypatch.setattr(sys, "path", [str(first), str(second), *path])
    registry.refresh()
    assert chosen(backend="same") == 1
    assert named_same() == [
        ("same", "first-dist", "1.0", ("softmax",), True, ""),
        ("same", "second-dist", "1.0", (), False, "the name 'same' is taken by first-dist 1.0"),
    ]
    monkeypatch.setattr(sys, "path", [str(second), str(first), *path])
    registry.refresh()
    assert chosen(backend="same") == 2


def test_the_same_distribution_twice_is_one_backend(site, monkeypatch):
    folders = [site / "one", site / "two"]
    for folder in folders:
        add_distribution(folder, "Same_Dist", {"same": GOOD.format(offset=1)})
    monkeypatch.setattr(sys, "path", [*map(str, (*folders, folders[0])), *sys.path])
    registry.refresh()
    assert named_same() == [("same", "Same_Dist", "1.0", ("softmax",), True, "")]


def test_a_plug_in_installed_later_is_seen_after_refresh(site):
    loss_core.set_default_backend("torch")
    assert "late" not in rows()
    add_distribution(site, "latecomer", {"late": GOOD.format(offset=8)})
    with loss_core.use_backend("torch"):
        loss_core.refresh()
        assert chosen() == 0
        assert chosen(backend="late") == 8
    assert rows()["late"].available
    assert registry._default == "torch"


def test_refresh_asks_again_what_is_available(site, monkeypatch):
    source = GOOD.format(offset=0).replace("return None", "import os; return os.environ.get('WHY_NOT')", 1)
    add_distribution(site, "moody", {"moody": source})
    registry.refresh()
    monkeypatch.setenv("WHY_NOT", "bad mood")
    assert rows()["moody"].reason == "bad mood"
    monkeypatch.delenv("WHY_NOT")
    assert rows()["moody"].reason == "bad mood"
    loss_core.refresh()
    assert rows()["moody"].available


# Cost, and life without kernels


def test_importing_searches_and_imports_nothing(tmp_path):
    """With 300 distributions, most of them with entry points, the import reads none of them."""
    for i in range(300):
        add_distribution(tmp_path, f"installed-{i}", {f"b{i}": "raise SystemExit"}, group=f"group.{i % 7}")
    add_distribution(tmp_path, "costly", {"costly": "raise SystemExit"})
    program = """
    import sys, importlib.metadata as metadata
    log = []
    original = metadata.entry_points
    metadata.entry_points = lambda *a, **k: log.append(k.get("group")) or original(*a, **k)
    import torch, loss_core
    loss_core.nn.CrossEntropyLoss(), loss_core.testing if hasattr(loss_core, "testing") else None
    at_import = list(log)
    loaded = [m for m in ("triton", "cutlass", "loss_triton", "loss_cutedsl", "costly_costly") if m in sys.modules]
    for _ in range(3):
        loss_core.softmax(torch.zeros(2), backend="torch")
    used = [m for m in ("loss_triton", "loss_cutedsl", "costly_costly") if m in sys.modules]
    report([at_import, loaded, log, used])
    """
    at_import, loaded, searched, used = run_python(program, tmp_path)
    assert "loss_core.backends" not in at_import  # torch looks for its own
    assert loaded == []
    assert searched.count("loss_core.backends") == 1
    assert used == []


# The modules are found, as they are where they are installed, and fail.
BLOCKER = """
import importlib.machinery, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            return importlib.machinery.ModuleSpec(name, self)
    def create_module(self, spec):
        raise ImportError(spec.name + " is blocked")
sys.meta_path.insert(0, Blocker())
"""


@pytest.mark.parametrize("blocked", [("triton",), ("cutlass",), ("triton", "cutlass")], ids="+".join)
def test_the_reference_works_where_kernels_cannot_be_imported(blocked):
    program = BLOCKER.format(blocked=blocked) + (
        "import torch, loss_core\n"
        "x = torch.tensor([[0.0, 0.0], [0.0, 3.0]], requires_grad=True)\n"
        "loss = loss_core.cross_entropy(x, torch.tensor([0, 1])); loss.backward()\n"
        "report([round(loss.item(), 4), x.grad[0].tolist(), {b.name: b.reason for b in loss_core.list_backends()}])\n"
    )
    # torch itself looks for triton when it starts to use a GPU, and would not survive the answer.
    loss, grad, reasons = run_python(program, CUDA_VISIBLE_DEVICES="")
    assert loss == 0.3709
    assert grad == [-0.25, 0.25]
    assert reasons["torch"] == ""
    for package, name in (("triton", "triton"), ("cutlass", "cutedsl")):
        if package in blocked and name in reasons:
            # Without a GPU the device may be the first thing that is missing.
            assert reasons[name]


def test_the_command_line_prints_the_table(tmp_path):
    add_distribution(tmp_path, "broken", {"broken": "raise ImportError('libfoo is\\n\\tmissing')"})
    program = "import runpy; runpy.run_module('loss_core', run_name='__main__')\nimport sys\n"
    capture = "import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    " + program
    table = run_python(capture + "report(out.getvalue())", tmp_path).splitlines()
    assert table[0].split() == ["backend", "distribution", "ops", "available"]
    cells = {line.split()[0]: line for line in table[1:]}
    assert cells["torch"].split() == [
        "torch", "loss-core", loss_core.__version__, "cross_entropy,", "softmax,", "log_softmax", "yes"
    ]  # fmt: skip
    assert cells["broken"].split(maxsplit=4) == [
        "broken", "broken", "1.0", "-", "no: import failed: ImportError: libfoo is missing"
    ]  # fmt: skip


def test_the_errors_can_be_caught_as_what_they_are():
    assert issubclass(BackendUnavailable, loss_core.BackendError)
    assert issubclass(UnsupportedInput, loss_core.BackendError)
    assert issubclass(loss_core.BackendError, RuntimeError)
    assert issubclass(UnsupportedInput, ValueError)
