"""What the words of a command line choose: the device, the cases, the files that are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from loss_bench import cases, files
from loss_bench.cases import Case, Options, Size
from loss_bench.inputs import RealInputs

DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda or cuda:N; default: a GPU if there is one.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
BackendOption = Annotated[
    list[str] | None,
    typer.Option(
        "--backend", "-b", help="Backends to compare, repeated or with commas; default: all. See loss-bench list."
    ),
]
OpsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[OP]...",
        help=f"{', '.join(cases.OPS)}, or all; default: cross_entropy, or the ops of --preset seeds.",
    ),
]
ShapeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        "-s",
        help="ROWSxCLASSES, for linear_cross_entropy ROWSxHIDDENxCLASSES; repeated or with commas.",
    ),
]
VocabOption = Annotated[
    list[str] | None,
    typer.Option("--vocab", help=f"Classes, as numbers or models: {', '.join(cases.VOCABULARIES)}."),
]
RowsOption = Annotated[
    list[str] | None, typer.Option("--rows", help="Rows to combine with --vocab; default 4096 (64 on a CPU).")
]
HiddenOption = Annotated[
    list[str] | None,
    typer.Option(
        "--hidden",
        help="Widths of the input of linear_cross_entropy to combine with --vocab; default 4096 (256 on a CPU).",
    ),
]
DtypeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype",
        "-d",
        help="float16, bfloat16, float32 or fp16, bf16, fp32; default: bfloat16 (float32 on a CPU), or the preset's.",
    ),
]
PresetOption = Annotated[
    str | None,
    typer.Option(
        "--preset",
        help=f"Shapes and dtypes: {', '.join(cases.PRESETS)}; default: foundation (small on a CPU). "
        "seeds and llm together are foundation.",
    ),
]
ReductionOption = Annotated[str, typer.Option(help=f"{', '.join(cases.REDUCTIONS)}.")]
SmoothingOption = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Share of the target's weight that is spread over all classes.")
]
ZLossOption = Annotated[
    float, typer.Option(min=0.0, help="Weight of the squared log-sum-exp that is added to each row's loss.")
]
SoftcapOption = Annotated[
    float | None, typer.Option(help="Cap c of the logits, which become c * tanh(logits / c); positive.")
]
WeightOption = Annotated[bool, typer.Option("--weight", help="Random class weights.")]
BiasOption = Annotated[bool, typer.Option("--bias", help="Random bias of the logits; linear_cross_entropy alone.")]
InplaceOption = Annotated[
    bool, typer.Option("--inplace", help="Let the gradient take the logits' memory; not for linear_cross_entropy.")
]
JobsOption = Annotated[
    int | None,
    typer.Option("--jobs", "-j", min=1, help="Processes at once; default: half the cores, 8 at most."),
]
TimeLimitOption = Annotated[
    float, typer.Option("--time-limit", min=1.0, help="Seconds after which a silent backend is given up.")
]
InProcessOption = Annotated[
    bool, typer.Option("--in-process", help="No worker process: starts faster, but a crash ends everything.")
]
ResumeOption = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        help="JSON of an interrupted run: what is finished there is taken over, the rest follows.",
        exists=True,
        dir_okay=False,
    ),
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Write the results as JSON (schema loss-bench/1), for report and compare.")
]
MarkdownOption = Annotated[Path | None, typer.Option("--markdown", help="Write the tables as Markdown.")]


def choose_device(name: str | None) -> torch.device:
    """The device of that name, or the one to use without a name.

    Nothing here opens a context on the GPU: a worker process does, and may lose it.

    Raises:
        ValueError: if it is not here, or nothing here can be timed on it.
    """
    if name is None:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"no device is called {name!r}; cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"no clock for {device.type!r} devices here; cpu or cuda")
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise ValueError(f"{name!r} is not here: {count} CUDA devices are available")
    return torch.device("cuda", device.index or 0)


def check_choice(what: str, value: str, known: Sequence[str]) -> None:
    """Raise for a `value` that is not `known`.

    Raises:
        ValueError: naming what it could be.
    """
    if value not in known:
        raise ValueError(f"unknown {what} {value!r}; known: {', '.join(known)}")


def check_writable(*paths: Path | None, replaced: Path | None = None) -> None:
    """Make the folders of the files that a command will write, before it spends its time; `replaced` it removes first.

    Raises:
        ValueError: if one of them cannot be written.
    """
    checks = [(files.check, path) for path in paths] + [(files.check_replaceable, replaced)]
    for check, path in checks:
        try:
            if path is not None:
                check(path)
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}") from error


@dataclass(frozen=True)
class SizeWords:
    """The options that name sizes, as they were given."""

    shape: list[str] | None = None
    vocab: list[str] | None = None
    rows: list[str] | None = None
    hidden: list[str] | None = None
    dtype: list[str] | None = None
    preset: str | None = None


def choose_cases(
    device: torch.device, ops: list[str] | None, words: SizeWords, options: Options, real: RealInputs | None = None
) -> list[Case]:
    """Every op on every size, with the options.

    Raises:
        ValueError: if a word is unknown, or one says what another one makes void.
    """
    names, every = _ops(ops, words.preset)
    _check_options(options, names)
    sizes = _real_size(real, words) if real is not None else _sizes(device, words, names)
    if every:
        names = [op for op in names if any(size.fits(op) for size in sizes)]
    return cases.build_cases(names, sizes, options, [cases.parse_dtype(name) for name in cases.words(words.dtype)])


def _ops(names: list[str] | None, preset: str | None) -> tuple[list[str], bool]:
    """The ops, and whether that is to be all that the sizes fit."""
    # The seeds' tables are of all that they had.
    chosen = cases.words(names) or (["all"] if preset == "seeds" else ["cross_entropy"])
    if "all" not in chosen:
        return chosen, False
    return [op for op in cases.OPS if preset != "seeds" or op != "causal_lm_loss"], True


def _check_options(options: Options, names: Sequence[str]) -> None:
    """Raise for options that none of the ops `names` has."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name in options.given:
        able = cases.ops_with(name)
        if not set(able) & set(names):
            found.setdefault(able, []).append(f"{name}={getattr(options, name)}")
    if found:
        words = "; ".join(f"{' '.join(given)} is for {', '.join(able)}" for able, given in found.items())
        raise ValueError(f"{words}, not for {', '.join(names)}")


