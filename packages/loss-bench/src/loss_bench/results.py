"""The rows of a run and their JSON form, schema ``loss-bench/1``.

A file holds one object::

    schema        "loss-bench/1"
    created       ISO 8601 time, UTC
    command       the words of the command line
    environment   device, versions (see ``environment``)
    settings      iterations, warm-up, seed and whatever else shaped the run
    ceilings      {"copy_gb_s": GB/s of a copy in device memory, read plus write; on a GPU
                  "matmul_tflop_s": rate of an 8192-cubed bf16 matrix product}
    backends      [{"name", "distribution", "version", "ops", "available", "reason"}]
    rows          [the fields of ``Row``]
    train         [the fields of ``train.Curve``], empty but for ``loss-bench train``
    accuracy      [the fields of ``accuracy.Accuracy``], empty but for ``loss-bench accuracy``
    sources       [{"environment", "settings", "ceilings", "command", "created"}] of the files that were merged into
                  this one, or of a resumed run and those that it goes on from, empty otherwise; the fields of the same
                  names above are then those of the first

The rows of a linear op are told apart by ``hidden`` too. Units are part of the names. A number that does not exist is
null. Readers ignore fields that they do not know; a change that would mislead such a reader raises the number in
``schema``. The same in the form of a JSON Schema is ``schema.json`` beside this module, which ``loss-bench schema``
prints.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from loss_bench import files
from loss_bench.calls import installed_version
from loss_bench.cases import LINEAR, Case, written_shape

SCHEMA = "loss-bench/1"

STATUSES = ("ok", "wrong", "unsupported", "unavailable", "error", "crashed", "timeout")
"""``ok`` was timed. ``wrong``: its result is not that of float64, so it was not. ``unsupported``: the backend does not
do this case. ``unavailable``: the backend cannot run here. ``error``: it raised something else. ``crashed``: it took
its process, or the context on the GPU, with it. ``timeout``: it did not come back."""

_BUSY_GPU, _BUSY_HOST = 0.05, 0.25
_MOMENT_S = 0.2

OUT_OF_MEMORY, INPUTS_TOO_LARGE = "out of memory", "the inputs do not fit into the device's memory"
"""The reasons of those who are ``unsupported`` for want of memory."""

CURVE_KEY = ("device", "setup", "backend")
ERROR_KEY = ("device", "op", "rows", "classes", "dtype", "kind", "backend")
"""What is one curve, and one backend's errors, whenever they are found."""

_OF_A_RUN = ("environment", "settings", "ceilings", "command", "created")

FAILURES = ("wrong", "error", "crashed", "timeout")
"""The statuses that set the exit status of the command."""


@dataclass
class Row:
    """One pass of one backend on one case.

    Attributes:
        op, rows, classes, dtype, options, pass_: the case; ``pass`` in JSON. Of a linear op ``hidden`` too.
        backend, distribution, version: who ran it.
        device: name of the device.
        status, reason: see ``STATUSES``.
        note: what a reader has to know about the number, such as that the logits are overwritten.
        median_ms, p20_ms, p80_ms: of the samples.
        low_ms, high_ms: 95% interval of the median; null where there are too few samples for one.
        samples: how many.
        gb_s: the pass's fewest bytes over the median.
        copy_share: that as a share of the copy bandwidth of the same process.
        graph_ms, graph_share: median of the pass replayed as a CUDA graph, and its share of the copy bandwidth;
            forward+backward and no-grad only, and null where it cannot be captured.
        tflop_s: of a linear op, the operations of the pass's matrix products over the median, in 10**12 a second.
        matmul_share, graph_matmul_share: the rate of the median, and of the CUDA graph, as a share of that of a square
            matrix product in the same dtype and process.
        host_us, host_least_us: host time of one call at a tiny size, the median and the least over batches of calls.
        peak_mib: memory beyond the inputs, gradients included.
        speedup: the baseline's median over this one.
        loss_error, grad_error: relative to float64.
        interrupted: whether the run ended before the other passes of the case and the look at the clocks after them.
        hidden: width of a linear op's input, whose shape is rows x hidden x classes; None for the other ops.
    """

    op: str
    rows: int
    classes: int
    dtype: str
    options: str
    pass_: str
    backend: str
    distribution: str
    version: str
    device: str
    status: str = "ok"
    reason: str = ""
    note: str = ""
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    samples: int = 0
    gb_s: float | None = None
    copy_share: float | None = None
    graph_ms: float | None = None
    graph_share: float | None = None
    host_us: float | None = None
    host_least_us: float | None = None
    peak_mib: float | None = None
    speedup: float | None = None
    loss_error: float | None = None
    grad_error: float | None = None
    interrupted: bool = False
    hidden: int | None = None
    tflop_s: float | None = None
    matmul_share: float | None = None
    graph_matmul_share: float | None = None

    @property
    def case_key(self) -> tuple[object, ...]:
        """What rows of the same case share."""
        return (self.op, self.rows, self.hidden, self.classes, self.dtype, self.options)

    @property
    def key(self) -> tuple[object, ...]:
        """What is one measurement, whenever it is made."""
        return (*self.case_key, self.pass_, self.backend, self.device)

    @property
    def shape(self) -> str:
        """As it is written on the command line."""
        return written_shape(self.rows, self.classes, self.hidden)

    @property
    def limit_share(self) -> float | None:
        """How near the median comes to what bounds the op: the bandwidth of a copy, or the rate of a matrix product."""
        return self.matmul_share if self.op in LINEAR else self.copy_share

    def add_note(self, text: str) -> None:
        """Append to ``note``."""
        self.note = f"{self.note}; {text}" if self.note else text

    def to_json(self) -> dict[str, Any]:
        """The row as a JSON object; NaN and infinity, which JSON lacks, become null."""
        pairs = asdict(self)
        pairs["pass"] = pairs.pop("pass_")
        return finite(pairs)

    @classmethod
    def from_json(cls, pairs: dict[str, Any]) -> Row:
        """The row of a JSON object; fields that are not known here are left out."""
        return from_pairs(cls, {("pass_" if name == "pass" else name): value for name, value in pairs.items()})


