"""Cross-entropy of logits with class indices or class probabilities.

The way of a call: ``cross_entropy`` -> ``_compute`` (validation, canonical operands, choice of the backend) ->
``_run_on`` -> ``_CrossEntropy`` (autograd; skipped where no gradient is wanted) -> the backend's
``cross_entropy_forward``. Under ``torch.compile`` the rest is one opaque op, which makes the same choice when the graph
runs: ``cross_entropy_compiled``. What the arguments may be is in ``cross_entropy_arguments``.

The usual call of a training loop, logits and targets, goes a shorter way: ``cross_entropy`` -> ``_usual`` (all that
does not depend on values, looked up) -> ``_UsualCrossEntropy``, where a gradient is wanted -> the functions that the
backend prepared. Few functions lie on it, for in a training step the caches are cold, and each takes microseconds
(docs/tuning.md, "The host").
"""

from __future__ import annotations

from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from loss_core import registry
from loss_core.backend import CrossEntropyForward, CrossEntropyOptions, UnsupportedInput
from loss_core.canonical import (
    contiguous_strides,
    from_rows,
    is_current,
    may_be_overwritten,
    on_device_of,
    row_stride,
    several_devices,
    share_memory,
    to_rows,
)
from loss_core.cross_entropy_arguments import (
    Facts,
    bounded_byte_lengths,
    check_range,
    checked_byte_lengths,
    checked_num_items,
    checked_weight,
    facts_met,
    facts_of,
    is_ignored,
    no_tensor,
)
from loss_core.cross_entropy_compiled import compiled, in_shape
from loss_core.derivative import first_derivative_only, refuse_tangent
from loss_core.environment import VALIDATE, has, is_on
from loss_core.memory import allocator
from loss_core.reference.cross_entropy import cross_entropy_probabilities, cross_entropy_rescale_live
from loss_core.registry import Backend
from loss_core.usual import apply_in_c, apply_of_usual, prepare


