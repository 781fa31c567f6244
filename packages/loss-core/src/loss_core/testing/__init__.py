"""The conformance suite: what a backend has to compute, as cases that any test runner can walk through.

A backend's whole test, with pytest::

    import pytest
    from loss_core.testing import cases, check

    @pytest.mark.parametrize("case", cases("cross_entropy"), ids=str)
    def test_cross_entropy(case):
        check(case, backend="mine", device="cuda")

and the same for ``"softmax"``, ``"log_softmax"`` and ``"causal_lm_loss"``. Importing this needs torch alone.

``Case`` says what is asked, and is read to leave some out (``[c for c in cases(op) if c.softcap is None]``);
``make_inputs`` draws its tensors, the same everywhere, already rounded to the case's dtype; ``expected`` computes the
results in float64 without any loss-core backend, and how far a result may be off; ``check`` compares, with all memory
from ``torch.empty`` filled with NaN (``nan_filled_empty``), so that what a kernel forgets to write shows.
"""

from loss_core.testing.case import Case, cases
from loss_core.testing.check import check
from loss_core.testing.inputs import Inputs, make_inputs
from loss_core.testing.memory import nan_filled_empty
from loss_core.testing.truth import Expected, assert_within, expected

__all__ = [
    "Case",
    "Expected",
    "Inputs",
    "assert_within",
    "cases",
    "check",
    "expected",
    "make_inputs",
    "nan_filled_empty",
]