class _WithStatus(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]
    status: str


Found = TypeVar("Found", bound=_WithStatus)


def from_pairs(kind: type[Found], pairs: dict[str, Any]) -> Found:
    """A row, a curve or errors of a JSON object's `pairs`; those that are not known here are left out.

    Raises:
        TypeError: for a field that holds something else than it should, naming both.
    """
    known = {place.name for place in fields(kind)}
    found = kind(**{name: value for name, value in pairs.items() if name in known})
    for place in fields(kind):
        _check_kind(place.name, getattr(found, place.name), *_FIELD_KINDS[place.type])
    if found.status not in STATUSES:
        raise TypeError(f"status must be one of {', '.join(STATUSES)}, got {found.status!r}")
    return found


def finite(pairs: Mapping[str, Any]) -> dict[str, Any]:
    """The `pairs`, null for NaN and infinity, which JSON lacks."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in pairs.items()}


@dataclass
class Report:
    """All that a run found; see this module's docstring."""

    environment: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)
    backends: list[dict[str, Any]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    train: list[dict[str, Any]] = field(default_factory=list)
    accuracy: list[dict[str, Any]] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    created: str = field(
        default_factory=lambda: datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    )
    sources: list[dict[str, Any]] = field(default_factory=list)

    @property
    def all_sources(self) -> list[dict[str, Any]]:
        """``sources``, this report's own run in front of them if it is none of them."""
        own = {name: getattr(self, name) for name in _OF_A_RUN}
        return self.sources if own in self.sources else [own, *self.sources]

    @property
    def presets(self) -> set[str]:
        """The presets that the rows come from."""
        return {preset for source in self.all_sources if (preset := source["settings"].get("preset"))}

    @property
    def devices(self) -> list[str]:
        """The devices that its numbers come from."""
        named = [source["environment"].get("device", "") for source in self.all_sources]
        return list(dict.fromkeys([*named, *(row.device for row in self.rows)]))

    @property
    def has_wrong(self) -> bool:
        """Whether a result was wrong, or a backend broke on a case that it had accepted."""
        statuses = [row.status for row in self.rows] + [found["status"] for found in self.train + self.accuracy]
        return not set(FAILURES).isdisjoint(statuses)

    def check_device(self, device: str) -> None:
        """Raise unless some of its numbers are of `device`, so that others of it can join them.

        Raises:
            ValueError: naming both.
        """
        if device not in self.devices:
            raise ValueError(f"the earlier run is of {', '.join(self.devices)}, this one of {device}")

    def settings_with(self, field_name: str) -> list[dict[str, Any]]:
        """The settings of those of its runs that have this one, which tells the commands apart."""
        return [source["settings"] for source in self.all_sources if field_name in source["settings"]]

    def check_seed(self, field_name: str, seed: int, what: str) -> None:
        """Raise if `what` its runs with this setting found is of inputs of another seed.

        Raises:
            ValueError: naming both.
        """
        for settings in self.settings_with(field_name):
            if settings.get("seed") != seed:
                raise ValueError(f"the earlier {what} are of seed {settings.get('seed')}, these of seed {seed}")

    def take_over(self, earlier: Report) -> None:
        """Keep what `earlier` holds beside its rows: curves, errors, backends, and what its numbers come from."""
        self.train, self.accuracy = list(earlier.train), list(earlier.accuracy)
        self.backends = _last_of_each([*earlier.backends, *self.backends], ("name",))
        self.sources = earlier.all_sources

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        pairs = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "rows"}
        pairs |= _published({name: pairs[name] for name in _OF_A_RUN})
        pairs["sources"] = [_published(source) for source in self.all_sources] if self.sources else []
        return {"schema": SCHEMA, **pairs, "rows": [row.to_json() for row in self.rows]}

    def write(self, path: Path) -> None:
        """Write the report as JSON, whole or not at all."""
        files.write(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")


def _published(run: Mapping[str, Any]) -> dict[str, Any]:
    # Results are published; where a file lay on the machine is nobody's business and makes runs look different.
    command = [_without_folder(word) for word in run["command"]]
    settings = {name: _without_folder(value) for name, value in run["settings"].items()}
    return {**run, "command": command, "settings": settings}


def _without_folder(value: Any) -> Any:
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def schema_text() -> str:
    """The JSON Schema of the files."""
    return (resources.files("loss_bench") / "schema.json").read_text(encoding="utf-8")


def read_report(path: Path) -> Report:
    """Read a report.

    Raises:
        ValueError: if the file is not one, or is of a schema that is not known here.
    """
    try:
        pairs = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    schema = pairs.get("schema") if isinstance(pairs, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{path} is of schema {schema!r}; this version reads {SCHEMA!r}")
    known = {f.name for f in fields(Report)} - {"rows"}
    # They import this module.
    from loss_bench.accuracy import Accuracy
    from loss_bench.train import Curve

    try:
        for name, kind in _KINDS.items():
            _check_kind(name, pairs.get(name, kind()), kind)
        rows = [Row.from_json(row) for row in pairs["rows"]]
        report = Report(rows=rows, **{name: value for name, value in pairs.items() if name in known})
        _name_the_device(report)
        report.accuracy = [Accuracy.from_json(errors).to_json() for errors in report.accuracy]
        report.train = [Curve.from_json(curve).to_json() for curve in report.train]
        _check_parts(report)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} does not follow {SCHEMA!r}: {type(error).__name__}: {error}") from error
    return report


_KINDS: dict[str, type] = {
    "environment": dict, "settings": dict, "ceilings": dict, "backends": list, "rows": list, "train": list,
    "accuracy": list, "command": list, "sources": list,
}  # fmt: skip

# Of a source and of a backend, as far as they are read.
_SOURCE_KINDS: dict[str, type] = {name: _KINDS.get(name, str) for name in _OF_A_RUN}
_BACKEND_KINDS: dict[str, type] = {"name": str, "version": str}

# By the annotations of ``Row``, ``Accuracy`` and ``Curve``.
_FIELD_KINDS: dict[object, tuple[type, ...]] = {
    "str": (str,), "int": (int,), "bool": (bool,), "float | None": (float, int, type(None)),
    "int | None": (int, type(None)), "list[float]": (list,),
}  # fmt: skip


def _check_kind(name: str, value: object, *kinds: type) -> None:
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be {' or '.join(kind.__name__ for kind in kinds)}, got {value!r}")


def _check_parts(report: Report) -> None:
    for parts, kinds in ((report.sources, _SOURCE_KINDS), (report.backends, _BACKEND_KINDS)):
        for part in parts:
            for name, kind in kinds.items():
                _check_kind(name, part[name], kind)


def _name_the_device(report: Report) -> None:
    """Give curves and errors what files written before they named it lack."""
    for found in report.train + report.accuracy:
        found.setdefault("device", report.environment["device"])
    for curve in report.train:
        if "setup" not in curve:
            curve["setup"] = training_setup(report.settings)


def training_setup(size: Mapping[str, Any]) -> str:
    """What was trained, in words, from the fields of ``train.Size``."""
    return (
        f"{size['steps']} steps of {size['batch']} x {size['context']} tokens, vocabulary {size['vocabulary']}, "
        f"{size['layers']} layers of width {size['width']}, {size['dtype']}"
    )


def merge(reports: Sequence[Report]) -> Report:
    """One report of several; of a measurement that more than one of them holds, the last is kept.

    What is said about a whole run is that of the first; that of all of them is in ``sources``.

    Raises:
        ValueError: without reports.
    """
    if not reports:
        raise ValueError("no reports to merge")
    first, *rest = reports
    if not rest:
        return first
    return replace(
        first,
        rows=list({row.key: row for found in reports for row in found.rows}.values()),
        backends=_last_of_each([pairs for found in reports for pairs in found.backends], ("name",)),
        train=_last_of_each([curve for found in reports for curve in found.train], CURVE_KEY),
        accuracy=_last_of_each([error for found in reports for error in found.accuracy], ERROR_KEY),
        sources=[source for found in reports for source in found.all_sources],
    )


def with_others(
    found: Sequence[dict[str, Any]], earlier: Sequence[dict[str, Any]], names: Sequence[str]
) -> list[dict[str, Any]]:
    """`found`, and behind it those of `earlier` that agree with none of it in all `names`."""
    keys = {tuple(pairs[name] for name in names) for pairs in found}
    return [*found, *(pairs for pairs in earlier if tuple(pairs[name] for name in names) not in keys)]


def _last_of_each(found: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Of those that agree in all `names` the last."""
    return list({tuple(pairs[name] for name in names): pairs for pairs in found}.values())


def environment(device: torch.device) -> dict[str, Any]:
    """The machine and the versions, as far as they shape the numbers."""
    packages = ("loss-core", "loss-triton", "loss-cutedsl", "loss-bench", "triton", "nvidia-cutlass-dsl")
    versions = {name: installed_version(name) for name in packages}
    found: dict[str, Any] = {
        "device": device_name(device),
        "device_type": device.type,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        **_processor_state(),
        "packages": {name: found for name, found in versions.items() if found},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "cuda": torch.version.cuda,
            **_driver_state(properties),
            "capability": f"{properties.major}.{properties.minor}",
            "memory_mib": properties.total_memory >> 20,
            "multiprocessors": properties.multi_processor_count,
        }
    return found


def _driver_state(properties: Any) -> dict[str, Any]:
    """The driver's version, and what the GPU was doing before the run, as far as nvidia-smi is there to tell."""
    query = "driver_version,utilization.gpu,clocks.sm,clocks.max.sm,temperature.gpu,power.draw"
    words = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "-i", f"GPU-{properties.uuid}"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
        driver, busy, clock, most, degrees, watts = (word.strip() for word in done.stdout.split(","))
    except (OSError, subprocess.SubprocessError, ValueError, AttributeError):
        return {}
    state = f"{busy}% busy, SM {clock} of {most} MHz, {degrees} C, {watts} W"
    return {"driver": driver, "state_before": state, **({"busy_before": int(busy) / 100} if busy.isdigit() else {})}


def _processor_state() -> dict[str, float]:
    """The share of the processors that others take, over a moment in which this process does nothing; Linux only."""
    try:
        before = _processor_ticks()
        time.sleep(_MOMENT_S)
        total, idle = (after - first for after, first in zip(_processor_ticks(), before, strict=True))
    except (OSError, ValueError):
        return {}
    return {"processors_busy_before": round(1 - idle / total, 2)} if total else {}


def _processor_ticks() -> tuple[int, int]:
    """Ticks of all processors since the start of the system, and how many of them were idle."""
    with Path("/proc/stat").open(encoding="utf-8") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return sum(ticks), ticks[3] + ticks[4]


def doubts(environment: Mapping[str, Any]) -> list[str]:
    """Why the times of a run in this environment are not safe."""
    found = []
    if (busy := environment.get("busy_before", 0.0)) > _BUSY_GPU:
        found.append(f"the GPU was {busy:.0%} busy before the run: somebody else is on it")
    if (busy := environment.get("processors_busy_before", 0.0)) > _BUSY_HOST:
        what = "host times" if environment.get("device_type") == "cuda" else "all times"
        found.append(f"the processors were {busy:.0%} busy before the run: {what} may be too long")
    return found


def device_name(device: torch.device) -> str:
    """The device's own name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpu_name() or platform.processor() or "CPU"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, 'CPU')}, {os.cpu_count()} cores"


def add_speedups(rows: Sequence[Row], baseline: str) -> None:
    """Fill ``speedup`` with the median of `baseline` on the same case and pass over each row's own."""
    medians = {
        (*row.case_key, row.pass_, row.device): row.median_ms
        for row in rows
        if row.backend == baseline and row.median_ms
    }
    for row in rows:
        base = medians.get((*row.case_key, row.pass_, row.device))
        row.speedup = base / row.median_ms if base and row.median_ms else None


def new_row(case: Case, pass_: str, backend: Any, device: str) -> Row:
    """A row for `case` and `pass_` on `backend` (a ``calls.BackendRow``) without numbers."""
    return Row(
        case.op,
        case.rows,
        case.classes,
        case.dtype,
        case.options.describe(),
        pass_,
        backend.name,
        backend.distribution,
        backend.version,
        device,
        hidden=case.hidden,
    )
