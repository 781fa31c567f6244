"""The contract's form for a vocabulary that is spread over several devices: kernels of a shard, put together here."""

import itertools

import pytest
import torch
from loss_core import UnsupportedInput, get_backend
from loss_core.backend import CrossEntropyOptions
from torch.nn import functional

ROWS, CLASSES = 23, 1000
BOUNDS = [0, 1, 313, 800, CLASSES]  # shards of 1, 312, 487 and 200 classes
EDGE_TARGETS = torch.tensor([0, 1, 312, 313, 799, 800, CLASSES - 1])


def shards(dtype, device):
    logits = (torch.randn(ROWS, CLASSES) * 3).to(dtype)
    logits[4, 313:800] = -torch.inf  # a shard with nothing in it
    target = torch.randint(CLASSES, (ROWS,))
    target[: len(EDGE_TARGETS)] = EDGE_TARGETS
    target[4] = 5
    target[10:13] = -100
    parts = [
        (logits[:, low:high].contiguous().to(device), {"first_class": low, "total_classes": CLASSES})
        for low, high in itertools.pairwise(BOUNDS)
    ]
    return logits.double(), target, parts


def forwards(backend, parts, target, **options):
    return [
        get_backend(backend).module.cross_entropy_forward(
            logits, target, None, None, None, CrossEntropyOptions(reduction="none", **place, **options), grad=None,
            stats=False,
        )
        for logits, place in parts
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shards_add_up_to_the_loss(dtype, backend, device):
    logits, target, parts = shards(dtype, device)
    results = forwards(backend, parts, target.to(device))
    lse = torch.stack([result.lse for result in results]).double().cpu()
    # An ignored row's lse may be anything; its losses are 0.
    negative_logit = sum(result.loss.double() for result in results).cpu()
    live = target != -100
    wanted = functional.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close((torch.logsumexp(lse, 0) + negative_logit)[live], wanted[live], atol=2e-5, rtol=1e-6)
    assert not negative_logit[~live].any()


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_shards(dtype, reduction, z_loss, backend, device):
    logits, target, parts = shards(dtype, device)
    logits.requires_grad_()
    live = target != -100
    lse = torch.logsumexp(logits, 1)
    rows = functional.cross_entropy(logits, target, reduction="none") + z_loss * torch.where(live, lse, 0) ** 2
    upstream = torch.randn(ROWS) if reduction == "none" else torch.randn(())
    wanted = torch.autograd.grad(rows if reduction == "none" else rows.sum() / 7.0, logits, upstream.double())[0]
    denominator = None if reduction == "none" else torch.tensor([7.0], device=device)
    for logits_part, place in parts:
        grad = torch.full_like(logits_part, torch.nan)
        get_backend(backend).module.cross_entropy_backward(
            upstream.to(device), logits_part, target.to(device), None, lse.float().detach().to(device), denominator,
            CrossEntropyOptions(reduction=reduction, z_loss=z_loss, **place), grad=grad, skip_if_one=False,
        )  # fmt: skip
        low = place["first_class"]
        of_part = wanted[:, low : low + logits_part.shape[1]]
        # Triton's interpreter cuts bfloat16 off where a GPU rounds.
        tolerance = {torch.bfloat16: 2**-7, torch.float32: 2e-5}[dtype]
        torch.testing.assert_close(grad.double().cpu(), of_part, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("outside", [-1, CLASSES, 2**40])
def test_target_of_no_shard_gives_nan_in_each(outside, backend, device):
    _, target, parts = shards(torch.float32, device)
    target[3] = outside
    for result in forwards(backend, parts, target.to(device)):
        assert torch.isnan(result.loss).nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize(
    "options", [{"label_smoothing": 0.1}, {"z_loss": 0.1}, {"reduction": "mean"}, {"weight": True}, {"stats": True}],
    ids=str,
)  # fmt: skip
def test_what_needs_the_other_shards_is_refused(options, backend, device):
    options = dict(options)
    weight = torch.ones(8, device=device) if options.pop("weight", False) else None
    stats = options.pop("stats", False)
    options = CrossEntropyOptions(first_class=8, total_classes=16, **{"reduction": "none", **options})
    with pytest.raises(UnsupportedInput, match="shard"):
        get_backend(backend).module.cross_entropy_forward(
            torch.zeros(2, 8, device=device), torch.zeros(2, dtype=torch.int64, device=device), weight, None, None,
            options, grad=None, stats=stats,
        )  # fmt: skip
