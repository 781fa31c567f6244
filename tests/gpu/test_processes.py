"""Fresh processes on a device: the first call, many at once, and what the second start finds compiled."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from support.plugins import run_python

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("device")]

# The op is the first thing that the process asks of the device.
PROGRAM = """
import torch, loss_core
torch.manual_seed(0)
logits, target = torch.randn(7, 1001).cuda().requires_grad_(), torch.arange(7, device="cuda")
loss = loss_core.cross_entropy(logits, target, backend={backend!r})
loss.backward()
report([loss.item(), logits.grad.double().abs().sum().item()])
"""


def files(folder):
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_processes_that_start_at_once_share_an_empty_cache(backend, tmp_path):
    def start(_):
        return run_python(
            PROGRAM.format(backend=backend), TRITON_CACHE_DIR=str(tmp_path), LOSS_CUTEDSL_CACHE=str(tmp_path)
        )

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(start, range(8)))
    (wanted,) = {tuple(result) for result in results}
    compiled = files(tmp_path)
    assert bool(compiled) == (backend != "torch")
    # The next one finds everything and compiles nothing.
    assert tuple(start(None)) == wanted
    assert files(tmp_path) == compiled