def _real_size(real: RealInputs, words: SizeWords) -> list[Size]:
    void = [f"--{name}" for name in ("shape", "vocab", "rows", "hidden", "preset") if getattr(words, name)]
    if void:
        raise ValueError(f"--logits brings a shape of its own; leave out {', '.join(void)}")
    rows, classes = real.logits.shape
    return [Size(rows, classes, cases.parse_dtype(str(real.logits.dtype).removeprefix("torch.")))]


def _sizes(device: torch.device, words: SizeWords, ops: Sequence[str]) -> list[Size]:
    """The sizes that the options name, those of the preset if there are none."""
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    shapes = [cases.parse_shape(text, ops) for text in cases.words(words.shape)]
    sizes = [Size(rows, classes, dtype, hidden) for rows, classes, hidden in shapes]
    sizes += [Size(rows, classes, dtype, hidden) for rows, classes, hidden in _swept(device, words, ops)]
    if words.preset is not None:
        check_choice("preset", words.preset, tuple(cases.PRESETS))
        sizes += cases.PRESETS[words.preset]
    return sizes or list(cases.PRESETS[cases.default_preset(device)])


def _swept(device: torch.device, words: SizeWords, ops: Sequence[str]) -> list[tuple[int, int, int | None]]:
    """Rows, classes and hidden of ``--vocab`` with ``--rows`` and ``--hidden``."""
    vocabularies = [cases.parse_vocabulary(text) for text in cases.words(words.vocab)]
    linear = [op for op in ops if op in cases.LINEAR]
    for name in ("rows", "hidden"):
        if getattr(words, name) and not vocabularies:
            raise ValueError(f"--{name} goes with --vocab; with --shape it is part of the shape")
    if words.hidden and not linear:
        raise ValueError(f"--hidden is for {', '.join(cases.LINEAR)}, not for {', '.join(ops)}")
    rows = [_positive("rows", text) for text in cases.words(words.rows)] or [64 if device.type == "cpu" else 4096]
    widths = [_positive("hidden", text) for text in cases.words(words.hidden)]
    widths = widths or [256 if device.type == "cpu" else 4096]
    hidden: list[int | None] = [None] if len(linear) < len(ops) else []
    hidden += widths if linear else []
    return [(count, classes, width) for classes in vocabularies for count in rows for width in hidden]


def _positive(what: str, text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise ValueError(f"{what} must be a positive number, got {text!r}")
    return int(text)
