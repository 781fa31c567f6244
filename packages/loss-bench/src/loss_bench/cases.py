"""What is measured: cases, passes, presets, and the fewest bytes that a pass has to move."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

OPS = ("cross_entropy", "causal_lm_loss", "softmax", "log_softmax")
"""The ops that can be measured."""

LOSSES = ("cross_entropy", "causal_lm_loss")
"""Those that take targets, and loss options."""

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

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"unknown reduction {self.reduction!r}; known: {', '.join(REDUCTIONS)}")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap must be positive, got {self.softcap}")

    def describe(self) -> str:
        """The options that differ from the defaults, as ``name=value`` words."""
        default = Options()
        pairs = ((name, getattr(self, name)) for name in self.__dataclass_fields__)
        return " ".join(f"{name}={value}" for name, value in pairs if value != getattr(default, name))


@dataclass(frozen=True)
class Case:
    """One op on one shape and dtype."""

    op: str
    rows: int
    classes: int
    dtype: str
    options: Options = Options()

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        return DTYPES[self.dtype]

    @property
    def shape(self) -> str:
        """The shape as it is written on the command line."""
        return f"{self.rows}x{self.classes}"

    @property
    def is_loss(self) -> bool:
        """Whether the op takes targets."""
        return self.op in LOSSES

    @property
    def backend_op(self) -> str:
        """The op that a backend has to provide."""
        return "cross_entropy" if self.is_loss else self.op

    @property
    def logits_shape(self) -> tuple[int, ...]:
        """The shape of the logits: a causal loss has a dimension of sequences, one of them, before the others."""
        return (1, self.rows, self.classes) if self.op == "causal_lm_loss" else (self.rows, self.classes)

    @property
    def logits_bytes(self) -> int:
        """Bytes of one copy of the logits."""
        return self.rows * self.classes * self.torch_dtype.itemsize

    def __str__(self) -> str:
        return " ".join(filter(None, (self.op, self.shape, self.dtype, self.options.describe())))


def minimal_bytes(case: Case, pass_: str) -> int | None:
    """The fewest bytes that `pass_` moves through memory: each input read once, each result written once.

    A cross-entropy may form its gradient in either half, so the forward half is held to one read of the logits
    and the backward half to nothing at all: for it the answer is None, and only the sum of both is compared with
    the memory's bandwidth (one read, one write). Softmax reads and writes in the forward pass (2) and reads the
    output and its gradient and writes one in the backward pass (3).
    """
    if case.is_loss:
        targets = case.rows * torch.int64.itemsize
        passes = {"forward": 1, "no-grad": 1, "forward+backward": 2}.get(pass_)
        return None if passes is None else passes * case.logits_bytes + targets
    return {"forward": 2, "no-grad": 2, "backward": 3, "forward+backward": 5}[pass_] * case.logits_bytes


def parse_dtype(text: str) -> str:
    """The full name of a dtype, from it or a usual short form.

    Raises:
        ValueError: if there is no such dtype here.
    """
    name = _DTYPE_ALIASES.get(text, text)
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {text!r}; known: {', '.join([*DTYPES, *_DTYPE_ALIASES])}")
    return name


def parse_shape(text: str) -> tuple[int, int]:
    """``"4096x32000"`` as (4096, 32000).

    Raises:
        ValueError: if `text` is not two positive numbers with an x between.
    """
    match = re.fullmatch(r"(\d+)[xX](\d+)", text.strip())
    if match is None or "0" in (match[1].lstrip("0") or "0", match[2].lstrip("0") or "0"):
        raise ValueError(f"a shape is ROWSxCLASSES, such as 4096x32000, got {text!r}")
    return int(match[1]), int(match[2])


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
    """The words of an option that may be repeated and may hold commas."""
    return [word.strip() for value in values or () for word in value.split(",") if word.strip()]


Size = tuple[int, int, str]

_SEEDS: tuple[Size, ...] = tuple(
    (4096, classes, dtype) for classes in (8192, 16384) for dtype in ("float16", "bfloat16")
)
_LLM: tuple[Size, ...] = (
    (8192, 32000, "bfloat16"),
    (8192, 50257, "bfloat16"),
    (4096, 128256, "bfloat16"),
    (8192, 151936, "bfloat16"),
    (4096, 32768, "float32"),
)

PRESETS: dict[str, tuple[Size, ...]] = {
    "seeds": _SEEDS,
    "llm": _LLM,
    "foundation": _SEEDS + _LLM,
    # Small enough for two CPU cores, one of them a width that no vector length divides. In float32, because torch's
    # own mean over half-precision losses on a CPU is off by percents and would leave the rest without a baseline.
    "small": ((128, 8192, "float32"), (64, 50257, "float32")),
    # For trying the command itself.
    "tiny": ((16, 1000, "float32"),),
}
"""Named lists of (rows, classes, dtype)."""


def default_preset(device: torch.device) -> str:
    """The preset of a run that names no shapes."""
    return "small" if device.type == "cpu" else "foundation"


def build_cases(
    ops: Sequence[str], sizes: Iterable[Size], options: Options = Options(), dtypes: Sequence[str] = ()
) -> list[Case]:
    """Every op on every size; `dtypes`, if given, replaces the sizes' own.

    Raises:
        ValueError: if an op is unknown.
    """
    for op in ops:
        if op not in OPS:
            raise ValueError(f"unknown op {op!r}; known: {', '.join(OPS)}")
    if "causal_lm_loss" in ops and options.reduction == "none":
        raise ValueError("causal_lm_loss is measured with a scalar reduction")
    cases = [
        Case(op, rows, classes, dtype, options if op in LOSSES else Options(logits=options.logits))
        for op in ops
        for rows, classes, own in sizes
        for dtype in (dtypes or (own,))
    ]
    return list(dict.fromkeys(cases))
