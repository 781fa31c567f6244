"""Fresh processes on a device: the first call, many at once, and what the second start finds compiled."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from support.plugins import run_python

pytestmark = pytest.mark.gpu

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


@pytest.mark.xdist_group("processes")
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


# torch.compile's CUDA graphs warm up with memory that they later take back, whoever still holds it.
REDUCE_OVERHEAD = """
import torch, loss_core
torch.manual_seed(0)
logits, target = torch.randn(300, 1001).cuda().requires_grad_(), torch.randint(1001, (300,)).cuda()

@torch.compile(mode="reduce-overhead", fullgraph=True)
def compiled(logits, target):
    return loss_core.cross_entropy(logits * 1.5, target, backend={backend!r})

wanted = torch.nn.functional.cross_entropy(logits.detach().double() * 1.5, target).item()
worst = 0.0
for step in range(12):
    loss = compiled(logits, target)
    loss.backward()
    logits.grad = None
    torch.full((2**22,), -1, device="cuda")  # takes memory that is free
    eager = loss_core.cross_entropy(logits * 1.5, target, backend={backend!r})
    worst = max(worst, abs(loss.item() - wanted), abs(eager.item() - wanted))
report(worst)
"""


def test_first_call_inside_cuda_graphs_of_the_compiler(backend, tmp_path):
    environment = dict.fromkeys(("TRITON_CACHE_DIR", "LOSS_CUTEDSL_CACHE", "TORCHINDUCTOR_CACHE_DIR"), str(tmp_path))
    assert run_python(REDUCE_OVERHEAD.format(backend=backend), **environment) < 1e-5
