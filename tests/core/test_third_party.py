"""A distribution from outside, built and installed as its users would, goes through the same door as our backends."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.plugins import unset

SOURCE = Path(__file__).parent.parent / "third_party_backend"
PROGRAM = """
import torch, loss_core
from unittest import SkipTest
from loss_core.testing import cases, check

row = next(b for b in loss_core.list_backends("cpu") if b.name == "third-party")
assert row == ("third-party", "third-party-loss", "1.2.3", ("cross_entropy", "softmax"), True, ""), row
assert loss_core.get_backend("third-party").unavailable_reason(torch.device("meta")) == "runs on CPUs, not on meta"
# Not among those tried by themselves; only when named.
logits, target = torch.randn(4, 9), torch.tensor([0, 1, 2, 8])
with loss_core.use_backend("third-party"):
    loss_core.cross_entropy(logits, target)
    try:
        loss_core.cross_entropy(logits, target, z_loss=0.1)
    except loss_core.UnsupportedInput as error:
        assert "knows no class weights" in str(error), error
    else:
        raise AssertionError("an explicit choice fell back")

counts = {}
for op in ("cross_entropy", "causal_lm_loss", "softmax"):
    plain = [c for c in cases(op, quick=True) if c.classes <= 1000
             and not (c.weight or c.label_smoothing or c.z_loss or c.stats)
             and c.softcap is None and c.logit_scale == 1]
    for case in plain:
        try:
            check(case, "third-party")
        except SkipTest as skip:
            assert case.optional, skip
            counts["skipped"] = counts.get("skipped", 0) + 1
        except Exception as error:
            raise AssertionError(f"{op}: {case}") from error
        counts[op] = counts.get(op, 0) + 1
print(counts)
assert counts["cross_entropy"] > 80 and counts["softmax"] > 30 and counts["skipped"] > 0
"""


pytestmark = pytest.mark.skipif(find_spec("hatchling") is None, reason="hatchling is not installed")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Variables under which the distribution, built and installed into a folder, is found beside what is here."""
    folder = tmp_path_factory.mktemp("third_party")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-build-isolation", "--target", str(folder), str(SOURCE)], check=True
    )
    return {**unset(), "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def test_passes_the_conformance_suite(environment):
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_is_listed_on_the_command_line(environment):
    done = subprocess.run(
        [sys.executable, "-m", "loss_core"], env=environment, capture_output=True, text=True, check=True
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("third-party "))
    assert "third-party-loss 1.2.3" in line
    assert "cross_entropy, softmax" in line
