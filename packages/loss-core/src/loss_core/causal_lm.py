"""The loss of causal language models: each position predicts the next token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loss_core.canonical import sent_to
from loss_core.cross_entropy import cross_entropy
from loss_core.dtypes import FLOATING, INTEGRAL, kind, names

# What Hugging Face models pass on to their loss function together with its own arguments; they are for the layers.
_FOR_THE_MODEL = frozenset(
    "cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k is_causal output_attentions output_hidden_states "
    "output_router_logits position_ids return_dict use_cache".split()
)


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int | None = None,
    num_items_in_batch: float | Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    byte_lengths: Tensor | None = None,
    num_items: float | Tensor | None = None,
    inplace: bool = False,
    backend: str | None = None,
    **for_the_model: Any,
) -> Tensor:
    """Cross-entropy of ``logits[..., t, :]`` with ``labels[..., t + 1]``; the last position has no target.

    The labels are shifted, not the logits, so nothing of the logits' size is copied or converted: the last position
    is given ``ignore_index``. The positional arguments are those of the Hugging Face loss functions, so that it can
    be assigned: ``model.loss_function = loss_core.causal_lm_loss``.

    Args:
        logits: (..., tokens, V), any floating dtype.
        labels: (..., tokens), int32, int64 or uint8; *not* shifted. Moved to the logits' device.
        vocab_size: V, checked; None takes it from the logits.
        num_items_in_batch: as `num_items`, under its Hugging Face name.
        ignore_index: labels that do not count.
        shift_labels: (..., tokens), labels that are shifted already; `labels` is then not used.
        weight, reduction, label_smoothing, z_loss, softcap, logit_scale, inplace, backend: see ``cross_entropy``.
        byte_lengths: in labels' shape and order, shifted with them (not, if `shift_labels` is given).
        num_items: denominator of the mean: the number of targets in the whole batch when this is a part of it.
        **for_the_model: keyword arguments that Hugging Face models hand through (``cu_seq_lens_q``, ...) are
            accepted and not used; any other raises a TypeError.

    Returns:
        The loss as ``cross_entropy`` reduces it: float32 (float64 for float64), a scalar, or (..., tokens) for
        ``"none"`` with 0 at the last position.

    Raises:
        TypeError, ValueError, IndexError, BackendUnavailable, UnsupportedInput: as ``cross_entropy``.

    Example:
        >>> import torch, loss_core
        >>> labels = torch.tensor([[3, 1, 2]])
        >>> logits = 50.0 * torch.nn.functional.one_hot(torch.tensor([[1, 2, 0]]), 4)
        >>> loss_core.causal_lm_loss(logits, labels).item()
        0.0
    """
    # Not a difference of sets: torch.compile of torch 2.11 has none of a dict's keys.
    unknown = [name for name in for_the_model if name not in _FOR_THE_MODEL]
    if unknown:
        raise TypeError(f"causal_lm_loss got an unexpected keyword argument {min(unknown)!r}")
    if num_items_in_batch is not None:
        if num_items is not None:
            raise ValueError("num_items and num_items_in_batch are the same argument; give one of them")
        num_items = num_items_in_batch
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits must be a tensor of {names(FLOATING)}, got {kind(logits)}")
    if logits.dim() < 2:
        raise ValueError(f"logits must have shape (..., tokens, classes), got {tuple(logits.shape)}")
    if vocab_size is not None and vocab_size != logits.shape[-1]:
        raise ValueError(f"vocab_size must be the logits' last dimension {logits.shape[-1]}, got {vocab_size}")
    target = _moved("labels" if shift_labels is None else "shift_labels", labels, shift_labels, logits)
    if shift_labels is None:
        target = _shifted(target, ignore_index)
        if isinstance(byte_lengths, Tensor) and byte_lengths.shape == target.shape:
            # What stands for the target that the last position lacks is not counted.
            byte_lengths = _shifted(byte_lengths, 0)
    return cross_entropy(
        logits, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing,
        z_loss=z_loss, softcap=softcap, logit_scale=logit_scale, byte_lengths=byte_lengths, num_items=num_items,
        inplace=inplace, backend=backend,
    )  # fmt: skip


def _moved(name: str, labels: Tensor, shift_labels: Tensor | None, logits: Tensor) -> Tensor:
    labels = labels if shift_labels is None else shift_labels
    if not isinstance(labels, Tensor) or labels.dtype not in INTEGRAL:
        raise TypeError(f"{name} must be a tensor of {names(INTEGRAL)}, got {kind(labels)}")
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"{name} must have shape {tuple(logits.shape[:-1])} for logits of shape {tuple(logits.shape)}, "
            f"got {tuple(labels.shape)}"
        )
    return sent_to(logits.device, labels)


def _shifted(labels: Tensor, last: int) -> Tensor:
    """``labels[..., 1:]`` followed by `last`."""
    # uint8 has no room for -100.
    labels = labels.to(torch.int64) if labels.dtype == torch.uint8 else labels
    return torch.nn.functional.pad(labels[..., 1:], (0, 1), value=last) if labels.shape[-1] else labels