class CrossEntropyStats(NamedTuple):
    """Result of ``cross_entropy_with_stats``; only ``loss`` is differentiable.

    Attributes:
        loss: what ``cross_entropy`` returns.
        z_loss: the part of ``loss`` that z_loss contributes, with the same reduction and dtype.
        lse: log-sum-exp of each row after scale and softcap, in the target's shape; float32, float64 for
            float64 logits. NaN for a row that holds +inf or NaN.
        prediction: argmax over the classes, the first on ties, in the target's shape; int64.
        correct: prediction == target, False where ignored, in the target's shape; bool.
    """

    loss: Tensor
    z_loss: Tensor
    lse: Tensor
    prediction: Tensor
    correct: Tensor


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    byte_lengths: Tensor | None = None,
    num_items: float | Tensor | None = None,
    dim: int = -1,
    inplace: bool = False,
    backend: str | None = None,
) -> Tensor:
    r"""Cross-entropy of logits and targets, as ``torch.nn.functional.cross_entropy``, with options of LLM training.

    With :math:`x` a row of logits after ``x = logit_scale * x`` and, if `softcap` is given, ``x = softcap * tanh(x /
    softcap)``; :math:`V` classes, target :math:`y`, class weights :math:`w`, smoothing :math:`e`, and
    :math:`\mathrm{lse} = \log \sum_c \exp x_c`, a row that is not ignored has the loss

    .. math::
        (1 - e)\, w_y (\mathrm{lse} - x_y) + \frac{e}{V} \sum_c w_c (\mathrm{lse} - x_c)
        + \mathtt{z\_loss} \cdot \mathrm{lse}^2

    All arithmetic is in float32 (float64 for float64 logits); each element of the gradient is rounded once.
    A half-precision input gives a float32 loss. The math is torch's; z-loss is that of PaLM (Chowdhery et al.,
    2022), the softcap that of Gemma 2 (2024).

    Differs from torch: classes are the *last* dimension (``dim=1`` gives torch's layout); the loss of half-precision
    logits is float32; on a GPU a target out of range gives NaN for its row instead of a device assert.

    Args:
        input: logits, floating point, with the classes in dimension `dim`. Any strides.
        target: class indices (int32, int64, uint8) in input's shape without `dim`; or, floating point and in input's
            shape, class probabilities, whose rows need not sum to one. Inside torch.compile these go to the backend
            ``"torch"`` unless `backend` names another, which may refuse them.
        weight: (V,) weight of each class, or None for 1. It gets no gradient and must not require one.
        ignore_index: rows with this target have loss 0 and a gradient of zeros, whatever their logits.
        reduction: ``"mean"`` divides the sum by the number of rows not ignored (by the sum of their ``weight[y]``
            with class weights; by `num_items` if given); ``"sum"``; ``"none"`` gives the target's shape;
            ``"byte_mean"`` divides by the sum of `byte_lengths` over rows not ignored (nats per byte).
            A mean over no rows is NaN, with zero gradients, as in torch.
        label_smoothing: e in [0, 1].
        z_loss: factor of ``lse ** 2``, not negative.
        softcap: bound of the logits' magnitude, positive; None for none.
        logit_scale: factor of the logits.
        byte_lengths: integers in the target's shape, the bytes each target stands for, from 0 to 2**24; in ignored rows
            anything. Only for ``"byte_mean"``.
        num_items: denominator of ``"mean"``, for batches of which this is one part: a number, or a tensor of one
            element on any device, which is not waited for where the logits are on a GPU. Only for ``"mean"``.
        dim: the class dimension.
        inplace: allow the gradient to take the logits' memory. Their version counter moves, so autograd reports a
            later use by something else. Taken where the layout permits and a gradient is wanted, otherwise ignored;
            also inside torch.compile, where the compiler plans memory.
        backend: name of the backend, which then runs or raises; None chooses one that can.

    Returns:
        The loss: a scalar, or the target's shape for ``"none"``. float32, or float64 for float64 logits.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes that do not fit, or an option out of range; on a CPU, a byte length out of range. On a GPU
            that is cut off, and with ``LOSS_VALIDATE=1`` in the environment this error is raised there too.
        IndexError: on a CPU, a target outside [0, V) that is not `ignore_index`. On a GPU its row's loss and gradient
            are NaN, and with ``LOSS_VALIDATE=1`` in the environment this error is raised there too.
        BackendUnavailable: the backend named is not installed or cannot run on this device.
        UnsupportedInput: the backend named does not do this case.

    Second derivatives raise a RuntimeError when they are computed.

    Example:
        >>> import torch, loss_core
        >>> logits = torch.tensor([[0.0, 0.0], [0.0, 3.0]], requires_grad=True)
        >>> loss = loss_core.cross_entropy(logits, torch.tensor([0, 1]))
        >>> loss.backward()
        >>> round(loss.item(), 4), logits.grad[0].tolist()
        (0.3709, [-0.25, 0.25])
    """
    if (
        type(input) is type(target) is Tensor
        and weight is byte_lengths is num_items is None
        and not inplace
        and not torch.compiler.is_dynamo_compiling()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and not input.is_neg()
    ):
        gradient = input.requires_grad and torch.is_grad_enabled()
        usual = _usual(
            input.dtype, input.shape, input.stride(), input.data_ptr() % 16, input.device,
            target.dtype, target.shape, target.stride(), target.device,
            backend or registry.chosen(), registry.searches, gradient,
            dim, ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale,
        )  # fmt: skip
        if usual is not None and (usual.one_device or is_current(input.device)):
            if usual.looked_at or (has(VALIDATE) and is_on("LOSS_VALIDATE")):
                check_range(target.reshape(-1), usual.shape[-1], usual.options.ignore_index, target.shape)
            return _apply_usual(input, (target, usual)) if gradient else usual.forward(input, target, None)[0]
    return _compute(
        input, target, weight, byte_lengths, num_items, inplace, backend, False,
        dim, ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale,
    )  # fmt: skip


