"""What is published: a wheel and an sdist of each package, each usable alone, bringing the backends it says."""

import json
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.plugins import unset

ROOT = Path(__file__).parents[2]
PACKAGES = ("loss-bench", "loss-core", "loss-cutedsl", "loss-triton")

pytestmark = [
    pytest.mark.xdist_group("packaging"),
    pytest.mark.skipif(not (ROOT / "packages").is_dir(), reason="the packages' sources are not here"),
    pytest.mark.skipif(find_spec("hatch") is None, reason="hatch is not installed"),
]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """The files that ``hatch build --all`` makes, from a copy of the workspace, by package and kind."""
    workspace = tmp_path_factory.mktemp("workspace")
    shutil.copy(ROOT / "pyproject.toml", workspace)
    shutil.copytree(
        ROOT / "packages", workspace / "packages", ignore=shutil.ignore_patterns("__pycache__", "dist", ".*_cache")
    )
    subprocess.run([sys.executable, "-m", "hatch", "build", "--all"], cwd=workspace, check=True, capture_output=True)
    files = sorted((workspace / "dist").iterdir()) or sorted(workspace.glob("packages/*/dist/*"))
    return {(file.name.partition("-")[0].replace("_", "-"), file.suffix): file for file in files}


def test_every_package_is_built_as_wheel_and_sdist(artifacts):
    assert sorted(artifacts) == sorted((package, suffix) for package in PACKAGES for suffix in (".whl", ".gz"))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_holds_the_package_and_nothing_else(package, artifacts):
    module = package.replace("-", "_")
    with zipfile.ZipFile(artifacts[package, ".whl"]) as wheel:
        names = wheel.namelist()
        metadata = wheel.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {module}
    assert f"{module}/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    sources = {path.relative_to(ROOT / "packages" / package / "src").as_posix()
               for path in (ROOT / "packages" / package / "src").rglob("*.py")}  # fmt: skip
    assert {name for name in names if name.endswith(".py")} == sources
    assert "License-Expression: MIT" in metadata
    assert "Requires-Python: <3.15,>=3.10" in metadata
    # A readme is more than its heading.
    assert len(metadata.partition("\n\n")[2]) > 200, f"{package} has no README to speak of"


@pytest.mark.parametrize("package", PACKAGES)
def test_an_sdist_builds_the_same_wheel(package, artifacts, tmp_path):
    with tarfile.open(artifacts[package, ".gz"]) as sdist:
        names = [name.partition("/")[2] for name in sdist.getnames()]
        sdist.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"} <= set(names)
    (source,) = tmp_path.iterdir()
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "out")]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (rebuilt,) = (tmp_path / "out").iterdir()
    with zipfile.ZipFile(rebuilt) as ours, zipfile.ZipFile(artifacts[package, ".whl"]) as theirs:
        contents = [{n: w.read(n) for n in w.namelist() if n.endswith(".py")} for w in (ours, theirs)]
    assert contents[0] == contents[1]


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_installed_here_is_of_these_sources(package, artifacts):
    with zipfile.ZipFile(artifacts[package, ".whl"]) as wheel:
        built = {Path(name).name: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name}
    installed = distribution(package)
    advice = "an older environment: `hatch run members` installs the packages anew"
    assert (installed.read_text("entry_points.txt") or "") == built.get("entry_points.txt", ""), advice
    # What follows the headers is the README, whose changes need no installation.
    assert installed.read_text("METADATA").partition("\n\n")[0] == built["METADATA"].partition("\n\n")[0], advice


def closure(*names):
    """The distributions that `names` need, as installed here, ours left out."""
    from packaging.requirements import Requirement

    found, open_names = {}, list(names)
    while open_names:
        name = open_names.pop()
        key = name.lower().replace("_", "-")
        if key in found or key in PACKAGES:
            continue
        found[key] = distribution(name)
        for line in found[key].requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                open_names.append(requirement.name)
    return found.values()


def link_into(site, distributions):
    """Make installed distributions importable from `site` without copying them."""
    for dist in distributions:
        for file in dist.files or []:
            parts = Path(file).parts
            if parts[0] in ("..", "__pycache__") or parts[0].endswith(".pth"):
                continue
            if len(parts) > 1 and not (site / parts[0]).is_symlink() and shared(parts[0]):
                # A namespace of several distributions: link what is in it.
                (site / parts[0]).mkdir(exist_ok=True)
                parts = parts[:2]
            else:
                parts = parts[:1]
            place, target = site.joinpath(*parts), Path(dist.locate_file(Path(*parts)))
            if not place.exists() and target.exists():
                place.symlink_to(target)


def shared(folder):
    return folder == "nvidia"


@pytest.fixture
def environment(tmp_path, artifacts):
    """``environment(packages, dependencies)``: the Python of a fresh virtual environment with just these."""

    def create(packages, dependencies):
        venv.create(tmp_path / "venv", with_pip=False)
        python = tmp_path / "venv" / "bin" / "python"
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = Path(subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip())
        link_into(site, closure(*dependencies))
        # CuTe DSL's module is found through a path file.
        if "nvidia-cutlass-dsl" in dependencies:
            import cutlass

            (site / "cutlass.pth").write_text(str(Path(cutlass.__file__).parents[1]) + "\n")
        install = [sys.executable, "-m", "pip", "--quiet", "--python", str(python), "install", "--no-deps"]
        subprocess.run([*install, *(str(artifacts[package, ".whl"]) for package in packages)], check=True)
        return python

    return create


PROGRAM = """
import json, sys, torch, loss_core
x = torch.tensor([[0.0, 0.0], [0.0, 3.0]], requires_grad=True)
loss_core.cross_entropy(x, torch.tensor([0, 1])).backward()
importable = []
for module in ("triton", "cutlass", "loss_bench"):
    try:
        __import__(module)
        importable.append(module)
    except ImportError:
        pass
rows = [[b.name, b.distribution, list(b.ops), b.reason] for b in loss_core.list_backends("cpu")]
print(json.dumps([x.grad[0].tolist(), rows, importable]))
"""
OPS = ["cross_entropy", "softmax", "log_softmax"]


@pytest.mark.parametrize(
    ("packages", "dependencies", "backends"),
    [
        (["loss-core"], ["torch"], ["torch"]),
        (["loss-core", "loss-triton"], ["torch", "triton"], ["triton", "torch"]),
        (["loss-core", "loss-cutedsl"], ["torch", "nvidia-cutlass-dsl"], ["cutedsl", "torch"]),
    ],
    ids=lambda value: "+".join(value),
)
def test_wheels_alone_bring_their_backends(packages, dependencies, backends, environment):
    python = environment(packages, dependencies)
    # -I: neither the working directory nor Python's variables.
    done = subprocess.run([python, "-I", "-c", PROGRAM], env=unset(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    grad, rows, importable = json.loads(done.stdout.splitlines()[-1])
    assert grad == [-0.25, 0.25]
    assert [row[0] for row in rows] == backends
    assert importable == [{"triton": "triton", "nvidia-cutlass-dsl": "cutlass"}[d] for d in dependencies[1:]]
    for name, _, ops, reason in rows:
        assert ops == OPS, f"{name}: {reason}"
        assert bool(reason) == (name != "torch")
    list_them = [python, "-I", "-m", "loss_core"]
    table = subprocess.run(list_them, env=unset(), capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in table.splitlines()[1:]] == backends
