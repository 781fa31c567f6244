"""Loss functions for training language models, over kernels that other packages plug in.

    >>> import torch, loss_core
    >>> logits, target = torch.randn(8, 50257, requires_grad=True), torch.randint(50257, (8,))
    >>> loss_core.cross_entropy(logits, target).backward()

The functions follow ``torch.nn.functional``; each docstring says where they differ. ``loss_core.backend`` states
the contract that a backend fulfils, ``loss_core.registry`` how one is found and chosen.
"""

from loss_core import nn
from loss_core.__about__ import __version__
from loss_core.backend import BackendError, BackendUnavailable, UnsupportedInput
from loss_core.causal_lm import causal_lm_loss
from loss_core.cross_entropy import CrossEntropyStats, cross_entropy, cross_entropy_with_stats
from loss_core.registry import (
    BackendInfo,
    get_backend,
    list_backends,
    refresh,
    set_default_backend,
    use_backend,
)
from loss_core.softmax import log_softmax, softmax

__all__ = [
    "BackendError",
    "BackendInfo",
    "BackendUnavailable",
    "CrossEntropyStats",
    "UnsupportedInput",
    "__version__",
    "causal_lm_loss",
    "cross_entropy",
    "cross_entropy_with_stats",
    "get_backend",
    "list_backends",
    "log_softmax",
    "nn",
    "refresh",
    "set_default_backend",
    "softmax",
    "use_backend",
]