def cross_entropy_with_stats(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    byte_lengths: Tensor | None = None,
    num_items: float | Tensor | None = None,
    dim: int = -1,
    inplace: bool = False,
    backend: str | None = None,
) -> CrossEntropyStats:
    """``cross_entropy`` with what a training loop logs, from the same pass over the logits.

    Takes the arguments of ``cross_entropy`` and raises what it raises; targets that hold probabilities are not
    supported. Rows that are ignored have their lse and prediction too.

    Returns:
        ``CrossEntropyStats(loss, z_loss, lse, prediction, correct)``; see there for shapes and dtypes.

    Example:
        >>> import torch, loss_core
        >>> stats = loss_core.cross_entropy_with_stats(torch.tensor([[0.0, 9.0, 9.0]]), torch.tensor([1]))
        >>> stats.prediction.tolist(), stats.correct.tolist()
        ([1], [True])
    """
    result = _compute(
        input, target, weight, byte_lengths, num_items, inplace, backend, True,
        dim, ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale,
    )  # fmt: skip
    shape = target.shape
    return CrossEntropyStats(
        result.loss,
        # Without the option 0, in rows too whose lse is not finite.
        result.z_loss if z_loss > 0 else torch.zeros_like(result.loss),
        result.lse.view(shape),
        result.prediction.view(shape),
        result.correct.view(shape),
    )


def _compute(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    byte_lengths: Tensor | None,
    num_items: float | Tensor | None,
    inplace: bool,
    backend: str | None,
    stats: bool,
    *of_facts: Any,
) -> Any:
    """The loss; with `stats` all of ``CrossEntropyForward``, lse and statistics in rows."""
    if not (isinstance(input, Tensor) and isinstance(target, Tensor)):
        raise no_tensor(input, target)
    # The compiler traces the check itself; a loop meets the same few shapes and options again and again. Where not
    # Dynamo but torch.export traces, tensors are not plain.
    compiling = torch.compiler.is_dynamo_compiling() or (type(input) is not Tensor and torch.compiler.is_compiling())
    facts = (facts_of if compiling else facts_met)(
        input.dtype, input.shape, input.device, target.dtype, target.shape, target.device, *of_facts
    )
    if weight is not None:
        weight = checked_weight(weight, input, facts.classes)
    if byte_lengths is not None or facts.options.reduction == "byte_mean":
        byte_lengths = checked_byte_lengths(byte_lengths, input, facts)
    if num_items is not None:
        num_items = checked_num_items(num_items, input, facts.options.reduction)
    if facts.probabilities:
        if stats:
            raise UnsupportedInput("cross_entropy_with_stats takes class indices, got a floating-point target")
        return _probabilities(input, target, weight, num_items, facts, backend)
    if target.dim() != 1 or target.stride(0) != 1:
        target = target.reshape(-1).contiguous()
    if compiling:
        return compiled(input, target, weight, byte_lengths, num_items, facts, backend, stats)
    looked_at = facts.looked_at or (has(VALIDATE) and is_on("LOSS_VALIDATE"))
    if looked_at:
        check_range(target, facts.classes, facts.options.ignore_index, facts.shape)
    if byte_lengths is not None:
        ignored = facts.options.ignore_index
        byte_lengths = bounded_byte_lengths(byte_lengths, target, ignored, facts.shape, looked_at=looked_at)
    run: Any = registry.first_that_can
    if several_devices():
        run = partial(on_device_of, input, run)
    return run(
        "cross_entropy", input.device, backend,
        _run_on, input, target, weight, byte_lengths, num_items, facts, inplace, stats,
    )  # fmt: skip


class _Usual(NamedTuple):
    """The usual call, prepared by a backend.

    Attributes:
        forward, backward: of ``PreparedCrossEntropy``.
        new: what allocates the gradient.
        shape, strides, offset: of the logits; the latter of their address, modulo 16.
        contiguous: the strides of the gradient.
        dtype: of both.
        looked_at: as in ``Facts``.
        one_device: whether there is but one, which then is current.
        options: of the loss.
        module: of the backend.
    """

    forward: Any
    backward: Any
    new: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    contiguous: tuple[int, ...]
    dtype: torch.dtype
    looked_at: bool
    one_device: bool
    options: CrossEntropyOptions
    module: Any


