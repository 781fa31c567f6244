"""The conformance cases of cross_entropy on every backend."""

from loss_core.testing import check

OP = "cross_entropy"


def test_conformance(backend, case, device):
    check(case, backend, device)
