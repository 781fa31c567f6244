"""The conformance cases of causal_lm_loss on every backend."""

from loss_core.testing import check

OP = "causal_lm_loss"


def test_conformance(backend, case, device):
    check(case, backend, device)
