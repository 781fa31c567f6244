"""Launches on a GPU: what Triton's own launcher would have done besides."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import loss_core
from triton import knobs

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("device")]


@pytest.fixture
def profiler():
    """The names of the kernels that a profiler is told of, while it is there."""
    seen = []

    def note(metadata):
        seen.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(note)
    yield seen
    knobs.runtime.launch_enter_hook.remove(note)


def test_a_profiler_sees_every_launch_and_results_are_the_same(profiler):
    logits = torch.randn(64, 1000, device="cuda", dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(1000, (64,), device="cuda")

    def call():
        loss = loss_core.cross_entropy(logits, target, backend="triton")
        return loss.detach(), torch.autograd.grad(loss, logits, loss.new_tensor(0.7))[0]

    call()  # Compiles, where Triton launches.
    profiler.clear()
    watched = call()
    assert profiler == ["cross_entropy_fwd_grad_kernel", "cross_entropy_bwd_kernel"]
    knobs.runtime.launch_enter_hook.remove(knobs.runtime.launch_enter_hook.calls[-1])
    unwatched = call()
    assert len(profiler) == 2
    assert all(torch.equal(one, other) for one, other in zip(watched, unwatched, strict=True))