@lru_cache(1024)
def _usual(
    dtype: torch.dtype,
    shape: torch.Size,
    strides: tuple[int, ...],
    offset: int,
    device: torch.device,
    target_dtype: torch.dtype,
    target_shape: torch.Size,
    target_strides: tuple[int, ...],
    target_device: torch.device,
    name: str | None,
    searches: int,
    gradient: bool,
    *of_facts: Any,
) -> _Usual | None:
    """The call if it is one and the backend prepares it. `searches` only tells apart what is kept."""
    facts = facts_met(dtype, shape, device, target_dtype, target_shape, target_device, *of_facts)
    options = facts.options
    stride = row_stride(shape, strides) if facts.dim == len(shape) - 1 else None
    rows, classes = prod(shape[:-1]), shape[-1]
    if stride is None or not rows or target_strides != contiguous_strides(target_shape):
        return None
    if facts.probabilities or options.reduction not in ("mean", "sum"):
        return None
    found = prepare(
        "cross_entropy", device, name, dtype, target_dtype, rows, classes, stride, offset, options, gradient=gradient
    )
    if found is None:
        return None
    module, prepared = found
    return _Usual(
        prepared.forward, prepared.backward, allocator(device), tuple(shape), strides, offset,
        contiguous_strides(shape), dtype, facts.looked_at, not several_devices(), options, module,
    )  # fmt: skip


# On one backend


def _run_on(
    backend: Backend,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    byte_lengths: Tensor | None,
    num_items: float | Tensor | None,
    facts: Facts,
    inplace: bool,
    stats: bool,
) -> Any:
    """What ``_compute`` returns, of one backend, input's device being current; all but the input is canonical."""
    options, dim, _, shape, _, _, in_rows = facts
    module: Any = backend.module
    if options.reduction not in backend.reductions:
        return _reduced(backend, input, target, weight, byte_lengths, num_items, facts, inplace, stats)
    if not hasattr(module, "cross_entropy_forward"):
        if stats:
            raise UnsupportedInput(f"backend {backend.name!r} gives no statistics")
        result = module.cross_entropy(to_rows(input, dim), target, weight, byte_lengths, num_items, options)
    elif torch.is_grad_enabled() and input.requires_grad:
        apply = _CrossEntropy.apply if torch._C._are_functorch_transforms_active() else _apply_in_c
        # One tuple, since autograd looks at each of its arguments.
        result = apply(input, (target, weight, byte_lengths, num_items, options, dim, inplace, stats, module))
        if stats:
            loss, lse, *rest = result
            result = CrossEntropyForward(loss, lse, None, *rest)
    else:
        refuse_tangent(input, backend.name)
        logits = input if in_rows and input.stride(1) == 1 and not input.is_neg() else to_rows(input, dim)
        result = module.cross_entropy_forward(
            logits, target, weight, byte_lengths, num_items, options, grad=None, stats=stats
        )
        if not stats:
            result = result.loss
    return result if options.reduction != "none" or len(shape) == 1 else in_shape(result, shape)


def _reduced(
    backend: Backend,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    byte_lengths: Tensor | None,
    num_items: float | Tensor | None,
    facts: Facts,
    inplace: bool,
    stats: bool,
) -> Any:
    """A reduction that the backend lacks, built from its ``"none"``."""
    options = facts.options
    if "none" not in backend.reductions:
        raise UnsupportedInput(
            f"backend {backend.name!r} knows the reductions {', '.join(backend.reductions)}, got {options.reduction!r}"
        )
    of_rows = facts._replace(options=options._replace(reduction="none"))
    rows = _run_on(backend, input, target, weight, byte_lengths, num_items, of_rows, inplace, stats)
    denominator = _denominator(target, weight, byte_lengths, num_items, options)

    def reduced(part: Tensor) -> Tensor:
        return part.sum() if denominator is None else part.sum() / denominator

    if not stats:
        return reduced(rows)
    return rows._replace(loss=reduced(rows.loss), z_loss=None if rows.z_loss is None else reduced(rows.z_loss))


