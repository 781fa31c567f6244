"""The contract between loss-core and a backend, version ``API_VERSION``.

A backend is an importable module named by one entry point of the group ``loss_core.backends``::

    [project.entry-points."loss_core.backends"]
    mine = "my_package"

loss-core imports the module only when the backend is asked for. The module defines

``API_VERSION: int``
    The version of this contract that it was written for. Another number than
    ``loss_core.backend.API_VERSION`` makes the backend unavailable, with that as the reason.
``unavailable_reason(device: torch.device) -> str | None``
    Why the backend cannot run on ``device`` here and now, or ``None`` if it can. It is asked once per
    device until ``loss_core.registry.refresh()``, so it may look at drivers and versions.
``OPS: tuple[str, ...]``
    The ops it provides, a subset of ``loss_core.backend.OPS``. Importing the module may be cheap and
    the kernels' own dependencies imported later: ``OPS`` is what the table of backends shows.

and each op in one of two forms.

**Kernels.** A forward and a backward over the canonical form. loss-core does validation, canonical
form, autograd, ``torch.compile``, device guard; the backend allocates its small results and launches.

::

    cross_entropy_forward(logits, target, weight, byte_lengths, num_items, options, *,
                          grad, stats) -> CrossEntropyForward
    cross_entropy_backward(grad_loss, logits, target, weight, lse, denominator, options, *,
                           grad, skip_if_one) -> None
    cross_entropy_rescale_live(grad_loss, grad, target, ignore_index) -> None  (optional)
    cross_entropy_prepare(device, dtype, target_dtype, rows, classes, stride, offset, options, *,
                          gradient) -> PreparedCrossEntropy | None  (optional)

    softmax_forward(input, output) -> None          log_softmax_forward(input, output) -> None
    softmax_backward(grad_output, output, grad_input) -> None       (and log_softmax_backward)
    softmax_prepare(device, dtype, rows, classes, stride, offset)
        -> PreparedSoftmax | None                                   (optional; and log_softmax_prepare)
    softmax_columns_forward, softmax_columns_backward               (optional; and log_softmax_columns_...)

**Ready-made.** One differentiable function, for a library that brings its own autograd::

    cross_entropy(logits, target, weight, byte_lengths, num_items, options) -> Tensor
    softmax(input) -> Tensor                        log_softmax(input) -> Tensor
    linear_cross_entropy(input, linear_weight, target, linear_bias, weight, byte_lengths, num_items, options) -> Tensor

``linear_cross_entropy`` has this form alone so far, and loss-core does not offer the op itself yet: it is for those who
call a backend's module, as loss-bench does. ``input`` is (rows, hidden) and ``linear_weight`` (classes, hidden), of one
dtype; ``linear_bias`` is None or (classes,). The logits are ``input @ linear_weight.T + linear_bias``; the rest is as
for ``cross_entropy``, with gradients for those of the three that require them.

The canonical form, which the backend need not check:

- ``logits``, ``input``, ``output``, ``grad``, ...: (rows, classes), stride 1 along classes, any row stride (0 for
  an expanded view; smaller than the width never for a tensor that is written), any alignment of the
  first element, rows and classes possibly 0 and 1, more than 2**31 elements possible. float16, bfloat16,
  float32 or float64. ``grad`` has the dtype of ``logits``.
- ``target``: (rows,), stride 1, int32, int64 or uint8, on the logits' device, *unchecked* on a GPU: a
  target outside [0, classes) that is not ``ignore_index`` must not touch memory outside the tensors, and
  gives NaN for the row's loss and gradient.
- ``weight``: None or (classes,), stride 1, float32 (float64 for float64 logits).
- ``byte_lengths``: None or (rows,), stride 1, int32 or int64, from 0 to 2**24. Given exactly for reduction
  ``"byte_mean"``.
- ``num_items``: None, a Python float, or a one-element float32 tensor on the logits' device (float64 for
  float64 logits). Only for reduction ``"mean"``, whose denominator it replaces.
- "accumulation dtype" below is float32, and float64 for float64 logits.

``cross_entropy_forward`` computes the loss of `options` and, when ``grad`` is a tensor (scalar reductions
only), also writes ``d loss / d logits`` into it, for an upstream gradient of 1, each element rounded once.
``grad`` may be ``logits`` itself: its memory is then given to the gradient. With ``grad=None`` nothing of the
logits' size is written. With ``stats=True`` the per-row results are returned too.

``cross_entropy_backward`` writes ``grad_loss * d loss / d logits`` into ``grad``, recomputed from the logits
and the saved ``lse``, rounded once. ``grad_loss`` is a one-element tensor of any shape for the scalar reductions; for
``"none"`` it is (rows,) with any stride, 0 included. ``skip_if_one=True`` says that ``grad`` already holds the
gradient for an upstream of 1, so the kernel looks at ``grad_loss`` *on the device* and leaves at once if
it is 1. ``grad`` may be ``logits``.

A vocabulary that is spread over several devices, each with a shard of the classes: ``options.total_classes`` is then
the number of all, ``options.first_class`` that of the shard's first, and targets count from the first of all. The
forward, for ``"none"`` alone, gives the shard's own lse, and as loss ``-x[target]``, or 0 where the target is in
another shard; the logsumexp of the lse over the shards plus the sum of these is the row's loss. The backward takes
the whole lse, and a denominator or none, and leaves the target's part of the gradient to the target's shard.
A target outside [0, total_classes) gives NaN in every shard. Weights, smoothing and statistics do not go with this,
nor does z_loss with the forward: ``refuse_shard`` says so. A backend may refuse shards altogether.

``cross_entropy_rescale_live`` multiplies the rows of ``grad`` (rows, classes) that are not ignored, in place, by the
one-element ``grad_loss``, leaving at once, on the device, if it is 1. Ignored rows, which hold zeros, keep them also
where ``grad_loss`` is infinite or NaN. It serves ``inplace=True``, where the logits are gone; without it loss-core uses
torch. Its older form ``cross_entropy_rescale(grad_loss, grad)``, which is not told the targets, is called where a
backend has that alone.

``cross_entropy_prepare`` is for the call that a training loop makes again and again: the loss of ``"mean"`` or
``"sum"``, with its gradient or without, from logits and targets alone. It gets what such calls have in common -- rows
and classes, at least one of each; the logits' row stride; their address modulo 16 -- and returns two functions for
them, which do what ``cross_entropy_forward`` and ``cross_entropy_backward`` do, for a contiguous gradient in new
memory; or None, and these are called. The logits may have more dimensions than rows and classes, in memory that lies
so; target and gradient then have too. loss-core keeps the functions, so that what can be looked up once is not looked
up at each call.

``softmax_prepare`` is the same for softmax along the last dimension, its result in the input's dtype.

``softmax_columns_forward(input, output)`` and ``softmax_columns_backward(grad_output, output, grad_input)`` do the same
along the middle of (outer, classes, inner), inner > 1 with stride 1, the other strides and the alignment anything.
loss-core calls them, outside ``torch.compile``, for a tensor whose memory lies so and that it would have to copy to see
as rows. A backend defines both directions or none. Where one of them raises ``UnsupportedInput``, loss-core copies.

Rules for all of them:

- An unsupported case raises ``UnsupportedInput`` with the reason *before anything is written*. loss-core then
  tries the next backend if the caller named none, and lets the exception through otherwise.
- No host synchronisation, no state kept per shape beyond compiled kernels, the current stream of the
  current device (loss-core makes the logits' device current), any thread, CUDA-graph capture.
- Words that have to be 0 at a launch's start, to count in, come from ``loss_core.memory.zeroed_words``, which all
  backends share; the launch leaves them at 0.
- The same inputs give the same bits.

A backend whose kernels know only some reductions states ``REDUCTIONS: tuple[str, ...]`` (default: all four);
if it has ``"none"``, loss-core builds the others from it (not inside ``torch.compile``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

API_VERSION = 1
"""Version of the contract in this module's docstring; raised whenever a backend has to change."""

