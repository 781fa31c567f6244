"""The conformance cases of softmax on every backend."""

from loss_core.testing import check

OP = "softmax"


def test_conformance(backend, case, device):
    check(case, backend, device)
