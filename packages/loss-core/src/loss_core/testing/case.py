"""The cases: for each thing that goes wrong in kernels, the inputs that show it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32)

# One class; fewer than a vector; no multiple of any block; GPT-2's; one more than the largest single block;
# longer than a multiprocessor's shared memory.
VOCABULARIES = (1, 2, 7, 257, 1000, 50257, 65537, 131073)

OPTIONS: dict[str, dict[str, Any]] = {
    "weight": {"weight": True},
    "smoothing": {"label_smoothing": 0.2},
    "z_loss": {"z_loss": 0.01},
    "softcap": {"softcap": 5.0},
    "scale": {"logit_scale": 0.3},
    "float_items": {"num_items": "float"},
    "tensor_items": {"num_items": "tensor"},
}


@dataclass(frozen=True)
class Case:
    """One call of one op, and what of it is checked. ``str(case)`` lists what differs from the defaults.

    Attributes:
        op: ``"cross_entropy"``, ``"causal_lm_loss"``, ``"softmax"`` or ``"log_softmax"``.
        rows: number of rows once the leading dimensions are flattened.
        classes: V.
        dtype: dtype of the logits.
        layout: how they lie in memory, a key of ``loss_core.testing.inputs.LAYOUTS``.
        values: what they hold, a key of ``loss_core.testing.inputs.VALUES``.
        target: ``"int32"``, ``"int64"``, ``"uint8"``, ``"strided"`` (int64, stride 2) or ``"probabilities"``.
        ignored: ``"no"``, ``"some"`` or ``"all"`` rows have ignore_index as target, and NaN logits.
        ignore_index: may be a valid class.
        reduction: of the loss.
        weight: whether there are class weights.
        label_smoothing: as in ``loss_core.cross_entropy``, and so are z_loss, softcap, logit_scale.
        z_loss: see label_smoothing.
        softcap: see label_smoothing.
        logit_scale: see label_smoothing.
        num_items: ``""`` for none, ``"float"`` or ``"tensor"``.
        shift_labels: for causal_lm_loss, whether the labels are given shifted.
        result_dtype: ``dtype=`` of softmax and log_softmax.
        upstream: the gradient of the result: ``"random"``, ``"one"`` (a scalar loss that is not scaled), ``"large"``
            (a loss scale), ``"expanded"`` (the stride-0 gradient that ``.sum()`` sends) or ``"nan"`` (a diverged
            loss).
        grad: whether a gradient is asked for.
        stats: whether ``cross_entropy_with_stats`` is called.
        inplace: as in ``loss_core.cross_entropy``.
        twice: backward is run twice through a retained graph.
        optional: why a backend may refuse the case with ``UnsupportedInput``; "" where it may not.
        quick: belongs to the short selection.
    """

    op: str
    rows: int = 5
    classes: int = 257
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    values: str = "normal"
    target: str = "int64"
    ignored: str = "some"
    ignore_index: int = -100
    reduction: str = "mean"
    weight: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    num_items: str = ""
    shift_labels: bool = False
    result_dtype: torch.dtype | None = None
    upstream: str = "random"
    grad: bool = True
    stats: bool = False
    inplace: bool = False
    twice: bool = False
    optional: str = ""
    quick: bool = False

    def __str__(self) -> str:
        """The fields that differ from the defaults, ``optional`` and ``quick`` left out."""
        parts = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("op", "optional", "quick") or value == field.default:
                continue
            if value is True:
                parts.append(field.name)
            else:
                parts.append(f"{field.name}={str(value).removeprefix('torch.')}")
        return ",".join(parts) or "plain"


def cases(op: str, quick: bool = False) -> list[Case]:
    """The cases of `op`.

    Args:
        op: ``"cross_entropy"``, ``"causal_lm_loss"``, ``"softmax"`` or ``"log_softmax"``.
        quick: only the short selection, for slow devices and interpreters: every kind of input and every option
            once, without the largest vocabularies.

    Raises:
        ValueError: if `op` is not one of these.
    """
    if op not in _CASES:
        raise ValueError(f"op must be one of {', '.join(map(repr, _CASES))}, got {op!r}")
    made = dict.fromkeys(_of_one_dtype(case) for case in _CASES[op](Case(op)))
    return [case for case in made if case.quick or not quick]


def _of_one_dtype(case: Case) -> Case:
    """`case`, marked as optional where its dtype or target is one that kernels need not know."""
    if case.dtype == torch.float64 or case.result_dtype == torch.float64:
        return replace(case, optional="float64")
    if case.target == "probabilities":
        return replace(case, optional="class probabilities")
    return case


def _cross_entropy(base: Case) -> Iterator[Case]:
    quick = replace(base, quick=True)

    for classes, dtype in itertools.product(VOCABULARIES, (*DTYPES, torch.float64)):
        small = classes <= 1000 and dtype in (torch.float32, torch.bfloat16)
        yield replace(base, rows=3, classes=classes, dtype=dtype, quick=small)
    for classes in (65535, 65536, 102400):
        yield replace(base, rows=3, classes=classes, dtype=torch.float16)
    yield replace(quick, rows=2, classes=50257, dtype=torch.float16, upstream="one")
    yield replace(quick, rows=2, classes=65537, dtype=torch.bfloat16, reduction="none", ignored="no")

    # Every reduction through its paths: finished in the forward, rescaled, recomputed, asked for twice, not at all.
    for reduction, dtype in itertools.product(("none", "sum", "mean", "byte_mean"), DTYPES):
        plain = replace(base, reduction=reduction, dtype=dtype, quick=dtype == torch.bfloat16)
        yield plain
        yield replace(plain, grad=False)
        yield replace(plain, upstream="large")
        yield replace(plain, upstream="expanded" if reduction == "none" else "one")
        yield replace(plain, twice=True)
        yield replace(plain, inplace=True)
        yield replace(plain, inplace=True, upstream="expanded" if reduction == "none" else "one")
        yield replace(plain, upstream="nan")
        yield replace(plain, upstream="nan", inplace=True)
        yield replace(plain, ignored="no")
        yield replace(plain, ignored="all")
        yield replace(plain, stats=True)
        yield replace(plain, stats=True, grad=False, **OPTIONS["z_loss"], **OPTIONS["softcap"], **OPTIONS["scale"])
        yield replace(plain, rows=0, ignored="no")
        yield replace(plain, rows=1, ignored="no")

    for rows, classes in ((1, 1), (1, 32), (32, 1)):
        yield replace(quick, rows=rows, classes=classes, ignored="no")
        yield replace(quick, rows=rows, classes=classes, ignored="no", reduction="none", dtype=torch.bfloat16)

    for target, reduction in itertools.product(("int32", "uint8", "strided"), ("none", "mean")):
        yield replace(quick, target=target, classes=200, reduction=reduction)
    # 156 is what -100 becomes in uint8.
    yield replace(quick, target="uint8", classes=157, ignored="no")
    yield replace(quick, target="uint8", classes=200, ignore_index=7)
    # More classes than a uint8 counts.
    for classes in (256, 257, 300):
        yield replace(quick, target="uint8", classes=classes)
    for ignore_index, reduction in itertools.product((0, 256, -1), ("none", "mean")):
        yield replace(quick, ignore_index=ignore_index, reduction=reduction)
        yield replace(base, ignore_index=ignore_index, reduction=reduction, weight=True, label_smoothing=0.2)
    # Known as class weights with smoothing over an ignored row that would look up weight[-100].
    yield replace(quick, rows=2, classes=2, weight=True, label_smoothing=0.1)

    for layout, dtype in itertools.product(_LAYOUTS_OF_ROWS, (torch.bfloat16, torch.float32)):
        laid = replace(base, rows=6, layout=layout, dtype=dtype, quick=dtype == torch.bfloat16)
        yield laid
        yield replace(laid, reduction="none", quick=False)
        yield replace(laid, inplace=True, quick=False)
        yield replace(laid, reduction="none", inplace=True)
        # Widths without and with room for a 16-byte vector.
        yield replace(laid, classes=1024, quick=False)
        yield replace(laid, classes=1, quick=False)
    yield replace(quick, rows=1, layout="one_dim")
    yield replace(quick, rows=1, layout="one_dim", reduction="none", ignored="no")

    for values, reduction in itertools.product(_VALUES, ("none", "mean")):
        yield replace(quick, values=values, reduction=reduction)
        for dtype in HALVES:
            yield replace(base, values=values, reduction=reduction, dtype=dtype)
        yield replace(base, values=values, reduction=reduction, stats=True)
    for values in ("masked", "blocks", "target_masked", "all_masked", "plus_inf", "nan"):
        for option in ("weight", "smoothing", "z_loss", "softcap", "scale"):
            yield replace(base, values=values, reduction="none", **OPTIONS[option])
    for values, dtype in itertools.product(("blocks", "all_masked", "nan", "low"), DTYPES):
        yield replace(base, rows=3, values=values, dtype=dtype, classes=20000, reduction="none")
    # Padding must not gain weight from the cap.
    yield replace(base, rows=2, values="low", classes=65537, softcap=30.0, ignored="no")

    dtypes = itertools.cycle((torch.bfloat16, torch.float32, torch.float16))
    for names in (*itertools.combinations(OPTIONS, 1), *itertools.combinations(OPTIONS, 2), tuple(OPTIONS)[:5]):
        if {"float_items", "tensor_items"} <= set(names):
            continue
        options: dict[str, Any] = {}
        for name in names:
            options |= OPTIONS[name]
        for reduction in ("mean",) if "num_items" in options else ("none", "mean", "sum", "byte_mean"):
            chosen = replace(base, dtype=next(dtypes), reduction=reduction, quick=reduction == "mean", **options)
            yield chosen
            if len(names) == 1:
                for dtype in DTYPES:
                    yield replace(chosen, dtype=dtype, stats=True, quick=False)
                    yield replace(chosen, dtype=dtype, rows=3, classes=20000, quick=False)
                yield replace(chosen, dtype=torch.float32, ignored="all", quick=False)
                yield replace(chosen, dtype=torch.float32, twice=True, quick=False)
                yield replace(chosen, dtype=torch.float32, inplace=True, quick=False)
    yield replace(quick, logit_scale=-2.0)
    yield replace(base, label_smoothing=1.0)
    yield replace(base, classes=1, label_smoothing=0.5, weight=True)

    for reduction, options in itertools.product(
        ("none", "mean", "sum"), ({}, OPTIONS["weight"], OPTIONS["smoothing"], OPTIONS["z_loss"], OPTIONS["softcap"])
    ):
        yield replace(quick, target="probabilities", reduction=reduction, ignored="no", **options)
    yield replace(base, target="probabilities", dtype=torch.bfloat16, ignored="no", layout="torch_layout", rows=6)


def _causal_lm_loss(base: Case) -> Iterator[Case]:
    # Six rows are two sequences of three tokens.
    base = replace(base, rows=6, layout="three_dims")
    quick = replace(base, quick=True)
    for dtype, reduction in itertools.product(DTYPES, ("none", "sum", "mean", "byte_mean")):
        yield replace(base, dtype=dtype, reduction=reduction, quick=dtype == torch.bfloat16)
        yield replace(base, dtype=dtype, reduction=reduction, shift_labels=True)
    for num_items in ("float", "tensor"):
        yield replace(quick, num_items=num_items)
        yield replace(quick, num_items=num_items, shift_labels=True)
    for target in ("int32", "uint8"):
        yield replace(quick, target=target, classes=200)
    for layout in ("sequence_first", "sliced_tokens"):
        yield replace(quick, layout=layout)
    yield replace(quick, ignored="all")
    yield replace(quick, ignored="no")
    yield replace(quick, inplace=True)
    yield replace(base, twice=True)
    yield replace(base, grad=False)
    yield replace(base, rows=2, ignored="no")
    for option in ("weight", "smoothing", "z_loss", "softcap", "scale"):
        yield replace(base, **OPTIONS[option])
    yield replace(base, dtype=torch.bfloat16, classes=50257)


def _softmax(base: Case) -> Iterator[Case]:
    quick = replace(base, quick=True)
    for classes, dtype in itertools.product(VOCABULARIES, (*DTYPES, torch.float64)):
        small = classes <= 1000 and dtype in (torch.float32, torch.bfloat16)
        yield replace(base, rows=3, classes=classes, dtype=dtype, quick=small)
    for layout, dtype in itertools.product((*_LAYOUTS_OF_ROWS, "dim_0", "dim_0_of_3"), (torch.bfloat16, torch.float32)):
        laid = replace(base, rows=6, layout=layout, dtype=dtype, quick=dtype == torch.bfloat16)
        yield laid
        yield replace(laid, upstream="expanded", quick=False)
        yield replace(laid, classes=1024, quick=False)
        yield replace(laid, classes=1, quick=False)
    # Along columns: more of them than a block is wide, and longer ones than it is high.
    for layout, dtype in itertools.product(_LAYOUTS_OF_COLUMNS, (torch.bfloat16, torch.float32)):
        yield replace(base, rows=134, classes=33, layout=layout, dtype=dtype)
        yield replace(base, rows=6, classes=5000, layout=layout, dtype=dtype)
        yield replace(base, rows=2, classes=257, layout=layout, dtype=dtype)
    for layout, values in itertools.product(
        _LAYOUTS_OF_COLUMNS, ("masked", "all_masked", "plus_inf", "nan", "far_low")
    ):
        yield replace(base, rows=6, layout=layout, values=values, quick=layout == "torch_layout")
    yield replace(quick, rows=1, layout="one_dim")
    for rows in (0, 1, 32):
        yield replace(quick, rows=rows, classes=32)
        yield replace(quick, rows=rows, classes=1)
    for values, dtype in itertools.product((*_VALUES, "far_low"), DTYPES):
        yield replace(base, values=values, dtype=dtype, quick=dtype == torch.float32)
    for values, dtype in itertools.product(("equal", "blocks", "all_masked", "nan"), DTYPES):
        yield replace(base, rows=3, classes=20000, values=values, dtype=dtype)
    for dtype in DTYPES:
        yield replace(base, dtype=dtype, classes=4096, values="equal")
        yield replace(base, dtype=dtype, twice=True)
        yield replace(base, dtype=dtype, grad=False)
        for result_dtype in DTYPES:
            yield replace(base, dtype=dtype, result_dtype=result_dtype, quick=dtype == torch.bfloat16)


_LAYOUTS_OF_ROWS = (
    "row_strided",
    "class_strided",
    "expanded",
    "transposed",
    "unaligned",
    "three_dims",
    "sequence_first",
    "sliced_tokens",
    "torch_layout",
    "torch_layout_sliced",
    "image",
)
_LAYOUTS_OF_COLUMNS = ("torch_layout", "torch_layout_sliced", "dim_0", "dim_0_of_3")
_VALUES = (
    "equal",
    "ties",
    "high",
    "low",
    "peaked",
    "spread",
    "masked",
    "blocks",
    "target_masked",
    "all_masked",
    "plus_inf",
    "nan",
)
_CASES = {
    "cross_entropy": _cross_entropy,
    "causal_lm_loss": _causal_lm_loss,
    "softmax": _softmax,
    "log_softmax": _softmax,
}
