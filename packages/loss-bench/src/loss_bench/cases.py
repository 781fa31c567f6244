"""What is measured: cases, passes, presets, and the least that a pass has to move or to compute."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

OPS = ("cross_entropy", "causal_lm_loss", "softmax", "log_softmax", "linear_cross_entropy")
"""The ops that can be measured."""

LOSSES = ("cross_entropy", "causal_lm_loss", "linear_cross_entropy")
"""Those that take targets, and loss options."""

LINEAR = ("linear_cross_entropy",)
"""Those that make the logits themselves: of an input (rows x hidden) and a weight (classes x hidden)."""

REDUCTIONS = ("mean", "sum", "none")

PASSES = ("forward", "backward", "forward+backward", "no-grad")
"""``forward`` records for a backward pass; ``no-grad`` is the forward of an evaluation."""

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_DTYPE_ALIASES = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}

VOCABULARIES = {
    "gpt2": 50257,
    "llama2": 32000,
    "llama3": 128256,
    "mistral": 32768,
    "qwen3": 151936,
    "gemma3": 262144,
}
"""Classes of models that people train, for ``--vocab``."""


@dataclass(frozen=True)
class Options:
    """The loss options of a case, and where its logits come from.

    Attributes:
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing, z_loss, softcap: as in ``loss_core.cross_entropy``.
        weight: whether classes have random weights.
        ignored: share of the rows whose target is ``ignore_index``.
        inplace: whether the gradient may take the logits' memory, where a backend can do that.
        logits: name of the file that the logits come from; "" for random ones.
        bias: whether a linear op adds a random bias to the logits.

    Raises:
        ValueError: if one of them is not what it may be.
    """

    reduction: str = "mean"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    weight: bool = False
    ignored: float = 0.0
    inplace: bool = False
    logits: str = ""
    bias: bool = False

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"unknown reduction {self.reduction!r}; known: {', '.join(REDUCTIONS)}")
        for name in ("z_loss", "softcap"):
            if not math.isfinite(getattr(self, name) or 0.0):
                raise ValueError(f"{name} must be a finite number, got {getattr(self, name)}")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap must be positive, got {self.softcap}")

    def describe(self) -> str:
        """The options that differ from the defaults, as ``name=value`` words."""
        return " ".join(f"{name}={getattr(self, name)}" for name in self.given)

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the options that differ from the defaults."""
        default = Options()
        return tuple(name for name in self.__dataclass_fields__ if getattr(self, name) != getattr(default, name))

    def fitting(self, op: str) -> Options:
        """Those that `op` has, the others at their defaults."""
        default = Options()
        return replace(self, **{name: getattr(default, name) for name in self.given if op not in ops_with(name)})


def ops_with(option: str) -> tuple[str, ...]:
    """The ops that a field of ``Options`` means something to."""
    if option == "bias":
        return LINEAR
    if option in ("inplace", "logits"):
        # A linear op has no logits to be given or to be overwritten; softmax can be given them.
        return tuple(op for op in (LOSSES if option == "inplace" else OPS) if op not in LINEAR)
    return LOSSES


@dataclass(frozen=True)
class Case:
    """One op on one shape and dtype; `hidden` is the width of a linear op's input, None for the others."""

    op: str
    rows: int
    classes: int
    dtype: str
    options: Options = Options()
    hidden: int | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the logits, and of what a linear op makes them of."""
        return DTYPES[self.dtype]

    @property
    def shape(self) -> str:
        """The shape as it is written on the command line."""
        return written_shape(self.rows, self.classes, self.hidden)

    @property
    def is_loss(self) -> bool:
        """Whether the op takes targets."""
        return self.op in LOSSES

    @property
    def backend_op(self) -> str:
        """The op that a backend has to provide."""
        return "cross_entropy" if self.op == "causal_lm_loss" else self.op

    @property
    def logits_shape(self) -> tuple[int, ...]:
        """The shape of the logits: a causal loss has a dimension of sequences, one of them, before the others."""
        return (1, self.rows, self.classes) if self.op == "causal_lm_loss" else (self.rows, self.classes)

    @property
    def logits_bytes(self) -> int:
        """Bytes of one copy of the logits."""
        return self.rows * self.classes * self.torch_dtype.itemsize

    @property
    def input_bytes(self) -> int:
        """Bytes of what the op is given: the logits, or a linear op's input and weight."""
        if self.hidden is None:
            return self.logits_bytes
        return (self.rows + self.classes) * self.hidden * self.torch_dtype.itemsize

    @property
    def tiny(self) -> Case:
        """The same on the small shape that the host's time is measured on."""
        if self.hidden is None:
            return replace(self, rows=64, classes=512)
        # Fewer rows than 128 are less than a tile of some kernels, which then refuse.
        return replace(self, rows=128, hidden=256, classes=512)

    def __str__(self) -> str:
        return " ".join(filter(None, (self.op, self.shape, self.dtype, self.options.describe())))


