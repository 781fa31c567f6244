"""Names of earlier packages of Triton cross-entropy kernels, for code that was written for them.

They have the arguments and results of those packages, computed by this one's kernels; the logits are not overwritten.
New code calls ``loss_core.cross_entropy`` and ``loss_core.causal_lm_loss``.
"""

from __future__ import annotations

import torch
from loss_core import causal_lm_loss, cross_entropy
from torch import Tensor


class CrossEntropyFunction:
    """Next-token loss, under the name that the package crossentropy-triton gives it."""

    @staticmethod
    def apply(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
        """Mean cross-entropy of ``logits[..., t, :]`` with ``labels[..., t + 1]``; 0 where every label is ignored.

        Args:
            logits: (..., tokens, V), float16, bfloat16 or float32.
            labels: (..., tokens), integers, not shifted.
            ignore_index: labels that do not count.

        Returns:
            A float32 scalar.

        Raises:
            BackendUnavailable: if Triton cannot run on the logits' device.
        """
        # Compared with a uint8, -100 would become 156.
        counted = (labels[..., 1:].long() != ignore_index).sum().clamp(min=1)
        return causal_lm_loss(logits, labels, ignore_index=ignore_index, num_items=counted, backend="triton")


class TritonCausalLMLoss(torch.nn.Module):
    """``CrossEntropyFunction`` as a module, with labels of -100 ignored.

    Args:
        vocab_size: V, checked against the logits.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of logits (..., tokens, V) and labels (..., tokens); a ValueError if V is not `vocab_size`."""
        if logits.shape[-1] != self.vocab_size:
            raise ValueError(f"logits must have {self.vocab_size} classes, got shape {tuple(logits.shape)}")
        return CrossEntropyFunction.apply(logits, labels)


class FusedCrossEntropyFunction:
    """Cross-entropy whose gradient is computed in the forward, under the name of an earlier package."""

    @staticmethod
    def apply(logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of logits (..., V) with targets (...), not shifted; targets of -100 do not count.

        Returns:
            A float32 scalar.

        Raises:
            BackendUnavailable: if Triton cannot run on the logits' device.
        """
        return cross_entropy(logits, targets, backend="triton")


class TritonCrossEntropyLoss(torch.nn.Module):
    """``FusedCrossEntropyFunction`` as a module."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of logits (..., V) and targets (...)."""
        return FusedCrossEntropyFunction.apply(logits, targets)