def _denominator(
    target: Tensor,
    weight: Tensor | None,
    byte_lengths: Tensor | None,
    num_items: float | Tensor | None,
    options: CrossEntropyOptions,
) -> Tensor | float | None:
    if options.reduction == "sum":
        return None
    if num_items is not None:
        return num_items.squeeze() if isinstance(num_items, Tensor) else num_items
    live = ~is_ignored(target, options.ignore_index)
    if byte_lengths is not None:
        return torch.where(live, byte_lengths, 0).sum()
    if weight is None:
        return live.sum()
    inside = target.long().clamp(0, weight.shape[0] - 1)
    return torch.where(live, weight[inside], 0).sum()


def _probabilities(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    num_items: float | Tensor | None,
    facts: Facts,
    backend: str | None,
) -> Tensor:
    options, dim, shape = facts.options, facts.dim, facts.shape
    if torch.compiler.is_compiling():
        # The compiler cannot look at the registry, but it can at the reference's math.
        compute: Any = cross_entropy_probabilities if backend in (None, "torch") else None
    else:
        candidates = registry.candidates("cross_entropy", input.device, backend)
        compute = next(filter(None, (getattr(c.module, "cross_entropy_probabilities", None) for c in candidates)), None)
    if compute is None:
        name = backend or registry.chosen()
        raise UnsupportedInput(f"backend {name!r} takes class indices as target, got probabilities ({target.dtype})")
    loss = compute(to_rows(input, dim), to_rows(target, dim), weight, num_items, options)
    return loss.view(shape[:dim] + shape[dim + 1 :]) if options.reduction == "none" else loss


# Autograd


class _CrossEntropy(torch.autograd.Function):
    """The kernels of one backend under autograd.

    For the scalar reductions the forward writes the gradient for an upstream of 1, and the backward hands it over;
    the kernel that runs there leaves at once unless the upstream, which only the device knows, is another. It then
    recomputes the gradient from the logits rather than rescale it, so that every element is rounded once and what
    underflowed without a loss scale is there with it. For ``"none"`` the backward always recomputes.

    The gradient is given away without a copy. A second backward through a retained graph recomputes it into new
    memory; with ``inplace`` the logits are gone by then, which raises.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, call: tuple[Any, ...]) -> Any:  # type: ignore[override]
        target, weight, byte_lengths, num_items, options, dim, inplace, stats, backend = call
        logits = to_rows(input, dim)
        overwrite = inplace and may_be_overwritten(logits, input)
        grad = None
        if options.reduction != "none":
            rows, classes = logits.shape
            grad = logits if overwrite else allocator(logits.device)((rows, classes), (classes, 1), logits.dtype)
        result = backend.cross_entropy_forward(
            logits, target, weight, byte_lengths, num_items, options, grad=grad, stats=stats
        )
        saved: Tensor | None = input
        rows_saved = False
        if grad is not None and overwrite:
            torch.autograd.graph.increment_version(input)
            saved = None
        elif logits is not input and not share_memory(logits, input):
            # A copy that had to be made is kept; a view is made again, so that autograd watches the input itself.
            saved, rows_saved = logits, True
        ctx.grad, ctx.call = grad, (options, dim, backend, overwrite, rows_saved, input.shape)
        if not stats:
            # Nobody else has these two, so autograd need not watch them.
            ctx.results = result.lse, result.denominator
            ctx.save_for_backward(saved, target, weight)
            return result.loss
        ctx.save_for_backward(saved, target, weight, result.lse, result.denominator)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(result.lse, result.z_loss, result.prediction, result.correct)
        return result.loss, result.lse, result.z_loss, result.prediction, result.correct

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if grad_loss is None:
            return None, None
        if not torch.is_grad_enabled():
            return _gradient(ctx, grad_loss), None
        with torch.no_grad():
            grad = _gradient(ctx, grad_loss)
        grad = first_derivative_only(grad, "cross_entropy", grad_loss, ctx.saved_tensors[0])
        return grad, None


class _UsualCrossEntropy(torch.autograd.Function):
    """``_CrossEntropy`` for the usual call."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, call: tuple[Tensor, _Usual]) -> Tensor:  # type: ignore[override]
        target, usual = call
        ctx.grad = grad = usual.new(usual.shape, usual.contiguous, usual.dtype)
        loss, saved = usual.forward(input, target, grad)
        ctx.save_for_backward(input, target)
        ctx.rest = usual, saved
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        input, target = ctx.saved_tensors
        grad_loss = grad_loss.resolve_neg()
        usual, saved = ctx.rest
        in_forward = ctx.grad is not None
        grad = ctx.grad if in_forward else usual.new(usual.shape, usual.contiguous, usual.dtype)
        # Autograd copies a gradient that somebody else still holds.
        ctx.grad = None
        if input.stride() == usual.strides and input.data_ptr() % 16 == usual.offset and not input.is_neg():
            usual.backward(grad_loss, input, target, saved, grad, in_forward)
        else:
            # A hook for saved tensors may give back other ones, such as what it had moved to the CPU.
            logits = to_rows(input, input.dim() - 1)
            rows = logits.shape[0]
            denominator = saved[rows : rows + 1] if usual.options.reduction == "mean" else None
            usual.module.cross_entropy_backward(
                grad_loss, logits, target.reshape(-1).contiguous(), None, saved[:rows], denominator, usual.options,
                grad=grad.view(logits.shape), skip_if_one=in_forward,
            )  # fmt: skip
        if torch.is_grad_enabled():
            grad = first_derivative_only(grad, "cross_entropy", grad_loss, input)
        return grad, None