def lacking(op: str) -> str:
    """The reason of a backend that does not provide `op`."""
    return f"has no {op}"


def minimal_bytes(case: Case, pass_: str, kept_rows: float | None = None) -> float | None:
    """The fewest bytes that `pass_` moves through memory: each input read once, each result written once.

    Of a loss only `kept_rows` (all by default) have to be read: what the others hold does not matter to it, and their
    gradient is zero. A cross-entropy may form its gradient in either half, so the forward half is held to one read of
    the logits and the backward half to nothing at all: for it the answer is None, and only the sum of both is compared
    with the memory's bandwidth (one read, one write). Softmax reads and writes in the forward pass (2) and reads the
    output and its gradient and writes one in the backward pass (3). A linear op is bound by its matrix products: None.
    """
    if case.op in LINEAR:
        return None
    if case.is_loss:
        targets = case.rows * torch.int64.itemsize
        written = {"forward": 0, "no-grad": 0, "forward+backward": case.logits_bytes}.get(pass_)
        return None if written is None else _kept_share(case, kept_rows) * case.logits_bytes + written + targets
    return {"forward": 2, "no-grad": 2, "backward": 3, "forward+backward": 5}[pass_] * case.logits_bytes


def _kept_share(case: Case, kept_rows: float | None) -> float:
    return 1 if kept_rows is None else kept_rows / case.rows


def minimal_flop(case: Case, pass_: str, kept_rows: float | None = None) -> float | None:
    """The fewest operations of the matrix products that `pass_` consists of; None for an op without any.

    A multiplication and an addition count as two: 2 x rows x hidden x classes for the logits, and as much again for
    each of the two gradients, where rows are those that are kept (all by default). Either half may do that of the
    gradients, so that the backward half is held to nothing, as in ``minimal_bytes``.
    """
    products = {"forward": 1, "no-grad": 1, "forward+backward": 3}.get(pass_)
    if case.hidden is None or products is None:
        return None
    return products * 2 * (case.rows if kept_rows is None else kept_rows) * case.hidden * case.classes


def parse_dtype(text: str) -> str:
    """The full name of a dtype, from it or a usual short form.

    Raises:
        ValueError: if there is no such dtype here.
    """
    name = _DTYPE_ALIASES.get(text, text)
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {text!r}; known: {', '.join([*DTYPES, *_DTYPE_ALIASES])}")
    return name


def parse_shape(text: str, ops: Sequence[str]) -> tuple[int, int, int | None]:
    """Rows, classes and hidden: ``"4096x32000"`` is (4096, 32000, None), ``"64x256x32000"`` is (64, 32000, 256).

    Raises:
        ValueError: if `text` is not as many positive numbers, with an x between, as one of `ops` takes.
    """
    forms = {2: "ROWSxCLASSES, such as 4096x32000", 3: "ROWSxHIDDENxCLASSES, such as 8192x4096x128256"}
    wanted = dict.fromkeys(3 if op in LINEAR else 2 for op in ops)
    numbers = [int(number) for number in re.split("[xX]", text.strip())] if _SHAPE.fullmatch(text.strip()) else []
    if len(numbers) not in wanted or 0 in numbers:
        raise ValueError(f"a shape of {', '.join(ops)} is {' or '.join(forms[n] for n in wanted)}, got {text!r}")
    rows, *hidden, classes = numbers
    return rows, classes, hidden[0] if hidden else None


_SHAPE = re.compile(r"\d+([xX]\d+)+")


def written_shape(rows: int, classes: int, hidden: int | None, between: str = "x") -> str:
    """A shape as ``parse_shape`` reads it, or with something else `between`."""
    return between.join(str(number) for number in (rows, hidden, classes) if number is not None)