ENTRY_POINT_GROUP = "loss_core.backends"

OPS = ("cross_entropy", "softmax", "log_softmax", "linear_cross_entropy")
"""The ops a backend may provide."""

REDUCTIONS = ("none", "mean", "sum", "byte_mean")


class BackendError(RuntimeError):
    """Base of the errors that concern backends."""


class BackendUnavailable(BackendError):
    """The named backend is not installed, cannot be imported, or cannot run on this device."""


class UnsupportedInput(BackendError, ValueError):
    """The named backend runs here but does not do this case; the message says which."""


class CrossEntropyOptions(NamedTuple):
    """The options of cross-entropy that are fixed before any tensor is looked at.

    Attributes:
        ignore_index: rows with this target have loss 0 and a zero gradient.
        reduction: ``"none"``, ``"mean"``, ``"sum"`` or ``"byte_mean"``.
        label_smoothing: e in [0, 1]; the target's probability is ``1 - e + e / V``.
        z_loss: factor of ``lse ** 2`` added to each row's loss.
        softcap: c, for ``x <- c * tanh(x / c)`` after scaling; None for none.
        logit_scale: factor of the logits, applied first.
        first_class, total_classes: of a shard of the vocabulary (see above); ``total_classes`` None for a whole one.
    """

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    first_class: int = 0
    total_classes: int | None = None