_apply_in_c = apply_in_c(_CrossEntropy)
_apply_usual = apply_of_usual(_UsualCrossEntropy)


def _gradient(ctx: Any, grad_loss: Tensor) -> Tensor:
    """The gradient with respect to the input, in memory that the caller may keep.

    The device is current: autograd makes the stream of the forward current for the backward, and with it its device.
    """
    saved, target, weight, *results = ctx.saved_tensors
    lse, denominator = results or ctx.results
    options, dim, backend, overwrite, rows_saved, shape = ctx.call
    grad_loss = grad_loss.resolve_neg()
    # Taken out of ctx: autograd copies a gradient that somebody else still holds.
    grad, ctx.grad = ctx.grad, None
    if saved is None:
        if grad is None:
            raise RuntimeError(
                "cross_entropy(inplace=True) gave the logits' memory to the gradient in the first backward; "
                "a second one through the same graph needs inplace=False"
            )
        _rescale(backend, grad_loss, grad, target, options.ignore_index)
        return from_rows(grad, shape, dim)
    logits = saved if rows_saved else to_rows(saved, dim)
    in_forward = grad is not None
    if grad is None:
        grad = logits if overwrite else torch.empty_like(logits)
    if options.reduction == "none" and grad_loss.dim() != 1:
        grad_loss = grad_loss.reshape(-1)
    backend.cross_entropy_backward(
        grad_loss, logits, target, weight, lse, denominator, options, grad=grad, skip_if_one=in_forward
    )
    if overwrite:
        torch.autograd.graph.increment_version(saved)
    return from_rows(grad, shape, dim)


def _rescale(backend: Any, grad_loss: Tensor, grad: Tensor, target: Tensor, ignore_index: int) -> None:
    if hasattr(backend, "cross_entropy_rescale_live"):
        backend.cross_entropy_rescale_live(grad_loss, grad, target, ignore_index)
    elif hasattr(backend, "cross_entropy_rescale"):
        backend.cross_entropy_rescale(grad_loss, grad)
    else:
        cross_entropy_rescale_live(grad_loss, grad, target, ignore_index)