def shape_title(hidden: Iterable[int | None]) -> str:
    """What the numbers of the shapes are, of which these are the widths of the inputs."""
    return _SHAPE_TITLES[frozenset(number is not None for number in hidden)]


_SHAPE_TITLES: dict[frozenset[bool], str] = {
    frozenset(): "rows x classes",
    frozenset({False}): "rows x classes",
    frozenset({True}): "rows x hidden x classes",
    frozenset({False, True}): "rows [x hidden] x classes",
}


def parse_vocabulary(text: str) -> int:
    """The number of classes of a model named in ``VOCABULARIES``, or the number itself.

    Raises:
        ValueError: if `text` is neither.
    """
    if text in VOCABULARIES:
        return VOCABULARIES[text]
    if not text.isdigit() or int(text) == 0:
        raise ValueError(f"unknown vocabulary {text!r}; known: {', '.join(VOCABULARIES)}, or a number")
    return int(text)


def words(values: Iterable[str] | None) -> list[str]:
    """The words of an option that may be repeated and may hold commas; each once, or it would be measured twice."""
    return list(dict.fromkeys(word.strip() for value in values or () for word in value.split(",") if word.strip()))


class Size(NamedTuple):
    """A shape and a dtype; with `hidden` of linear ops, without of the others."""

    rows: int
    classes: int
    dtype: str
    hidden: int | None = None

    def fits(self, op: str) -> bool:
        """Whether it is a size of `op`."""
        return (self.hidden is not None) == (op in LINEAR)


_SEEDS: tuple[Size, ...] = tuple(
    Size(4096, classes, dtype) for classes in (8192, 16384) for dtype in ("float16", "bfloat16")
)
_LLM: tuple[Size, ...] = (
    Size(8192, 32000, "bfloat16"),
    Size(8192, 50257, "bfloat16"),
    Size(4096, 128256, "bfloat16"),
    Size(8192, 151936, "bfloat16"),
    Size(4096, 32768, "float32"),
    Size(8192, 128256, "bfloat16", hidden=4096),
    Size(16384, 151936, "bfloat16", hidden=2048),
    Size(8192, 32768, "bfloat16", hidden=2048),
)

PRESETS: dict[str, tuple[Size, ...]] = {
    "seeds": _SEEDS,
    "llm": _LLM,
    "foundation": _SEEDS + _LLM,
    # Small enough for two CPU cores, one of them a width that no vector length divides. In float32, because torch's
    # own mean over half-precision losses on a CPU is off by percents and would leave the rest without a baseline.
    "small": (
        Size(128, 8192, "float32"),
        Size(64, 50257, "float32"),
        Size(128, 8192, "float32", hidden=256),
        Size(64, 50257, "float32", hidden=128),
    ),
    # For trying the command itself.
    "tiny": (Size(16, 1000, "float32"), Size(16, 1000, "float32", hidden=32)),
}
"""Named lists of sizes, of which each op takes those that fit it. The seeds had no linear op."""


def default_preset(device: torch.device) -> str:
    """The preset of a run that names no shapes."""
    return "small" if device.type == "cpu" else "foundation"


def build_cases(
    ops: Sequence[str], sizes: Sequence[Size], options: Options = Options(), dtypes: Sequence[str] = ()
) -> list[Case]:
    """Every op on every size that fits it, with the options that it has; `dtypes` replace the sizes' own, if given.

    Raises:
        ValueError: if an op is unknown, or no size fits it.
    """
    for op in ops:
        if op not in OPS:
            raise ValueError(f"unknown op {op!r}; known: {', '.join(OPS)}")
        if not any(size.fits(op) for size in sizes):
            raise ValueError(f"no size for {op} among {', '.join(_written(size) for size in sizes)}")
    if "causal_lm_loss" in ops and options.reduction == "none":
        raise ValueError("causal_lm_loss is measured with a scalar reduction")
    cases = [
        Case(op, size.rows, size.classes, dtype, options.fitting(op), size.hidden)
        for op in ops
        for size in sizes
        if size.fits(op)
        for dtype in (dtypes or (size.dtype,))
    ]
    return list(dict.fromkeys(cases))


def _written(size: Size) -> str:
    return written_shape(size.rows, size.classes, size.hidden)
