"""The conformance cases of log_softmax on every backend."""

from loss_core.testing import check

OP = "log_softmax"


def test_conformance(backend, case, device):
    check(case, backend, device)
