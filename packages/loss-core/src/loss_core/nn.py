"""The ops as modules, with the constructor arguments of ``torch.nn`` first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loss_core.causal_lm import causal_lm_loss
from loss_core.cross_entropy import cross_entropy
from loss_core.softmax import log_softmax, softmax


class _Loss(torch.nn.Module):
    """Class weights as a buffer, and the options as attributes, which may be set later, as those of torch's losses."""

    weight: Tensor | None

    def __init__(self, weight: Tensor | None, **options: Any) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self._names = tuple(options)
        for name, value in options.items():
            setattr(self, name, value)

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def extra_repr(self) -> str:
        """The options that are not None."""
        return ", ".join(f"{name}={value!r}" for name, value in self._options().items() if value is not None)


class CrossEntropyLoss(_Loss):
    """``loss_core.cross_entropy`` as a module; a drop-in for ``torch.nn.CrossEntropyLoss`` with classes last.

    Args:
        weight: (V,) class weights, kept as a buffer, or None.
        ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale, dim, inplace, backend: see
            ``loss_core.cross_entropy``.

    Raises:
        ValueError: an option is out of range, when the module is called.

    Example:
        >>> import torch, loss_core
        >>> loss = loss_core.nn.CrossEntropyLoss(label_smoothing=0.1)
        >>> round(loss(torch.zeros(2, 4), torch.tensor([0, 3])).item(), 4)
        1.3863
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        dim: int = -1,
        inplace: bool = False,
        backend: str | None = None,
    ) -> None:
        super().__init__(
            weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, z_loss=z_loss,
            softcap=softcap, logit_scale=logit_scale, dim=dim, inplace=inplace, backend=backend,
        )  # fmt: skip

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        *,
        byte_lengths: Tensor | None = None,
        num_items: float | Tensor | None = None,
    ) -> Tensor:
        """The loss of `input` and `target`; see ``loss_core.cross_entropy``."""
        return cross_entropy(
            input, target, self.weight, byte_lengths=byte_lengths, num_items=num_items, **self._options()
        )


class CausalLMLoss(_Loss):
    """``loss_core.causal_lm_loss`` as a module.

    Args:
        weight: (V,) class weights, kept as a buffer, or None.
        ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale, inplace, backend: see
            ``loss_core.causal_lm_loss``.

    Raises:
        ValueError: an option is out of range, when the module is called.

    Example:
        >>> import torch, loss_core
        >>> loss = loss_core.nn.CausalLMLoss()
        >>> round(loss(torch.zeros(1, 3, 4), torch.tensor([[0, 1, 2]])).item(), 4)
        1.3863
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        inplace: bool = False,
        backend: str | None = None,
    ) -> None:
        super().__init__(
            weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, z_loss=z_loss,
            softcap=softcap, logit_scale=logit_scale, inplace=inplace, backend=backend,
        )  # fmt: skip

    def forward(
        self,
        logits: Tensor,
        labels: Tensor,
        *,
        shift_labels: Tensor | None = None,
        byte_lengths: Tensor | None = None,
        num_items: float | Tensor | None = None,
    ) -> Tensor:
        """The loss of `logits` and `labels`; see ``loss_core.causal_lm_loss``."""
        return causal_lm_loss(
            logits, labels, shift_labels=shift_labels, weight=self.weight, byte_lengths=byte_lengths,
            num_items=num_items, **self._options(),
        )  # fmt: skip


class Softmax(torch.nn.Module):
    """``loss_core.softmax`` as a module; a drop-in for ``torch.nn.Softmax``.

    Args:
        dim, dtype, backend: see ``loss_core.softmax``.

    Example:
        >>> import torch, loss_core
        >>> loss_core.nn.Softmax()(torch.zeros(2))
        tensor([0.5000, 0.5000])
    """

    def __init__(self, dim: int = -1, *, dtype: torch.dtype | None = None, backend: str | None = None) -> None:
        super().__init__()
        self.dim, self.dtype, self.backend = dim, dtype, backend

    def forward(self, input: Tensor) -> Tensor:
        """Softmax of `input`; see ``loss_core.softmax``."""
        return softmax(input, self.dim, dtype=self.dtype, backend=self.backend)

    def extra_repr(self) -> str:
        """The dimension."""
        return f"dim={self.dim}"


class LogSoftmax(Softmax):
    """``loss_core.log_softmax`` as a module; a drop-in for ``torch.nn.LogSoftmax``.

    Args:
        dim, dtype, backend: see ``loss_core.log_softmax``.

    Example:
        >>> import torch, loss_core
        >>> loss_core.nn.LogSoftmax()(torch.zeros(2))
        tensor([-0.6931, -0.6931])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Log-softmax of `input`; see ``loss_core.log_softmax``."""
        return log_softmax(input, self.dim, dtype=self.dtype, backend=self.backend)