def refuse_shard(weight: object, options: CrossEntropyOptions, *, stats: bool, forward: bool) -> None:
    """Raise UnsupportedInput for what a shard of the vocabulary cannot know of the others."""
    if options.total_classes is None:
        return
    if weight is not None or options.label_smoothing or stats:
        raise UnsupportedInput("a shard of the vocabulary goes without weight, label_smoothing and statistics")
    if forward and (options.z_loss or options.reduction != "none"):
        raise UnsupportedInput(
            "the forward of a shard of the vocabulary goes with z_loss=0 and reduction='none', "
            f"got {options.z_loss} and {options.reduction!r}"
        )


class CrossEntropyForward(NamedTuple):
    """What ``cross_entropy_forward`` returns. Sizes: R rows; dtype: the accumulation dtype where not said.

    Attributes:
        loss: () for the scalar reductions, (R,) for ``"none"``.
        lse: (R,), log-sum-exp of each row after scale and softcap. An ignored row may hold anything unless ``stats``.
        denominator: (1,), what the sum was divided by, for ``"mean"`` and ``"byte_mean"``, else None.
        z_loss: with ``stats``, the z-loss part of ``loss``, in its shape, else None. Not looked at where the option
            is 0.
        prediction: with ``stats``, (R,) int64, the first class of the largest scaled logit (a softcap is monotonic,
            so it is taken before it, where rounding makes no ties), else None.
        correct: with ``stats``, (R,) bool, prediction == target, False where ignored, else None.
    """

    loss: Tensor
    lse: Tensor
    denominator: Tensor | None = None
    z_loss: Tensor | None = None
    prediction: Tensor | None = None
    correct: Tensor | None = None


class PreparedSoftmax(NamedTuple):
    """What ``softmax_prepare`` returns; all but the input is contiguous and starts at a multiple of 16 bytes.

    Attributes:
        forward: (input, output) -> None, as ``softmax_forward``.
        backward: (grad_output, output, grad_input) -> None, as ``softmax_backward``.
    """

    forward: Callable[[Tensor, Tensor], None]
    backward: Callable[[Tensor, Tensor, Tensor], None]


class PreparedCrossEntropy(NamedTuple):
    """What ``cross_entropy_prepare`` returns.

    Attributes:
        forward: (logits, target, grad) -> (loss, saved), where with a gradient ``saved`` is one tensor of the
            accumulation dtype: the lse of each row, for ``"mean"`` the denominator behind it, and whatever the backend
            wants behind that. Writes ``grad``, which without a gradient is None.
        backward: (grad_loss, logits, target, saved, grad, skip_if_one) -> None, as ``cross_entropy_backward``;
            ``grad_loss`` has the accumulation dtype. Only with a gradient.
    """

    forward: Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, bool], None] | None
